/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every feature of attention on every backend of the device, against the answer in double precision:
 * one loop over shapes, features and backends. A backend that refuses a feature says so with its bit.
 */
#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/merge.h>

#include "include/internal/error.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/number.h"
#include "tests/kernels/problem.h"
#include "tests/kernels/problem_answer.h"
#include "tests/kernels/run.h"
#include "tests/support/expect.h"

#define COUNT(a) (int)(sizeof(a) / sizeof((a)[0]))

static const struct feature {
	const char *name;
	int bit; /* that a backend without it must give */
	struct problem_spec spec; /* fields that are not 0 replace those of the shape */
	int causal;		  /* -1: as the shape has it */
	int window;		  /* -1: none */
} features[] = {
	{"plain", -1, {0}, -1, -1},
	{"sinks", KV_ATTN_SINKS, {.sinks = true}, -1, -1},
	{"sinks in lse", KV_ATTN_LSE_WITH_SINK, {.sinks = true, .lse_with_sink = true}, -1, 30},
	{"alibi", KV_ATTN_ALIBI, {.alibi = true}, -1, -1},
	{"alibi, softcap, window", KV_ATTN_ALIBI, {.alibi = true, .softcap = 30}, -1, 25},
	{"window", KV_ATTN_WINDOW, {0}, -1, 1},
	{"window with a visible prefix", KV_ATTN_WINDOW_PREFIX, {.prefix = 20}, -1, 40},
	{"prefix, not causal", KV_ATTN_WINDOW_PREFIX, {.prefix = 20}, 0, 10},
	{"not causal", KV_ATTN_NON_CAUSAL, {0}, 0, -1},
	{"window on both sides", KV_ATTN_WINDOW_RIGHT, {.window_right = 9}, 0, 12},
	{"causal by sequence", KV_ATTN_SEQ_CAUSAL, {.seq_causal = 1}, -1, 50},
	{"documents", KV_ATTN_BIDIRECTIONAL, {.docs = 24}, -1, -1},
	{"documents past a window", KV_ATTN_BIDIRECTIONAL, {.docs = 24}, -1, 5},
	{"documents in a window", KV_ATTN_BIDIRECTIONAL, {.docs = 24, .doc_clamped = 1}, -1, 5},
	{"a tree", KV_ATTN_TREE, {.tree = 1}, -1, -1},
	{"chains, sinks", KV_ATTN_TREE, {.tree = 2, .sinks = true}, -1, 3},
	{"rows outside the tree, alibi", KV_ATTN_TREE, {.tree = 3, .alibi = true}, -1, 7},
	{"a rank of four", KV_ATTN_DECODE_CP, {.cp_size = 4, .cp_rank = 1, .cp_interleave = 1}, -1, -1},
	{"a rank of three, by blocks", KV_ATTN_DECODE_CP,
	 {.cp_size = 3, .cp_rank = 2, .cp_interleave = 16, .alibi = true}, -1, 60},
	{"the first rank, a tree", KV_ATTN_DECODE_CP,
	 {.cp_size = 2, .cp_rank = 0, .cp_interleave = 4, .tree = 1}, -1, -1},
	{"keys from a place on", KV_ATTN_KEY_RANGE, {.key_begin = 33}, -1, -1},
	{"keys up to a place", KV_ATTN_KEY_RANGE, {.key_begin = 3, .key_end = 47}, 0, -1},
	{"f32 out", KV_ATTN_OUT_DTYPE, {.out_dtype = KV_F32}, -1, -1},
	{"rows apart", KV_ATTN_STRIDES, {.strides = 1}, -1, -1},
	{"all of it", KV_ATTN_SINKS,
	 {.sinks = true, .lse_with_sink = true, .alibi = true, .softcap = 20, .prefix = 9, .docs = 40,
	  .out_dtype = KV_F32, .strides = 1, .key_begin = 2, .seq_causal = 1}, -1, 31},
};

