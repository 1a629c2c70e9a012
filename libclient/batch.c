/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/metadata.h>

#include "include/internal/killpoint.h"
#include "libclient/batch_notes.h"
#include "libclient/internal.h"

struct kv_batch {
	struct kv_pool *pool;
	struct kv_batch_options limits;
	struct kv_batch_data data;
	struct kv_hold *memory; /* pinned; the arrays below lie in it */
	int32_t *table;
	int64_t *slots, *positions;
	int32_t *query_start_loc, *seq_lens, *n_computed, *tokens, *token_to_seq, *cp_local_lens;
	int32_t *n_query; /* [max_seqs] of the step; not shown */
	struct kv_batch_notes notes;
	uint32_t *filled; /* [max_seqs] columns of each table row that don't hold the null block */
	kv_block_id *copies;
	size_t copies_room;
	bool copied;
};

static size_t aligned(size_t bytes)
{
	return (bytes + 255) / 256 * 256;
}

KV_PUBLIC int kv_batch_new(struct kv_pool *pool, const struct kv_batch_options *options,
			   struct kv_batch **ret)
{
	struct kv_batch_options o;
	int r = kv_options_copy(&o, sizeof(o), options);
	size_t seqs = o.max_seqs, tokens = o.max_tokens, width = o.max_blocks_per_seq;
	size_t sizes[10], total = 0;
	struct kv_batch *b;
	void *memory = NULL;
	char *p;

	if (!r)
		r = kv_forked(pool->fork_generation);
	if (r < 0)
		return r;
	if (!seqs || !tokens || !width || seqs > 1u << 24 || tokens > 1u << 30 || width > 1u << 24)
		return kv_error(-EINVAL,
				"batch: max_seqs %zu, max_tokens %zu, max_blocks_per_seq %zu given; "
				"1..2^24, 1..2^30, 1..2^24 are allowed", seqs, tokens, width);
	/* Before any build: one that fails would have taken the noted copies along. */
	if (o.cp_size > 65536 || o.cp_rank >= (o.cp_size ? o.cp_size : 1) || o.cp_interleave > KV_MAX_BLOCK_TOKENS)
		return kv_error(-EINVAL,
				"batch: cp_size %u, cp_rank %u, cp_interleave %u given; 0..65536, below cp_size, 0..%u "
				"are allowed", o.cp_size, o.cp_rank, o.cp_interleave, KV_MAX_BLOCK_TOKENS);
	b = calloc(1, sizeof(*b));
	if (!b)
		return kv_no_memory();
	b->pool = pool;
	b->limits = o;
	sizes[0] = aligned(seqs * width * sizeof(int32_t));
	sizes[1] = aligned(tokens * sizeof(int64_t));
	sizes[2] = aligned(tokens * sizeof(int64_t));
	sizes[3] = aligned((seqs + 1) * sizeof(int32_t));
	sizes[4] = aligned(seqs * sizeof(int32_t));
	sizes[5] = aligned(seqs * sizeof(int32_t));
	sizes[6] = aligned(tokens * sizeof(int32_t));
	sizes[7] = aligned(tokens * sizeof(int32_t));
	sizes[8] = aligned(seqs * sizeof(int32_t));
	sizes[9] = aligned(seqs * sizeof(int32_t));
	for (int i = 0; i < 10; i++)
		total += sizes[i];
	total += kv_batch_notes_bytes(seqs, tokens);
	r = kv_pinned_new(pool->device, total, &memory);
	if (!r)
		r = kv_hold_pinned(pool->device, memory, &b->memory);
	b->filled = calloc(seqs, sizeof(*b->filled));
	if (r < 0 || !b->filled) {
		if (b->memory)
			kv_hold_free(b->memory);
		else
			kv_pinned_free(pool->device, memory);
		free(b->filled);
		free(b);
		return r < 0 ? r : kv_no_memory();
	}
	p = memory;
	b->table = (int32_t *)p;
	b->slots = (int64_t *)(p += sizes[0]);
	b->positions = (int64_t *)(p += sizes[1]);
	b->query_start_loc = (int32_t *)(p += sizes[2]);
	b->seq_lens = (int32_t *)(p += sizes[3]);
	b->n_computed = (int32_t *)(p += sizes[4]);
	b->tokens = (int32_t *)(p += sizes[5]);
	b->token_to_seq = (int32_t *)(p += sizes[6]);
	b->cp_local_lens = (int32_t *)(p += sizes[7]);
	b->n_query = (int32_t *)(p += sizes[8]);
	kv_batch_notes_place(&b->notes, p + sizes[9], seqs, tokens);
	for (size_t i = 0; i < seqs * width; i++)
		b->table[i] = pool->head.null_block;
	b->data = (struct kv_batch_data){ .table_width = (uint32_t)width,
					  .block_table = b->table,
					  .slots = b->slots,
					  .query_start_loc = b->query_start_loc,
					  .seq_lens = b->seq_lens,
					  .positions = b->positions,
					  .tokens = b->tokens,
					  .n_computed = b->n_computed,
					  .token_to_seq = b->token_to_seq,
					  .seq_lens_upper = b->seq_lens,
					  .cp_local_lens = o.cp_size > 1 ? b->cp_local_lens : NULL };
	pool->n_batches++;
	*ret = b;
	return 0;
}

