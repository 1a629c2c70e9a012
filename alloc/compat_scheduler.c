/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reference calculators: the reference engine's scheduler.
 *
 * A request waits, prefills in chunks, then decodes. A reservation keeps room for the token after
 * a prefill until the first decode; others may not touch it. A step that produces nothing, twice in
 * a row with nothing in flight, takes the blocks of the longest decoding request away.
 */
#include <stdlib.h>
#include <stdio.h>
#include <string.h>

#include "alloc/compat_scheduler.h"
#include "include/internal/error.h"

enum state {
	WAITING,
	PREFILLING,
	PREFILLED, /* the whole prompt is computed, no decode yet */
	DECODING,
};

struct request {
	char id[64];
	enum state state;
	int32_t *tokens;
	size_t n_tokens, room;
	int64_t n_prompt, n_computed;
	int64_t n_registered; /* base pages */
	int64_t reserved;     /* blocks */
	int64_t pool_index;
	bool owed; /* a result is on its way */
	struct kv_compat_hashes hashes;
	struct kv_compat_tables tables;
};

struct pending {
	int32_t id;
	struct kv_compat_key key;
};

struct kv_compat_sched {
	struct kv_compat_sched_config config;
	struct kv_compat_blocks pool, host;
	struct kv_compat_cache cache;
	bool has_host;
	struct request **request;
	size_t n_requests, room;
	int64_t *free_index; /* queue of pool indices */
	size_t n_free_index;
	struct pending *pending; /* registered in this step, pinned */
	size_t n_pending, pending_room;
	struct kv_compat_move *store, *load; /* all ever made; op_id 0: done */
	struct kv_compat_key **store_keys;
	size_t n_store, n_load, store_room, load_room;
	size_t first_store, first_load; /* of this step */
	int64_t last_op;
	int starved;
	struct kv_compat_scheduled *list;
	char oom[64];
};

static void *grown(void *list, size_t n, size_t *room, size_t size)
{
	if (n < *room)
		return list;
	*room = *room ? 2 * *room : 16;
	list = realloc(list, *room * size);
	if (!list)
		abort();
	return list;
}

static void on_registered(void *who, int32_t id, const struct kv_compat_key *key)
{
	struct kv_compat_sched *s = who;

	s->pending = grown(s->pending, s->n_pending, &s->pending_room, sizeof(*s->pending));
	s->pending[s->n_pending++] = (struct pending){id, *key};
	kv_compat_blocks_touch(&s->pool, id);
}

int kv_compat_sched_new(const struct kv_compat_sched_config *config, struct kv_compat_sched **ret)
{
	struct kv_compat_sched *s = calloc(1, sizeof(*s));
	int r;

	if (!s)
		return kv_error(KV_FAULT_NO_MEMORY, "no memory for a scheduler");
	s->config = *config;
	s->has_host = config->n_host_blocks > 1;
	r = kv_compat_blocks_init(&s->pool, config->n_blocks, true); /* D: keys in any case */
	if (!r)
		r = kv_compat_blocks_init(&s->host, s->has_host ? config->n_host_blocks : 1, true);
	if (r) {
		kv_compat_sched_free(s);
		return r;
	}
	kv_compat_cache_init(&s->cache, &s->pool, config->groups, config->n_groups);
	if (s->has_host) {
		s->cache.registered = on_registered;
		s->cache.who = s;
	}
	s->free_index = calloc((size_t)config->max_batch + 1, sizeof(*s->free_index));
	if (!s->free_index)
		abort();
	for (int64_t i = 1; i <= config->max_batch; i++)
		s->free_index[s->n_free_index++] = i;
	*ret = s;
	return 0;
}

static void give_index(struct kv_compat_sched *s, struct request *q)
{
	if (q->pool_index)
		s->free_index[s->n_free_index++] = q->pool_index;
	q->pool_index = 0;
}

static void take_index(struct kv_compat_sched *s, struct request *q)
{
	q->pool_index = s->free_index[0];
	s->n_free_index--;
	memmove(s->free_index, s->free_index + 1, s->n_free_index * sizeof(s->free_index[0]));
}

