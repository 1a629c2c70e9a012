/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connections: who is at the other end, messages in and out, and how it ends.
 *
 * An end in good order is POOL_CLOSE: the client says that its work is over, and all it held is free at
 * once. Any other end is a hang-up: its leases are set aside (QUARANTINED) and its holder bits stay
 * until the pidfd says that the process is dead, because a GPU may go on writing for it after the
 * socket has closed. The pidfd is watched from the start: a forked child that keeps the socket
 * open doesn't hide its parent's death.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/daemon.h"
#include "daemon/fair.h"
#include "daemon/log.h"
#include "daemon/walk.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"
#include "include/kvcached/client.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

#define CONNECTION_COST 8 /* as many messages */
#define OPS_A_TIME	512 /* some 0.5 ms if all publish */

void kv_peer_send(struct kv_peer *peer, const void *msg, uint32_t size, const int *fds,
		  uint32_t n_fds)
{
	int r;

	if (peer->fd < 0)
		return;
	r = kv_socket_send(peer->fd, msg, size, fds, n_fds, 1);
	/* It may have ended, and its hang-up not been seen yet: no reason for a warning. */
	if (r == -EPIPE || r == -ECONNRESET)
		kv_peer_drop(peer, NULL);
	else if (r < 0)
		kv_peer_drop(peer, r == -EAGAIN ? "it doesn't read its answers" : strerror(-r));
}

void kv_peer_error(struct kv_peer *peer, uint32_t tag, int error, const char *format, ...)
{
	struct kv_msg_error msg = { .error = error };
	va_list args;

	va_start(args, format);
	vsnprintf(msg.text, sizeof(msg.text), format, args);
	va_end(args);
	kv_wire_init(&msg.head, KV_MSG_ERROR, sizeof(msg), tag);
	kv_peer_send(peer, &msg, sizeof(msg), NULL, 0);
}

static void send_ok(struct kv_peer *peer, uint32_t tag)
{
	struct kv_msg_plain msg;

	kv_wire_init(&msg.head, KV_MSG_OK, sizeof(msg), tag);
	kv_peer_send(peer, &msg, sizeof(msg), NULL, 0);
}

struct kv_peer *kv_peer_free(struct kv_peer *peer)
{
	kv_trace_end(peer->daemon, peer);
	if (peer->session)
		kv_session_free(peer->session);
	kv_fair_remove(peer);
	kv_watch_free(peer->watch);
	kv_watch_free(peer->pid_watch);
	kv_timer_free(peer->open_timer);
	kv_close(peer->fd);
	kv_close(peer->pidfd);
	kv_link_unlink(&peer->link);
	peer->daemon->n_peers--;
	if (peer->counted)
		kv_user_take(peer->user, KV_USER_CLIENTS);
	kv_user_put(peer->user);
	free(peer->pending_open);
	free(peer->walk);
	free(peer->message);
	free(peer);
	return NULL;
}

/* The socket ends here. The peer itself is freed by readable(), or when its process has ended. */
void kv_peer_drop(struct kv_peer *peer, const char *why)
{
	if (peer->fd < 0 && !peer->away)
		return;
	peer->away = false;
	if (why)
		kv_log(KV_LOG_WARN, "'%s' (pid %d) is disconnected: %s", peer->name, peer->pid, why);
	kv_fair_remove(peer);
	peer->watch = kv_watch_free(peer->watch);
	peer->fd = kv_close(peer->fd);
	if (peer->session)
		kv_session_drop(peer->session);
	free(kv_steal(peer->pending_open));
	free(kv_steal(peer->walk));
	free(kv_steal(peer->message));
	if (peer->open_timer)
		kv_timer_set(peer->open_timer, -1);
}

static void hung_up(struct kv_peer *peer)
{
	/* What it had published before it went is complete and counts. */
	if (peer->session)
		kv_session_drain(peer->session);
	kv_peer_drop(peer, NULL);
}

