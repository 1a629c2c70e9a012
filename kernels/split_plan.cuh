/* SPDX-License-Identifier: Apache-2.0 */
/* attention_split.cuh: sizes of its kernels, and how the list of tiles falls to thread blocks. */
#ifndef KV_KERNELS_SPLIT_PLAN_CUH
#define KV_KERNELS_SPLIT_PLAN_CUH

#include "kernels/attention_split.h"
#include "kernels/device/warp.cuh"
#include "kernels/view.h"

#define RUN   16     /* tokens that lie in one block */
#define LOADS 8	     /* of them in flight */
#define ALIGN 300    /* tiles of a part: below, parts that end with entries are worth 10 % fewer */
#define SLACK 8.0f   /* weights stay below 2^SLACK: only then are sums brought to a new maximum */
#define NONE  -1e30f /* maximum of no scores */
#define NEAR_TILES 32 /* of each thread block of a cluster, where others would be idle */

/*
 * Sizes of a kernel: TYPE of the cache, head dim D, N row tiles of 8 queries, H heads of a warp: as
 * many as bring the bytes of a token that it reads to 256; KIND: enum kv_split_kind.
 */
template <int TYPE, int D, int N, int H, int KIND> struct shape {
	static constexpr int type = TYPE, dim = D, n = N, h = H;
	static constexpr bool any = KIND == KV_SPLIT_ANY, near = KIND == KV_SPLIT_NEAR;
	static constexpr int columns = N * H; /* tiles of 8 queries: head c / N, rows c % N */
	static constexpr int row = H * D * (TYPE == KV_F8_E4M3 ? 1 : 2); /* bytes of a token */
	static constexpr int units = row / 16; /* 16-byte units of a row */
	static constexpr int head_units = units / H;
	static constexpr int warps = kv_split_warps(KIND, row);
	static constexpr int blocks = kv_split_blocks(KIND, D, row, columns);
	static constexpr int threads = warps * KV_WARP;
	static constexpr int runs = row > 64 ? 1 : 2; /* of a tile */
	static constexpr int tokens = runs * RUN;
	static constexpr int tile = tokens * row; /* bytes of K, and of V */
	static constexpr bool scaled = any && TYPE == KV_F8_E4M3; /* rows may have scales */
	static constexpr int stage = 2 * tile + (scaled ? tokens * 8 : 0);
	static constexpr int stages = 192 * 1024 / blocks / warps / stage;
	static constexpr int ring = stages * stage; /* bytes of a warp */
	static constexpr int sum_row = (D + 31) / 32 * 32;
	static constexpr int sums = KV_SPLIT_ROWS * sum_row; /* floats of a warp */
	static constexpr size_t shared =
		(size_t)warps * (ring + (sums + 2 * KV_SPLIT_ROWS) * sizeof(float));
	/* Unit u of row r lies at u ^ turn(r): the 8 rows of a matrix differ in their banks. */
	__device__ static constexpr int turn(int r)
	{
		return row % 128 == 0 ? r & 7 : row % 64 == 0 ? (r >> 1) & 3 : (r >> 2) & 1;
	}
};

/* A part of one request's tiles, for one set of heads and one chunk of rows. */
struct segment {
	int at;	    /* of its first tile in the list */
	bool later; /* not the first of its thread block */
	int left;   /* tiles of the run after this segment */
	int b;
	int entry;  /* set of heads * chunks + chunk */
	int chunks; /* of rows that the request has */
	int n;	    /* tiles of the entry */
	int t0;	    /* this segment is tiles [t0, t1) of the entry */
	int t1;
	int first; /* token where tile 0 starts */
	int start; /* first row of the request in q */
	int q_len;
	int len;
	int lo; /* keys that some row sees */
	int hi;
	/* KV_SPLIT_ANY alone: */
	int n_before;  /* tiles before a gap that no row sees */
	int gap;       /* tokens of the gap, whole tiles */
	int before_hi; /* keys [lo, before_hi) all rows see, */
	int all_lo;    /* and [all_lo, all_hi) */
	int all_hi;
};

