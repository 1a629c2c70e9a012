#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The Python package on a GPU: views, kernels, graphs, and the families of transformers against the
# framework's own cache. The package is the source tree's, the library the build folder's.
#
#	tests/integration/python_gpu.sh BUILD_FOLDER [PYTEST_ARGUMENT...]
#
# $PYTHON: an interpreter with torch, transformers, cffi and pytest. Exit 77 without them or a GPU.
set -eu

build=$(realpath "${1:?usage: $0 BUILD_FOLDER [PYTEST_ARGUMENT...]}")
shift
source=$(realpath "$(dirname "$0")/../..")
python=${PYTHON:-python3}
if ! why=$("$python" -c '
import cffi, numpy, pycparser, pytest, torch, transformers
assert torch.cuda.is_available(), "no GPU"' 2>&1); then
	echo "skipped: $(tail -n 1 <<< "$why")"
	exit 77
fi

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cp -r "$source/libclient/python/kvclient" "$dir/kvclient"
"$python" "$source/libclient/python/build_abi.py" "$source/include" "$dir/kvclient/_abi.py"
export PYTHONPATH=$dir${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
export KVCLIENT_LIBRARY=$build/libclient/libkvclient.so.0
export KVCACHED_BIN=$build/daemon/kvcached KVCTL_BIN=$build/tools/kvctl
"$python" -m pytest -q -s -p no:cacheprovider --device cuda --rootdir "$source/tests/python" \
	"$source/tests/python/test_cuda.py" "$source/tests/python/test_transformers.py" "$@"
