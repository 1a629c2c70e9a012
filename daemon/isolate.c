/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvcached --isolate: a pool's clients can map the granules of that pool and no others. An extent is a
 * granule then, so a granule has one pool or none, and pools exchange memory by whole granules.
 *
 *   came    the pool's page names it; clients ask for its descriptor before they use a block of it
 *           (libclient/granules.c)
 *   left    the page forgets it; clients unmap it at their next call, and say so (kv_shm_session::let_go)
 *   renewed every client that had been given something has said so, or LET_GO_WAIT is over: its
 *           memory is given up, and the mover makes other memory in its place, zeroed
 *
 * Nobody can take a mapping from a living process, and what it says of its mappings is not to be believed: so
 * memory that a client has had the descriptor of is never handed on. What a process keeps it keeps;
 * nobody else gets it. If a GPU has no other memory then, the granule is HELD, counts as nobody's, and
 * is tried again. Host memory is emptied when it is given up: who touches it again uses its own.
 * What no client was given is zeroed and handed on, as without isolation.
 *
 * Which granules clients have is not written down: after a restart of the worker all that was in use has
 * been given to somebody.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/daemon.h"
#include "daemon/log.h"
#include "include/internal/atomic.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/killpoint.h"
#include "include/internal/socket.h"

/* Clients that make no call keep what they have: for so long it is not used twice. */
#define LET_GO_WAIT KV_SEC
#define LOOK_AGAIN  (5 * KV_MSEC)
#define TRY_AGAIN   (100 * KV_MSEC)

struct granule {
	bool is_given;	   /* clients have been sent its descriptor */
	uint64_t revision; /* of the page of the pool that it left, when it did */
	int64_t left_ns;
};

struct kv_isolation {
	struct granule *granules[KV_MAX_GPUS];
	struct kv_timer *timer;
	int64_t try_ns[KV_MAX_GPUS]; /* when those that are HELD are tried again */
	uint64_t n_renewed[KV_MAX_GPUS];
};

static void look_again(void *arg)
{
	struct kv_daemon *d = arg;

	kv_mover_scrub(d);
	kv_capacity_serve(d);
}

int kv_isolate_start(struct kv_daemon *d, bool is_first)
{
	struct kv_isolation *iso;

	if (!d->gpus[0].arena->export.sparse)
		return 0;
	iso = d->isolation = calloc(1, sizeof(*iso));
	if (!iso)
		return kv_error(-ENOMEM, "no memory for the granules");
	for (uint32_t g = 0; g < d->n_gpus; g++) {
		iso->granules[g] = calloc(d->extents.n[g] + 1, sizeof(struct granule));
		if (!iso->granules[g])
			return kv_error(-ENOMEM, "no memory for %u granules", d->extents.n[g]);
		for (uint32_t i = 0; i < d->extents.n[g]; i++)
			iso->granules[g][i].is_given =
				!is_first && d->extents.map[g][i].state != KV_EXTENT_CLEAN;
	}
	return kv_timer_new(d->loop, look_again, d, &iso->timer);
}

void kv_isolate_end(struct kv_daemon *d)
{
	if (!d->isolation)
		return;
	for (uint32_t g = 0; g < d->n_gpus; g++)
		free(d->isolation->granules[g]);
	kv_timer_free(d->isolation->timer);
	free(d->isolation);
	d->isolation = NULL;
}

uint64_t kv_isolate_granules(const struct kv_pool *pool)
{
	const struct kv_daemon *d = pool->daemon;
	uint32_t n = UINT32_MAX;

	if (!d->isolation)
		return 0;
	for (uint32_t g = 0; g < d->n_gpus; g++) {
		if (pool->gpu_mask >> g & 1 && d->extents.n[g] < n)
			n = d->extents.n[g];
	}
	return n;
}

/* Pairs with the load in kv_granules_sync(): who sees a revision sees the words of it. */
static void publish(struct kv_pool *pool, uint64_t revision)
{
	kv_store_release(&pool->head->map_revision, revision);
	KV_KILLPOINT(worker_granules_written);
}

void kv_isolate_came(struct kv_pool *pool, uint32_t first, uint32_t n)
{
	uint64_t revision;

	if (!pool->daemon->isolation)
		return;
	revision = pool->head->map_revision + 1;
	for (uint32_t i = first; i < first + n; i++)
		kv_store_relaxed(&kv_shm_granules(pool->head)[i], revision);
	publish(pool, revision);
}

