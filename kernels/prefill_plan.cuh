/* SPDX-License-Identifier: Apache-2.0 */
/* attention_prefill.cuh: sizes of its kernels, and the order in which items are handed out. */
#ifndef KV_KERNELS_PREFILL_PLAN_CUH
#define KV_KERNELS_PREFILL_PLAN_CUH

#include <climits>

#include "kernels/attention_prefill.h"
#include "kernels/device/hopper.cuh"
#include "kernels/device/warp.cuh"
#include "kernels/view.h"

#define CLASSES 16 /* of items by their length: the longest go first */
#define SLOTS	2  /* items that thread blocks know of at a time */

/*
 * Sizes of a kernel: TYPE of the cache, D columns of q, k and v (what they have less is 0), GROUPS
 * warpgroups of 64 rows.
 */
template <int TYPE, int D, int GROUPS, bool CAPPED> struct prefill_shape {
	static constexpr int type = TYPE, dim = D, groups = GROUPS;
	static constexpr bool capped = CAPPED;
	static constexpr bool turns = D <= 128; /* groups take turns to issue products */
	static constexpr bool wide = TYPE == KV_F8_E4M3; /* keys are widened to f16 on the way */
	static constexpr int math = TYPE == KV_BF16 ? KV_BF16 : KV_F16;
	static constexpr int rows = 64 * GROUPS;
	static constexpr int keys = D < 256 ? 128 : wide ? 64 : 80;
	static constexpr int stages = 2;
	static constexpr int q_stages = D < 256 && !wide ? 2 : 1;
	static constexpr int q_warps = wide ? 1 : 2; /* that bring q */
	static constexpr int raw_stages = D < 256 ? 2 : 1; /* e4m3 as it comes */
	static constexpr int chunks = D / 64; /* of 128 bytes of a row */
	static constexpr int side = wide ? 1 : chunks; /* boxes side by side */
	static constexpr int box_row = wide ? D : 128; /* bytes of a token in a box */
	static constexpr int tile = keys * D * 2;
	static constexpr int q_tile = rows * D * 2;
	static constexpr int raw_tile = wide ? keys * D : 0;
	static constexpr int threads = (1 + GROUPS) * KV_WARPGROUP;
	/*
	 * Registers of a thread that fetches, and of one that calculates: together no more than the
	 * threads of a block are started with, 64 K by threads, in eights.
	 */
	static constexpr int few = GROUPS == 3 ? 32 : wide ? 56 : 40;
	static constexpr int started = 65536 / threads / 8 * 8;
	static constexpr int many = ((1 + GROUPS) * started - few) / GROUPS / 8 * 8;
	static_assert(few + GROUPS * many <= (1 + GROUPS) * started, "or a group waits forever");
	/* Shared memory, from a multiple of 1024. */
	static constexpr int q_at = 0;
	static constexpr int k_at = q_at + q_stages * q_tile;
	static constexpr int v_at = k_at + stages * tile;
	static constexpr int raw_k_at = v_at + stages * tile;
	static constexpr int raw_v_at = raw_k_at + raw_stages * raw_tile;
	static constexpr int end = raw_v_at + raw_stages * raw_tile;
	static constexpr size_t shared = end + 1024;
};

/* A tile of rows (query tokens by query heads of a KV head, heads inner) and the keys they see. */
struct item {
	int b; /* request; negative: all is done */
	int head;
	int row0;  /* first row, of the request's for this KV head */
	int start; /* first token of the request in q */
	int q_len;
	int len;
	int bound; /* keys there are */
	int causal;
	int lo;	  /* keys that some row sees */
	int hi;
	int all_lo; /* keys that all rows see */
	int all_hi;
	int first; /* tiles of keys [first, last] are visited, from the last on */
	int last;
};

/* Barriers and small things. */
template <typename S> struct prefill_board {
	uint64_t item_full[SLOTS], item_empty[SLOTS];
	uint64_t q_full[S::q_stages], q_empty[S::q_stages];
	uint64_t k_full[S::stages], k_empty[S::stages];
	uint64_t v_full[S::stages], v_empty[S::stages];
	uint64_t landed; /* a tile of V that needs zeros */
	uint64_t raw_k_full[S::raw_stages], raw_k_empty[S::raw_stages];
	uint64_t raw_v_full[S::raw_stages], raw_v_empty[S::raw_stages];
	struct item items[SLOTS];
	float unit[S::rows]; /* e4m3: what 1 in a row of q stands for */
};

__device__ static inline uint32_t shared_of(const void *p)
{
	return (uint32_t)__cvta_generic_to_shared(p);
}

/* Place in a ring of N stages, and the parity of its turn. */
template <int N> struct ring {
	int at = 0;
	uint32_t turn = 0;

	__device__ void next()
	{
		if (++at == N) {
			at = 0;
			turn ^= 1;
		}
	}
};

/* Where this warp stands in the order of items: class after class, in it request after request. */
struct walk {
	int key;  /* of a class: keys that its items see at least, in steps */
	int step; /* keys */
	int b0;	  /* requests b0 to b0 + 31, one a lane */
	int at;	  /* items before these */
};

struct request {
	int start;
	int q_len;
	int len;
	int n; /* tiles of rows */
	int causal;
};

