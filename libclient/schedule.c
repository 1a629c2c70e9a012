/* SPDX-License-Identifier: Apache-2.0 */
/* Decisions over a batch's lengths. Counts are of sequences unless they say tokens. */
#include <errno.h>
#include <kvcached/backend.h>
#include <kvcached/schedule.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/public.h"

static int32_t least(int32_t a, int32_t b)
{
	return a < b ? a : b;
}

static int64_t ceil_div(int64_t a, int64_t b)
{
	return (a + b - 1) / b;
}

static int32_t query_len(const int32_t *query_start_loc, int32_t b)
{
	return query_start_loc[b + 1] - query_start_loc[b];
}

/* The first sequence that does not decode. */
static int32_t first_prefill(const int32_t *loc, int32_t n_seqs, int32_t threshold, int uniform,
			     const uint8_t *prefilling)
{
	int32_t longest = 0, len0 = n_seqs ? query_len(loc, 0) : 0;

	for (int32_t b = 0; b < n_seqs; b++)
		longest = query_len(loc, b) > longest ? query_len(loc, b) : longest;
	if (longest <= threshold && (!uniform || threshold <= 1) && !prefilling)
		return n_seqs;
	if (len0 > threshold)
		return 0;
	for (int32_t b = 0; b < n_seqs; b++) {
		int32_t len = query_len(loc, b);

		if (prefilling && prefilling[b])
			return b;
		if (uniform ? len != len0 : len > threshold) {
			bool rest = uniform && !prefilling; /* padding has no queries */

			for (int32_t k = b; k < n_seqs && rest; k++)
				rest = query_len(loc, k) == len0 || query_len(loc, k) == 0;
			return rest ? n_seqs : b;
		}
	}
	return n_seqs;
}

KV_PUBLIC void kv_split_decodes(const int32_t *query_start_loc, int32_t n_seqs, int32_t n_tokens,
				int32_t threshold, int uniform, const uint8_t *prefilling,
				struct kv_split *ret)
{
	int32_t b = first_prefill(query_start_loc, n_seqs, threshold, uniform, prefilling);

	*ret = (struct kv_split){
		.n_decodes = b,
		.n_prefills = n_seqs - b,
		.n_decode_tokens = b == n_seqs ? n_tokens : query_start_loc[b],
		.n_prefill_tokens = b == n_seqs ? 0 : n_tokens - query_start_loc[b],
	};
}

KV_PUBLIC void kv_split_extends(const int32_t *query_start_loc, const int32_t *seq_lens,
				int32_t n_seqs, int32_t threshold, struct kv_split *ret)
{
	int32_t decodes = 0, extends, total = query_start_loc[n_seqs];

	while (decodes < n_seqs && query_len(query_start_loc, decodes) <= threshold)
		decodes++;
	for (extends = decodes; extends < n_seqs; extends++)
		if (query_len(query_start_loc, extends) > threshold &&
		    query_len(query_start_loc, extends) == seq_lens[extends])
			break;
	*ret = (struct kv_split){
		.n_decodes = decodes,
		.n_extends = extends - decodes,
		.n_prefills = n_seqs - extends,
		.n_decode_tokens = query_start_loc[decodes],
		.n_extend_tokens = query_start_loc[extends] - query_start_loc[decodes],
		.n_prefill_tokens = total - query_start_loc[extends],
	};
}

enum part { DECODE, SHORT_EXTEND, LONG_EXTEND, PREFILL, PARTS };

static enum part part_of(int32_t n_query, int32_t n_computed, int32_t n_prompt, int32_t threshold)
{
	if (!n_computed)
		return PREFILL;
	if (n_query > threshold)
		return LONG_EXTEND;
	return n_computed >= n_prompt ? DECODE : SHORT_EXTEND;
}

