#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Do the fuzz targets know every message? The mutator must make all that the daemon answers to, the
# dictionary must have all types of include/internal/wire.h.
#
#	tests/fuzz/complete.sh SOURCE_ROOT
cd "${1:?}" || exit 1
bad=0
types=$(sed -n 's/^\t\[\(KV_MSG_[A-Z_]*\)\] = .*/\1/p' daemon/peer.c)
for type in $types; do
	grep -q "{$type, " tests/fuzz/wire_mutator.c || {
		echo "tests/fuzz/wire_mutator.c makes no $type"
		bad=1
	}
	n=$((${n:-0} + 1))
done
[ "${n:-0}" -ge 19 ] || {
	echo "only ${n:-0} handlers found in daemon/peer.c"
	bad=1
}
sed -n 's/^\tKV_MSG_\([A-Z_]*\) = \([0-9]*\),.*/\1 \2/p' include/internal/wire.h | {
	while read -r name number; do
		word=$(printf 'type_%s="\\x%02x\\x00"' "$(echo "$name" | tr '[:upper:]' '[:lower:]')" "$number")
		grep -qxF "$word" tests/fuzz/wire.dict || {
			echo "tests/fuzz/wire.dict lacks $word"
			bad=1
		}
	done
	exit $bad
}
