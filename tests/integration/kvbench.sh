#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# kvbench against a real daemon, and with one of its own: every benchmark runs, and its numbers are
# possible. Times are judged with a factor of 3 to spare, since other things run on a machine that tests.
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

kvbench=$build/tools/bench/kvbench
trace=$dir/trace.jsonl
export TMPDIR=$dir

# Of the last line that the last `expect` wrote, an expression of Python over the JSON x.
last_is()
{
	tail -n 1 "$dir/out" | python3 -IS -c '
import json, sys
x = json.load(sys.stdin)
sys.exit(0 if eval("(" + sys.argv[1] + ")") else 1)' "$1" 2> "$dir/json.err" ||
		fail "not so: $1 $(cat "$dir/json.err")"
}

# 500 conversations of 4 turns; each turn has 2 blocks more than the one before. 2000 requests ask for
# 10000 blocks, 4000 of them different. A turn comes 500 requests after the one before: by then that
# is published, since a client can't take 500 * 2 blocks without an answer from the daemon.
make_trace()
{
	python3 -IS -c '
import json
for turn in range(4):
    for talk in range(500):
        ids = [talk * 8 + i for i in range(2 * turn + 2)]
        print(json.dumps({"timestamp": turn * 1000 + talk, "input_length": 512 * len(ids) - 100,
                          "output_length": 30, "hash_ids": ids}))' > "$trace"
}

# Prompts that come again and again, one every other request, and long ones that come once in between:
# what the daemon learns of them, it learns from the lookups of its clients: without, it finds 8600.
make_flood()
{
	python3 -IS -c '
import json, random
random.seed(1)
for i in range(4000):
    first, n = (100 * random.randrange(40), 5) if i % 2 else (10000 + 20 * i, 20)
    ids = [first + k for k in range(n)]
    print(json.dumps({"timestamp": i, "input_length": 512 * len(ids), "output_length": 1,
                      "hash_ids": ids}))' > "$dir/flood.jsonl"
}

say "usage"
expect 2 "$kvbench"
expect_err '^kvbench: .*--help'
expect 2 "$kvbench" leese
expect_err "'leese'"
expect 2 "$kvbench" replay "$trace"
expect_err 'usage: kvbench replay FILE --engines N --capacity BLOCKS'
expect 2 "$kvbench" replay "$trace" --capacity 0
expect_err "^kvbench: --capacity: '0'"
expect 2 "$kvbench" replay "$trace" --capacity 10 --engines 65
expect_err "^kvbench: --engines: '65' given, 1..64"
expect 2 "$kvbench" lease --capacity 10
expect 2 "$kvbench" lease --frobnicate
expect 2 "$kvbench" --json lease extra
expect_err '^\{"error": "usage: .*", "exit": 2\}$'
expect 0 "$kvbench" --help
expect_out '--socket'
expect 0 "$kvbench" --version
expect_out '^kvbench [0-9]+\.'

say "no daemon: 3; no trace: 1, and its line is named"
expect 3 "$kvbench" lease --socket "$socket"
expect_err "$socket"
expect 1 "$kvbench" replay "$dir/none" --capacity 10
expect_err "$dir/none: No such file"
make_trace
sed '7s/512/"many"/' "$trace" | sed '7s/924/"many"/' > "$dir/bad.jsonl"
expect 1 "$kvbench" replay "$dir/bad.jsonl" --capacity 10
expect_err "bad.jsonl:7: input_length: "

daemon_start --host 64M

say "lease"
expect 0 "$kvbench" lease --json --socket "$socket"
last_is 'x["syscalls_per_million"] == 0'
last_is '0 < x["take_give_ns"] <= 3 * 4 * x["array_stack_ns"]'
last_is 'x["take_give_ns"] * 200 <= 3 * x["socket_round_trip_ns"]'
last_is 'all(x[k] > 0 for k in ("take_give_16_ns", "array_stack_inline_ns", "mutex_list_ns"))'
expect 0 "$kvbench" lease -s "$socket"
expect_out '^take and give, 1 block +[0-9.]+ +1\.00$'
expect_out '^0 system calls'

