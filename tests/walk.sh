#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The random walk of all operations against naive models (tests/client/walk.h), longer than in tools/test: ten
# million steps, for the night.
#
#	tests/walk.sh [STEPS [SEED]]
#
# The build is $BUILD, or build. The seed is new each day; the last lines say what happened, and a failure
# names step and seed. Exit status 1: something was wrong.
set -u
cd "$(dirname "$0")/.." || exit 1

steps=${1-10000000}
seed=${2-$(date +%Y%m%d)}
build=${BUILD-build}
if ! [[ $steps =~ ^[0-9]+$ && $seed =~ ^[0-9]+$ ]] || (($# > 2)); then
	sed -n 's/^#\t//p' "$0" >&2
	exit 2
fi
echo "$steps steps, seed $seed"
KVCACHED_BIN=$PWD/$build/daemon/kvcached KV_WALK_STEPS=$steps KV_WALK_SEED=$seed \
	exec "$build/tests/client/test_client_walk"
