/* SPDX-License-Identifier: Apache-2.0 */
/* Metadata of recurrent layers: rows, columns, chunks, splits, from lengths on the host. */
#include <errno.h>
#include <kvcached/recurrent.h>
#include <stdbool.h>
#include <string.h>

#include "include/internal/error.h"
#include "include/internal/public.h"

static int32_t larger(int32_t a, int32_t b)
{
	return a > b ? a : b;
}

static int32_t query_len(const int32_t *query_start_loc, int32_t b)
{
	return query_start_loc[b + 1] - query_start_loc[b];
}

/* Column of the state after @n tokens; of none, the first. */
static int32_t column_of(int32_t n, int32_t interval)
{
	return n > 0 ? (n - 1) / interval : 0;
}

static int check_lens(const char *name, const int32_t *lens, int32_t n_seqs)
{
	if (n_seqs < 0)
		return kv_error(-EINVAL, "n_seqs: %d given, 0 or more allowed", n_seqs);
	if (n_seqs && !lens)
		return kv_error(-EINVAL, "%s: NULL given, an array of %d needed", name, n_seqs);
	for (int32_t b = 0; b < n_seqs; b++)
		if (lens[b] < 0)
			return kv_error(-EINVAL, "%s[%d]: %d given, 0 or more allowed", name, b,
					lens[b]);
	return 0;
}

static int check_query_lens(const int32_t *query_start_loc, int32_t n_seqs)
{
	for (int32_t b = 0; b < n_seqs; b++)
		if (query_len(query_start_loc, b) < 0)
			return kv_error(-EINVAL,
					"query_start_loc[%d]: %d after %d given, it may not fall",
					b + 1, query_start_loc[b + 1], query_start_loc[b]);
	return 0;
}

KV_PUBLIC int kv_state_rows(const int32_t *block_table, int32_t table_width,
			    const int32_t *seq_lens, int32_t n_seqs, int32_t interval,
			    int32_t n_drafts, int32_t *ret_rows)
{
	int32_t width = interval ? 1 + n_drafts : table_width;
	int r = check_lens("seq_lens", seq_lens, n_seqs);

	if (r < 0)
		return r;
	if (interval < 0 || n_drafts < 0 || (!interval && n_drafts))
		return kv_error(-EINVAL,
				"interval, n_drafts: %d, %d given; 0 or more, and no drafts "
				"with interval 0",
				interval, n_drafts);
	for (int32_t b = 0; b < n_seqs && interval; b++)
		if ((int64_t)column_of(seq_lens[b], interval) + n_drafts >= table_width)
			return kv_error(-ERANGE,
					"seq_lens[%d]: %d tokens and %d drafts lie in columns "
					"up to %lld, table_width is %d",
					b, seq_lens[b], n_drafts,
					(long long)column_of(seq_lens[b], interval) + n_drafts,
					table_width);
	for (int32_t b = 0; b < n_seqs; b++) {
		int32_t column = interval ? column_of(seq_lens[b], interval) : 0;

		memcpy(ret_rows + (int64_t)b * width,
		       block_table + (int64_t)b * table_width + column,
		       (size_t)width * sizeof(*ret_rows));
	}
	return 0;
}

KV_PUBLIC int kv_state_columns(const int32_t *n_computed, const int32_t *seq_lens, int32_t n_seqs,
			       int32_t interval, int32_t *ret_last_computed,
			       int32_t *ret_first_scheduled, int32_t *ret_last_scheduled)
{
	int r = check_lens("n_computed", n_computed, n_seqs);

	if (!r)
		r = check_lens("seq_lens", seq_lens, n_seqs);
	if (r < 0)
		return r;
	if (interval < 1)
		return kv_error(-EINVAL, "interval: %d given, 1 or more allowed", interval);
	for (int32_t b = 0; b < n_seqs; b++) {
		if (ret_last_computed)
			ret_last_computed[b] = column_of(n_computed[b], interval);
		if (ret_first_scheduled)
			ret_first_scheduled[b] = n_computed[b] / interval;
		if (ret_last_scheduled)
			ret_last_scheduled[b] = column_of(seq_lens[b], interval);
	}
	return 0;
}