static void process_ended(uint32_t events, void *arg)
{
	struct kv_peer *peer = arg;

	(void)events;
	hung_up(peer);
	kv_log(KV_LOG_DEBUG, "'%s' (pid %d) has ended", peer->name, peer->pid);
	kv_peer_free(peer);
}

static bool is_text(const char *text, size_t size)
{
	return memchr(text, 0, size);
}

static void handle_hello(struct kv_peer *peer, const void *data)
{
	const struct kv_msg_hello *msg = data;
	struct kv_daemon *d = peer->daemon;
	struct kv_msg_welcome reply = { .client_id = peer->id,
					.boot_nonce = d->boot_nonce,
					.n_gpus = d->n_gpus,
					.shm_abi = KV_SHM_ABI };

	if (!is_text(msg->name, sizeof(msg->name)) || !is_text(msg->version, sizeof(msg->version))) {
		kv_peer_error(peer, msg->head.tag, -EINVAL, "hello: name and version must end");
		return;
	}
	memcpy(peer->name, msg->name, sizeof(peer->name));
	peer->greeted = true;
	snprintf(reply.version, sizeof(reply.version), "%s", kv_version());
	for (uint32_t i = 0; i < d->n_gpus; i++) {
		const struct kv_arena_export *e = &d->gpus[i].arena->export;
		struct kv_gpu *gpu = &reply.gpus[i];

		gpu->index = (int32_t)i;
		gpu->device = e->kind == KV_EXPORT_HOST ? KV_DEVICE_HOST : KV_DEVICE_CUDA;
		gpu->arena_bytes = e->bytes;
		snprintf(gpu->name, sizeof(gpu->name), "%s", d->gpus[i].info.name);
		snprintf(gpu->export_kind, sizeof(gpu->export_kind), "%s", kv_export_name(e->kind));
		snprintf(gpu->limits, sizeof(gpu->limits), "%s", kv_export_limits(e->kind));
		if (e->kind != KV_EXPORT_HOST)
			kv_uuid_format(e->uuid, gpu->uuid);
	}
	kv_wire_init(&reply.head, KV_MSG_WELCOME, sizeof(reply), msg->head.tag);
	kv_peer_send(peer, &reply, sizeof(reply), NULL, 0);
}

static void handle_ping(struct kv_peer *peer, const void *data)
{
	const struct kv_msg_plain *msg = data;

	send_ok(peer, msg->head.tag);
}

static void handle_pool_open(struct kv_peer *peer, const void *data)
{
	const struct kv_msg_pool_open *msg = data;
	uint32_t all = peer->daemon->n_gpus == 32 ? UINT32_MAX : (1u << peer->daemon->n_gpus) - 1;
	const char *why = NULL;

	if (peer->session || peer->pending_open)
		why = "this connection has a pool open already";
	else if (msg->n_components > KV_MAX_COMPONENTS ||
		 msg->head.size != sizeof(*msg) + msg->n_components * sizeof(msg->components[0]))
		why = "n_components and the size of the message disagree";
	else if (!is_text(msg->name, KV_NAME_MAX) || !is_text(msg->model, KV_NAME_MAX) ||
		 !is_text(msg->revision, KV_NAME_MAX) || !is_text(msg->name_space, KV_NAME_MAX))
		why = "name, model, revision and name_space must be shorter than 64 bytes";
	else if (!msg->name[0])
		why = "name: empty; a pool needs one";
	if (why) {
		kv_peer_error(peer, msg->head.tag, -EINVAL, "pool_open: %s", why);
	} else if (!msg->gpu_mask || msg->gpu_mask & ~all) {
		kv_peer_error(peer, msg->head.tag, -EINVAL,
			      "pool_open: gpu_mask %#x given; this daemon has devices of mask %#x",
			      msg->gpu_mask, all);
	} else {
		kv_session_handle_open(peer, msg);
	}
}

