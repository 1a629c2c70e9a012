#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# kvctl against a real daemon: each command in both forms, errors, exit statuses.
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

headers=$(dirname "$0")/../../include/kvcached
holder=$build/tests/support/holder

# Both forms of a command that succeeds; the JSON stays in $dir/out.
both()
{
	expect 0 "$kvctl" "$@"
	[ ! -s "$dir/err" ] || fail "kvctl $*: words on stderr"
	expect 0 "$kvctl" --json "$@"
	expect_json
	[ ! -s "$dir/err" ] || fail "kvctl --json $*: words on stderr"
}

# A command that is refused, in both forms: exit status, then a pattern for its words.
refused()
{
	local status=$1 words=$2

	shift 2
	expect "$status" "$kvctl" "$@"
	[ ! -s "$dir/out" ] || fail "kvctl $*: refused, but with an answer on stdout"
	expect_err "^kvctl: .*$words"
	expect "$status" "$kvctl" --json "$@"
	[ ! -s "$dir/out" ] || fail "kvctl --json $*: refused, but with an answer on stdout"
	json_is "set(x) == {'error', 'exit'} and x['exit'] == $status and
		__import__('re').search(r'''$words''', x['error'])" "$dir/err"
}

# An expression of Python over x, the JSON in $dir/out or in a file.
json_is()
{
	python3 -IS -c '
import json, sys
x = json.load(open(sys.argv[2]))
sys.exit(0 if eval("(" + sys.argv[1] + ")") else 1)' "$1" "${2:-$dir/out}" 2> "$dir/json.err" ||
		fail "not so: $1 $(cat "$dir/json.err")"
}

# The names of a struct's fields in stats.h, as a Python list, whatever its order of declaration.
fields_of()
{
	python3 -IS -c '
import re, sys
text = re.sub(r"/\*.*?\*/", "", open(sys.argv[1]).read(), flags=re.S)
body = re.search(r"struct " + sys.argv[2] + r" \{(.*?)\n\};", text, re.S).group(1)
print(re.findall(r"(\w+)(?:\[\w+\])?;", body))' "$headers/stats.h" "$1"
}

say "no daemon: 3, at once"
start=$(date +%s%N)
expect 3 "$kvctl" stats
[ $(($(date +%s%N) - start)) -lt 1000000000 ] || fail "the refusal took over a second"
refused 3 "$socket" stats
refused 3 "$socket" ping
expect 3 "$kvctl" -s "$dir/elsewhere.sock" check
expect_err 'elsewhere.sock'

say "wrong usage: 2, with the nearest command"
refused 2 "kvctl --help"
refused 2 "'pool' needs a command: list, show, set, compact, drop" pool
refused 2 "kvctl pool list" pool lst
refused 2 "kvctl pool list" list pool
refused 2 "kvctl stats" stat
refused 2 "kvctl ping" pign
refused 2 "kvctl session show ID" session sohw 7
refused 2 "usage: kvctl pool show NAME" pool show
refused 2 "usage: kvctl stats" stats now
refused 2 "a number expected" session show seven
refused 2 "1..100000 expected" ping 0
refused 2 "1..100000 expected" ping -- -1
refused 2 "'--jsn' isn't known" --jsn stats
refused 2 "'-x' isn't known" stats -x
refused 2 "'--socket' needs a value" stats --socket
refused 2 "seconds above 0" --timeout 0 stats
refused 2 "seconds above 0" --timeout soon stats
# Another user without a place for sockets: for root to try, where that user can read the build folder.
if setpriv --reuid 65534 --clear-groups "$kvctl" --version > /dev/null 2>&1; then
	expect 2 env -u KVCACHED_SOCKET -u XDG_RUNTIME_DIR \
		setpriv --reuid 65534 --clear-groups "$kvctl" ping
	expect_err 'give -s SOCKET'
fi

say "help and version need no daemon"
expect 0 "$kvctl" --help
expect_out 'pool show NAME'
expect 0 "$kvctl" session --help
expect_out 'session show ID'
! grep -q 'pool list' "$dir/out" || fail "help of an object shows others"
expect 0 "$kvctl" --version
expect_out '^kvctl [0-9]+\.[0-9]+\.[0-9]+$'

say "an idle daemon"
daemon_start --host 256M
both stats
json_is 'set(x) == {"daemon", "gpus", "pools", "sessions"}'
json_is "sorted(x['daemon']) == sorted($(fields_of kv_daemon_stats))"
json_is "sorted(x['gpus'][0]) == sorted($(fields_of kv_gpu_stats))"
json_is "x['daemon']['pid'] == $daemon_pid and x['daemon']['worker_pid'] == $(worker_pid)"
json_is "x['daemon']['event_loop'] in ('io_uring', 'epoll')"
[ -z "${KV_TEST_EVENT_LOOP:-}" ] || json_is "x['daemon']['event_loop'] == '$KV_TEST_EVENT_LOOP'"
json_is "x['gpus'][0]['export_kind'] == 'host' and x['gpus'][0]['bytes_arena'] == 256 << 20"
json_is 'x["pools"] == [] and x["sessions"] == []'
both pool list
json_is 'x == []'
both session list
json_is 'x == []'
both check
json_is 'x["n_errors"] == 0 and x["n_pools"] == 0'
both ping
json_is "x['socket'] == '$socket' and x['count'] == 1 and x['min_ns'] > 0"
both ping 100
json_is 'x["count"] == 100 and x["min_ns"] <= x["median_ns"] <= x["max_ns"]'
refused 1 'no pool is called' pool show nothing
refused 1 'nothing' pool drop nothing
refused 1 'nothing' pool epoch nothing
refused 1 'no session has the id 99' session show 99
expect 0 "$kvctl" stats --json --socket "$socket" # options behind the words
expect_json

