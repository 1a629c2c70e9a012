#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Completion of kvctl: a real bash at a terminal, every word of the table, names that the daemon knows; and of the others.
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

holder=$build/tests/support/holder
export PATH=$build/tools:$PATH

words()
{
	expect 0 "$kvctl" completion words "$@"
}

say "all that the help has is offered, and nothing else"
words ""
cut -f 1 "$dir/out" | sort > "$dir/offered"
expect 0 "$kvctl" --help
sed -n '/^Commands:/,/^$/s/^  \([a-z-]*\).*/\1/p' "$dir/out" | sort -u > "$dir/objects"
[ "$(wc -l < "$dir/objects")" -ge 8 ] || fail "the search in the help is broken"
diff "$dir/objects" "$dir/offered" || fail "the help and completion differ"
cp "$dir/out" "$dir/help"
while read -r object command; do
	words "$object" "${command:0:1}"
	expect_out "^$command	"
done < <(sed -nE 's/^  (pool|session) ([a-z]+).*/\1 \2/p' "$dir/help")

say "options of all commands, of one command, and their values"
words --so
expect_out '^--socket	'
words pool set x --m
[ "$(cut -f 1 "$dir/out" | tr '\n' ' ')" = "--min --max " ] || fail "pool set --m: $(cat "$dir/out")"
words plan --
expect_out '^--kv-dtype	'
words --socket ""
expect_out '^:files$'
words plan mod
expect_out '^:files$'
words --timeout ""
[ ! -s "$dir/out" ] || fail "something was offered as a number"
words completion ""
[ "$(cut -f 1 "$dir/out" | tr '\n' ' ')" = "bash zsh fish " ] || fail "shells: $(cat "$dir/out")"
words nonsense ""
[ ! -s "$dir/out" ] || fail "something was offered behind nonsense"

say "without a daemon there are no names, and no waiting"
words pool show ""
[ ! -s "$dir/out" ] || fail "pools without a daemon"

daemon_start --host 64M
mkfifo "$dir/stdin"
exec 4<> "$dir/stdin"
"$holder" "llama 3" 5 100 < "$dir/stdin" > "$dir/holder.out" 2>&1 &
holder_pid=$!
expect_soon 20 grep -q ready "$dir/holder.out"
words pool show ll
expect_out '^llama 3	'
words -s "$socket" pool set l
expect_out '^llama 3	'
words --socket = "$socket" session show ""
expect_out '^[0-9]+	holder in llama 3$'
words pool show "llama 3" ""
[ ! -s "$dir/out" ] || fail "there is no second argument"

say "bash at a terminal"
"$kvctl" completion bash > "$dir/kvctl.bash"
cat > "$dir/type.py" <<-'END'
	import os, pty, select, sys, time
	script, typed, want = sys.argv[1:]
	pid, fd = pty.fork()
	if not pid:
	    os.environ.update(PS1="$ ", TERM="dumb", INPUTRC="/dev/null", HISTFILE="/dev/null")
	    os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
	seen = b""
	def read(until, seconds=30):
	    global seen
	    end = time.monotonic() + seconds
	    while until not in seen:
	        if not select.select([fd], [], [], max(0, end - time.monotonic()))[0]:
	            sys.exit(f"no {until!r} in {seen!r}")
	        seen += os.read(fd, 4096)
	    seen = seen[seen.index(until) + len(until):]
	read(b"$ ")
	os.write(fd, f". {script}; echo 're''ady'\n".encode())
	read(b"ready\r\n")
	read(b"$ ")
	os.write(fd, typed.encode() + b"\t")
	read(want.encode())
	os.write(fd, b"\x15exit\n")
	os.waitpid(pid, 0)
END
for case in "kvctl sess:kvctl session " "kvctl pool ep:kvctl pool epoch " \
	"kvctl pool drop l:kvctl pool drop llama\\ 3 " "kvctl restart-worker --b:kvctl restart-worker --binary "; do
	expect 0 python3 -IS "$dir/type.py" "$dir/kvctl.bash" "${case%%:*}" "${case#*:}"
done
# The others, by what their help says. words.py has all their words, in each shell.
for case in "kvcached --event-loop i:kvcached --event-loop io_uring " "kvbench elas:kvbench elastic " \
	"kvengine --model=ti:kvengine --model=tiny " "kvengine --no-:kvengine --no-share "; do
	expect 0 python3 -IS "$dir/type.py" "$build/tools/${case%% *}.bash" "${case%%:*}" "${case#*:}"
done
# zsh and fish: at least what they read as a script of theirs.
for shell in zsh fish; do
	"$kvctl" completion $shell > "$dir/kvctl.$shell"
	if command -v $shell > /dev/null; then
		expect 0 $shell -n "$dir/kvctl.$shell"
	fi
done
expect 2 "$kvctl" completion tcsh
expect_err 'bash\|zsh\|fish'
kill "$holder_pid"

say "kvctl bench is kvbench on this daemon"
expect 0 "$kvctl" --json bench attach
expect_json
expect 2 "$kvctl" bench
expect 2 "$kvctl" bench nonsense
expect_err "no benchmark is called 'nonsense'"
expect 0 "$kvctl" check
daemon_stop
expect 3 "$kvctl" bench attach