static void handle_resume(struct kv_peer *peer, const void *data)
{
	const struct kv_msg_resume *msg = data;

	if (peer->session || peer->pending_open)
		kv_peer_error(peer, msg->head.tag, -EINVAL,
			      "resume: this connection has a pool open already");
	else
		kv_session_handle_resume(peer, msg);
}

static void handle_restart(struct kv_peer *peer, const void *data)
{
	kv_restart_handle(peer, data);
}

static void handle_pool_close(struct kv_peer *peer, const void *data)
{
	const struct kv_msg_plain *msg = data;

	kv_session_free(peer->session);
	send_ok(peer, msg->head.tag);
}

static void handle_layout(struct kv_peer *peer, const void *data)
{
	const struct kv_msg_plain *msg = data;
	const struct kv_layout *layout = &peer->session->pool->layout;
	uint32_t list = layout->n_components * (uint32_t)sizeof(struct kv_component);
	uint32_t size = sizeof(struct kv_msg_layout) + list;
	kv_cleanup(kv_freep) struct kv_msg_layout *reply = calloc(1, size);

	if (!reply) {
		kv_peer_error(peer, msg->head.tag, -ENOMEM, "no memory");
		return;
	}
	reply->kind = layout->kind;
	reply->flags = layout->flags;
	reply->block_tokens = layout->block_tokens;
	reply->n_components = layout->n_components;
	memcpy(reply->components, layout->components, list);
	kv_wire_init(&reply->head, KV_MSG_LAYOUT, size, msg->head.tag);
	kv_peer_send(peer, reply, size, NULL, 0);
}

static void send_arena(struct kv_peer *peer, const struct kv_msg_arena *msg)
{
	const struct kv_arena *arena = peer->daemon->gpus[msg->gpu].arena;
	struct kv_msg_arena_part reply = { .first_fd = msg->first_fd, .export = arena->export };
	int fds[KV_WIRE_MAX_FDS];
	int r;

	reply.n_fds = arena->export.sparse ? 0 : arena->export.n_fds - msg->first_fd;
	reply.n_fds = reply.n_fds < KV_WIRE_MAX_FDS ? reply.n_fds : KV_WIRE_MAX_FDS;
	for (uint32_t i = 0; i < reply.n_fds; i++)
		fds[i] = arena->fds[msg->first_fd + i];
	r = kv_isolate_lend(peer->session, &arena->export, fds, reply.n_fds);
	if (r < 0) {
		kv_peer_error(peer, msg->head.tag, r, "%s", kv_error_text());
		return;
	}
	kv_wire_init(&reply.head, KV_MSG_ARENA_PART, sizeof(reply), msg->head.tag);
	kv_peer_send(peer, &reply, sizeof(reply), fds, reply.n_fds);
	kv_isolate_lent(peer->session, &arena->export, fds, reply.n_fds);
}

static void handle_arena(struct kv_peer *peer, const void *data)
{
	const struct kv_msg_arena *msg = data;

	if (msg->gpu >= peer->daemon->n_gpus ||
	    msg->first_fd > peer->daemon->gpus[msg->gpu].arena->export.n_fds)
		kv_peer_error(peer, msg->head.tag, -EINVAL, "arena: no device %u, or no fd %u",
			      msg->gpu, msg->first_fd);
	else if (!peer->session && peer->daemon->access && !kv_user_is_operator(peer))
		kv_peer_error(peer, msg->head.tag, -EACCES, "arena: memory is for who has opened a pool");
	else
		send_arena(peer, msg);
}

static void handle_granules(struct kv_peer *peer, const void *data)
{
	kv_isolate_handle(peer, data);
}

static void handle_lease(struct kv_peer *peer, const void *data)
{
	const struct kv_msg_lease *msg = data;

	/* Nobody waits for that any more: its deadline passed while this process stood still. */
	if (msg->head.type == KV_MSG_LEASE)
		kv_queue_give_up(peer->session);
	if (peer->fd >= 0)
		kv_session_handle_lease(peer, msg);
}

