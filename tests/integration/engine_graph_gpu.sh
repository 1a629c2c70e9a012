#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# An engine whose decode steps are graphs writes, token for token, what one writes that launches them
# piece by piece: one prompt, and five whose batch shrinks as they end. Exit 77 without a GPU.
if [ "$(nvidia-smi -L 2> /dev/null | grep -c '^GPU')" -eq 0 ]; then
	echo "skipped: no GPU"
	exit 77
fi
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

kvengine=$build/tools/engine/kvengine

# run NAME [OPTION...]: generated ids in $dir/NAME.ids
run()
{
	local name=$1

	shift
	timeout -k 5 120 "$kvengine" --socket "$socket" --device cuda --model small --no-share \
		--ignore-eos --tokens-out "$dir/$name.ids" "$@" > "$dir/$name.text" 2> "$dir/$name.err" \
		< /dev/null || fail "kvengine ended with $?: $(cat "$dir/$name.err")"
	[ -s "$dir/$name.ids" ] || fail "$name wrote nothing"
}

# same NAME NAME
same()
{
	cmp -s "$dir/$1.ids" "$dir/$2.ids" || fail "$1 and $2 differ"
}

daemon_start --gpus 0 --reserve 2G
one=(--prompt 'Once upon a time' -n 70)
five=(--prompt a --prompt 'the sea' --prompt 'of the' --prompt 'one two three four' --prompt 'end' -n 40)
run graph "${one[@]}"
run eager --eager "${one[@]}"
same graph eager
run graphs "${five[@]}"
run eagers --eager "${five[@]}"
same graphs eagers
say "graphs and single launches agree"
