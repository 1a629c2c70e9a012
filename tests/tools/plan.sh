#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# plan.sh KVCTL MODELS: kvctl plan with no daemon: answers in both forms, errors, exit statuses.
set -euo pipefail

kvctl=$1
models=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export KVCACHED_SOCKET=$dir/none # nothing listens there

fail() {
	echo "plan.sh: $*" >&2
	cat "$dir/out" "$dir/err" >&2
	exit 1
}

# expect STATUS ARG...: run kvctl plan
expect() {
	local status=$1 r=0

	shift
	"$kvctl" plan "$@" >"$dir/out" 2>"$dir/err" || r=$?
	[ "$r" = "$status" ] || fail "kvctl plan $*: status $r, not $status"
}

# An expression of Python over x, the JSON on stdout.
holds() {
	python3 -IS -c '
import json, sys
x = json.load(open(sys.argv[2]))
assert eval(sys.argv[1]), x' "$1" "$dir/out" || fail "not so: $1"
}

says() {
	grep -Eq -- "$1" "$dir/err" || fail "no word of: $1"
}

comma=[
for model in "$models"/*.json; do
	expect 0 "$model" --budget 200G
	[ ! -s "$dir/err" ] || fail "$model: words on stderr"
	expect 0 "$model" --budget 200G --json
	{ echo "$comma" && cat "$dir/out"; } >>"$dir/all"
	comma=,
done
{ cat "$dir/all" && echo ']'; } >"$dir/out"
holds 'len(x) > 30 and all(m["used_bytes"] + m["waste_bytes"] == 200 << 30 for m in x)'
holds 'all(sum(p["bytes"] for p in m["pools"]) == m["used_bytes"] for m in x)'
holds 'all(c["offset"] % 256 == 0 for m in x for c in m["components"])'

# 8 heads of 128, K and V, 2 bytes, 32 layers, on 2 ranks; a block of 16: 1 MiB
expect 0 "$models/llama-3-8b.json" --budget 1G --tp 2 --block-size 16 --json
holds 'x["token_bytes"] == 65536 and x["pools"][0]["n_blocks"] == 1024'
holds 'x["alternatives"][0]["kv_dtype"] == "fp8"'

# a draft's layer rides on the same block
expect 0 "$models/llama-3-8b.json" --budget 1G --draft "$models/eagle3-llama-3-8b.json" --json
holds 'x["token_bytes"] == 33 * 4096 and len(x["pools"]) == 1'

# two models share, and nothing is lost
expect 0 "$models/llama-3-8b.json,min=10G,max=20G" "$models/qwen3-32b.json" --budget 120G --json
holds 'len(x) == 2 and sum(m["budget_bytes"] for m in x) == 120 << 30'
holds 'x[0]["budget_bytes"] == 20 << 30'
expect 1 "$models/llama-3-8b.json,min=100G" "$models/qwen3-32b.json,min=30G" --budget 120G
says 139586437120

# what --model prints is read as the same model
expect 0 "$models/qwen3-next-80b-a3b.json" --model
cp "$dir/out" "$dir/model.json"
expect 0 "$dir/model.json" --budget 10G --json
cp "$dir/out" "$dir/first"
expect 0 "$models/qwen3-next-80b-a3b.json" --budget 10G --json
holds 'x["pools"] == json.load(open("'"$dir"'/first"))["pools"]'

expect 2 --budget 1G
says 'no config.json'
expect 2 "$models/llama-3-8b.json"
says '--budget'
expect 2 "$models/llama-3-8b.json" --budget much
says 'budget.*much'
expect 2 "$models/llama-3-8b.json" --budget 1G --kv-dtype q5
says 'fp8_packed'
expect 2 "$models/llama-3-8b.json" --budget 1G --layout round
says 'grouped'
expect 2 "$models/llama-3-8b.json" --budget 1G --nonsense
says 'nonsense'
expect 1 "$models/llama-3-8b.json" --budget 1M
says 'budget_bytes: 1048576 given, 16777216 needed'
expect 1 "$models/llama-3-8b.json" --budget 1G --tp 3
says 'tp: 3'
expect 1 /nonexistent.json --budget 1G
says nonexistent