static void handle_kick(struct kv_peer *peer, const void *data)
{
	/* The ring was drained on arrival, as for every message; a cached block may have been let go. */
	(void)data;
	/* Or memory: what waited for that can be cleaned. */
	if (peer->daemon->isolation)
		kv_mover_scrub(peer->daemon);
	kv_capacity_serve(peer->daemon);
}

static void handle_stats(struct kv_peer *peer, const void *data)
{
	kv_control_stats(peer, data);
}

static void handle_check(struct kv_peer *peer, const void *data)
{
	kv_control_check(peer, ((const struct kv_msg_plain *)data)->head.tag);
}

static void handle_drop(struct kv_peer *peer, const void *data)
{
	const struct kv_msg_drop *msg = data;

	if (is_text(msg->name, KV_NAME_MAX))
		kv_control_drop(peer, msg);
	else
		kv_peer_error(peer, msg->head.tag, -EINVAL, "pool name must be shorter than 64 bytes");
}

static void handle_epoch(struct kv_peer *peer, const void *data)
{
	const struct kv_msg_drop *msg = data;

	if (is_text(msg->name, KV_NAME_MAX))
		kv_control_epoch(peer, msg);
	else
		kv_peer_error(peer, msg->head.tag, -EINVAL, "pool name must be shorter than 64 bytes");
}

static void handle_compact(struct kv_peer *peer, const void *data)
{
	const struct kv_msg_compact *msg = data;

	if (is_text(msg->name, KV_NAME_MAX))
		kv_control_compact(peer, msg);
	else
		kv_peer_error(peer, msg->head.tag, -EINVAL, "pool name must be shorter than 64 bytes");
}

static void handle_pool_set(struct kv_peer *peer, const void *data)
{
	const struct kv_msg_pool_set *msg = data;

	if (is_text(msg->name, KV_NAME_MAX))
		kv_limits_set(peer, msg);
	else
		kv_peer_error(peer, msg->head.tag, -EINVAL, "pool name must be shorter than 64 bytes");
}

static void handle_block(struct kv_peer *peer, const void *data)
{
	const struct kv_msg_block *msg = data;

	if (is_text(msg->pool, KV_NAME_MAX))
		kv_show_block(peer, msg);
	else
		kv_peer_error(peer, msg->head.tag, -EINVAL, "pool name must be shorter than 64 bytes");
}

static void handle_trace(struct kv_peer *peer, const void *data)
{
	const struct kv_msg_trace *msg = data;

	if (is_text(msg->pool, KV_NAME_MAX))
		kv_trace_handle(peer, msg);
	else
		kv_peer_error(peer, msg->head.tag, -EINVAL, "pool name must be shorter than 64 bytes");
}

static void handle_trace_next(struct kv_peer *peer, const void *data)
{
	kv_trace_next_handle(peer, ((const struct kv_msg_plain *)data)->head.tag);
}

static void handle_traced(struct kv_peer *peer, const void *data)
{
	kv_traced_handle(peer, data);
}

