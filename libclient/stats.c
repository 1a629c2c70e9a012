/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "libclient/internal.h"

static const uint32_t item_bytes[] = {
	[KV_STAT_DAEMON] = sizeof(struct kv_daemon_stats),
	[KV_STAT_GPU] = sizeof(struct kv_gpu_stats),
	[KV_STAT_POOL] = sizeof(struct kv_pool_stats),
	[KV_STAT_SESSION] = sizeof(struct kv_session_stats),
	[KV_STAT_BALANCE] = sizeof(struct kv_balance_stats),
	[KV_STAT_ERROR] = sizeof(struct kv_error_stats),
	[KV_STAT_HISTORY] = sizeof(struct kv_history_stats),
	[KV_STAT_BLOCK] = sizeof(struct kv_block_stats),
};

KV_PUBLIC size_t kv_stat_bytes(enum kv_stat_kind kind)
{
	return (unsigned)kind < sizeof(item_bytes) / sizeof(item_bytes[0]) ? item_bytes[kind] : 0;
}

/* One answer after the other, until none are left; a list that changes meanwhile may miss some. */
static int collect(struct kv_client *client, enum kv_stat_kind kind, char **items, size_t *n,
		   int64_t deadline)
{
	const struct kv_msg_stats_part *part = (const void *)client->connection.buffer;

	do {
		struct kv_msg_stats ask = { .head = { .type = KV_MSG_STATS, .size = sizeof(ask) },
					    .kind = (uint32_t)kind,
					    .first = (uint32_t)*n };
		void *more;
		int r = kv_connection_call(&client->connection, &ask, KV_MSG_STATS_PART, sizeof(*part),
					   NULL, 0, NULL, deadline);

		if (r < 0)
			return r;
		if (part->item_bytes != item_bytes[kind] ||
		    part->head.size != sizeof(*part) + (uint64_t)part->n * part->item_bytes)
			return kv_error(-EPROTO, "daemon: stats of %u bytes an item, %u are known here",
					part->item_bytes, item_bytes[kind]);
		more = realloc(*items, (*n + part->n + 1) * part->item_bytes);
		if (!more)
			return kv_error(-ENOMEM, "no memory");
		*items = more;
		memcpy(*items + *n * part->item_bytes, part->items,
		       (size_t)part->n * part->item_bytes);
		*n += part->n;
	} while (part->left && part->n);
	return 0;
}

KV_PUBLIC int kv_stats(struct kv_client *client, enum kv_stat_kind kind, void **ret_items,
		       size_t *ret_n, int64_t timeout)
{
	kv_cleanup(kv_freep) char *items = NULL;
	size_t n = 0;
	int r = kv_forked(client->fork_generation);

	if (r < 0)
		return r;
	if (!kv_stat_bytes(kind))
		return kv_error(-EINVAL, "kind: %d is not a kv_stat_kind", (int)kind);
	pthread_mutex_lock(&client->lock);
	r = collect(client, kind, &items, &n, kv_deadline(timeout));
	pthread_mutex_unlock(&client->lock);
	if (r < 0)
		return r;
	*ret_items = kv_steal(items);
	*ret_n = n;
	return 0;
}

KV_PUBLIC int kv_check(struct kv_client *client, struct kv_check_result *ret, int64_t timeout)
{
	struct kv_msg_plain ask = { .head = { .type = KV_MSG_CHECK, .size = sizeof(ask) } };
	int r = kv_forked(client->fork_generation);

	if (r < 0)
		return r;
	pthread_mutex_lock(&client->lock);
	r = kv_connection_call(&client->connection, &ask, KV_MSG_CHECKED,
			       sizeof(struct kv_msg_checked), NULL, 0, NULL, kv_deadline(timeout));
	if (!r)
		*ret = ((const struct kv_msg_checked *)client->connection.buffer)->result;
	pthread_mutex_unlock(&client->lock);
	return r;
}

static int unpack(const struct kv_msg_block_shown *shown, struct kv_session_stats **sessions,
		  int32_t **tokens)
{
	uint64_t n_sessions = shown->n_sessions * sizeof(**sessions);
	uint64_t n_tokens = shown->n_tokens * sizeof(**tokens);

	if (shown->head.size != sizeof(*shown) + n_sessions + n_tokens)
		return kv_error(-EPROTO, "daemon: a block of %u bytes, %llu expected", shown->head.size,
				(unsigned long long)(sizeof(*shown) + n_sessions + n_tokens));
	*sessions = malloc(n_sessions + 1);
	*tokens = malloc(n_tokens + 1);
	if (!*sessions || !*tokens)
		return kv_error(-ENOMEM, "no memory");
	memcpy(*sessions, shown->items, n_sessions);
	memcpy(*tokens, (const char *)shown->items + n_sessions, n_tokens);
	return 0;
}

KV_PUBLIC int kv_block_show(struct kv_client *client, const char *pool, kv_block_id id,
			    struct kv_block_stats *ret, struct kv_session_stats **ret_sessions,
			    int32_t **ret_tokens, int64_t timeout)
{
	struct kv_msg_block ask = { .head = { .type = KV_MSG_BLOCK, .size = sizeof(ask) },
				    .id = (uint32_t)id };
	const struct kv_msg_block_shown *shown = (const void *)client->connection.buffer;
	kv_cleanup(kv_freep) struct kv_session_stats *sessions = NULL;
	kv_cleanup(kv_freep) int32_t *tokens = NULL;
	int r = kv_forked(client->fork_generation);

	if (r < 0)
		return r;
	if (!pool)
		return kv_error(-EINVAL, "pool: NULL given, a name is needed");
	if (strlen(pool) >= KV_NAME_MAX)
		return kv_error(-EINVAL, "pool: '%s' is longer than %d bytes", pool, KV_NAME_MAX - 1);
	strcpy(ask.pool, pool);
	pthread_mutex_lock(&client->lock);
	r = kv_connection_call(&client->connection, &ask, KV_MSG_BLOCK_SHOWN, sizeof(*shown), NULL, 0,
			       NULL, kv_deadline(timeout));
	if (!r)
		r = unpack(shown, &sessions, &tokens);
	if (!r)
		*ret = shown->block;
	pthread_mutex_unlock(&client->lock);
	if (r < 0)
		return r;
	if (ret_sessions)
		*ret_sessions = kv_steal(sessions);
	if (ret_tokens)
		*ret_tokens = kv_steal(tokens);
	return 0;
}
