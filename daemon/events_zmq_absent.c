/* SPDX-License-Identifier: Apache-2.0 */
/* Built without ZMQ: there is never a sender. */
#include <errno.h>

#include "daemon/events.h"
#include "include/internal/error.h"

int kv_event_sender_new(const char *endpoint, const char *replay, struct kv_event_sender **ret)
{
	(void)endpoint;
	(void)replay;
	(void)ret;
	return kv_error(-ENOTSUP, "--events: this kvcached was built without libzmq");
}

bool kv_event_sender_push(struct kv_event_sender *sender, const char *topic, uint64_t sequence,
			  void *payload, size_t n)
{
	(void)sender;
	(void)topic;
	(void)sequence;
	(void)payload;
	(void)n;
	return false;
}

int kv_event_sender_fd(const struct kv_event_sender *sender)
{
	(void)sender;
	return -1;
}

bool kv_event_sender_has_room(const struct kv_event_sender *sender)
{
	(void)sender;
	return false;
}

struct kv_event_sender *kv_event_sender_free(struct kv_event_sender *sender)
{
	(void)sender;
	return NULL;
}
