#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Engine processes that share a prompt: the second finds what the first computed, writes the same text
# as an engine that shares nothing, and begins to write at least 5 times sooner. One after the other,
# back and forth, and started at the same moment. With the built-in model always, with SmolLM2 where
# its file is (KV_TEST_SMALL=1: not even then; sanitizers make it too slow).
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

source=$(dirname "$0")/../..
kvengine=$build/tools/engine/kvengine
smollm2=$source/models/SmolLM2-135M-Instruct.Q4_1.gguf
story=$source/tools/quickstart.txt
# For engines_share_gpu.sh: where engines compute, on which of the daemon's devices, and its arguments
device=${KV_TEST_DEVICE:-host}
engine_deadline=120 # seconds
gpu=${KV_TEST_GPU:-0}
read -ra memory <<< "${KV_TEST_MEMORY:---host 1G}"

# engine NAME [OPTION...]: text in $dir/NAME.text, what --stats says in $dir/NAME.stats
engine()
{
	local name=$1

	shift
	timeout -k 5 $engine_deadline "$kvengine" --socket "$socket" --device "$device" \
		--gpu "$gpu" --model "$model" --stats "$@" > "$dir/$name.text" 2> "$dir/$name.stats" < /dev/null
}

# run NAME [OPTION...]: an engine that must succeed
run()
{
	engine "$@" || fail "kvengine ended with $?: $(cat "$dir/$1.stats")"
}

# number NAME FIELD
number()
{
	sed -n "s/^$2: //p" "$dir/$1.stats" | head -n 1
}

same_text()
{
	[ -s "$dir/$1.text" ] || fail "$1 wrote nothing"
	cmp -s "$dir/$1.text" "$dir/$2.text" ||
		fail "$1 and $2 wrote different texts:$(printf '\n%s' "$(cat "$dir/$1.text")" \
			"$(cat "$dir/$2.text")")"
}

is()
{
	awk "BEGIN { exit !($1) }" || fail "not so: $1 ($2)"
}

balanced()
{
	expect 0 "$kvctl" -s "$socket" check
	expect_out 'books balance'
}

forget()
{
	local pool

	"$kvctl" -s "$socket" --json pool list > "$dir/pools" || fail "pool list"
	while read -r pool; do
		"$kvctl" -s "$socket" pool drop "$pool" > "$dir/out" || fail "pool drop $pool"
	done < <(tr ',{}' '\n' < "$dir/pools" | sed -n 's/^ *"name": *"\(.*\)" *$/\1/p')
}

one_after_the_other()
{
	local warm=0 i

	say "  cold, then warm"
	run alone -n 48 --prompt-file "$dir/prompt" --no-share
	is "$(number alone prompt_tokens) == 600" "the prompt"
	is "$(number alone hit_tokens) == 0" "alone"
	run cold -n 48 --prompt-file "$dir/prompt"
	is "$(number cold hit_tokens) == 0" "cold"
	same_text cold alone
	for i in 1 2 3; do
		run "warm$i" -n 48 --prompt-file "$dir/prompt"
		is "$(number "warm$i" hit_tokens) >= 592" "warm $i"
		same_text "warm$i" alone
		# The best of three: a busy machine only ever makes a time longer.
		warm=$(number "warm$i" ttft_ms)$'\n'$warm
	done
	warm=$(grep -v '^0$' <<< "$warm" | sort -g | head -n 1)
	say "    first token after $(number cold ttft_ms) ms cold, $warm ms warm"
	is "$(number cold ttft_ms) >= 5 * $warm" "time to first token"
	run again -n 48 --prompt-file "$dir/prompt" --no-share
	is "$(number again hit_tokens) == 0" "--no-share found something"
	same_text again alone
	balanced
}

back_and_forth()
{
	local i

	say "  A, then B with another end, then A with what B asked and more"
	forget
	{ cat "$dir/prompt" && printf ' Ana.\nQuestion: And who was Pell?\nAnswer:'; } > "$dir/longer"
	{ cat "$dir/longer" && printf ' The keeper.\nQuestion: Where does Merrow lie?\nAnswer:'; } \
		> "$dir/longest"
	for i in prompt longer longest; do
		run "alone-$i" -n 24 --prompt-file "$dir/$i" --no-share
		run "$i" -n 24 --prompt-file "$dir/$i"
		same_text "$i" "alone-$i"
	done
	is "$(number prompt hit_tokens) == 0" "A"
	# A text's last block isn't complete: what is found ends with the block before.
	is "$(number longer hit_tokens) >= 592" "B"
	is "$(number longest hit_tokens) > $(number longer prompt_tokens) - 17" "A again"
	balanced
}

