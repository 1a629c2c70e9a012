/* SPDX-License-Identifier: Apache-2.0 */
/* alloc/plan.c, plan_arch.c, plan_check.c: the equations, the edges, and the field's cases. */
#include <check.h>
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <kvcached/plan.h>

#include "include/internal/error.h"

#define GIB ((uint64_t)1 << 30)

/* A sanitizer's build checks the same with fewer models and more time. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOW 10
#else
#define SLOW 1
#endif

static struct kv_arch_layer layers[256];
static struct kv_arch model = {.dtype = KV_BF16, .state_dtype = KV_F32, .layers = layers};

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

/* Qwen3-Next's: 16 key and 32 value heads of 128, convolution over 4 */
static struct kv_arch_layer gdn(void)
{
	return (struct kv_arch_layer){
		.kind = KV_LAYER_STATE,
		.shares = -1,
		.conv_width = 3,
		.conv_inner = 8192,
		.state_heads = 32,
		.state_rows = 128,
		.state_cols = 128,
	};
}

static void uniform(uint32_t n, struct kv_arch_layer layer, uint64_t context)
{
	for (uint32_t i = 0; i < n; i++)
		layers[i] = layer;
	model.n_layers = n;
	model.context = context;
}

static struct kv_plan *planned(const struct kv_plan_options *o)
{
	struct kv_plan *plan = NULL;
	int r = kv_plan_arch(&model, NULL, o, &plan);

	ck_assert_msg(r == 0, "%d: %s", r, kv_error_text());
	r = kv_plan_check(plan);
	ck_assert_msg(r == 0, "%s", kv_error_text());
	return plan;
}

static void refused(const struct kv_plan_options *o, int code, const char *word)
{
	struct kv_plan *plan = NULL;

	ck_assert_int_eq(kv_plan_arch(&model, NULL, o, &plan), code);
	ck_assert_ptr_null(plan);
	ck_assert_msg(strstr(kv_error_text(), word), "'%s' does not name %s", kv_error_text(),
		      word);
}

START_TEST(a_dense_model_costs_what_its_heads_cost)
{
	/* Llama 3 8B: 32 layers of 8 heads of 128, K and V, 2 bytes: 4096 B a layer,
	 * 131,072 B a token; a block of 16: 2 MiB; 10 GiB: 5120 blocks, one of them null.
	 * 8192 tokens are 512 blocks: floor(5119 / 512) = 9 sequences. */
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = 10 * GIB, .block_tokens = 16);
	struct kv_plan *plan;

	uniform(32, attention(8, 128), 8192);
	plan = planned(&o);
	ck_assert_uint_eq(plan->layout, KV_PLAN_FLAT);
	ck_assert_uint_eq(plan->token_bytes, 131072);
	ck_assert_uint_eq(plan->n_pools, 1);
	ck_assert_uint_eq(plan->pools[0].block_bytes, 2097152);
	ck_assert_uint_eq(plan->pools[0].n_blocks, 5120);
	ck_assert_uint_eq(plan->n_seqs, 9);
	ck_assert_uint_eq(plan->n_tokens, 5119 * 16);
	ck_assert_uint_eq(plan->waste_bytes, 0);
	ck_assert_uint_eq(plan->align_bytes, 0);
	kv_plan_free(plan);
}
END_TEST

START_TEST(the_null_block_is_part_of_the_budget)
{
	KV_OPTIONS(kv_plan_options, o, .block_tokens = 16);
	struct kv_plan *plan;

	uniform(1, attention(1, 8), 64); /* K and V: 2 * 256 B */
	o.budget_bytes = 1023;
	refused(&o, -ENOSPC, "1024");
	o.budget_bytes = 1024;
	plan = planned(&o);
	ck_assert_uint_eq(plan->pools[0].n_blocks, 2);
	ck_assert_uint_eq(plan->n_seqs, 0);
	ck_assert_uint_eq(plan->n_tokens, 16);
	kv_plan_free(plan);
	o.budget_bytes = 0;
	refused(&o, -ENOSPC, "budget_bytes");
}
END_TEST