/* The sources of the last build's copies were kept for it. */
static void end_copies(struct kv_batch *b)
{
	for (uint32_t i = 0; !b->copied && i < b->data.n_copies; i++)
		kv_later_drop(b->pool, b->copies[2 * i]);
	b->data.n_copies = 0;
}

KV_PUBLIC struct kv_batch *kv_batch_free(struct kv_batch *b)
{
	if (!b)
		return NULL;
	if (!kv_forked(b->pool->fork_generation))
		end_copies(b);
	kv_hold_free(b->memory);
	b->pool->n_batches--;
	free(b->filled);
	free(b->copies);
	free(b);
	return NULL;
}

static int check_items(const struct kv_batch *b, const struct kv_batch_item *items, uint32_t n_items,
		       uint32_t pad_seqs, uint32_t pad_tokens)
{
	uint64_t n_tokens = 0;

	if (n_items > b->limits.max_seqs || pad_seqs > b->limits.max_seqs)
		return kv_error(-E2BIG, "batch: %u sequences (%u padded), max_seqs is %u", n_items,
				pad_seqs, b->limits.max_seqs);
	if (n_items && !items)
		return kv_error(-EINVAL, "items: NULL given for %u sequences", n_items);
	for (uint32_t i = 0; i < n_items; i++) {
		const struct kv_seq *seq = items[i].seq;

		if (!seq)
			return kv_error(-EINVAL, "items[%u].seq: none given", i);
		if (seq->pool != b->pool)
			return kv_error(-EINVAL, "items[%u].seq: a sequence of another pool", i);
		if (!items[i].n_query || items[i].n_query > seq->len)
			return kv_error(-EINVAL, "items[%u].n_query: %u given, the sequence has %zu "
					"tokens", i, items[i].n_query, seq->len);
		if (seq->n_blocks > b->limits.max_blocks_per_seq)
			return kv_error(-E2BIG, "items[%u].seq: %zu blocks, max_blocks_per_seq is %u", i,
					seq->n_blocks, b->limits.max_blocks_per_seq);
		n_tokens += items[i].n_query;
	}
	if (n_tokens > b->limits.max_tokens || pad_tokens > b->limits.max_tokens)
		return kv_error(-E2BIG, "batch: %llu tokens (%u padded), max_tokens is %u",
				(unsigned long long)n_tokens, pad_tokens, b->limits.max_tokens);
	return 0;
}

/* Row @row holds @n blocks, then the null block: nothing of an earlier, longer row is left. */
static void fill_row(struct kv_batch *b, uint32_t row, const kv_block_id *ids, uint32_t n)
{
	int32_t *to = b->table + (size_t)row * b->limits.max_blocks_per_seq;

	if (n)
		memcpy(to, ids, n * sizeof(*to));
	for (uint32_t i = n; i < b->filled[row]; i++)
		to[i] = b->pool->head.null_block;
	b->filled[row] = n;
}

static int take_copies(struct kv_batch *b)
{
	struct kv_pool *pool = b->pool;
	int r = kv_seq_grow((void **)&b->copies, &b->copies_room, pool->n_copies,
			    2 * sizeof(*b->copies));

	if (r < 0)
		return r;
	end_copies(b);
	if (pool->n_copies)
		memcpy(b->copies, pool->copies, pool->n_copies * 2 * sizeof(*b->copies));
	b->data.copies = b->copies;
	b->data.n_copies = pool->n_copies;
	b->copied = false;
	pool->n_copies = 0;
	return 0;
}

static int build_arrays(struct kv_batch *b)
{
	struct kv_metadata_args args = {
		.size = sizeof(args),
		.device = KV_DEVICE_HOST,
		.n_seqs = (int32_t)b->data.n_seqs,
		.n_tokens = (int32_t)b->data.n_tokens,
		.table_width = (int32_t)b->limits.max_blocks_per_seq,
		.block_tokens = (int32_t)b->pool->head.block_tokens,
		.null_block = b->pool->head.null_block,
		.cp_size = (int32_t)b->limits.cp_size,
		.cp_rank = (int32_t)b->limits.cp_rank,
		.cp_interleave = (int32_t)b->limits.cp_interleave,
		.n_query = b->n_query,
		.n_computed = b->n_computed,
		.block_table = b->table,
		.query_start_loc = b->query_start_loc,
		.seq_lens = b->seq_lens,
		.cp_local_lens = b->cp_local_lens,
		.token_to_seq = b->token_to_seq,
		.positions = b->positions,
		.slots = b->slots,
	};

	return kv_metadata_build(&args);
}