void kv_isolate_left(struct kv_pool *pool, uint32_t i)
{
	struct kv_isolation *iso = pool->daemon->isolation;
	uint64_t revision = 0;

	if (!iso)
		return;
	if (pool->head) {
		revision = pool->head->map_revision + 1;
		kv_store_relaxed(&kv_shm_granules(pool->head)[i], 0);
		publish(pool, revision);
	}
	for (uint32_t g = 0; g < pool->daemon->n_gpus; g++) {
		if (pool->gpu_mask >> g & 1) {
			iso->granules[g][i].revision = revision;
			iso->granules[g][i].left_ns = kv_now();
		}
	}
}

void kv_isolate_adopt(struct kv_pool *pool)
{
	const struct kv_extents *e = &pool->daemon->extents;
	uint32_t gpu = (uint32_t)__builtin_ctz(pool->gpu_mask);
	uint64_t *words, revision;

	if (!pool->daemon->isolation)
		return;
	words = kv_shm_granules(pool->head);
	revision = pool->head->map_revision + 1;
	for (uint32_t i = 0; i < pool->head->n_granules; i++) {
		bool owned = kv_extents_owned(e, gpu, i, (uint32_t)pool->id);

		if (owned != (words[i] != 0))
			kv_store_relaxed(&words[i], owned ? revision : 0);
	}
	publish(pool, revision);
}

/* ---- clients ask ---- */

static bool is_reopened(const struct kv_session *s, const struct kv_arena_export *export)
{
	return s && s->read_only && export->kind == KV_EXPORT_HOST;
}

int kv_isolate_lend(const struct kv_session *s, const struct kv_arena_export *export, int *fds, uint32_t n)
{
	for (uint32_t i = 0; is_reopened(s, export) && i < n; i++) {
		char path[32];
		int fd;

		snprintf(path, sizeof(path), "/proc/self/fd/%d", fds[i]);
		fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd < 0) {
			int r = -errno;

			kv_isolate_lent(s, export, fds, i);
			return kv_error(r, "memory for reading: %s", strerror(-r));
		}
		fds[i] = fd;
	}
	return 0;
}

void kv_isolate_lent(const struct kv_session *s, const struct kv_arena_export *export, const int *fds,
		     uint32_t n)
{
	for (uint32_t i = 0; is_reopened(s, export) && i < n; i++)
		kv_close(fds[i]);
}

static int check_ask(const struct kv_peer *peer, const struct kv_msg_granules *msg)
{
	if (!peer->daemon->isolation)
		return kv_error(-ENOTSUP, "granules: this daemon hands out whole arenas");
	if (msg->gpu >= peer->daemon->n_gpus || !(peer->session->pool->gpu_mask >> msg->gpu & 1))
		return kv_error(-EINVAL, "granules: gpu: %u given, the pool is on devices %#x", msg->gpu,
				peer->session->pool->gpu_mask);
	if (msg->n > KV_WIRE_MAX_FDS)
		return kv_error(-EINVAL, "granules: n: %u given, at most %d", msg->n, KV_WIRE_MAX_FDS);
	return 0;
}

void kv_isolate_handle(struct kv_peer *peer, const struct kv_msg_granules *msg)
{
	struct kv_msg_granules_part reply = { 0 };
	struct kv_session *s = peer->session;
	struct kv_daemon *d = peer->daemon;
	int fds[KV_WIRE_MAX_FDS];
	int r = check_ask(peer, msg);

	if (r < 0) {
		kv_peer_error(peer, msg->head.tag, r, "%s", kv_error_text());
		return;
	}
	/* Before it has any. */
	s->mapped = true;
	s->record->mapped = 1;
	for (uint32_t k = 0; k < msg->n; k++) {
		uint32_t i = msg->index[k];

		if (!kv_extents_owned(&d->extents, msg->gpu, i, (uint32_t)s->pool->id))
			continue;
		d->isolation->granules[msg->gpu][i].is_given = true;
		fds[reply.n] = d->gpus[msg->gpu].arena->fds[i];
		reply.items[reply.n++] = (struct kv_granule_item){
			.index = i,
			.word = kv_shm_granules(s->pool->head)[i],
		};
	}
	r = kv_isolate_lend(s, &d->gpus[msg->gpu].arena->export, fds, reply.n);
	if (r < 0) {
		kv_peer_error(peer, msg->head.tag, r, "%s", kv_error_text());
		return;
	}
	kv_wire_init(&reply.head, KV_MSG_GRANULES_PART, sizeof(reply), msg->head.tag);
	kv_peer_send(peer, &reply, sizeof(reply), fds, reply.n);
	kv_isolate_lent(s, &d->gpus[msg->gpu].arena->export, fds, reply.n);
}

