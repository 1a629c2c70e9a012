/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention of one item on one thread, in vectors of f32.
 *
 * Online softmax over tiles of KV_SIMD_TILE keys. A tile of K is widened and transposed, so that
 * lanes are keys and a score is a sum over d in ascending order; a tile of V is widened, so that
 * lanes are elements of out and a sum runs over keys in ascending order. Both are done once for all
 * rows of the item; ROWS rows at a time share each vector that is loaded.
 *
 * EPYC (Zen 5), avx512, one core, 620 tokens, 9/3 heads of 64, f16: prefill 7.2 ms (31 G
 * multiply-adds/s), decode 44 us.
 *
 * A row's value depends on its query and its keys alone, to the bit:
 * - a tile starts at a multiple of KV_SIMD_TILE tokens, whatever the window or the chunk;
 * - each number is made by the same operations in the same order however many rows are worked on
 *   together (fused multiply-adds are written as such; the compiler may not make its own);
 * - a key that a row doesn't see is left out: nothing is multiplied by a weight of 0.
 */
#include "kernels/simd.h"
#include "kernels/simd_vec.h"
#include "kernels/sink.h"
#include "kernels/visible.h"

#define TILE KV_SIMD_TILE
#define ROWS 4 /* with 2 vectors each: 8 sums in flight hide the latency of the additions */

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Parts of a thread's scratch, in f32. dk, dv: head sizes rounded up to whole pairs of vectors. */
struct scratch {
	int dk;
	int dv;
	float *q;    /* [KV_SIMD_MAX_ROWS][dk] */
	float *out;  /* [KV_SIMD_MAX_ROWS][dv] sums so far, relative to m */
	float *m;    /* [KV_SIMD_MAX_ROWS] largest score so far */
	float *l;    /* [KV_SIMD_MAX_ROWS] sum of weights so far, relative to m */
	float *keys; /* [LANES][dk] before they are transposed */
	float *kt;   /* [dk][TILE] */
	float *v;    /* [TILE][dv] */
	float *x;    /* [ROWS][TILE] scores, then weights */
};

/* What an item's rows see: the rules, and each row's part of them. */
struct eyes {
	struct kv_visibility rules;
	struct kv_visible row[KV_SIMD_MAX_ROWS];
};

