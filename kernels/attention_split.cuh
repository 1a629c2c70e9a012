/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention of few queries a sequence over long block tables, at the speed of the memory.
 *
 *	x_j = scale q . k_j; x_j = c tanh(x_j / c) if c > 0; out = v_scale sum e^x_j v_j / sum e^x_j
 *
 * q . k and sum e^x v are matrix instructions with f32 sums: bf16 ones for a bf16 cache, f16 ones
 * for f16 and for e4m3, whose values f16 holds exactly. Weights e^x are rounded to that type, their
 * sum is not. Scores are kept in units of ln 2.
 *
 * Keys are the rows of an instruction (16) and queries its columns (8), so that a group of 8 query
 * heads fills it:
 *
 *	S^T [16 keys, 8 queries] = K [16, D] Q^T [D, 8]
 *	O^T [D, 8 queries] += V^T [D, 16] P^T [16, 8]	P^T is e^(S^T), its lanes transposed
 *
 * Work is one list of tiles (16 or 32 keys of one request): for each request, for each set of
 * KV heads, for each chunk of rows, the tiles that some row sees. A thread block takes an equal,
 * contiguous run of the list, found from the lengths on the device, so a launch depends on no
 * length and ragged batches are nearly as even as uniform ones. A run falls into segments, one for
 * each (request, heads, chunk) it touches. A warp has one head of a segment, or those in 256 bytes
 * of a token, and every so-manieth tile of it.
 *
 * A warp fetches its own tiles by cp.async into its own ring, across segments: no barrier, and
 * 128 KiB of reads in flight in a multiprocessor. A tile lies in whole runs of 16 tokens, which
 * lie in one block each: block_tokens is a multiple of 16.
 *
 * Sums of a segment that is not the whole of its list entry go to the workspace. The thread block
 * that comes last of those that share the entry merges them, in the order of the keys: the same
 * bits in each run. Above KV_SPLIT_MERGE of them it does so in two levels.
 *
 * Invariant calls: each entry is worked on by a cluster of KV_SPLIT_FIXED thread blocks, whatever else there
 * is, whose warps take tiles by their place in the sequence. So which sums are added to which goes by nothing
 * but the row's own keys.
 *
 * Speed, what bounds it and what was tried: tests/bench/NOTES.md.
 */
#include "kernels/device/launch.cuh"
#include "kernels/split_merge.cuh"

template <typename S>
__global__ void __launch_bounds__(S::threads, S::blocks) attend_split(struct kv_split_params p)
{
	extern __shared__ __align__(128) char shared[];
	int warp = threadIdx.x / KV_WARP;
	uint32_t ring = (uint32_t)__cvta_generic_to_shared(shared) + warp * S::ring;
	float *scratch = (float *)(shared + S::warps * S::ring);
	uint64_t policy = kv_policy_once();
	struct cursor fetched;
	struct segment s;
	struct state<S> x;
	struct share w;
	struct cut c;
	int stage = 0;

	kv_wait_for_grids();
	kv_let_grids_start();
	if (!plan<S>(p, c, s))
		return;
	w = share_of<S>(p, s);
	fetched.s = s;
	fetched.tile = s.t0 + w.first;
	fetched.n_ids = 0;
	cursor_skip_empty<S>(p, fetched, w);
#pragma unroll
	for (int i = 0; i < S::stages - 1; i++) {
		fetch<S>(p, fetched, w, ring + i * S::stage, policy);
		kv_copy_commit();
	}
	load_q<S>(p, s, w.head_in_set, x);
	for (;;) {
		struct segment done = s;

		if constexpr (S::type == KV_F8_E4M3)
			scale_q<S>(p, x);
		clear<S>(x);
		for (int tile = s.t0 + w.first; tile < s.t1; tile += w.step) {
			int free = stage ? stage - 1 : S::stages - 1;

			kv_copy_wait<S::stages - 2>();
			__syncwarp(); /* the stage is there for all lanes, all are done with the
					 last */
			fetch<S>(p, fetched, w, ring + free * S::stage, policy);
			kv_copy_commit();
			attend_tile<S>(p, s, token_of<S>(s, tile), ring + stage * S::stage, x);
			stage = stage + 1 < S::stages ? stage + 1 : 0;
		}
		if (S::scaled && p.k_rows.base)
			unscale_sums<S>(x);
		if (s.left) { /* q comes while sums go */
			next_segment<S>(p, s);
			load_q<S>(p, s, w.head_in_set, x);
		}
		finish<S>(p, c, done, (float *)shared, scratch, x);
		if (!done.left)
			break;
	}
}

template <typename S>
static int launch_split(const struct kv_split_params *params, int n_parts, void *stream)
{
	return kv_launch_near("attention", attend_split<S>, n_parts, S::near ? params->near : 1,
			      S::threads, S::shared, stream, *params);
}

/* The kernel for rows of D elements; attention_split.cu chooses among those there are. */
template <int TYPE, int D>
static int launch_dim(const struct kv_split_params *params, const struct kv_split_choice *choice,
		      void *stream)
{
	constexpr int wide = 256 / D / (TYPE == KV_F8_E4M3 ? 1 : 2); /* heads in 256 bytes */
	int n_row_tiles = choice->n_row_tiles, n_parts = choice->n_parts;

	if (choice->kind == KV_SPLIT_NEAR)
		return n_row_tiles == 1 ? launch_split<shape<TYPE, D, 1, 1, KV_SPLIT_NEAR>>(
						  params, n_parts, stream)
					: launch_split<shape<TYPE, D, 2, 1, KV_SPLIT_NEAR>>(
						  params, n_parts, stream);
	if constexpr (wide > 1)
		if (n_row_tiles == 1 && choice->n_heads == wide)
			return launch_split<shape<TYPE, D, 1, wide, KV_SPLIT_PLAIN>>(params, n_parts,
										     stream);
	if constexpr (D == 64)
		if (n_row_tiles == 2 && choice->n_heads == 2)
			return launch_split<shape<TYPE, D, 2, 2, KV_SPLIT_PLAIN>>(params, n_parts,
										  stream);
	if (n_row_tiles == 1)
		return launch_split<shape<TYPE, D, 1, 1, KV_SPLIT_PLAIN>>(params, n_parts, stream);
	if (n_row_tiles == 2)
		return launch_split<shape<TYPE, D, 2, 1, KV_SPLIT_PLAIN>>(params, n_parts, stream);
	return launch_split<shape<TYPE, D, 4, 1, KV_SPLIT_PLAIN>>(params, n_parts, stream);
}

/* The same for KV_SPLIT_ANY. */
template <int TYPE, int D>
static int launch_any(const struct kv_split_params *params, const struct kv_split_choice *choice,
		      void *stream)
{
	int n_row_tiles = choice->n_row_tiles, n_parts = choice->n_parts;

	if constexpr (D == 64 || D == 128)
		if (n_row_tiles == 4)
			return launch_split<shape<TYPE, D, 4, 1, KV_SPLIT_ANY>>(params, n_parts,
										stream);
	if constexpr (D <= 128)
		if (n_row_tiles == 2)
			return launch_split<shape<TYPE, D, 2, 1, KV_SPLIT_ANY>>(params, n_parts,
										stream);
	return launch_split<shape<TYPE, D, 1, 1, KV_SPLIT_ANY>>(params, n_parts, stream);
}
