#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Gemma 3 270M, whose layers are two groups: sensible text; a prompt longer than the window is found by a
# second engine in both groups, and its text is that of an engine that shares nothing; windows give back what no
# later token sees. A skip where models/ hasn't the file (tools/setup --gemma).
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

source=$(dirname "$0")/../..
model=$source/models/gemma-3-270m-q4_k_m.gguf
story=$source/tools/quickstart.txt
if [ ! -r "$model" ]; then
	say "no model: tools/setup --gemma fetches it"
	exit 77
fi

# run NAME [OPTION...]: text in $dir/NAME.text, what --stats says in $dir/NAME.stats
run()
{
	local name=$1

	shift
	timeout -k 5 120 "$build/tools/engine/kvengine" --socket "$socket" --model "$model" --stats "$@" \
		> "$dir/$name.text" 2> "$dir/$name.stats" < /dev/null ||
		fail "kvengine ended with $?: $(cat "$dir/$name.stats")"
}

number()
{
	sed -n "s/^$2: //p" "$dir/$1.stats" | head -n 1
}

daemon_start --host 512M

say "sensible text"
run france -n 16 -p "The capital of France is"
grep -q 'France.*city' "$dir/france.text" || fail "it wrote: $(cat "$dir/france.text")"

say "a prompt of more than a window, alone and shared"
{ cat "$story" "$story" && printf 'Question: Who owns the oldest yard?\nAnswer:'; } > "$dir/prompt"
for name in alone first second; do
	option=()
	[ $name != alone ] || option=(--no-share)
	run $name -n 8 --prompt-file "$dir/prompt" "${option[@]}"
	cmp -s "$dir/$name.text" "$dir/alone.text" ||
		fail "$name wrote $(cat "$dir/$name.text"), alone $(cat "$dir/alone.text")"
done
n=$(number alone prompt_tokens)
[ "$n" -gt 1024 ] || fail "the prompt has $n tokens, more than two windows are needed"
[ "$(number first hit_tokens)" = 0 ] || fail "the first found $(number first hit_tokens)"
[ "$(number second hit_tokens)" = $(((n - 1) / 16 * 16)) ] ||
	fail "the second found $(number second hit_tokens) of $n"
grep -q okoro -i "$dir/alone.text" || fail "it answered: $(cat "$dir/alone.text")"
expect 0 "$kvctl" -s "$socket" pool list
expect_out '\.window512'
expect_out '\.full'

# leased GROUP: blocks of the private pool that are leased now; nothing while there is no such pool
leased()
{
	sed -n "/\"name\": \"private-.*\.$1\"/,/}/s/.*\"blocks_leased\": \([0-9]*\).*/\1/p" "$dir/pools"
}

say "windows leave blocks behind"
timeout -k 5 120 "$build/tools/engine/kvengine" --socket "$socket" --model "$model" --no-share -n 4 \
	--block-tokens 1 --chunk 64 --prompt-file "$dir/prompt" > "$dir/ones.text" < /dev/null &
engine=$!
full=0 window=0
while kill -0 $engine 2> /dev/null; do
	"$kvctl" -s "$socket" --json pool list > "$dir/pools" || fail "pool list"
	for now in $(leased full); do [ "$now" -le "$full" ] || full=$now; done
	for now in $(leased window512); do [ "$now" -le "$window" ] || window=$now; done
	sleep 0.1
done
wait $engine || fail "kvengine ended with $?"
# A window and a chunk, and what the library takes ahead: 256
say "  $full blocks of one token at most in layers that see all, $window in those that slide"
[ "$full" -ge 1000 ] || fail "not seen at work: $full blocks"
[ "$window" -le 900 ] || fail "windows held $window blocks of one token"
expect 0 "$kvctl" -s "$socket" check
expect_out 'books balance'
daemon_stop