START_TEST(fields_out_of_range_are_named)
{
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = GIB);

	uniform(2, attention(8, 128), 8192);
	o.tp = 3;
	refused(&o, -EINVAL, "tp");
	o.tp = 1;
	o.layout = 9;
	refused(&o, -EINVAL, "layout");
	o.layout = 0;
	o.kv_type = 99;
	refused(&o, -EINVAL, "kv_type");
	o.kv_type = KV_KV_F8_PACKED;
	refused(&o, -EINVAL, "kv_type");
	o.kv_type = KV_KV_BF16;
	o.scales = KV_SCALES_TOKEN_HEAD;
	refused(&o, -EINVAL, "scales");
	o.scales = 0;
	layers[1].kind = KV_LAYER_WINDOW;
	refused(&o, -EINVAL, "window");
	layers[1].kind = KV_LAYER_FULL;
	model.context = 0;
	refused(&o, -EINVAL, "context");
	model.context = UINT64_MAX;
	refused(&o, -EINVAL, "context");
	model.context = 8192;
	layers[0].head_dim = layers[0].v_head_dim = UINT32_MAX;
	layers[0].n_kv_heads = UINT32_MAX;
	refused(&o, -EOVERFLOW, "2^40");
	model.n_layers = 0;
	refused(&o, -EINVAL, "model");
}
END_TEST

START_TEST(a_model_of_nothing_but_states_has_rows)
{
	/* conv 8192*3*2 = 49,152; recurrent 32*128*128*4 = 2,097,152; 4 layers: 8,585,216 B a row
	 */
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = GIB);
	struct kv_plan *plan;

	uniform(4, gdn(), 8192);
	plan = planned(&o);
	ck_assert_uint_eq(plan->state_bytes, 8585216);
	ck_assert_uint_eq(plan->token_bytes, 0);
	ck_assert_uint_eq(plan->n_seqs, GIB / 8585216 - 1);
	kv_plan_free(plan);
}
END_TEST

START_TEST(states_in_rows_leave_the_block_size_alone)
{
	/* Qwen3-Next: 36 states and 12 layers of 2 heads of 256, 2048 B each.
	 * Flat: 2,146,304 / 2048 = 1048 tokens, in steps of 64: 1088.
	 * Split: 64-token blocks of 12 * 131,072 B; a row of 36 * 2,146,304 = 77,266,944 B. */
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = 60 * GIB, .context = 8192,
		   .layout = KV_PLAN_FLAT);
	struct kv_plan *flat, *split;

	uniform(48, gdn(), 262144);
	for (uint32_t i = 3; i < 48; i += 4)
		layers[i] = attention(2, 256);
	flat = planned(&o);
	o.layout = KV_PLAN_SPLIT;
	split = planned(&o);
	ck_assert_uint_eq(flat->pools[0].block_tokens, 1088);
	ck_assert_uint_eq(flat->pools[0].block_bytes, 12 * 2048 * 1088 + 77266944);
	ck_assert_uint_eq(split->n_pools, 2);
	ck_assert_uint_eq(split->groups[split->n_groups - 1].pool, 1);
	for (uint32_t p = 0; p < 2; p++)
		ck_assert_uint_eq(split->pools[p].block_bytes,
				  split->pools[p].block_tokens ? 64 * 12 * 2048 : 77266944);
	/* 8192 tokens: flat 8 blocks, and 8 states where one is needed */
	ck_assert_uint_eq(flat->seq_need_bytes, split->seq_need_bytes);
	ck_assert_uint_gt(flat->seq_bytes, 7 * 77266944);
	ck_assert_uint_gt(split->n_seqs, 2 * flat->n_seqs);
	kv_plan_free(flat);
	kv_plan_free(split);
}
END_TEST

