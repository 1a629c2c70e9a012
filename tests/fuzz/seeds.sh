#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Do the inputs of the corpora still reach what they are for? A message that has grown a field refuses all that were
# made before, and replaying them goes well for ever. And is there one for each request, in which the daemon does what
# is asked?
#
#	tests/fuzz/seeds.sh REPLAY_WIRE REPLAY_PAGES SOURCE_ROOT
root=${3:?}
bad=0

# corpus NAME REPLAY: each input reaches what corpus_NAME.reaches says of it
corpus() {
	folder=$root/tests/fuzz/corpus_$1
	found=$("$2" -v "$folder") || exit 1
	for path in "$folder"/*; do
		name=${path##*/}
		wanted=$(sed -n "s/^$name://p" "$folder.reaches")
		grep -q "^$name:" "$folder.reaches" || {
			echo "$folder.reaches says nothing of $name"
			bad=1
		}
		reached=" $(echo "$found" | sed -n "s/^$name://p") "
		for word in $wanted; do
			case $reached in
			*" $word "*) ;;
			*)
				echo "$name doesn't reach '$word' any more, only:$reached"
				bad=1
				;;
			esac
		done
	done
}

corpus pages "${2:?}"
corpus wire "${1:?}"
types=$(sed -n 's/^\t\[KV_MSG_\([A-Z_]*\)\] = .*/\1/p' "$root/daemon/peer.c")
for type in $types; do
	n=$((${n:-0} + 1))
	echo "$found" | grep -q ": .*\<$type\>" || {
		echo "corpus_wire has no input in which a $type is done"
		bad=1
	}
done
[ "${n:-0}" -ge 19 ] || {
	echo "only ${n:-0} handlers found in daemon/peer.c"
	bad=1
}
exit $bad
