/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The recurrences in chunks of 64 tokens, on tensor cores.
 *
 * Within a chunk, with c_t the sum of the log decays up to token t, c the last of them, K^ the keys
 * and Q^ the queries (normalised, scaled) as rows, S0 the state before the chunk [dim_v][dim_k]:
 *
 *	A    = strictly lower triangle of  beta_i (K^ K^T)_ij e^(c_i - c_j)
 *	T    = (I + A)^-1                                                          f32
 *	W    = T diag(beta e^(c_t)) K^         U = T diag(beta) V                  bf16, stored
 *	V'   = U - W S0^T                      what each token adds along its key
 *	O    = diag(e^(c_t)) Q^ S0^T + P V'    P = lower triangle of (Q^ K^T)_ij e^(c_i - c_j)
 *	S    = e^c S0 + (diag(e^(c - c_t)) V')^T K^
 *
 * Mamba-2 is the same without A and W: V' = U = dt x. Exponents are never above 0. Sums are f32.
 *
 * gdn_chunk.cu cuts lanes into chunks on the device; gdn_prep.cu makes Q^, K^, W, U, P of all
 * chunks at once; gdn_scan.cu walks each lane's chunks with S in registers.
 *
 * The workspace has, of every chunk,
 *	for each key head    Q^, K^   [2][64][64] bf16, the halves of 128 columns one after the
 *	                              other: 16-byte pieces of row r at piece ^ (r & 7), as wgmma
 *	                              takes operands
 *	for each head        W        the same, delta rule only
 *	                     P        [64][64], the same
 *	                     U        for each 8 rows of S: [16 tokens x 4][lane][4] as wgmma has sums
 *	                     e^(c_t), e^(c - c_t)  [64] f32 each
 * so that a tile is one bulk copy and is free of bank conflicts where it lands.
 */
#ifndef KV_KERNELS_GDN_CHUNK_CUH
#define KV_KERNELS_GDN_CHUNK_CUH

#include "kernels/device/mma.cuh"
#include "kernels/gdn_launch.cuh"

#define CHUNK	      64
#define CHUNK_DK      128
#define CHUNK_GROUP   16 /* heads of a key head, at most */
#define CHUNK_MIN_LEN 17 /* shorter lanes are done in steps */
#define TILE_QK	      (CHUNK * CHUNK_DK * 2)
#define TILE_P	      (CHUNK * CHUNK * 2)
#define TILE_GATES    (2 * CHUNK * 4)

struct chunk_entry {
	int32_t lane;
	int32_t start; /* first token, of all */
	int32_t len;
	int32_t reserved;
};

struct chunk_params {
	struct kv_recur a;
	int32_t n_max; /* chunks that the workspace holds */
	int32_t *total;
	int32_t *first;		     /* [n_seqs] of a lane's chunks, the first */
	struct chunk_entry *entries; /* [n_max] */
	char *qk;		     /* [n_max][heads_k][2 * TILE_QK] */
	char *heads;		     /* [n_max][heads][head_bytes] */
	int32_t head_bytes;
};

/* Offsets in what a chunk has of a head. */
__host__ __device__ static inline int32_t chunk_at_p(int rule)
{
	return rule == KV_RULE_DELTA ? TILE_QK : 0;
}

__host__ __device__ static inline int32_t chunk_at_u(int rule)
{
	return chunk_at_p(rule) + TILE_P;
}

__host__ __device__ static inline int32_t chunk_at_gates(int rule, int dim_v)
{
	return chunk_at_u(rule) + CHUNK * dim_v * 2;
}

__host__ __device__ static inline int32_t chunk_head_bytes(int rule, int dim_v)
{
	return chunk_at_gates(rule, dim_v) + TILE_GATES;
}

/* Byte of (row, piece of 16 bytes) in a tile of CHUNK rows of PIECES: 8 pieces of all rows, 8 more. */
template <int PIECES> __device__ static inline int tile_at(int row, int piece)
{
	return piece / 8 * (CHUNK * 128) + row * 128 + ((piece ^ row) & 7) * 16;
}

/*
 * Addresses for ldmatrix of lane l in a tile at @tile, of the 16 x 16 elements from (row, col):
 *four 8 x 8 matrices, the second and fourth by rows or by columns further on. frag_rows   (0,0)
 *(8,0) (0,8) (8,8)    A of a row-major tile; with .trans B of a [k][n] tile frag_cols   (0,0) (0,8)
 *(8,0) (8,8)    B of a [n][k] tile; with .trans A of a [k][m] tile
 */
template <int PIECES>
__device__ static inline uint32_t frag_rows(uint32_t tile, int row, int col, int lane)
{
	return tile + (uint32_t)tile_at<PIECES>(row + (lane & 7) + (lane & 8), col / 8 + lane / 16);
}

template <int PIECES>
__device__ static inline uint32_t frag_cols(uint32_t tile, int row, int col, int lane)
{
	return tile + (uint32_t)tile_at<PIECES>(row + (lane & 7) + (lane & 16) / 2,
						col / 8 + (lane & 8) / 8);
}

__device__ static inline uint32_t shared_at(const void *p)
{
	return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ static inline void fence_async(void)
{
	asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Shared memory to global; groups are waited for until they have been read, or are complete. */
__device__ static inline void bulk_store(void *to, uint32_t from, int bytes)
{
	asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
		     :
		     : "l"(to), "r"(from), "r"(bytes)
		     : "memory");
}

__device__ static inline void bulk_commit(void)
{
	asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__device__ static inline void bulk_wait_read(void)
{
	asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ static inline void bulk_wait(void)
{
	asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif
