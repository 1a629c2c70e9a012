/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of blocks as other programs make them: CBOR messages, and two hashes of those. */
#define XXH_INLINE_ALL
#include <errno.h>
#include <kvcached/keys.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "alloc/sha256.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/public.h"

#define DEFAULT_SEED "vllm-none-hash"
#define HEAD_BYTES   9 /* of the longest head of an item */

enum cbor { CBOR_UINT = 0, CBOR_NEGATIVE = 1, CBOR_BYTES = 2, CBOR_TEXT = 3, CBOR_ARRAY = 4 };

/* A message, in memory that it fits. */
struct message {
	uint8_t *at;
};

static void put_head(struct message *m, enum cbor type, uint64_t n)
{
	int bytes = n < 24 ? 0 : n < 1 << 8 ? 1 : n < 1 << 16 ? 2 : n <= UINT32_MAX ? 4 : 8;
	int code = bytes == 0 ? (int)n : bytes == 1 ? 24 : bytes == 2 ? 25 : bytes == 4 ? 26 : 27;

	*m->at++ = (uint8_t)((int)type << 5 | code);
	for (int i = bytes - 1; i >= 0; i--)
		*m->at++ = (uint8_t)(n >> 8 * i);
}

static void put_data(struct message *m, enum cbor type, const void *data, size_t n)
{
	put_head(m, type, n);
	memcpy(m->at, data, n);
	m->at += n;
}

static void put_text(struct message *m, const char *text)
{
	put_data(m, CBOR_TEXT, text, strlen(text));
}

static void put_int(struct message *m, int64_t x)
{
	if (x < 0)
		put_head(m, CBOR_NEGATIVE, (uint64_t) - (x + 1));
	else
		put_head(m, CBOR_UINT, (uint64_t)x);
}

static void hash_message(int hash, const uint8_t *message, size_t n, uint8_t *ret)
{
	if (hash == KV_KEYS_SHA256) {
		struct kv_sha256 s;

		kv_sha256_start(&s);
		kv_sha256_add(&s, message, n);
		kv_sha256_end(&s, ret);
	} else {
		XXH128_canonical_t c;

		XXH128_canonicalFromHash(&c, XXH3_128bits(message, n));
		memcpy(ret, c.digest, sizeof(c.digest));
	}
}

KV_PUBLIC size_t kv_keys_bytes(int hash)
{
	return hash == KV_KEYS_SHA256 ? 32 : hash == KV_KEYS_XXH3 ? 16 : 0;
}

static int check(const struct kv_keys_options *o)
{
	int64_t last = 0;

	if (o->size != sizeof(*o))
		return kv_error(-EINVAL, "kv_keys_options.size: %zu given, %zu expected", o->size,
				sizeof(*o));
	if (!kv_keys_bytes(o->hash))
		return kv_error(-EINVAL, "hash: %d given, %d (SHA-256) or %d (XXH3) allowed",
				o->hash, KV_KEYS_SHA256, KV_KEYS_XXH3);
	if (o->block_tokens < 1 || o->block_tokens > 1 << 24)
		return kv_error(-EINVAL, "block_tokens: %d given, 1..2^24 allowed",
				o->block_tokens);
	if (o->n_items && !o->items)
		return kv_error(-EINVAL, "items: NULL given for %u", o->n_items);
	if (o->embeds && (o->n_embeds < 0 || o->embed_bytes < 1 || o->n_embeds > INT64_MAX / o->embed_bytes))
		return kv_error(-EINVAL, "n_embeds, embed_bytes: %lld, %lld given; 0 or more, 1 or more needed",
				(long long)o->n_embeds, (long long)o->embed_bytes);
	for (uint32_t i = 0; i < o->n_items; i++) {
		const struct kv_keys_item *item = &o->items[i];

		if (!item->hash || item->offset < last || item->n_tokens < 0)
			return kv_error(-EINVAL,
					"items[%u]: hash %s, offset %lld, n_tokens %lld given; a "
					"text, %lld or more, 0 or more needed",
					i, item->hash ? item->hash : "NULL",
					(long long)item->offset, (long long)item->n_tokens,
					(long long)last);
		last = item->offset;
	}
	return 0;
}

static bool has_text(const char *text)
{
	return text && *text;
}

static bool lies_in(const struct kv_keys_item *item, int64_t start, int32_t n)
{
	return item->n_tokens > 0 && item->offset < start + n && item->n_tokens > start - item->offset;
}

/* The rows of a block; none behind the prompt. */
static void put_embeds(struct message *m, const struct kv_keys_options *o, int64_t start)
{
	int64_t first = start < o->n_embeds ? start : o->n_embeds, n = o->n_embeds - first;
	struct kv_sha256 s;
	uint8_t digest[32];

	n = n < o->block_tokens ? n : o->block_tokens;
	kv_sha256_start(&s);
	kv_sha256_add(&s, (const uint8_t *)o->embeds + first * o->embed_bytes, (size_t)(n * o->embed_bytes));
	kv_sha256_end(&s, digest);
	put_data(m, CBOR_BYTES, digest, sizeof(digest));
}

