/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Recording requests for kvctl trace record. While somebody records, pages of the pools it wants carry the
 * recording's secret, by which clients know that they are to tell of requests that end (libclient/trace.c). What
 * they tell waits here until the recorder fetches it; what finds no room is counted. It ends with
 * the recorder's connection, or with this worker: then the recorder begins anew with the same secret.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/daemon.h"
#include "daemon/log.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"

#define MOST_BYTES ((size_t)8 << 20) /* that wait */

struct kv_tracing {
	struct kv_peer *recorder;
	char pool[KV_NAME_MAX]; /* "": all */
	uint64_t salt;
	uint8_t *bytes; /* [MOST_BYTES] records from `first` to `end` */
	size_t first, end;
	uint64_t n_lost;
};

static bool wants(const struct kv_tracing *t, const struct kv_pool *pool)
{
	return t && (!*t->pool || !strcmp(t->pool, pool->name));
}

void kv_trace_pool(struct kv_pool *pool)
{
	const struct kv_tracing *t = pool->daemon->tracing;

	kv_store_relaxed(&pool->head->trace_salt, wants(t, pool) ? t->salt : 0);
}

static void all_pools(struct kv_daemon *d)
{
	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next)
		kv_trace_pool(kv_container_of(l, struct kv_pool, link));
}

void kv_trace_end(struct kv_daemon *d, const struct kv_peer *recorder)
{
	struct kv_tracing *t = d->tracing;

	if (!t || (recorder && t->recorder != recorder))
		return;
	d->tracing = NULL;
	all_pools(d);
	free(t->bytes);
	free(t);
}

static int begin(struct kv_peer *peer, const struct kv_msg_trace *msg)
{
	struct kv_daemon *d = peer->daemon;
	struct kv_tracing *t;

	if (!kv_user_may_administer(peer))
		return kv_error(-EPERM, "trace: user %u may not record what others ask for; root, the user that "
				"kvcached runs as, and whom the access list lets administer may", peer->uid);
	if (!msg->salt)
		return kv_error(-EINVAL, "trace: salt: 0 given");
	if (*msg->pool && !kv_pool_find(d, msg->pool))
		return kv_error(-ENOENT, "pool: there is no '%s'", msg->pool);
	if (d->tracing && d->tracing->recorder != peer)
		return kv_error(-EBUSY, "trace: '%s' (pid %d) records already", d->tracing->recorder->name,
				d->tracing->recorder->pid);
	kv_trace_end(d, peer);
	t = calloc(1, sizeof(*t));
	if (t)
		t->bytes = malloc(MOST_BYTES);
	if (!t || !t->bytes) {
		free(t);
		return kv_error(-ENOMEM, "no memory");
	}
	t->recorder = peer;
	t->salt = msg->salt;
	memcpy(t->pool, msg->pool, sizeof(t->pool));
	d->tracing = t;
	all_pools(d);
	kv_log(KV_LOG_INFO, "'%s' (pid %d, user %u) records requests of %s%s", peer->name, peer->pid, peer->uid,
	       *t->pool ? "pool " : "all pools", t->pool);
	return 0;
}

void kv_trace_handle(struct kv_peer *peer, const struct kv_msg_trace *msg)
{
	struct kv_msg_plain reply;
	int r = begin(peer, msg);

	if (r < 0) {
		kv_peer_error(peer, msg->head.tag, r, "%s", kv_error_text());
		return;
	}
	kv_wire_init(&reply.head, KV_MSG_OK, sizeof(reply), msg->head.tag);
	kv_peer_send(peer, &reply, sizeof(reply), NULL, 0);
}

void kv_traced_handle(struct kv_peer *peer, const struct kv_msg_traced *msg)
{
	struct kv_tracing *t = peer->daemon->tracing;
	struct kv_trace_record record = { .start_ns = msg->start_ns,
					  .session = peer->session->id,
					  .pool = peer->session->pool->id,
					  .number = msg->number,
					  .n_input = msg->n_input,
					  .n_hit = msg->n_hit,
					  .n_output = msg->n_output,
					  .n_keys = msg->n_keys };
	size_t list = msg->n_keys * sizeof(struct kv_trace_key);

	if (msg->head.size != sizeof(*msg) + list ||
	    msg->n_keys != msg->n_input / KV_TRACE_TOKENS + !!(msg->n_input % KV_TRACE_TOKENS) ||
	    msg->n_keys > KV_TRACE_KEYS || msg->n_hit > msg->n_input) {
		kv_peer_drop(peer, "it told of a request that can't be");
		return;
	}
	if (!wants(t, peer->session->pool))
		return;
	if (t->first && MOST_BYTES - t->end < sizeof(record) + list) {
		memmove(t->bytes, t->bytes + t->first, t->end - t->first);
		t->end -= t->first;
		t->first = 0;
	}
	if (MOST_BYTES - t->end < sizeof(record) + list) {
		t->n_lost++;
		return;
	}
	memcpy(t->bytes + t->end, &record, sizeof(record));
	memcpy(t->bytes + t->end + sizeof(record), msg->keys, list);
	t->end += sizeof(record) + list;
}

void kv_trace_next_handle(struct kv_peer *peer, uint32_t tag)
{
	struct kv_tracing *t = peer->daemon->tracing;
	kv_cleanup(kv_freep) struct kv_msg_trace_part *reply = calloc(1, KV_WIRE_MAX);
	uint32_t used = 0;

	if (!reply || !t || t->recorder != peer) {
		kv_peer_error(peer, tag, reply ? -ENOENT : -ENOMEM, "trace: %s",
			      reply ? "this connection doesn't record" : "no memory for what was recorded");
		return;
	}
	while (t->first < t->end) {
		struct kv_trace_record record;
		size_t size;

		memcpy(&record, t->bytes + t->first, sizeof(record));
		size = sizeof(record) + record.n_keys * sizeof(struct kv_trace_key);
		if (sizeof(*reply) + used + size > KV_WIRE_MAX)
			break;
		memcpy((char *)reply->items + used, t->bytes + t->first, size);
		used += (uint32_t)size;
		t->first += size;
		reply->n++;
	}
	reply->n_lost = t->n_lost;
	reply->more = t->first < t->end;
	if (!reply->more)
		t->first = t->end = 0;
	kv_wire_init(&reply->head, KV_MSG_TRACE_PART, (uint32_t)sizeof(*reply) + used, tag);
	kv_peer_send(peer, reply, reply->head.size, NULL, 0);
}
