#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# engines_share.sh with engines that compute on a GPU: each way of exporting its memory, granules of a
# pool of its own, and, where there are two GPUs, a daemon that owns both and engines on the second.
# Exit 77 without a GPU.
set -eu

build=${1:?usage: $0 BUILD_FOLDER}
here=$(dirname "$0")
n_gpus=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU' || true)

if [ "$n_gpus" -eq 0 ]; then
	echo "skipped: no GPU"
	exit 77
fi

# share GPU DAEMON_ARGUMENTS
share()
{
	echo "--- kvcached $2, engines on device $1"
	KV_TEST_DEVICE=cuda KV_TEST_GPU=$1 KV_TEST_MEMORY=$2 bash "$here/engines_share.sh" "$build"
}

for kind in vmm ipc; do
	share 0 "--gpus 0 --reserve 4G --export $kind"
done
share 0 "--gpus 0 --reserve 4G --isolate"
if [ "$n_gpus" -ge 2 ]; then
	for kind in vmm ipc; do
		share 1 "--gpus 0,1 --reserve 4G --export $kind"
	done
fi
