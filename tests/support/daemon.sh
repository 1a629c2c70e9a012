# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# A real daemon for a shell test, on a socket of its own in a folder of its own. Source it first:
#
#	#!/usr/bin/env bash
#	. "$(dirname "$0")/../support/daemon.sh"		# $1 of the test: the build folder
#
#	daemon_start --host 256M
#	expect 0 "$kvctl" ping
#	expect_out 'round trip'
#	daemon_stop
#
# What it gives:
#	$build $dir $socket $kvctl	build folder, the test's folder, the daemon's socket, kvctl
#	daemon_start [ARG...]		start kvcached and wait until it answers; $daemon_pid
#	daemon_stop			SIGTERM; it must end with 0 and take its socket file along
#	daemon_kill			SIGKILL for its keeper; what a crash leaves behind stays
#	worker_pid			the pid of its worker
#	descriptors			how many files keeper and worker have open
#	expect STATUS COMMAND...	run it; its words stand in $dir/out and $dir/err
#	expect_out REGEX, expect_err REGEX, expect_json	what the last `expect` wrote
#	expect_soon SECONDS COMMAND...	the command succeeds before the time is over
#	say TEXT, fail TEXT, skip TEXT	(skip: meson's exit status 77)
#
# Every wait has a deadline. When the test ends, however it ends, the daemon is killed and the folder is
# removed; a failed test shows the last command's words and the daemon's log first.
#
# KV_TEST_EVENT_LOOP=epoll in the environment runs a test's daemons with that event loop.

set -u

build=$(realpath "${1:?usage: $0 BUILD_FOLDER}")
dir=$(mktemp -d "${TMPDIR:-/tmp}/kvcached-test.XXXXXX")
socket=$dir/kvcached.sock
kvctl=$build/tools/kvctl
daemon_pid=
daemon_deadline=20	# seconds to start or to stop; sanitizers on a busy machine are slow
command_deadline=60	# seconds for a command of `expect`

# Nothing of the caller's own daemon may be reached by a program that isn't told a socket.
export KVCACHED_SOCKET=$socket XDG_RUNTIME_DIR=$dir
: > "$dir/out"
: > "$dir/err"

say()
{
	printf '%s\n' "$*"
}

fail()
{
	say "FAILED (line ${BASH_LINENO[-2]:-?}): $*"
	for words in out err daemon.log; do
		[ -s "$dir/$words" ] || continue
		say "--- $words"
		tail -n 60 "$dir/$words"
	done
	exit 1
}

skip()
{
	say "skipped: $*"
	exit 77
}

cleanup()
{
	local status=$?

	trap - EXIT INT TERM HUP
	daemon_kill
	rm -rf "$dir"
	exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT TERM HUP

daemon_start()
{
	local start=$SECONDS
	local loop=()

	[ -z "${KV_TEST_EVENT_LOOP:-}" ] || loop=(--event-loop "$KV_TEST_EVENT_LOOP")
	# The daemon dies with this shell, also when the shell is killed.
	setpriv --pdeathsig KILL "$build/daemon/kvcached" --socket "$socket" "${loop[@]}" "$@" \
		>> "$dir/daemon.log" 2>&1 &
	daemon_pid=$!
	until "$kvctl" -s "$socket" --timeout 1 ping > /dev/null 2> "$dir/err"; do
		if ! daemon_alive; then
			[ "${KV_TEST_EVENT_LOOP:-}" != io_uring ] ||
				! grep 'io_uring refused' "$dir/daemon.log" || skip "no io_uring here"
			fail "kvcached $* ended at its start"
		fi
		[ $((SECONDS - start)) -lt $daemon_deadline ] ||
			fail "kvcached $* didn't answer within $daemon_deadline s"
		sleep 0.05
	done
}

daemon_alive()
{
	# A zombie still takes signals: look at its state. The name may hold blanks, so cut it off.
	[ -n "$daemon_pid" ] && [ -r "/proc/$daemon_pid/stat" ] &&
		[ "$(sed 's/.*) //; s/ .*//' "/proc/$daemon_pid/stat" 2> /dev/null)" != Z ]
}

daemon_stop()
{
	local start=$SECONDS status

	kill -TERM "$daemon_pid" 2> /dev/null || fail "kvcached had ended before it was stopped"
	while daemon_alive; do
		[ $((SECONDS - start)) -lt $daemon_deadline ] ||
			fail "kvcached didn't stop within $daemon_deadline s"
		sleep 0.05
	done
	wait "$daemon_pid"
	status=$?
	daemon_pid=
	[ $status -eq 0 ] || fail "kvcached ended with $status after SIGTERM"
	[ ! -e "$socket" ] || fail "kvcached left $socket behind"
}

worker_pid()
{
	local deadline=$((SECONDS + daemon_deadline)) pid name pids

	# By its name: an orphan of a worker before it may still be there.
	while ((SECONDS < deadline)); do
		read -ra pids 2> /dev/null < "/proc/$daemon_pid/task/$daemon_pid/children"
		for pid in "${pids[@]}"; do
			read -r name 2> /dev/null < "/proc/$pid/comm" || continue
			[ "$name" = kvcached-worker ] || continue
			echo "$pid"
			return
		done
		sleep 0.01
	done
	fail "kvcached has no worker"
}

descriptors()
{
	find "/proc/$daemon_pid/fd" "/proc/$(worker_pid)/fd" -mindepth 1 | wc -l
}

daemon_kill()
{
	[ -n "$daemon_pid" ] || return 0
	kill -KILL "$daemon_pid" 2> /dev/null
	wait "$daemon_pid" 2> /dev/null	# takes bash's own "Killed" with it
	daemon_pid=
}

expect()
{
	local want=$1 status

	shift
	timeout -k 5 $command_deadline "$@" > "$dir/out" 2> "$dir/err" < /dev/null
	status=$?
	[ $status -eq "$want" ] || fail "$(basename "$1") ${*:2}: exit $status, expected $want"
}

expect_out()
{
	grep -Eq -- "$1" "$dir/out" || fail "stdout has no line like: $1"
}

expect_err()
{
	grep -Eq -- "$1" "$dir/err" || fail "stderr has no line like: $1"
}

expect_json()
{
	python3 -IS -m json.tool < "$dir/out" > /dev/null 2> "$dir/json.err" ||
		fail "stdout isn't JSON: $(cat "$dir/json.err")"
}

expect_soon()
{
	local start=$SECONDS seconds=$1

	shift
	until timeout -k 5 "$seconds" "$@" > "$dir/out" 2> "$dir/err" < /dev/null; do
		[ $((SECONDS - start)) -lt "$seconds" ] || fail "not within $seconds s: $*"
		sleep 0.05
	done
}
