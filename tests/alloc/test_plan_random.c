/* SPDX-License-Identifier: Apache-2.0 */
/* alloc/plan.c: what holds for every plan, over random models and options. */
#include <check.h>
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/plan.h>

#include "include/internal/error.h"

/* A sanitizer's build checks the same with fewer models. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOW 10
#else
#define SLOW 1
#endif

static struct kv_arch_layer layers[16];
static struct kv_arch model = {
	.dtype = KV_BF16, .state_dtype = KV_F32, .encoder_tokens = 37, .layers = layers};

static struct kv_arch_layer attention(uint32_t heads, uint32_t dim)
{
	return (struct kv_arch_layer){
		.kind = KV_LAYER_FULL,
		.shares = -1,
		.n_kv_heads = heads,
		.head_dim = dim,
		.v_head_dim = dim,
	};
}

static uint64_t seed;

static uint64_t random_u64(void)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return seed;
}

static uint32_t pick(uint32_t n)
{
	return (uint32_t)(random_u64() >> 32) % n;
}

static void random_layer(struct kv_arch_layer *l, uint32_t i)
{
	static const uint32_t dims[] = {1, 16, 64, 80, 96, 128, 192, 256, 576};
	uint32_t kind = pick(8);

	*l = attention(1u << pick(4), dims[pick(9)]);
	if (kind < 2) {
		l->kind = kind ? KV_LAYER_WINDOW : KV_LAYER_CHUNKED;
		l->window = 1 + pick(pick(2) ? 3 : 5000);
	} else if (kind == 2) {
		*l = (struct kv_arch_layer){.kind = KV_LAYER_STATE,
					    .shares = -1,
					    .conv_width = pick(4),
					    .conv_inner = 16 * (1 + pick(64)),
					    .conv_groups = pick(3),
					    .conv_group_dim = 16,
					    .state_heads = 16,
					    .state_rows = 1 + pick(128),
					    .state_cols = 1 + pick(128)};
	} else if (kind == 3) {
		l->form = KV_FORM_LATENT;
		l->latent_dim = 64 * (1 + pick(8));
		l->rope_dim = 64 * pick(2);
		l->index_dim = 128 * pick(2);
	} else if (kind == 4) {
		*l = (struct kv_arch_layer){.kind = KV_LAYER_WINDOW,
					    .form = KV_FORM_V4,
					    .shares = -1,
					    .latent_dim = 64 * (1 + pick(8)),
					    .rope_dim = 64,
					    .index_dim = 128 * pick(2),
					    .window = 1 + pick(300),
					    .compress = pick(2) ? 4 : 128};
	} else if (kind == 5 && i) {
		l->shares = (int32_t)pick(i);
	} else if (kind == 6) {
		l->cross_heads = l->n_kv_heads;
	}
}

static void random_model(void)
{
	uint32_t n = 1 + pick(12), period = 1 + pick(4);

	model.n_layers = n;
	model.context = 1 + pick(pick(2) ? 300 : 300000);
	for (uint32_t i = 0; i < n; i++)
		if (i < period)
			random_layer(&layers[i], i);
		else
			layers[i] = layers[i % period];
}

static uint64_t null_and_once(const struct kv_plan *plan)
{
	uint64_t bytes = 0;

	for (uint32_t p = 0; p < plan->n_pools; p++)
		bytes += plan->pools[p].blocks_once * plan->pools[p].block_bytes;
	return bytes;
}

static void same(const struct kv_plan *a, const struct kv_plan *b)
{
	ck_assert_uint_eq(a->used_bytes, b->used_bytes);
	ck_assert_uint_eq(a->n_seqs, b->n_seqs);
	ck_assert_uint_eq(a->n_tokens, b->n_tokens);
	ck_assert_uint_eq(a->n_pools, b->n_pools);
	for (uint32_t p = 0; p < a->n_pools; p++)
		ck_assert_uint_eq(a->pools[p].n_blocks, b->pools[p].n_blocks);
}

/* What a plan says of its own capacity is what its bytes say. */
static void check_capacity(const struct kv_plan *plan, bool capped)
{
	uint64_t free_bytes = plan->used_bytes - null_and_once(plan);

	ck_assert_uint_ge(plan->seq_bytes, plan->seq_need_bytes);
	ck_assert_uint_le(plan->n_seqs * plan->seq_bytes, free_bytes);
	if (!capped)
		ck_assert_uint_gt((plan->n_seqs + 1) * plan->seq_bytes,
				  plan->budget_bytes - null_and_once(plan));
}