static const struct handler {
	uint32_t size;	    /* exact, or the least if `longer` */
	bool longer;
	bool needs_session;
	void (*handle)(struct kv_peer *peer, const void *msg);
} handlers[] = {
	[KV_MSG_HELLO] = { sizeof(struct kv_msg_hello), false, false, handle_hello },
	[KV_MSG_PING] = { sizeof(struct kv_msg_plain), false, false, handle_ping },
	[KV_MSG_POOL_OPEN] = { sizeof(struct kv_msg_pool_open), true, false, handle_pool_open },
	[KV_MSG_POOL_OPEN_READ] = { sizeof(struct kv_msg_pool_open), true, false, handle_pool_open },
	[KV_MSG_RESUME] = { sizeof(struct kv_msg_resume), false, false, handle_resume },
	[KV_MSG_RESTART] = { sizeof(struct kv_msg_restart), false, false, handle_restart },
	[KV_MSG_POOL_CLOSE] = { sizeof(struct kv_msg_plain), false, true, handle_pool_close },
	[KV_MSG_POOL_LAYOUT] = { sizeof(struct kv_msg_plain), false, true, handle_layout },
	[KV_MSG_ARENA] = { sizeof(struct kv_msg_arena), false, false, handle_arena },
	[KV_MSG_GRANULES] = { sizeof(struct kv_msg_granules), false, true, handle_granules },
	[KV_MSG_LEASE] = { sizeof(struct kv_msg_lease), false, true, handle_lease },
	[KV_MSG_WANT] = { sizeof(struct kv_msg_lease), false, true, handle_lease },
	[KV_MSG_KICK] = { sizeof(struct kv_msg_plain), false, true, handle_kick },
	[KV_MSG_STATS] = { sizeof(struct kv_msg_stats), false, false, handle_stats },
	[KV_MSG_CHECK] = { sizeof(struct kv_msg_plain), false, false, handle_check },
	[KV_MSG_POOL_COMPACT] = { sizeof(struct kv_msg_compact), false, false, handle_compact },
	[KV_MSG_POOL_SET] = { sizeof(struct kv_msg_pool_set), false, false, handle_pool_set },
	[KV_MSG_POOL_DROP] = { sizeof(struct kv_msg_drop), false, false, handle_drop },
	[KV_MSG_TRACE] = { sizeof(struct kv_msg_trace), false, false, handle_trace },
	[KV_MSG_TRACE_NEXT] = { sizeof(struct kv_msg_plain), false, false, handle_trace_next },
	[KV_MSG_TRACED] = { sizeof(struct kv_msg_traced), true, true, handle_traced },
	[KV_MSG_BLOCK] = { sizeof(struct kv_msg_block), false, false, handle_block },
	[KV_MSG_POOL_EPOCH] = { sizeof(struct kv_msg_drop), false, false, handle_epoch },
};

/* A ping answers for its whole process. */
static bool comes_before(const struct kv_peer *other, const struct kv_peer *peer)
{
	return other->session && (other->fd >= 0 || other->away) && other->pid == peer->pid;
}

static void mark(struct kv_session *s)
{
	int64_t n = kv_session_ops(s);

	if (n > 0)
		s->ops_before = s->record->ops_done + (uint64_t)n;
}

/* What a session did before it asked is done before the answer. */
static void mark_rings(struct kv_peer *peer, uint16_t type)
{
	struct kv_daemon *d = peer->daemon;

	if (type != KV_MSG_PING) {
		if (peer->session)
			mark(peer->session);
		return;
	}
	for (struct kv_link *l = d->peers.next; l != &d->peers; l = l->next) {
		struct kv_peer *other = kv_container_of(l, struct kv_peer, link);

		if (comes_before(other, peer))
			mark(other->session);
	}
}

/* Up to @most of the marked ops of a session. Return: how many there were. */
static uint64_t work_off_one(struct kv_session *s, uint64_t most)
{
	uint64_t start = s->record->ops_done, n = s->ops_before > start ? s->ops_before - start : 0;

	n = n < most ? n : most;
	if (n)
		kv_session_drain_some(s, (uint32_t)n);
	/* Whose head has gone back has taken back what it had posted. */
	if (s->record->ops_done < start + n)
		s->ops_before = 0;
	return n;
}

/* Works off OPS_A_TIME of that. Return: whether that was all. */
static bool work_off(struct kv_peer *peer, uint16_t type)
{
	struct kv_daemon *d = peer->daemon;
	uint64_t left = OPS_A_TIME;

	if (type != KV_MSG_PING)
		return !peer->session || work_off_one(peer->session, left) < left;
	for (struct kv_link *l = d->peers.next; left && l != &d->peers; l = l->next) {
		struct kv_peer *other = kv_container_of(l, struct kv_peer, link);

		if (comes_before(other, peer))
			left -= work_off_one(other->session, left);
	}
	return left;
}

