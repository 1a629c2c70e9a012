#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The worker is killed again and again, at random moments, while engines work: none of them may notice,
# their text is what it always is, after each death the books balance, and what was cached is found.
#
#	worker_killed.sh BUILD_FOLDER [TIMES]		24 times in the suite, 1,000 by hand
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

source=$(dirname "$0")/../..
kvengine=$build/tools/engine/kvengine
times=${2:-24}
read -ra memory <<< "${KV_TEST_MEMORY:---host 256M}"

head -c 600 "$source/tools/quickstart.txt" > "$dir/prompt"

# engine NAME [OPTION...]
engine()
{
	local name=$1

	shift
	timeout -k 5 $command_deadline "$kvengine" --socket "$socket" --device host --model tiny "$@" \
		> "$dir/$name.text" 2> "$dir/$name.stats" < /dev/null
}

# Engines that go on until told to stop, each with a prompt that it and others have seen before, and one
# of its own that nobody has.
busy()
{
	local name=$1 n=0

	while [ ! -e "$dir/stop" ]; do
		n=$((n + 1))
		{ echo "$name $n"; head -c 300 "$dir/prompt"; } > "$dir/$name.fresh"
		engine "$name" -n 40 --prompt-file "$dir/prompt" --prompt-file "$dir/$name.fresh" || {
			echo "engine $name, run $n: $? $(cat "$dir/$name.stats")" > "$dir/$name.failed"
			return
		}
	done
	echo "$n" > "$dir/$name.runs"
}

# What prints of an engine with two prompts: the text of the first of them.
engine_text()
{
	head -c "$(wc -c < "$dir/alone.text")" "$1"
}

daemon_start "${memory[@]}"
engine alone -n 40 --prompt-file "$dir/prompt" || fail "kvengine: $(cat "$dir/alone.stats")"
before=$(descriptors)
busy a &
busy b &

for ((i = 1; i <= times; i++)); do
	worker=$(worker_pid)
	sleep "0.$(printf '%03d' $((RANDOM % 150)))"
	kill -9 "$worker" || fail "round $i: the worker had ended by itself"
	expect 0 "$kvctl" -s "$socket" check
	expect_out 'books balance'
	! ls "$dir"/*.failed > /dev/null 2>&1 || fail "round $i: $(cat "$dir"/*.failed)"
	! grep -E 'errors in its books|[1-9][0-9]* cached blocks dropped' "$dir/daemon.log" ||
		fail "round $i: the rebuilt books"
done
touch "$dir/stop"
wait %2 %3
! ls "$dir"/*.failed > /dev/null 2>&1 || fail "$(cat "$dir"/*.failed)"

say "what was cached is found after one more death, and the text is right"
kill -9 "$(worker_pid)"
engine again -n 40 --prompt-file "$dir/prompt" || fail "kvengine: $(cat "$dir/again.stats")"
cmp -s "$dir/alone.text" "$dir/again.text" || fail "the text has changed"
expect 0 "$kvctl" -s "$socket" --json stats
python3 -IS - "$dir/out" "$times" <<- 'END' || fail "stats: $(cat "$dir/out")"
	import json, sys
	x = json.load(open(sys.argv[1]))
	assert x['daemon']['worker_restarts'] == int(sys.argv[2]) + 1, 'worker_restarts'
	assert not x['sessions'], 'sessions'
	pool = x['pools'][0]
	assert pool['blocks_cached'] and not pool['blocks_leased'] and not pool['blocks_quarantined']
END
after=$(descriptors)
[ "$after" -eq "$before" ] || fail "the daemon had $before descriptors, now it has $after"
say "killed $times times; engines ran $(cat "$dir/a.runs") + $(cat "$dir/b.runs") times"
daemon_stop
