#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What an operator sees at a glance when something is wrong: who waits for room and why, a client that is stopped, a
# pool at its maximum, a worker that doesn't answer, a socket that can't be used, words that were mistyped.
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

holder=$build/tests/support/holder
pids=()

hold()	# FILE POOL BLOCKS TOKENS: in the background, until the test ends
{
	local out=$1

	shift
	"$holder" "$@" < "$dir/hold" > "$out" 2>&1 9>&- &
	pids+=($!)
}

# Each of the places where a person looks says both lines, in these words.
all_say()
{
	expect_soon 20 sh -c "'$kvctl' stats | grep -E -A 1 '$1' | grep -Eq -- '-> .*$2'"
	expect 0 "$kvctl" top 1
	expect_out "$1"
	expect_out "-> .*$2"
	expect 4 "$kvctl" doctor daemon
	tr -s '\n ' '  ' < "$dir/out" > "$dir/joined"
	grep -Eq "warn.*$1.*-> .*$2" "$dir/joined" || fail "doctor doesn't say: $1, $2"
}

mkfifo "$dir/hold"
daemon_start --host 64M
exec 9<> "$dir/hold"

say "nothing is wrong: nothing is said"
hold "$dir/first" llama 3000 400
expect_soon 20 grep -q ready "$dir/first"
expect 0 "$kvctl" stats
! grep -q -- '->' "$dir/out" || fail "a trouble where there is none"
expect 0 "$kvctl" doctor daemon

say "the memory is full: who has it"
hold "$dir/second" llama 1500 0
all_say "llama: 1 request waits for room; session [0-9]+ \(holder, pid ${pids[0]}\) leases 4[0-9.]+ MiB" "fewer sequences"

say "a client that is stopped keeps what it has"
kill -STOP "${pids[0]}"
all_say "session [0-9]+ \(holder, pid ${pids[0]}\) is stopped and keeps 30[0-9]+ blocks" "kill -CONT ${pids[0]}"
id=$(sed -n 's/^ready //p' "$dir/first")
expect 0 "$kvctl" session list
expect_out "^ *$id .* ${pids[0]} .* stopped$"
expect 0 "$kvctl" session show "$id"
expect_out "-> kill -CONT ${pids[0]}"
expect 0 "$kvctl" --json session show "$id"
expect_json
kill -CONT "${pids[0]}"
expect 0 "$kvctl" session list
! grep -q stopped "$dir/out" || fail "it goes on, and is said to be stopped"
kill -KILL "${pids[1]}"
expect_soon 20 sh -c "'$kvctl' stats | grep -q '; . client.*, 1 session\$'"

say "a quota that is too small: the pool is at its maximum, and how to raise it"
expect 0 "$kvctl" pool set llama --max 56M
hold "$dir/third" llama 1500 0
all_say "llama: 1 request waits for room; it is at its maximum, 56.0 MiB" "kvctl pool set llama --max SIZE"
expect 0 "$kvctl" --json stats
expect_json
kill -KILL "${pids[2]}"

say "names and options that are mistyped: the nearest"
expect 1 "$kvctl" pool show lama
expect_err "no pool is called 'lama'; the nearest is 'llama'"
expect 1 "$kvctl" pool compact lamla --wait
expect_err "the nearest is 'llama'"
for words in "block show 1 --pool lllama" "prefix show --pool llmaa 1" "trace replay x --capacity 1G --pool llam"; do
	read -ra words <<< "$words"
	expect 1 "$kvctl" "${words[@]}"
	expect_err "--pool: no pool is called .* the nearest is 'llama'"
done
expect 1 "$kvctl" pool show mistral
! grep -q nearest "$dir/err" || fail "mistral isn't near llama"
expect 2 "$kvctl" stats --jsn
expect_err "'--jsn' isn't known; the nearest is '--json'"
expect 2 "$kvctl" prefix show --salte x 1
expect_err "the nearest is '--salt'"
expect 2 "$kvctl" trace record --cout 2 x
expect_err "the nearest is '--count'"
expect 2 "$kvctl" doctor sockt
expect_err "the nearest is socket"
expect 2 "$build/tools/bench/kvbench" leas
expect_err "the nearest is lease"
expect 2 "$build/tools/bench/kvbench" replay x --capcity 5
expect_err "the nearest is --capacity"
expect 2 "$build/tools/engine/kvengine" --modl x
expect_err "the nearest is --model"
expect 2 "$build/daemon/kvcached" --hots 1G
expect_err "^kvcached: .*'--hots' isn't known.*; the nearest is --host"
expect 2 "$build/daemon/kvcached" --socket
expect_err "^kvcached: option '--socket' needs a value"

say "a worker that hangs: whom to ask"
worker=$(worker_pid)
kill -STOP "$worker"
expect 1 "$kvctl" -t 1 stats
expect_err 'no answer from the daemon.*; what to do: kvctl doctor socket daemon$'
expect 1 "$kvctl" -t 2 doctor daemon
expect_out "kvctl restart-worker, or kill -9"
kill -KILL "$worker"
expect_soon 20 "$kvctl" ping
exec 9>&-
wait "${pids[0]}" || fail "the first client failed"
expect 0 "$kvctl" check

say "a socket that can't be used: whom to ask"
expect 3 "$kvctl" -s "$dir/elsewhere" stats
expect_err "what to do: kvctl -s $dir/elsewhere doctor socket daemon$"
if [ "$(id -u)" = 0 ] && chmod 711 "$dir" && setpriv --reuid 65534 --clear-groups "$kvctl" --version > /dev/null 2>&1; then
	expect 1 setpriv --reuid 65534 --regid 65534 --clear-groups "$kvctl" stats
	expect_err 'Permission denied; what to do: kvctl doctor socket daemon$'
	expect 1 setpriv --reuid 65534 --regid 65534 --clear-groups "$kvctl" doctor socket
	expect_out 'refuses user 65534'
fi
daemon_stop