KV_PUBLIC int kv_reorder(const int32_t *n_query, const int32_t *n_computed, const int32_t *n_prompt,
			 int32_t n_seqs, int32_t threshold, int32_t *ret_order)
{
	int32_t ends[PARTS] = {0}, next = 0;
	int moved = 0;

	for (int32_t b = 0; b < n_seqs; b++)
		ends[part_of(n_query[b], n_computed[b], n_prompt[b], threshold)]++;
	for (int part = 1; part < PARTS; part++)
		ends[part] += ends[part - 1];
#define PART(b)	 part_of(n_query[b], n_computed[b], n_prompt[b], threshold)
#define STAYS(b) ((b) < ends[PART(b)] && ((int)PART(b) == 0 || (b) >= ends[PART(b) - 1]))
	for (int32_t b = 0; b < n_seqs; b++)
		ret_order[b] = STAYS(b) ? b : -1;
	for (int part = 0; part < PARTS; part++) { /* the others, part by part, into the gaps */
		for (int32_t b = 0; b < n_seqs; b++) {
			if ((int)PART(b) != part || STAYS(b))
				continue;
			while (ret_order[next] >= 0)
				next++;
			ret_order[next] = b;
			moved++;
		}
	}
#undef STAYS
#undef PART
	return moved;
}

KV_PUBLIC int32_t kv_reorder_threshold(int32_t base, int32_t n_drafts, int parallel, int one_only)
{
	int32_t with_drafts = 1 + (parallel ? 2 : 1) * n_drafts;

	if (one_only)
		return 1;
	return base && n_drafts && with_drafts > base ? with_drafts : base;
}

KV_PUBLIC int kv_prefill_chunks(const int32_t *seq_lens, int32_t n_seqs, int32_t workspace_tokens,
				int32_t *ret_bounds)
{
	int64_t sum = 0;
	int n = 0;

	for (int32_t b = 0; b < n_seqs; b++) {
		if (seq_lens[b] > workspace_tokens)
			return kv_error(-EINVAL, "seq_lens[%d]: %d given, the workspace has room for %d",
					b, seq_lens[b], workspace_tokens);
		if (!b || sum + seq_lens[b] > workspace_tokens) {
			ret_bounds[n++] = b;
			sum = 0;
		}
		sum += seq_lens[b];
	}
	ret_bounds[n] = n_seqs;
	return n;
}

KV_PUBLIC int32_t kv_cascade_prefix(int32_t n_common_blocks, int32_t block_tokens,
				    const int32_t *n_computed, int32_t n_seqs)
{
	int64_t tokens = (int64_t)n_common_blocks * block_tokens;

	for (int32_t b = 0; b < n_seqs; b++)
		tokens = n_computed[b] < tokens ? n_computed[b] : tokens;
	return (int32_t)(tokens / block_tokens * block_tokens);
}

/* Waves of thread blocks that either way takes, by tiles of 128. */
KV_PUBLIC int kv_cascade_decide(const struct kv_cascade_query *q)
{
	int64_t tiles = ceil_div(q->prefix, 128), group = q->n_heads_q / q->n_heads_kv;
	int64_t together, apart;

	if (q->prefix < 256 || q->positions || q->n_seqs < 8 || q->cp_size > 1)
		return 0;
	if (group <= 1)
		return 1;
	for (int32_t b = 0; b < q->n_seqs; b++)
		if (q->n_query[b] != 1)
			return 1;
	together = ceil_div(q->n_heads_q * ceil_div(q->n_seqs, 128), q->n_multiprocessors) * tiles;
	apart = ceil_div((int64_t)q->n_seqs * q->n_heads_kv * ceil_div(group, 128) * tiles,
			 q->n_multiprocessors);
	return together < apart;
}

KV_PUBLIC int kv_graph_mode(int wanted, int support, int pieces, int32_t len)
{
	bool decode;

	if (wanted == KV_GRAPHS_FULL && support != KV_GRAPH_ALWAYS) {
		if (support == KV_GRAPH_NEVER)
			return kv_error(-ENOTSUP, "graphs: of every step wanted, and a backend can't be "
						  "captured at all");
		wanted = pieces ? KV_GRAPHS_FULL_AND_PIECEWISE : KV_GRAPHS_FULL_DECODE;
	}
	decode = wanted == KV_GRAPHS_FULL || wanted == KV_GRAPHS_FULL_DECODE ||
		 wanted == KV_GRAPHS_FULL_AND_PIECEWISE;
	if (decode && (support == KV_GRAPH_NEVER || (len > 1 && support < KV_GRAPH_UNIFORM)))
		return pieces ? KV_GRAPHS_PIECEWISE : KV_GRAPHS_NONE;
	return wanted;
}

