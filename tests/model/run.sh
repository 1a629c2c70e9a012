#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A model of a protocol of the shared pages: every interleaving is right, and of each mutant, 1 to MUTANTS,
# some one is wrong.
set -u
model=$(realpath "${1:?usage: run.sh MODEL MUTANTS}")
mutants=${2:?usage: run.sh MODEL MUTANTS}
command -v spin > /dev/null 2>&1 && command -v cc > /dev/null 2>&1 || exit 77
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir" || exit 1

# check MUTANT: prints the number of errors that the verifier found
check() {
	rm -f pan* ./*.trail
	spin -DMUTANT="$1" -a "$model" > spin.out 2>&1 || { cat spin.out >&2; return 1; }
	cc -O2 -DSAFETY -o pan pan.c 2> cc.out || { cat cc.out >&2; return 1; }
	timeout 120 ./pan -m200000 > pan.out 2>&1 || { cat pan.out >&2; return 1; }
	if grep -q 'max search depth too small\|Search not completed' pan.out && (($1 == 0)); then
		cat pan.out >&2
		return 1
	fi
	sed -n 's/.*errors: \([0-9]*\).*/\1/p' pan.out
}

failed=0
for ((mutant = 0; mutant <= mutants; mutant++)); do
	errors=$(check $mutant) || exit 1
	echo "mutant $mutant: ${errors:-no} errors; $(sed -n 's/ *\([0-9]*\) states, stored.*/\1 states/p' pan.out)"
	if ((mutant == 0)); then
		[[ $errors == 0 ]] || { failed=1; spin -t -p -DMUTANT=0 "$model" | tail -40; }
	else
		[[ ${errors:-0} -gt 0 ]] || { echo "mutant $mutant isn't noticed"; failed=1; }
	fi
done
exit $failed