KV_PUBLIC int kv_batch_annotate(struct kv_batch *b, const struct kv_batch_note *notes,
				uint32_t n_notes)
{
	int r = kv_forked(b->pool->fork_generation);

	if (r < 0)
		return r;
	return kv_batch_notes_fill(&b->notes, &b->data, notes, n_notes);
}

KV_PUBLIC int kv_batch_logits(struct kv_batch *b, const uint32_t *n_logits, uint32_t n, uint32_t pad)
{
	int r = kv_forked(b->pool->fork_generation);

	if (r < 0)
		return r;
	if (pad > b->limits.max_tokens)
		return kv_error(-E2BIG, "pad: %u given, max_tokens is %u", pad, b->limits.max_tokens);
	return kv_batch_notes_logits(&b->notes, &b->data, n_logits, n, pad);
}

KV_PUBLIC int kv_batch_build(struct kv_batch *b, const struct kv_batch_item *items, uint32_t n_items,
			     uint32_t pad_seqs, uint32_t pad_tokens)
{
	struct kv_batch_data *d = &b->data;
	uint32_t n_tokens = 0;
	int r = kv_forked(b->pool->fork_generation);

	if (!r)
		r = kv_granules_need(b->pool, kv_deadline(0));
	if (!r)
		r = check_items(b, items, n_items, pad_seqs, pad_tokens);
	if (!r)
		r = take_copies(b);
	if (r < 0)
		return r;
	d->max_query_len = d->max_seq_len = 0;
	for (uint32_t i = 0; i < n_items; i++) {
		const struct kv_seq *seq = items[i].seq;
		uint32_t len = (uint32_t)seq->len, n = items[i].n_query;

		fill_row(b, i, seq->table, (uint32_t)seq->n_blocks);
		memcpy(b->tokens + n_tokens, seq->tokens + (len - n), n * sizeof(*b->tokens));
		n_tokens += n;
		b->n_query[i] = (int32_t)n;
		b->n_computed[i] = (int32_t)(len - n);
		d->max_query_len = n > d->max_query_len ? n : d->max_query_len;
		d->max_seq_len = len > d->max_seq_len ? len : d->max_seq_len;
	}
	d->n_real_seqs = n_items;
	d->n_real_tokens = n_tokens;
	d->n_seqs = n_items > pad_seqs ? n_items : pad_seqs;
	d->n_tokens = n_tokens > pad_tokens ? n_tokens : pad_tokens;
	for (uint32_t i = n_items; i < d->n_seqs; i++) {
		fill_row(b, i, NULL, 0);
		b->n_query[i] = b->n_computed[i] = 0;
	}
	memset(b->tokens + n_tokens, 0, (d->n_tokens - n_tokens) * sizeof(*b->tokens));
	kv_batch_notes_clear(d);
	return build_arrays(b);
}

KV_PUBLIC int kv_batch_hold(struct kv_batch *b, struct kv_hold **ret)
{
	int r = kv_forked(b->pool->fork_generation);

	if (r < 0)
		return r;
	*ret = kv_hold_ref(b->memory);
	return 0;
}

KV_PUBLIC const struct kv_batch_data *kv_batch_data(const struct kv_batch *b)
{
	return &b->data;
}

static int copy_on(struct kv_batch *b, uint32_t gpu, void *stream)
{
	uint32_t n = b->pool->layout.n_components;
	kv_cleanup(kv_freep) struct kv_view *views = malloc(n * sizeof(*views));
	struct kv_copy_args args = { .size = sizeof(args),
				     .device = b->pool->device,
				     .n_pairs = (int32_t)b->data.n_copies,
				     .pairs = b->copies,
				     .n_views = (int32_t)n,
				     .views = views,
				     .stream = stream };

	if (!views)
		return kv_no_memory();
	for (uint32_t i = 0; i < n; i++)
		kv_pool_view(b->pool, gpu, i, &views[i]);
	return kv_copy_blocks(&args);
}

KV_PUBLIC int kv_batch_copy(struct kv_batch *b, void *stream)
{
	int r = kv_forked(b->pool->fork_generation);

	if (r < 0 || !b->data.n_copies || b->copied)
		return r;
	if (!b->pool->mapped_mask)
		return kv_error(-ENXIO, "copy: the pool is not mapped; send the copies to who maps it");
	for (uint32_t gpu = 0; gpu < KV_MAX_GPUS; gpu++) {
		r = b->pool->mapped_mask >> gpu & 1 ? copy_on(b, gpu, stream) : 0;
		if (r < 0)
			return r;
	}
	b->copied = true;
	KV_KILLPOINT(client_copied);
	for (uint32_t i = 0; i < b->data.n_copies; i++) {
		r = kv_later_release(b->pool, stream, &b->copies[2 * i], 1);
		if (r < 0)
			return r;
	}
	return 0;
}
