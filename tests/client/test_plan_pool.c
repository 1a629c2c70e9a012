/* SPDX-License-Identifier: Apache-2.0 */
/* Pools opened with a plan or a config instead of a layout, by the library and by kvcached --pool.
 */
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/client.h"

#define GIB	 ((uint64_t)1 << 30)
#define MODEL(x) KV_MODELS_DIR "/" x ".json"

static struct kv_client *client;

static void setup(void)
{
	daemon_start("--host", "1G");
	client = client_new();
}

static void teardown(void)
{
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

/* Blocks can be had, and no block but those of the pool. */
static void works(struct kv_pool *pool)
{
	struct kv_pool_info info;
	kv_block_id ids[3];

	kv_pool_info(pool, &info);
	must(kv_blocks_take(pool, 3, ids, TIMEOUT));
	for (int i = 0; i < 3; i++)
		ck_assert_int_ne(ids[i], info.null_block);
	must(kv_blocks_give(pool, 3, ids));
}

/* Components lie in the pool's blocks where the plan has them. */
static void lies_as_planned(struct kv_pool *pool, const struct kv_plan *plan, uint32_t i_pool)
{
	const struct kv_layout *layout = kv_pool_layout(pool);
	struct kv_view first, view;
	struct kv_pool_info info;
	uint32_t n = 0;

	kv_pool_info(pool, &info);
	ck_assert_uint_eq(info.block_bytes, plan->pools[i_pool].block_bytes);
	must(kv_pool_view(pool, 0, 0, &first));
	for (uint32_t i = 0; i < plan->n_components; i++) {
		const struct kv_plan_component *c = &plan->components[i];

		if (plan->groups[c->group].pool != i_pool)
			continue;
		n++;
		for (uint32_t k = 0;; k++) {
			ck_assert_uint_lt(k, layout->n_components);
			must(kv_pool_view(pool, 0, k, &view));
			if ((uint64_t)((char *)view.base - (char *)first.base) == c->offset)
				break;
		}
		ck_assert_int_eq(view.n_heads, (int)c->n_heads);
		ck_assert_int_eq(view.head_dim, (int)c->head_dim);
		ck_assert_int_eq(view.dtype, c->dtype);
	}
	ck_assert_uint_eq(n, layout->n_components);
}

START_TEST(a_config_opens_a_pool_and_no_bytes_are_typed)
{
	/* 32 layers, K and V of 8 heads of 128 in 2 B: 131,072 B a token, 16 of them in a block */
	KV_OPTIONS(kv_plan_options, planning, .block_tokens = 16);
	KV_OPTIONS(kv_pool_options, what, .name = "llama", .config = MODEL("llama-3-8b"),
		   .planning = &planning, .timeout = TIMEOUT);
	struct kv_component components[64];
	struct kv_layout layout = {.kind = KV_LAYOUT_FLAT,
				   .block_tokens = 16,
				   .n_components =
					   kv_layout_uniform(components, 32, 8, 128, KV_BF16, 1, 1),
				   .components = components};
	char digest[KV_ARCH_DIGEST_BYTES];
	KV_OPTIONS(kv_pool_options, same, .name = "llama", .model = "LlamaForCausalLM",
		   .revision = digest, .layout = &layout, .timeout = TIMEOUT);
	struct kv_pool *pool, *by_hand;
	struct kv_pool_info info;
	struct kv_arch *model;

	must(kv_pool_open(client, &what, &pool));
	kv_pool_info(pool, &info);
	ck_assert_uint_eq(info.block_bytes, 16 * 131072);
	ck_assert_uint_eq(info.max_blocks, GIB / (16 * 131072) - 1);
	works(pool);

	/* Its identity is what the header says. */
	must(kv_arch_read(MODEL("llama-3-8b"), &model));
	must(kv_arch_digest(model, digest));
	must(kv_pool_open(client, &same, &by_hand));
	kv_pool_close(by_hand);

	/* Other weights of the same architecture say so; another architecture needn't. */
	what.revision = "fine-tuned";
	refused(kv_pool_open(client, &what, &by_hand), -EEXIST, "revision");
	what.revision = NULL;
	what.config = MODEL("llama-2-7b");
	refused(kv_pool_open(client, &what, &by_hand), -EEXIST, "revision");
	what.config = MODEL("llama-3-8b");
	planning.block_tokens = 32;
	refused(kv_pool_open(client, &what, &by_hand), -EEXIST, "block_tokens: 16 here, 32 asked");
	planning.block_tokens = 16;
	planning.kv_type = KV_KV_F8;
	refused(kv_pool_open(client, &what, &by_hand), -EEXIST, "dtype");
	planning.kv_type = KV_KV_AUTO;
	planning.tp = 2;
	refused(kv_pool_open(client, &what, &by_hand), -EEXIST, "tp_ranks: 1 here, 2 asked");
	kv_arch_free(model);
	kv_pool_close(pool);
}
END_TEST

START_TEST(a_hybrid_model_has_a_pool_for_blocks_and_one_for_states)
{
	/* 24 states: (61,440 + 4,194,304) B; 4 layers of 4,096 B a token in blocks of 64 */
	KV_OPTIONS(kv_plan_options, planning, .budget_bytes = GIB, .context = 4096);
	KV_OPTIONS(kv_pool_options, what, .name = "nemotron", .config = MODEL("nemotron-h-8b"),
		   .planning = &planning, .mapped = 1, .timeout = TIMEOUT);
	struct kv_pool *pools[2], *none;
	struct kv_pool_info info;
	struct kv_arch *model;
	struct kv_plan *plan;

	must(kv_arch_read(what.config, &model));
	planning.layout = KV_PLAN_SPLIT;
	must(kv_plan_arch(model, NULL, &planning, &plan));
	planning.layout = KV_PLAN_AUTO;
	ck_assert_uint_eq(plan->n_pools, 2);
	for (what.plan_pool = 0; what.plan_pool < 2; what.plan_pool++) {
		const struct kv_plan_pool *p = &plan->pools[what.plan_pool];
		char name[KV_NAME_MAX];

		must(kv_pool_open(client, &what, &pools[what.plan_pool]));
		snprintf(name, sizeof(name), "nemotron.%s", p->name);
		ck_assert_uint_eq(pool_stats(client, name).block_bytes,
				  p->block_tokens ? 64 * 4 * 4096 : 24 * (61440 + 4194304));
		kv_pool_info(pools[what.plan_pool], &info);
		ck_assert_uint_eq(info.max_blocks, p->n_blocks - 1);
		works(pools[what.plan_pool]);
		lies_as_planned(pools[what.plan_pool], plan, what.plan_pool);
	}
	refused(kv_pool_open(client, &what, &none), -EINVAL, "plan_pool: 2 given");

	/* A plan made by the engine itself opens the same pools, given the same identity. */
	KV_OPTIONS(kv_pool_options, own, .name = "own", .plan = plan, .plan_pool = 1, .mapped = 1,
		   .timeout = TIMEOUT);
	must(kv_pool_open(client, &own, &none));
	lies_as_planned(none, plan, 1);
	kv_pool_close(none);
	kv_pool_close(pools[0]);
	kv_pool_close(pools[1]);
	kv_plan_free(plan);
	kv_arch_free(model);
}
END_TEST

START_TEST(windows_and_all_tokens_share_a_block_in_the_order_of_the_plan)
{
	/* 12 of 24 layers slide: their K and V lie together, before or behind the others' */
	KV_OPTIONS(kv_plan_options, planning, .budget_bytes = GIB, .layout = KV_PLAN_SPLIT,
		   .block_tokens = 16);
	struct kv_pool *pool;
	struct kv_arch *model;
	struct kv_plan *plan;

	must(kv_arch_read(MODEL("gpt-oss-20b"), &model));
	must(kv_plan_arch(model, NULL, &planning, &plan));
	KV_OPTIONS(kv_pool_options, what, .name = "oss", .plan = plan, .mapped = 1,
		   .timeout = TIMEOUT);
	must(kv_pool_open(client, &what, &pool));
	lies_as_planned(pool, plan, 0);
	works(pool);
	kv_pool_close(pool);
	kv_plan_free(plan);
	kv_arch_free(model);
}
END_TEST

START_TEST(an_encoders_output_is_a_block_of_its_tokens)
{
	/* 4 layers of 5,120 B a token, 1,500 tokens */
	KV_OPTIONS(kv_pool_options, what, .name = "ear", .config = MODEL("whisper-large-v3-turbo"),
		   .plan_pool = 1, .timeout = TIMEOUT);
	struct kv_pool_info info;
	struct kv_pool *pool;

	must(kv_pool_open(client, &what, &pool));
	kv_pool_info(pool, &info);
	ck_assert_uint_eq(info.block_tokens, 1500);
	ck_assert_uint_eq(info.block_bytes, 4 * 5120 * 1500);
	ck_assert_uint_eq(pool_stats(client, "ear.cross").block_bytes, 4 * 5120 * 1500);
	kv_pool_close(pool);
}
END_TEST

/* Every component of a pool lies where the plan says, inside the block. */
static void views_follow(const struct kv_plan *plan, uint32_t plan_pool, struct kv_pool *pool)
{
	struct kv_pool_info info;
	uint32_t n = 0;
	struct kv_view first;

	kv_pool_info(pool, &info);
	ck_assert_uint_le(info.block_bytes, plan->pools[plan_pool].block_bytes);
	must(kv_pool_view(pool, 0, 0, &first));
	for (uint32_t g = 0; g < plan->n_groups; g++) {
		for (uint32_t i = 0; i < plan->n_components; i++) {
			const struct kv_plan_component *c = &plan->components[i];
			struct kv_view view;

			if (c->group != g || plan->groups[g].pool != plan_pool)
				continue;
			must(kv_pool_view(pool, 0, n++, &view));
			ck_assert_int_eq(view.block_stride, (int64_t)info.block_bytes);
			ck_assert_int_eq((char *)view.base - (char *)first.base,
					 (int64_t)(c->offset - plan->components[0].offset));
			ck_assert_int_eq(view.token_stride, (int64_t)c->slot_bytes);
			ck_assert_uint_le(c->offset + (uint64_t)view.block_tokens * c->slot_bytes,
					  info.block_bytes);
		}
	}
	ck_assert_uint_eq(n, info.n_components);
}

/* DeepSeek V4: rows of 584 bytes, rows for 4 tokens and for 128, sizes rounded. gpt-oss: one slab.
 */
START_TEST(pools_whose_rows_are_no_tokens_or_whose_groups_take_turns_are_opened)
{
	static const struct {
		const char *config;
		int layout;
	} cases[] = {{MODEL("deepseek-v4-flash"), KV_PLAN_GROUPED},
		     {MODEL("gpt-oss-20b"), KV_PLAN_SLAB}};
	KV_OPTIONS(kv_plan_options, planning, .layout = cases[_i].layout,
		   .budget_bytes = (uint64_t)8 << 30, .context = 4096);
	struct kv_arch *arch;
	struct kv_plan *plan;

	must(kv_arch_read(cases[_i].config, &arch));
	must(kv_plan_arch(arch, NULL, &planning, &plan));
	for (uint32_t i = 0; i < plan->n_pools; i++) {
		char name[16];
		KV_OPTIONS(kv_pool_options, what, .name = name, .plan = plan, .plan_pool = i,
			   .max_bytes = 8 * plan->pools[i].block_bytes, .mapped = 1,
			   .timeout = TIMEOUT);
		struct kv_pool *pool;
		kv_block_id ids[4];

		snprintf(name, sizeof(name), "pool%u", i);
		must(kv_pool_open(client, &what, &pool));
		views_follow(plan, i, pool);
		must(kv_blocks_take(pool, 4, ids, TIMEOUT));
		must(kv_blocks_give(pool, 4, ids));
		kv_pool_close(pool);
	}
	kv_plan_free(plan);
	kv_arch_free(arch);
}
END_TEST

struct wanted {
	const char *model;
	uint32_t layout, n_groups;
	uint32_t kinds[3], windows[3];
};

static const struct wanted hybrids[] = {
	{MODEL("granite-4.0-h-tiny"), KV_PLAN_SPLIT, 2, {KV_GROUP_STATE, KV_GROUP_FULL}, {0}},
	{MODEL("granite-4.0-h-tiny"), KV_PLAN_FLAT, 1, {KV_GROUP_FULL}, {0}},
	{MODEL("jamba-v0.1"), KV_PLAN_GROUPED, 2, {KV_GROUP_STATE, KV_GROUP_FULL}, {0}},
	{MODEL("gpt-oss-20b"), KV_PLAN_GROUPED, 2, {KV_GROUP_WINDOW, KV_GROUP_FULL}, {128}},
	{MODEL("gpt-oss-20b"), KV_PLAN_SLAB, 2, {KV_GROUP_WINDOW, KV_GROUP_FULL}, {128}},
	{MODEL("gpt-oss-20b"), KV_PLAN_SPLIT, 1, {KV_GROUP_FULL}, {0}},
	{MODEL("llama-4-scout"), KV_PLAN_GROUPED, 2, {KV_GROUP_CHUNKED, KV_GROUP_FULL}, {8192}},
	{MODEL("mistral-7b-v0.1"), KV_PLAN_SPLIT, 1, {KV_GROUP_WINDOW}, {4096}},
	{MODEL("whisper-large-v3-turbo"), KV_PLAN_SPLIT, 1, {KV_GROUP_FULL}, {0}},
	{MODEL("llama-3-8b"), KV_PLAN_SPLIT, 1, {KV_GROUP_FULL}, {0}},
};

/* From a config to sequences, with nothing translated by hand. */
START_TEST(a_plans_groups_are_the_groups_of_sequences)
{
	const struct wanted *w = &hybrids[_i];
	uint32_t rows = w->layout != KV_PLAN_FLAT; /* a flat block has room for one state */
	KV_OPTIONS(kv_plan_options, o, .layout = w->layout, .budget_bytes = 64 * GIB, .draft_tokens = rows,
		   .n_checkpoints = 2 * rows);
	struct kv_pool *pools[8] = {NULL}, *other[8] = {NULL};
	struct kv_group groups[8];
	struct kv_groups *made;
	struct kv_arch *model;
	struct kv_plan *plan;
	struct kv_gseq *seq;
	uint32_t which[8];
	size_t hit;

	must(kv_arch_read(w->model, &model));
	must(kv_plan_arch(model, NULL, &o, &plan));
	for (uint32_t p = 0; p < plan->n_pools; p++) {
		KV_OPTIONS(kv_pool_options, what, .name = plan->pools[p].name, .plan = plan,
			   .plan_pool = p, .max_bytes = 8 * plan->pools[p].block_bytes,
			   .timeout = TIMEOUT);

		must(kv_pool_open(client, &what, &pools[p]));
	}
	ck_assert_int_eq(kv_plan_to_groups(plan, pools, &o, 0, groups, which), (int)w->n_groups);
	for (uint32_t g = 0; g < w->n_groups; g++) {
		ck_assert_uint_eq(groups[g].kind, w->kinds[g]);
		ck_assert_uint_eq(groups[g].window, w->windows[g]);
		if (groups[g].kind == KV_GROUP_STATE) {
			ck_assert_uint_eq(groups[g].interval, plan->prefix_tokens);
			ck_assert_uint_eq(groups[g].n_drafts, 1);
			ck_assert_uint_eq(groups[g].n_checkpoints, 2);
		}
	}
	for (uint32_t g = 0; g < plan->n_groups; g++) {
		if (plan->groups[g].kind == KV_GROUP_CROSS)
			ck_assert_uint_eq(which[g], UINT32_MAX);
		else
			ck_assert_ptr_eq(groups[which[g]].pool, pools[plan->groups[g].pool]);
	}
	KV_OPTIONS(kv_groups_options, what, .groups = groups, .n_groups = w->n_groups);
	must(kv_groups_new(&what, &made));
	must(kv_gseq_new(made, &seq));
	must(kv_gseq_reserve(seq, 40, TIMEOUT));
	must(kv_gseq_append(seq, tokens_of(1, 40), 40));
	must(kv_gseq_publish(seq, NULL));
	kv_gseq_free(seq, NULL);
	must(kv_gseq_new(made, &seq));
	must(kv_gseq_lookup(seq, tokens_of(1, 40), 40, &hit));
	kv_gseq_free(seq, NULL);
	kv_groups_free(made);

	refused(kv_plan_to_groups(plan, other, &o, 0, groups, NULL), -EINVAL, "none given");
	other[0] = pool_new(client, "small", 4);
	for (uint32_t p = 1; p < plan->n_pools; p++)
		other[p] = other[0];
	refused(kv_plan_to_groups(plan, other, &o, 0, groups, NULL), -EINVAL, "2048 bytes");
	kv_pool_close(other[0]);
	for (uint32_t p = 0; p < plan->n_pools; p++)
		kv_pool_close(pools[p]);
	kv_plan_free(plan);
	kv_arch_free(model);
}
END_TEST

START_TEST(of_several_windows_in_a_block_the_widest_is_kept)
{
	struct kv_plan_group both[] = {{.kind = KV_GROUP_WINDOW, .window = 128, .block_tokens = BLOCK_TOKENS},
				       {.kind = KV_GROUP_WINDOW, .window = 512, .block_tokens = BLOCK_TOKENS}};
	struct kv_plan_pool planned = {.block_tokens = BLOCK_TOKENS, .block_bytes = BLOCK_BYTES};
	struct kv_plan plan = {.layout = KV_PLAN_SPLIT, .n_groups = 2, .n_pools = 1, .groups = both, .pools = &planned};
	struct kv_pool *pool = pool_new(client, "small", 4);
	struct kv_group groups[2];

	ck_assert_int_eq(kv_plan_to_groups(&plan, &pool, NULL, 0, groups, NULL), 1);
	ck_assert_uint_eq(groups[0].window, 512);
	both[0].window = 512;
	both[1].window = 128;
	ck_assert_int_eq(kv_plan_to_groups(&plan, &pool, NULL, 0, groups, NULL), 1);
	ck_assert_uint_eq(groups[0].window, 512);
	kv_pool_close(pool);
}
END_TEST

START_TEST(groups_that_fill_a_slabs_blocks_with_different_tokens_are_refused)
{
	KV_OPTIONS(kv_plan_options, o, .layout = KV_PLAN_SLAB, .budget_bytes = 64 * GIB);
	KV_OPTIONS(kv_pool_options, what, .name = "slab", .timeout = TIMEOUT);
	struct kv_group groups[4];
	struct kv_pool *pool;
	struct kv_arch *model;
	struct kv_plan *plan;

	must(kv_arch_read(MODEL("gemma-3-27b"), &model));
	must(kv_plan_arch(model, NULL, &o, &plan));
	what.plan = plan;
	what.max_bytes = 8 * plan->pools[0].block_bytes;
	must(kv_pool_open(client, &what, &pool));
	refused(kv_plan_to_groups(plan, &pool, NULL, 0, groups, NULL), -ENOTSUP, "64 tokens in a block");
	kv_pool_close(pool);
	kv_plan_free(plan);
	kv_arch_free(model);
}
END_TEST

START_TEST(a_pool_that_no_layout_can_express_is_refused_with_the_reason)
{
	KV_OPTIONS(kv_plan_options, planning, .layout = KV_PLAN_SPLIT, .block_tokens = 131072);
	KV_OPTIONS(kv_pool_options, what, .name = "large", .config = MODEL("llama-3-8b"),
		   .planning = &planning, .timeout = TIMEOUT);
	struct kv_pool *pool = NULL;

	refused(kv_pool_open(client, &what, &pool), -ENOTSUP, "131072 tokens");
	ck_assert_ptr_null(pool);
}
END_TEST

START_TEST(what_is_wrong_with_the_options_is_named)
{
	KV_OPTIONS(kv_plan_options, planning, .tp = 2);
	KV_OPTIONS(kv_pool_options, what, .name = "x", .config = MODEL("llama-3-8b"),
		   .planning = &planning, .timeout = TIMEOUT);
	char name[KV_NAME_MAX];
	struct kv_pool *pool;

	what.layout = small_layout();
	refused(kv_pool_open(client, &what, &pool), -EINVAL, "layout, plan, config: one");
	what.layout = NULL;
	what.tp_ranks = 4;
	refused(kv_pool_open(client, &what, &pool), -EINVAL, "tp_ranks: 4 given");
	what.tp_ranks = 0;
	planning.tp = 3;
	refused(kv_pool_open(client, &what, &pool), -EINVAL, "llama-3-8b.json: tp: 3");
	planning.tp = 0;
	planning.size = 1;
	refused(kv_pool_open(client, &what, &pool), -EINVAL, "planning.size: 1 given");
	planning.size = sizeof(planning);
	planning.budget_bytes = 1 << 20;
	refused(kv_pool_open(client, &what, &pool), -ENOSPC, "budget_bytes: 1048576 given");
	planning.budget_bytes = 0;
	what.config = "/nonexistent/config.json";
	refused(kv_pool_open(client, &what, &pool), -ENOENT, "/nonexistent/config.json");
	what.config = NULL;
	refused(kv_pool_open(client, &what, &pool), -EINVAL, "planning: given without");

	/* ".state" must fit, too */
	memset(name, 'n', sizeof(name));
	name[sizeof(name) - 3] = 0;
	what.name = name;
	what.config = MODEL("nemotron-h-8b");
	refused(kv_pool_open(client, &what, &pool), -EINVAL, "name: 'nnn");
	what.name = NULL;
	what.config = MODEL("llama-3-8b");
	refused(kv_pool_open(client, &what, &pool), -EINVAL, "name: empty");
}
END_TEST

START_TEST(options_of_a_program_built_before_plans_are_read_as_far_as_they_go)
{
	KV_OPTIONS(kv_pool_options, what, .name = "old", .layout = small_layout(),
		   .timeout = TIMEOUT);
	struct kv_pool *pool;

	what.size = offsetof(struct kv_pool_options, plan);
	memset(&what.plan, 0xa5, sizeof(what) - what.size);
	must(kv_pool_open(client, &what, &pool));
	works(pool);
	kv_pool_close(pool);
}
END_TEST

/* ---- kvcached --pool ---- */

START_TEST(a_daemon_makes_pools_before_its_first_client_comes)
{
	/* 16 tokens of 131,072 B: 2 MiB; at most 100 MiB, 16 MiB of it guaranteed */
	KV_OPTIONS(kv_plan_options, planning, .block_tokens = 16);
	KV_OPTIONS(kv_pool_options, what, .name = "llama", .config = MODEL("llama-3-8b"),
		   .planning = &planning, .timeout = TIMEOUT);
	KV_OPTIONS(kv_pool_options, named, .name = "named", .timeout = TIMEOUT);
	struct kv_pool_stats stats;
	struct kv_pool_info info;
	struct kv_pool *pool;

	daemon_start("--host", "1G", "--pool",
		     "llama=" MODEL("llama-3-8b") ",block-size=16,min=16M,max=101M,weight=7", "--pool",
		     "named=" MODEL("qwen3-32b") ",kv-dtype=fp8,tp=8,model=Qwen3,revision=abc");
	client = client_new();
	stats = pool_stats(client, "llama");
	ck_assert_uint_eq(stats.block_bytes, 2 << 20);
	ck_assert_uint_eq(stats.weight, 7);
	ck_assert_uint_eq(stats.n_sessions, 0);

	/* An engine with the same config attaches; so does one that takes it as it is. */
	must(kv_pool_open(client, &what, &pool));
	kv_pool_info(pool, &info);
	ck_assert_uint_eq(info.max_blocks, 50 - 1);
	works(pool);
	kv_pool_close(pool);
	named.model = "Qwen3";
	named.revision = "abc";
	named.tp_ranks = 8;
	must(kv_pool_open(client, &named, &pool));
	kv_pool_info(pool, &info);
	/* 64 layers, K and V of one head of 128 in a byte, 64 tokens */
	ck_assert_uint_eq(info.block_bytes, 64 * 2 * 128 * 64);
	kv_pool_close(pool);
	planning.block_tokens = 32;
	refused(kv_pool_open(client, &what, &pool), -EEXIST, "block_tokens");
	teardown();
}
END_TEST

START_TEST(what_is_guaranteed_at_the_start_is_kept_from_others)
{
	KV_OPTIONS(kv_pool_options, greedy, .name = "greedy", .layout = small_layout(),
		   .min_bytes = 400 << 20, .timeout = TIMEOUT);
	struct kv_pool *pool;

	daemon_start("--host", "512M", "--pool",
		     "hybrid=" MODEL("nemotron-h-8b") ",min=300M,context=4096");
	client = client_new();
	ck_assert_uint_eq(pool_stats(client, "hybrid.blocks").block_bytes, 64 * 4 * 4096);
	ck_assert_uint_eq(pool_stats(client, "hybrid.state").block_bytes, 24 * (61440 + 4194304));
	refused(kv_pool_open(client, &greedy, &pool), -ENOMEM, "promised to other pools");
	teardown();
}
END_TEST

static const struct {
	const char *pool;
	int status;
	const char *words;
} wishes[] = {
	{"llama", 2, "--pool: 'llama' given; NAME=CONFIG"},
	{"=x.json", 2, "NAME=CONFIG"},
	{"x=", 2, "NAME=CONFIG"},
	{"x=x.json,often", 2, "--pool x: 'often' is not of the form KEY=VALUE"},
	{"x=x.json,often=1", 2, "--pool x: 'often' is no key"},
	{"x=x.json,min=much", 2, "--pool x: min: 'much' is not a size"},
	{"x=x.json,weight=0", 2, "--pool x: weight: '0' given, 1 to 10000"},
	{"x=x.json,weight=10001", 2, "1 to 10000"},
	{"x=x.json,weight=2x", 2, "1 to 10000"},
	{"x=x.json,min=2G,max=1G", 2, "--pool x: min: more than max"},
	{"x=x.json,kv-dtype=q5", 2, "kv-dtype: 'q5' given; auto, f32"},
	{"x=x.json,gpus=a", 2, "gpus: 'a'"},
	{"x=x.json,gpus=0+", 2, "gpus: '0+'"},
	{"x=x.json,model=", 2, "model: ''"},
	{"nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn=x.json", 2,
	 "more than 63 bytes"},
	{"x=/nonexistent.json", 1, "--pool x: /nonexistent.json: No such file"},
	{"x=/dev/null", 1, "--pool x: /dev/null: is no file"},
	{"x=" MODEL("llama-3-8b") ",tp=3", 1, "llama-3-8b.json: tp: 3 ranks"},
	{"x=" MODEL("llama-3-8b") ",max=1M", 1, "x: max: "},
	{"x=" MODEL("llama-3-8b") ",min=1M", 1, "x: min: "},
	{"x=" MODEL("llama-3-8b") ",min=2G", 1, "min_bytes"},
	{"x=" MODEL("llama-3-8b") ",gpus=0+3", 1, "gpus: mask 0x9"},
	{"twice=" MODEL("llama-3-8b"), 1, "'twice' already"},
};

START_TEST(a_pool_that_cannot_be_made_ends_the_start_with_file_and_field)
{
	char text[2000];

	ck_assert_int_eq(daemon_refused(text, sizeof(text), "--host", "1G", "--pool",
					"twice=" MODEL("llama-2-7b"), "--pool", wishes[_i].pool),
			 wishes[_i].status);
	ck_assert_msg(strstr(text, wishes[_i].words), "'%s' says nothing of '%s'", text,
		      wishes[_i].words);
	ck_assert_int_lt(access(daemon_socket(), F_OK), 0);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/plan_pool");
	TCase *t = tcase_create("library");

	tcase_set_timeout(t, 60);
	tcase_add_checked_fixture(t, setup, teardown);
	tcase_add_test(t, a_config_opens_a_pool_and_no_bytes_are_typed);
	tcase_add_test(t, a_hybrid_model_has_a_pool_for_blocks_and_one_for_states);
	tcase_add_test(t, windows_and_all_tokens_share_a_block_in_the_order_of_the_plan);
	tcase_add_test(t, an_encoders_output_is_a_block_of_its_tokens);
	tcase_add_loop_test(t, a_plans_groups_are_the_groups_of_sequences, 0,
			    sizeof(hybrids) / sizeof(hybrids[0]));
	tcase_add_test(t, of_several_windows_in_a_block_the_widest_is_kept);
	tcase_add_test(t, groups_that_fill_a_slabs_blocks_with_different_tokens_are_refused);
	tcase_add_test(t, a_pool_that_no_layout_can_express_is_refused_with_the_reason);
	tcase_add_loop_test(t, pools_whose_rows_are_no_tokens_or_whose_groups_take_turns_are_opened,
			    0, 2);
	tcase_add_test(t, what_is_wrong_with_the_options_is_named);
	tcase_add_test(t, options_of_a_program_built_before_plans_are_read_as_far_as_they_go);
	suite_add_tcase(s, t);

	t = tcase_create("daemon");
	tcase_set_timeout(t, 60);
	tcase_add_test(t, a_daemon_makes_pools_before_its_first_client_comes);
	tcase_add_test(t, what_is_guaranteed_at_the_start_is_kept_from_others);
	tcase_add_loop_test(t, a_pool_that_cannot_be_made_ends_the_start_with_file_and_field, 0,
			    sizeof(wishes) / sizeof(wishes[0]));
	suite_add_tcase(s, t);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
