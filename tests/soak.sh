#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The soak: 32 clients of 4 pools do everything while something is killed or stopped every second, see
# tests/integration/soak.c. Both event loops and all builds given take turns in the time.
#
#	tests/soak.sh MINUTES [BUILD_FOLDER...] [--gpu]
#
# Without folders: those of tools/build and tools/build --asan that are there. With --gpu: on the first
# GPU, with kernels in flight, by the builds that have CUDA. Each turn's numbers are printed; the exit status is 1
# if any had a wrong byte, a lost block, a leaked descriptor, or didn't end well.
set -u
cd "$(dirname "$0")/.." || exit 1

usage() {
	sed -n 's/^#\t//p' "$0" | head -n 1 >&2
	exit 2
}

program=soak
builds=()
mode=()
minutes=${1-}
[[ $minutes =~ ^[0-9]+$ && $minutes -gt 0 ]] || usage
shift
for arg; do
	case $arg in
	--gpu) program=soak_gpu mode=(gpu) ;;
	-*) usage ;;
	*) builds+=("$arg") ;;
	esac
done
if ((${#builds[@]} == 0)); then
	for build in build build-asan; do
		if [[ -x $build/tests/integration/$program ]]; then
			builds+=("$build")
		else
			echo "$build has no $program: left out (tools/build, tools/build --asan)" >&2
		fi
	done
fi
((${#builds[@]} > 0)) || {
	echo "no build folder has tests/integration/$program: see tools/build" >&2
	exit 1
}

seconds=$((minutes * 60 / (2 * ${#builds[@]})))
failed=0
for build in "${builds[@]}"; do
	for loop in io_uring epoll; do
		echo "== $build, $loop"
		KV_TEST_EVENT_LOOP=$loop KVCACHED_BIN=$build/daemon/kvcached CK_TIMEOUT_MULTIPLIER=4 \
			"$build/tests/integration/$program" "$seconds" \
			"${mode[@]}"
		case $? in
		0) ;;
		77) echo "left out: this machine refuses it" ;;
		*) failed=1 ;;
		esac
	done
done
exit $failed