/* The first token of a tile. */
template <typename S> __device__ static int token_of(const struct segment &s, int tile)
{
	return s.first + tile * S::tokens + (S::any && tile >= s.n_before ? s.gap : 0);
}

__device__ static struct kv_span query_sees(const struct kv_split_params &p,
					    const struct segment &s, int i)
{
	struct kv_span span =
		kv_span_seen((int64_t)s.len - s.q_len + i, s.len, p.causal, p.window_left);

	span.hi = min(span.hi, (int64_t)p.table_width * p.k.block_tokens);
	return span;
}

__device__ static struct kv_span row_sees(const struct kv_split_params &p, const struct segment &s,
					  int row)
{
	return query_sees(p, s, row / p.group);
}

/* Which keys the rows of a request see, by kernels/visible.h. */
template <typename S>
__device__ static void load_visible(const struct kv_split_params &p, struct segment &s)
{
	int bound = p.table_width * p.k.block_tokens, before = 0, after = bound;
	struct kv_range all = {0, 0};
	/* Ends of what a row sees ascend, but in trees and documents. */
	int step = p.sees.tree_mask || p.sees.doc_ranges ? 1 : max(s.q_len - 1, 1);

	s.before_hi = bound;
	s.all_lo = 0;
	s.all_hi = bound;
	for (int i = 0; i < s.q_len; i += step) {
		struct kv_visible row =
			kv_visible_row(&p.sees, s.b, s.start, i, s.q_len, s.len);

		kv_visible_widen(&all, &row.all);
		s.all_lo = max(s.all_lo, (int)row.span.lo);
		s.all_hi = min(s.all_hi, (int)row.span.hi);
		before = max(before, (int)row.prefix.hi);
		s.before_hi = min(s.before_hi, (int)row.prefix.hi);
		if (row.span.lo < row.span.hi)
			after = min(after, (int)row.span.lo);
		if (row.tree.lo < row.tree.hi)
			after = min(after, (int)row.tree.lo);
	}
	s.lo = (int)all.lo;
	s.hi = min((int)all.hi, bound);
	s.first = s.lo / S::tokens * S::tokens;
	s.n_before = max((before + S::tokens - 1) / S::tokens - s.first / S::tokens, 0);
	s.gap = after / S::tokens * S::tokens - s.first - s.n_before * S::tokens;
	if (!p.sees.prefix_lens || p.sees.doc_ranges || s.gap <= 0 || after >= s.hi)
		s.gap = 0;
}

/* Request @b: what it asks for, and how many tiles that is; 1 if its rows see nothing. */
template <typename S>
__device__ static void load_request(const struct kv_split_params &p, int b, struct segment &s)
{
	int end;

	s.b = b;
	s.start = p.query_start_loc[b];
	end = min(p.query_start_loc[b + 1], p.n_tokens);
	s.len = p.seq_lens[b];
	s.q_len = s.start < 0 ? 0 : end - s.start;
	s.n = 0;
	if (s.q_len <= 0)
		return;
	if constexpr (S::any) {
		load_visible<S>(p, s);
	} else {
		s.lo = (int)query_sees(p, s, 0).lo;
		s.hi = (int)query_sees(p, s, s.q_len - 1).hi;
		s.first = s.lo / S::tokens * S::tokens;
		s.gap = 0;
	}
	s.n = max((s.hi - s.gap - s.first + S::tokens - 1) / S::tokens, 1);
	s.chunks = (s.q_len * p.group + S::n * KV_SPLIT_ROWS - 1) / (S::n * KV_SPLIT_ROWS);
	s.chunks = min(s.chunks, p.n_chunks);
}

/* Entries of the list that a request has. */
__device__ static int n_entries(const struct kv_split_params &p, const struct segment &s)
{
	return p.n_sets * s.chunks;
}

/* The segment after @s; call it only if s.left > 0. */
template <typename S>
__device__ static void next_segment(const struct kv_split_params &p, struct segment &s)
{
	s.at += s.t1 - s.t0;
	s.later = true;
	s.entry++;
	if (s.entry == n_entries(p, s)) {
		s.entry = 0;
		do
			load_request<S>(p, s.b + 1, s);
		while (!s.n);
	}
	s.t0 = 0;
	s.t1 = min(s.n, s.left);
	s.left -= s.t1;
}