static void drop_request(struct kv_compat_sched *s, size_t i)
{
	struct request *q = s->request[i];

	kv_compat_cache_release(&s->cache, &q->tables);
	give_index(s, q);
	free(q->hashes.hash);
	free(q->tokens);
	free(q);
	s->n_requests--;
	memmove(s->request + i, s->request + i + 1, (s->n_requests - i) * sizeof(s->request[0]));
}

struct kv_compat_sched *kv_compat_sched_free(struct kv_compat_sched *s)
{
	if (!s)
		return NULL;
	while (s->n_requests)
		drop_request(s, 0);
	for (size_t i = 0; i < s->n_store; i++) {
		free(s->store[i].device.id);
		free(s->store[i].host.id);
		free(s->store_keys[i]);
	}
	for (size_t i = 0; i < s->n_load; i++) {
		free(s->load[i].device.id);
		free(s->load[i].host.id);
	}
	kv_compat_blocks_deinit(&s->pool);
	kv_compat_blocks_deinit(&s->host);
	free(s->request);
	free(s->free_index);
	free(s->pending);
	free(s->store);
	free(s->store_keys);
	free(s->load);
	free(s->list);
	free(s);
	return NULL;
}

static ssize_t find(const struct kv_compat_sched *s, const char *id)
{
	for (size_t i = 0; i < s->n_requests; i++)
		if (!strcmp(s->request[i]->id, id))
			return (ssize_t)i;
	return -1;
}

static void append_tokens(struct request *q, const int32_t *tokens, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		q->tokens = grown(q->tokens, q->n_tokens, &q->room, sizeof(*q->tokens));
		q->tokens[q->n_tokens++] = tokens[i];
	}
}

void kv_compat_sched_submit(struct kv_compat_sched *s, const char *id, const int32_t *tokens,
			    size_t n)
{
	struct request *q = calloc(1, sizeof(*q));

	if (!q)
		abort();
	snprintf(q->id, sizeof(q->id), "%s", id);
	append_tokens(q, tokens, n);
	q->n_prompt = (int64_t)n;
	s->request = grown(s->request, s->n_requests, &s->room, sizeof(*s->request));
	s->request[s->n_requests++] = q;
}

void kv_compat_sched_result(struct kv_compat_sched *s, const char *id, const int32_t *tokens,
			    size_t n)
{
	ssize_t i = find(s, id);

	if (i < 0)
		return;
	append_tokens(s->request[i], tokens, n);
	s->request[i]->owed = false;
}

void kv_compat_sched_end(struct kv_compat_sched *s, const char *id)
{
	ssize_t i = find(s, id);

	if (i >= 0)
		drop_request(s, (size_t)i);
}

void kv_compat_sched_moved(struct kv_compat_sched *s, bool store, int64_t op_id, bool success)
{
	struct kv_compat_move *moves = store ? s->store : s->load;

	for (size_t i = 0; i < (store ? s->n_store : s->n_load); i++) {
		if (moves[i].op_id != op_id)
			continue;
		for (size_t k = 0; store && success && k < moves[i].host.n; k++)
			kv_compat_blocks_register(&s->host, moves[i].host.id[k],
						  &s->store_keys[i][k]);
		kv_compat_blocks_free(&s->pool, moves[i].device.id, moves[i].device.n);
		kv_compat_blocks_free(&s->host, moves[i].host.id, moves[i].host.n);
		moves[i].op_id = 0;
	}
}

static int64_t others_reserved(const struct kv_compat_sched *s, const struct request *q)
{
	int64_t n = 0;

	for (size_t i = 0; i < s->n_requests; i++)
		if (s->request[i] != q)
			n += s->request[i]->reserved;
	return n;
}

/* Room for the token after the prompt, if this chunk completes it. */
static int64_t reserve_of(const struct kv_compat_sched *s, const struct request *q, int64_t after)
{
	return after >= q->n_prompt ? s->config.decode_tokens : 0;
}

static int64_t n_real(const struct kv_compat_cache *c, const struct kv_compat_match *m)
{
	int64_t n = 0;

	for (size_t g = 0; g < c->n_groups; g++)
		for (size_t i = 0; i < m->list[g].n; i++)
			n += m->list[g].id[i] != 0;
	return n;
}

