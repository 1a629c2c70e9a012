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
 *	O^T [D, 8 queries] += V^T [D, 16] P^T [16, 8]	P^T is S^T with lanes transposed by movmatrix
 *
 * Work is one list of tiles (16 or 32 keys of one request): for each request, for each set of
 * KV heads, for each chunk of rows, the tiles that some row sees. A thread block takes an
 * equal, contiguous run of the list, found from the lengths on the device, so a launch depends on
 * no length and ragged batches are as even as uniform ones. A run falls into segments, one for each
 * (request, heads, chunk) it touches. In a segment warp w has head w / (warps / heads), and every
 * (warps / heads)th tile of it.
 *
 * A warp fetches its own tiles by cp.async into its own ring, across segments: no barrier, and
 * 128 KiB of reads in flight in a multiprocessor. A tile lies in whole runs of 16 tokens, which
 * lie in one block each: block_tokens is a multiple of 16.
 *
 * Sums of a segment that is not the whole of its list entry go to the workspace. The thread block
 * that comes last of those that share the entry merges them, in the order of the keys: the same
 * bits in each run. Above MERGE of them it does so in two levels.
 */
#include "kernels/attention_split.h"
#include "kernels/device/launch.cuh"
#include "kernels/device/mma.cuh"
#include "kernels/device/warp.cuh"
#include "kernels/view.h"

#define RUN   16   /* tokens that lie in one block */
#define MERGE 16   /* sums that are merged by one thread block */
#define LOADS 8	   /* of them in flight */
#define ALIGN 200  /* tiles of a part up to which parts that end with entries are worth 10 % fewer */
#define SLACK 8.0f /* weights stay below 2^SLACK: only then are sums brought to a new maximum */
#define NONE  -1e30f /* maximum of no scores */

/*
 * Sizes of a kernel: TYPE of the cache, head dim D, N row tiles of 8 queries, H heads of a warp: as
 * many as bring the bytes of a token that it reads to 256.
 */
template <int TYPE, int D, int N, int H> struct shape {
	static constexpr int type = TYPE, dim = D, n = N, h = H;
	static constexpr int columns = N * H; /* tiles of 8 queries; tile c: head c / N, rows c % N */
	static constexpr int row = H * D * (TYPE == KV_F8_E4M3 ? 1 : 2); /* bytes of a token */
	static constexpr int units = row / 16;		/* 16-byte units of a row */
	static constexpr int head_units = units / H;
	static constexpr int warps = kv_split_warps(row), blocks = kv_split_blocks(row, N * H);
	static constexpr int threads = warps * KV_WARP;
	static constexpr int runs = row > 64 ? 1 : 2; /* of a tile */
	static constexpr int tokens = runs * RUN;
	static constexpr int tile = tokens * row;      /* bytes of K, and of V */
	static constexpr int stages = 96 * 1024 / warps / (2 * tile);
	static constexpr int ring = stages * 2 * tile; /* bytes of a warp */
	static constexpr int sums = KV_SPLIT_ROWS * D; /* floats of a warp */
	static constexpr size_t shared =
		(size_t)warps * (ring + (sums + 2 * KV_SPLIT_ROWS) * sizeof(float));
	/* Unit u of row r lies at u ^ turn(r): the 8 rows that ldmatrix reads differ in their banks. */
	__device__ static constexpr int turn(int r)
	{
		return row % 128 == 0 ? r & 7 : (r >> 1) & 3;
	}
};

/* A part of one request's tiles, for one set of heads and one chunk of rows. */
struct segment {
	int at;	  /* of its first tile in the list */
	bool later; /* not the first of its thread block */
	int left; /* tiles of the run after this segment */
	int b;
	int entry;  /* set of heads * chunks + chunk */
	int chunks; /* of rows that the request has */
	int n;	   /* tiles of the entry */
	int t0;	   /* this segment is tiles [t0, t1) of the entry */
	int t1;
	int first; /* token where tile 0 starts */
	int start; /* first row of the request in q */
	int q_len;
	int len;
	int lo; /* keys that some row sees */
	int hi;
};

__device__ static struct kv_span query_sees(const struct kv_split_params &p,
					    const struct segment &s, int i)
{
	struct kv_span span = kv_span_seen((int64_t)s.len - s.q_len + i, s.len, p.causal,
					   p.window_left);

	span.hi = min(span.hi, (int64_t)p.table_width * p.k.block_tokens);
	return span;
}