static const struct shape {
	int n_heads, group, dk, dv, block_tokens, dtype, kv_dtype, kind;
	bool head_major;
	int n_seqs, q_lens[4], lens[4];
} shapes[] = {
	{2, 4, 64, 64, 16, KV_F16, KV_F16, KV_LAYOUT_FLAT, false, 4, {1, 1, 1, 1}, {0, 1, 130, 301}},
	{1, 8, 128, 128, 16, KV_BF16, KV_BF16, KV_LAYOUT_PAGED, true, 3, {3, 40, 5}, {200, 40, 4}},
	{3, 2, 40, 24, 5, KV_F32, KV_F8_E5M2, KV_LAYOUT_FLAT, false, 3, {9, 1, 33}, {9, 66, 90}},
};

static struct problem_spec spec_of(const struct shape *shape, const struct feature *feature)
{
	struct problem_spec spec = feature->spec, base = problem_default();

	memcpy(spec.names, base.names, sizeof(spec.names));
	spec.n_seqs = shape->n_seqs;
	memcpy(spec.q_lens, shape->q_lens, sizeof(shape->q_lens));
	memcpy(spec.lens, shape->lens, sizeof(shape->lens));
	spec.n_heads_kv = shape->n_heads;
	spec.group = shape->group;
	spec.dk = shape->dk;
	spec.dv = shape->dv;
	spec.block_tokens = shape->block_tokens;
	spec.dtype = shape->dtype;
	spec.k_dtype = spec.v_dtype = shape->kv_dtype;
	spec.k_scale = 0.0625f;
	spec.v_scale = 0.3f;
	spec.kind = shape->kind;
	spec.head_major = shape->head_major;
	spec.causal = feature->causal < 0 ? 1 : feature->causal;
	spec.window_left = feature->window;
	spec.spare_rows = 2;
	spec.shuffle = 7;
	return spec;
}

static uint64_t reasons_of(const struct problem *p, const struct kv_attn_backend *backend)
{
	struct kv_attention_args args = p->args, resolved;
	struct kv_refusals refusals = {0};

	args.out = args.workspace;
	args.lse = args.workspace;
	ck_assert_msg(kv_attention_resolve_sizes(&args, &resolved) == 0, "%s", kv_error_text());
	kv_attn_refuse(backend, &resolved, &refusals);
	return refusals.bits;
}

/* The feature on each backend, or its bit among the reasons. */
static void check_feature(struct problem *p, int bit, const char *name)
{
	int n = 0;

	for (int i = 0; problem_backends()[i]; i++) {
		const struct kv_attn_backend *backend = problem_backends()[i];
		uint64_t reasons = reasons_of(p, backend);

		if (!reasons) {
			problem_check(p, backend);
			n++;
			continue;
		}
		ck_assert_msg(bit < 0 || backend->caps.features >> bit & 1 || reasons >> bit & 1,
			      "%s: refuses %s for other reasons (0x%llx)", backend->name, name,
			      (unsigned long long)reasons);
	}
	ck_assert_msg(n, "no backend does %s", name);
}

START_TEST(every_feature_agrees_with_the_answer)
{
	const struct feature *feature = &features[_i / COUNT(shapes)];
	struct problem_spec spec = spec_of(&shapes[_i % COUNT(shapes)], feature);
	struct problem *p = problem_new(&spec);

	/* What is the dtype of q anyway asks for nothing. */
	check_feature(p, spec.out_dtype == spec.dtype ? -1 : feature->bit, feature->name);
	problem_free(p);
}
END_TEST

START_TEST(scales_by_head_and_by_row_agree_with_the_answer)
{
	static const int types[] = {KV_F8_E4M3, KV_F8_E5M2};
	struct problem_spec spec = spec_of(&shapes[_i % 2], &features[0]);
	struct problem *p;

	spec.k_dtype = spec.v_dtype = types[_i / 2 % 2];
	spec.head_scales = _i < 4;
	spec.row_scales = _i >= 4;
	p = problem_new(&spec);
	check_feature(p, spec.head_scales ? KV_ATTN_HEAD_SCALES : KV_ATTN_ROW_SCALES, "scales");
	problem_free(p);
}
END_TEST

