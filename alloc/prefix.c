/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>

#include "alloc/prefix.h"

#define CROWDED 6u /* places of a bucket that are taken */

uint32_t kv_prefix_buckets(uint32_t id_limit)
{
	uint64_t places = (uint64_t)id_limit * 2;
	uint32_t n = 2;

	while ((uint64_t)n * KV_BUCKET_WORDS < places)
		n *= 2;
	return n;
}

static uint64_t *bucket_of(struct kv_prefix *prefix, struct kv_key key, int i)
{
	return prefix->words + (uint64_t)kv_prefix_bucket(prefix, key, i) * KV_BUCKET_WORDS;
}

/* How many places of a bucket are taken, and the first free one from the key's own on. */
static uint32_t count(uint64_t *bucket, uint32_t place, uint64_t **ret_empty)
{
	uint32_t n = 0;

	*ret_empty = NULL;
	for (uint32_t i = 0; i < KV_BUCKET_WORDS; i++) {
		uint64_t *word = &bucket[(place + i) % KV_BUCKET_WORDS];

		if (*word)
			n++;
		else if (!*ret_empty)
			*ret_empty = word;
	}
	return n;
}

int kv_prefix_insert(struct kv_prefix *prefix, struct kv_key key, int32_t id)
{
	uint64_t *empty[2];
	uint32_t n[2];

	for (int i = 0; i < 2; i++)
		n[i] = count(bucket_of(prefix, key, i), kv_prefix_place(key), &empty[i]);
	if (!empty[0] && !empty[1])
		return -ENOSPC;

	/* The first is looked at first; before it fills up the emptier of the two is taken. */
	kv_store_release(empty[n[0] >= CROWDED && n[1] < n[0]],
			 (uint64_t)(uint32_t)key.hi << 32 | (uint32_t)(id + 1));
	return 0;
}

int kv_prefix_remove(struct kv_prefix *prefix, struct kv_key key, int32_t id)
{
	uint64_t word = (uint64_t)(uint32_t)key.hi << 32 | (uint32_t)(id + 1);

	for (int i = 0; i < 2; i++) {
		uint64_t *bucket = bucket_of(prefix, key, i);

		for (int k = 0; k < KV_BUCKET_WORDS; k++) {
			if (bucket[k] == word) {
				kv_store_release(&bucket[k], 0);
				return 0;
			}
		}
	}
	return -ENOENT;
}

int kv_prefix_rename(struct kv_prefix *prefix, struct kv_key key, int32_t from, int32_t to)
{
	uint64_t tag = (uint64_t)(uint32_t)key.hi << 32;

	for (int i = 0; i < 2; i++) {
		uint64_t *bucket = bucket_of(prefix, key, i);

		for (int k = 0; k < KV_BUCKET_WORDS; k++) {
			if (bucket[k] == (tag | (uint32_t)(from + 1))) {
				kv_store_release(&bucket[k], tag | (uint32_t)(to + 1));
				return 0;
			}
		}
	}
	return -ENOENT;
}
