/* SPDX-License-Identifier: Apache-2.0 */
#include <endian.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/events_pack.h"
#include "include/internal/cleanup.h"

static void put(struct kv_pack *p, const void *bytes, size_t n)
{
	if (p->failed)
		return;
	if (p->n + n > p->room) {
		size_t room = 2 * (p->n + n) + 256;
		void *more = realloc(p->bytes, room);

		if (!more) {
			p->failed = true;
			return;
		}
		p->bytes = more;
		p->room = room;
	}
	memcpy(p->bytes + p->n, bytes, n);
	p->n += n;
}

static void put_byte(struct kv_pack *p, unsigned byte)
{
	uint8_t b = (uint8_t)byte;

	put(p, &b, 1);
}

static void put_nil(struct kv_pack *p)
{
	put_byte(p, 0xc0);
}

/* A code, and @n bytes of a number, the most significant first. */
static void put_number(struct kv_pack *p, unsigned code, uint64_t value, unsigned n)
{
	uint64_t big = htobe64(value);

	put_byte(p, code);
	put(p, (const uint8_t *)&big + 8 - n, n);
}

/* The shortest form. */
static void put_uint(struct kv_pack *p, uint64_t value)
{
	if (value < 0x80)
		put_byte(p, (unsigned)value);
	else if (value <= UINT8_MAX)
		put_number(p, 0xcc, value, 1);
	else if (value <= UINT16_MAX)
		put_number(p, 0xcd, value, 2);
	else if (value <= UINT32_MAX)
		put_number(p, 0xce, value, 4);
	else
		put_number(p, 0xcf, value, 8);
}

static void put_int(struct kv_pack *p, int64_t value)
{
	if (value >= 0)
		put_uint(p, (uint64_t)value);
	else if (value >= -32)
		put_byte(p, (unsigned)value & 0xff);
	else
		put_number(p, 0xd3, (uint64_t)value, 8);
}

static void put_float(struct kv_pack *p, double value)
{
	uint64_t bits;

	memcpy(&bits, &value, sizeof(bits));
	put_number(p, 0xcb, bits, 8);
}

static void put_array(struct kv_pack *p, uint32_t n)
{
	if (n < 16)
		put_byte(p, 0x90 | n);
	else if (n <= UINT16_MAX)
		put_number(p, 0xdc, n, 2);
	else
		put_number(p, 0xdd, n, 4);
}

static void put_text(struct kv_pack *p, const char *text)
{
	size_t n = strlen(text);

	if (n < 32)
		put_byte(p, 0xa0 | (unsigned)n);
	else
		put_number(p, 0xd9, n, 1);
	put(p, text, n);
}

/* The name of a field, where events are maps. */
static void field(struct kv_pack *p, const char *name)
{
	if (!p->legacy)
		put_text(p, name);
}

static void begin(struct kv_pack *p, const char *type, uint32_t n_fields)
{
	p->n_events++;
	if (p->legacy)
		put_array(p, n_fields + 1);
	else
		put_byte(p, 0x80 | (n_fields + 1)); /* a map of less than 16 */
	field(p, "type");
	put_text(p, type);
}

static void put_extras(struct kv_pack *p, const struct kv_stored *e)
{
	bool any = false;

	for (uint32_t i = 0; i < e->n_blocks; i++)
		any |= e->extras[i] != 0;
	if (!any) {
		put_nil(p);
		return;
	}
	put_array(p, e->n_blocks);
	for (uint32_t i = 0; i < e->n_blocks; i++) {
		char text[32];

		if (!e->extras[i]) {
			put_nil(p);
			continue;
		}
		snprintf(text, sizeof(text), "kvcached:%016" PRIx64, e->extras[i]);
		put_array(p, 1);
		put_text(p, text);
	}
}

void kv_pack_stored(struct kv_pack *p, const struct kv_stored *e)
{
	begin(p, "BlockStored", 11);
	field(p, "block_hashes");
	put_array(p, e->n_blocks);
	for (uint32_t i = 0; i < e->n_blocks; i++)
		put_uint(p, e->hashes[i]);
	field(p, "parent_block_hash");
	if (e->has_parent)
		put_uint(p, e->parent);
	else
		put_nil(p);
	field(p, "token_ids");
	put_array(p, e->n_blocks * e->block_tokens);
	for (uint32_t i = 0; i < e->n_blocks; i++) {
		for (uint32_t t = 0; t < e->block_tokens; t++)
			put_int(p, e->tokens[i][t]);
	}
	field(p, "block_size");
	put_uint(p, e->block_tokens);
	field(p, "lora_id");
	put_nil(p);
	field(p, "medium");
	put_text(p, e->medium);
	field(p, "lora_name");
	put_nil(p);
	field(p, "extra_keys");
	put_extras(p, e);
	field(p, "group_idx");
	put_uint(p, e->group);
	field(p, "kv_cache_spec_kind");
	put_text(p, e->kind);
	field(p, "kv_cache_spec_sliding_window");
	put_nil(p);
}

void kv_pack_removed(struct kv_pack *p, const uint64_t *hashes, uint32_t n, const char *medium,
		     uint32_t group)
{
	begin(p, "BlockRemoved", 3);
	field(p, "block_hashes");
	put_array(p, n);
	for (uint32_t i = 0; i < n; i++)
		put_uint(p, hashes[i]);
	field(p, "medium");
	put_text(p, medium);
	field(p, "group_idx");
	put_uint(p, group);
}

void kv_pack_cleared(struct kv_pack *p)
{
	begin(p, "AllBlocksCleared", 0);
}

void kv_pack_drop(struct kv_pack *p)
{
	free(p->bytes);
	*p = (struct kv_pack){ .legacy = p->legacy };
}

void *kv_pack_take(struct kv_pack *p, double seconds, int64_t rank, size_t *ret_n)
{
	kv_cleanup(kv_freep) uint8_t *events = p->bytes;
	size_t n = p->n;
	struct kv_pack batch = { .failed = p->failed };

	if (p->n_events && !p->failed) {
		put_array(&batch, 3);
		put_float(&batch, seconds);
		put_array(&batch, p->n_events);
		put(&batch, events, n);
		put_int(&batch, rank);
	}
	*p = (struct kv_pack){ .legacy = p->legacy };
	if (batch.failed) {
		free(batch.bytes);
		return NULL;
	}
	*ret_n = batch.n;
	return batch.bytes;
}