static void put_extras(struct message *m, const struct kv_keys_options *o, int64_t start)
{
	size_t n = has_text(o->lora_name) + (start == 0 && has_text(o->salt)) + !!o->embeds;

	for (uint32_t i = 0; i < o->n_items; i++)
		n += lies_in(&o->items[i], start, o->block_tokens);
	if (!n) {
		*m->at++ = 0xf6; /* null */
		return;
	}
	put_head(m, CBOR_ARRAY, n);
	if (has_text(o->lora_name))
		put_text(m, o->lora_name);
	for (uint32_t i = 0; i < o->n_items; i++) {
		if (!lies_in(&o->items[i], start, o->block_tokens))
			continue;
		put_head(m, CBOR_ARRAY, 2);
		put_text(m, o->items[i].hash);
		put_int(m, o->items[i].offset - start);
	}
	if (start == 0 && has_text(o->salt))
		put_text(m, o->salt);
	if (o->embeds)
		put_embeds(m, o, start);
}

/* No message of a block is longer. */
static size_t message_bytes(const struct kv_keys_options *o)
{
	size_t n = 9 * HEAD_BYTES + 2 * KV_KEYS_BYTES + (size_t)o->block_tokens * HEAD_BYTES;

	n += has_text(o->lora_name) ? strlen(o->lora_name) : 0;
	n += has_text(o->salt) ? strlen(o->salt) : 0;
	for (uint32_t i = 0; i < o->n_items; i++)
		n += 3 * HEAD_BYTES + strlen(o->items[i].hash);
	return n;
}

KV_PUBLIC int kv_keys_seed(const struct kv_keys_options *o, uint8_t *ret_key)
{
	const char *seed;
	kv_cleanup(kv_freep) uint8_t *message = NULL;
	struct message m;
	int r = check(o);

	if (r < 0)
		return r;
	seed = o->seed ? o->seed : DEFAULT_SEED;
	message = malloc(HEAD_BYTES + strlen(seed));
	if (!message)
		return kv_error(-ENOMEM, "seed: no memory for %zu bytes", strlen(seed));
	m.at = message;
	put_text(&m, seed);
	hash_message(o->hash, message, (size_t)(m.at - message), ret_key);
	return 0;
}

KV_PUBLIC int64_t kv_keys_of_blocks(const struct kv_keys_options *o, int64_t first,
				    const uint8_t *parent, const uint32_t *tokens, size_t n_tokens,
				    uint8_t *ret_keys, int64_t room)
{
	kv_cleanup(kv_freep) uint8_t *message = NULL;
	uint8_t before[KV_KEYS_BYTES];
	size_t bytes;
	int64_t n;
	int r = check(o);

	if (r < 0)
		return r;
	if (first < 0 || first > INT64_MAX / o->block_tokens / 2 || !first != !parent)
		return kv_error(-EINVAL,
				"first, parent: %lld, %s given; 0 and NULL, or more and a key",
				(long long)first, parent ? "a key" : "NULL");
	n = (int64_t)(n_tokens / (size_t)o->block_tokens);
	if (n > room)
		return kv_error(-E2BIG, "room: for %lld keys given, there are %lld",
				(long long)room, (long long)n);
	bytes = kv_keys_bytes(o->hash);
	message = malloc(message_bytes(o));
	if (!message)
		return kv_error(-ENOMEM, "block_tokens: no memory for a block of %d",
				o->block_tokens);
	if (parent)
		memcpy(before, parent, bytes);
	else
		r = kv_keys_seed(o, before);
	if (r < 0)
		return r;
	for (int64_t i = 0; i < n; i++) {
		const uint32_t *block = tokens + i * o->block_tokens;
		struct message m = {message};

		put_head(&m, CBOR_ARRAY, 3);
		put_data(&m, CBOR_BYTES, before, bytes);
		put_head(&m, CBOR_ARRAY, (uint64_t)o->block_tokens);
		for (int32_t t = 0; t < o->block_tokens; t++)
			put_head(&m, CBOR_UINT, block[t]);
		put_extras(&m, o, (first + i) * o->block_tokens);
		hash_message(o->hash, message, (size_t)(m.at - message), before);
		memcpy(ret_keys + (size_t)i * bytes, before, bytes);
	}
	return n;
}

KV_PUBLIC int64_t kv_keys_view(int64_t n_keys, int32_t key_tokens, int32_t block_tokens,
			       int32_t align_tokens, int64_t *ret_index)
{
	int64_t each, n;

	if (key_tokens < 1 || block_tokens < 1 || block_tokens % key_tokens)
		return kv_error(-EINVAL,
				"block_tokens: %d given, a multiple of key_tokens (%d) needed",
				block_tokens, key_tokens);
	each = align_tokens > 0 && align_tokens < block_tokens ? 1 : block_tokens / key_tokens;
	n = n_keys / each;
	for (int64_t i = 0; i < n; i++)
		ret_index[i] = (i + 1) * each - 1;
	return n;
}

KV_PUBLIC int kv_keys_pack(const uint8_t *key, size_t n_bytes, uint64_t group, uint8_t *ret)
{
	if (group > UINT32_MAX)
		return kv_error(-ERANGE, "group: %llu given, at most %u allowed",
				(unsigned long long)group, UINT32_MAX);
	memcpy(ret, key, n_bytes);
	for (int i = 0; i < KV_KEYS_GROUP_BYTES; i++)
		ret[n_bytes + (size_t)i] = (uint8_t)(group >> (24 - 8 * i));
	return 0;
}
