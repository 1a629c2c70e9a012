#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# README.md: the commands it shows exist and do what stands there, the benchmarks it names run on the host, the tests
# it names are there. The pages of tools/examples have tests of their own.
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

root=$(realpath "$(dirname "$0")/../..")
readme=$root/README.md
kvbench=$build/tools/bench/kvbench
command_deadline=120

say "what it names is there"
mapfile -t benchmarks < <(grep -oE '`kvbench [a-z]+' "$readme" | sort -u | sed 's/.* //')
((${#benchmarks[@]} >= 8)) || fail "the search for benchmarks is broken: ${benchmarks[*]}"
expect 0 "$kvbench" --help
for name in "${benchmarks[@]}"; do
	expect_out "^  $name( |\$)"
done
mapfile -t tests < <(grep -oE '`(build/)?tests/[a-z_/]+[A-Za-z_.]*' "$readme" | sort -u | sed 's/`\(build\/\)\?//')
((${#tests[@]} >= 8)) || fail "the search for tests is broken: ${tests[*]}"
for name in "${tests[@]}"; do
	# A script or a page as it is, a program by its source.
	[ -e "$root/$name" ] || [ -e "$root/$name.c" ] || fail "README.md names $name, which isn't there"
done
for example in "$root"/tools/examples/*.c; do
	grep -q "\`$(basename "$example")\`" "$readme" || fail "README.md doesn't name $(basename "$example")"
done
expect 0 "$kvctl" --help
cp "$dir/out" "$dir/help"
# shellcheck disable=SC2016  # backquotes of Markdown
while read -r object command; do
	grep -qE "^  $object( $command)?( |\$)" "$dir/help" || fail "README.md names kvctl $object $command"
done < <(grep -oE '`kvctl [a-z][a-z-]*( [a-z]+)?[ `]' "$readme" | tr -d '`' | sed 's/^kvctl //' | sort -u)

# What the program prints whatever the model, the machine and the day: labels, heads of tables, their rows.
lines_of_tour()
{
	awk '/^Engine [0-9]+ read / { print; story = 1; next }
	     /^ +prompt tokens / { story = 0 }
	     !story' "$1" |
	sed -E 's/^(event loop:).*/\1/
		s/^(heap:)[^;]*/\1/
		s/ on \/[^ ]*kvcached\.sock,/ on SOCKET,/
		s/\[[#+.]+\]/BAR/
		/ ATTACHED$/,$ { / ATTACHED$/!s/^[^ ]+/POOL/; }
		/^Engine [0-9]+ read/!s/[0-9]+(\.[0-9]+)*( [KMGT]?i?B)?/N/g
		s/ +/ /g; s/ $//' | cat -s
}

say "the tour prints what is shown of it"
# shellcheck disable=SC2016  # backquotes of Markdown
sed -n '/^## Five minutes/,/^Two processes/p' "$readme" | sed -n '/^```$/,/^```$/{/^```$/!p}' > "$dir/shown"
expect 0 "$root/tools/quickstart" --built "$build"
lines_of_tour "$dir/shown" > "$dir/shown.lines"
lines_of_tour "$dir/out" > "$dir/printed.lines"
(($(wc -l < "$dir/shown.lines") >= 15)) || fail "README.md shows no tour: $(cat "$dir/shown.lines")"
diff -u "$dir/shown.lines" "$dir/printed.lines" || fail "README.md shows another tour than tools/quickstart prints"

say "by hand, in three terminals"
mapfile -t lines < <(sed -n '/^By hand, in three terminals/,/^Pages/{s/^build\///p}' "$readme")
[ ${#lines[@]} -eq 3 ] || fail "three commands were expected: ${lines[*]}"
[ "${lines[0]}" = "daemon/kvcached --host 2G --socket /tmp/kv.sock" ] || fail "the daemon: ${lines[0]}"
daemon_start --host 2G
cd "$root" || exit 1
for i in 1 2; do
	read -ra words <<< "$build/${lines[$i]//\/tmp\/kv.sock/$socket}"
	expect 0 "${words[@]}"
done
expect_out '^kvcached [0-9.]+ on '
cd - > /dev/null || exit 1

say "using it"
for words in stats "pool list" "session list" check "report $dir/page.html" "--json stats"; do
	read -ra words <<< "$words"
	expect 0 "$kvctl" "${words[@]}"
done
config=$root/tests/models/llama-2-7b.json
expect 0 "$kvctl" plan "$config" --budget 60G
daemon_stop
daemon_start --host 512M --pool "llama=$config,min=64M" --metrics 127.0.0.1:0
expect 0 "$kvctl" pool show llama
expect_out '^min_bytes +64'
daemon_stop

say "benchmarks that no other test runs, on the host"
for name in mla gdn mamba conv elastic; do
	[[ " ${benchmarks[*]} " == *" $name "* ]] || fail "README.md doesn't name $name any more"
	expect 0 "$kvbench" "$name" --device host --json
	expect_json
done