/* Brings a host match into new device blocks, which have their keys from now on. */
static void extend(struct kv_compat_sched *s, struct request *q, const struct kv_compat_match *m,
		   int64_t floor)
{
	struct kv_compat_move *load;

	if (!n_real(&s->cache, m)) {
		for (size_t g = 0; g < s->cache.n_groups; g++)
			for (size_t i = 0; i < m->list[g].n; i++)
				kv_compat_ids_push(&q->tables.list[g], 0);
		return;
	}
	s->load = grown(s->load, s->n_load, &s->load_room, sizeof(*s->load));
	load = &s->load[s->n_load++];
	*load = (struct kv_compat_move){.op_id = ++s->last_op};
	for (size_t g = 0; g < s->cache.n_groups; g++)
		for (size_t i = 0; i < m->list[g].n; i++) {
			int32_t host = m->list[g].id[i], id = 0;
			struct kv_compat_key key;

			if (host) {
				kv_compat_blocks_alloc(&s->pool, 1, &id);
				kv_compat_cache_key(&s->cache, g, &q->hashes,
						    (size_t)(floor / s->cache.group[g].block) + i,
						    &key);
				kv_compat_blocks_register(&s->pool, id, &key);
				kv_compat_blocks_touch(&s->pool, id);
				kv_compat_blocks_touch(&s->host, host);
				kv_compat_ids_push(&load->device, id);
				kv_compat_ids_push(&load->host, host);
			}
			kv_compat_ids_push(&q->tables.list[g], id);
		}
}

static int64_t admit(struct kv_compat_sched *s, struct request *q, int64_t budget)
{
	const struct kv_compat_cache *c = &s->cache;
	struct kv_compat_match device = {0}, host = {0};
	int64_t max = (q->n_prompt - 1) / c->base * c->base, hit = 0, chunk, reserve, charge;

	if (!s->n_free_index)
		return 0;
	kv_compat_hashes_extend(&q->hashes, q->tokens, q->n_tokens, c->base);
	if (s->config.caching) {
		kv_compat_cache_match(c, &s->pool, &q->hashes, max, 0, &device);
		hit = device.hit_tokens;
	}
	if (s->has_host && s->config.caching) {
		kv_compat_cache_match(c, &s->host, &q->hashes, max, hit, &host);
		hit = host.hit_tokens;
	}
	chunk = kv_min64(budget, q->n_prompt - hit);
	reserve = reserve_of(s, q, hit + chunk);
	charge = kv_compat_cache_need(c, NULL, chunk + reserve) +
		 kv_compat_cache_claim_cost(c, &device) + n_real(c, &host);
	if (charge > s->pool.n_free - others_reserved(s, q)) {
		chunk = 0;
	} else {
		take_index(s, q);
		kv_compat_cache_claim(c, &device, &q->tables);
		extend(s, q, &host, device.hit_tokens);
		kv_compat_cache_acquire(c, &q->tables, chunk);
		q->reserved = kv_compat_cache_need(c, NULL, chunk + reserve) -
			      kv_compat_cache_need(c, NULL, chunk);
		q->n_computed = hit;
	}
	kv_compat_match_deinit(&device);
	kv_compat_match_deinit(&host);
	return chunk;
}

/* Registers, expires and acquires; 0 if there is no room. */
static int64_t advance(struct kv_compat_sched *s, struct request *q, int64_t n, int64_t reserve)
{
	const struct kv_compat_cache *c = &s->cache;
	int64_t computed = q->n_computed, pages = computed / c->base;
	int64_t need = kv_compat_cache_need(c, &q->tables, n + reserve);
	int64_t credit = kv_compat_cache_credit(c, &q->tables, computed, s->has_host);

	if (need > s->pool.n_free - others_reserved(s, q) + credit)
		return 0;
	kv_compat_hashes_extend(&q->hashes, q->tokens, q->n_tokens, c->base);
	if (q->state != DECODING || pages > q->n_registered)
		kv_compat_cache_register(c, &q->tables, &q->hashes,
					 q->state == DECODING ? q->n_registered : 0, computed);
	q->n_registered = pages;
	kv_compat_cache_expire(c, &q->tables, computed);
	q->reserved = kv_compat_cache_need(c, &q->tables, n + reserve) -
		      kv_compat_cache_need(c, &q->tables, n);
	kv_compat_cache_acquire(c, &q->tables, n);
	return n;
}

static bool schedulable(const struct request *q)
{
	return q->state == WAITING || q->state == PREFILLING ||
	       (!q->owed && (int64_t)q->n_tokens > q->n_prompt);
}

