#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# `meson install` into a scratch root: everything is there, and an engine that knows nothing but pkg-config
# is compiled against it and runs with the daemon from there.
#
# usage: install.sh BUILD_FOLDER SOURCE_FOLDER
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

source=$(realpath "$2")
for program in meson pkg-config cc; do
	command -v $program > /dev/null || skip "no $program"
done
root=$dir/root
command_deadline=120
expect 0 meson install -C "$build" --no-rebuild --quiet --destdir "$root"

# at PATTERN: the one file of that name; the prefix is whatever the build folder was configured with
at()
{
	local found

	mapfile -t found < <(find "$root" -path "$root/*$1")
	[ ${#found[@]} -eq 1 ] || fail "$1: ${#found[@]} files of that name were installed: ${found[*]}"
	printf '%s\n' "${found[0]}"
}

say "programs, library and headers"
for name in bin/kvctl bin/kvengine bin/kvbench sbin/kvcached /libkvclient.so.0 /libkvclient.so \
	systemd/system/kvcached.service \
	systemd/system/kvcached.socket share/kvcached/kvcached-alerts.yml share/kvcached/kvcached-dashboard.json \
	zsh/site-functions/_{kvctl,kvcached,kvbench,kvengine} \
	bash-completion/completions/{kvctl,kvcached,kvbench,kvengine}.bash \
	fish/vendor_completions.d/{kvctl,kvcached,kvbench,kvengine}.fish \
	share/doc/kvcached/examples/share.c share/doc/kvcached/examples/toy.py; do
	at "$name" > /dev/null || exit 1
done
include=$(dirname "$(at /kvcached/kvcached.h)")
(cd "$source/include/kvcached" && ls) > "$dir/want"
(cd "$include" && ls) > "$dir/have"
diff "$dir/want" "$dir/have" || fail "headers that were not installed"
included=$(grep -c '#include <kvcached/' "$include/kvcached.h")
[ $((included + 1)) -eq "$(wc -l < "$dir/want")" ] || fail "kvcached.h doesn't include all headers"

if command -v scdoc > /dev/null; then
	say "a man page of every program and every call"
	for page in man1/kvctl.1 man1/kvengine.1 man1/kvbench.1 man3/kvclient.3 man8/kvcached.8; do
		at "/$page" > /dev/null || exit 1
	done
	man3=$(dirname "$(at /man3/kvclient.3)")
	while read -r call; do
		[ -s "$man3/$call.3" ] || fail "there is no page of $call()"
	done < <(sed -nE 's/^\t(kv_[a-z0-9_]+);$/\1/p' "$source/libclient/libkvclient.map")
	grep -q 'RETURN VALUE' "$man3/kv_seq_lookup.3" || fail "kv_seq_lookup(3) says nothing of its answer"
	if command -v man > /dev/null && command -v groff > /dev/null; then
		for page in "$man3"/*.3; do
			LC_ALL=C.UTF-8 MANWIDTH=120 MANROFFOPT='' man --warnings -E UTF-8 -l -Tutf8 -Z \
				"$page" 2>> "$dir/warnings" > /dev/null
		done
		[ ! -s "$dir/warnings" ] || fail "groff warns: $(head -n 5 "$dir/warnings")"
	fi
fi

say "each header stands alone, in C and in C++, without a warning"
prefix=${include%/include/kvcached}
for header in "$include"/*.h; do
	echo "#include <kvcached/$(basename "$header")>" > "$dir/alone.c"
	expect 0 cc -std=c11 -Wall -Wextra -Wpedantic -Wshadow -Werror -fsyntax-only -I"$prefix/include" \
		"$dir/alone.c"
	if command -v c++ > /dev/null; then
		expect 0 c++ -x c++ -std=c++17 -Wall -Wextra -Werror -fsyntax-only -I"$prefix/include" \
			"$dir/alone.c"
	fi
done

say "an engine outside of the tree, by pkg-config alone"
mkdir "$dir/engine"
cp "$(dirname "$(at /examples/share.c)")"/*.[ch] "$dir/engine"
pc=$(at /pkgconfig/kvclient.pc)
export PKG_CONFIG_LIBDIR=${pc%/*} PKG_CONFIG_SYSROOT_DIR=$root PKG_CONFIG_PATH=
[ "$(pkg-config --modversion kvclient)" = "$("$kvctl" --version | cut -d ' ' -f 2)" ] ||
	fail "kvclient.pc and kvctl are of different versions"
read -ra flags < <(pkg-config --cflags --libs kvclient)
for name in share hand_over sample_many shared_prompt two_models; do
	say "cc $name.c ${flags[*]}"
	expect 0 cc -Wall -Wextra -Werror "$dir/engine/$name.c" "${flags[@]}" -lm -o "$dir/engine/$name"
done
libdir=$(dirname "$(at /libkvclient.so.0)")
export LD_LIBRARY_PATH=$libdir

# The daemon and the tools, too, are those that were installed, with the library there.
kvctl=$(at /bin/kvctl)
build=$dir/installed
mkdir -p "$build/daemon"
ln -s "$(at /sbin/kvcached)" "$build/daemon/kvcached"
expect 1 "$dir/engine/share" "hello"
expect_err 'kvcached.sock'
daemon_start --host 64M
system="You are a careful assistant who answers in one sentence, and says so when the answer is not known."
expect 0 "$dir/engine/share" "$system What is a block?"
expect_out '^0 of 115 tokens were cached'
expect 0 "$dir/engine/share" "$system What is an arena?"
expect_out '^96 of 116 tokens were cached'
expect_out '^without a cache it writes the same$'
for name in hand_over sample_many shared_prompt two_models; do
	expect 0 "$dir/engine/$name"
done
expect 0 "$(at /bin/kvengine)" --socket "$socket" --model tiny --prompt "Once upon a time" -n 8 --device host
expect 0 "$kvctl" check
daemon_stop