START_TEST(prefixes_blocks_and_kernels_have_sizes_of_their_own)
{
	/* states in blocks of 1088 tokens: so are prefixes; in rows, blocks of 128 give prefixes of
	 * 128, and kernels read them by 64 */
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = 60 * GIB, .context = 8192,
		   .layout = KV_PLAN_FLAT, .kernel_tokens = 64);
	struct kv_plan *plan;

	uniform(4, gdn(), 262144);
	layers[3] = attention(2, 256);
	plan = planned(&o);
	ck_assert_uint_eq(plan->prefix_tokens, 1088);
	kv_plan_free(plan);
	o.layout = KV_PLAN_SPLIT;
	o.block_tokens = 128;
	plan = planned(&o);
	ck_assert_uint_eq(plan->prefix_tokens, 128);
	kv_plan_free(plan);
	o.kernel_tokens = 48;
	refused(&o, -EINVAL, "kernel_tokens");
}
END_TEST

START_TEST(draft_tokens_and_checkpoints_have_rows)
{
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = 8 * GIB, .context = 1024, .draft_tokens = 3,
		   .n_checkpoints = 2, .layout = KV_PLAN_SPLIT);
	struct kv_plan *plan;
	uint64_t blocks[2];

	uniform(2, gdn(), 8192);
	layers[1] = attention(2, 256);
	plan = planned(&o);
	kv_plan_cost(plan, 1, blocks);
	ck_assert_uint_eq(blocks[plan->groups[0].pool], 6); /* its own, 3, 2 */
	ck_assert_uint_eq(blocks[plan->groups[1].pool], 1);
	kv_plan_free(plan);
	o.layout = KV_PLAN_FLAT;
	refused(&o, -EINVAL, "draft");
}
END_TEST

START_TEST(a_draft_model_rides_on_the_same_blocks)
{
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = GIB, .block_tokens = 16);
	struct kv_arch_layer one = attention(8, 128);
	struct kv_arch draft = {.dtype = KV_BF16, .n_layers = 1, .layers = &one};
	struct kv_plan *plan;

	uniform(32, attention(8, 128), 4096);
	ck_assert_int_eq(kv_plan_arch(&model, &draft, &o, &plan), 0);
	ck_assert_int_eq(kv_plan_check(plan), 0);
	ck_assert_uint_eq(plan->n_groups, 1);
	ck_assert_uint_eq(plan->n_pools, 1);
	ck_assert_uint_eq(plan->pools[0].block_bytes, 33 * 65536);
	ck_assert_uint_eq(plan->components[64].layer, 32);
	kv_plan_free(plan);
}
END_TEST

START_TEST(layers_that_share_have_no_bytes)
{
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = GIB);
	struct kv_plan *plan;

	uniform(4, attention(8, 128), 4096);
	layers[2].shares = layers[3].shares = 1;
	plan = planned(&o);
	ck_assert_uint_eq(plan->n_components, 4);
	ck_assert_uint_eq(plan->token_bytes, 8192);
	kv_plan_free(plan);
}
END_TEST

START_TEST(a_sequence_charges_a_window_only_for_its_window)
{
	/* Window 1024 in blocks of 64: the last 1023 tokens before one: 16 blocks, and one that
	 * the window starts inside of. */
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = 8 * GIB, .layout = KV_PLAN_GROUPED);
	struct kv_plan *plan;
	uint64_t blocks[2];

	uniform(6, attention(8, 128), 32768);
	for (uint32_t i = 0; i < 5; i++) {
		layers[i].kind = KV_LAYER_WINDOW;
		layers[i].window = 1024;
	}
	plan = planned(&o);
	kv_plan_cost(plan, 32768, blocks);
	ck_assert_uint_eq(blocks[0], 17);
	ck_assert_uint_eq(blocks[1], 512);
	kv_plan_cost(plan, 100, blocks);
	ck_assert_uint_eq(blocks[0], 2);
	ck_assert_uint_eq(blocks[1], 2);
	/* once: the null block, and 2048 tokens of a prompt being written */
	ck_assert_uint_eq(plan->pools[0].blocks_once, 1 + 32);
	kv_plan_free(plan);
	o.layout = 0;
	plan = planned(&o);
	ck_assert_uint_ne(plan->layout, KV_PLAN_FLAT);
	kv_plan_free(plan);
}
END_TEST

