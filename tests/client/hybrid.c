/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "tests/client/hybrid.h"

const char *const model_names[3] = {"model.full", "model.window", "model.state"};
uint32_t model_row_floats = 64;

/* Beside each value stands which pool it is in: bytes of another pool that were not zeroed are noticed. */
#define MARK 0x4d4f4400u

struct kv_pool *open_pool(struct kv_client *client, const char *name, uint32_t block_tokens,
				  uint32_t n_blocks)
{
	struct kv_component k = {.role = KV_ROLE_K, .dtype = KV_F32, .n_heads = 1,
				 .head_dim = model_row_floats, .scale = 1};
	struct kv_layout layout = {.kind = KV_LAYOUT_FLAT, .block_tokens = block_tokens,
				   .n_components = 1, .components = &k};
	KV_OPTIONS(kv_pool_options, what, .name = name, .layout = &layout, .mapped = 1,
		   .max_bytes = n_blocks ? (uint64_t)(n_blocks + 1) * block_tokens * model_row_floats * 4 : 0);
	struct kv_pool *pool;

	must(kv_pool_open(client, &what, &pool));
	return pool;
}

void model_open(struct model *model, uint32_t n_blocks, uint32_t n_rows, uint32_t n_drafts)
{
	struct kv_group groups[3] = {
		{.kind = KV_GROUP_FULL},
		{.kind = KV_GROUP_WINDOW, .window = WINDOW},
		{.kind = KV_GROUP_STATE, .interval = INTERVAL, .n_drafts = n_drafts}};
	KV_OPTIONS(kv_groups_options, what, .groups = groups, .n_groups = 3);

	model->client = client_new();
	for (int g = 0; g < 3; g++) {
		model->pools[g] = open_pool(model->client, model_names[g], g == STATE_G ? 1 : SIZE,
					    g == STATE_G ? n_rows : n_blocks);
		groups[g].pool = model->pools[g];
		must(kv_pool_view(model->pools[g], 0, 0, &model->views[g]));
	}
	must(kv_groups_new(&what, &model->groups));
}

void model_close(struct model *model)
{
	kv_groups_free(model->groups);
	for (int g = 0; g < 3; g++)
		kv_pool_close(model->pools[g]);
	kv_disconnect(model->client);
}

static uint32_t *token_at(const struct model *model, int g, const struct kv_gseq *seq, size_t p)
{
	const kv_block_id *ids;
	struct kv_pool_info info;

	kv_pool_info(model->pools[g], &info);
	kv_seq_blocks(kv_gseq_seq(seq, (uint32_t)g), &ids);
	expect(ids[p / SIZE] != info.null_block, "group %d: token %zu has no block", g, p);
	return (uint32_t *)(void *)((char *)model->views[g].base +
				    ids[p / SIZE] * model->views[g].block_stride +
				    (int64_t)(p % SIZE) * model->views[g].token_stride);
}

static uint32_t *row_at(const struct model *model, int32_t row)
{
	return (uint32_t *)(void *)((char *)model->views[STATE_G].base +
				    row * model->views[STATE_G].block_stride);
}

static void put(uint32_t *row, int g, uint32_t value)
{
	expect(row[1] == 0 || row[1] == MARK + (uint32_t)g, "%s: memory has bytes of another pool (%#x)",
	       model_names[g], row[1]);
	row[0] = value;
	row[1] = MARK + (uint32_t)g;
}

uint64_t expected_output(const int32_t *tokens, size_t n)
{
	uint32_t state = 0, all = 0, window = 0;

	for (size_t i = 0; i < n; i++) {
		state = state * 31 + (uint32_t)tokens[i];
		all += (uint32_t)tokens[i] * 7 + (uint32_t)i;
		if (i + WINDOW >= n)
			window = window * 5 + (uint32_t)tokens[i] * 3;
	}
	return ((uint64_t)state << 32) ^ ((uint64_t)all << 16) ^ window;
}

uint64_t model_run(const struct model *model, struct kv_gseq *seq, const int32_t *tokens, size_t n)
{
	int32_t read[3], write[3], computed[3], steps[3][1 + N_DRAFTS], table[3][32];
	struct kv_state_lanes lanes = {.read_rows = read, .write_rows = write,
				       .n_computed = computed, .step_rows = steps[0],
				       .table = table[0], .table_width = 32};
	size_t len = kv_gseq_len(seq);
	uint32_t state = 0, all = 0, window = 0;

	must(kv_state_lanes(&seq, 1, 3, STATE_G, &lanes));
	expect(computed[0] == (int32_t)(len - n), "%d tokens computed", computed[0]);
	if (computed[0])
		state = *row_at(model, read[0]);
	for (size_t i = len - n; i < len; i++) {
		put(token_at(model, FULL_G, seq, i), FULL_G, (uint32_t)tokens[i] * 7 + (uint32_t)i);
		put(token_at(model, WINDOW_G, seq, i), WINDOW_G, (uint32_t)tokens[i] * 3);
		state = state * 31 + (uint32_t)tokens[i];
		if (steps[0][0] >= 0)
			put(row_at(model, steps[0][i - (len - n)]), STATE_G, state);
		if ((i + 1) % INTERVAL == 0 && table[0][(i + 1) / INTERVAL - 1] >= 0)
			put(row_at(model, table[0][(i + 1) / INTERVAL - 1]), STATE_G, state);
	}
	if (write[0] >= 0)
		put(row_at(model, write[0]), STATE_G, state);
	for (size_t i = 0; i < len; i++) {
		all += *token_at(model, FULL_G, seq, i);
		if (i + WINDOW >= len)
			window = window * 5 + *token_at(model, WINDOW_G, seq, i);
	}
	return ((uint64_t)state << 32) ^ ((uint64_t)all << 16) ^ window;
}

void model_copy(const struct model *model, struct kv_gseq *seq)
{
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = 1, .max_tokens = 64, .max_blocks_per_seq = 128);

	for (uint32_t g = 0; g < 2; g++) {
		struct kv_batch_item item = {kv_gseq_seq(seq, g), 1};
		struct kv_batch *batch;

		must(kv_batch_new(model->pools[g], &sizes, &batch));
		must(kv_batch_build(batch, &item, 1, 0, 0));
		must(kv_batch_copy(batch, NULL));
		kv_batch_free(batch);
	}
}
