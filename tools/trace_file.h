/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Recorded requests as a file: a JSON object a line, oldest first (tools/bench/trace.h reads it). hash_ids are
 * numbers in the order in which they appear, so that nothing of a prompt can be worked out from the file: equal ids
 * at equal positions mean that the prompts were equal up to there, and that is all.
 */
#ifndef KV_TOOLS_TRACE_FILE_H
#define KV_TOOLS_TRACE_FILE_H

#include "include/internal/wire.h"

struct kv_recorded {
	struct kv_trace_record record;
	size_t first_key; /* in kv_recording::keys */
};

struct kv_recording {
	struct kv_recorded *requests;
	size_t n, room;
	struct kv_trace_key *keys;
	size_t n_keys, keys_room;
	uint64_t n_lost; /* by numbers that are missing, and by the daemon */
	uint64_t n_input, n_hit, n_output;
};

/* kv_recording_add() - what a daemon has told. 0; -ENOMEM; -EPROTO: it makes no sense */
int kv_recording_add(struct kv_recording *r, const struct kv_msg_trace_part *part);
/* kv_recording_write() - timestamps in ms from @start_ns. 0; negative errno of the file */
int kv_recording_write(struct kv_recording *r, const char *path, int64_t start_ns);
void kv_recording_deinit(struct kv_recording *r);

#endif