static int pad(int d)
{
	return (d + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
}

static size_t scratch_bytes(int head_dim_k, int head_dim_v)
{
	size_t dk = (size_t)pad(head_dim_k), dv = (size_t)pad(head_dim_v);

	return sizeof(float) *
	       (KV_SIMD_MAX_ROWS * (dk + dv + 2) + LANES * dk + TILE * (dk + dv + ROWS));
}

static struct scratch lay_out(const struct kv_attention_args *args, float *base)
{
	struct scratch s = {.dk = pad(args->k.head_dim), .dv = pad(args->v.head_dim)};

	s.q = base;
	s.out = s.q + KV_SIMD_MAX_ROWS * s.dk;
	s.m = s.out + KV_SIMD_MAX_ROWS * s.dv;
	s.l = s.m + KV_SIMD_MAX_ROWS;
	s.keys = s.l + KV_SIMD_MAX_ROWS;
	s.kt = s.keys + LANES * s.dk;
	s.v = s.kt + s.dk * TILE;
	s.x = s.v + TILE * s.dv;
	return s;
}

static void widen(float *to, const void *from, int dtype, int64_t n)
{
	const uint16_t *half = from;
	int64_t i = 0;

	switch (dtype) {
	case KV_F32:
		memcpy(to, from, (size_t)n * sizeof(float));
		return;
	case KV_F16:
		for (; i + LANES <= n; i += LANES)
			vf_store(to + i, vf_from_f16(half + i));
		break;
	case KV_BF16:
		for (; i + LANES <= n; i += LANES)
			vf_store(to + i, vf_from_bf16(half + i));
		break;
	case KV_F8_E5M2:
		for (; i + LANES <= n; i += LANES) {
			uint16_t wide[LANES]; /* e5m2 is the upper half of an f16 */

			for (int l = 0; l < LANES; l++)
				wide[l] = (uint16_t)(((const uint8_t *)from)[i + l] << 8);
			vf_store(to + i, vf_from_f16(wide));
		}
		break;
	default:
		for (; i < n; i++)
			to[i] = kv_e4m3_values[((const uint8_t *)from)[i]];
	}
	for (; i < n; i++)
		to[i] = kv_element_load(from, i, dtype);
}

static void narrow(void *to, int dtype, const float *from, int64_t n)
{
	uint16_t *half = to;
	int64_t i = 0;

	switch (dtype) {
	case KV_F32:
		memcpy(to, from, (size_t)n * sizeof(float));
		return;
	case KV_F16:
		for (; i + LANES <= n; i += LANES)
			vf_to_f16(half + i, vf_load(from + i));
		break;
	case KV_BF16:
		for (; i + LANES <= n; i += LANES)
			vf_to_bf16(half + i, vf_load(from + i));
		break;
	default:
		break;
	}
	for (; i < n; i++)
		kv_element_store(to, i, dtype, from[i]);
}

/* The row of @view that holds key @j of the item. */
static const void *key_row(const struct kv_attention_args *args, const struct kv_view *view,
			   const struct kv_simd_item *item, int64_t j)
{
	const kv_block_id *table = args->block_table + (int64_t)item->b * args->table_width;

	return kv_view_row(view, table[j / view->block_tokens], j % view->block_tokens,
			   item->kv_head);
}

/* to[:] *= the scale of key @j, where each has its own */
static void scale_row(const struct kv_attention_args *args, const struct kv_view *rows,
		      const struct kv_simd_item *item, int64_t j, float *to, int n)
{
	float scale;

	if (!rows->base)
		return;
	memcpy(&scale, key_row(args, rows, item, j), sizeof(scale));
	for (int d = 0; d < n; d++)
		to[d] *= scale;
}

/* kt[:][j] = K of key tile + j, for j in @bits. No row looks at other columns. */
static void stage_k(const struct kv_attention_args *args, const struct kv_simd_item *item,
		    const struct scratch *s, int64_t tile, uint32_t bits)
{
	for (int j = 0; j < TILE; j += LANES) {
		if (!(bits >> j & (uint32_t)((UINT64_C(1) << LANES) - 1)))
			continue;
		for (int i = 0; i < LANES; i++) {
			float *to = s->keys + i * s->dk;

			if (!(bits >> (j + i) & 1))
				continue;
			widen(to, key_row(args, &args->k, item, tile + j + i), args->k.dtype,
			      args->k.head_dim);
			scale_row(args, &args->k_row_scales, item, tile + j + i, to,
				  args->k.head_dim);
		}
		for (int d = 0; d < s->dk; d += LANES) {
			vf square[LANES];

			for (int i = 0; i < LANES; i++)
				square[i] = vf_load(s->keys + i * s->dk + d);
			vf_transpose(square);
			for (int i = 0; i < LANES; i++)
				vf_store(s->kt + (d + i) * TILE + j, square[i]);
		}
	}
}

/* v[j][:] = V of key tile + j, for j in @bits */
static void stage_v(const struct kv_attention_args *args, const struct kv_simd_item *item,
		    const struct scratch *s, int64_t tile, uint32_t bits)
{
	for (int j = 0; j < TILE; j++) {
		float *to = s->v + j * s->dv;

		if (!(bits >> j & 1))
			continue;
		widen(to, key_row(args, &args->v, item, tile + j), args->v.dtype, args->v.head_dim);
		scale_row(args, &args->v_row_scales, item, tile + j, to, args->v.head_dim);
	}
}

/* x[r][j] = sum over d of q[first + r][d] kt[d][j], for r < n */
ALWAYS_INLINE void score_n(const struct scratch *s, int first, int head_dim, const int n)
{
	const float *q = s->q + first * s->dk;

	for (int j = 0; j < TILE; j += 2 * LANES) {
		vf sum[ROWS][2] = {0};

		for (int d = 0; d < head_dim; d++) {
			vf k0 = vf_load(s->kt + d * TILE + j);
			vf k1 = vf_load(s->kt + d * TILE + j + LANES);

			for (int r = 0; r < n; r++) {
				vf qd = vf_all(q[r * s->dk + d]);

				sum[r][0] = vf_fma(qd, k0, sum[r][0]);
				sum[r][1] = vf_fma(qd, k1, sum[r][1]);
			}
		}
		for (int r = 0; r < n; r++) {
			vf_store(s->x + r * TILE + j, sum[r][0]);
			vf_store(s->x + r * TILE + j + LANES, sum[r][1]);
		}
	}
}

static void score(const struct scratch *s, int first, int head_dim, int n)
{
	switch (n) {
	case 1:
		score_n(s, first, head_dim, 1);
		break;
	case 2:
		score_n(s, first, head_dim, 2);
		break;
	case 3:
		score_n(s, first, head_dim, 3);
		break;
	default:
		score_n(s, first, head_dim, ROWS);
	}
}

/* out[row + r][:] += sum over j in @bits of x[i + r][j] v[j][:], for r < n */
ALWAYS_INLINE void weigh_n(const struct scratch *s, int row, int i, uint32_t bits, const int n)
{
	const float *x = s->x + i * TILE;
	int a = bits ? __builtin_ctz(bits) : 0, b = bits ? 32 - __builtin_clz(bits) : 0;

	for (int d = 0; d < s->dv; d += 2 * LANES) {
		float *out = s->out + row * s->dv + d;
		vf sum[ROWS][2];

		for (int r = 0; r < n; r++) {
			sum[r][0] = vf_load(out + r * s->dv);
			sum[r][1] = vf_load(out + r * s->dv + LANES);
		}
		for (int j = a; j < b; j++) {
			vf v0 = vf_load(s->v + j * s->dv + d);
			vf v1 = vf_load(s->v + j * s->dv + d + LANES);

			if (!(bits >> j & 1))
				continue;
			for (int r = 0; r < n; r++) {
				vf p = vf_all(x[r * TILE + j]);

				sum[r][0] = vf_fma(p, v0, sum[r][0]);
				sum[r][1] = vf_fma(p, v1, sum[r][1]);
			}
		}
		for (int r = 0; r < n; r++) {
			vf_store(out + r * s->dv, sum[r][0]);
			vf_store(out + r * s->dv + LANES, sum[r][1]);
		}
	}
}

static void weigh(const struct scratch *s, int row, int i, uint32_t bits, int n)
{
	switch (n) {
	case 1:
		weigh_n(s, row, i, bits, 1);
		break;
	case 2:
		weigh_n(s, row, i, bits, 2);
		break;
	case 3:
		weigh_n(s, row, i, bits, 3);
		break;
	default:
		weigh_n(s, row, i, bits, ROWS);
	}
}

/* What the scores of the item's K are multiplied by: of all keys, where they have one scale. */
static float k_scale(const struct kv_attention_args *args, const struct kv_simd_item *item)
{
	if (args->k_row_scales.base)
		return 1;
	return args->k_scales ? args->k_scales[item->kv_head] : args->k.scale;
}

static float v_scale(const struct kv_attention_args *args, const struct kv_simd_item *item)
{
	if (args->v_row_scales.base)
		return 1;
	return args->v_scales ? args->v_scales[item->kv_head] : args->v.scale;
}

/* The query head of the item's row @r. */
static int64_t head_of(const struct kv_attention_args *args, const struct kv_simd_item *item, int r)
{
	int64_t group = args->n_heads_q / args->k.n_heads;

	return item->kv_head * group + (item->first + r) % group;
}

/* x[j] += slope times how far key tile + j lies behind the query */
static void lean(const struct kv_attention_args *args, const struct kv_simd_item *item,
		 const struct eyes *eyes, int r, int64_t tile, float *x)
{
	float slope = args->alibi_slopes[head_of(args, item, r)];
	const struct kv_visible *row = &eyes->row[r];

	for (int j = 0; j < TILE; j++)
		if (tile + j < row->all.hi)
			x[j] += slope *
				(float)(kv_visible_position(&eyes->rules, row, tile + j) -
					row->position);
}

/*
 * Turns the raw scores x[i][:] of @row into weights relative to the new m, and brings m, l and out
 * to it. Return: the keys that weigh something: @bits, or none if all scores are -infinity.
 */
static uint32_t soften(const struct kv_attention_args *args, const struct kv_simd_item *item,
		       const struct scratch *s, const struct eyes *eyes, int64_t tile, int row, int i,
		       uint32_t bits)
{
	float scale = args->sm_scale * k_scale(args, item);
	float *x = s->x + i * TILE, *out = s->out + row * s->dv;
	vf tile_max = vf_all(-INFINITY), sum = vf_all(0);
	vf m, factor;

	for (int j = 0; j < TILE; j += LANES) {
		vf y = vf_load(x + j) * scale;

		if (args->softcap > 0)
			y = vf_tanh(y / args->softcap) * args->softcap;
		vf_store(x + j, y);
	}
	if (args->alibi_slopes)
		lean(args, item, eyes, row, tile, x);
	for (int j = 0; j < TILE; j += LANES) {
		vi lane = vi_count() + j;
		vf y = vf_load(x + j);

		y = vf_select(((vi)(bits - (vu){0}) >> lane & 1) != 0, y, vf_all(-INFINITY));
		vf_store(x + j, y);
		tile_max = vf_max(tile_max, y);
	}
	m = vf_max(vf_all(s->m[row]), vf_all(vf_reduce_max(tile_max)));
	if (m[0] == -INFINITY)
		return 0;

	for (int j = 0; j < TILE; j += LANES) {
		vf p = vf_exp(vf_load(x + j) - m);

		vf_store(x + j, p);
		sum += p;
	}
	factor = vf_exp(vf_all(s->m[row]) - m);
	s->m[row] = m[0];
	s->l[row] = s->l[row] * factor[0] + vf_reduce_add(sum);
	if (factor[0] != 1)
		for (int d = 0; d < s->dv; d += LANES)
			vf_store(out + d, vf_load(out + d) * factor);
	return bits;
}

/* @n rows from @row on, over the staged keys; bits[r]: what row + r sees of them */
static void attend_rows(const struct kv_attention_args *args, const struct kv_simd_item *item,
			const struct scratch *s, const struct eyes *eyes, int64_t tile, int row,
			int n, uint32_t *bits)
{
	bool same = true;

	score(s, row, args->k.head_dim, n);
	for (int r = 0; r < n; r++) {
		if (bits[r])
			bits[r] = soften(args, item, s, eyes, tile, row + r, r, bits[r]);
		same = same && bits[r] == bits[0];
	}
	if (same) {
		weigh(s, row, 0, bits[0], n);
		return;
	}
	for (int r = 0; r < n; r++)
		weigh(s, row + r, r, bits[r], 1);
}

/* Row of q, out and lse of the item's row @r. */
static int64_t token_of(const struct kv_attention_args *args, const struct kv_simd_item *item, int r)
{
	return args->query_start_loc[item->b] +
	       (item->first + r) / (args->n_heads_q / args->k.n_heads);
}

static void finish(const struct kv_attention_args *args, const struct kv_simd_item *item,
		   const struct scratch *s, int r)
{
	int64_t t = token_of(args, item, r), h = head_of(args, item, r);
	int64_t at = t * args->out_token_stride + h * args->v.head_dim;
	float l = s->l[r], *out = s->out + r * s->dv;
	float lse = l == 0 ? -INFINITY : s->m[r] + logf(l);
	float factor = l == 0 ? 0 : v_scale(args, item) / l;

	if (args->sinks)
		factor *= kv_sink_factor(args->sinks[h], lse);
	for (int d = 0; d < s->dv; d += LANES)
		vf_store(out + d, vf_load(out + d) * factor);
	narrow((char *)args->out + at * (int64_t)kv_dtype_bytes(args->out_dtype), args->out_dtype,
	       out, args->v.head_dim);
	if (args->lse)
		args->lse[t * args->lse_token_stride + h * args->lse_head_stride] =
			args->lse_with_sink ? kv_sink_lse(args->sinks[h], lse) : lse;
}

static void attend(const struct kv_attention_args *args, const struct kv_simd_item *item,
		   float *base)
{
	struct scratch s = lay_out(args, base);
	struct eyes eyes = {.rules = kv_visibility_of(args)};
	struct kv_range all = {0, 0};
	int64_t group = args->n_heads_q / args->k.n_heads;
	int64_t len = args->seq_lens[item->b], start = args->query_start_loc[item->b];
	int64_t q_len = args->query_start_loc[item->b + 1] - start;

	for (int r = 0; r < item->n_rows; r++) {
		int64_t at = token_of(args, item, r) * args->q_token_stride +
			     head_of(args, item, r) * args->k.head_dim;

		eyes.row[r] = kv_visible_row(&eyes.rules, item->b, start,
					     (item->first + r) / group, q_len, len);
		kv_visible_widen(&all, &eyes.row[r].all);
		widen(s.q + r * s.dk,
		      (const char *)args->q + at * (int64_t)kv_dtype_bytes(args->dtype),
		      args->dtype, args->k.head_dim);
		s.m[r] = -INFINITY;
		s.l[r] = 0;
		memset(s.out + r * s.dv, 0, (size_t)s.dv * sizeof(float));
	}
	for (int64_t tile = all.lo / TILE * TILE; tile < all.hi; tile += TILE) {
		uint32_t bits[KV_SIMD_MAX_ROWS], any = 0;

		for (int r = 0; r < item->n_rows; r++) {
			bits[r] = kv_visible_bits(&eyes.rules, &eyes.row[r], tile);
			any |= bits[r];
		}
		if (!any)
			continue;
		stage_k(args, item, &s, tile, any);
		stage_v(args, item, &s, tile, any);
		for (int r = 0; r < item->n_rows; r += ROWS) {
			int n = item->n_rows - r < ROWS ? item->n_rows - r : ROWS;
			uint32_t some = 0;

			for (int i = 0; i < n; i++)
				some |= bits[r + i];
			if (some)
				attend_rows(args, item, &s, &eyes, tile, r, n, bits + r);
		}
	}
	for (int r = 0; r < item->n_rows; r++)
		finish(args, item, &s, r);
}

const struct kv_simd SET = {
	.name = SET_NAME,
	.scratch_bytes = scratch_bytes,
	.attend = attend,
	.widen = widen,
	.narrow = narrow,
};