/*
 * How the list is cut. Either each entry into the same number of parts, per_entry, so that a part
 * is one segment; or (per_entry 0) all of it into n parts of @each tiles, the first @more of them
 * one larger.
 */
struct cut {
	int n;
	bool near; /* the parts of an entry are the thread blocks of a cluster */
	int per_entry;
	int each;
	int more;
};

__device__ static int part_start(const struct cut &c, int i)
{
	return i * c.each + min(i, c.more);
}

__device__ static int part_of(const struct cut &c, int tile)
{
	int of_larger = c.more * (c.each + 1);

	return tile < of_larger ? tile / (c.each + 1) : c.more + (tile - of_larger) / c.each;
}

/*
 * The cut of @total tiles in @entries of at most @longest.
 *
 * Few entries of about one length are cut each for itself: into parts of at least min_tiles, of as
 * many as one thread block merges, or of more if that leaves multiprocessors without work. Short
 * parts are not worth a second thread block on a multiprocessor. Many short entries go to as many
 * thread blocks as have whole entries, if that is nearly all. Else each thread block gets the same
 * number of tiles.
 *
 * In clusters an entry is a cluster's, whatever its length, where none is long.
 */
__device__ static struct cut cut_list(const struct kv_split_params &p, int total, int entries,
				      int longest)
{
	int most = gridDim.x, half, fewest;
	struct cut c = {};

	if (p.near > 1 &&
	    (p.fixed || (entries * p.near <= most &&
			 (longest <= p.near * NEAR_TILES ||
			  (longest * entries <= total + total / 8 && entries * p.near > most / 2))))) {
		c.per_entry = p.near;
		c.n = c.per_entry * entries;
		c.near = true;
		return c;
	}
	half = most / p.blocks;
	fewest = longest / p.min_tiles;
	if (entries <= most && longest <= total / entries + total / entries / 8 &&
	    total / most < ALIGN) {
		c.per_entry = min(max(fewest, 1), most / entries);
		if (c.per_entry > KV_SPLIT_MERGE)
			c.per_entry = max(min(fewest / 2, half / entries), KV_SPLIT_MERGE);
		if (c.per_entry * entries > half &&
		    (c.per_entry * 2 > fewest || (half / entries == 1 && fewest <= 12)))
			c.per_entry = max(half / entries, 1);
		c.n = c.per_entry * entries;
		/* One or two for nearly each multiprocessor, or nothing to gain by more. */
		if (c.n >= most - most / 8 || (c.n <= half && c.n >= half - half / 8) ||
		    c.n * p.min_tiles * 2 > total || c.per_entry >= KV_SPLIT_MERGE)
			return c;
		c.per_entry = 0;
	}
	c.n = max(min(most, total / p.min_tiles), 1);
	if (total / c.n < ALIGN && entries > most) {
		int whole = (entries + most - 1) / most;

		if (entries % whole == 0 && entries / whole >= most - most / 10)
			c.n = entries / whole;
	}
	c.each = total / c.n;
	c.more = total % c.n;
	return c;
}

/* Of a chunk's rows alone: what they see. */
template <typename S>
__device__ static void narrow(const struct kv_split_params &p, struct segment &s)
{
	int chunk = s.entry % s.chunks * S::n * KV_SPLIT_ROWS;
	int last = min(chunk + S::n * KV_SPLIT_ROWS, s.q_len * p.group) - 1;

	s.lo = (int)row_sees(p, s, chunk).lo;
	s.hi = (int)row_sees(p, s, last).hi;
	s.first = s.lo / S::tokens * S::tokens;
	s.n = max((s.hi - s.first + S::tokens - 1) / S::tokens, 1);
}

/*
 * The first segment of this thread block, or false if there is none for it. Each warp finds it for
 * itself: that takes no barrier.
 */
