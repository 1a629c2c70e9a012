/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What sm_90a adds: barriers in shared memory that count bytes, the copy engine, registers handed
 * from warps to warps, and matrix instructions of a warpgroup (4 warps). Shared addresses are 32-bit,
 * in the shared window. Source: the PTX ISA, 8.0 and later.
 */
#ifndef KV_KERNELS_DEVICE_HOPPER_CUH
#define KV_KERNELS_DEVICE_HOPPER_CUH

#include <cuda.h>

#include <kvcached/types.h>

#define KV_WARPGROUP 128

/* Barriers in shared memory: a phase ends when @count threads and all expected bytes have come. */
__device__ static inline void kv_barrier_init(uint32_t barrier, uint32_t count)
{
	asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

/* After kv_barrier_init(), before the copy engine may meet the barriers. */
__device__ static inline void kv_barrier_init_fence(void)
{
	asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ static inline void kv_barrier_arrive(uint32_t barrier)
{
	asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/*
 * The same by who has only read: no memory barrier, which would wait for its stores to global memory.
 * What was read must have been used.
 */
__device__ static inline void kv_barrier_arrive_read(uint32_t barrier)
{
	asm volatile("mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives, and the phase waits for @bytes of copies besides. */
__device__ static inline void kv_barrier_expect(uint32_t barrier, uint32_t bytes)
{
	asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
		     "r"(bytes)
		     : "memory");
}

/* Until the phase of this parity has ended. */
__device__ static inline void kv_barrier_wait(uint32_t barrier, uint32_t parity)
{
	asm volatile("{ .reg .pred p;\n"
		     "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
		     "@p bra done;\n"
		     "bra again;\n"
		     "done: }" ::"r"(barrier),
		     "r"(parity)
		     : "memory");
}

/* Whether the phase of this parity has ended. */
__device__ static inline bool kv_barrier_ready(uint32_t barrier, uint32_t parity)
{
	uint32_t yes;

	asm volatile("{ .reg .pred p;\n"
		     "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
		     "selp.u32 %0, 1, 0, p; }"
		     : "=r"(yes)
		     : "r"(barrier), "r"(parity)
		     : "memory");
	return yes;
}

/* This thread's cp.async so far count as one arrival, once they are there. */
__device__ static inline void kv_barrier_arrive_copies(uint32_t barrier)
{
	asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/* Barriers of warps, by number; 0 is __syncthreads(). */
__device__ static inline void kv_named_sync(int id, int threads)
{
	asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ static inline void kv_named_arrive(int id, int threads)
{
	asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* What was stored to shared memory is seen by the copy engine and by matrix instructions. */
__device__ static inline void kv_fence_async(void)
{
	asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int N> __device__ static inline void kv_registers_more(void)
{
	asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> __device__ static inline void kv_registers_fewer(void)
{
	asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* True in one lane of a whole warp; the compiler then knows that no other is there. */
__device__ static inline bool kv_elect(void)
{
	uint32_t yes;

	asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
		     : "=r"(yes));
	return yes;
}

/* A box of a tensor, from element (x, y, z, w), to shared memory; its bytes count at @barrier. */
__device__ static inline void kv_tma_load(uint32_t to, const CUtensorMap *map, uint32_t barrier,
					  int x, int y, int z, int w)
{
	asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
		     "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
		     "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
		     : "memory");
}

__device__ static inline void kv_tma_load5(uint32_t to, const CUtensorMap *map, uint32_t barrier,
					   int x, int y, int z, int w, int v)
{
	asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
		     "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
		     "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
		     : "memory");
}

__device__ static inline void kv_tma_prefetch_map(const CUtensorMap *map)
{
	asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/*
 * Where an operand lies in shared memory, in rows of 128 bytes whose 16-byte units are turned by
 * the row's number (unit u of row r at u ^ r % 8); 8 rows are 1024 bytes, aligned to that.
 * @lead: bytes between sets of 64 columns, where columns run along rows (B of P V); else unused.
 * @stride: bytes from 8 rows to the next 8.
 */
__device__ static inline uint64_t kv_wgmma_operand(uint32_t at, uint32_t lead, uint32_t stride)
{
	return (uint64_t)1 << 62 | (uint64_t)(stride >> 4) << 32 | (uint64_t)(lead >> 4) << 16 |
	       (uint64_t)((at & 0x3ffff) >> 4);
}

/* The operand that lies @bytes further on: one addition, where a new description takes four steps. */
__device__ static inline uint64_t kv_wgmma_further(uint64_t operand, uint32_t bytes)
{
	return (operand & ~(uint64_t)UINT32_MAX) | ((uint32_t)operand + (bytes >> 4));
}

__device__ static inline void kv_wgmma_fence(void)
{
	asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ static inline void kv_wgmma_commit(void)
{
	asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int N> __device__ static inline void kv_wgmma_wait(void)
{
	asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* The compiler moves no use of @x across this: instructions under way still write to it. */
template <int N> __device__ static inline void kv_wgmma_hold(float (&x)[N])
{
#pragma unroll
	for (int i = 0; i < N; i++)
		asm volatile("" : "+f"(x[i])::"memory");
}

#define KV_C8(c, i)                                                                          \
	"+f"((c)[i]), "+f"((c)[(i) + 1]), "+f"((c)[(i) + 2]), "+f"((c)[(i) + 3]),            \
		"+f"((c)[(i) + 4]), "+f"((c)[(i) + 5]), "+f"((c)[(i) + 6]), "+f"((c)[(i) + 7])
#define KV_C32(c, i) KV_C8(c, i), KV_C8(c, (i) + 8), KV_C8(c, (i) + 16), KV_C8(c, (i) + 24)

#define KV_P32                                                                                    \
	"%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"  \
	"%24,%25,%26,%27,%28,%29,%30,%31"
#define KV_P40 KV_P32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define KV_P64 \
	KV_P40 ",%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,"   \
	"%59,%60,%61,%62,%63"
#define KV_P128                                                                                   \
	KV_P64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,"   \
	"%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,"     \
	"%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,"   \
	"%120,%121,%122,%123,%124,%125,%126,%127"

/*
 * One instruction of a warpgroup, 64 rows, k = 16, N columns: c [64, N] = (add ? c : 0) + a b, in f32.
 * Thread 32 w + 4 g + t has of c, as of mma.sync, rows 16 w + g and + 8, columns 8 j + 2 t and + 1:
 * c[4 j + 2 (row / 8) + column % 2].
 *	scores	a [64, 16] and b [N, 16] in shared memory, k along rows
 *	sums	a in registers, laid out as of mma.sync; b [16, N] in shared memory, n along rows
 */
#define KV_WGMMA(N, places, a0, a1, a2, a3, a4, type, outs)                                    \
	template <> struct kv_wgmma_##type<N> {                                                   \
		__device__ static inline void scores(float (&c)[N / 2], uint64_t a, uint64_t b,   \
						     int add)                                     \
		{                                                                                 \
			asm volatile("{ .reg .pred p; setp.ne.b32 p, " a2 ", 0;\n"                \
				     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #type      \
				     "." #type " {" places "}, " a0 ", " a1 ", p, 1, 1, 0, 0; }"  \
				     : outs                                                       \
				     : "l"(a), "l"(b), "r"(add));                                 \
		}                                                                                 \
		__device__ static inline void sums(float (&c)[N / 2], const uint32_t *a,          \
						   uint64_t b)                                    \
		{                                                                                 \
			asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0;\n"                     \
				     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #type      \
				     "." #type " {" places "}, {" a0 ", " a1 ", " a2 ", " a3      \
				     "}, " a4 ", p, 1, 1, 1; }"                                   \
				     : outs                                                       \
				     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));       \
		}                                                                                 \
	}

template <int N> struct kv_wgmma_bf16;
template <int N> struct kv_wgmma_f16;

#define KV_OUT64  KV_C32(c, 0)
#define KV_OUT80  KV_C32(c, 0), KV_C8(c, 32)
#define KV_OUT128 KV_C32(c, 0), KV_C32(c, 32)
#define KV_OUT256 KV_C32(c, 0), KV_C32(c, 32), KV_C32(c, 64), KV_C32(c, 96)

#define KV_WGMMA_ALL(type)                                                                        \
	KV_WGMMA(64, KV_P32, "%32", "%33", "%34", "%35", "%36", type, KV_OUT64);               \
	KV_WGMMA(80, KV_P40, "%40", "%41", "%42", "%43", "%44", type, KV_OUT80);               \
	KV_WGMMA(128, KV_P64, "%64", "%65", "%66", "%67", "%68", type, KV_OUT128);             \
	KV_WGMMA(256, KV_P128, "%128", "%129", "%130", "%131", "%132", type, KV_OUT256)

KV_WGMMA_ALL(bf16);
KV_WGMMA_ALL(f16);

/* By the type of a and b: KV_BF16, or f16. */
template <int TYPE, int N>
__device__ static inline void kv_wgmma_scores(float (&c)[N], uint64_t a, uint64_t b, int add)
{
	if constexpr (TYPE == KV_BF16)
		kv_wgmma_bf16<2 * N>::scores(c, a, b, add);
	else
		kv_wgmma_f16<2 * N>::scores(c, a, b, add);
}

template <int TYPE, int N>
__device__ static inline void kv_wgmma_sums(float (&c)[N], const uint32_t *a, uint64_t b)
{
	if constexpr (TYPE == KV_BF16)
		kv_wgmma_bf16<2 * N>::sums(c, a, b);
	else
		kv_wgmma_f16<2 * N>::sums(c, a, b);
}

#endif
