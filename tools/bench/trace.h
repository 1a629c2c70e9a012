/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A trace of requests: one JSON object a line,
 *
 *	{"timestamp": 0, "input_length": 1300, "output_length": 20, "hash_ids": [0, 17, 18]}
 *
 * in any order of names; others are skipped, as are empty lines. timestamp is in ms, lengths are in
 * tokens. hash_ids names each block of KV_TRACE_BLOCK tokens of the input, the last one may be
 *partial: equal ids at equal positions mean that the inputs are equal up to there.
 */
#ifndef KV_TOOLS_BENCH_TRACE_H
#define KV_TOOLS_BENCH_TRACE_H

#include <stddef.h>
#include <stdint.h>

#define KV_TRACE_BLOCK	    512u
#define KV_TRACE_MAX_TOKENS ((uint64_t)1 << 28) /* input, or output, of one request */

struct kv_trace_request {
	double timestamp;
	uint32_t input_length, output_length;
	size_t first_id; /* in kv_trace::ids */
	uint32_t n_ids;
};

struct kv_trace {
	struct kv_trace_request *requests;
	size_t n_requests, requests_room;
	uint64_t *ids;
	size_t n_ids, ids_room;
	uint32_t longest_input, longest_output; /* tokens, the input's in whole blocks */
};

/**
 * kv_trace_read() - all requests of a file
 * @text: of an error: the file, the line, the field, and what was expected; [size]
 *
 * Return: 0; -EINVAL for a line that is no request, or a file without one; -ENOMEM; errors of
 *         open() and read().
 */
int kv_trace_read(const char *path, struct kv_trace *ret, char *text, size_t size);
void kv_trace_deinit(struct kv_trace *trace);

/* kv_trace_expand() - the tokens of block @id: different ids, different tokens */
void kv_trace_expand(uint64_t id, int32_t tokens[KV_TRACE_BLOCK]);

#endif
