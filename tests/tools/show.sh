#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# kvctl block show and prefix show: of real clients, what they hold, under which identity, and who they are.
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

holder=$build/tests/support/holder

json_is()
{
	python3 -IS -c '
import json, sys
x = json.load(open(sys.argv[2]))
sys.exit(0 if eval("(" + sys.argv[1] + ")") else 1)' "$1" "$dir/out" 2> "$dir/json.err" ||
		fail "not so: $1 $(cat "$dir/json.err")"
}

refused()
{
	local status=$1 words=$2

	shift 2
	expect "$status" "$kvctl" "$@"
	expect_err "^kvctl: .*$words"
	expect "$status" "$kvctl" --json "$@"
	grep -q '"exit": '"$status" "$dir/err" || fail "the refusal isn't JSON"
}

hold()	# FILE POOL BLOCKS TOKENS [SALT]
{
	local out=$1

	shift
	"$holder" "$@" < "$dir/hold" > "$out" 2>&1 9>&- &
	pids+=($!)
	expect_soon 20 grep -q ready "$out"
}

pids=()
mkfifo "$dir/hold"
daemon_start --host 64M
exec 9<> "$dir/hold"
hold "$dir/first" llama 3 100
hold "$dir/second" llama 0 100 "tenant-7"
mapfile -t tokens < <(python3 -IS -c 'print(*[i * 7 % 1000 for i in range(100)], sep="\n")')

say "what of a prompt is cached, and by whom it is held"
expect 0 "$kvctl" prefix show "${tokens[@]}"
expect_out '^llama +0 +all +6 +96 +96 +96 +holder [0-9]+ \('"${pids[0]}"'\)$'
expect 0 "$kvctl" --json prefix show "${tokens[@]:0:50}" 1 2 3
json_is 'x["n_tokens"] == 53 and len(x["groups"]) == 1 and x["groups"][0]["leading_tokens"] == 48'
json_is '[(b["first_token"], b["end_token"]) for b in x["groups"][0]["blocks"]] == [(0, 16), (16, 32), (32, 48)]'
id=$(python3 -IS -c 'import json, sys; print(json.load(open(sys.argv[1]))["groups"][0]["blocks"][2]["id"])' "$dir/out")
printf '[%s]' "$(IFS=,; echo "${tokens[*]}")" > "$dir/tokens"
expect 0 "$kvctl" --json prefix show --file "$dir/tokens" --pool llama
json_is 'x["n_tokens"] == 100 and x["groups"][0]["n_blocks"] == 6'
expect 0 "$kvctl" --json prefix show 5 5 5
json_is 'x["groups"][0]["n_blocks"] == 0 and x["groups"][0]["sessions"] == []'
expect 0 "$kvctl" --json prefix show --name-space other "${tokens[@]}"
json_is 'x["groups"] == []'

say "another salt is another prefix"
expect 0 "$kvctl" --json prefix show --salt tenant-7 "${tokens[@]}"
json_is "x['groups'][0]['n_blocks'] == 6 and len(x['groups'][0]['sessions']) == 1"
salted=$(python3 -IS -c 'import json, sys; print(json.load(open(sys.argv[1]))["groups"][0]["blocks"][1]["id"])' "$dir/out")
expect 0 "$kvctl" --json prefix show --salt tenant-8 "${tokens[@]}"
json_is 'x["groups"][0]["n_blocks"] == 0'
expect 0 "$kvctl" --json prefix show --field 2=tenant-7 "${tokens[@]}"
json_is 'x["groups"][0]["n_blocks"] == 6'
expect 0 "$kvctl" --json block show "$salted"
json_is 'x["identity"] == "salt of 8 bytes" and x["position"] == 16'

say "a cached block: who, since when, whose tokens"
sleep 0.3
expect 0 "$kvctl" --json block show "$id"
json_is "x['state'] == 'cached' and x['position'] == 32 and x['model'] == 'holder' and x['identity'] == ''"
json_is 'x["tokens"] == [i * 7 % 1000 for i in range(32, 48)] and x["n_tokens"] == x["n_listed"] == 16'
json_is "[(s['pid'], s['comm'], s['client']) for s in x['sessions']] == [(${pids[0]}, 'holder', 'holder')]"
json_is '0 < x["since_ns"] < 120 * 10**9 and x["n_sessions"] == 1 and x["n_children"] == 1'
expect 0 "$kvctl" block show "$id"
expect_out "^[0-9]+ +holder +${pids[0]} +holder "
expect_out '^tokens 32 to 47 of a prefix:$'
before=$(sed -nE 's/^since_ns +([0-9]+) s.*/\1/p' "$dir/out")

say "a leased one has no tokens yet; one with a twin says whose"
leased=
for i in $(seq 1 40); do
	expect 0 "$kvctl" --json block show "$i" --pool llama
	! grep -q '"state": "leased"' "$dir/out" || { leased=$i; break; }
