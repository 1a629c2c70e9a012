#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The examples in C, twice each: the second finds what the first has left. Each checks its own tokens.
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

example=$build/tools/examples/example_
command_deadline=100

for name in hand_over sample_many shared_prompt two_models; do
	expect 1 "$example$name"
	expect_err "kvcached.sock"
done
expect 2 "${example}share"
expect_err '^[a-z_]*: usage: share TEXT'
daemon_start --host 256M
for _ in 1 2; do
	expect 0 "${example}hand_over"
	expect_out '^the same blocks, and the tokens that are written without a cache$'
	expect 0 "${example}sample_many"
	expect_out '^8 sequences of 57 tokens hold 4 blocks between them$'
	expect_out 'blocks were copied when they began to differ; all samples are right$'
	expect 0 "${example}shared_prompt"
	expect_out '^both wrote what they write without a cache$'
	expect 0 "${example}two_models"
	expect_out "and the daemon's books balance$"
	expect 0 "$kvctl" check
done
expect 0 "$kvctl" --json session list
[ "$(tr -d ' \n' < "$dir/out")" = "[]" ] || fail "an example is still attached"
daemon_stop
