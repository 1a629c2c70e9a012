/* SPDX-License-Identifier: Apache-2.0 */
/* attention_prefill.cuh: the first warpgroup brings q, K and V. */
#ifndef KV_KERNELS_PREFILL_FETCH_CUH
#define KV_KERNELS_PREFILL_FETCH_CUH

#include "kernels/device/mma.cuh"
#include "kernels/prefill_plan.cuh"

/* The next item of the board, for a warp of readers. */
template <typename S>
__device__ static struct item next_item(struct prefill_board<S> *board, struct ring<SLOTS> &slot)
{
	struct item it;

	kv_barrier_wait(shared_of(&board->item_full[slot.at]), slot.turn);
	it = board->items[slot.at];
	__syncwarp();
	if (threadIdx.x % KV_WARP == 0)
		kv_barrier_arrive(shared_of(&board->item_empty[slot.at]));
	slot.next();
	return it;
}

/*
 * Rows of q to shared memory, by S::q_warps warps of which this is @warp: those there are not are 0.
 * A lane has one unit of every so-manieth row; it divides once.
 */
template <typename S>
__device__ static void copy_q(const struct kv_prefill_params &p, const struct item &it, uint32_t to,
			      int warp)
{
	constexpr int units = S::dim / 8; /* of 16 bytes, of a row */
	constexpr int side = KV_WARP / units, step = S::q_warps * side;
	int lane = threadIdx.x % KV_WARP, u = lane % units, row = warp * side + lane / units;
	int i = token_of(p, it.row0 + row), h = it.row0 + row - i * p.group;
	const uint16_t *from = (const uint16_t *)p.q +
			       (it.start + i) * p.q_stride +
			       (int64_t)(it.head * p.group + h) * p.head_dim_k + u * 8;
	int64_t turn = p.q_stride - (int64_t)p.group * p.head_dim_k; /* on to the next token */
	bool real = u * 8 < p.head_dim_k;

	static_assert(KV_WARP % units == 0, "a lane has one unit of its rows");
	to += u / 8 * S::rows * 128;
#pragma unroll 4
	for (; row < S::rows; row += step) {
		int bytes = real && i < it.q_len ? 16 : 0;

		asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
				     to + row * 128 + (u % 8 ^ row % 8) * 16),
			     "l"(bytes ? from : p.q), "r"(bytes)
			     : "memory");
		from += step * p.head_dim_k;
		for (h += step; h >= p.group; h -= p.group) {
			i++;
			from += turn;
		}
	}
}

/* The block of the box of a tile that this lane asks for; -1: none. */
template <typename S>
__device__ static int box_id(const struct kv_prefill_params &p, const struct item &it, int tile)
{
	int lane = threadIdx.x % KV_WARP, token = lane / (p.whole ? 1 : S::side) * p.run;
	int j = tile * S::keys + token;

	if (token >= S::keys || tile < it.first || j >= it.bound || j + p.run <= it.lo)
		return -1;
	return p.block_table[(int64_t)it.b * p.table_width +
			     (p.block_shift >= 0 ? j >> p.block_shift : j / p.block_tokens)];
}

