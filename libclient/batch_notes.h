/* SPDX-License-Identifier: Apache-2.0 */
/* The arrays of kv_batch_annotate() and kv_batch_logits(), which lie in the batch's memory. */
#ifndef KV_LIBCLIENT_BATCH_NOTES_H
#define KV_LIBCLIENT_BATCH_NOTES_H

#include <kvcached/batch.h>

struct kv_batch_notes {
	uint8_t *is_prefilling, *seq_causal;
	int32_t *encoder_lens, *window_prefix_lens, *replay_bases;
	int32_t (*doc_ranges)[2];
	int32_t *logits_indices;
};

size_t kv_batch_notes_bytes(size_t max_seqs, size_t max_tokens);
void kv_batch_notes_place(struct kv_batch_notes *n, void *memory, size_t max_seqs, size_t max_tokens);

/* A new build knows of no notes. */
void kv_batch_notes_clear(struct kv_batch_data *data);

int kv_batch_notes_fill(struct kv_batch_notes *n, struct kv_batch_data *data,
			const struct kv_batch_note *notes, uint32_t n_notes);

/* @pad: as checked against the batch's size */
int kv_batch_notes_logits(struct kv_batch_notes *n, struct kv_batch_data *data,
			  const uint32_t *n_logits, uint32_t n_items, uint32_t pad);

#endif