/* ---- what left a pool ---- */

static const struct kv_pool *pool_of(const struct kv_daemon *d, uint32_t id)
{
	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		const struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);

		if ((uint32_t)pool->id == id)
			return pool;
	}
	return NULL;
}

/* Has everybody said that it is unmapped who may have it mapped? */
static bool is_let_go(const struct kv_daemon *d, const struct granule *granule, uint32_t owner)
{
	const struct kv_pool *pool = pool_of(d, owner);

	for (uint32_t i = 0; pool && i < KV_MAX_SESSIONS; i++) {
		const struct kv_session *s = pool->slots[i];

		if (s && s->mapped && kv_load_acquire(&s->shm->let_go) < granule->revision)
			return false;
	}
	return true;
}

/* Its memory: the worker's and the keeper's descriptor go; the mover has it mapped. */
static void give_up_memory(struct kv_daemon *d, uint32_t gpu, uint32_t i)
{
	int *fd = &d->gpus[gpu].arena->fds[i];

	if (*fd < 0)
		return;
	kv_keeping_drop(&d->keeping, KV_DEPOSIT_GRANULE, (uint64_t)gpu << 32 | i);
	*fd = kv_close(*fd);
	KV_KILLPOINT(worker_granule_given_up);
}

static uint32_t begin(struct kv_daemon *d, uint32_t gpu, uint32_t i, bool renew, uint32_t *ret,
		      bool *ret_renew)
{
	kv_extents_scrub_one(&d->extents, gpu, i);
	if (renew)
		give_up_memory(d, gpu, i);
	*ret = i;
	*ret_renew = renew;
	return 1;
}

uint32_t kv_isolate_next(struct kv_daemon *d, uint32_t gpu, uint32_t *ret, bool *renew)
{
	struct kv_isolation *iso = d->isolation;
	struct kv_extents *e = &d->extents;
	int64_t now = kv_now();
	bool some_wait = false;

	if (!e->n_state[gpu][KV_EXTENT_DIRTY] && !e->n_state[gpu][KV_EXTENT_HELD])
		return 0;
	for (uint32_t i = 0; i < e->n[gpu]; i++) {
		const struct kv_extent *extent = &e->map[gpu][i];
		const struct granule *granule = &iso->granules[gpu][i];

		if (extent->state == KV_EXTENT_HELD && now >= iso->try_ns[gpu])
			return begin(d, gpu, i, true, ret, renew);
		if (extent->state != KV_EXTENT_DIRTY)
			continue;
		if (!granule->is_given)
			return begin(d, gpu, i, false, ret, renew);
		if (now - granule->left_ns > LET_GO_WAIT || is_let_go(d, granule, extent->owner))
			return begin(d, gpu, i, true, ret, renew);
		some_wait = true;
	}
	kv_timer_set(iso->timer, some_wait ? LOOK_AGAIN : TRY_AGAIN);
	return 0;
}

int kv_isolate_renewed(struct kv_daemon *d, uint32_t gpu, uint32_t i, int fd)
{
	struct kv_isolation *iso = d->isolation;
	int r = kv_keeping_put(&d->keeping, KV_DEPOSIT_GRANULE, (uint64_t)gpu << 32 | i, &fd, 1);

	/* Memory that another worker would miss is used for nothing. */
	if (r < 0) {
		kv_close(fd);
		return r;
	}
	KV_KILLPOINT(worker_granule_deposited);
	d->gpus[gpu].arena->fds[i] = fd;
	iso->granules[gpu][i].is_given = false;
	iso->n_renewed[gpu]++;
	return 0;
}

void kv_isolate_withheld(struct kv_daemon *d, uint32_t gpu, uint32_t i)
{
	struct kv_isolation *iso = d->isolation;

	if (!d->extents.n_state[gpu][KV_EXTENT_HELD])
		kv_log(KV_LOG_WARN, "device %u: processes keep memory mapped that has left their pool, and "
		       "there is no other for granule %u: it is missing until they unmap it or end", gpu, i);
	kv_extents_withhold(&d->extents, gpu, i);
	iso->try_ns[gpu] = kv_now() + TRY_AGAIN;
}

uint64_t kv_isolate_n_renewed(const struct kv_daemon *d, uint32_t gpu)
{
	return d->isolation ? d->isolation->n_renewed[gpu] : 0;
}