say "attach, prefix"
expect 0 "$kvbench" attach --json --socket "$socket"
last_is '0 < x["connect_us"] < x["host_only_us"] and x["connect_us"] < x["mapped_us"]'
expect 0 "$kvbench" prefix --json --socket "$socket"
last_is '[c["blocks"] for c in x["chains"]] == [4 ** i for i in range(7)]'
last_is 'all(c["lookup_ns"] > 0 and c["free_ns"] > 0 and c["floor_ns"] > 0 for c in x["chains"])'

say "attention, write, merge"
for kernel in attention write merge; do
	for dtype in bf16 e4m3; do
		expect 0 "$kvbench" "$kernel" --device host --shape 4/2/64 --batch 3 --context 70 --dtype $dtype --json
		expect_out '"of_(copy|read)"'
	done
done
expect 0 "$kvbench" attention --device host --shape 2/1/40 --batch 3 --page 5 --layout hnd \
	--ragged <(printf '3\n40\n')
expect_out '2/1/40'
expect 0 "$kvbench" attention --device host --shape 2/1/64,4/4/32 --point 2x1x90,1x20x50 --page 16,32 \
	--layout nhd-flat,hnd-flat --dtype f32,f16,bf16,e4m3,e5m2 --window 30 --softcap 20 --invariant --json
last_is 'len(x["cases"]) == 2 * 2 * 2 * 2 * 5 and all(c["microseconds"] > 0 for c in x["cases"])'
last_is 'all(c["error"] < 5e-3 and (c["flops"] > 0) == (c["query"] > 1) for c in x["cases"])'
printf '%s\n' '{"timestamp": 0, "input_length": 40, "output_length": 2, "hash_ids": [0]}' \
	'{"timestamp": 1, "input_length": 120, "output_length": 2, "hash_ids": [1]}' >"$dir/lengths.jsonl"
expect 0 "$kvbench" attention --device host --shape 2/1/64 --point 2x1x160 --ragged "$dir/lengths.jsonl" --json
last_is '[c["ragged"] for c in x["cases"]] == [False, True] and x["cases"][1]["of_uniform"] > 0'
last_is 'x["cases"][0]["bytes"] == x["cases"][1]["bytes"] == 320 * 2 * 64 * 2'
expect 0 "$kvbench" attention --device host --shape 2/1/64 --point 2x1x64 --pool 1 --layers 4 --json
printf '2/1/64 64 2 bf16 7.5 other\n' >"$dir/peers.tsv"
expect 0 "$kvbench" attention --device host --shape 2/1/64 --point 2x1x64 --peers "$dir/peers.tsv" --json
last_is 'x["cases"][0]["peer_microseconds"] == 7.5 and x["peers_over_ours"] > 0'
expect 2 "$kvbench" attention --device host --point 2x3
expect_err "point: '2x3' given"
expect 2 "$kvbench" attention --device host --batch 1,x
expect_err "batch: '1,x' given"
expect 1 "$kvbench" attention --device host --shape 2/1/64 --batch 1 --backend none
expect_err 'KVCACHED_BACKEND=none'
expect 2 "$kvbench" attention --device host --shape 3/2/64
expect_err 'shape'
expect 2 "$kvbench" write --device host --dtype f64
expect 2 "$kvbench" write --device tpu
expect_err "device: 'tpu' given"
expect 1 "$kvbench" attention --device host --ragged /dev/null --batch 2

say "metadata: of 256 decoding sequences in little time"
expect 0 "$kvbench" metadata --json
last_is '[c["sequences"] for c in x["batches"]] == [1, 8, 32, 128, 256, 1024]'
last_is 'all(c["step_us"] > 0 and c["arrays_us"] > 0 for c in x["batches"])'

say "dsa: every small case is right, and has a time"
expect 0 "$kvbench" dsa --device host --json
last_is 'x["device"] == "host" and {c["work"] for c in x["cases"]} == {"choose", "score", "attend", "write"}'
last_is 'all(0 <= c["error"] < 5e-3 and c["seconds"] > 0 and c["copy_bytes_per_second"] > 0 for c in x["cases"])'

say "replay: what was published is found, all of it"
expect 0 "$kvbench" replay "$trace" --capacity 6000 --json --socket "$socket"
last_is 'x["requests"] == x["served"] == 2000 and x["engines"] == 1 and x["capacity"] == 6000'
last_is 'x["blocks_asked"] == 10000 and x["blocks_hit"] == 6000 and x["hit_share"] == 0.6'
last_is 'x["evicted"] == 0 and x["check_errors"] == 0 and x["too_large"] == 0'