/* K or V of a tile to @to; its bytes count at @barrier, where this warp arrives once. */
template <typename S>
__device__ static void fetch_tile(const struct kv_prefill_params &p, const CUtensorMap *map,
				  const struct item &it, int tile, int id, uint32_t to,
				  uint32_t barrier)
{
	uint32_t asked = __ballot_sync(KV_ALL_LANES, id >= 0);
	int j = tile * S::keys;

	if (kv_elect())
		kv_barrier_expect(barrier, __popc(asked) * p.run * (p.whole ? S::dim * 2 : S::box_row));
	__syncwarp();
	if (!S::wide && p.whole) {
		for (int box = 0, token = 0; token < S::keys; token += p.run, box++) {
			int in_block = p.block_shift >= 0 ? (j + token) & (p.block_tokens - 1)
							  : (j + token) % p.block_tokens;
			int block = __shfl_sync(KV_ALL_LANES, id, box);

			if (asked >> box & 1 && kv_elect())
				kv_tma_load5(to + token * S::dim * 2, map, barrier, 0, 0,
					     it.head * p.head_columns,
					     it.head * p.head_rows + in_block / 8, block);
		}
		return;
	}
	for (int box = 0, token = 0; token < S::keys; token += p.run) {
		int in_block = p.block_shift >= 0 ? (j + token) & (p.block_tokens - 1)
						  : (j + token) % p.block_tokens;

#pragma unroll
		for (int chunk = 0; chunk < S::side; chunk++, box++) {
			int block = __shfl_sync(KV_ALL_LANES, id, box);

			if (asked >> box & 1 && kv_elect())
				kv_tma_load(to + (chunk * S::keys + token) * S::box_row, map,
					    barrier, chunk * 64, in_block, it.head, block);
		}
	}
}

/* Rows of a tile of V that no box brought, or that lie past the last key, become 0. */
template <typename S>
__device__ static void clear_rows(const struct kv_prefill_params &p, const struct item &it, int tile,
				  uint32_t v)
{
	int lo = it.lo / p.run * p.run - tile * S::keys;
	int hi = it.bound - tile * S::keys;

	for (int i = threadIdx.x % KV_WARP; i < S::keys * S::chunks * 8; i += KV_WARP) {
		int row = i / 8 % S::keys, chunk = i / 8 / S::keys;
		uint32_t at = v + row / 8 * p.group_bytes + chunk * p.chunk_bytes + row % 8 * 128 +
			      i % 8 * 16;

		if (row < lo || row >= hi)
			asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0)
				     : "memory");
	}
	kv_fence_async();
	__syncwarp();
}

template <typename S>
__device__ static bool needs_clearing(const struct item &it, int tile, int run)
{
	return (tile + 1) * S::keys > it.bound || tile * S::keys + run <= it.lo;
}

/* A warp's way through the tiles of K or V. */
template <typename S> struct stream {
	uint64_t *full, *empty; /* barriers of its stages */
	uint32_t at;		/* where they lie */
	struct ring<S::wide ? S::raw_stages : S::stages> stage;
	uint32_t landed;
};

template <typename S>
__device__ static struct stream<S> stream_of(struct prefill_board<S> *board, uint32_t shared, bool v)
{
	struct stream<S> x = {};

	if (S::wide)
		x = {v ? board->raw_v_full : board->raw_k_full,
		     v ? board->raw_v_empty : board->raw_k_empty,
		     shared + (v ? S::raw_v_at : S::raw_k_at)};
	else
		x = {v ? board->v_full : board->k_full, v ? board->v_empty : board->k_empty,
		     shared + (v ? S::v_at : S::k_at)};
	return x;
}

/* The next tile of K. */
template <typename S>
__device__ static void fetch_k(const struct kv_prefill_params &p, const struct item &it, int tile,
			       int id, struct stream<S> &x)
{
	constexpr int bytes = S::wide ? S::raw_tile : S::tile;

	kv_barrier_wait(shared_of(&x.empty[x.stage.at]), x.stage.turn ^ 1);
	fetch_tile<S>(p, &p.k_map, it, tile, id, x.at + x.stage.at * bytes,
		      shared_of(&x.full[x.stage.at]));
	x.stage.next();
}

/* The next tile of V, with zeros where they are needed: those of e4m3 come as it is widened. */
template <typename S>
__device__ static void fetch_v(const struct kv_prefill_params &p, struct prefill_board<S> *board,
			       const struct item &it, int tile, int id, struct stream<S> &x)
{
	constexpr int bytes = S::wide ? S::raw_tile : S::tile;
	bool odd = !S::wide && needs_clearing<S>(it, tile, p.run);
	uint32_t full = shared_of(&x.full[x.stage.at]), at = x.at + x.stage.at * bytes;
	uint32_t landed = shared_of(&board->landed);

	kv_barrier_wait(shared_of(&x.empty[x.stage.at]), x.stage.turn ^ 1);
	fetch_tile<S>(p, &p.v_map, it, tile, id, at, odd ? landed : full);
	if (odd) {
		kv_barrier_wait(landed, x.landed);
		x.landed ^= 1;
		clear_rows<S>(p, it, tile, at);
		if (threadIdx.x % KV_WARP == 0)
			kv_barrier_arrive(full);
	}
	x.stage.next();
}

