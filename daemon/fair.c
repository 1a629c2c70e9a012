/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/daemon.h"
#include "daemon/fair.h"

static void serve_user(struct kv_user *user)
{
	struct kv_link *link;
	int64_t now = kv_now();

	user->time_ns += KV_FAIR_TURN;
	user->time_ns = user->time_ns < KV_FAIR_TURN ? user->time_ns : KV_FAIR_TURN;
	while (user->time_ns > 0 && (link = kv_list_take_first(&user->speaking))) {
		struct kv_peer *peer = kv_container_of(link, struct kv_peer, speaking);
		int64_t start = now;

		if (kv_peer_serve(peer))
			kv_list_append(&user->speaking, &peer->speaking);
		now = kv_now();
		user->time_ns -= now - start;
	}
}

/* One turn: a task, so that everybody who speaks in it is there. */
static void serve_all(void *arg)
{
	struct kv_daemon *d = arg;
	struct kv_link circle, *link;

	kv_link_init(&circle);
	kv_list_move(&circle, &d->speaking);
	while ((link = kv_list_take_first(&circle))) {
		struct kv_user *user = kv_container_of(link, struct kv_user, turn);

		user->n_refs++; /* its last connection may end here */
		serve_user(user);
		if (!kv_link_is_alone(&user->speaking))
			kv_list_append(&d->speaking, &user->turn);
		kv_user_put(user);
	}
	if (!kv_link_is_alone(&d->speaking))
		kv_task_queue(d->speaking_task);
}

int kv_fair_start(struct kv_daemon *d)
{
	return kv_task_new(d->loop, serve_all, d, &d->speaking_task);
}

void kv_fair_end(struct kv_daemon *d)
{
	d->speaking_task = kv_task_free(d->speaking_task);
}

void kv_fair_add(struct kv_peer *peer)
{
	struct kv_user *user = peer->user;

	if (!kv_link_is_alone(&peer->speaking))
		return;
	kv_list_append(&user->speaking, &peer->speaking);
	if (kv_link_is_alone(&user->turn))
		kv_list_append(&peer->daemon->speaking, &user->turn);
	kv_task_queue(peer->daemon->speaking_task);
}

void kv_fair_remove(struct kv_peer *peer)
{
	kv_link_unlink(&peer->speaking);
}
