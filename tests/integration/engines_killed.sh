#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# An engine is killed in the middle of whatever it does, again and again at random moments, while another
# goes on: after each death the books balance and what it held is back, the other's text is what
# it always is, and in the end the daemon holds as many descriptors as at the start.
#
#	engines_killed.sh BUILD_FOLDER [TIMES]
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

source=$(dirname "$0")/../..
kvengine=$build/tools/engine/kvengine
times=${2:-100}
device=${KV_TEST_DEVICE:-host}
read -ra memory <<< "${KV_TEST_MEMORY:---host 256M}"

head -c 600 "$source/tools/quickstart.txt" > "$dir/prompt"
head -c 400 "$source/tools/quickstart.txt" > "$dir/other"

# engine NAME [OPTION...]
engine()
{
	local name=$1

	shift
	timeout -k 5 $command_deadline "$kvengine" --socket "$socket" --device "$device" --model tiny "$@" \
		> "$dir/$name.text" 2> "$dir/$name.stats" < /dev/null
}

# The killed one's session ends when its process is gone.
until_no_session()
{
	local deadline=$((SECONDS + 10))

	while "$kvctl" -s "$socket" --json session list | grep -q '"slot"'; do
		((SECONDS < deadline)) || fail "$1: a session is left: $("$kvctl" -s "$socket" session list)"
		sleep 0.01
	done
}

daemon_start "${memory[@]}"
engine alone -n 40 --prompt-file "$dir/prompt" --no-share || fail "kvengine: $(cat "$dir/alone.stats")"
engine warm -n 40 --prompt-file "$dir/prompt" || fail "kvengine: $(cat "$dir/warm.stats")"
cmp -s "$dir/alone.text" "$dir/warm.text" || fail "sharing changed the text"
before=$(descriptors)

for ((i = 0; i < times; i++)); do
	# Prompts that nobody has cached yet, so that it is killed while it computes, writes and publishes.
	{ echo "$i $RANDOM"; cat "$dir/other"; } > "$dir/fresh"
	"$kvengine" --socket "$socket" --device "$device" --model tiny -n 4000 --prompt-file "$dir/fresh" \
		--prompt-file "$dir/prompt" --prompt-file "$dir/other" > /dev/null 2>&1 < /dev/null &
	victim=$!
	engine living -n 40 --prompt-file "$dir/prompt" &
	living=$!
	sleep "0.$(printf '%03d' $((RANDOM % 250)))"
	kill -9 $victim 2> /dev/null || fail "round $i: the victim had ended by itself"
	wait $victim 2> /dev/null
	wait $living || fail "round $i: the other engine ended with $?: $(cat "$dir/living.stats")"
	cmp -s "$dir/alone.text" "$dir/living.text" || fail "round $i: the other engine's text is not right"
	until_no_session "round $i"
	expect 0 "$kvctl" -s "$socket" check
	expect_out 'books balance'
	"$kvctl" -s "$socket" --json pool list > "$dir/pools" || fail "round $i: pool list"
	if grep -E '"blocks_(leased|quarantined|cached_held)": *[1-9]' "$dir/pools" > "$dir/held"; then
		fail "round $i: blocks that nobody holds are not free: $(cat "$dir/held")"
	fi
done

after=$(descriptors)
[ "$after" -eq "$before" ] || fail "the daemon had $before descriptors, now it has $after"
say "killed $times times"
daemon_stop