template <typename S>
__device__ static struct request load_request(const struct kv_prefill_params &p, int b)
{
	struct request r = {};
	int end;

	if (b >= p.n_seqs)
		return r;
	r.start = p.query_start_loc[b];
	end = min(p.query_start_loc[b + 1], p.n_tokens);
	r.len = max(p.seq_lens[b], 0);
	r.q_len = r.start < 0 ? 0 : max(end - r.start, 0);
	r.causal = p.seq_causal ? p.seq_causal[b] : p.causal;
	r.n = (r.q_len * p.group + S::rows - 1) / S::rows;
	return r;
}

/* The most keys that rows of a tile have to look at, by the window. */
template <typename S> __device__ static int most_keys(const struct kv_prefill_params &p)
{
	return p.window_left >= 0 && p.window_left < INT_MAX / 2
		       ? p.window_left + S::rows + S::keys
		       : INT_MAX;
}

/* The first of a request's tiles of rows that has more than @keys to look at. */
template <typename S>
__device__ static int first_above(const struct kv_prefill_params &p, const struct request &r,
				  int keys)
{
	int64_t token = (int64_t)keys - (r.len - r.q_len);

	if (keys >= most_keys<S>(p) || (r.causal ? token >= r.q_len : r.len <= keys))
		return r.n;
	return r.causal && token > 0 ? (int)(token * p.group / S::rows) : 0;
}

/* The start of the order; all lanes. */
template <typename S> __device__ static struct walk walk_start(const struct kv_prefill_params &p)
{
	int most = 0;

	for (int b = threadIdx.x % KV_WARP; b < p.n_seqs; b += KV_WARP) {
		struct request r = load_request<S>(p, b);

		if (r.n)
			most = max(most, min(r.len, most_keys<S>(p)));
	}
	most = __reduce_max_sync(KV_ALL_LANES, most);
	return {CLASSES - 1, max((most + CLASSES - 1) / CLASSES, 1), 0, 0};
}

/* The query token of a row. */
__device__ static inline int token_of(const struct kv_prefill_params &p, int row)
{
	return p.group == 1 ? row : (int)__umulhi((uint32_t)row, p.group_factor);
}

/* Item @ticket of the order, which ascends from call to call; all lanes, the same in each. */
template <typename S>
__device__ static struct item walk_to(const struct kv_prefill_params &p, struct walk &w, int ticket)
{
	int lane = threadIdx.x % KV_WARP;
	struct item it = {};

	for (; w.key >= 0; w.key--, w.b0 = 0) {
		for (; w.b0 < p.n_seqs; w.b0 += KV_WARP) {
			struct request r = load_request<S>(p, w.b0 + lane);
			int lo = w.key ? first_above<S>(p, r, w.key * w.step) : 0;
			int hi = w.key < CLASSES - 1 ? first_above<S>(p, r, (w.key + 1) * w.step)
						     : r.n;
			int mine = (hi - lo) * p.n_heads_kv, to = mine, total;
			uint32_t finder;

#pragma unroll
			for (int i = 1; i < KV_WARP; i *= 2) {
				int x = __shfl_up_sync(KV_ALL_LANES, to, i);

				to += lane >= i ? x : 0;
			}
			total = __shfl_sync(KV_ALL_LANES, to, KV_WARP - 1);
			if (ticket >= w.at + total) {
				w.at += total;
				continue;
			}
			finder = __ballot_sync(KV_ALL_LANES, ticket < w.at + to);

			/* In a request: the later rows first, KV heads inner. */
			int from = __ffs(finder) - 1;
			int i = ticket - w.at - (to - mine);
			int m = hi - 1 - i / p.n_heads_kv;
			struct kv_span a, b;

			it.b = w.b0 + from;
			it.head = __shfl_sync(KV_ALL_LANES, i % p.n_heads_kv, from);
			it.row0 = __shfl_sync(KV_ALL_LANES, m, from) * S::rows;
			it.start = __shfl_sync(KV_ALL_LANES, r.start, from);
			it.q_len = __shfl_sync(KV_ALL_LANES, r.q_len, from);
			it.len = __shfl_sync(KV_ALL_LANES, r.len, from);
			it.causal = __shfl_sync(KV_ALL_LANES, r.causal, from);
			a = kv_span_seen((int64_t)it.len - it.q_len + it.row0 / p.group, it.len,
					 it.causal, p.window_left);
			b = kv_span_seen((int64_t)it.len - it.q_len +
						 min((it.row0 + S::rows - 1) / p.group,
						     it.q_len - 1),
					 it.len, it.causal, p.window_left);
			it.lo = max((int)a.lo, p.key_begin);
			it.bound = (int)min((int64_t)min(it.len, p.key_end),
					    (int64_t)p.table_width * p.block_tokens);
			it.hi = min((int)b.hi, it.bound);
			it.all_lo = max((int)b.lo, p.key_begin);
			it.all_hi = min((int)a.hi, it.bound);
			it.first = it.lo / S::keys;
			it.last = it.hi > it.lo ? (it.hi - 1) / S::keys : it.first - 1;
			return it;
		}
	}
	it.b = -1;
	return it;
}

#endif