/* Warp 0: hands out items, asks for K. An e4m3 cache: for V and q too. */
template <typename S>
__device__ static void fetch(const struct kv_prefill_params &p, uint32_t shared,
			     struct prefill_board<S> *board)
{
	int lane = threadIdx.x % KV_WARP, ticket = blockIdx.x;
	struct stream<S> k = stream_of<S>(board, shared, false);
	struct stream<S> v = stream_of<S>(board, shared, true);
	struct walk w = walk_start<S>(p);
	struct ring<S::q_stages> q;
	struct ring<SLOTS> slot;

	for (;;) {
		struct item it = walk_to<S>(p, w, ticket);
		int id, id_above = -1;

		kv_barrier_wait(shared_of(&board->item_empty[slot.at]), slot.turn ^ 1);
		if (lane == 0) {
			board->items[slot.at] = it;
			kv_barrier_arrive(shared_of(&board->item_full[slot.at]));
			if (it.b >= 0)
				ticket = gridDim.x + atomicAdd(&p.counters[0], 1);
		}
		__syncwarp();
		slot.next();
		if (it.b < 0)
			break;
		id = box_id<S>(p, it, it.last);
		for (int tile = it.last; tile >= it.first; tile--) {
			int id_below = box_id<S>(p, it, tile - 1); /* comes while this waits */

			fetch_k<S>(p, it, tile, id, k);
			if (S::wide && tile == it.last) {
				kv_barrier_wait(shared_of(&board->q_empty[q.at]), q.turn ^ 1);
				copy_q<S>(p, it, shared + S::q_at + q.at * S::q_tile, 0);
				kv_barrier_arrive_copies(shared_of(&board->q_full[q.at]));
				q.next();
			}
			if (S::wide && tile < it.last)
				fetch_v<S>(p, board, it, tile + 1, id_above, v);
			id_above = id;
			id = id_below;
		}
		if (S::wide && it.first <= it.last)
			fetch_v<S>(p, board, it, it.first, id_above, v);
		ticket = __shfl_sync(KV_ALL_LANES, ticket, 0);
	}
	/* The last thread block to come here leaves the counters as it found them. */
	if (lane == 0 && atomicAdd(&p.counters[1], 1) == gridDim.x - 1) {
		p.counters[0] = 0;
		p.counters[1] = 0;
	}
}

/* Warp 1: asks for V. */
template <typename S>
__device__ static void fetch_values(const struct kv_prefill_params &p, uint32_t shared,
				    struct prefill_board<S> *board)
{
	struct stream<S> v = stream_of<S>(board, shared, true);
	struct ring<SLOTS> slot;

	for (;;) {
		struct item it = next_item<S>(board, slot);
		int id;

		if (it.b < 0)
			return;
		id = box_id<S>(p, it, it.last);
		for (int tile = it.last; tile >= it.first; tile--) {
			int id_below = box_id<S>(p, it, tile - 1);

			fetch_v<S>(p, board, it, tile, id, v);
			id = id_below;
		}
	}
}

/* Warps 2 and 3: bring q of an item as soon as there is room. */
template <typename S>
__device__ static void fetch_q(const struct kv_prefill_params &p, uint32_t shared,
			       struct prefill_board<S> *board)
{
	struct ring<S::q_stages> q;
	struct ring<SLOTS> slot;