template <typename S>
__device__ static bool plan(const struct kv_split_params &p, struct cut &c, struct segment &s)
{
	int lane = threadIdx.x % KV_WARP;
	int each = (p.n_seqs + KV_WARP - 1) / KV_WARP;
	int begin = min(lane * each, p.n_seqs), end = min(begin + each, p.n_seqs);
	int tiles = 0, entries = 0, longest = 0, tiles_to, entries_to, key, at, mine;
	uint32_t finder;

	for (int b = begin; b < end; b++) {
		load_request<S>(p, b, s);
		if (s.n) {
			tiles += p.fixed ? 0 : s.n * n_entries(p, s); /* it may be too many to count */
			entries += n_entries(p, s);
			longest = max(longest, s.n);
		}
	}
	tiles_to = tiles;
	entries_to = entries;
#pragma unroll
	for (int step = 1; step < KV_WARP; step *= 2) {
		int x = __shfl_up_sync(KV_ALL_LANES, tiles_to, step);
		int y = __shfl_up_sync(KV_ALL_LANES, entries_to, step);

		tiles_to += lane >= step ? x : 0;
		entries_to += lane >= step ? y : 0;
	}
	longest = __reduce_max_sync(KV_ALL_LANES, longest);
	at = __shfl_sync(KV_ALL_LANES, entries_to, KV_WARP - 1);
	if (!at)
		return false;
	c = cut_list(p, __shfl_sync(KV_ALL_LANES, tiles_to, KV_WARP - 1), at, longest);
	if ((int)blockIdx.x >= c.n)
		return false;
	/* Which lane's requests have entry or tile @key, and which of these. */
	key = c.per_entry ? blockIdx.x / c.per_entry : part_start(c, blockIdx.x);
	mine = c.per_entry ? entries : tiles;
	at = (c.per_entry ? entries_to : tiles_to) - mine;
	finder = __ballot_sync(KV_ALL_LANES, at <= key && key < at + mine);
	if (each > 1 && finder >> lane & 1) {
		for (; begin < end; begin++) {
			load_request<S>(p, begin, s);
			mine = s.n ? n_entries(p, s) * (c.per_entry ? 1 : s.n) : 0;
			if (key < at + mine)
				break;
			at += mine;
		}
	}
	finder = (uint32_t)__ffs(finder) - 1;
	at = __shfl_sync(KV_ALL_LANES, at, finder);
	if (p.n_seqs <= KV_WARP && !S::any) { /* a lane has it at hand */
		s.b = (int)finder;
		s.n = __shfl_sync(KV_ALL_LANES, s.n, finder);
		s.start = __shfl_sync(KV_ALL_LANES, s.start, finder);
		s.q_len = __shfl_sync(KV_ALL_LANES, s.q_len, finder);
		s.len = __shfl_sync(KV_ALL_LANES, s.len, finder);
		s.lo = __shfl_sync(KV_ALL_LANES, s.lo, finder);
		s.hi = __shfl_sync(KV_ALL_LANES, s.hi, finder);
		s.first = __shfl_sync(KV_ALL_LANES, s.first, finder);
		s.chunks = __shfl_sync(KV_ALL_LANES, s.chunks, finder);
		s.gap = 0;
	} else {
		load_request<S>(p, __shfl_sync(KV_ALL_LANES, begin, finder), s);
	}
	s.later = false;
	if (c.per_entry) {
		int i = blockIdx.x % c.per_entry;

		s.entry = key - at;
		if (S::near && p.fixed) {
			narrow<S>(p, s);
			s.t0 = s.left = s.at = 0;
			s.t1 = s.n;
			return true;
		}
		s.t0 = (int)((int64_t)s.n * i / c.per_entry);
		s.t1 = (int)((int64_t)s.n * (i + 1) / c.per_entry);
		s.left = 0;
		s.at = 0;
		return true;
	}
	s.at = key;
	s.entry = (key - at) / s.n;
	s.t0 = (key - at) % s.n;
	s.left = part_start(c, blockIdx.x + 1) - key;
	s.t1 = min(s.n, s.t0 + s.left);
	s.left -= s.t1 - s.t0;
	return true;
}

#endif
