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

# What each family's config costs, worked out by hand: MODEL, bytes of a token in layers that keep all
# of them, bytes of a sequence's states. K and V: heads * dimension * 2 B (Gemma 2: 4 B) * layers;
# latent and position * 2 B; an indexer's key 128 B and a scale of 4; states: channels of a
# convolution * 3 steps * 2 B, and floats.
while read -r model token state; do
	expect 0 "$models/$model.json" --budget 400G --context 4096 --layout split --json
	holds "(x['token_bytes'], x['state_bytes']) == ($token, $state)"
done <<-'END'
	llama-2-7b 2*32*128*2*32 0
	llama-3-8b 2*8*128*2*32 0
	llama-3-70b 2*8*128*2*80 0
	llama-4-scout 2*8*128*2*12 0
	qwen2-7b 2*4*128*2*28 0
	qwen2.5-72b 2*8*128*2*80 0
	qwen3-32b 2*8*128*2*64 0
	qwen3-235b-a22b 2*4*128*2*94 0
	qwen3-next-80b-a3b 2*2*256*2*12 36*((2*16*128+32*128)*3*2+32*128*128*4)
	qwen3.5-35b-a3b 2*2*256*2*10 30*((2*16*128+32*128)*3*2+32*128*128*4)
	mistral-7b-v0.1 0 0
	mistral-7b-v0.3 2*8*128*2*32 0
	mixtral-8x7b 2*8*128*2*32 0
	gemma-2-9b 2*8*256*4*21 0
	gemma-3-27b 2*16*128*2*10 0
	gemma-3n-e4b 2*2*256*2*4 0
	gpt-oss-20b 2*8*64*2*12 0
	gpt-oss-120b 2*8*64*2*18 0
	phi-3-mini-4k 0 0
	phi-4 2*10*128*2*40 0
	glm-4-9b-chat 2*2*128*2*40 0
	glm-4.5 2*8*128*2*92 0
	glm-5 ((512+64)*2+132)*78 0
	deepseek-v2-lite (512+64)*2*27 0
	deepseek-v3 (512+64)*2*61 0
	deepseek-r1 (512+64)*2*61 0
	deepseek-v3.2 ((512+64)*2+132)*61 0
	kimi-k2 (512+64)*2*61 0
	minimax-text-01 2*8*128*2*10 70*64*128*128*4
	minimax-m2 2*8*128*2*62 0
	nemotron-h-8b 2*8*128*2*4 24*((128*64+2*8*128)*3*2+128*64*128*4)
	granite-4.0-h-tiny 2*4*128*2*4 36*((48*64+2*128)*3*2+48*64*128*4)
	jamba-v0.1 2*8*128*2*4 28*(8192*3*2+8192*16*4)
	falcon-h1-7b 2*2*128*2*44 44*((24*128+2*256)*3*2+24*128*256*4)
	whisper-large-v3-turbo 2*20*64*2*4 0
	llama-3.2-11b-vision 2*8*128*2*32 0
	END
# V4: rows of 584 B for 64 tokens, to a multiple of 576, of 43 windows; 21 layers with a row for 4 tokens
expect 0 "$models/deepseek-v4-flash.json" --budget 400G --layout grouped --json
holds '{g["name"]: g["payload_bytes"] for g in x["groups"]}["window"] == 43 * 576 * 65'
holds '{g["name"]: g["payload_bytes"] for g in x["groups"]}["c4.kv"] == 21 * (576 * 65 + 64 * 132)'

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

# which backends serve it; what another engine's names mean
expect 0 "$models/llama-3-8b.json" --backends --json
holds '{(b["backend"], b["n_layers"]) for b in x["backends"] if b["serves"] and b["device"] == "host"} == {("cpu", 32), ("ref", 32)}'
holds 'x["tokenspeed"] == {"architecture": "MHA", "backend": "MHAAttnBackend", "hybrid": False, "forced": False}'
expect 0 "$models/llama-3-8b.json" --backends --kv-dtype int8 --json
holds 'not any(b["serves"] for b in x["backends"]) and "int8" in x["backends"][0]["why_not"]'
expect 0 "$models/deepseek-v3.json" --attention-backend flashmla --json
holds 'x["tokenspeed"]["backend"] == "FlashMLABackend" and any(b["serves"] for b in x["backends"])'
holds 'all(b["layer"] == "latents of 512 + 64" for b in x["backends"])'
expect 0 "$models/deepseek-v3.2.json" --backends --json
holds 'x["tokenspeed"]["architecture"] == "DSA" and any(b["backend"] == "kv_sparse_mla" for b in x["backends"])'
expect 0 "$models/deepseek-v4-flash.json" --attention-backend trtllm --json
holds 'x["tokenspeed"]["backend"] == "DeepseekV4AttentionBackend" and x["tokenspeed"]["forced"]'
expect 0 "$models/qwen3.5-35b-a3b.json" --backends --json
holds 'x["tokenspeed"]["hybrid"] and {b["n_layers"] for b in x["backends"]} == {10, 30}'
expect 0 "$models/gemma-3-27b.json" --backends
expect 1 "$models/llama-3-8b.json" --attention-backend fast
says "'fast' given; mha, fa3, .*, dsa exist"
expect 1 "$models/llama-3-8b.json" --attention-backend flashmla
says "'flashmla' is for MLA, the model is MHA"

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