static int rank(const struct kv_compat_sched *s, const struct request *q)
{
	return q->state == PREFILLING ? 1 : q->state == WAITING ? 2 : s->config.mixed ? 0 : 3;
}

static bool before(const struct kv_compat_sched *s, const struct request *a,
		   const struct request *b)
{
	int ra = rank(s, a), rb = rank(s, b);

	return ra != rb ? ra < rb : strcmp(a->id, b->id) < 0;
}

static void sort_requests(struct kv_compat_sched *s)
{
	for (size_t i = 1; i < s->n_requests; i++)
		for (size_t k = i; k && before(s, s->request[k], s->request[k - 1]); k--) {
			struct request *q = s->request[k];

			s->request[k] = s->request[k - 1];
			s->request[k - 1] = q;
		}
}

/* Tokens scheduled; 0: refused. */
static int64_t try_request(struct kv_compat_sched *s, struct request *q, int64_t budget)
{
	int64_t n;

	switch (q->state) {
	case WAITING:
		n = admit(s, q, budget);
		break;
	case PREFILLING:
		n = kv_min64(budget, q->n_prompt - q->n_computed);
		n = advance(s, q, n, reserve_of(s, q, q->n_computed + n));
		break;
	default:
		if (budget < s->config.decode_tokens)
			return 0;
		q->n_computed = (int64_t)q->n_tokens - 1;
		return advance(s, q, s->config.decode_tokens, 0);
	}
	return n;
}

static void take_note(struct request *q, int64_t n, struct kv_compat_scheduled *ret)
{
	bool prefill = q->state == WAITING || q->state == PREFILLING;

	*ret = (struct kv_compat_scheduled){
		.id = q->id,
		.prefill = prefill,
		.n_tokens = n,
		.prefix = q->n_computed,
		.pool_index = q->pool_index,
		.tables = &q->tables,
	};
	if (!prefill) {
		q->state = DECODING;
		q->reserved = 0;
		q->owed = true;
		return;
	}
	q->n_computed += n;
	q->state = q->n_computed >= q->n_prompt ? PREFILLED : PREFILLING;
	q->owed = q->state == PREFILLED;
}

static bool key_in_flight(const struct kv_compat_sched *s, const struct kv_compat_key *key)
{
	for (size_t i = 0; i < s->n_store; i++)
		for (size_t k = 0; s->store[i].op_id && k < s->store[i].host.n; k++)
			if (s->store_keys[i][k].group == key->group &&
			    !memcmp(s->store_keys[i][k].hash, key->hash, KV_COMPAT_HASH))
				return true;
	return false;
}

static void store_pending(struct kv_compat_sched *s)
{
	struct kv_compat_move *store;
	size_t room = s->store_room;

	if (!s->n_pending)
		return;
	s->store = grown(s->store, s->n_store, &room, sizeof(*s->store));
	s->store_keys = grown(s->store_keys, s->n_store, &s->store_room, sizeof(*s->store_keys));
	store = &s->store[s->n_store];
	*store = (struct kv_compat_move){.op_id = s->last_op + 1};
	s->store_keys[s->n_store] = calloc(s->n_pending, sizeof(struct kv_compat_key));
	if (!s->store_keys[s->n_store])
		abort();
	s->n_store++;
	for (size_t i = 0; i < s->n_pending; i++) {
		const struct pending *p = &s->pending[i];
		int32_t host;

		if (kv_compat_blocks_find(&s->host, &p->key) || key_in_flight(s, &p->key) ||
		    !kv_compat_blocks_alloc(&s->host, 1, &host)) {
			kv_compat_blocks_free(&s->pool, &p->id, 1);
			continue;
		}
		s->store_keys[s->n_store - 1][store->host.n] = p->key;
		kv_compat_ids_push(&store->device, p->id);
		kv_compat_ids_push(&store->host, host);
	}
	s->n_pending = 0;
	if (store->host.n)
		s->last_op++;
	else
		free(s->store_keys[--s->n_store]);
}

static bool in_flight(const struct kv_compat_sched *s)
{
	for (size_t i = 0; i < s->n_requests; i++)
		if (s->request[i]->owed)
			return true;
	for (size_t i = 0; i < s->n_store; i++)
		if (s->store[i].op_id)
			return true;
	for (size_t i = 0; i < s->n_load; i++)
		if (s->load[i].op_id)
			return true;
	return false;
}