/* A prefix in common, read once: of values as if it were each sequence's own. */
START_TEST(a_shared_prefix_changes_no_value)
{
	for (int sinks = 0; sinks < 2; sinks++) {
		struct problem_spec spec = spec_of(&shapes[_i], &features[sinks * 2]);
		struct problem *p;

		spec.window_left = -1;
		spec.causal = 1;
		spec.shared_prefix = 6 * spec.block_tokens;
		for (int b = 0; b < spec.n_seqs; b++)
			spec.lens[b] = spec.shared_prefix + spec.q_lens[b] + 11 * b;
		p = problem_new(&spec);
		check_feature(p, -1, "a shared prefix");
		problem_free(p);
	}
}
END_TEST

/* Parts of [n_parts][n_tokens][heads][dv] f32 in device memory, and what they merge to. */
struct parts {
	int n;
	size_t rows; /* of a part: tokens times heads */
	size_t dim;
	float *out;
	float *lse;
};

static struct parts parts_new(const struct problem *p, int n)
{
	struct parts parts = {.n = n,
			      .rows = (size_t)p->args.n_tokens * (size_t)p->n_heads_q,
			      .dim = (size_t)p->spec.dv};

	parts.out = buffer_new((size_t)n * parts.rows * parts.dim * sizeof(float));
	parts.lse = buffer_new((size_t)n * parts.rows * sizeof(float));
	return parts;
}

static void run_part(const struct kv_attn_backend *backend, struct problem *p,
		     const struct parts *parts, int i)
{
	struct kv_attention_args args = p->args;
	int r;

	args.out = parts->out + (size_t)i * parts->rows * parts->dim;
	args.lse = parts->lse + (size_t)i * parts->rows;
	r = kv_attention_on(backend, &args);
	ck_assert_msg(r == 0, "%s: %s", backend->name, kv_error_text());
}

/* Merges the parts, brings @sinks in, and holds the result against the answer of @p. */
static void merge_and_check(const struct problem *p, struct parts *parts, const float *sinks,
			    double tolerance)
{
	size_t n = (size_t)p->n_rows * (size_t)p->n_heads_q;
	float *out = buffer_new(parts->rows * parts->dim * sizeof(float));
	float *lse = buffer_new(parts->rows * sizeof(float));
	float *got = malloc(n * parts->dim * sizeof(float) + 1), *got_lse = malloc(n * sizeof(float));
	double error = 0, norm = 0;
	struct kv_merge_args merge = {.size = sizeof(merge),
				      .device = buffer_device,
				      .dtype = KV_F32,
				      .n_parts = parts->n,
				      .n_tokens = p->args.n_tokens,
				      .n_heads = p->n_heads_q,
				      .head_dim = (int)parts->dim,
				      .parts = parts->out,
				      .part_lse = parts->lse,
				      .out = out,
				      .lse = lse,
				      .sinks = sinks,
				      .lse_with_sink = p->spec.lse_with_sink,
				      .n_real = p->args.query_start_loc + p->args.n_seqs};

	ck_assert_msg(kv_merge(&merge) == 0, "%s", kv_error_text());
	buffer_get(got, out, n * parts->dim * sizeof(float));
	buffer_get(got_lse, lse, n * sizeof(float));
	for (size_t i = 0; i < n * parts->dim; i++) {
		error += (got[i] - p->out[i]) * (got[i] - p->out[i]);
		norm += p->out[i] * p->out[i];
	}
	expect(sqrt(error) <= tolerance * sqrt(norm), "%d parts: off by %g", parts->n,
	       sqrt(error / norm));
	for (size_t i = 0; i < n; i++)
		expect((double)got_lse[i] == p->lse[i] ||
			       fabs((double)got_lse[i] - p->lse[i]) < 1e-4,
		       "%d parts: lse %g, right is %g", parts->n, (double)got_lse[i], p->lse[i]);
	buffer_free(out);
	buffer_free(lse);
	free(got);
	free(got_lse);
	buffer_free(parts->out);
	buffer_free(parts->lse);
}

/* A context cut into 1..64 ranges of keys, some of them empty. */
START_TEST(any_number_of_splits_merges_to_the_same)
{
	struct problem_spec spec = spec_of(&shapes[0], &features[0]);
	const int n = _i + 1;
	struct problem *p;

	spec.lens[3] = 1000;
	p = problem_new(&spec);
	p->args.out_dtype = KV_F32;
	for (int i = 0; problem_backends()[i]; i++) {
		const struct kv_attn_backend *backend = problem_backends()[i];
		struct parts parts;

		p->args.key_begin = 1;
		if (reasons_of(p, backend))
			continue;
		parts = parts_new(p, n);
		for (int k = 0; k < n; k++) {
			p->args.key_begin = 1000 * k / n;
			p->args.key_end = 1000 * (k + 1) / n;
			run_part(backend, p, &parts, k);
		}
		merge_and_check(p, &parts, NULL, 1e-3);
	}
	problem_free(p);
}
END_TEST

