/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/identity.h"
#include "include/internal/error.h"

#define KIND_FIELD 1u
#define KIND_EXTRA 2u

/* Takes bytes in: how many, the first of them, and the digest of all. */
struct sink {
	uint64_t n;
	uint8_t head[KV_ROW_BYTES]; /* as much as a row holds */
	struct kv_blake2b digest;
};

static void put(struct sink *s, const void *data, size_t n)
{
	if (s->n < sizeof(s->head)) {
		size_t room = sizeof(s->head) - (size_t)s->n;

		memcpy(s->head + s->n, data, n < room ? n : room);
	}
	kv_blake2b_add(&s->digest, data, n);
	s->n += n;
}

static void put_number(struct sink *s, uint64_t x, int n_bytes)
{
	uint8_t bytes[8];

	for (int i = 0; i < n_bytes; i++)
		bytes[i] = (uint8_t)(x >> 8 * i);
	put(s, bytes, (size_t)n_bytes);
}

static uint64_t end_of(const struct kv_item *item)
{
	return item->position + item->n_tokens;
}

static bool reaches(const struct kv_item *item, uint64_t begin, uint64_t end)
{
	if (!item->n_tokens)
		return begin == 0;
	return item->position < end && end_of(item) > begin;
}

static void put_item(struct sink *s, const struct kv_item *item, uint64_t begin, uint64_t end)
{
	bool field = !item->n_tokens;
	uint64_t from = item->position > begin ? item->position : begin;
	uint64_t to = end_of(item) < end ? end_of(item) : end;

	put_number(s, field ? KIND_FIELD : KIND_EXTRA, 4);
	put_number(s, item->tag, 4);
	put_number(s, field ? 0 : from - begin, 4);
	put_number(s, field ? 0 : to - from, 4);
	put_number(s, field ? 0 : item->first + (from - item->position), 8);
	put_number(s, item->n_bytes, 8);
	put(s, item->bytes, item->n_bytes);
}

/* @fields: with those, if it is the beginning */
static void encode(struct sink *s, const struct kv_identity *identity, uint64_t begin, uint64_t end,
		   bool fields)
{
	s->n = 0;
	kv_blake2b_init(&s->digest);
	for (size_t i = 0; i < identity->n; i++) {
		const struct kv_item *item = &identity->items[i];

		if ((item->n_tokens || fields) && reaches(item, begin, end))
			put_item(s, item, begin, end);
	}
}

/* The order of the encoding. 0: the same item. */
static int compare(const struct kv_item *a, const struct kv_item *b)
{
	size_t n = a->n_bytes < b->n_bytes ? a->n_bytes : b->n_bytes;
	int r;

	if (!a->n_tokens != !b->n_tokens)
		return a->n_tokens ? 1 : -1;
	if (a->position != b->position)
		return a->position < b->position ? -1 : 1;
	if (a->tag != b->tag)
		return a->tag < b->tag ? -1 : 1;
	if (a->n_tokens != b->n_tokens)
		return a->n_tokens < b->n_tokens ? -1 : 1;
	if (a->first != b->first)
		return a->first < b->first ? -1 : 1;
	r = n ? memcmp(a->bytes, b->bytes, n) : 0;
	if (r || a->n_bytes == b->n_bytes)
		return r;
	return a->n_bytes < b->n_bytes ? -1 : 1;
}

int kv_identity_add(struct kv_identity *identity, const struct kv_item *item)
{
	struct kv_item own = *item;
	size_t at = identity->n;

	for (size_t i = 0; !item->n_tokens && i < identity->n; i++) {
		if (!identity->items[i].n_tokens && identity->items[i].tag == item->tag)
			return -EEXIST;
	}
	if (identity->n == identity->room) {
		size_t room = identity->room ? 2 * identity->room : 4;
		void *items = realloc(identity->items, room * sizeof(*identity->items));

		if (!items)
			return kv_no_memory();
		identity->items = items;
		identity->room = room;
	}
	own.bytes = malloc(item->n_bytes ? item->n_bytes : 1);
	if (!own.bytes)
		return kv_no_memory();
	if (item->n_bytes)
		memcpy(own.bytes, item->bytes, item->n_bytes);
	while (at && compare(&identity->items[at - 1], &own) > 0)
		at--;
	memmove(identity->items + at + 1, identity->items + at,
		(identity->n - at) * sizeof(*identity->items));
	identity->items[at] = own;
	identity->n++;
	return 0;
}

int kv_identity_copy(struct kv_identity *to, const struct kv_identity *from)
{
	for (size_t i = 0; i < from->n; i++) {
		int r = kv_identity_add(to, &from->items[i]);

		if (r < 0)
			return r;
	}
	return 0;
}

void kv_identity_cut(struct kv_identity *identity, uint64_t n_tokens)
{
	size_t kept = 0;

	for (size_t i = 0; i < identity->n; i++) {
		struct kv_item item = identity->items[i];

		if (item.n_tokens && item.position >= n_tokens) {
			free(item.bytes);
			continue;
		}
		if (item.n_tokens && end_of(&item) > n_tokens)
			item.n_tokens = n_tokens - item.position;
		identity->items[kept++] = item;
	}
	identity->n = kept;
}

void kv_identity_deinit(struct kv_identity *identity)
{
	for (size_t i = 0; i < identity->n; i++)
		free(identity->items[i].bytes);
	free(identity->items);
	memset(identity, 0, sizeof(*identity));
}

bool kv_identity_row(const struct kv_identity *identity, uint64_t begin, uint64_t end,
		     struct kv_shm_row *ret)
{
	struct sink s;

	encode(&s, identity, begin, end, true);
	if (!s.n)
		return false;
	memset(ret, 0, sizeof(*ret));
	ret->n_bytes = s.n;
	ret->form = s.n <= sizeof(ret->bytes) ? KV_ROW_VERBATIM : KV_ROW_DIGEST;
	if (ret->form == KV_ROW_VERBATIM)
		memcpy(ret->bytes, s.head, s.n);
	else
		kv_blake2b_end(&s.digest, ret->bytes);
	return true;
}

void kv_prefix_digest(const struct kv_blake2b *tokens, uint64_t n,
		      const struct kv_identity *identity, struct kv_prefix_digest *ret)
{
	struct kv_blake2b all = *tokens;
	uint8_t end[8 + KV_DIGEST_BYTES] = {0};

	for (int i = 0; i < 8; i++)
		end[i] = (uint8_t)(n >> 8 * i);
	if (identity->n) {
		struct sink said;

		encode(&said, identity, 0, n, true);
		kv_blake2b_end(&said.digest, end + 8);
	}
	kv_blake2b_add(&all, end, sizeof(end));
	kv_blake2b_end(&all, ret->bytes);
}

void kv_prefix_digest_row(const struct kv_prefix_digest *digest,
			  const struct kv_identity *identity, uint32_t group, uint64_t begin,
			  uint64_t end, struct kv_shm_row *ret)
{
	struct sink extras;

	memset(ret, 0, sizeof(*ret));
	ret->form = KV_ROW_PREFIX;
	memcpy(ret->bytes, digest->bytes, sizeof(digest->bytes));
	memcpy(ret->bytes + 2 * KV_DIGEST_BYTES, &group, sizeof(group));
	ret->bytes[2 * KV_DIGEST_BYTES + sizeof(group)] = begin == end;
	if (!identity->n || begin == end)
		return;
	encode(&extras, identity, begin, end, false);
	ret->n_bytes = extras.n;
	if (extras.n)
		kv_blake2b_end(&extras.digest, ret->bytes + KV_DIGEST_BYTES);
}
