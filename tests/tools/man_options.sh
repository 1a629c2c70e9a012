#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every option that a program's --help names is explained in its man page. $1: page, $2: program.
set -euo pipefail

help=$("$2" --help)
mapfile -t options < <(grep -oE -- '--[a-z][a-z-]+' <<< "$help" | sort -u)
((${#options[@]} >= 5)) # else the search is broken
for option in "${options[@]}"; do
	# Bold in the page's source: *--json*
	grep -qF -- "*$option*" "$1" || {
		echo "$(basename "$1") doesn't explain $option"
		missing=1
	}
done
exit "${missing:-0}"