	for (;;) {
		struct item it = next_item<S>(board, slot);

		if (it.b < 0)
			return;
		if (it.last < it.first)
			continue;
		kv_barrier_wait(shared_of(&board->q_empty[q.at]), q.turn ^ 1);
		copy_q<S>(p, it, shared + S::q_at + q.at * S::q_tile, threadIdx.x / KV_WARP - 2);
		asm volatile("cp.async.wait_all;" ::: "memory");
		kv_fence_async();
		kv_barrier_arrive(shared_of(&board->q_full[q.at]));
		q.next();
	}
}

#define WIDENERS (3 * KV_WARP)

/* 16 codes to f16, for the three warps that do nothing else. Rows of V outside [lo, hi) become 0. */
template <typename S, bool V>
__device__ static void widen_tile(uint32_t from, uint32_t to, int lo, int hi)
{
	constexpr int pieces = S::dim / 16; /* of a row */

#pragma unroll 2
	for (int i = threadIdx.x - KV_WARP; i < S::keys * pieces; i += WIDENERS) {
		int row = i / pieces, c = i % pieces, odd = c / 4 % 2;
		uint32_t at = to + c / 4 * S::keys * 128 + row * 128;
		uint4 x, lower, upper;

		asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
			     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
			     : "r"(from + i * 16)
			     : "memory");
		if (V && (row < lo || row >= hi))
			x = make_uint4(0, 0, 0, 0);
		kv_e4m3x4_to_f16(x.x, lower.x, lower.y);
		kv_e4m3x4_to_f16(x.y, lower.z, lower.w);
		kv_e4m3x4_to_f16(x.z, upper.x, upper.y);
		kv_e4m3x4_to_f16(x.w, upper.z, upper.w);
		/* Lanes of every second chunk store the halves the other way round: no bank twice. */
#pragma unroll
		for (int half = 0; half < 2; half++) {
			bool second = half != odd;
			uint4 y = second ? upper : lower;
			int u = c % 4 * 2 + second;

			asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(
					     at + (u ^ row % 8) * 16),
				     "r"(y.x), "r"(y.y), "r"(y.z), "r"(y.w)
				     : "memory");
		}
	}
	kv_fence_async();
}

/* Warps 1 to 3, of an e4m3 cache: tiles as they came to tiles of f16. */
template <typename S>
__device__ static void widen(const struct kv_prefill_params &p, uint32_t shared,
			     struct prefill_board<S> *board)
{
	struct ring<S::raw_stages> raw_k, raw_v;
	struct ring<S::stages> k, v;
	struct ring<SLOTS> slot;

	for (;;) {
		struct item it = next_item<S>(board, slot);

		if (it.b < 0)
			return;
		for (int tile = it.last; tile >= it.first - 1; tile--) {
			if (tile >= it.first) {
				kv_barrier_wait(shared_of(&board->raw_k_full[raw_k.at]),
						raw_k.turn);
				kv_barrier_wait(shared_of(&board->k_empty[k.at]), k.turn ^ 1);
				widen_tile<S, false>(shared + S::raw_k_at + raw_k.at * S::raw_tile,
						     shared + S::k_at + k.at * S::tile, 0, 0);
				kv_barrier_arrive(shared_of(&board->k_full[k.at]));
				kv_barrier_arrive(shared_of(&board->raw_k_empty[raw_k.at]));
				raw_k.next();
				k.next();
			}
			if (tile < it.last) {
				int token = (tile + 1) * S::keys;

				kv_barrier_wait(shared_of(&board->raw_v_full[raw_v.at]),
						raw_v.turn);
				kv_barrier_wait(shared_of(&board->v_empty[v.at]), v.turn ^ 1);
				widen_tile<S, true>(
					shared + S::raw_v_at + raw_v.at * S::raw_tile,
					shared + S::v_at + v.at * S::tile,
					it.lo / p.run * p.run - token,
					it.bound - token);
				kv_barrier_arrive(shared_of(&board->v_full[v.at]));
				kv_barrier_arrive(shared_of(&board->raw_v_empty[raw_v.at]));
				raw_v.next();
				v.next();
			}
		}
	}
}

#endif