KV_PUBLIC int kv_replay_steps(const int32_t *n_computed, const int32_t *bases,
			      const int32_t *n_query, int32_t n_seqs, int32_t room,
			      int32_t interval, int32_t *ret_write_pos, uint8_t *ret_flush)
{
	int r = check_lens("n_computed", n_computed, n_seqs);

	if (!r)
		r = check_lens("bases", bases, n_seqs);
	if (!r)
		r = check_lens("n_query", n_query, n_seqs);
	if (r < 0)
		return r;
	if (room < 1 || interval < 0)
		return kv_error(-EINVAL,
				"room, interval: %d, %d given; 1 or more, 0 or more allowed", room,
				interval);
	for (int32_t b = 0; b < n_seqs; b++) {
		int32_t base = bases[b], steps;
		int64_t end = (int64_t)n_computed[b] + n_query[b];

		if (interval)
			base = larger(base, n_computed[b] / interval * interval);
		steps = n_query[b] ? n_computed[b] - base : 0;
		ret_write_pos[b] = steps > 0 ? steps % room : 0;
		ret_flush[b] = steps < 0 || ret_write_pos[b] == room - 1 ||
			       (interval && end % interval == 0);
	}
	return 0;
}

KV_PUBLIC int64_t kv_state_chunks_bound(const int32_t *query_start_loc, int32_t n_seqs,
					int32_t chunk)
{
	int64_t n = 0;

	for (int32_t b = 0; b < n_seqs; b++) {
		int32_t len = query_len(query_start_loc, b);

		n += len > 0 ? 1 + (len - 1 + chunk - 1) / chunk : 0; /* one may be of one token */
	}
	return n;
}

KV_PUBLIC int kv_state_chunks(const int32_t *query_start_loc, const int32_t *n_computed,
			      int32_t n_seqs, int32_t chunk, int32_t *ret_chunk_start_loc,
			      int32_t *ret_chunk_seq, int32_t *ret_last_chunk)
{
	int r = check_lens("n_computed", n_computed, n_seqs);
	int n = 0;

	if (r < 0)
		return r;
	if (chunk < 1)
		return kv_error(-EINVAL, "chunk: %d given, 1 or more allowed", chunk);
	r = check_query_lens(query_start_loc, n_seqs);
	if (r < 0)
		return r;
	ret_chunk_start_loc[0] = n_seqs ? query_start_loc[0] : 0;
	for (int32_t b = 0; b < n_seqs; b++) {
		int32_t left = query_len(query_start_loc, b), at = n_computed[b] % chunk;

		ret_last_chunk[b] = -1;
		while (left > 0) {
			int32_t take = left < chunk - at ? left : chunk - at;

			ret_chunk_start_loc[n + 1] = ret_chunk_start_loc[n] + take;
			ret_chunk_seq[n] = b;
			ret_last_chunk[b] = n++;
			left -= take;
			at = 0;
		}
	}
	return n;
}

KV_PUBLIC int kv_state_tracks(const int32_t *query_start_loc, const int32_t *n_computed, int32_t n_seqs,
			      int32_t interval, int32_t chunk, struct kv_state_track *ret)
{
	int64_t after = 0, before = 0; /* chunk states of the sequences so far */
	int r = check_lens("n_computed", n_computed, n_seqs);

	if (r < 0)
		return r;
	if (interval < 1 || chunk < 1)
		return kv_error(-EINVAL, "interval, chunk: %d, %d given, 1 or more allowed", interval, chunk);
	r = check_query_lens(query_start_loc, n_seqs);
	if (r < 0)
		return r;
	for (int32_t b = 0; b < n_seqs; b++) {
		int32_t len = query_len(query_start_loc, b);
		int64_t end = (int64_t)n_computed[b] + len, kept = end - end % interval;
		int64_t inside = kept - n_computed[b];
		bool found = inside > 0 && inside < len && inside % chunk == 0;

		ret[b] = (struct kv_state_track){
			.after = found ? after + inside / chunk - 1 : -1,
			.before = found ? before + inside / chunk : -1,
			.conv_end = found ? query_start_loc[b] + inside : -1,
			.n_tokens = found ? (int32_t)kept : 0,
			.at_end = len && kept == end,
		};
		after += len / chunk;
		before += (len + (int64_t)chunk - 1) / chunk;
	}
	return 0;
}