/* D33: bytes per token, per layer, and page strides. */
START_TEST(d33_sizes)
{
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = 64 * GIB);
	struct kv_arch_layer latent = {.kind = KV_LAYER_FULL,
				       .form = KV_FORM_LATENT,
				       .shares = -1,
				       .latent_dim = 512,
				       .rope_dim = 64};
	struct kv_arch_layer v4 = {.kind = KV_LAYER_WINDOW,
				   .form = KV_FORM_V4,
				   .shares = -1,
				   .latent_dim = 448,
				   .rope_dim = 64,
				   .window = 128};
	struct kv_arch_layer state = {.kind = KV_LAYER_STATE,
				      .shares = -1,
				      .conv_width = 3,
				      .conv_inner = 2048,
				      .state_heads = 8,
				      .state_rows = 128,
				      .state_cols = 128};
	struct kv_plan *plan;

	uniform(80, attention(8, 128), 8192);
	plan = planned(&o);
	ck_assert_uint_eq(plan->token_bytes, 327680);
	ck_assert_uint_eq(plan->components[0].slot_bytes + plan->components[1].slot_bytes, 4096);
	ck_assert_uint_eq(plan->components[0].bytes + plan->components[1].bytes, 262144);
	kv_plan_free(plan);

	uniform(1, latent, 8192);
	plan = planned(&o);
	ck_assert_uint_eq(plan->token_bytes, 1152);
	ck_assert_uint_eq(plan->components[0].bytes, 73728);
	kv_plan_free(plan);
	o.kv_type = KV_KV_F8;
	plan = planned(&o);
	ck_assert_uint_eq(plan->token_bytes, 576);
	ck_assert_uint_eq(plan->components[0].bytes, 36864);
	kv_plan_free(plan);
	o.kv_type = KV_KV_F8_PACKED; /* 512 + 4 * 4 + 64 * 2 */
	plan = planned(&o);
	ck_assert_uint_eq(plan->token_bytes, 656);
	ck_assert_uint_eq(plan->components[0].bytes, 41984);
	kv_plan_free(plan);

	/* 448 + 64 * 2 + 8 = 584; 64 rows: 37,376, to a multiple of 576: 37,440 */
	o.kv_type = 0;
	uniform(1, v4, 8192);
	plan = planned(&o);
	ck_assert_uint_eq(plan->components[0].slot_bytes, 584);
	ck_assert_uint_eq(plan->components[0].slot_bytes * 64, 37376);
	o.layout = KV_PLAN_GROUPED;
	kv_plan_free(plan);
	plan = planned(&o);
	ck_assert_uint_eq(plan->components[0].bytes, 37440);
	kv_plan_free(plan);

	o.layout = 0;
	uniform(1, state, 8192);
	o.state_type = KV_BF16;
	plan = planned(&o);
	ck_assert_uint_eq(plan->components[0].const_bytes, 12288);
	ck_assert_uint_eq(plan->components[1].const_bytes, 262144);
	kv_plan_free(plan);
	o.state_type = KV_F32;
	plan = planned(&o);
	ck_assert_uint_eq(plan->components[1].const_bytes, 524288);
	kv_plan_free(plan);
}
END_TEST

/* D38: KV heads per rank. */
START_TEST(d38_heads_of_ranks)
{
	static const struct {
		uint32_t heads, tp, local;
	} rows[] = {{8, 4, 2}, {8, 8, 1}, {8, 32, 1}, {2, 4, 1},
		    {4, 8, 1}, {1, 8, 1}, {8, 3, 0},  {6, 4, 0}};
	uint32_t local = 77;

	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		int r = kv_plan_local_heads(rows[i].heads, rows[i].tp, &local);

		ck_assert_int_eq(r, rows[i].local ? 0 : -EINVAL);
		if (rows[i].local)
			ck_assert_uint_eq(local, rows[i].local);
	}
	for (uint32_t rank = 0; rank < 4; rank++)
		ck_assert_uint_eq(kv_plan_first_head(2, 4, rank), rank / 2);
	ck_assert_int_eq(kv_plan_local_heads(0, 1, &local), -EINVAL);
}
END_TEST