static void answer(struct kv_peer *peer, const struct kv_wire_head *head)
{
	const struct handler *h = &handlers[head->type];

	if (h->needs_session && !peer->session)
		kv_peer_error(peer, head->tag, -EINVAL, "no pool is open on this connection");
	else
		h->handle(peer, (const void *)head);
}

/* A message that has waited for the ops before it. */
static void go_on(struct kv_peer *peer)
{
	uint16_t type = peer->message->type;
	struct kv_wire_head *head;

	/* It may be hung up on for one of them. */
	if (!work_off(peer, type) || peer->fd < 0)
		return;
	head = kv_steal(peer->message);
	answer(peer, head);
	free(head);
}

static void handle(struct kv_peer *peer, const struct kv_wire_head *head, size_t size)
{
	const struct handler *h;

	if (size < sizeof(*head) || head->magic != KV_WIRE_MAGIC || head->size != size) {
		kv_peer_drop(peer, "it sent something that is not a message");
		return;
	}
	if (head->version != KV_WIRE_VERSION) {
		kv_peer_error(peer, head->tag, -EPROTO,
			      "kvcached %s speaks version %d of the protocol, this client version %u",
			      kv_version(), KV_WIRE_VERSION, head->version);
		kv_peer_drop(peer, "another version of the protocol");
		return;
	}
	h = head->type < sizeof(handlers) / sizeof(handlers[0]) ? &handlers[head->type] : NULL;
	if (!h || !h->handle || size < h->size || (size > h->size && !h->longer)) {
		kv_peer_drop(peer, "a message of unknown type or wrong size");
		return;
	}
	if (!peer->greeted && head->type != KV_MSG_HELLO) {
		kv_peer_drop(peer, "it didn't say hello");
		return;
	}
	kv_clock_update(peer->daemon);
	if (peer->session)
		kv_session_confirm(peer->session);
	mark_rings(peer, head->type);
	while (peer->fd >= 0 && !work_off(peer, head->type)) {
		peer->message = malloc(size);
		if (peer->message) {
			memcpy(peer->message, head, size);
			return;
		}
	}
	if (peer->fd >= 0)
		answer(peer, head);
}

/* Its user has sent more than it may: the socket is left alone for a while, and fills up. */
static void silence(struct kv_peer *peer)
{
	if (kv_watch_events(peer->watch, 0) < 0)
		return;
	peer->silenced = true;
	kv_timer_set(peer->daemon->user_timer, kv_user_silence(peer->user));
}

void kv_peers_hear(void *arg)
{
	struct kv_daemon *d = arg;

	for (struct kv_link *l = d->peers.next; l != &d->peers; l = l->next) {
		struct kv_peer *peer = kv_container_of(l, struct kv_peer, link);

		if (peer->silenced && peer->watch)
			kv_watch_events(peer->watch, KV_LOOP_IN);
		peer->silenced = false;
	}
}

/* A message of @peer, if there is one. False: there was none, or its user is to be heard later. */
static bool take_message(struct kv_peer *peer)
{
	static uint64_t buffer[KV_WIRE_MAX / sizeof(uint64_t)];
	int64_t n;

	if (!kv_user_may_speak(peer->user, 0)) {
		silence(peer);
		return false;
	}
	n = kv_socket_receive(peer->fd, buffer, sizeof(buffer), NULL, 0, NULL, 1);
	if (n == -EAGAIN) {
		if (peer->events & (KV_LOOP_HUP | KV_LOOP_ERR))
			hung_up(peer);
		return false;
	}
	kv_user_may_speak(peer->user, 1);
	if (n <= 0)
		hung_up(peer);
	else
		handle(peer, (const struct kv_wire_head *)buffer, (size_t)n);
	return true;
}

