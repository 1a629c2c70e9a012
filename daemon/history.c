/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A sample of each pool every interval, in one array of N_SAMPLES, oldest first. When it is full every other
 * moment is forgotten and the interval doubled, so that a young daemon shows seconds and an old one hours;
 * from INTERVAL_MAX on the oldest half is forgotten instead:
 *
 *	1 pool:    2 s for the first 4.5 h, 4 s up to 9 h, ... 64 s: between 3 and 6 days
 *	100 pools: 64 s, 44 to 87 min
 *
 * Totals are kept as they are: who plots takes differences. It begins anew with each worker.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/stats.h>

#include "daemon/daemon.h"
#include "daemon/history.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"

#define N_SAMPLES    8192u
#define INTERVAL_MIN (2 * KV_SEC)
#define INTERVAL_MAX (64 * KV_SEC)

struct sample {
	uint64_t moment; /* the number of its tick */
	int64_t time_ns;
	uint64_t pool_id;
	uint64_t leased, cached, free;
	uint64_t lookup_tokens, hit_tokens, published, evicted, no_room;
	uint64_t n_refills, refill_ns;
};

struct kv_history {
	struct kv_daemon *daemon;
	struct kv_timer *timer;
	int64_t interval;
	uint64_t moment;
	uint32_t n;
	struct sample samples[N_SAMPLES];
};

static const struct kv_pool *pool_of(const struct kv_daemon *d, uint64_t id)
{
	for (const struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		const struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);

		if (pool->id == id)
			return pool;
	}
	return NULL;
}

/* Makes room: at least one sample is forgotten. */
static void thin_out(struct kv_history *h)
{
	uint32_t n = 0;

	if (h->interval >= INTERVAL_MAX || !h->n || h->samples[0].moment == h->samples[h->n - 1].moment) {
		n = h->n - h->n / 2;
		memmove(h->samples, h->samples + h->n / 2, n * sizeof(*h->samples));
		h->n = n;
		return;
	}
	for (uint32_t i = 0; i < h->n; i++) {
		if (h->samples[i].moment % 2)
			continue;
		h->samples[n] = h->samples[i];
		h->samples[n++].moment /= 2;
	}
	h->moment = (h->moment + 1) / 2;
	h->interval *= 2;
	h->n = n;
}

static struct sample sample_of(const struct kv_pool *pool, uint64_t moment)
{
	const struct kv_latency *refills = &pool->record->refills;
	struct sample s = {
		.moment = moment,
		.time_ns = kv_now(),
		.pool_id = pool->id,
		.leased = pool->books.n_leased,
		.cached = pool->books.n_cached,
		.free = pool->books.n_free,
		.lookup_tokens = pool->lookup_tokens,
		.hit_tokens = pool->hit_tokens,
		.published = pool->books.n_published,
		.evicted = pool->books.n_evicted,
		.no_room = pool->n_no_room,
		.refill_ns = refills->sum_ns,
	};

	for (uint32_t i = 0; i < KV_MAX_SESSIONS; i++) {
		if (!pool->slots[i])
			continue;
		s.lookup_tokens += kv_load_relaxed(&pool->slots[i]->shm->lookup_tokens);
		s.hit_tokens += kv_load_relaxed(&pool->slots[i]->shm->hit_tokens);
	}
	for (unsigned i = 0; i < KV_LATENCY_BUCKETS; i++)
		s.n_refills += refills->n[i];
	return s;
}

static void tick(void *arg)
{
	struct kv_history *h = arg;
	struct kv_daemon *d = h->daemon;

	kv_clock_update(d);
	for (const struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		const struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);

		if (h->n == N_SAMPLES)
			thin_out(h);
		h->samples[h->n++] = sample_of(pool, h->moment);
	}
	h->moment++;
	kv_timer_set(h->timer, h->interval);
}

int kv_history_new(struct kv_daemon *d, struct kv_history **ret)
{
	struct kv_history *h = calloc(1, sizeof(*h)); /* pages come as they are written */
	int r;

	if (!h)
		return kv_error(-ENOMEM, "no memory for the history of pools");
	h->daemon = d;
	h->interval = INTERVAL_MIN;
	r = kv_timer_new(d->loop, tick, h, &h->timer);
	if (r < 0) {
		free(h);
		return r;
	}
	kv_timer_set(h->timer, h->interval);
	*ret = h;
	return 0;
}

struct kv_history *kv_history_free(struct kv_history *h)
{
	if (h) {
		kv_timer_free(h->timer);
		free(h);
	}
	return NULL;
}

uint32_t kv_history_count(const struct kv_daemon *d)
{
	uint32_t n = 0;

	for (uint32_t i = 0; d->history && i < d->history->n; i++)
		n += !!pool_of(d, d->history->samples[i].pool_id);
	return n;
}

uint32_t kv_history_items(struct kv_daemon *d, uint32_t first, uint32_t n, void *items)
{
	struct kv_history_stats *to = items;
	int64_t now = kv_now();
	uint32_t seen = 0, done = 0;

	for (uint32_t i = 0; d->history && i < d->history->n && done < n; i++) {
		const struct sample *s = &d->history->samples[i];
		const struct kv_pool *pool = pool_of(d, s->pool_id);
		struct kv_history_stats *out = &to[done];

		if (!pool || seen++ < first)
			continue;
		*out = (struct kv_history_stats){
			.ago_ns = (uint64_t)(now - s->time_ns),
			.pool_id = s->pool_id,
			.blocks_leased = s->leased,
			.blocks_cached = s->cached,
			.blocks_free = s->free,
			.lookup_tokens_total = s->lookup_tokens,
			.hit_tokens_total = s->hit_tokens,
			.published_total = s->published,
			.evictions_total = s->evicted,
			.no_room_total = s->no_room,
			.refills_total = s->n_refills,
			.refill_ns_total = s->refill_ns,
		};
		done++;
	}
	return done;
}