/* D35: a client's budget does not depend on its neighbours. */
START_TEST(d35_a_budget_is_the_clients_own)
{
	struct kv_plan_rank rank = {23609475072, 3099983872, 23609475072 - 3099983872};
	struct kv_plan_rank all = {UINT64_MAX, 0, UINT64_MAX}, two[2] = {rank, rank};
	uint64_t bytes = 0;

	/* the first; then a second, with the first and its cache on the device; then alone again */
	ck_assert_int_eq(kv_plan_budget(&rank, 1, 200000, &bytes), 0);
	ck_assert_uint_eq(bytes / 360448, 4499);
	rank.free_bytes -= bytes + 3099983872;
	ck_assert_int_eq(kv_plan_budget(&rank, 1, 200000, &bytes), 0);
	ck_assert_uint_eq(bytes / 360448, 4499);
	/* more than is there: refused with the numbers, not made smaller */
	rank.free_bytes = 1621911141;
	ck_assert_int_eq(kv_plan_budget(&rank, 1, 200000, &bytes), -ENOSPC);
	ck_assert_msg(strstr(kv_error_text(), "1621911141") &&
			      strstr(kv_error_text(), "1621911142"),
		      "%s", kv_error_text());
	rank.own_bytes = 4721895014;
	ck_assert_int_eq(kv_plan_budget(&rank, 1, 200000, &bytes), -ENOSPC);
	ck_assert_msg(strstr(kv_error_text(), "4721895014"), "%s", kv_error_text());
	/* the rank with least decides for all */
	two[1].own_bytes += 1000;
	ck_assert_int_eq(kv_plan_budget(two, 2, 200000, &bytes), 0);
	ck_assert_uint_eq(bytes, 1621911142 - 1000);
	ck_assert_int_eq(kv_plan_budget(&all, 1, 1000000, &bytes), 0);
	ck_assert_uint_eq(bytes, UINT64_MAX);
	ck_assert_int_eq(kv_plan_budget(&all, 1, 1000001, &bytes), -EINVAL);
	ck_assert_int_eq(kv_plan_budget(&all, 0, 1, &bytes), -EINVAL);
}
END_TEST

START_TEST(colocated_pools_get_their_minimum_and_share_the_rest)
{
	struct kv_plan_share s[3] = {{.min_bytes = 10, .weight = 1},
				     {.min_bytes = 20, .max_bytes = 25, .weight = 2},
				     {.min_bytes = 5, .weight = 1}};

	ck_assert_int_eq(kv_plan_colocate(100, s, 3), 0);
	ck_assert_uint_eq(s[1].grant_bytes, 25);
	ck_assert_uint_eq(s[0].grant_bytes + s[1].grant_bytes + s[2].grant_bytes, 100);
	ck_assert_uint_le(s[0].grant_bytes - s[2].grant_bytes, 6);
	ck_assert_int_eq(kv_plan_colocate(34, s, 3), -ENOSPC);
	ck_assert_msg(strstr(kv_error_text(), "35") && strstr(kv_error_text(), "34"), "%s",
		      kv_error_text());
	ck_assert_int_eq(kv_plan_colocate(35, s, 3), 0);
	ck_assert_uint_eq(s[0].grant_bytes, 10);
	/* a sum beyond the budget is refused with the numbers, not wrapped around */
	s[0].min_bytes = s[2].min_bytes = UINT64_MAX;
	ck_assert_int_eq(kv_plan_colocate(UINT64_MAX, s, 3), -ENOSPC);
}
END_TEST

