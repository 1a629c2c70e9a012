/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests, as kvctl trace record hears of them: a sequence whose prompt was looked up is one. While the daemon
 * records, its lookup notes how long the prompt is, what was found, and a hash of each KV_TRACE_BLOCK tokens with
 * all before them, seeded by the recording's secret; its end sends that off, without waiting.
 * What doesn't fit into the socket is lost, and the number of the next says so.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "libclient/internal.h"

static size_t n_keys_of(size_t n_tokens)
{
	return (n_tokens + KV_TRACE_TOKENS - 1) / KV_TRACE_TOKENS;
}

void kv_trace_note(struct kv_seq *seq, const int32_t *tokens, size_t n, size_t n_found)
{
	const struct kv_shm_pool *page = seq->pool->index;
	uint64_t salt = kv_load_relaxed(&page->trace_salt);
	struct kv_msg_traced *note = seq->traced;
	struct kv_key key = { 0, 0 };
	size_t n_keys = n_keys_of(n);

	/* A prompt that is looked up again, further on, is the same request. */
	if (note && note->n_input >= n) {
		note->n_hit += n_found;
		return;
	}
	/* Too long to be told: its number will be missing. */
	if (n_keys > KV_TRACE_KEYS) {
		seq->pool->n_traced++;
		return;
	}
	note = realloc(note, sizeof(*note) + n_keys * sizeof(*note->keys));
	if (!note)
		return;
	if (!seq->traced)
		*note = (struct kv_msg_traced){ .start_ns = kv_now() };
	seq->traced = note;
	note->n_input = n;
	note->n_hit += n_found;
	note->n_keys = (uint32_t)n_keys;
	for (size_t i = 0; i < n_keys; i++) {
		size_t at = i * KV_TRACE_TOKENS, rest = n - at;

		key = kv_key_next(salt, key, tokens + at, rest < KV_TRACE_TOKENS ? rest : KV_TRACE_TOKENS);
		note->keys[i] = (struct kv_trace_key){ key.lo, key.hi };
	}
}

void kv_trace_send(struct kv_seq *seq)
{
	const struct kv_shm_pool *page = seq->pool->index;
	struct kv_msg_traced *note = kv_steal(seq->traced);

	if (!note)
		return;
	if (kv_load_relaxed(&page->trace_salt)) {
		note->n_output = seq->len > note->n_input ? seq->len - note->n_input : 0;
		note->number = ++seq->pool->n_traced;
		note->head.type = KV_MSG_TRACED;
		note->head.size = (uint32_t)(sizeof(*note) + note->n_keys * sizeof(*note->keys));
		kv_connection_post(&seq->pool->connection, note);
	}
	free(note);
}

/* ---- kvctl's side ---- */

int kv_trace_start(struct kv_client *client, const char *pool, uint64_t salt, int64_t timeout)
{
	struct kv_msg_trace ask = { .head = { .type = KV_MSG_TRACE, .size = sizeof(ask) }, .salt = salt };
	int r;

	if (strlen(pool) >= KV_NAME_MAX)
		return kv_error(-EINVAL, "pool: '%s' is longer than %d bytes", pool, KV_NAME_MAX - 1);
	strcpy(ask.pool, pool);
	pthread_mutex_lock(&client->lock);
	r = kv_connection_call(&client->connection, &ask, KV_MSG_OK, sizeof(struct kv_msg_plain), NULL, 0, NULL,
			       kv_deadline(timeout));
	pthread_mutex_unlock(&client->lock);
	return r;
}

int kv_trace_next(struct kv_client *client, struct kv_msg_trace_part *ret, int64_t timeout)
{
	struct kv_msg_plain ask = { .head = { .type = KV_MSG_TRACE_NEXT, .size = sizeof(ask) } };
	const struct kv_wire_head *head = (const void *)client->connection.buffer;
	int r;

	pthread_mutex_lock(&client->lock);
	r = kv_connection_call(&client->connection, &ask, KV_MSG_TRACE_PART, sizeof(*ret), NULL, 0, NULL,
			       kv_deadline(timeout));
	if (!r)
		memcpy(ret, head, head->size);
	pthread_mutex_unlock(&client->lock);
	return r;
}