KV_PUBLIC int64_t kv_local_chunks_bound(const int32_t *query_start_loc, int32_t n_seqs, int32_t chunk)
{
	int64_t n = 0;

	for (int32_t b = 0; b < n_seqs; b++)
		n += query_len(query_start_loc, b) / chunk + 2;
	return n;
}

KV_PUBLIC int kv_local_chunks(const int32_t *query_start_loc, const int32_t *seq_lens, int32_t n_seqs,
			      const int32_t *block_table, int32_t table_width, int32_t block_tokens,
			      int32_t chunk, int32_t *ret_query_start_loc, int32_t *ret_seq_lens,
			      int32_t *ret_rows)
{
	int32_t width = chunk / block_tokens;
	int n = 0;

	if (chunk % block_tokens)
		return kv_error(-EINVAL, "chunk: %d given, a multiple of block_tokens (%d) needed", chunk,
				block_tokens);
	ret_query_start_loc[0] = 0;
	for (int32_t b = 0; b < n_seqs; b++) {
		int32_t left = query_len(query_start_loc, b), at = seq_lens[b] - left;

		while (left > 0) { /* queries from position at on, up to the end of its chunk */
			int32_t start = at / chunk * chunk, take = least(chunk - at % chunk, left);

			ret_query_start_loc[n + 1] = ret_query_start_loc[n] + take;
			ret_seq_lens[n] = at + take - start;
			for (int32_t c = 0; c < width; c++) {
				int32_t column = least(start / block_tokens + c, table_width - 1);

				ret_rows[(int64_t)n * width + c] =
					block_table[(int64_t)b * table_width + column];
			}
			n++;
			at += take;
			left -= take;
		}
	}
	return n;
}

KV_PUBLIC int kv_doc_rows(const int32_t (*docs)[3], int32_t n_docs, const int32_t *query_start_loc,
			  const int32_t *seq_lens, int32_t n_seqs, int32_t (*ret_rows)[2])
{
	int any = 0;

	for (int32_t t = 0; t < query_start_loc[n_seqs]; t++)
		ret_rows[t][0] = ret_rows[t][1] = -1;
	for (int32_t i = 0; i < n_docs; i++) {
		int32_t b = docs[i][0], first = docs[i][1], last = docs[i][2];
		int32_t start, context;

		if (b < 0 || b >= n_seqs || first >= last)
			continue;
		start = query_start_loc[b];
		context = seq_lens[b] - query_len(query_start_loc, b);
		for (int32_t p = first > context ? first : context; p <= last && p < seq_lens[b]; p++) {
			ret_rows[start + p - context][0] = first;
			ret_rows[start + p - context][1] = last;
			any = 1;
		}
	}
	return any;
}

KV_PUBLIC int kv_doc_table(const int32_t (*docs)[3], int32_t n_docs, int32_t n_seqs, int32_t width,
			   int32_t *ret_table)
{
	kv_cleanup(kv_freep) int32_t *counts = calloc((size_t)n_seqs + 1, sizeof(*counts));
	int32_t most = 0;

	if (!counts)
		return kv_error(-ENOMEM, "n_seqs: no memory for %d counts", n_seqs);
	for (int32_t i = 0; i < n_docs; i++) {
		int32_t b = docs[i][0];

		if (b < 0 || b >= n_seqs)
			return kv_error(-EINVAL, "docs[%d]: sequence %d given, 0..%d exist", i, b,
					n_seqs - 1);
		counts[b]++;
		most = counts[b] > most ? counts[b] : most;
	}
	if (!ret_table)
		return most;
	if (most > width)
		return kv_error(-E2BIG, "width: room for %d ranges given, a sequence has %d", width, most);
	memset(ret_table, 0, (size_t)n_seqs * (size_t)width * 2 * sizeof(*ret_table));
	memset(counts, 0, (size_t)n_seqs * sizeof(*counts));
	for (int32_t i = 0; i < n_docs; i++) {
		int64_t at = (int64_t)docs[i][0] * width + counts[docs[i][0]]++;

		memcpy(ret_table + at * 2, &docs[i][1], 2 * sizeof(*ret_table));
	}
	return most;
}