/* D30: two groups of different geometry in one pool. */
START_TEST(d30_two_geometries_share_ids)
{
	struct kv_plan_group groups[2] = {
		{.name = "a", .kind = KV_GROUP_FULL, .stride = 1, .block_tokens = 1536},
		{.name = "b", .kind = KV_GROUP_FULL, .stride = 1, .block_tokens = 128},
	};
	struct kv_plan_component c[4] = {
		{.name = "k", .layer = 0, .group = 0, .slot_bytes = 1024},
		{.name = "v", .layer = 0, .group = 0, .slot_bytes = 1024},
		{.name = "k", .layer = 1, .group = 1, .slot_bytes = 1024},
		{.name = "v", .layer = 1, .group = 1, .slot_bytes = 1024},
	};
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = 64 * (uint64_t)3145728, .context = 1536,
		   .layout = KV_PLAN_SLAB);
	struct kv_plan *plan;

	ck_assert_int_eq(kv_plan_groups(groups, 2, c, 4, &o, &plan), 0);
	ck_assert_int_eq(kv_plan_check(plan), 0);
	ck_assert_uint_eq(plan->n_pools, 1);
	ck_assert_uint_eq(plan->pools[0].block_bytes, 3145728);
	ck_assert_uint_eq(plan->groups[0].payload_bytes, 3145728);
	ck_assert_uint_eq(plan->groups[1].payload_bytes, 262144);
	/* all bytes of id i lie in [i * page, (i + 1) * page) for both groups */
	for (uint32_t i = 0; i < 4; i++)
		ck_assert_uint_le(plan->components[i].offset + plan->components[i].bytes, 3145728);
	ck_assert_uint_eq(plan->components[2].offset, 0);
	ck_assert_uint_eq(plan->pools[0].n_blocks, 64);
	kv_plan_free(plan);
}
END_TEST

/* D31: a short request is cheap, and capacity is reported honestly. */
START_TEST(d31_rows_and_blocks_are_counted_apart)
{
	struct kv_plan_group groups[4] = {
		{.name = "full", .kind = KV_GROUP_FULL, .stride = 1, .block_tokens = 16},
		{.name = "state0", .kind = KV_GROUP_STATE},
		{.name = "state1", .kind = KV_GROUP_STATE},
		{.name = "state2", .kind = KV_GROUP_STATE},
	};
	struct kv_plan_component c[4] = {
		{.name = "kv", .group = 0, .slot_bytes = 4096},
		{.name = "s", .group = 1, .const_bytes = 1048576},
		{.name = "s", .group = 2, .const_bytes = 1048576},
		{.name = "s", .group = 3, .const_bytes = 1048576},
	};
	/* 10,001 blocks of 65,536 B with the null block, 65 rows of 1 MiB in each of 3 pools */
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = 10001 * 65536ull + 3 * 65 * 1048576ull,
		   .context = 2496, .n_seqs = 64, .layout = KV_PLAN_SPLIT);
	uint64_t blocks[4], left[4];
	struct kv_plan *plan;

	ck_assert_int_eq(kv_plan_groups(groups, 4, c, 4, &o, &plan), 0);
	ck_assert_int_eq(kv_plan_check(plan), 0);
	ck_assert_uint_eq(plan->pools[0].n_blocks, 10001);
	ck_assert_uint_eq(plan->pools[0].block_tokens, 16);
	ck_assert_uint_eq(plan->n_seqs, 64);
	ck_assert_uint_eq(plan->n_tokens, 160000);
	kv_plan_cost(plan, 12, blocks);
	for (uint32_t p = 0; p < 4; p++) {
		ck_assert_uint_eq(blocks[p], 1);
		left[p] = plan->pools[p].n_blocks - 1 - 64 * blocks[p];
	}
	ck_assert_uint_eq(left[0], 9936);
	ck_assert_uint_eq(left[1], 0); /* the 65th has no row */
	kv_plan_free(plan);
}
END_TEST

/* D02: a latent pool past 2^32 elements. */
START_TEST(d02_addresses_past_2_32)
{
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = 262146ull * 32768, .block_tokens = 32,
		   .context = 8192);
	struct kv_arch_layer latent = {
		.kind = KV_LAYER_FULL, .form = KV_FORM_LATENT, .shares = -1, .latent_dim = 512};
	const struct kv_plan_pool *pool;
	struct kv_plan *plan;

	uniform(1, latent, 8192);
	plan = planned(&o);
	pool = &plan->pools[0];
	ck_assert_uint_eq(pool->block_bytes, 32768);
	ck_assert_uint_eq(pool->n_blocks, 262146);
	/* page 262,144 starts at element 2^32, the last one ends with the budget */
	ck_assert_uint_eq(pool->offset + 262144 * pool->block_bytes, 2ull * 4294967296);
	ck_assert_uint_eq(pool->offset + 262146 * pool->block_bytes, o.budget_bytes);
	kv_plan_free(plan);
}
END_TEST

