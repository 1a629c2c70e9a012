/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reference calculators: rows of recurrent state.
 *
 * A request owns a working row, and n_draft - 1 rows for the states after draft tokens. After a
 * verification its state lies in one of them: current[request] says which.
 */
#include <string.h>

#include "alloc/compat_rows.h"

static bool known(const struct kv_compat_mamba_rows *m, int64_t request)
{
	return request >= 0 && request < (int64_t)m->n_current;
}

void kv_compat_mamba_reset(struct kv_compat_mamba_rows *m, const int64_t *requests,
			   const int64_t *working, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (known(m, requests[i]))
			m->current[requests[i]] = working[i];
}

void kv_compat_mamba_current(const struct kv_compat_mamba_rows *m, const int64_t *requests,
			     const int64_t *working, const int64_t *cow, size_t n, int64_t *ret)
{
	for (size_t i = 0; i < n; i++) {
		ret[i] = -1;
		if (working[i] < 0 || !known(m, requests[i]))
			continue;
		ret[i] = m->current[requests[i]];
		if (ret[i] < 0)
			ret[i] = working[i];
		if (cow && cow[i] >= 0 && ret[i] == working[i])
			ret[i] = cow[i];
	}
}

static int64_t output(const struct kv_compat_mamba_rows *m, int64_t request, int64_t working,
		      int64_t k)
{
	if (working < 0)
		return -1;
	if (!k)
		return working;
	return known(m, request) ? m->draft_base + request * m->draft_per_request + k - 1 : -1;
}

void kv_compat_mamba_verify(const struct kv_compat_mamba_rows *m, const int64_t *requests,
			    const int64_t *working, size_t n, int64_t n_tokens, int64_t *ret)
{
	for (size_t i = 0; i < n; i++)
		for (int64_t k = 0; k < n_tokens; k++)
			*ret++ = output(m, requests[i], working[i], k);
}

void kv_compat_mamba_accept(struct kv_compat_mamba_rows *m, const int64_t *requests,
			    const int64_t *working, const int64_t *accepted, size_t n,
			    int64_t n_tokens)
{
	for (size_t i = 0; i < n; i++)
		if (known(m, requests[i]))
			m->current[requests[i]] =
				output(m, requests[i], working[i],
				       kv_max64(1, kv_min64(accepted[i], n_tokens)) - 1);
}

void kv_compat_extend_tracks(int64_t page_size, int64_t chunk, int64_t conv_len,
			     const int64_t *seq_lens, const int64_t *prefix_lens,
			     const int64_t *working, const int64_t *track, size_t n,
			     struct kv_compat_extend *ret)
{
	int64_t after = 0, before = 0; /* chunk states of the rows so far, in the two layouts */

	ret->n_tracks = ret->n_finals = 0;
	ret->query_start[0] = 0;
	for (size_t i = 0; i < n; i++) {
		int64_t final = seq_lens[i], new = final - prefix_lens[i];
		int64_t inside = kv_floor_div(final, page_size) * page_size - prefix_lens[i];

		ret->query_start[i + 1] = ret->query_start[i] + new;
		if (track[i] >= 0 && inside > 0 && inside < new &&inside % chunk == 0)
			ret->tracks[ret->n_tracks++] = (struct kv_compat_track){
				.source = after + inside / chunk - 1,
				.source_before = before + inside / chunk,
				.target = track[i],
				.conv_first = ret->query_start[i] + inside - conv_len,
			};
		if (track[i] >= 0 && final >= page_size && final % page_size == 0) {
			ret->final_source[ret->n_finals] = working[i];
			ret->final_target[ret->n_finals++] = track[i];
		}
		after += kv_floor_div(new, chunk);
		before += kv_floor_div(new - 1, chunk) + 1;
	}
}
