#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# kvcached --pool on a GPU, whose memory is zeroed before pools are made: they are there when the
# first client is answered. Each way of exporting. Exit 77 without a GPU.
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

models=$(dirname "$0")/../models
nvidia-smi -L 2> /dev/null | grep -q '^GPU' || skip "no GPU"

for kind in vmm ipc; do
	say "export $kind"
	daemon_start --gpus 0 --reserve 4G --export $kind \
		--pool "llama=$models/llama-3-8b.json,min=1G,block-size=16" \
		--pool "hybrid=$models/nemotron-h-8b.json,min=1G,context=4096"
	expect 0 "$kvctl" pool show llama
	expect_out '^block_bytes +2.0 MiB'
	expect 0 "$kvctl" pool show hybrid.blocks
	expect 0 "$kvctl" pool show hybrid.state
	expect 0 "$kvctl" check
	expect_out 'in 3 pools: books balance$'
	daemon_stop
done