__device__ static struct kv_span row_sees(const struct kv_split_params &p, const struct segment &s,
					  int row)
{
	return query_sees(p, s, row / p.group);
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
	s.lo = (int)query_sees(p, s, 0).lo;
	s.hi = (int)query_sees(p, s, s.q_len - 1).hi;
	s.first = s.lo / S::tokens * S::tokens;
	s.n = max((s.hi - s.first + S::tokens - 1) / S::tokens, 1);
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
 * How the list is cut. Either each entry into the same number of parts, per_entry, so that a part is
 * one segment; or (per_entry 0) all of it into n parts of @each tiles, the first @more of them one
 * larger.
 */
struct cut {
	int n;
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
 */
__device__ static struct cut cut_list(const struct kv_split_params &p, int total, int entries,
				      int longest)
{
	int most = gridDim.x, half = most / p.blocks;
	int fewest = longest / p.min_tiles;
	struct cut c = {};

	if (entries <= most && longest <= total / entries + total / entries / 8 &&
	    total / most < ALIGN) {
		c.per_entry = min(max(fewest, 1), most / entries);
		if (c.per_entry > MERGE)
			c.per_entry = max(min(fewest / 2, half / entries), MERGE);
		if (c.per_entry * entries > half &&
		    (c.per_entry * 3 > fewest || (half / entries == 1 && fewest <= 12)))
			c.per_entry = max(half / entries, 1);
		c.n = c.per_entry * entries;
		/* One or two for nearly each multiprocessor, or nothing to gain by more. */
		if (c.n >= most - most / 8 || (c.n <= half && c.n >= half - half / 8) ||
		    c.n * p.min_tiles * 2 > total || c.per_entry >= MERGE)
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
			tiles += s.n * n_entries(p, s);
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
	if (finder >> lane & 1) {
		for (; begin < end; begin++) {
			load_request<S>(p, begin, s);
			mine = s.n ? n_entries(p, s) * (c.per_entry ? 1 : s.n) : 0;
			if (key < at + mine)
				break;
			at += mine;
		}
	}
	begin = __shfl_sync(KV_ALL_LANES, begin, __ffs(finder) - 1);
	at = __shfl_sync(KV_ALL_LANES, at, __ffs(finder) - 1);
	load_request<S>(p, begin, s);
	s.later = false;
	if (c.per_entry) {
		int i = blockIdx.x % c.per_entry;

		s.entry = key - at;
		s.t0 = s.n * i / c.per_entry;
		s.t1 = s.n * (i + 1) / c.per_entry;
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

/* What a warp fetches next. */
struct cursor {
	struct segment s;
	int tile;  /* next tile of the segment; beyond t1: all is fetched */
	int n_ids; /* ids that are still in lanes */
	int id;	   /* lane i: block of run i since the last load */
};

template <typename S>
__device__ static void cursor_skip_empty(const struct kv_split_params &p, struct cursor &c, int sub)
{
	while (c.tile >= c.s.t1 && c.s.left) {
		next_segment<S>(p, c.s);
		c.tile = c.s.t0 + sub;
		c.n_ids = 0;
	}
}

/* K and V of the cursor's tile into a stage at @to; the cursor goes on. */
template <typename S>
__device__ static void fetch(const struct kv_split_params &p, struct cursor &c, int sub, int per_head,
			     int head_in_set, uint32_t to, uint64_t policy)
{
	constexpr int copies = RUN * S::units / KV_WARP; /* a lane's, of a run */
	int lane = threadIdx.x % KV_WARP;
	int token = c.s.first + c.tile * S::tokens;
	int head = (c.s.entry / c.s.chunks * p.heads + head_in_set) * S::h;

	if (c.tile >= c.s.t1)
		return;
	if (!c.n_ids) { /* of the next 32 / runs tiles */
		int j = token + lane / S::runs * per_head * S::tokens + lane % S::runs * RUN;

		c.id = j < c.s.hi ? p.block_table[(int64_t)c.s.b * p.table_width + j / p.k.block_tokens]
				  : 0;
		c.n_ids = KV_WARP;
	}
#pragma unroll
	for (int r = 0; r < S::runs; r++) {
		int id = __shfl_sync(KV_ALL_LANES, c.id, KV_WARP - c.n_ids + r);
		int j = token + r * RUN;
		int in_block = p.block_mask >= 0 ? j & p.block_mask : j % p.k.block_tokens;
		const char *k = (const char *)p.k.base + kv_view_offset(&p.k, id, in_block, head);
		const char *v = (const char *)p.v.base + kv_view_offset(&p.v, id, in_block, head);
		bool whole = j >= c.s.lo && j + RUN <= c.s.hi;

#pragma unroll
		for (int i = 0; i < copies; i++) {
			int unit = i * KV_WARP + lane;
			int row = unit / S::units, u = unit % S::units;
			uint32_t at = to + (r * RUN + row) * S::row + (u ^ S::turn(row)) * 16;
			int h = u / S::head_units;
			const char *from_k = k + row * (int)p.k.token_stride + h * p.k.head_stride +
					     u % S::head_units * 16;
			const char *from_v = v + row * (int)p.v.token_stride + h * p.v.head_stride +
					     u % S::head_units * 16;

			if (whole) {
				kv_copy16(at, from_k, policy);
				kv_copy16(at + S::tile, from_v, policy);
			} else {
				int n = j + row >= c.s.lo && j + row < c.s.hi ? 16 : 0;

				kv_copy16(at, from_k, n, policy);
				kv_copy16(at + S::tile, from_v, n, policy);
			}
		}
	}
	c.n_ids -= S::runs;
	c.tile += per_head;
	cursor_skip_empty<S>(p, c, sub);
}

/* A warp's queries and sums. Column j of a tile: its query row 2 t + j, lane = 4 g + t. */
template <typename S> struct state {
	uint32_t q[S::columns][S::dim / 16][2]; /* B operands */
	float unit[S::columns][2];		/* e4m3: what 1 in q stands for */
	float m[S::columns][2];
	float l[S::columns][2];		     /* of this lane's keys */
	float o[S::columns][S::dim / 16][4]; /* C operands, O^T */
};

/*
 * q of a segment. For e4m3 k-index 2t, 2t + 1, 2t + 8, 2t + 9 of an instruction is element 4t.. of
 * 16, as ldmatrix brings K. There a row of bf16 is scaled by a power of 2 so that its largest element
 * lies near 2^8: f16 then holds its values but for those 2^-22 times as large.
 */
template <typename S>
__device__ static void load_q(const struct kv_split_params &p, const struct segment &s, int head,
			      struct state<S> &x)
{
	int g = threadIdx.x % KV_WARP / 4, t = threadIdx.x % 4;

#pragma unroll
	for (int n = 0; n < S::columns; n++) {
		int row = (s.entry % s.chunks * S::n + n % S::n) * KV_SPLIT_ROWS + g;
		bool real = row < s.q_len * p.group;
		int64_t at = (int64_t)(s.start + row / p.group) * p.n_heads_q +
			     (head + n / S::n) * p.group + row % p.group;
		const uint16_t *q = (const uint16_t *)p.q + (real ? at : 0) * S::dim;

		x.unit[n][0] = x.unit[n][1] = 1;
#pragma unroll
		for (int k = 0; k < S::dim / 16; k++) {
			if (S::type == KV_F8_E4M3) {
				uint2 u = *(const uint2 *)(q + 16 * k + 4 * t);

				x.q[n][k][0] = real ? u.x : 0;
				x.q[n][k][1] = real ? u.y : 0;
			} else {
				x.q[n][k][0] = real ? *(const uint32_t *)(q + 16 * k + 2 * t) : 0;
				x.q[n][k][1] = real ? *(const uint32_t *)(q + 16 * k + 2 * t + 8) : 0;
			}
		}
		if (S::type == KV_F8_E4M3 && p.dtype == KV_BF16) {
			__nv_bfloat162 most = __floats2bfloat162_rn(0, 0);
			float factor;
			int power;

#pragma unroll
			for (int k = 0; k < S::dim / 8; k++)
				most = __hmax2(most, __habs2(*(__nv_bfloat162 *)&x.q[n][k / 2][k % 2]));
			factor = fmaxf(__low2float(most), __high2float(most));
			factor = fmaxf(factor, __shfl_xor_sync(KV_ALL_LANES, factor, 1));
			factor = fmaxf(factor, __shfl_xor_sync(KV_ALL_LANES, factor, 2));
			power = min(max((int)(__float_as_uint(factor) >> 23) - 127 - 8, -118), 118);
			factor = __uint_as_float((uint32_t)(127 - power) << 23);
#pragma unroll
			for (int k = 0; k < S::dim / 8; k++) {
				uint32_t u = x.q[n][k / 2][k % 2];

				x.q[n][k / 2][k % 2] =
					kv_pack<KV_F16>(__uint_as_float(u << 16) * factor,
							__uint_as_float(u & 0xffff0000) * factor);
			}
			factor = __uint_as_float((uint32_t)(127 + power) << 23);
			x.unit[n][0] = __shfl_sync(KV_ALL_LANES, factor, 8 * t);
			x.unit[n][1] = __shfl_sync(KV_ALL_LANES, factor, 8 * t + 4);
		}
	}
}

template <typename S> __device__ static void clear(struct state<S> &x)
{
#pragma unroll
	for (int n = 0; n < S::columns; n++) {
		x.m[n][0] = x.m[n][1] = NONE;
		x.l[n][0] = x.l[n][1] = 0;
#pragma unroll
		for (int d = 0; d < S::dim / 16; d++)
			x.o[n][d][0] = x.o[n][d][1] = x.o[n][d][2] = x.o[n][d][3] = 0;
	}
}

/* score[r][n] = S^T of run r and tile n, K in the stage at @k */
template <typename S>
__device__ static void scores(const struct state<S> &x, uint32_t k,
			      float (&score)[S::runs][S::columns][4])
{
	int lane = threadIdx.x % KV_WARP;

#pragma unroll
	for (int r = 0; r < S::runs; r++) {
		uint32_t row = k + (r * RUN + lane % 16) * S::row;

#pragma unroll
		for (int n = 0; n < S::columns; n++)
			score[r][n][0] = score[r][n][1] = score[r][n][2] = score[r][n][3] = 0;
		/* e goes around the heads so that sums of one do not wait for themselves */
#pragma unroll
		for (int e = 0; e < S::units; e += 2) {
			int h = e / 2 % S::h, u = e / 2 / S::h * 2;
			uint32_t a[4];

			kv_ldmatrix(a, row + ((h * S::head_units + u + lane / 16) ^
					      S::turn(lane % 16)) * 16);
			if (S::type == KV_F8_E4M3) {
				uint32_t low[4], high[4];

				kv_e4m3x4_to_f16(a[0], low[0], low[2]);
				kv_e4m3x4_to_f16(a[1], low[1], low[3]);
				kv_e4m3x4_to_f16(a[2], high[0], high[2]);
				kv_e4m3x4_to_f16(a[3], high[1], high[3]);
#pragma unroll
				for (int n = h * S::n; n < (h + 1) * S::n; n++) {
					kv_mma<KV_F16>(score[r][n], low, x.q[n][u]);
					kv_mma<KV_F16>(score[r][n], high, x.q[n][u + 1]);
				}
			} else {
				/* matrices (keys 0-7, 8-15) x (unit u, u + 1) are a0 to a3 */
#pragma unroll
				for (int n = h * S::n; n < (h + 1) * S::n; n++)
					kv_mma<S::type>(score[r][n], a, x.q[n][u / 2]);
			}
		}
	}
}

/* Keys that a row does not see get the score that weighs nothing. @token: first of the tile */
template <typename S>
__device__ static void mask(const struct kv_split_params &p, const struct segment &s, int token,
			    float (&score)[S::runs][S::columns][4])
{
	int g = threadIdx.x % KV_WARP / 4, t = threadIdx.x % 4;
	float nothing = p.outer < 0 ? INFINITY : -INFINITY;

#pragma unroll
	for (int n = 0; n < S::columns; n++) {
#pragma unroll
		for (int j = 0; j < 2; j++) {
			int row = (s.entry % s.chunks * S::n + n % S::n) * KV_SPLIT_ROWS + 2 * t + j;
			struct kv_span span = row_sees(p, s, row);

#pragma unroll
			for (int r = 0; r < S::runs; r++) {
				int key = token + r * RUN + g;

				if (key < span.lo || key >= span.hi)
					score[r][n][j] = nothing;
				if (key + 8 < span.lo || key + 8 >= span.hi)
					score[r][n][2 + j] = nothing;
			}
		}
	}
}

/* Scores to weights; sums come to a new maximum if a weight would pass 2^SLACK. */
template <typename S>
__device__ static void soften(const struct kv_split_params &p, struct state<S> &x,
			      float (&score)[S::runs][S::columns][4])
{
	float most = 0;

#pragma unroll
	for (int r = 0; r < S::runs; r++)
#pragma unroll
		for (int n = 0; n < S::columns; n++)
#pragma unroll
			for (int i = 0; i < 4; i++)
				most = fmaxf(most, fmaf(score[r][n][i], p.outer, -x.m[n][i & 1]));

	if (__any_sync(KV_ALL_LANES, most > SLACK)) {
#pragma unroll
		for (int n = 0; n < S::columns; n++) {
#pragma unroll
			for (int j = 0; j < 2; j++) {
				float m = x.m[n][j], factor;

#pragma unroll
				for (int r = 0; r < S::runs; r++)
					m = fmaxf(m, fmaxf(score[r][n][j] * p.outer,
							   score[r][n][j + 2] * p.outer));
				m = fmaxf(m, __shfl_xor_sync(KV_ALL_LANES, m, 4));
				m = fmaxf(m, __shfl_xor_sync(KV_ALL_LANES, m, 8));
				m = fmaxf(m, __shfl_xor_sync(KV_ALL_LANES, m, 16));
				factor = kv_exp2(x.m[n][j] - m);
				x.m[n][j] = m;
				x.l[n][j] *= factor;
#pragma unroll
				for (int d = 0; d < S::dim / 16; d++) {
					x.o[n][d][j] *= factor;
					x.o[n][d][j + 2] *= factor;
				}
			}
		}
	}
#pragma unroll
	for (int r = 0; r < S::runs; r++)
#pragma unroll
		for (int n = 0; n < S::columns; n++)
#pragma unroll
			for (int i = 0; i < 4; i++) {
				score[r][n][i] =
					kv_exp2(fmaf(score[r][n][i], p.outer, -x.m[n][i & 1]));
				x.l[n][i & 1] += score[r][n][i];
			}
}

/* O^T += V^T P^T, V in the stage at @v */
template <typename S>
__device__ static void weigh(struct state<S> &x, uint32_t v,
			     const float (&weight)[S::runs][S::columns][4])
{
	constexpr int type = S::type == KV_BF16 ? KV_BF16 : KV_F16;
	int lane = threadIdx.x % KV_WARP;

#pragma unroll
	for (int r = 0; r < S::runs; r++) {
		uint32_t w[S::columns][2];

#pragma unroll
		for (int n = 0; n < S::columns; n++) {
			w[n][0] = kv_transpose(kv_pack<type>(weight[r][n][0], weight[r][n][1]));
			w[n][1] = kv_transpose(kv_pack<type>(weight[r][n][2], weight[r][n][3]));
		}
		if (S::type == KV_F8_E4M3) {
			uint32_t row = v + (r * RUN + lane % 16) * S::row;

#pragma unroll
			for (int e = 0; e < S::units; e += 2) {
				int h = e / S::head_units, u = e % S::head_units;
				uint32_t c[4], a[4], b[4];

				/*
				 * 16 bits of a transposed matrix are elements 2g, 2g + 1 of a key:
				 * bytes 0, 2 belong to one row of V^T, 1, 3 to the next.
				 */
				kv_ldmatrix_trans(c, row + ((e + lane / 16) ^ S::turn(lane % 16)) * 16);
#pragma unroll
				for (int i = 0; i < 4; i++)
					c[i] = __byte_perm(c[i], 0, 0x3120);
				kv_e4m3x4_to_f16(c[0], a[0], a[1]);
				kv_e4m3x4_to_f16(c[1], a[2], a[3]);
				kv_e4m3x4_to_f16(c[2], b[0], b[1]);
				kv_e4m3x4_to_f16(c[3], b[2], b[3]);
#pragma unroll
				for (int n = h * S::n; n < (h + 1) * S::n; n++) {
					kv_mma<KV_F16>(x.o[n][u], a, w[n]);
					kv_mma<KV_F16>(x.o[n][u + 1], b, w[n]);
				}
			}
		} else {
			int key = lane % 8 + lane / 16 * 8;
			uint32_t row = v + (r * RUN + key) * S::row;

#pragma unroll
			for (int e = 0; e < S::units; e += 2) {
				int h = e / S::head_units, d = e % S::head_units / 2;
				uint32_t a[4];

				kv_ldmatrix_trans(a, row + ((e + lane / 8 % 2) ^ S::turn(key)) * 16);
#pragma unroll
				for (int n = h * S::n; n < (h + 1) * S::n; n++)
					kv_mma<type>(x.o[n][d], a, w[n]);
			}
		}
	}
}

template <typename S>
__device__ static void attend_tile(const struct kv_split_params &p, const struct segment &s,
				   int token, uint32_t stage, struct state<S> &x)
{
	int chunk = s.entry % s.chunks * S::n * KV_SPLIT_ROWS;
	int last = min(chunk + S::n * KV_SPLIT_ROWS, s.q_len * p.group) - 1;
	float score[S::runs][S::columns][4];

	scores<S>(x, stage, score);
	if (S::type == KV_F8_E4M3)
#pragma unroll
		for (int r = 0; r < S::runs; r++)
#pragma unroll
			for (int n = 0; n < S::columns; n++)
#pragma unroll
				for (int i = 0; i < 4; i++)
					score[r][n][i] *= x.unit[n][i & 1];
	if (p.capped) /* tanh y = 1 - 2 / (1 + e^2y) */
#pragma unroll
		for (int r = 0; r < S::runs; r++)
#pragma unroll
			for (int n = 0; n < S::columns; n++)
#pragma unroll
				for (int i = 0; i < 4; i++)
					score[r][n][i] =
						1 - __fdividef(2, 1 + kv_exp2(score[r][n][i] *
									      p.inner));
	/* Rows of a chunk ascend, and so do the ends of what they see. */
	if (token < s.lo || token + S::tokens > s.hi ||
	    (s.q_len > 1 && (token < row_sees(p, s, last).lo ||
			     token + S::tokens > row_sees(p, s, chunk).hi)))
		mask<S>(p, s, token, score);
	soften<S>(p, x, score);
	weigh<S>(x, stage + S::tile, score);
}

/* Sums of some of a row's keys, at 4 elements. */
struct sums {
	float m;
	float l;
	float4 o;
};

/* a += N others; those past the end have m NONE and l 0 */
template <int N>
__device__ static void add(struct sums &a, const float2 (&ml)[N], const float4 (&o)[N])
{
	float m = a.m, f;

#pragma unroll
	for (int i = 0; i < N; i++)
		m = fmaxf(m, ml[i].x);
	f = kv_exp2(a.m - m);
	a.m = m;
	a.l *= f;
	a.o.x *= f;
	a.o.y *= f;
	a.o.z *= f;
	a.o.w *= f;
#pragma unroll
	for (int i = 0; i < N; i++) {
		f = kv_exp2(ml[i].x - m);
		a.l = fmaf(f, ml[i].y, a.l);
		a.o.x = fmaf(f, o[i].x, a.o.x);
		a.o.y = fmaf(f, o[i].y, a.o.y);
		a.o.z = fmaf(f, o[i].z, a.o.z);
		a.o.w = fmaf(f, o[i].w, a.o.w);
	}
}

/* Elements d to d + 3 of a row's result; @row: of the request and head */
template <typename S>
__device__ static void store_result(const struct kv_split_params &p, const struct segment &s,
				    int head, int row, int d, const struct sums &x)
{
	float factor = x.l == 0 ? 0 : p.v.scale / x.l;
	int64_t at = (int64_t)(s.start + row / p.group) * p.n_heads_q + head * p.group +
		     row % p.group;
	uint2 u;

	if (p.dtype == KV_BF16)
		u = make_uint2(kv_pack<KV_BF16>(x.o.x * factor, x.o.y * factor),
			       kv_pack<KV_BF16>(x.o.z * factor, x.o.w * factor));
	else
		u = make_uint2(kv_pack<KV_F16>(x.o.x * factor, x.o.y * factor),
			       kv_pack<KV_F16>(x.o.z * factor, x.o.w * factor));
	*(uint2 *)((uint16_t *)p.out + at * S::dim + d) = u;
	if (p.lse && d == 0) /* m + log2 l in units of ln 2 */
		p.lse[at] = x.l == 0 ? -INFINITY : (x.m + log2f(x.l)) * 0.693147180559945f;
}

/* A slot of the workspace: [heads][rows][D] sums, then m and l: [level][heads][rows][2]. */
template <typename S> __device__ static float *slot_of(const struct kv_split_params &p, int slot)
{
	constexpr int rows = S::n * KV_SPLIT_ROWS;

	return p.sums + (int64_t)slot * p.heads * S::h * rows * (S::dim + 4);
}

/*
 * Sums of parts 0, step, 2 step, ... below @n of an entry, in that order, to the result, or to the
 * slot of the first of them. Part 0 is in slot @slot0, part i in 2 (part + i).
 */
template <typename S>
__device__ static void merge(const struct kv_split_params &p, const struct segment &s, int part,
			     int slot0, int n, int step, bool last)
{
	constexpr int rows = S::n * KV_SPLIT_ROWS, quads = S::dim / 4;
	constexpr int side = S::threads == 128 ? 2 : 1; /* results of a thread side by side */
	int n_heads = p.heads * S::h, count = n_heads * rows * quads;
	int head0 = s.entry / s.chunks * n_heads, row0 = s.entry % s.chunks * rows;
	int n_rows = min(rows, s.q_len * p.group - row0);

	for (int i0 = threadIdx.x; i0 < count; i0 += side * S::threads) {
		struct sums x[side];

#pragma unroll
		for (int e = 0; e < side; e++)
			x[e] = {NONE, 0, make_float4(0, 0, 0, 0)};
		for (int j0 = 0; j0 < n; j0 += LOADS * step) {
			float4 o[side][LOADS];
			float2 ml[side][LOADS];

#pragma unroll
			for (int e = 0; e < side; e++) {
				int i = i0 + e * S::threads, at = i / quads;
				bool real = i < count && at % rows < n_rows;

#pragma unroll
				for (int j = 0; j < LOADS; j++) {
					int k = j0 + j * step;
					const float *slot =
						slot_of<S>(p, k ? 2 * (part + k) : slot0);

					ml[e][j] = make_float2(NONE, 0);
					o[e][j] = make_float4(0, 0, 0, 0);
					if (!real || k >= n)
						continue;
					o[e][j] = __ldcg((const float4 *)slot + i);
					ml[e][j] = __ldcg(
						(const float2 *)(slot + n_heads * rows * S::dim) +
						(step > 1) * n_heads * rows + at);
				}
			}
#pragma unroll
			for (int e = 0; e < side; e++)
				add(x[e], ml[e], o[e]);
		}
#pragma unroll
		for (int e = 0; e < side; e++) {
			int i = i0 + e * S::threads, at = i / quads, d = i % quads * 4;
			float *slot = slot_of<S>(p, slot0);

			if (i >= count || at % rows >= n_rows)
				continue;
			if (last) {
				store_result<S>(p, s, head0 + at / rows, row0 + at % rows, d, x[e]);
				continue;
			}
			*((float4 *)slot + i) = x[e].o;
			if (d == 0)
				*((float2 *)(slot + n_heads * rows * S::dim) + n_heads * rows + at) =
					make_float2(x[e].m, x[e].l);
		}
	}
}

/* Adds this thread block to @counter; true for the last of @n, which also sets it back to 0. */
__device__ static bool arrive(uint32_t *counter, int n)
{
	__shared__ bool is_last;

	__syncthreads(); /* all of this thread block's sums are stored */
	if (threadIdx.x == 0) {
		uint32_t before;

		/* Pairs with that of the other thread blocks: the last sees the sums of all. */
		asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
			     : "=r"(before)
			     : "l"(counter)
			     : "memory");
		is_last = before == (uint32_t)n - 1;
		if (is_last)
			*counter = 0;
	}
	__syncthreads();
	return is_last;
}

/* This thread block's sums of an entry that others share are stored: merge if it is the last. */
template <typename S>
__device__ static void share(const struct kv_split_params &p, const struct cut &c,
			     const struct segment &s)
{
	int part, n, slot0;

	if (c.per_entry) {
		part = blockIdx.x / c.per_entry * c.per_entry;
		n = c.per_entry;
		slot0 = 2 * part;
	} else {
		int entry = s.at - s.t0;

		part = part_of(c, entry);
		n = part_of(c, entry + s.n - 1) - part + 1;
		slot0 = 2 * part + (part_start(c, part) != entry);
	}

	int mine = (int)blockIdx.x - part, first = mine / MERGE * MERGE;

	if (n > MERGE) {
		/* The last group may start where another entry does: it has its own counters. */
		if (!arrive(p.counters + (first ? 2 * gridDim.x : 0) + part + first,
			    min(n - first, MERGE)))
			return;
		merge<S>(p, s, part + first, first ? 2 * (part + first) : slot0,
			 min(n - first, MERGE), 1, false);
		if (arrive(p.counters + gridDim.x + part, (n + MERGE - 1) / MERGE))
			merge<S>(p, s, part, slot0, n, MERGE, true);
		return;
	}
	if (arrive(p.counters + part, n))
		merge<S>(p, s, part, slot0, n, 1, true);
}

/* Sums of the warps of a head together: to the result, or to the workspace. */
template <typename S>
__device__ static void finish(const struct kv_split_params &p, const struct cut &c,
			      const struct segment &s, float *scratch, struct state<S> &x)
{
	constexpr int rows = S::n * KV_SPLIT_ROWS, quads = S::dim / 4;
	int g = threadIdx.x % KV_WARP / 4, t = threadIdx.x % 4, warp = threadIdx.x / KV_WARP;
	int per_head = S::warps / p.heads;
	int row0 = s.entry % s.chunks * rows;
	bool whole = s.t1 - s.t0 == s.n;
	float *mine = scratch + warp * S::sums;
	float *totals = scratch + S::warps * S::sums; /* [warp][row] m, l */

#pragma unroll
	for (int n = 0; n < S::columns; n++) {
		__syncthreads();
#pragma unroll
		for (int j = 0; j < 2; j++) {
			float l = x.l[n][j];

			l += __shfl_xor_sync(KV_ALL_LANES, l, 4);
			l += __shfl_xor_sync(KV_ALL_LANES, l, 8);
			l += __shfl_xor_sync(KV_ALL_LANES, l, 16);
			if (g == 0)
				*(float2 *)(totals + (warp * KV_SPLIT_ROWS + 2 * t + j) * 2) =
					make_float2(x.m[n][j], l);
#pragma unroll
			for (int d = 0; d < S::dim / 16; d++) {
				/* element e of row r lies at e ^ 8 (r / 2): lanes meet no bank twice */
				float *to = mine + (2 * t + j) * S::dim;

				if (S::type == KV_F8_E4M3) {
					*(float2 *)(to + ((d * 16 + 2 * g) ^ 8 * t)) =
						make_float2(x.o[n][d][j], x.o[n][d][j + 2]);
				} else {
					to[(d * 16 + g) ^ 8 * t] = x.o[n][d][j];
					to[(d * 16 + g + 8) ^ 8 * t] = x.o[n][d][j + 2];
				}
			}
		}
		__syncthreads();
		for (int i = threadIdx.x; i < p.heads * KV_SPLIT_ROWS * quads; i += S::threads) {
			int d = i % quads * 4, r = i / quads % KV_SPLIT_ROWS;
			int set = i / quads / KV_SPLIT_ROWS, head = set * S::h + n / S::n;
			int row = n % S::n * KV_SPLIT_ROWS + r;
			struct sums y = {NONE, 0, make_float4(0, 0, 0, 0)};
			float2 ml[S::warps];
			float4 o[S::warps];

			if (row0 + row >= s.q_len * p.group)
				continue;
#pragma unroll
			for (int k = 0; k < S::warps; k++) {
				int w = set * per_head + k;

				ml[k] = make_float2(NONE, 0);
				o[k] = make_float4(0, 0, 0, 0);
				if (k >= per_head)
					continue;
				ml[k] = *(float2 *)(totals + (w * KV_SPLIT_ROWS + r) * 2);
				o[k] = *(float4 *)(scratch + w * S::sums + r * S::dim +
						   (d ^ 8 * (r / 2)));
			}
			add(y, ml, o);
			if (whole) {
				store_result<S>(p, s, s.entry / s.chunks * p.heads * S::h + head,
						row0 + row, d, y);
				continue;
			}

			int at = head * rows + row;
			float *slot = slot_of<S>(p, 2 * blockIdx.x + s.later);

			*(float4 *)(slot + at * S::dim + d) = y.o;
			if (d == 0)
				*(float2 *)(slot + p.heads * S::h * rows * S::dim + at * 2) =
					make_float2(y.m, y.l);
		}
	}
	if (!whole)
		share<S>(p, c, s);
}

template <typename S>
__global__ void __launch_bounds__(S::threads, S::blocks) attend_split(struct kv_split_params p)
{
	extern __shared__ __align__(128) char shared[];
	int warp = threadIdx.x / KV_WARP;
	int per_head = S::warps / p.heads, head_in_set = warp / per_head, sub = warp % per_head;
	uint32_t ring = (uint32_t)__cvta_generic_to_shared(shared) + warp * S::ring;
	float *scratch = (float *)(shared + S::warps * S::ring);
	uint64_t policy = kv_policy_once();
	struct cursor fetched;
	struct segment s;
	struct state<S> x;
	struct cut c;
	int stage = 0;

	if (!plan<S>(p, c, s))
		return;
	fetched.s = s;
	fetched.tile = s.t0 + sub;
	fetched.n_ids = 0;
	cursor_skip_empty<S>(p, fetched, sub);
#pragma unroll
	for (int i = 0; i < S::stages - 1; i++) {
		fetch<S>(p, fetched, sub, per_head, head_in_set, ring + i * 2 * S::tile, policy);
		kv_copy_commit();
	}
	for (;;) {
		load_q<S>(p, s, (s.entry / s.chunks * p.heads + head_in_set) * S::h, x);
		clear<S>(x);
		for (int tile = s.t0 + sub; tile < s.t1; tile += per_head) {
			int free = stage ? stage - 1 : S::stages - 1;

			kv_copy_wait<S::stages - 2>();
			__syncwarp(); /* the stage has arrived for all lanes, all are done with the last */
			fetch<S>(p, fetched, sub, per_head, head_in_set, ring + free * 2 * S::tile,
				 policy);
			kv_copy_commit();
			attend_tile<S>(p, s, s.first + tile * S::tokens, ring + stage * 2 * S::tile,
				       x);
			stage = stage + 1 < S::stages ? stage + 1 : 0;
		}
		finish<S>(p, c, s, scratch, x);
		if (!s.left)
			break;
		next_segment<S>(p, s);
	}
}

template <int TYPE, int D, int N, int H>
static int launch_split(const struct kv_split_params *params, int n_parts, void *stream)
{
	typedef struct shape<TYPE, D, N, H> S;

	return kv_launch("attention", attend_split<S>, dim3((unsigned)n_parts), S::threads,
			 S::shared, stream, *params);
}

/* The kernel for rows of D elements; attention_split.cu chooses among those there are. */
template <int TYPE, int D>
static int launch_dim(const struct kv_split_params *params, int n_row_tiles, int n_heads,
		      int n_parts, void *stream)
{
	constexpr int wide = 256 / D / (TYPE == KV_F8_E4M3 ? 1 : 2); /* heads in 256 bytes */

	if constexpr (wide > 1)
		if (n_row_tiles == 1 && n_heads == wide)
			return launch_split<TYPE, D, 1, wide>(params, n_parts, stream);
	if constexpr (D == 64)
		if (n_row_tiles == 2 && n_heads == 2)
			return launch_split<TYPE, D, 2, 2>(params, n_parts, stream);
	if (n_row_tiles == 1)
		return launch_split<TYPE, D, 1, 1>(params, n_parts, stream);
	if (n_row_tiles == 2)
		return launch_split<TYPE, D, 2, 1>(params, n_parts, stream);
	return launch_split<TYPE, D, 4, 1>(params, n_parts, stream);
}
