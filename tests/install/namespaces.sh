#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Daemon and engines as in containers: each in PID, IPC, network, mount and host name namespaces of its own, with
# nothing in common but a folder. They share, and an engine's death is seen.
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

holder=$build/tests/support/holder
inside=(unshare --user --map-root-user --pid --ipc --net --mount --uts --fork --kill-child --mount-proc)
[ "$(id -u)" -ne 0 ] || inside=(unshare --pid --ipc --net --mount --uts --fork --kill-child --mount-proc)
"${inside[@]}" true 2> "$dir/err" || skip "no namespaces here: $(cat "$dir/err")"
# A pidfd of a peer in a namespace that isn't seen comes with Linux 6.5 only.
IFS=.- read -r major minor _ < <(uname -r)
((major > 6 || (major == 6 && minor >= 5))) || skip "Linux $(uname -r) is older than 6.5"

loop=()
[ -z "${KV_TEST_EVENT_LOOP:-}" ] || loop=(--event-loop "$KV_TEST_EVENT_LOOP")
setpriv --pdeathsig KILL "${inside[@]}" "$build/daemon/kvcached" --host 64M --socket "$socket" \
	"${loop[@]}" > "$dir/daemon.log" 2>&1 &
daemon_pid=$!
expect_soon 60 "$kvctl" ping

say "an engine computes, and stays; another one, in other namespaces, finds it"
mkfifo "$dir/stdin"
exec 4<> "$dir/stdin"
"${inside[@]}" "$holder" shared 5 160 < "$dir/stdin" > "$dir/holder.out" 2>&1 &
holder_pid=$!
expect_soon 20 grep -q ready "$dir/holder.out"
expect 0 "$kvctl" --json session list
expect_out '"pid": 0'
expect 0 "${inside[@]}" "$build/tools/engine/kvengine" --model tiny --prompt "What one computes, all can find." \
	-n 8 --stats --device host --socket "$socket"
expect_err 'hit_tokens: 0'
expect 0 "${inside[@]}" "$build/tools/engine/kvengine" --model tiny --prompt "What one computes, all can find." \
	-n 8 --stats --device host --socket "$socket"
expect_err 'hit_tokens: [1-9]'

say "one is killed: what it had is free again"
kill -KILL "$holder_pid"
wait "$holder_pid" 2> /dev/null
gone()
{
	"$kvctl" --json session list | python3 -IS -c 'import json, sys; sys.exit(json.load(sys.stdin) != [])'
}
export -f gone
export kvctl
expect_soon 30 bash -c gone
expect 0 "$kvctl" --json pool show shared
expect_out '"blocks_leased": 0'
expect_out '"blocks_quarantined": 0'
expect 0 "$kvctl" check
kill -KILL "$daemon_pid"
wait "$daemon_pid" 2> /dev/null
daemon_pid=
