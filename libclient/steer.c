/* SPDX-License-Identifier: Apache-2.0 */
/* One message, one answer: what steers a pool by its name, for whoever is connected. */
#include <errno.h>
#include <string.h>

#include "libclient/internal.h"

/**
 * ask_of() - send @ask about pool @name and take a copy of its answer
 * @to:   where the name stands in @ask; [KV_NAME_MAX]
 * @type: of the answer, which has @size bytes
 */
static int ask_of(struct kv_client *client, const char *name, char *to, void *ask, uint16_t type,
		  void *ret, uint32_t size, int64_t timeout)
{
	const struct kv_wire_head *head = ask;
	int r = kv_forked(client->fork_generation);

	if (r < 0)
		return r;
	if (!name)
		return kv_error(-EINVAL, "name: NULL given, which pool?");
	if (strlen(name) >= KV_NAME_MAX)
		return kv_error(-EINVAL, "name: '%s' is longer than %d bytes", name,
				KV_NAME_MAX - 1);
	strcpy(to, name);
	pthread_mutex_lock(&client->lock);
	r = kv_connection_call(&client->connection, ask, type, size, NULL, 0, NULL,
			       kv_deadline(timeout));
	if (!r)
		memcpy(ret, client->connection.buffer, size);
	/* Asked twice, the first time with success. */
	if (r == -ENOENT && head->type == KV_MSG_POOL_DROP && client->connection.n_tries > 1)
		r = 0;
	pthread_mutex_unlock(&client->lock);
	return r;
}

KV_PUBLIC int kv_pool_drop(struct kv_client *client, const char *name, int64_t timeout)
{
	struct kv_msg_drop ask = { .head = { .type = KV_MSG_POOL_DROP, .size = sizeof(ask) } };
	struct kv_msg_plain ok;

	return ask_of(client, name, ask.name, &ask, KV_MSG_OK, &ok, sizeof(ok), timeout);
}

KV_PUBLIC int kv_pool_set(struct kv_client *client, const char *name,
			  const struct kv_pool_limits *limits, uint64_t *ret_revision,
			  int64_t timeout)
{
	struct kv_msg_pool_set ask = { .head = { .type = KV_MSG_POOL_SET, .size = sizeof(ask) } };
	struct kv_msg_pool_limits answer;
	struct kv_pool_limits l = { 0 };
	int r = kv_options_copy(&l, sizeof(l), limits);

	if (r < 0)
		return r;
	ask.change = l.change;
	ask.weight = l.weight;
	ask.min_bytes = l.min_bytes;
	ask.max_bytes = l.max_bytes;
	ask.revision = l.revision;
	r = ask_of(client, name, ask.name, &ask, KV_MSG_POOL_LIMITS, &answer, sizeof(answer),
		   timeout);
	if (!r && ret_revision)
		*ret_revision = answer.revision;
	return r;
}

KV_PUBLIC int kv_pool_compact(struct kv_client *client, const char *name, uint64_t rate,
			      int64_t timeout)
{
	struct kv_msg_compact ask = { .head = { .type = KV_MSG_POOL_COMPACT, .size = sizeof(ask) },
				      .rate = rate };
	struct kv_msg_plain ok;

	return ask_of(client, name, ask.name, &ask, KV_MSG_OK, &ok, sizeof(ok), timeout);
}

KV_PUBLIC int kv_pool_new_epoch(struct kv_client *client, const char *name, uint64_t *ret_epoch,
				uint64_t *ret_held, int64_t timeout)
{
	struct kv_msg_drop ask = { .head = { .type = KV_MSG_POOL_EPOCH, .size = sizeof(ask) } };
	struct kv_msg_epoch answer;
	int r = ask_of(client, name, ask.name, &ask, KV_MSG_EPOCH, &answer, sizeof(answer),
		       timeout);

	if (!r && ret_epoch)
		*ret_epoch = answer.epoch;
	if (!r && ret_held)
		*ret_held = answer.n_held;
	return r;
}
