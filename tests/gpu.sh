#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that needs a GPU, in one go: meson's `gpu` suite and the scripts below. For a machine where the
# build folder was brought along and nothing can be installed, so meson isn't asked.
#
#	tests/gpu.sh [BUILD_FOLDER] [NAME...]		NAME: only those whose name contains it
#
# The last line is `N passed, N failed, N skipped`: a check suite counts with each of its cases. The
# exit status is 1 if any failed or none passed.
set -u
cd "$(dirname "$0")/.." || exit 1

build=${1:-build}
shift || true
limit_s=300
passed=0
failed=0
skipped=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT

wanted() {
	local name=$1 part

	shift
	(($# == 0)) && return 0
	for part; do
		[[ $name == *"$part"* ]] && return 0
	done
	return 1
}

# run NAME COMMAND...
run() {
	local name=$1 status=0 started=$SECONDS checks

	shift
	timeout -k 10 "$limit_s" "$@" >"$log" 2>&1 </dev/null || status=$?
	checks=$(sed -nE 's/^[0-9]+%: Checks: ([0-9]+), Failures: ([0-9]+), Errors: ([0-9]+)$/\1 \2 \3/p' "$log" | tail -n 1)
	if ((status == 77)); then
		((skipped += 1))
		printf '%-28s skipped: %s\n' "$name" "$(tail -n 1 "$log")"
		return
	fi
	if [[ -n $checks ]]; then
		read -r all failures errors <<<"$checks"
		((passed += all - failures - errors, failed += failures + errors))
		((status != 0 && failures + errors == 0)) && ((failed += 1))
	elif ((status == 0)); then
		((passed += 1))
	else
		((failed += 1))
	fi
	printf '%-28s %s in %d s\n' "$name" "${checks:+$checks (cases, failures, errors), }status $status" \
		$((SECONDS - started))
	((status == 0)) || sed 's/^/    /' "$log"
}

for program in "$build"/tests/gpu/test_* "$build"/tests/kernels/test_*_gpu \
	"$build"/tests/engine/test_*_gpu; do
	[[ -f $program && -x $program ]] || continue
	wanted "${program##*/}" "$@" && run "${program##*/}" "$program"
done
for script in tests/integration/*_gpu.sh; do
	name=$(basename "$script" .sh)
	wanted "$name" "$@" && run "$name" bash "$script" "$build"
done

echo "$passed passed, $failed failed, $skipped skipped"
((failed == 0 && passed > 0))
