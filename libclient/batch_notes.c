/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>

#include "libclient/batch_notes.h"
#include "libclient/internal.h"

static size_t aligned(size_t bytes)
{
	return (bytes + 255) / 256 * 256;
}

size_t kv_batch_notes_bytes(size_t seqs, size_t tokens)
{
	return 2 * aligned(seqs) + 3 * aligned(seqs * sizeof(int32_t)) +
	       tokens * 3 * sizeof(int32_t);
}

void kv_batch_notes_place(struct kv_batch_notes *n, void *memory, size_t seqs, size_t tokens)
{
	size_t bytes = aligned(seqs), words = aligned(seqs * sizeof(int32_t));
	char *p = memory;

	n->is_prefilling = (uint8_t *)p;
	n->seq_causal = (uint8_t *)(p += bytes);
	n->encoder_lens = (int32_t *)(void *)(p += bytes);
	n->window_prefix_lens = (int32_t *)(void *)(p += words);
	n->replay_bases = (int32_t *)(void *)(p += words);
	n->doc_ranges = (int32_t(*)[2])(void *)(p + words);
	n->logits_indices = n->doc_ranges[tokens];
}

void kv_batch_notes_clear(struct kv_batch_data *data)
{
	data->is_prefilling = data->seq_causal = NULL;
	data->encoder_lens = data->window_prefix_lens = data->replay_bases = NULL;
	data->doc_ranges = data->logits_indices = NULL;
	data->n_logits = data->n_logits_padded = data->max_logits_per_seq = 0;
}

static int check(const struct kv_batch_data *data, const struct kv_batch_note *notes,
		 uint32_t n_notes)
{
	if (n_notes != data->n_real_seqs)
		return kv_error(-EINVAL, "n_notes: %u given, the batch has %u sequences", n_notes,
				data->n_real_seqs);
	for (uint32_t i = 0; i < n_notes; i++)
		if (notes[i].n_prompt < 0 || notes[i].encoder_len < 0 ||
		    notes[i].window_prefix_len < 0 || notes[i].n_docs < 0 ||
		    (notes[i].n_docs && !notes[i].docs))
			return kv_error(-EINVAL, "notes[%u]: n_prompt %d, encoder_len %d, "
					"window_prefix_len %d, n_docs %d given, 0 or more allowed", i,
					notes[i].n_prompt, notes[i].encoder_len,
					notes[i].window_prefix_len, notes[i].n_docs);
	return 0;
}

/* doc_ranges of all sequences. Return: 1: some token lies in one. */
static int fill_docs(struct kv_batch_notes *n, const struct kv_batch_data *data,
		     const struct kv_batch_note *notes)
{
	int any = 0;

	for (uint32_t t = 0; t < data->n_tokens; t++)
		n->doc_ranges[t][0] = n->doc_ranges[t][1] = -1;
	for (uint32_t i = 0; i < data->n_real_seqs; i++) {
		int32_t start = data->query_start_loc[i];
		int32_t n_query = data->query_start_loc[i + 1] - start;

		for (int32_t k = 0; k < notes[i].n_docs; k++) {
			int32_t context = data->n_computed[i], first = notes[i].docs[k][0];
			int32_t last = notes[i].docs[k][1];

			for (int32_t q = 0; q < n_query && first < last; q++) {
				if (context + q < first || context + q > last)
					continue;
				n->doc_ranges[start + q][0] = first;
				n->doc_ranges[start + q][1] = last;
				any = 1;
			}
		}
	}
	return any;
}

int kv_batch_notes_fill(struct kv_batch_notes *n, struct kv_batch_data *data,
			const struct kv_batch_note *notes, uint32_t n_notes)
{
	int prompts = 0, encoders = 0, prefixes = 0, bases = 0, loose = 0;
	int r = check(data, notes, n_notes);

	if (r < 0)
		return r;
	for (uint32_t i = 0; i < data->n_seqs; i++) {
		const struct kv_batch_note none = {0}, *note = i < n_notes ? &notes[i] : &none;

		n->is_prefilling[i] = note->n_prompt > data->n_computed[i];
		n->seq_causal[i] = !note->not_causal;
		n->encoder_lens[i] = note->encoder_len;
		n->window_prefix_lens[i] = note->window_prefix_len;
		n->replay_bases[i] = note->replay_base;
		prompts |= note->n_prompt;
		encoders |= note->encoder_len;
		prefixes |= note->window_prefix_len;
		bases |= note->replay_base;
		loose |= note->not_causal;
	}
	data->is_prefilling = prompts ? n->is_prefilling : NULL;
	data->seq_causal = loose ? n->seq_causal : NULL;
	data->encoder_lens = encoders ? n->encoder_lens : NULL;
	data->window_prefix_lens = prefixes ? n->window_prefix_lens : NULL;
	data->replay_bases = bases ? n->replay_bases : NULL;
	data->doc_ranges = fill_docs(n, data, notes) ? n->doc_ranges[0] : NULL;
	return 0;
}

int kv_batch_notes_logits(struct kv_batch_notes *n, struct kv_batch_data *data,
			  const uint32_t *n_logits, uint32_t n_items, uint32_t pad)
{
	uint32_t at = 0, most = 0;

	if (n_items != data->n_real_seqs)
		return kv_error(-EINVAL, "n: %u given, the batch has %u sequences", n_items,
				data->n_real_seqs);
	for (uint32_t i = 0; i < n_items; i++) {
		uint32_t n_query = (uint32_t)(data->query_start_loc[i + 1] - data->query_start_loc[i]);

		if (n_logits[i] > n_query)
			return kv_error(-EINVAL, "n_logits[%u]: %u given, the item has %u queries", i,
					n_logits[i], n_query);
	}
	for (uint32_t i = 0; i < n_items; i++) {
		uint32_t end = (uint32_t)data->query_start_loc[i + 1];

		for (uint32_t k = n_logits[i]; k > 0; k--)
			n->logits_indices[at++] = (int32_t)(end - k);
		most = n_logits[i] > most ? n_logits[i] : most;
	}
	data->n_logits = at;
	for (; at < pad; at++)
		n->logits_indices[at] = data->n_logits ? n->logits_indices[data->n_logits - 1] : 0;
	data->n_logits_padded = at;
	data->max_logits_per_seq = most;
	data->logits_indices = n->logits_indices;
	return 0;
}