done
[ -n "$leased" ] || fail "no block among 40 is leased"
json_is 'x["n_tokens"] == 0 and x["tokens"] == [] and x["n_sessions"] == 1'

say "another worker knows it too"
expect 0 "$kvctl" restart-worker
expect 0 "$kvctl" --json block show "$id"
json_is "x['state'] == 'cached' and x['since_ns'] >= ${before:-0} * 10**9 and x['position'] == 32"

say "an epoch ends: held, and found by nobody"
expect 0 "$kvctl" pool epoch llama
expect 0 "$kvctl" --json block show "$id"
json_is 'x["is_stale"] == 1 and x["epoch"] == 0 and x["n_sessions"] == 1'
expect 0 "$kvctl" --json prefix show "${tokens[@]}"
json_is 'x["groups"][0]["n_blocks"] == 0 and x["groups"][0]["epoch"] == 1'

say "a text, with the tokenizer of a model's file"
prompt="The keeper of the store wrote each letter down twice."
expect 0 "$build/tools/engine/kvengine" --model tiny --pool nonsense --device host -n 8 --prompt "$prompt"
expect 0 "$kvctl" --json prefix show --model tiny --pool nonsense "$prompt"
json_is 'x["n_tokens"] >= 48 and x["groups"][0]["leading_tokens"] == x["n_tokens"] // 16 * 16'
echo -n "$prompt" > "$dir/prompt"
expect 0 "$kvctl" --json prefix show --model tiny --pool nonsense --file "$dir/prompt"
json_is 'x["groups"][0]["leading_tokens"] >= 48'
expect 0 "$kvctl" --json prefix show --model tiny --pool nonsense "the keeper of the store wrote"
json_is 'x["groups"][0]["n_blocks"] == 0'
expect 1 "$kvctl" prefix show --model "$dir/nothing.gguf" "The keeper"
expect_err 'nothing.gguf: No such file'

say "a sequence in groups: all tokens, a window, checkpoints of a state, each in its pool"
"$build/tests/support/group_holder" hybrid 200 < "$dir/hold" > "$dir/group" 2>&1 9>&- &
pids+=($!)
expect_soon 20 grep -q '^ready 0$' "$dir/group"
mapfile -t longer < <(python3 -IS -c 'print(*[i * 7 % 1000 for i in range(230)], sep="\n")')
for pool in full:all:12:192:192 window:window:12:192:192 state:state:3:0:0; do
	IFS=: read -r kind keeps n_blocks n_tokens leading <<< "$pool"
	expect 0 "$kvctl" prefix show --pool "hybrid.$kind" "${longer[@]}"
	expect_out "^hybrid\.$kind +0 +$keeps +$n_blocks +$n_tokens +$leading +192 +group_holder [0-9]+ \(${pids[-1]}\)$"
	expect 0 "$kvctl" --json prefix show --pool "hybrid.$kind" "${longer[@]}"
	json_is "len(x['groups']) == 1 and x['groups'][0]['kind'] == '$keeps' and len(x['groups'][0]['sessions']) == 1"
	cp "$dir/out" "$dir/$kind.json"
done
expect 0 cat "$dir/full.json"
json_is '[b["first_token"] for b in x["groups"][0]["blocks"]] == list(range(0, 192, 16))'
expect 0 cat "$dir/state.json"
json_is '[(b["first_token"], b["end_token"]) for b in x["groups"][0]["blocks"]] == [(64, 64), (128, 128), (192, 192)]'
# Of another start nothing is found, although blocks of a window and states are found by themselves.
for kind in full window state; do
	expect 0 "$kvctl" --json prefix show --pool "hybrid.$kind" 5 "${longer[@]:1}"
	json_is 'x["groups"][0]["n_blocks"] == 0'
done
# Another client finds the state at 128, and the others up to there.
expect 0 "$build/tests/support/group_holder" hybrid 150
expect_out '^ready 128$'

say "several pools have a block of one number; a pool that is another's"
hold "$dir/third" other 0 0
refused 1 "ID 999999: no pool" block show 999999
refused 1 "blocks of pool 'llama' are 0 to" block show 999999 --pool llama
refused 1 "--pool: no pool is called 'nothing'" block show 1 --pool nothing
refused 1 "--pool: no pool is called 'nothing'" prefix show --pool nothing 1 2 3
refused 2 "ID 'x' given, a number from 0" block show x
refused 2 "usage" block show
refused 2 "token 2: 'keeper' given.*--model GGUF" prefix show 1 keeper
refused 2 "TAG=TEXT" prefix show --field salt=x 1
refused 2 "tag 2 was given before" prefix show --salt a --salt b 1
refused 2 "needs --model" prefix show --chat 1
refused 2 "usage" prefix show
refused 2 "one of them" prefix show --file "$dir/tokens" 1
refused 2 "'--nonsense' isn't known" prefix show --nonsense 1

exec 9>&-
for pid in "${pids[@]}"; do
	wait "$pid" || fail "a holder failed"
done
expect 0 "$kvctl" check
daemon_stop
