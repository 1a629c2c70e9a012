#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# How many lines of what reads the socket and the shared pages do the corpora of the fuzz targets reach,
# and the tests that send what a right client, or a right daemon, would not?
#
#	CC=clang meson setup build-cov -Dcuda=disabled -Djemalloc=disabled -Db_lundef=false \
#		-Dc_args='-fprofile-instr-generate -fcoverage-mapping -mllvm -runtime-counter-relocation' \
#		-Dc_link_args=-fprofile-instr-generate
#	ninja -C build-cov
#	tests/fuzz/coverage.sh build-cov [CORPUS_WIRE CORPUS_PAGES]
#
# The corpora default to those of the tree. Exit status 1 if a file has less than 90 %.
set -eu

source=$(cd "$(dirname "$0")/../.." && pwd)
build=$(cd "${1:?usage: $0 BUILD_FOLDER [CORPUS_WIRE CORPUS_PAGES]}" && pwd)
declare -A corpus=([wire]=${2:-$source/tests/fuzz/corpus_wire} [pages]=${3:-$source/tests/fuzz/corpus_pages})
files='daemon/peer.c daemon/isolate.c libclient/connection.c libclient/granules.c
	include/internal/ring.h include/internal/shm.h include/internal/socket.c'
tests='client/test_client_connect client/test_client_open client/test_client_isolate
	client/test_client_restart client/test_client_users client/test_client_share
	client/test_client_messages client/test_client_false_daemon client/test_client_access
	daemon/test_faults integration/hostile'
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

# Counted in the file itself, as a process that is killed goes on until then.
export LLVM_PROFILE_FILE="$dir/%c%p-%m.profraw"
objects=("$build/daemon/kvcached")
[ ! -e "$build/libclient/libkvclient.so" ] || objects+=("$build/libclient/libkvclient.so")
for target in wire pages; do
	"$build/tests/fuzz/replay_$target" "${corpus[$target]}"
	objects+=("$build/tests/fuzz/replay_$target")
done
for name in $tests; do
	program=$build/tests/$name
	[ -x "$program" ] || continue
	KVCACHED_BIN=$build/daemon/kvcached CK_TIMEOUT_MULTIPLIER=8 timeout 600 "$program" \
		> "$dir/log" 2>&1 < /dev/null || echo "$name: status $?" >&2
	objects+=("$program")
done
# Who was killed before it had begun left half a file.
llvm-profdata merge -failure-mode=all -sparse "$dir"/*.profraw -o "$dir/all.profdata" 2> /dev/null

status=0
llvm-cov show "${objects[0]}" "${objects[@]/#/-object=}" -show-instantiations=false \
	-instr-profile="$dir/all.profdata" > "$dir/shown" 2> "$dir/log" || {
	cat "$dir/log" >&2
	exit 1
}
for file in $files; do
	awk -F'|' -v file="$file" -v path="$source/$file:" '
		/^\// { wanted = $0 == path }
		wanted && $1 ~ /^ *[0-9]+$/ && $2 ~ /[0-9]/ {
			all++
			if ($2 ~ /^ *0$/)
				missed = missed " " ($1 + 0)
			else
				ran++
		}
		END {
			printf "%-28s %4d of %4d lines, %5.1f %%%s\n", file, ran, all,
				all ? 100 * ran / all : 0, missed ? "; not" missed : ""
			exit !all || ran < 0.9 * all
		}' "$dir/shown" || status=1
done
exit $status