static void check_one(struct kv_plan_options *o, bool *ret_planned)
{
	struct kv_plan *plan, *again, *more;
	uint64_t budget = o->budget_bytes;
	int r;

	*ret_planned = false;
	r = kv_plan_arch(&model, NULL, o, &plan);
	if (r) {
		ck_assert_msg(r == -ENOSPC || r == -EINVAL, "%d: %s", r, kv_error_text());
		return;
	}
	*ret_planned = true;
	r = kv_plan_check(plan);
	ck_assert_msg(r == 0, "%s", kv_error_text());
	check_capacity(plan, o->n_seqs);

	/* A plan of the plan's own size is the same plan. */
	o->layout = plan->layout;
	o->budget_bytes = plan->used_bytes;
	ck_assert_int_eq(kv_plan_arch(&model, NULL, o, &again), 0);
	ck_assert_uint_eq(again->waste_bytes, 0);
	same(plan, again);

	/* More budget never takes a block away from any pool. */
	o->budget_bytes = budget + pick(1u << (1 + pick(30)));
	ck_assert_int_eq(kv_plan_arch(&model, NULL, o, &more), 0);
	ck_assert_uint_ge(more->n_seqs, plan->n_seqs);
	ck_assert_uint_ge(more->n_tokens, plan->n_tokens);
	for (uint32_t p = 0; p < plan->n_pools; p++)
		ck_assert_uint_ge(more->pools[p].n_blocks, plan->pools[p].n_blocks);
	kv_plan_free(plan);
	kv_plan_free(again);
	kv_plan_free(more);
	o->budget_bytes = budget;
}

/*
 * States in blocks and states in rows: a sequence needs the same bytes in both, each plan says what
 * it takes beyond them, and counted at their own price both fill the budget but for one sequence
 * and what they keep apart.
 */
static void check_flat_and_split(struct kv_plan_options *o)
{
	struct kv_plan *flat = NULL, *split = NULL;

	o->n_seqs = 0;
	o->layout = KV_PLAN_FLAT;
	if (kv_plan_arch(&model, NULL, o, &flat))
		return;
	o->layout = KV_PLAN_SPLIT;
	if (!kv_plan_arch(&model, NULL, o, &split)) {
		uint64_t a = flat->n_seqs * flat->seq_bytes, b = split->n_seqs * split->seq_bytes;

		ck_assert_uint_eq(flat->seq_need_bytes, split->seq_need_bytes);
		ck_assert_uint_le(a, b + split->seq_bytes + null_and_once(split));
		ck_assert_uint_le(b, a + flat->seq_bytes + null_and_once(flat));
	}
	kv_plan_free(flat);
	kv_plan_free(split);
}

START_TEST(equations_hold_for_100000_random_models)
{
	uint32_t n_planned = 0, n = 100000 / SLOW;

	seed = 0x9e3779b97f4a7c15;
	for (uint32_t i = 0; i < n; i++) {
		KV_OPTIONS(kv_plan_options, o,
			   .budget_bytes = 1 + random_u64() % (1ull << (10 + pick(32))),
			   .tp = 1u << pick(4), .block_tokens = pick(3) ? 0 : 1 + pick(300),
			   .layout = pick(6), .kv_type = pick(3) ? 0 : pick(7),
			   .n_seqs = pick(3) ? 0 : 1 + pick(50), .n_checkpoints = pick(3),
			   .draft_tokens = pick(3) ? 0 : pick(4), .chunk_tokens = pick(4096),
			   .scales = pick(4) ? 0 : 2);
		bool planned_one;

		random_model();
		check_one(&o, &planned_one);
		n_planned += planned_one;
		if (planned_one)
			check_flat_and_split(&o);
	}
	ck_assert_msg(n_planned > n / 3, "only %u of %u models fit", n_planned, n);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("alloc/plan_random");
	TCase *t = tcase_create("random");
	SRunner *runner;
	int failed;

	tcase_set_timeout(t, 300);
	tcase_add_test(t, equations_hold_for_100000_random_models);
	suite_add_tcase(s, t);
	runner = srunner_create(s);
	srunner_run_all(runner, CK_ENV);
	failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
