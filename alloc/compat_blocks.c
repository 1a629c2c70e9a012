/* SPDX-License-Identifier: Apache-2.0 */
/* Reference calculators: one pool of blocks with an ordered free list and an index of keys. */
#include <stdlib.h>
#include <string.h>

#include "alloc/compat_cache.h"
#include "include/internal/error.h"

static void unlink_free(struct kv_compat_blocks *p, int32_t id)
{
	struct kv_compat_block *b = &p->block[id];

	p->block[b->prev].next = b->next;
	p->block[b->next].prev = b->prev;
	p->n_free--;
}

static void append_free(struct kv_compat_blocks *p, int32_t id)
{
	struct kv_compat_block *b = &p->block[id];

	b->prev = p->block[0].prev;
	b->next = 0;
	p->block[b->prev].next = id;
	p->block[0].prev = id;
	p->n_free++;
}

int kv_compat_blocks_init(struct kv_compat_blocks *p, int32_t n, bool caching)
{
	memset(p, 0, sizeof(*p));
	p->block = calloc((size_t)kv_max64(n, 1), sizeof(*p->block));
	if (!p->block)
		return kv_error(KV_FAULT_NO_MEMORY, "no memory for %d blocks", n);
	p->n = n;
	p->caching = caching;
	for (int32_t id = 1; id < n; id++)
		append_free(p, id);
	return 0;
}

void kv_compat_blocks_deinit(struct kv_compat_blocks *p)
{
	free(p->block);
	p->block = NULL;
}

int32_t kv_compat_blocks_alloc(struct kv_compat_blocks *p, int32_t n, int32_t *ret_ids)
{
	if (n <= 0 || n > p->n_free)
		return 0;
	for (int32_t i = 0; i < n; i++) {
		struct kv_compat_block *b;

		ret_ids[i] = p->block[0].next;
		b = &p->block[ret_ids[i]];
		if (b->key.set)
			p->n_cached--;
		b->key.set = 0;
		unlink_free(p, ret_ids[i]);
		b->refs = 1;
	}
	return n;
}

int kv_compat_blocks_free(struct kv_compat_blocks *p, const int32_t *ids, size_t n)
{
	while (n-- > 0) {
		struct kv_compat_block *b = &p->block[ids[n]];

		if (!ids[n])
			continue;
		if (b->refs < 1)
			return kv_error(KV_FAULT_REF_UNDERFLOW,
					"block %d: freed and held by nobody", ids[n]);
		if (!--b->refs)
			append_free(p, ids[n]);
	}
	return 0;
}

int kv_compat_blocks_register(struct kv_compat_blocks *p, int32_t id,
			      const struct kv_compat_key *key)
{
	struct kv_compat_block *b = &p->block[id];

	if (!id || !p->caching)
		return 0;
	if (b->key.set)
		return kv_error(KV_FAULT_ALREADY_HASHED, "block %d: has a key", id);
	b->key = *key;
	b->key.set = 1;
	b->registered = ++p->clock;
	p->n_cached++;
	return 0;
}

int32_t kv_compat_blocks_find(const struct kv_compat_blocks *p, const struct kv_compat_key *key)
{
	int32_t found = 0;

	for (int32_t id = 1; id < p->n; id++) {
		const struct kv_compat_block *b = &p->block[id];

		if (b->key.set && b->key.group == key->group &&
		    !memcmp(b->key.hash, key->hash, KV_COMPAT_HASH) &&
		    (!found || b->registered < p->block[found].registered))
			found = id;
	}
	return found;
}

void kv_compat_blocks_touch(struct kv_compat_blocks *p, int32_t id)
{
	if (!id)
		return;
	if (!p->block[id].refs)
		unlink_free(p, id);
	p->block[id].refs++;
}
