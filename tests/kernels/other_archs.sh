#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The kernels compile for GPUs that nobody here has: sm_80 and sm_100, down to machine code, since ptxas
# is what refuses an instruction. Quickly, not well: --Ofast-compile=max takes 1/10 of the time of a build.
#
#	other_archs.sh SOURCE_FOLDER [SM90_ONLY...]	files that the build gives to sm_90 and later alone
#
# What the presence of sm_90a changes (KV_HAVE_SM90A: a build for several architectures has it in all of
# them) is compiled both ways.
set -u
cd "$1" || exit 1
shift
export nvcc log

nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[[ -x $nvcc ]] || { echo "nvcc isn't here"; exit 77; }
"$nvcc" --help | grep -q -e --Ofast-compile || { echo "$nvcc has no --Ofast-compile"; exit 77; }
log=$(mktemp -d) || exit 1
trap 'rm -rf "$log"' EXIT

# compile ARCH FILE [OPTION]
compile() {
	local name
	name=$1.$(basename "$2")${3-}

	"$nvcc" -arch="sm_$1" -cubin --Ofast-compile=max -std=c++17 -I. -Iinclude \
		--expt-relaxed-constexpr -Werror all-warnings ${3:+"$3"} "$2" -o "$log/$name.cubin" \
		>"$log/$name" 2>&1 && return
	echo "sm_$1 $2 ${3-}: doesn't compile"
	head -n 5 "$log/$name" | sed 's/^/    /'
	return 1
}
export -f compile

n=0
jobs=()
for arch in 80 100; do
	"$nvcc" --list-gpu-arch | grep -qx "compute_$arch" || { echo "sm_$arch: unknown to $nvcc"; continue; }
	for file in kernels/*.cu; do
		[[ $arch == 80 && " $* " == *" $(basename "$file" .cu) "* ]] && continue
		jobs+=("$arch $file")
		grep -q KV_HAVE_SM90A "$file" && jobs+=("$arch $file -DKV_HAVE_SM90A")
		((n += 1))
	done
done
((n)) || exit 77
echo "$n files"
# shellcheck disable=SC2016 # the inner shell expands it
printf '%s\n' "${jobs[@]}" | xargs -P "$(nproc)" -I{} bash -c 'compile $1' _ {}
