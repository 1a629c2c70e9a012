#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All shell scripts of the tree pass shellcheck. $1: the source folder.
set -euo pipefail
cd "$1"

command -v shellcheck >/dev/null || {
	echo "shellcheck is not installed"
	exit 77
}
mapfile -t scripts < <(grep -rlE --exclude-dir='build*' --exclude-dir=.git --exclude-dir=.venv \
	--exclude-dir=models '^#!.*sh$|^# shellcheck shell=' . | grep -vE '\.(c|h|md|scd|py)$')
((${#scripts[@]} >= 4)) # at least tools/setup, build, test and this one: else the search is broken
printf '%s\n' "${scripts[@]}"
shellcheck --external-sources "${scripts[@]}"
