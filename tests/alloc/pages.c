/* SPDX-License-Identifier: Apache-2.0 */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "tests/alloc/pages.h"
#include "tests/support/expect.h"

static void *zeroed(uint64_t bytes)
{
	void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);

	ck_assert_ptr_nonnull(p);
	memset(p, 0, (bytes + 63) / 64 * 64);
	return p;
}

void pages_init_extents(struct pages *p, uint32_t n_blocks, uint32_t block_tokens,
			uint32_t extent_blocks)
{
	const uint32_t id_limit = n_blocks + 1;
	const uint64_t descriptors = 4096;
	const uint64_t tokens = descriptors + id_limit * sizeof(struct kv_shm_block);
	const uint64_t rows = tokens + ((uint64_t)id_limit * block_tokens * 4 + 63) / 64 * 64;

	*p = (struct pages){
		.head = {.seed = 1234,
			 .key_mask = UINT64_MAX,
			 .block_tokens = block_tokens,
			 .block_bytes = 64,
			 .id_limit = id_limit,
			 .n_buckets = kv_prefix_buckets(id_limit),
			 .n_stem_buckets = kv_stem_buckets(id_limit, block_tokens),
			 .descriptors_offset = descriptors,
			 .tokens_offset = tokens,
			 .rows_offset = rows,
			 .blocks_bytes = rows + id_limit * sizeof(struct kv_shm_row)},
		.key_mask = UINT64_MAX,
	};
	p->index = zeroed((p->head.n_buckets + p->head.n_stem_buckets) * KV_BUCKET_WORDS * sizeof(uint64_t));
	p->shared = zeroed(p->head.blocks_bytes);
	((struct kv_shm_blocks *)p->shared)->clock = 1;
	ck_assert_int_eq(kv_books_init(&p->books, &p->head, p->index, p->shared), 0);
	if (extent_blocks) {
		ck_assert_int_eq(kv_books_set_extents(&p->books, extent_blocks * p->head.block_bytes), 0);
		for (uint32_t i = 0; i * extent_blocks < id_limit; i++)
			kv_space_own(&p->books.space, i, true);
	}
	for (int32_t id = 0; id <= (int32_t)n_blocks; id++)
		expect(!kv_books_add(&p->books, id), "add %d", id);
}

void pages_init(struct pages *p, uint32_t n_blocks, uint32_t block_tokens)
{
	pages_init_extents(p, n_blocks, block_tokens, 0);
}

void pages_deinit(struct pages *p)
{
	kv_books_deinit(&p->books);
	free(p->index);
	free(p->shared);
}

void pages_check(const struct pages *p, const bool *live, const char *what)
{
	char text[200] = "";
	uint64_t n = kv_books_check(&p->books, live, text, sizeof(text));

	expect(!n, "%s: %llu errors, the first: %s", what, (unsigned long long)n, text);
}

struct kv_key pages_key(const struct pages *p, struct kv_key parent, const int32_t *tokens)
{
	struct kv_key key = kv_key_next(p->head.seed, parent, tokens, p->head.block_tokens);

	return (struct kv_key){key.lo & p->key_mask, key.hi & p->key_mask};
}

static struct kv_shm_block *descriptor(const struct pages *p, int32_t id)
{
	return &p->books.descriptors[id];
}

uint32_t pages_state(const struct pages *p, int32_t id)
{
	return kv_block_state(kv_load_acquire(&descriptor(p, id)->word));
}

static uint64_t bit_of(uint32_t slot)
{
	return (uint64_t)1 << slot % 64;
}

bool pages_is_held(const struct pages *p, int32_t id, uint32_t slot)
{
	return descriptor(p, id)->holders[slot / 64] & bit_of(slot);
}

bool client_pin(struct pages *p, int32_t id, uint32_t slot)
{
	kv_or_seq(&descriptor(p, id)->holders[slot / 64], bit_of(slot));
	if (kv_block_state(kv_load_seq(&descriptor(p, id)->word)) == KV_BLOCK_CACHED)
		return true;
	client_unpin(p, id, slot);
	return false;
}

void client_unpin(struct pages *p, int32_t id, uint32_t slot)
{
	kv_and_release(&descriptor(p, id)->holders[slot / 64], ~bit_of(slot));
}

int32_t client_find(struct pages *p, uint32_t slot, struct kv_key key, uint64_t parent_serial,
		    const int32_t *tokens)
{
	uint32_t cursor = 0;
	int32_t id;

	while ((id = kv_prefix_find(&p->books.prefix, key, &cursor)) >= 0) {
		const struct kv_shm_block *d = descriptor(p, id);
		bool had = pages_is_held(p, id, slot);

		if (!client_pin(p, id, slot))
			continue;
		if (d->key_lo == key.lo && d->key_hi == key.hi &&
		    d->parent_serial == parent_serial &&
		    !memcmp(kv_shm_tokens(p->shared, &p->head, id), tokens,
			    p->head.block_tokens * sizeof(*tokens)))
			return id;
		if (!had)
			client_unpin(p, id, slot);
	}
	return -1;
}

int client_publish(struct pages *p, uint32_t slot, int32_t id, int32_t parent, struct kv_key key,
		   const int32_t *tokens, uint64_t stamp)
{
	struct kv_op op = {.kind = KV_OP_PUBLISH,
			   .id = id,
			   .parent = parent,
			   .key_lo = key.lo,
			   .key_hi = key.hi,
			   .stamp = stamp};

	if (parent >= 0 && pages_state(p, parent) == KV_BLOCK_CACHED)
		op.parent_serial = descriptor(p, parent)->serial;
	memcpy(kv_shm_tokens(p->shared, &p->head, id), tokens,
	       p->head.block_tokens * sizeof(*tokens));
	return kv_books_publish(&p->books, slot, &op);
}
