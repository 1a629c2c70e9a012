#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Engines whose sequences don't fit together: the youngest gives its blocks back, waits and comes back,
# and every text is the one that it writes alone. With one engine, and with two that press each other.
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

kvengine=$build/tools/engine/kvengine
story=$(dirname "$0")/../../tools/quickstart.txt
engine_deadline=240 # seconds

# engine NAME [OPTION...]
engine()
{
	local name=$1

	shift
	timeout -k 5 $engine_deadline "$kvengine" --socket "$socket" --model tiny --stats "$@" \
		> "$dir/$name.text" 2> "$dir/$name.stats" < /dev/null
}

preemptions()
{
	sed -n 's/^preemptions: //p' "$dir/$1.stats" | awk '{ n += $1 } END { print n + 0 }'
}

# same NAME I...: its text is those of the prompts, each written alone
same()
{
	local name=$1 i n=0

	shift
	for i; do
		echo "== $n =="
		cat "$dir/alone$i.text"
		n=$((n + 1))
	done > "$dir/want"
	cmp -s "$dir/want" "$dir/$name.text" || fail "the texts of $name aren't those written alone"
}

balanced()
{
	expect 0 "$kvctl" -s "$socket" check
	expect_out 'books balance'
}

say "each prompt alone"
daemon_start --host 64M
for i in 0 1 2 3; do
	tail -c +$((1 + 300 * i)) "$story" | head -c 600 > "$dir/prompt$i"
	engine "alone$i" --prompt-file "$dir/prompt$i" -n 330 --no-share ||
		fail "kvengine ended with $?: $(cat "$dir/alone$i.stats")"
done
daemon_stop

say "three in one engine, in a pool for less"
daemon_start --host 8M # 170 blocks of 48 KiB, 16 tokens each; three sequences end with 58 each
engine three -n 330 --prompt-file "$dir/prompt0" --prompt-file "$dir/prompt1" \
	--prompt-file "$dir/prompt2" || fail "kvengine ended with $?: $(cat "$dir/three.stats")"
same three 0 1 2
say "    $(preemptions three) preemptions"
[ "$(preemptions three)" -ge 1 ] || fail "nothing had to go"
balanced

say "two engines of two each"
engine first -n 330 --prompt-file "$dir/prompt0" --prompt-file "$dir/prompt1" &
first=$!
engine second -n 330 --prompt-file "$dir/prompt2" --prompt-file "$dir/prompt3" &
second=$!
wait $first || fail "the first ended with $?: $(cat "$dir/first.stats")"
wait $second || fail "the second ended with $?: $(cat "$dir/second.stats")"
same first 0 1
same second 2 3
say "    $(preemptions first) and $(preemptions second) preemptions"
[ $(($(preemptions first) + $(preemptions second))) -ge 1 ] || fail "nothing had to go"
balanced

say "what never fits is refused, the others are served"
for _ in 1 2; do
	cat "$story"
done > "$dir/long" # 5 KiB, 332 blocks
engine refused -n 330 --prompt-file "$dir/prompt0" --prompt-file "$dir/long" \
	--prompt-file "$dir/prompt1" && fail "a prompt larger than the pool was served"
grep -q 'prompt 1: the pool never has room' "$dir/refused.stats" ||
	fail "no word of it: $(cat "$dir/refused.stats")"
for i in 0 1; do
	grep -qxF -f "$dir/alone$i.text" "$dir/refused.text" || fail "prompt $i has another text"
done
balanced

say "no room because of somebody else: said in time, or waited for"
head -c 2300 "$story" > "$dir/large" # 144 of the 169 blocks; 38 are asked for
engine large --prompt-file "$dir/large" -n 390 &
large=$!
expect_soon 60 test -s "$dir/large.text" # it has begun to write, and holds them
pid=$(pgrep -P "$(pgrep -P $large)") # the shell's timeout's engine
kill -STOP "$pid"
expect 1 "$kvengine" --socket "$socket" --model tiny --prompt-file "$dir/prompt3" -n 4 --wait 1
expect_err 'no room for 600 tokens within 1 s'
engine patient --prompt-file "$dir/prompt3" -n 330 --wait 60 &
patient=$!
sleep 0.5
kill -CONT "$pid"
wait $large || fail "the large one ended with $?: $(cat "$dir/large.stats")"
wait $patient || fail "the patient one ended with $?: $(cat "$dir/patient.stats")"
cmp -s "$dir/patient.text" "$dir/alone3.text" || fail "who waited wrote another text"
balanced
daemon_stop
