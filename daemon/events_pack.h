/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batches of KV events as MessagePack, https://github.com/msgpack/msgpack/blob/master/spec.md:
 *
 *	[time in seconds, [event, ...], data-parallel rank]
 *
 * An event is a map whose key "type" names it (current), or an array of the name and the fields in
 * order (legacy). Memory that runs out is remembered: kv_pack_take() then gives nothing.
 */
#ifndef KV_DAEMON_EVENTS_PACK_H
#define KV_DAEMON_EVENTS_PACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kv_pack {
	bool legacy;
	bool failed;
	uint32_t n_events;
	uint8_t *bytes; /* the events so far */
	size_t n, room;
};

/* Blocks of one chain, each the parent of the next. */
struct kv_stored {
	uint32_t n_blocks;
	uint32_t block_tokens;
	const uint64_t *hashes;	     /* [n_blocks] */
	const int32_t *const *tokens; /* [n_blocks] -> [block_tokens] */
	const uint64_t *extras;	     /* [n_blocks] 0: none; else what besides the tokens it depends on */
	bool has_parent;
	uint64_t parent;
	const char *medium; /* "GPU", "CPU" */
	const char *kind;   /* "full_attention", "mla_attention", "mamba" */
	uint32_t group;
};

void kv_pack_stored(struct kv_pack *p, const struct kv_stored *e);
void kv_pack_removed(struct kv_pack *p, const uint64_t *hashes, uint32_t n, const char *medium,
		     uint32_t group);
void kv_pack_cleared(struct kv_pack *p);

/* kv_pack_drop() - an empty pack again */
void kv_pack_drop(struct kv_pack *p);

/* kv_pack_take() - the batch, for free(), and an empty pack again. NULL: no events, or no memory */
void *kv_pack_take(struct kv_pack *p, double seconds, int64_t rank, size_t *ret_n);

#endif
