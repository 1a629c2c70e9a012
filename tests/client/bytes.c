/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/client/bytes.h"

const int32_t *branch_of(int32_t prompt, size_t at, size_t n)
{
	static int32_t tokens[BRANCH_MOST];

	ck_assert_uint_le(n, BRANCH_MOST);
	memcpy(tokens, tokens_of(1, n), n * sizeof(*tokens));
	for (size_t i = at; i < n; i++)
		tokens[i] = prompt * 1000 + (int32_t)i;
	return tokens;
}

struct kv_pool *bytes_pool(struct kv_client *client, const char *name, uint32_t block_tokens,
			   uint32_t n_blocks)
{
	struct kv_component components[BYTES_COMPONENTS];
	struct kv_layout layout = {.kind = KV_LAYOUT_FLAT, .block_tokens = block_tokens,
				   .components = components};
	KV_OPTIONS(kv_pool_options, what, .name = name, .layout = &layout, .mapped = 1,
		   .max_bytes = (n_blocks + 1) * (uint64_t)block_tokens * BYTES_TOKEN, .timeout = TIMEOUT);
	struct kv_pool *p;

	layout.n_components = kv_layout_uniform(components, BYTES_COMPONENTS / 2, 1, 8, KV_F32, 1, 1);
	must(kv_pool_open(client, &what, &p));
	return p;
}

static uint32_t mix(uint32_t hash, int32_t token)
{
	hash = (hash ^ (uint32_t)token) * 0x9e3779b1u;
	return hash ^ hash >> 15;
}

static uint32_t number_at(const struct kv_seq *seq, size_t position)
{
	uint32_t hash = 1;

	for (size_t i = 0; i <= position; i++)
		hash = mix(hash, kv_seq_tokens(seq)[i]);
	return hash;
}

/* The vector of a token in component @i: [8] words. */
static uint32_t *vector(struct kv_pool *p, uint32_t i, int64_t slot)
{
	struct kv_view v;

	must(kv_pool_view(p, 0, i, &v));
	return (uint32_t *)((char *)v.base + slot / v.block_tokens * v.block_stride +
			    slot % v.block_tokens * v.token_stride);
}

void bytes_step(struct kv_pool *p, struct kv_batch *b, const struct kv_batch_item *items, uint32_t n)
{
	const struct kv_batch_data *d = kv_batch_data(b);

	must(kv_batch_build(b, items, n, 0, 0));
	must(kv_batch_copy(b, NULL));
	for (uint32_t i = 0; i < n; i++) {
		for (int32_t t = d->query_start_loc[i]; t < d->query_start_loc[i + 1]; t++) {
			uint32_t number = number_at(items[i].seq, (size_t)d->positions[t]);

			for (uint32_t c = 0; c < BYTES_COMPONENTS; c++) {
				for (int k = 0; k < 8; k++)
					vector(p, c, d->slots[t])[k] = number + c;
			}
		}
	}
}

void bytes_right(struct kv_pool *p, const struct kv_seq *seq, const char *what, int round)
{
	const kv_block_id *ids;
	struct kv_pool_info info;
	uint32_t number = 1;

	kv_seq_blocks(seq, &ids);
	kv_pool_info(p, &info);
	for (size_t i = 0; i < kv_seq_len(seq); i++) {
		kv_block_id id = ids[i / info.block_tokens];
		int64_t slot = (int64_t)id * info.block_tokens + (int64_t)(i % info.block_tokens);

		number = mix(number, kv_seq_tokens(seq)[i]);
		for (uint32_t c = 0; id != info.null_block && c < BYTES_COMPONENTS; c++) {
			const uint32_t *v = vector(p, c, slot);

			for (int k = 0; k < 8; k++)
				expect(v[k] == number + c,
				       "%s (round %d): token %zu of %zu has other bytes in block %d", what,
				       round, i, kv_seq_len(seq), id);
		}
	}
}