KV_PUBLIC int64_t kv_conv_programs_room(int64_t n_programs)
{
	return 2 * (n_programs > 1024 ? n_programs : 1024);
}

KV_PUBLIC int64_t kv_conv_programs(const int32_t *query_start_loc, int32_t n_seqs, int32_t *ret_seq,
				   int32_t *ret_offset, int64_t room)
{
	int64_t n = 0;

	for (int32_t b = 0; b < n_seqs; b++)
		n += (query_len(query_start_loc, b) + KV_CONV_PROGRAM - 1) / KV_CONV_PROGRAM;
	if (n > room)
		return kv_error(-E2BIG, "room: %lld given, there are %lld programs",
				(long long)room, (long long)n);
	n = 0;
	for (int32_t b = 0; b < n_seqs; b++)
		for (int32_t i = 0; (int64_t)i * KV_CONV_PROGRAM < query_len(query_start_loc, b);
		     i++) {
			ret_seq[n] = b;
			ret_offset[n++] = i;
		}
	for (int64_t i = n; i < room; i++)
		ret_seq[i] = ret_offset[i] = -1;
	return n;
}

KV_PUBLIC void kv_split_states(const int32_t *query_start_loc, const int32_t *seq_lens,
			       const uint8_t *prefilling, int32_t n_seqs, int32_t n_tokens,
			       int32_t threshold, struct kv_split *ret)
{
	int32_t b = 0;

	for (; b < n_seqs; b++) {
		int32_t n = query_len(query_start_loc, b);

		if (n > threshold || (prefilling[b] && !(n == 1 && seq_lens[b] > 1)))
			break;
	}
	*ret = (struct kv_split){
		.n_decodes = b,
		.n_prefills = n_seqs - b,
		.n_decode_tokens = b == n_seqs ? n_tokens : query_start_loc[b],
		.n_prefill_tokens = b == n_seqs ? 0 : n_tokens - query_start_loc[b],
	};
}

KV_PUBLIC void kv_split_drafts(const int32_t *query_start_loc, const int32_t *n_drafts,
			       int32_t n_seqs, int32_t n_tokens, uint8_t *ret_verify,
			       struct kv_draft_split *ret)
{
	struct kv_split plain;
	int any = 0;

	*ret = (struct kv_draft_split){0};
	for (int32_t b = 0; b < n_seqs; b++)
		any |= n_drafts[b] > 0;
	for (int32_t b = 0; b < n_seqs; b++) {
		ret_verify[b] = any && n_drafts[b] >= 0;
		if (ret_verify[b]) {
			ret->n_verify++;
			ret->n_verify_tokens += query_len(query_start_loc, b);
		}
	}
	if (any) {
		ret->n_prefills = n_seqs - ret->n_verify;
		ret->n_prefill_tokens = n_tokens - ret->n_verify_tokens;
		return;
	}
	kv_split_decodes(query_start_loc, n_seqs, n_tokens, 1, 0, NULL, &plain);
	ret->n_decodes = plain.n_decodes;
	ret->n_decode_tokens = plain.n_decode_tokens;
	ret->n_prefills = plain.n_prefills;
	ret->n_prefill_tokens = plain.n_prefill_tokens;
}