say "replay: four engines, and a pool that is too small for all"
expect 0 "$kvbench" replay "$trace" --engines 4 --capacity 6000 --json --socket "$socket"
last_is 'x["served"] == 2000 and x["check_errors"] == 0 and 3000 <= x["blocks_hit"] <= 6000'
expect 0 "$kvbench" replay "$trace" --engines 4 --capacity 300 --json --socket "$socket"
last_is 'x["served"] == 2000 and x["check_errors"] == 0 and x["evicted"] > 0'
last_is 'x["seconds"] > 0'
expect 0 "$kvbench" replay "$trace" --capacity 7 --json --socket "$socket"
last_is 'x["too_large"] == 500 and x["served"] == 1500 and x["check_errors"] == 0'

say "crowd: clients take, refill and are idle together, and so is the worker"
expect 0 "$kvbench" crowd --engines 3 --json --socket "$socket"
last_is 'x["clients"] == 3 and x["blocks_per_second"] > 1e6 and x["worker_idle_cpu"] < 0.05'
last_is '0 < x["refill_p50_us"] <= x["refill_p99_us"] <= x["refill_max_us"]'

say "compact: what is cached moves together under clients"
expect 0 "$kvbench" compact --json
last_is '0.4 < x["moved_bytes"] / x["block_bytes"] / x["blocks"] * 2 < 1 and x["of_copy"] > 0.01'
last_is 'x["spare_share"] >= 0.45 > x["spare_share_before"] and x["lookups_per_second"] > 100'

say "nothing is left of it"
expect 0 "$kvctl" --json pool list
expect_json
grep -q kvbench "$dir/out" && fail "a pool of kvbench is still there"
expect 0 "$kvctl" check
daemon_stop

say "prompts that come again outlive a flood of those that do not, by what lookups teach"
make_flood
for policy in worth lru; do
	daemon_start --host 64M --policy $policy
	expect 0 "$kvbench" replay "$dir/flood.jsonl" --capacity 400 --json --socket "$socket"
	last_is 'x["served"] == 4000 and x["check_errors"] == 0'
	tail -n 1 "$dir/out" > "$dir/$policy.json"
	daemon_stop
done
found=$(sed -nE 's/.*"blocks_hit": ([0-9]+).*/\1/p' "$dir/worth.json")
lru=$(sed -nE 's/.*"blocks_hit": ([0-9]+).*/\1/p' "$dir/lru.json")
say "  $found of 10000 blocks found, $lru with lru"
if [ "$found" -lt 8900 ] || [ "$found" -lt $((lru * 3 / 2)) ]; then
	fail "worth found $found blocks, lru $lru"
fi

say "colocate: opposite bursts gain what the split keeps idle"
python3 -IS -c '
import json
for i in range(600):
    print(json.dumps({"timestamp": i * 1000, "input_length": 512 * 8, "output_length": 500,
                      "hash_ids": [i * 8 + k for k in range(8)]}))' > "$dir/bursts.jsonl"
expect 2 "$kvbench" colocate "$dir/bursts.jsonl" --capacity 64 --socket "$dir/x"
expect_err 'daemons of its own'
expect 0 "$kvbench" colocate "$dir/bursts.jsonl" --capacity 64 --json
last_is 'x["bursts"]["ratio"] > 1.5 and x["bursts"]["shared"]["requests"] == 600'
last_is '1 < x["overlap"]["ratio"] < x["bursts"]["ratio"]'
last_is 'all(r["tokens_admitted"] <= r["tokens_asked"] for s in ("bursts", "overlap") for r in (x[s]["shared"], x[s]["split"]))'

say "a daemon of its own, which ends with it"
expect 0 "$kvbench" replay "$trace" --engines 2 --capacity 2000
expect_out '^2000 requests by 2 engines in .*; 2000 served$'
expect_out '^the books balance$'
expect 0 "$kvbench" attach
expect_out '^open a pool, mapped +[0-9.]+$'
left=("$dir"/kvbench.*)
[ ! -e "${left[0]}" ] || fail "kvbench left ${left[0]} behind"
