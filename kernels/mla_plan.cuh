/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Latent decode on a GPU: how tiles of 64 keys fall to thread blocks, and where parts of sums lie.
 *
 * A row is a query token and head: token r / H, head r % H. Rows go in chunks of `rows`; of a chunk,
 * thread blocks 0 .. G - 1 (gridDim.x) get equal runs of the list of all requests' tiles, so that the
 * chunks of one request read the same keys at about the same time: the second finds them in the L2.
 * A request whose tiles lie in one run is finished there. Else its parts go to slots of the workspace,
 * 2 i + 1 for the part that begins it and 2 i for a later one of thread block i, and mla_merge.cu adds
 * them. Lengths are read by the device alone; the launch depends on none.
 */
#ifndef KV_KERNELS_MLA_PLAN_CUH
#define KV_KERNELS_MLA_PLAN_CUH

#include "kernels/device/warp.cuh"
#include "kernels/mla.h"

#define KV_MLA_KEYS 64 /* of a tile */

struct kv_mla_params {
	const void *q;
	void *out;
	float *lse;
	const int32_t *query_start_loc;
	const int32_t *seq_lens;
	const int32_t *block_table;
	const int32_t *chosen; /* sparse: [n_seqs][top_k] slots, a request a token; else NULL */
	float *sums; /* slots: [rows][latent] sums, [rows][2] largest score and sum of weights, padding */
	struct kv_view k;
	int64_t q_stride; /* elements from token to token */
	int64_t out_stride;
	int64_t lse_stride;
	int64_t lse_head_stride;
	int32_t dtype;
	int32_t out_dtype;
	int32_t n_seqs;
	int32_t n_tokens;
	int32_t n_heads;
	int32_t latent;
	int32_t rope;
	int32_t rows; /* of a chunk */
	int32_t groups;
	int32_t each; /* sparse: tiles of a run; else 0: see mla_each() */
	int32_t top_k;
	int32_t table_width;
	int32_t causal;
	int32_t cp_size;
	int32_t cp_rank;
	int32_t cp_interleave;
	int32_t key_begin;
	int32_t key_end;
	float scale; /* of scores, to units of ln 2 */
	float v_scale;
};

/* Host: all but the pointers of the workspace. */
int kv_mla_describe(const struct kv_attention_args *args, int rows, struct kv_mla_params *ret);
int kv_mla_groups(int n_chunks); /* thread blocks of each chunk that fill the device */
size_t kv_mla_workspace(const struct kv_attention_args *args, int rows, int n_chunks);
int kv_mla_merge(const struct kv_mla_params *p, int n_chunks, void *stream);

#ifdef __CUDACC__

/* A part of one request's tiles, for one chunk of its rows. */
struct mla_part {
	int at;	  /* of the request's first tile in the list */
	int left; /* tiles of the run after this part */
	int b;
	int n;	/* tiles of the request */
	int t0; /* this part is tiles [t0, t1) */
	int t1;
	int first; /* key where tile 0 begins */
	int start; /* first token of the request in q */
	int q_len;
	int len;
	int row0; /* of the chunk, in the request's rows */
	int n_rows;
	int lo; /* keys that some row sees */
	int hi;
};

/* Sparse: tiles of a request. */
__device__ static int mla_chosen_tiles(const struct kv_mla_params &p)
{
	return (p.top_k + KV_MLA_KEYS - 1) / KV_MLA_KEYS;
}

/* The end of what token @i of the request sees: an index of this rank's keys. */
__device__ static int mla_sees(const struct kv_mla_params &p, const struct mla_part &s, int i)
{
	int end = p.causal ? min(s.len, s.len - s.q_len + i + 1) : s.len;
	int64_t most = (int64_t)p.table_width * p.k.block_tokens;

	if (p.chosen)
		return p.top_k;
	end = max(min(end, p.key_end), 0);
	return (int)min(kv_local_len(p.cp_size, p.cp_rank, p.cp_interleave, end), most);
}

/* Request @b: n is 0 if it has no rows in this chunk, 1 if they see nothing. */
__device__ static void mla_load(const struct kv_mla_params &p, int b, int chunk, struct mla_part &s)
{
	int end;

	s.b = b;
	if (p.chosen) {
		s = {};
		s.b = s.start = b;
		s.q_len = 1;
		s.len = s.hi = p.top_k;
		s.row0 = chunk * p.rows;
		s.n_rows = min(p.n_heads - s.row0, p.rows);
		s.n = mla_chosen_tiles(p);
		return;
	}
	s.start = p.query_start_loc[b];
	end = min(p.query_start_loc[b + 1], p.n_tokens);
	s.len = p.seq_lens[b];
	s.q_len = s.start < 0 ? 0 : end - s.start;
	s.row0 = chunk * p.rows;
	s.n_rows = min(max(s.q_len, 0) * p.n_heads - s.row0, p.rows);
	s.n = 0;
	if (s.n_rows <= 0)
		return;
	s.lo = (int)kv_local_len(p.cp_size, p.cp_rank, p.cp_interleave, p.key_begin);
	s.hi = mla_sees(p, s, (s.row0 + s.n_rows - 1) / p.n_heads);
	s.first = s.lo / KV_MLA_KEYS * KV_MLA_KEYS;
	s.n = max((s.hi - s.first + KV_MLA_KEYS - 1) / KV_MLA_KEYS, 1);
}

/* What requests have together. */
struct mla_all {
	int tiles;
	int requests; /* with tiles */
	int least;    /* tiles of one */
	int most;
};