at_the_same_moment()
{
	local hits best=0 first second

	say "  both at the same moment"
	for _ in 1 2 3; do
		forget
		engine first -n 48 --prompt-file "$dir/prompt" &
		first=$!
		engine second -n 48 --prompt-file "$dir/prompt" &
		second=$!
		wait $first || fail "the first ended with $?: $(cat "$dir/first.stats")"
		wait $second || fail "the second ended with $?: $(cat "$dir/second.stats")"
		same_text first alone
		same_text second alone
		hits=$(($(number first hit_tokens) + $(number second hit_tokens)))
		say "    $(number first hit_tokens) and $(number second hit_tokens) of 600 tokens found"
		[ $hits -le $best ] || best=$hits
		balanced
	done
	# Who comes second waits for the blocks that the first has promised: all but the last are found.
	is "$best >= 512" "two at once computed the same"
}

in_one_batch()
{
	local i

	say "  several prompts in one batch, and with another engine beside it"
	forget
	head -c 300 "$story" > "$dir/short"
	engine beside -n 48 --prompt-file "$dir/prompt" &
	run batch -n 24 --prompt-file "$dir/short" --prompt-file "$dir/longer" \
		--prompt-file "$dir/prompt" --max-batch 2 --chunk 48
	wait $! || fail "the engine beside ended with $?: $(cat "$dir/beside.stats")"
	same_text beside alone
	run alone-short -n 24 --prompt-file "$dir/short" --no-share
	i=0
	for prompt in short longer prompt; do
		echo "== $i =="
		cat "$dir/alone-$prompt.text"
		i=$((i + 1))
	done > "$dir/apart.text"
	same_text batch apart
	balanced
}

# On a GPU a step of the tiny model is all launches: its time says nothing about the tokens in it.
builtin=tiny
[ "$device" = host ] || builtin=small
models=("$builtin")
if [ "${KV_TEST_SMALL:-0}" = 1 ] || [ ! -r "$smollm2" ]; then
	say "without SmolLM2: the built-in model alone"
else
	models+=("$smollm2")
fi

for model in "${models[@]}"; do
	say "$(basename "$model")"
	if [ "$model" = "$builtin" ]; then
		head -c 600 "$story" > "$dir/prompt"
	else
		{ cat "$story" && printf 'Question: Who owns the oldest yard?\nAnswer:'; } \
			> "$dir/prompt" # 600 tokens of its vocabulary
	fi
	daemon_start "${memory[@]}"
	one_after_the_other
	back_and_forth
	at_the_same_moment
	in_one_batch
	expect 0 "$kvctl" -s "$socket" --json session list
	[ "$(tr -d ' \n' < "$dir/out")" = '[]' ] || fail "sessions are left: $(cat "$dir/out")"
	daemon_stop
done

say "wrong words and missing things have their exit statuses"
model=tiny
expect 2 "$kvengine" --model tiny
expect 2 "$kvengine" --prompt x
expect 2 "$kvengine" --model tiny --prompt x --chunk none
expect 2 "$kvengine" --model tiny --prompt x --nonsense
expect 0 "$kvengine" --help
expect_out 'no-share'
expect 0 "$kvengine" --version
expect 3 "$kvengine" --socket "$dir/none.sock" --model tiny --prompt x
expect_err 'none.sock'
daemon_start "${memory[@]}"
expect 1 "$kvengine" --socket "$socket" --model "$dir/none.gguf" --prompt x
expect_err 'none.gguf'
expect 1 "$kvengine" --socket "$socket" --model "$0" --prompt x
expect_err 'GGUF'
expect 1 "$kvengine" --socket "$socket" --model tiny --prompt x --gpu 7
expect_err 'gpu 7'
expect 1 "$kvengine" --socket "$socket" --model tiny --prompt ''
expect_err '0 tokens'
expect 1 "$kvengine" --socket "$socket" --model tiny --prompt x --chat
expect_err 'chat template'
expect 0 "$kvengine" --socket "$socket" --model tiny --prompt x --pool same -n 1
expect 1 "$kvengine" --socket "$socket" --model tiny --prompt x --pool same --block-tokens 32
expect_err 'same.*block'
daemon_stop
