#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Do the inputs of the corpus still reach what they are for? A message that has grown a field refuses all that were
# made before, and replaying them goes well for ever.
#
#	tests/fuzz/seeds.sh REPLAY_WIRE SOURCE_ROOT
replay=${1:?} corpus=${2:?}/tests/fuzz/corpus_wire
bad=0
found=$("$replay" -v "$corpus") || exit 1
for path in "$corpus"/*; do
	name=${path##*/}
	wanted=$(sed -n "s/^$name://p" "$corpus.reaches")
	grep -q "^$name:" "$corpus.reaches" || {
		echo "$corpus.reaches says nothing of $name"
		bad=1
	}
	answers=" $(echo "$found" | sed -n "s/^$name://p") "
	for word in $wanted; do
		case $answers in
		*" $word "*) ;;
		*)
			echo "$name is not answered '$word' any more, only:$answers"
			bad=1
			;;
		esac
	done
done
exit $bad