/* Takes blocks away from the longest decoding request, or gives the first refused one up. */
static void relieve(struct kv_compat_sched *s, struct request *deferred, const char **ret_oom)
{
	struct request *longest = NULL;

	for (size_t i = 0; i < s->n_requests; i++) {
		struct request *q = s->request[i];

		if ((q->state == DECODING || q->state == PREFILLED) &&
		    (!longest || q->n_tokens > longest->n_tokens))
			longest = q;
	}
	if (longest) {
		kv_compat_cache_release(&s->cache, &longest->tables);
		give_index(s, longest);
		longest->state = WAITING;
		longest->n_prompt = (int64_t)longest->n_tokens;
		longest->n_computed = longest->n_registered = longest->reserved = 0;
		return;
	}
	memcpy(s->oom, deferred->id, sizeof(s->oom));
	*ret_oom = s->oom;
	kv_compat_sched_end(s, s->oom);
}

/* Blocks in tables, each once; those that only a move pins are not among them. */
static int64_t n_in_tables(const struct kv_compat_sched *s)
{
	bool *seen = calloc((size_t)s->pool.n + 1, sizeof(*seen));
	int64_t n = 0;

	if (!seen)
		abort();
	for (size_t i = 0; i < s->n_requests; i++)
		for (size_t g = 0; g < s->cache.n_groups; g++) {
			const struct kv_compat_ids *ids = &s->request[i]->tables.list[g];

			for (size_t k = 0; k < ids->n; k++) {
				n += ids->id[k] && !seen[ids->id[k]];
				seen[ids->id[k]] = true;
			}
		}
	free(seen);
	return n;
}

static void count(const struct kv_compat_sched *s, struct kv_compat_plan *plan)
{
	for (size_t i = 0; i < s->n_requests; i++) {
		enum state state = s->request[i]->state;

		plan->n_waiting += state == WAITING;
		plan->n_prefilling += state == PREFILLING || state == PREFILLED;
		plan->n_decoding += state == DECODING;
	}
	plan->n_free = s->pool.n_free;
	plan->n_active = n_in_tables(s);
	plan->n_host_cached = s->host.n_cached;
	plan->n_host_free = s->host.n_free;
}

void kv_compat_sched_step(struct kv_compat_sched *s, struct kv_compat_plan *ret_plan)
{
	struct kv_compat_plan plan = {0};
	int64_t budget = s->config.max_tokens;
	struct request *deferred = NULL;
	bool prefilled = false;

	s->first_store = s->n_store;
	s->first_load = s->n_load;
	free(s->list);
	s->list = calloc(s->n_requests + 1, sizeof(*s->list));
	if (!s->list)
		abort();
	sort_requests(s);
	for (size_t i = 0; i < s->n_requests; i++) {
		struct request *q = s->request[i];
		bool decode = q->state == PREFILLED || q->state == DECODING;
		int64_t n;

		if (budget <= 0 || (int64_t)plan.n >= s->config.max_batch)
			break;
		if (!schedulable(q) || (decode && prefilled && !s->config.mixed))
			continue;
		n = try_request(s, q, budget);
		if (!n) {
			if (!deferred)
				deferred = q;
			continue;
		}
		prefilled |= !decode;
		budget -= n;
		take_note(q, n, &s->list[plan.n++]);
	}
	store_pending(s);

	if (plan.n || !deferred || in_flight(s) || s->pool.n_free == s->pool.n - 1) {
		s->starved = 0;
	} else if (++s->starved >= 2) {
		relieve(s, deferred, &plan.oom);
		s->starved = 0;
	}
	/* Prefills first, each kind in its order. */
	for (size_t i = 1; i < plan.n; i++)
		for (size_t k = i; k && s->list[k].prefill && !s->list[k - 1].prefill; k--) {
			struct kv_compat_scheduled x = s->list[k];

			s->list[k] = s->list[k - 1];
			s->list[k - 1] = x;
		}
	plan.list = s->list;
	plan.stores = s->store + s->first_store;
	plan.n_stores = s->n_store - s->first_store;
	plan.loads = s->load + s->first_load;
	plan.n_loads = s->n_load - s->first_load;
	count(s, &plan);
	*ret_plan = plan;
}
