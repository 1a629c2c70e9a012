#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The units are right and as closed as can be, by systemd's own tool. $1: the build folder, $2: the source's.
set -euo pipefail

command -v systemd-analyze > /dev/null || {
	echo "systemd-analyze is not installed"
	exit 77
}
build=$(realpath "$1")
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
# ExecStart= must exist: here it is the one just built.
sed "s|^ExecStart=[^ ]*|ExecStart=$build/daemon/kvcached|" "$build/daemon/kvcached.service" > "$dir/kvcached.service"
cp "$2/daemon/kvcached.socket" "$dir"

systemd-analyze verify --man=no --recursive-errors=no "$dir/kvcached.service" "$dir/kvcached.socket" 2>&1 |
	tee "$dir/words"
! grep kvcached "$dir/words" || exit 1
echo "verified"

# 0 is all closed, 100 all open; a unit without any of it has 96.
systemd-analyze security --offline=yes --threshold=30 "$dir/kvcached.service" | tail -n 1