say "with two clients attached"
mkfifo "$dir/hold"
"$holder" "pool \"a\"" 100 1600 < "$dir/hold" > "$dir/holder1" &
holder1=$!
"$holder" "pool \"a\"" 20 3200 < "$dir/hold" > "$dir/holder2" &
holder2=$!
exec 9> "$dir/hold"
expect_soon 20 grep -q ready "$dir/holder1"
expect_soon 20 grep -q ready "$dir/holder2"

both stats
json_is 'len(x["sessions"]) == 2 and x["daemon"]["n_sessions"] == 2'
json_is "sorted(x['pools'][0]) == sorted($(fields_of kv_pool_stats))"
json_is "sorted(x['sessions'][0]) == sorted($(fields_of kv_session_stats))"
json_is '"pool \"a\"" == x["pools"][0]["name"]'
json_is 'all(p["blocks_free"] + p["blocks_leased"] + p["blocks_cached"] + p["blocks_quarantined"]
	== p["blocks_total"] > 0 for p in x["pools"])'
json_is 'all(g["bytes_free"] + g["bytes_scrubbing"] + g["bytes_pools"] == g["bytes_arena"]
	for g in x["gpus"])'
json_is 'sum(s["blocks_leased"] for s in x["sessions"]) == x["pools"][0]["blocks_leased"] >= 120'
json_is 'x["pools"][0]["lookup_tokens_total"] == 4800 >= x["pools"][0]["hit_tokens_total"]'
json_is "sorted(s['pid'] for s in x['sessions']) == sorted([$holder1, $holder2])"

expect 0 "$kvctl" stats
[ "$(wc -l < "$dir/out")" -lt 24 ] || fail "stats of two clients fill more than 24 lines"
[ "$(wc -L < "$dir/out")" -le 80 ] || fail "stats need more than 80 columns"
expect_out 'holder +holder|holder holder'

both pool list
json_is 'len(x) == 1'
both pool show 'pool "a"'
json_is 'len(x["sessions"]) == 2 and x["block_tokens"] == 16 and x["block_bytes"] == 16384'
expect 0 "$kvctl" pool show 'pool "a"'
expect_out '^block_bytes +16.0 KiB +size of a block'
both session list
id=$(python3 -IS -c 'import json, sys; print(json.load(open(sys.argv[1]))[0]["id"])' "$dir/out")
both session show "$id"
json_is "x['id'] == $id and x['client'] == 'holder' and x['state'] == 'live' and x['uid'] == $(id -u)"
both check
json_is 'x["n_errors"] == 0 and x["n_pools"] == 1 and x["n_blocks"] > 0'
expect 0 "$kvctl" check
expect_out '^checked [0-9]+ blocks in 1 pool: books balance$'

say "limits change while it runs, or are refused with numbers"
both pool set 'pool "a"' --min 16M --weight 3
json_is 'x["min_bytes"] == 16 << 20 and x["weight"] == 3 and x["max_bytes"] == 256 << 20'
json_is 'x["limits_revision"] >= 3 and x["share_bytes"] == 256 << 20'
refused 1 "268435456" pool set 'pool "a"' --min 300M
refused 1 'nothing' pool set nothing --min 1M
refused 1 'revision: 1' pool set 'pool "a"' --revision 1 --min 1M
refused 2 'usage' pool set 'pool "a"'
refused 2 'weight' pool set 'pool "a"' --weight 0
refused 2 '4X' pool set 'pool "a"' --min 4X
expect 0 "$kvctl" pool set --min 0 --weight 1 'pool "a"'
expect_out 'min 0 B, max 256 MiB, weight 1: a share of 256 MiB'

say "dropping takes what nobody holds"
{ kill -KILL $holder1 && wait $holder1; } 2> /dev/null
gone="$kvctl --json session list | python3 -IS -c 'import json, sys; sys.exit(len(json.load(sys.stdin)) != 1)'"
expect_soon 10 bash -c "$gone"
both pool epoch 'pool "a"'
json_is 'x["epoch"] == 2 and x["name"] == "pool \"a\""'
both pool drop 'pool "a"'
json_is 'x["removed"] == False and x["n_sessions"] == 1'
both check
json_is 'x["n_errors"] == 0'
exec 9>&-
wait $holder2 || fail "holder failed: $(cat "$dir/holder2")"
gone="$kvctl --json session list | python3 -IS -c 'import json, sys; sys.exit(len(json.load(sys.stdin)) != 0)'"
expect_soon 10 bash -c "$gone"
expect 0 "$kvctl" --json pool drop 'pool "a"'
json_is 'x["removed"] == True'
both pool list
json_is 'x == []'

say "a daemon that doesn't answer: 1, in time"
kill -STOP "$(worker_pid)"
start=$(date +%s%N)
refused 1 '.' --timeout 0.3 ping
[ $(($(date +%s%N) - start)) -lt 5000000000 ] || fail "a timeout of 0.3 s took longer than 2.5 s"
kill -CONT "$(worker_pid)"

say "an answer that can't be written: 1"
"$kvctl" stats > /dev/full 2> "$dir/err"
status=$?
[ $status -eq 1 ] || fail "stats to a full device: exit $status"
expect_err 'stdout'

say "a daemon that was killed: 3, although its socket file is there"
daemon_kill
[ -S "$socket" ] || fail "the socket file is gone"
# For a moment the kernel may still take connections for it, and then reset them.
refused 3 daemon stats
daemon_start --host 64M
daemon_stop
