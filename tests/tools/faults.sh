#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every test that kvcached-faults(7) names exists, and every symptom has a test or a reason. $1: tests/, $2: the page.
set -euo pipefail

n=0
while read -r file name; do
	n=$((n + 1))
	if [ ! -e "$1/$file" ]; then
		echo "there is no tests/$file"
		missing=1
	elif [ -n "$name" ] && ! grep -q "START_TEST($name)" "$1/$file"; then
		echo "tests/$file has no test $name"
		missing=1
	fi
done < <(sed -n 's/\\_/_/g; s/++$//; s/^\tTest: //p' "$2")
[ $n -ge 50 ] || { # else the search is broken
	echo "only $n tests are named"
	exit 1
}
# A symptom is followed by what is done about it.
grep -A1 '^\*' "$2" | grep -v '^\*\|^--\|^	..' && exit 1
exit "${missing:-0}"