KV_PUBLIC void kv_query_lens(const int32_t *query_start_loc, int32_t n_seqs, int32_t *ret_n_query)
{
	for (int32_t b = 0; b < n_seqs; b++)
		ret_n_query[b] = query_len(query_start_loc, b);
}

KV_PUBLIC void kv_computed_tokens(const int32_t *query_start_loc, const int32_t *seq_lens,
				  int32_t n_seqs, int32_t *ret_n_computed)
{
	for (int32_t b = 0; b < n_seqs; b++)
		ret_n_computed[b] = seq_lens[b] - query_len(query_start_loc, b);
}

KV_PUBLIC void kv_cp_empty_rows(const int32_t *cp_local_lens, const int32_t *query_start_loc,
				int32_t n_seqs, int32_t n_rows, uint8_t *ret_empty)
{
	int32_t t = 0;

	for (int32_t b = 0; b < n_seqs; b++)
		for (; t < query_start_loc[b + 1] && t < n_rows; t++)
			ret_empty[t] = cp_local_lens[b] <= 0;
	for (; t < n_rows; t++)
		ret_empty[t] = 1;
}

KV_PUBLIC int kv_logits_rows(const int32_t *query_start_loc, int32_t n_seqs,
			     const int32_t *logits_indices, int32_t n_indices,
			     int32_t *ret_query_start_loc)
{
	int32_t n_tokens = query_start_loc[n_seqs], i = 0, most = 0;

	for (int32_t k = 0; k < n_indices; k++)
		if (logits_indices[k] < (k ? logits_indices[k - 1] + 1 : 0) ||
		    logits_indices[k] >= n_tokens)
			return kv_error(-EINVAL, "logits_indices[%d]: %d given; they rise, and the batch "
						 "has %d tokens", k, logits_indices[k], n_tokens);
	ret_query_start_loc[0] = 0;
	for (int32_t b = 0; b < n_seqs; b++) {
		int32_t first = i;

		while (i < n_indices && logits_indices[i] < query_start_loc[b + 1])
			i++;
		ret_query_start_loc[b + 1] = i;
		most = i - first > most ? i - first : most;
	}
	return most;
}

KV_PUBLIC int kv_batch_logits_only(const struct kv_batch_data *data, int32_t *query_start_loc,
				   struct kv_batch_data *ret)
{
	int most;

	if (!data->logits_indices)
		return kv_error(-EINVAL, "data.logits_indices: NULL given, kv_batch_logits() makes it");
	if (data->max_query_len <= 1) {
		*ret = *data;
		return 0;
	}
	most = kv_logits_rows(data->query_start_loc, (int32_t)data->n_seqs, data->logits_indices,
			      (int32_t)data->n_logits, query_start_loc);
	if (most < 0)
		return most;
	*ret = *data;
	ret->query_start_loc = query_start_loc;
	ret->n_tokens = ret->n_real_tokens = data->n_logits;
	ret->max_query_len = (uint32_t)most;
	ret->slots = ret->positions = NULL;
	ret->tokens = ret->token_to_seq = ret->doc_ranges = ret->n_computed = NULL;
	return 0;
}

KV_PUBLIC int kv_sink_tables(const int32_t *block_table, int32_t table_width, const int32_t *seq_lens,
			     int32_t n_seqs, const kv_block_id *sinks, int32_t n_sinks,
			     int32_t block_tokens, int32_t *ret_table, int32_t *ret_seq_lens)
{
	int64_t width = (int64_t)n_sinks + table_width, more = (int64_t)n_sinks * block_tokens;

	if (table_width < 0 || n_seqs < 0 || n_sinks < 0 || block_tokens < 1)
		return kv_error(-EINVAL, "table_width, n_seqs, n_sinks, block_tokens: %d, %d, %d, %d given; "
					 "0, 0, 0, 1 or more allowed", table_width, n_seqs, n_sinks,
				block_tokens);
	for (int32_t b = 0; b < n_seqs; b++)
		if (seq_lens[b] < 0 || seq_lens[b] + more > INT32_MAX)
			return kv_error(seq_lens[b] < 0 ? -EINVAL : -EOVERFLOW,
					"seq_lens[%d]: %d given, and sinks of %lld tokens", b, seq_lens[b],
					(long long)more);
	for (int32_t b = 0; b < n_seqs; b++) {
		int32_t *row = ret_table + b * width;

		for (int32_t i = 0; i < n_sinks; i++)
			row[i] = sinks[i];
		for (int32_t i = 0; i < table_width; i++)
			row[n_sinks + i] = block_table[(int64_t)b * table_width + i];
		ret_seq_lens[b] = seq_lens[b] ? seq_lens[b] + (int32_t)more : 0;
	}
	return 0;
}