START_TEST(a_pool_of_the_plan_opens_as_a_layout)
{
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = 8 * GIB, .layout = KV_PLAN_SPLIT);
	struct kv_component components[256];
	struct kv_layout layout;
	struct kv_plan *plan;
	uint64_t bytes, offsets[256];
	int n;

	uniform(48, gdn(), 8192);
	for (uint32_t i = 3; i < 48; i += 4)
		layers[i] = attention(2, 256);
	plan = planned(&o);
	for (uint32_t p = 0; p < plan->n_pools; p++) {
		uint32_t k = 0;

		n = kv_plan_pool_layout(plan, p, components, &layout);
		ck_assert_msg(n > 0, "%s", kv_error_text());
		ck_assert_int_eq(kv_layout_block_bytes(&layout, offsets, &bytes), 0);
		ck_assert_uint_eq(bytes, plan->pools[p].block_bytes);
		for (uint32_t i = 0; i < plan->n_components; i++)
			if (plan->groups[plan->components[i].group].pool == p)
				ck_assert_uint_eq(offsets[k++], plan->components[i].offset);
	}
	ck_assert_int_eq(kv_plan_pool_layout(plan, 2, components, &layout), -EINVAL);
	kv_plan_free(plan);
}
END_TEST

START_TEST(planning_128_hybrid_layers_takes_less_than_a_millisecond)
{
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = 120 * GIB);
	double best = 1, took;

	uniform(128, gdn(), 262144);
	for (uint32_t i = 3; i < 128; i += 4)
		layers[i] = attention(8, 128);
	for (int i = 0; i < 50; i++) {
		struct timespec a, b;
		struct kv_plan *plan;

		clock_gettime(CLOCK_MONOTONIC, &a);
		ck_assert_int_eq(kv_plan_arch(&model, NULL, &o, &plan), 0);
		clock_gettime(CLOCK_MONOTONIC, &b);
		kv_plan_free(plan);
		took = (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) / 1e9;
		best = took < best ? took : best;
	}
	ck_assert_msg(best < 1e-3 * SLOW, "%.3f ms", best * 1e3);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("alloc/plan");
	TCase *t = tcase_create("plan");
	SRunner *runner;
	int failed;

	tcase_set_timeout(t, 60);
	tcase_add_test(t, a_dense_model_costs_what_its_heads_cost);
	tcase_add_test(t, the_null_block_is_part_of_the_budget);
	tcase_add_test(t, fields_out_of_range_are_named);
	tcase_add_test(t, a_model_of_nothing_but_states_has_rows);
	tcase_add_test(t, states_in_rows_leave_the_block_size_alone);
	tcase_add_test(t, prefixes_blocks_and_kernels_have_sizes_of_their_own);
	tcase_add_test(t, draft_tokens_and_checkpoints_have_rows);
	tcase_add_test(t, a_draft_model_rides_on_the_same_blocks);
	tcase_add_test(t, layers_that_share_have_no_bytes);
	tcase_add_test(t, a_sequence_charges_a_window_only_for_its_window);
	tcase_add_test(t, d33_sizes);
	tcase_add_test(t, d38_heads_of_ranks);
	tcase_add_test(t, d35_a_budget_is_the_clients_own);
	tcase_add_test(t, colocated_pools_get_their_minimum_and_share_the_rest);
	tcase_add_test(t, d30_two_geometries_share_ids);
	tcase_add_test(t, d31_rows_and_blocks_are_counted_apart);
	tcase_add_test(t, d02_addresses_past_2_32);
	tcase_add_test(t, a_pool_of_the_plan_opens_as_a_layout);
	tcase_add_test(t, planning_128_hybrid_layers_takes_less_than_a_millisecond);
	suite_add_tcase(s, t);
	runner = srunner_create(s);
	srunner_run_all(runner, CK_ENV);
	failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
