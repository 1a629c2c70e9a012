/* SPDX-License-Identifier: Apache-2.0 */
/* A block's row in words, for operators: alloc/identity.h has the encoding. */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "alloc/identity.h"

#define ITEM_BYTES 32 /* of an item's head in the encoding, before its bytes */

static const char *const tags[] = { NULL, "adapter", "salt", "image", "audio", "video", "embedding" };

static uint64_t number_at(const uint8_t *p, int n_bytes)
{
	uint64_t x = 0;

	while (n_bytes--)
		x = x << 8 | p[n_bytes];
	return x;
}

static bool is_readable(const uint8_t *p, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		if (!isprint(p[i]) || p[i] == '\'')
			return false;
	}
	return n > 0;
}

/* One item of the encoding, n_bytes at @p behind its head. */
static int say_item(char *to, size_t size, const uint8_t *head, const uint8_t *p, size_t n_bytes)
{
	uint64_t tag = number_at(head + 4, 4), from = number_at(head + 8, 4);
	uint64_t count = number_at(head + 12, 4);
	char name[32];

	if (tag && tag < sizeof(tags) / sizeof(tags[0]))
		snprintf(name, sizeof(name), "%s", tags[tag]);
	else
		snprintf(name, sizeof(name), "tag %llu", (unsigned long long)tag);
	if (count)
		return snprintf(to, size, "%s at %llu (%llu tokens)", name, (unsigned long long)from,
				(unsigned long long)count);
	/* An adapter's name is no secret; a salt is one. */
	if (tag == 1 && is_readable(p, n_bytes))
		return snprintf(to, size, "%s '%.*s'", name, (int)n_bytes, (const char *)p);
	return snprintf(to, size, "%s of %zu bytes", name, n_bytes);
}

void kv_identity_describe(const struct kv_shm_row *shared, char *ret, size_t size)
{
	struct kv_shm_row row = *shared;
	size_t at = 0, used = 0;

	*ret = 0;
	if (row.form == KV_ROW_PREFIX)
		snprintf(ret, size, "all before it, by digest%s", row.n_bytes ? ", and extras" : "");
	else if (row.form == KV_ROW_DIGEST)
		snprintf(ret, size, "%llu bytes of fields and extras, by digest",
			 (unsigned long long)row.n_bytes);
	if (row.form != KV_ROW_VERBATIM || row.n_bytes > sizeof(row.bytes))
		return;
	while (at + ITEM_BYTES <= row.n_bytes && used < size) {
		const uint8_t *head = row.bytes + at;
		uint64_t n_bytes = number_at(head + 24, 8);
		int n;

		at += ITEM_BYTES;
		if (n_bytes > row.n_bytes - at)
			return;
		n = used ? snprintf(ret + used, size - used, ", ") : 0;
		used += (size_t)n;
		if (used < size)
			used += (size_t)say_item(ret + used, size - used, head, row.bytes + at, n_bytes);
		at += n_bytes;
	}
}
