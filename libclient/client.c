/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/paths.h"
#include "libclient/internal.h"

int64_t kv_until(int64_t timeout)
{
	int64_t now = kv_now();

	return timeout < 0 ? now : timeout > INT64_MAX - now ? INT64_MAX : now + timeout;
}

int64_t kv_deadline(int64_t timeout)
{
	return kv_until(timeout ? timeout : KV_DEFAULT_TIMEOUT);
}

int kv_options_copy(void *to, size_t size, const void *options)
{
	size_t given;

	memset(to, 0, size);
	if (!options)
		return kv_error(-EINVAL, "options: NULL given; a struct that begins with its size is needed");
	given = *(const size_t *)options;
	if (given < sizeof(size_t) || given > 4096)
		return kv_error(-EINVAL, "options.size: %zu given; sizeof the struct is needed", given);
	memcpy(to, options, given < size ? given : size);
	return 0;
}

KV_PUBLIC int kv_connect(const struct kv_connect_options *options, struct kv_client **ret)
{
	struct kv_connect_options o = { 0 };
	struct kv_msg_welcome welcome;
	struct kv_client *client;
	int r = options ? kv_options_copy(&o, sizeof(o), options) : 0;

	if (r < 0)
		return r;
	client = calloc(1, sizeof(*client));
	if (!client)
		return kv_no_memory();
	pthread_mutex_init(&client->lock, NULL);
	client->fork_generation = kv_fork_generation;
	strncpy(client->name, o.name ? o.name : program_invocation_short_name,
		sizeof(client->name) - 1);
	r = 0;
	if (!o.socket)
		r = kv_default_socket(client->socket);
	else if (strlen(o.socket) >= sizeof(client->socket))
		r = kv_error(-ENAMETOOLONG, "socket: '%s' is longer than %zu bytes", o.socket,
			     sizeof(client->socket) - 1);
	else
		strcpy(client->socket, o.socket);
	if (!r)
		r = kv_connection_open(&client->connection, client->socket, client->name,
				       kv_deadline(o.timeout), &welcome);
	if (!r && welcome.n_gpus > KV_MAX_GPUS) {
		kv_connection_close(&client->connection);
		r = kv_error(-EPROTO, "daemon: %u devices, at most %d are known here", welcome.n_gpus,
			     KV_MAX_GPUS);
	}
	if (r < 0) {
		pthread_mutex_destroy(&client->lock);
		free(client);
		return r;
	}
	client->connection.socket = client->socket;
	client->connection.name = client->name;
	client->n_gpus = (int32_t)welcome.n_gpus;
	memcpy(client->gpus, welcome.gpus, sizeof(client->gpus));
	*ret = client;
	return 0;
}

KV_PUBLIC struct kv_client *kv_disconnect(struct kv_client *client)
{
	if (!client)
		return NULL;
	kv_connection_close(&client->connection);
	pthread_mutex_destroy(&client->lock);
	free(client);
	return NULL;
}

KV_PUBLIC int kv_ping(struct kv_client *client, int64_t timeout)
{
	struct kv_msg_plain ping = { .head = { .type = KV_MSG_PING, .size = sizeof(ping) } };
	int r = kv_forked(client->fork_generation);
	uint32_t n_late;

	if (r < 0)
		return r;
	pthread_mutex_lock(&client->lock);
	r = kv_connection_call(&client->connection, &ping, KV_MSG_OK, sizeof(ping), NULL, 0, NULL,
			       kv_deadline(timeout));
	pthread_mutex_unlock(&client->lock);
	n_late = kv_load_relaxed(&client->n_late);
	if (!r && n_late)
		r = kv_error(-EAGAIN, "daemon: it did not answer for a while, and %u ops (blocks given or "
			     "published) are still to be sent: the next calls for their pools do that", n_late);
	return r;
}

KV_PUBLIC int kv_client_gpus(const struct kv_client *client, const struct kv_gpu **ret)
{
	*ret = client->gpus;
	return client->n_gpus;
}
