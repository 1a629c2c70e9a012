/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Warp-wide matrix instructions and asynchronous copies, as PTX names them. Lane = 4 g + t.
 *
 *	A  16 x 16, row-major   a0 (g, 2t..)  a1 (g + 8, 2t..)  a2 (g, 2t + 8..)  a3 (g + 8, 2t
 *+ 8..) B  16 x 8               b0 (2t.., g)  b1 (2t + 8.., g) C  16 x 8, f32          c0 c1 (g,
 *2t..)  c2 c3 (g + 8, 2t..)
 *
 * Shared addresses are 32-bit, in the shared window.
 */
#ifndef KV_KERNELS_DEVICE_MMA_CUH
#define KV_KERNELS_DEVICE_MMA_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <kvcached/types.h>

/* c += a b; TYPE of a and b: KV_BF16, or f16 */
template <int TYPE>
__device__ static inline void kv_mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
	if (TYPE == KV_BF16)
		asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
			     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
			     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
			     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
	else
		asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
			     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
			     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
			     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Four 8 x 8 matrices of 16 bits: lane 8 i + r gives the address of row r of matrix i. */
__device__ static inline void kv_ldmatrix(uint32_t (&to)[4], uint32_t from)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
		     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
		     : "r"(from)
		     : "memory");
}

/* The same, each matrix transposed. */
__device__ static inline void kv_ldmatrix_trans(uint32_t (&to)[4], uint32_t from)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
		     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
		     : "r"(from)
		     : "memory");
}

/* An 8 x 8 matrix of 16 bits, lane 4 g + t with (g, 2t) and (g, 2t + 1), transposed. */
__device__ static inline uint32_t kv_transpose(uint32_t x)
{
	uint32_t y;

	asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
	return y;
}

/* Two numbers side by side, the first in the low half. */
template <int TYPE> __device__ static inline uint32_t kv_pack(float low, float high)
{
	uint32_t u;

	if (TYPE == KV_BF16)
		asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(u) : "f"(high), "f"(low));
	else
		asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(u) : "f"(high), "f"(low));
	return u;
}

/* Four e4m3 codes to f16, exactly: the lower two, the upper two. */
__device__ static inline void kv_e4m3x4_to_f16(uint32_t codes, uint32_t &low, uint32_t &high)
{
#if __CUDA_ARCH__ >= 890
	asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2;\n"
	    "cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
	    : "=r"(low), "=r"(high)
	    : "r"(codes));
#else
	__half2_raw l = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)codes, __NV_E4M3);
	__half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(codes >> 16), __NV_E4M3);

	low = (uint32_t)l.x | (uint32_t)l.y << 16;
	high = (uint32_t)h.x | (uint32_t)h.y << 16;
#endif
}

/* 2^x within 2 units in the last place; 0 for -infinity, NaN for NaN */
__device__ static inline float kv_exp2(float x)
{
	float y;

	asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
	return y;
}

/* What is read once leaves the L2 first. */
__device__ static inline uint64_t kv_policy_once(void)
{
	uint64_t policy;

	asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
	return policy;
}

/* 16 bytes to shared memory, of which the first @bytes (0 or 16) are read, the rest are 0. */
__device__ static inline void kv_copy16(uint32_t to, const void *from, int bytes, uint64_t policy)
{
	asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
		     :
		     : "r"(to), "l"(from), "r"(bytes), "l"(policy)
		     : "memory");
}

__device__ static inline void kv_copy16(uint32_t to, const void *from, uint64_t policy)
{
	asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
		     :
		     : "r"(to), "l"(from), "l"(policy)
		     : "memory");
}

__device__ static inline void kv_copy_commit(void)
{
	asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until all but the last @N groups have arrived. */
template <int N> __device__ static inline void kv_copy_wait(void)
{
	asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#endif
