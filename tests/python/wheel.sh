#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The Python package as users get it: a wheel is built from the source, installed into a clean
# environment, and there the tests and the examples run. Other packages that they use are .venv's.
#
# usage: wheel.sh BUILD_FOLDER SOURCE_FOLDER
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

source=$(realpath "$2")
base=$source/.venv/bin/python
[ -x "$base" ] || skip "there is no .venv (tools/setup --python makes it)"
for module in cffi numpy pip pytest setuptools wheel; do
	"$base" -c "import $module" 2> "$dir/err" || skip "$(tail -n 1 "$dir/err")"
done
unset PYTHONPATH KVCLIENT_LIBRARY
export PYTHONDONTWRITEBYTECODE=1 OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1

cp -r "$source/libclient/python" "$dir/source"
rm -f "$dir/source/kvclient/_abi.py"
expect 0 env KVCLIENT_INCLUDE="$source/include" KVCLIENT_BUNDLE="$build/libclient/libkvclient.so.0" \
	"$base" -m pip --disable-pip-version-check wheel --quiet --no-index --no-deps \
	--no-build-isolation --wheel-dir "$dir/wheels" "$dir/source"
expect 0 "$base" -m venv --without-pip "$dir/venv"
python=$dir/venv/bin/python
expect 1 "$python" -c 'import kvclient'
expect 0 "$base" -m pip --disable-pip-version-check --python "$python" install --quiet --no-index \
	--no-deps "$dir"/wheels/kvclient-*.whl
"$base" -c 'import sys
print(*[f"import site; site.addsitedir({path!r})" for path in sys.path if path.endswith("-packages")], sep="\n")' \
	> "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
expect 0 "$python" -c 'import kvclient; print(kvclient.__file__)'
expect_out "^$dir/venv/"

export KVCACHED_BIN=$build/daemon/kvcached KVCTL_BIN=$kvctl
command_deadline=600
expect 0 "$python" -m pytest -q -p no:cacheprovider --rootdir "$source/tests/python" \
	"$source/tests/python"
tail -n 1 "$dir/out"

daemon_start --host 256M
for example in "$source"/tools/examples/*_*.py; do
	expect 0 "$python" "$example"
	say "$(basename "$example"): $(tail -n 1 "$dir/out")"
	expect 0 "$kvctl" check
done
daemon_stop