/* D39, with the sums: tokens spread over ranks, each rank's part merged, a sink brought in once. */
START_TEST(ranks_that_hold_every_so_manieth_token_merge_to_the_whole)
{
	static const int cases[][2] = {{4, 1}, {2, 16}, {3, 5}, {8, 64}};
	struct problem_spec spec = spec_of(&shapes[_i % 2], &features[0]), whole = spec;
	int n = cases[_i][0];
	struct problem *right;

	whole.sinks = true;
	whole.lse_with_sink = true;
	right = problem_new(&whole);
	for (int i = 0; problem_backends()[i]; i++) {
		struct problem *rank;
		struct parts parts;
		bool can = true;

		parts = parts_new(right, n);
		for (int r = 0; r < n && can; r++) {
			spec.cp_size = n;
			spec.cp_rank = r;
			spec.cp_interleave = cases[_i][1];
			spec.out_dtype = KV_F32;
			rank = problem_new(&spec);
			can = !reasons_of(rank, problem_backends()[i]);
			if (can)
				run_part(problem_backends()[i], rank, &parts, r);
			problem_free(rank);
		}
		if (!can) {
			buffer_free(parts.out);
			buffer_free(parts.lse);
			continue;
		}
		merge_and_check(right, &parts, right->args.sinks, 4e-3);
	}
	problem_free(right);
}
END_TEST

/* Encoder keys: more of them than queries, or fewer, or none; every query sees all. */
START_TEST(cross_attention_goes_by_the_lengths_of_the_encoder)
{
	struct problem_spec spec = spec_of(&shapes[1], &features[0]);
	struct problem *p;

	spec.causal = 0;
	spec.lens[0] = 77;
	spec.lens[1] = 9;
	spec.lens[2] = 0;
	p = problem_new(&spec);
	check_feature(p, KV_ATTN_NON_CAUSAL, "cross-attention");
	problem_free(p);
}
END_TEST

/* Two layers, one cache: nothing is written for the second, whose views are the first one's. */
START_TEST(layers_that_share_a_cache_read_one_pool)
{
	struct problem_spec spec = spec_of(&shapes[0], &features[0]);
	struct problem *first = problem_new(&spec), *second = problem_new(&spec);
	struct kv_view k = second->args.k, v = second->args.v;

	second->args.k = first->args.k;
	second->args.v = first->args.v;
	buffer_fill(second->pool, 0xff, second->pool_bytes);
	check_feature(second, -1, "a shared cache");
	second->args.k = k;
	second->args.v = v;
	problem_free(first);
	problem_free(second);
}
END_TEST

static TCase *add_case(Suite *suite, const char *name)
{
	TCase *tcase = tcase_create(name);

	tcase_set_timeout(tcase, 300);
	suite_add_tcase(suite, tcase);
	return tcase;
}

int main(void)
{
	Suite *suite = suite_create("kernels/features");
	TCase *tcase;

	tcase_add_loop_test(add_case(suite, "features"), every_feature_agrees_with_the_answer, 0,
			    COUNT(features) * COUNT(shapes));
	tcase = add_case(suite, "parts");
	tcase_add_loop_test(tcase, scales_by_head_and_by_row_agree_with_the_answer, 0, 8);
	tcase_add_loop_test(tcase, a_shared_prefix_changes_no_value, 0, COUNT(shapes));
	tcase_add_loop_test(tcase, any_number_of_splits_merges_to_the_same, 0, 64);
	tcase_add_loop_test(tcase, ranks_that_hold_every_so_manieth_token_merge_to_the_whole, 0, 4);
	tcase_add_test(tcase, cross_attention_goes_by_the_lengths_of_the_encoder);
	tcase_add_test(tcase, layers_that_share_a_cache_read_one_pool);
	return run_on_device(suite);
}