bool kv_peer_serve(struct kv_peer *peer)
{
	bool more = true;

	if (peer->walk)
		kv_walk_on(peer);
	else if (peer->message)
		go_on(peer);
	else
		more = take_message(peer);
	if (peer->fd >= 0)
		return more;
	/* Nothing is held for it: there is no reason to wait for its process. */
	if (!peer->session)
		kv_peer_free(peer);
	return false;
}

static void readable(uint32_t events, void *arg)
{
	struct kv_peer *peer = arg;

	peer->events = events;
	kv_fair_add(peer);
}

static int open_pidfd(int fd, pid_t pid)
{
	int pidfd;
	socklen_t size = sizeof(pidfd);

	if (!getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size))
		return pidfd;
	/* Kernels before 6.5. The peer is connected: its number isn't reused while it lives. */
	return (int)syscall(SYS_pidfd_open, pid, 0);
}

static struct kv_peer *peer_new(struct kv_daemon *d, int fd, int pidfd)
{
	struct kv_peer *peer = calloc(1, sizeof(*peer));

	if (!peer) {
		kv_close(fd);
		kv_close(pidfd);
		return NULL;
	}
	kv_link_init(&peer->speaking);
	kv_list_append(&d->peers, &peer->link);
	d->n_peers++;
	peer->daemon = d;
	peer->fd = fd;
	peer->pidfd = pidfd;
	peer->id = d->next_peer_id++;
	return peer;
}

/* It may have died meanwhile: then the first turn of the loop says so. */
int kv_peer_new_away(struct kv_daemon *d, const struct kv_session_record *record, int pidfd,
		     struct kv_peer **ret)
{
	struct kv_peer *peer = peer_new(d, -1, pidfd);
	int r;

	if (!peer)
		return -ENOMEM;
	memcpy(peer->name, record->name, sizeof(peer->name));
	peer->pid = record->pid;
	peer->uid = record->uid;
	peer->user = kv_user_get(d, peer->uid);
	peer->greeted = true;
	peer->away = record->state == KV_RECORD_LIVE;
	r = kv_loop_watch(d->loop, pidfd, KV_LOOP_IN, process_ended, peer, &peer->pid_watch);
	if (r < 0) {
		kv_peer_free(peer);
		return r;
	}
	*ret = peer;
	return 0;
}

int kv_peer_accept(struct kv_daemon *d, int fd)
{
	struct kv_peer *peer = peer_new(d, fd, -1);
	struct ucred cred;
	socklen_t size = sizeof(cred);
	int r;

	if (!peer)
		return -ENOMEM;
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &size) < 0) {
		r = kv_error(-errno, "your process's credentials: %s", strerror(errno));
		goto fail;
	}
	peer->pid = cred.pid;
	peer->uid = cred.uid;
	peer->gid = cred.gid;
	peer->user = kv_user_get(d, cred.uid);
	r = peer->user ? kv_user_add(peer->user, KV_USER_CLIENTS) :
			 kv_error(-ENOMEM, "no memory for what user %u has", cred.uid);
	if (r < 0)
		goto fail;
	peer->counted = true;
	kv_user_may_speak(peer->user, CONNECTION_COST);
	peer->pidfd = open_pidfd(fd, cred.pid);
	if (peer->pidfd < 0) {
		/* Without it, its death can't be proven: it may not hold anything. */
		r = kv_error(-errno, "no pidfd of your process (pid %d): %s", cred.pid, strerror(errno));
		if (r != -ESRCH)
			kv_log(KV_LOG_WARN, "%s", kv_error_text());
		goto fail;
	}
	r = kv_loop_watch(d->loop, peer->pidfd, KV_LOOP_IN, process_ended, peer, &peer->pid_watch);
	if (r < 0)
		goto fail;
	r = kv_loop_watch(d->loop, fd, KV_LOOP_IN, readable, peer, &peer->watch);
	if (r < 0)
		goto fail;
	return 0;
fail:
	kv_peer_error(peer, 0, r, "%s", kv_error_text());
	kv_peer_free(peer);
	return r;
}
