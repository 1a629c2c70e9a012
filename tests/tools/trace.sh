#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# kvctl trace record and replay: known requests of real clients are recorded as they were, and a replay finds the
# share that the daemon found.
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

json_is()
{
	python3 -IS -c '
import json, sys
x = json.load(open(sys.argv[2]))
sys.exit(0 if eval("(" + sys.argv[1] + ")") else 1)' "$1" "${2:-$dir/out}" 2> "$dir/json.err" ||
		fail "not so: $1 $(cat "$dir/json.err")"
}

# The lines of a trace, as a list x.
trace_is()
{
	python3 -IS -c '
import json, sys
x = [json.loads(line) for line in open(sys.argv[2])]
sys.exit(0 if eval("(" + sys.argv[1] + ")") else 1)' "$1" "${2:-$dir/trace}" 2> "$dir/json.err" ||
		fail "not so: $1 $(cat "$dir/json.err") $(cat "${2:-$dir/trace}")"
}

request()
{
	expect 0 "$build/tests/support/holder" "$1" 0 "$2"
}

start_recording()
{
	"$kvctl" --json trace record "$@" > "$dir/recorded" 2> "$dir/recorder.err" &
	recorder=$!
	expect_soon 20 grep -q "(pid $recorder, user [0-9]*) records requests" "$dir/daemon.log"
}

stop_recording()
{
	kill -INT $recorder
	wait $recorder || fail "kvctl trace record: exit $? $(cat "$dir/recorder.err")"
}

daemon_start --host 128M
request other 100

say "known requests, as they were"
start_recording "$dir/trace"
request llama 600
request llama 1100
request llama 2048
request llama 600
stop_recording
trace_is '[q["input_length"] for q in x] == [600, 1100, 2048, 600]'
trace_is '[q["hash_ids"] for q in x] == [[0, 1], [0, 2, 3], [0, 2, 4, 5], [0, 1]]'
trace_is '[q["hit_length"] for q in x] == [0, 592, 1088, 592] and all(q["output_length"] == 0 for q in x)'
trace_is 'all(a["timestamp"] <= b["timestamp"] for a, b in zip(x, x[1:]))'
json_is 'x["requests"] == 4 and x["lost"] == 0 and x["input_tokens"] == 4348 and x["hit_tokens"] == 2272' "$dir/recorded"

say "a sequence in groups is one request, not one a pool"
start_recording "$dir/trace6"
for n in 600 1100 600; do
	expect 0 "$build/tests/support/group_holder" hybrid $n
done
stop_recording
trace_is '[q["input_length"] for q in x] == [600, 1100, 600]' "$dir/trace6"
trace_is '[q["hash_ids"] for q in x] == [[0, 1], [0, 2, 3], [0, 1]]' "$dir/trace6"
trace_is '[q["hit_length"] for q in x] == [0, 576, 576]' "$dir/trace6"
json_is 'x["requests"] == 3 and x["lost"] == 0 and x["input_tokens"] == 2300' "$dir/recorded"
for kind in full:1 state:0; do # it belongs to the pool of its first group
	start_recording --pool "hybrid.${kind%:*}" "$dir/trace7"
	expect 0 "$build/tests/support/group_holder" hybrid 512
	stop_recording
	trace_is "len(x) == ${kind#*:}" "$dir/trace7"
done

say "what isn't recorded isn't told; then a pool of several"
request llama 700
expect 1 "$kvctl" trace record --pool mistral --for 1 "$dir/none"
request mistral 0
start_recording --pool llama "$dir/trace2"
expect 1 "$kvctl" trace record --for 1 "$dir/none"
expect_err "'kvctl' \(pid $recorder\) records already"
request other 512
request llama 512
stop_recording
trace_is 'len(x) == 1 and x[0]["hash_ids"] == [0] and x[0]["input_length"] == 512' "$dir/trace2"

say "another worker takes over: the same ids go on"
start_recording "$dir/trace3"
request llama 1024
sleep 0.5
expect 0 "$kvctl" restart-worker
# shellcheck disable=SC2016  # the inner shell expands it
expect_soon 20 sh -c '[ "$(grep -c "(pid $0, user" "$1")" = 2 ]' $recorder "$dir/daemon.log"
request llama 1536
stop_recording
trace_is '[q["hash_ids"] for q in x] == [[0, 1], [0, 1, 2]]' "$dir/trace3"
json_is 'x["worker_restarts"] == 1' "$dir/recorded"

say "an engine's requests have an output"
start_recording --count 2 "$dir/trace4"
for prompt in "The keeper of the store wrote each letter down twice." "Another one."; do
	expect 0 "$build/tools/engine/kvengine" --model tiny --device host -n 20 --ignore-eos --prompt "$prompt"
done
wait $recorder || fail "--count didn't end it: $(cat "$dir/recorder.err")"
trace_is 'len(x) == 2 and all(18 <= q["output_length"] <= 20 for q in x) and x[0]["input_length"] > x[1]["input_length"]' "$dir/trace4"

say "a replay finds what the daemon found, and a smaller cache less"
expect 0 "$kvctl" pool drop llama
start_recording "$dir/trace5"
for n in 5120 10240 15360 10240 5120; do
	request llama $n
done
stop_recording
expect 0 "$kvctl" --json pool show llama
json_is 'x["lookup_tokens_total"] == 46080 and x["evictions_total"] == 0'
found=$(python3 -IS -c 'import json, sys; x = json.load(open(sys.argv[1])); print(x["hit_tokens_total"] / x["lookup_tokens_total"])' "$dir/out")
trace_is "abs(sum(q['hit_length'] for q in x) / sum(q['input_length'] for q in x) - $found) < 1e-9" "$dir/trace5"
expect 0 "$kvctl" --json trace replay "$dir/trace5" --capacity 31,100
json_is "[r['capacity'] for r in x] == [31, 100] and abs(x[1]['hit_share'] - $found) < 0.002"
json_is 'x[0]["hit_share"] <= x[1]["hit_share"] and all(r["served"] == 5 and r["check_errors"] == 0 for r in x)'
expect 0 "$kvctl" --json trace replay "$dir/trace5" --capacity 20M,64M --pool llama
json_is "[r['capacity'] for r in x] == [40, 128] and abs(x[1]['hit_share'] - $found) < 0.002"
expect 0 "$kvctl" trace replay "$dir/trace5" --capacity 100
expect_out 'share 0\.'

say "errors name what is wrong"
expect 2 "$kvctl" trace record
expect_err 'usage: kvctl trace record FILE'
expect 2 "$kvctl" trace record --for soon x
expect_err "'soon' given, seconds above 0"
expect 2 "$kvctl" trace record --count 0 x
expect_err "'0' given, a number from 1"
expect 1 "$kvctl" trace record --pool nothing --for 1 "$dir/x"
expect_err "pool: there is no 'nothing'"
expect 1 "$kvctl" trace record --for 0.1 /nonexistent/trace
expect_err '/nonexistent/trace: No such file'
expect 2 "$kvctl" trace replay "$dir/trace5"
expect_err 'capacity'
expect 1 "$kvctl" trace replay "$dir/trace5" --capacity 1G --pool nothing
expect 2 "$kvctl" trace replay "$dir/trace5" --capacity 1K --pool llama
expect_err '512 KiB'
expect 2 "$kvctl" trace replay "$dir/trace5" --capacity 10,x
expect_err "'x' given"
expect 0 "$kvctl" check
daemon_stop
