/* SPDX-License-Identifier: Apache-2.0 */
/* Asking for another worker, and waiting until it serves. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "libclient/internal.h"

static int daemon_stats(struct kv_client *client, int64_t deadline, struct kv_daemon_stats *ret)
{
	int64_t left = deadline - kv_now();
	void *items;
	size_t n;
	int r = kv_stats(client, KV_STAT_DAEMON, &items, &n, left > 0 ? left : -1);

	if (r < 0)
		return r;
	*ret = *(struct kv_daemon_stats *)items;
	free(items);
	return 0;
}

/* The worker that was asked may still answer once. */
static int wait_for_another(struct kv_client *client, const struct kv_daemon_stats *before,
			    int64_t deadline)
{
	for (;;) {
		struct kv_daemon_stats now;
		int r = daemon_stats(client, deadline, &now);

		if (r < 0)
			return r;
		if (now.programs_given_up != before->programs_given_up)
			return kv_error(-EIO, "the new program ended before it served (the daemon's "
					      "log says how): worker %llu runs the one before",
					(unsigned long long)now.worker_pid);
		if (now.worker_pid != before->worker_pid)
			return 0;
		if (kv_now() >= deadline)
			return kv_error(-ETIMEDOUT, "worker %llu has not ended in time",
					(unsigned long long)before->worker_pid);
		kv_socket_wait(-1, 0, kv_now() + KV_MSEC); /* for nothing */
	}
}

KV_PUBLIC int kv_worker_restart(struct kv_client *client, const char *binary, int64_t timeout)
{
	struct kv_msg_restart ask = { .head = { .type = KV_MSG_RESTART, .size = sizeof(ask) } };
	int64_t deadline = kv_deadline(timeout);
	struct kv_daemon_stats before;
	int r = kv_forked(client->fork_generation);

	if (r < 0)
		return r;
	if (binary && (binary[0] != '/' || strlen(binary) >= sizeof(ask.binary)))
		return kv_error(-EINVAL, "binary: '%.200s' given; an absolute path of at most %zu bytes "
				"is needed", binary, sizeof(ask.binary) - 1);
	if (binary)
		strcpy(ask.binary, binary);
	r = daemon_stats(client, deadline, &before);
	if (r < 0)
		return r;
	pthread_mutex_lock(&client->lock);
	r = kv_connection_call(&client->connection, &ask, KV_MSG_OK, sizeof(struct kv_msg_plain), NULL,
			       0, NULL, deadline);
	pthread_mutex_unlock(&client->lock);
	return r < 0 ? r : wait_for_another(client, &before, deadline);
}