__device__ static void mla_count(struct mla_all &all, int n)
{
	all.tiles += n;
	all.requests += n > 0;
	all.least = n ? min(all.least, n) : all.least;
	all.most = max(all.most, n);
}

/* Over the lanes of a warp. */
__device__ static void mla_reduce(struct mla_all &all)
{
	all.tiles = __reduce_add_sync(KV_ALL_LANES, all.tiles);
	all.requests = __reduce_add_sync(KV_ALL_LANES, all.requests);
	all.least = __reduce_min_sync(KV_ALL_LANES, all.least);
	all.most = __reduce_max_sync(KV_ALL_LANES, all.most);
}

/*
 * Tiles of a run: equal ones, but where all requests have the same and it makes runs no more than a
 * sixteenth longer, whole requests or whole parts of them: fewer parts, or none to merge.
 */
__device__ static int mla_each(const struct kv_mla_params &p, const struct mla_all &all)
{
	int equal = max((all.tiles + p.groups - 1) / p.groups, 1), most = equal + equal / 16 + 1;
	int n = all.most, fit;

	if (p.each)
		return p.each;
	if (!all.requests || all.least != n)
		return equal;
	if (n <= most) {
		fit = (all.requests + p.groups - 1) / p.groups * n;
		return fit <= most ? fit : equal;
	}
	fit = n / max(n / equal, 1);
	return fit <= most && n % fit == 0 ? fit : equal;
}

/* All requests, and the tiles of those before @before; by one warp. */
__device__ static struct mla_all mla_total(const struct kv_mla_params &p, int chunk, int before,
					   int *ret_before)
{
	struct mla_all all = {0, 0, INT32_MAX, 0};
	int lane = threadIdx.x % KV_WARP, some = 0;
	struct mla_part s;

	if (p.chosen) {
		*ret_before = before * mla_chosen_tiles(p);
		all.tiles = p.n_seqs * mla_chosen_tiles(p);
		return all;
	}
	for (int b = lane; b < p.n_seqs; b += KV_WARP) {
		mla_load(p, b, chunk, s);
		mla_count(all, s.n);
		some += b < before ? s.n : 0;
	}
	*ret_before = __reduce_add_sync(KV_ALL_LANES, some);
	mla_reduce(all);
	return all;
}

/* The part after @s; call it only if s.left > 0. */
__device__ static void mla_next(const struct kv_mla_params &p, int chunk, struct mla_part &s)
{
	int at = s.at + s.n, left = s.left;

	do
		mla_load(p, s.b + 1, chunk, s);
	while (!s.n);
	s.at = at;
	s.t0 = 0;
	s.t1 = min(s.n, left);
	s.left = left - s.t1;
}

/* The part that begins a run of @tiles, at tile @key of the list; that of request @b at @at. */
__device__ static void mla_first(const struct kv_mla_params &p, int b, int chunk, int key, int at,
				 int tiles, struct mla_part &s)
{
	mla_load(p, b, chunk, s);
	s.at = at;
	s.t0 = key - at;
	s.t1 = min(s.n, s.t0 + tiles);
	s.left = tiles - (s.t1 - s.t0);
}

/* The first part of thread block @group, or false. Each warp finds it for itself. */
__device__ static bool mla_plan(const struct kv_mla_params &p, int group, int chunk, struct mla_part &s)
{
	int lane = threadIdx.x % KV_WARP, each = (p.n_seqs + KV_WARP - 1) / KV_WARP;
	int begin = min(lane * each, p.n_seqs), end = min(begin + each, p.n_seqs);
	struct mla_all all = {0, 0, INT32_MAX, 0};
	int tiles, to, key, at, total, run;
	uint32_t finder;

	if (p.chosen) {
		total = p.n_seqs * mla_chosen_tiles(p);
		run = p.each;
		key = group * run;
		if (key >= total)
			return false;
		begin = key / mla_chosen_tiles(p);
		at = begin * mla_chosen_tiles(p);
		mla_first(p, begin, chunk, key, at, min(run, total - key), s);
		return true;
	}
	for (int b = begin; b < end; b++) {
		mla_load(p, b, chunk, s);
		mla_count(all, s.n);
	}
	tiles = to = all.tiles;
#pragma unroll
	for (int step = 1; step < KV_WARP; step *= 2) {
		int x = __shfl_up_sync(KV_ALL_LANES, to, step);

		to += lane >= step ? x : 0;
	}
	mla_reduce(all);
	total = all.tiles;
	run = mla_each(p, all);
	key = group * run;
	if (key >= total)
		return false;
	at = to - tiles;
	finder = __ballot_sync(KV_ALL_LANES, at <= key && key < to);
	if (finder >> lane & 1) {
		for (; begin < end; begin++) {
			mla_load(p, begin, chunk, s);
			if (key < at + s.n)
				break;
			at += s.n;
		}
	}
	begin = __shfl_sync(KV_ALL_LANES, begin, __ffs(finder) - 1);
	at = __shfl_sync(KV_ALL_LANES, at, __ffs(finder) - 1);
	mla_first(p, begin, chunk, key, at, min(run, total - key), s);
	return true;
}

__device__ static float *mla_slot(const struct kv_mla_params &p, int group, int chunk, bool begins)
{
	return p.sums + ((int64_t)(chunk * p.groups + group) * 2 + begins) * p.rows * (p.latent + 4);
}

/* Largest scores and sums of weights of a slot. */
__device__ static float2 *mla_slot_stats(const struct kv_mla_params &p, float *slot)
{
	return (float2 *)(slot + (int64_t)p.rows * p.latent);
}

#endif
#endif
