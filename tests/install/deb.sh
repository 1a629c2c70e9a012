#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The Debian packages: built from this tree, without a complaint of lintian, unpacked into a scratch root by
# dpkg; what is in them works from there.
#
# usage: deb.sh BUILD_FOLDER SOURCE_FOLDER
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

source=$(realpath "$2")
for program in dpkg-buildpackage dh git; do
	command -v $program > /dev/null || skip "no $program"
done
git -C "$source" -c safe.directory='*' rev-parse 2> /dev/null || skip "the source is no checkout"

command_deadline=800
expect 0 "$source/tools/deb" "$dir/debs"
command_deadline=200
if command -v lintian > /dev/null; then
	say "lintian"
	expect 0 lintian --allow-root --fail-on error,warning "$dir"/debs/*.changes
	[ ! -s "$dir/out" ] || fail "lintian has something to say"
else
	say "no lintian here: its checks are left out"
fi

say "dpkg unpacks them"
root=$dir/root
mkdir -p "$root"/var/lib/dpkg/{info,updates}
touch "$root/var/lib/dpkg/status"
mapfile -t packages < <(find "$dir/debs" -name '*.deb' ! -name '*dbgsym*')
[ ${#packages[@]} -eq 4 ] || fail "packages: ${packages[*]}"
expect 0 dpkg --root="$root" --force-not-root --log=/dev/null --unpack "${packages[@]}"
find "$root" -type f -path "*/local/*" > "$dir/out"
[ ! -s "$dir/out" ] || fail "something lies in /usr/local"

say "what is in them works"
lib=$(dirname "$(find "$root/usr/lib" -name libkvclient.so)")
export LD_LIBRARY_PATH=$lib PKG_CONFIG_LIBDIR=$lib/pkgconfig PKG_CONFIG_SYSROOT_DIR=$root
examples=$root/usr/share/doc/libkvclient-dev/examples
[ -s "$root/usr/share/man/man3/kv_seq_lookup.3.gz" ] || fail "no page of kv_seq_lookup()"
[ -s "$root/usr/share/man/man1/kvctl.1.gz" ] || fail "no page of kvctl"
[ -s "$root/lib/systemd/system/kvcached.service" ] || fail "no unit for systemd"
read -ra flags < <(pkg-config --cflags --libs kvclient)
expect 0 cc "$examples/share.c" "${flags[@]}" -lm -o "$dir/share"
kvctl=$root/usr/bin/kvctl
build=$dir/installed
mkdir -p "$build/daemon"
ln -s "$root/usr/sbin/kvcached" "$build/daemon/kvcached"
daemon_start --host 64M
expect 0 "$dir/share" "What one has computed, all find."
expect 0 "$dir/share" "What one has computed, all find."
expect_out '^16 of 32 tokens were cached'
expect 0 "$kvctl" bench attach
expect 0 "$kvctl" check
if /usr/bin/python3 -c 'import cffi, numpy' 2> /dev/null; then
	export PYTHONPATH=$root/usr/lib/python3/dist-packages PYTHONDONTWRITEBYTECODE=1
	expect 0 /usr/bin/python3 "$examples/sample_many.py"
	expect_out 'all samples are right'
fi
daemon_stop
