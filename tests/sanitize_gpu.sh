#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The attention kernels under compute-sanitizer: memcheck and racecheck over small problems of every backend.
#
#	tests/sanitize_gpu.sh [BUILD_FOLDER] [SECONDS]		SECONDS: of one run (default 120)
#
# Prints a line a run; the exit status is 1 if one has found something, 77 where there is no tool or no GPU.
set -u
cd "$(dirname "$0")/.." || exit 1

build=${1:-build}
limit_s=${2:-120}
tool=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0

[[ -x $tool ]] || { echo "compute-sanitizer isn't here"; exit 77; }
"$build"/tests/kernels/test_metadata_gpu >/dev/null 2>&1
(($? == 77)) && { echo "no GPU"; exit 77; }

# check TOOL PROGRAM CASE
check() {
	local started=$SECONDS result=0

	CK_RUN_CASE=$3 timeout -k 10 "$limit_s" "$tool" --tool "$1" --error-exitcode 9 --print-limit 5 \
		"$build/tests/kernels/$2" >"$log" 2>&1 || result=$?
	if ((result == 124)); then
		echo "$1 $2 $3: nothing in $limit_s s, which did not suffice"
	elif ((result)); then
		echo "$1 $2 $3: status $result"
		tail -n 20 "$log" | sed 's/^/    /'
		status=1
	else
		echo "$1 $2 $3: clean in $((SECONDS - started)) s"
	fi
}

for kind in memcheck racecheck; do
	check "$kind" test_attention_gpu dirt
	check "$kind" test_features_gpu parts
	check "$kind" test_metadata_gpu metadata
done
check memcheck test_features_gpu features
check memcheck test_attention_gpu odd
exit $status