KV_PUBLIC int kv_batch_cross(const struct kv_batch_data *data, const int32_t *block_table,
			     uint32_t table_width, const int64_t *slots, struct kv_batch_data *ret)
{
	uint32_t longest = 0;

	if (!data->encoder_lens)
		return kv_error(-EINVAL, "data.encoder_lens: NULL given, kv_batch_annotate() makes it");
	for (uint32_t b = 0; b < data->n_seqs; b++)
		if ((uint32_t)data->encoder_lens[b] > longest)
			longest = (uint32_t)data->encoder_lens[b];
	kv_batch_regroup(data, block_table, table_width, slots, ret);
	ret->seq_lens = ret->seq_lens_upper = data->encoder_lens;
	ret->max_seq_len = longest;
	ret->cp_local_lens = ret->window_prefix_lens = ret->doc_ranges = NULL;
	ret->seq_causal = NULL;
	return 0;
}

KV_PUBLIC int64_t kv_encoder_slots(const int32_t *encoder_lens, int32_t n_seqs,
				   const int32_t *block_table, int32_t table_width,
				   int32_t block_tokens, int64_t *ret_slots)
{
	int64_t n = 0;

	for (int32_t b = 0; b < n_seqs; b++)
		for (int32_t i = 0; i < encoder_lens[b]; i++)
			ret_slots[n++] = (int64_t)block_table[(int64_t)b * table_width +
							      i / block_tokens] *
						 block_tokens +
					 i % block_tokens;
	return n;
}

KV_PUBLIC int64_t kv_token_to_seq(const int32_t *query_start_loc, int32_t n_seqs, int32_t n_mapped,
				  int32_t n_tokens, int32_t *buffer, int64_t room)
{
	int64_t n = n_mapped > n_tokens ? n_mapped : n_tokens, at = 0;

	if (room < n)
		return kv_error(-EINVAL, "token_to_seq: room for %lld given, %lld needed",
				(long long)room, (long long)n);
	if (query_start_loc[n_seqs] != n_mapped)
		return kv_error(-EINVAL, "query_start_loc[%d]: %d given, the host knows of %d tokens",
				n_seqs, query_start_loc[n_seqs], n_mapped);
	for (int32_t b = 0; b < n_seqs; b++)
		for (int32_t i = query_len(query_start_loc, b); i > 0; i--)
			buffer[at++] = b;
	for (; at < n; at++)
		buffer[at] = 0;
	return n;
}

KV_PUBLIC void kv_batch_unpadded(const struct kv_batch_data *data, uint32_t n_seqs, uint32_t n_tokens,
				 struct kv_batch_data *ret)
{
	*ret = *data;
	ret->n_seqs = n_seqs;
	ret->n_tokens = n_tokens;
	ret->n_real_seqs = data->n_real_seqs < n_seqs ? data->n_real_seqs : n_seqs;
	ret->n_real_tokens = data->n_real_tokens < n_tokens ? data->n_real_tokens : n_tokens;
	ret->positions = NULL;
	ret->token_to_seq = NULL;
	ret->doc_ranges = NULL;
	ret->seq_lens_upper = NULL;
}

KV_PUBLIC void kv_batch_regroup(const struct kv_batch_data *data, const int32_t *block_table,
				uint32_t table_width, const int64_t *slots, struct kv_batch_data *ret)
{
	*ret = *data;
	ret->block_table = block_table;
	ret->table_width = table_width;
	ret->slots = slots;
}
