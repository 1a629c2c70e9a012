/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The walk's leases, limits and everything an operator does. Which limits can be is worked out from all
 * pools' limits so far; that nothing leaks is tried by taking all that there must be.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/client/walk.h"

#define MOST_IDS  100
#define RAW_BYTES 205056 /* of a block: divides nothing */
#define MARK	  0x52415721u
#define PAGE	  4096 /* of a block's bytes one word is looked at in each */

struct limits {
	const char *name;
	uint64_t block_bytes, min, max;
	uint32_t weight;
	uint64_t revision;
};

static struct limits all[WALK_POOLS] = {{.name = "model.full"}, {.name = "model.window"},
					{.name = "model.state"}, {.name = "plain"}, {.name = "raw"}};
static struct kv_pool *pools[2];
static kv_block_id ids[2][MOST_IDS];
static uint32_t n_ids[2];

static struct kv_client *any_client(void)
{
	return walk_models[walk_pick(2)].client;
}

void walk_capacity_open(void)
{
	for (int i = 0; i < 2; i++)
		pools[i] = walk_pool_open(walk_models[i].client, "raw", 1, RAW_BYTES);
	for (int i = 0; i < WALK_POOLS; i++) {
		struct kv_pool_stats s = pool_stats(walk_models[0].client, all[i].name);

		all[i].block_bytes = s.block_bytes;
		all[i].min = s.min_bytes;
		all[i].max = s.max_bytes;
		all[i].weight = (uint32_t)s.weight;
		all[i].revision = s.limits_revision;
	}
}

void walk_capacity_close(void)
{
	for (int i = 0; i < 2; i++)
		kv_pool_close(pools[i]);
}

static uint64_t others_min(int pool)
{
	uint64_t sum = 0;

	for (int i = 0; i < WALK_POOLS; i++)
		sum += i == pool ? 0 : all[i].min;
	return sum;
}

static uint64_t max_blocks(int pool)
{
	return all[pool].max / all[pool].block_bytes - 1;
}

bool walk_too_large(enum walk_pool pool, uint64_t n)
{
	return n > max_blocks((int)pool) ||
	       n > (ARENA - others_min((int)pool)) / all[pool].block_bytes - 1;
}

/* ---- leases ---- */

static uint32_t *word_at(int who, kv_block_id id, size_t offset)
{
	return (uint32_t *)(void *)(block_at(pools[who], id) + offset);
}

static void take(void)
{
	int who = (int)walk_pick(2);
	uint32_t n = 1 + walk_pick(8);
	kv_block_id *fresh = ids[who] + n_ids[who];
	int r;

	if (n_ids[who] + n > MOST_IDS)
		return;
	r = kv_blocks_take(pools[who], n, fresh, walk_pick(50) ? 0 : KV_MSEC);
	expect(r == 0 || r == KV_NO_ROOM || r == KV_TOO_LARGE, "take: %d (%s)", r, kv_error_text());
	if (r) {
		expect(r == KV_NO_ROOM || walk_too_large(WALK_RAW, n), "%u blocks fit, and are too many",
		       n);
		walked.refused += r == KV_NO_ROOM;
		walked.too_large += r == KV_TOO_LARGE;
		return;
	}
	for (uint32_t i = 0; i < n; i++) {
		for (size_t at = 0; at < RAW_BYTES; at += PAGE) {
			uint32_t *word = word_at(who, fresh[i], at);

			expect(*word == 0 || *word == MARK,
			       "step %llu: a block of 'raw' has bytes of another pool (%#x)",
			       (unsigned long long)walk_step, *word);
			*word = MARK;
		}
		*word_at(who, fresh[i], 4) = (uint32_t)fresh[i] * 2 + (uint32_t)who;
	}
	n_ids[who] += n;
	walked.raw_blocks += n;
}

static void give(int who, uint32_t n)
{
	n = n < n_ids[who] ? n : n_ids[who];
	for (uint32_t i = 0; i < n; i++) {
		kv_block_id *last = &ids[who][n_ids[who] - 1 - i], *one = last;

		one -= walk_pick(n_ids[who] - i);
		expect(*word_at(who, *one, 4) == (uint32_t)*one * 2 + (uint32_t)who,
		       "step %llu: somebody else wrote into block %d", (unsigned long long)walk_step, *one);
		{
			kv_block_id id = *one;

			*one = *last;
			*last = id;
		}
	}
	n_ids[who] -= n;
	must(kv_blocks_give(pools[who], n, ids[who] + n_ids[who]));
}

void walk_capacity_end(void)
{
	for (int who = 0; who < 2; who++)
		give(who, MOST_IDS);
}

/* ---- limits ---- */

static int expected_answer(int pool, const struct limits *l, bool stale)
{
	if (stale)
		return -ESTALE;
	if (l->max < 2 * l->block_bytes || l->min > l->max)
		return -EINVAL;
	if (l->min > ARENA - others_min(pool))
		return -ENOMEM;
	return !l->weight || l->weight > KV_WEIGHT_MAX ? -EINVAL : 0;
}

static void set_limits(void)
{
	int pool = (int)walk_pick(WALK_POOLS), r, wanted;
	KV_OPTIONS(kv_pool_limits, limits, .change = 1 + walk_pick(7));
	struct limits l = all[pool];
	bool stale = walk_pick(8) == 0;
	struct kv_pool_stats s;
	uint64_t revision = 0;

	limits.min_bytes = walk_pick(3) ? 0 : walk_pick(7 << 20);
	limits.max_bytes = walk_pick(2) ? 0 : walk_pick(4) ? (1 << 20) + walk_pick(25 << 20) :
							      walk_pick(200000);
	limits.weight = walk_pick(8) ? 1 + walk_pick(5) : walk_pick(2) * 20000;
	limits.revision = stale ? l.revision + 1 : walk_pick(2) ? l.revision : 0;
	if (limits.change & KV_LIMIT_MIN)
		l.min = limits.min_bytes;
	if (limits.change & KV_LIMIT_MAX)
		l.max = limits.max_bytes && limits.max_bytes < ARENA ? limits.max_bytes : ARENA;
	if (limits.change & KV_LIMIT_WEIGHT)
		l.weight = limits.weight;
	wanted = expected_answer(pool, &l, stale);
	r = kv_pool_set(any_client(), l.name, &limits, &revision, TIMEOUT);
	expect(r == wanted, "step %llu: set of '%s' gives %d (%s), not %d", (unsigned long long)walk_step,
	       l.name, r, r < 0 ? kv_error_text() : "", wanted);
	if (!r) {
		l.revision++;
		expect(revision == l.revision, "revision %llu", (unsigned long long)revision);
		all[pool] = l;
	}
	s = pool_stats(any_client(), l.name);
	expect(s.min_bytes == all[pool].min && s.max_bytes == all[pool].max &&
		       s.weight == all[pool].weight && s.limits_revision == all[pool].revision,
	       "step %llu: '%s' has other limits than those set", (unsigned long long)walk_step, l.name);
	walked.sets += !r;
	walked.sets_refused += r != 0;
}

/* ---- operators ---- */

static void new_epoch_of_groups(void)
{
	for (int g = 0; g < 3; g++)
		must(kv_pool_new_epoch(any_client(), model_names[g], NULL, NULL, TIMEOUT));
	for (uint32_t prompt = 0; prompt < N_PROMPTS; prompt++) {
		int32_t tokens[MOST_LEN + 8];
		struct kv_gseq *seq;
		size_t hit;

		walk_tokens(tokens, prompt);
		must(kv_gseq_new(walk_models[0].groups, &seq));
		must(kv_gseq_lookup(seq, tokens, MOST_LEN, &hit));
		expect(hit == 0, "%zu tokens of an epoch that is over are found", hit);
		kv_gseq_free(seq, NULL);
	}
	walked.epochs++;
}

/* Blocks that the daemon says are leased and no session has idle. */
static uint64_t raw_in_use(void)
{
	struct kv_session_stats *s;
	uint64_t in_use = 0;
	size_t n;

	must(kv_stats(walk_models[0].client, KV_STAT_SESSION, (void **)&s, &n, TIMEOUT));
	for (size_t i = 0; i < n; i++)
		in_use += strcmp(s[i].pool, "raw") ? 0 : s[i].blocks_leased - s[i].blocks_idle;
	free(s);
	return in_use;
}

static void audit(void)
{
	for (int i = 0; i < 2; i++)
		must(kv_ping(walk_models[i].client, TIMEOUT));
	books_balance(walk_models[0].client);
	expect(raw_in_use() == n_ids[0] + n_ids[1], "step %llu: %llu blocks of 'raw' are in use, not %u",
	       (unsigned long long)walk_step, (unsigned long long)raw_in_use(), n_ids[0] + n_ids[1]);
}

static uint64_t extents_of(uint64_t bytes)
{
	return (bytes + EXTENT - 1) / EXTENT;
}

/*
 * All sequences end, all caches are dropped: then one pool can have everything but what others are
 * guaranteed and their null blocks.
 */
static void claim(void)
{
	static kv_block_id got[4096];
	int pool = (int)walk_pick(WALK_POOLS);
	uint64_t size = all[pool].block_bytes, an_extent = EXTENT / size - (EXTENT % size != 0), n;
	uint64_t extents = ARENA / EXTENT;
	struct kv_pool *from;

	walk_groups_end();
	walk_plain_end();
	walk_capacity_end();
	audit();
	for (int i = 0; i < WALK_POOLS; i++) {
		uint64_t kept = extents_of(all[i].min) ? extents_of(all[i].min) : 1;

		must(kv_pool_drop(any_client(), all[i].name, TIMEOUT));
		extents -= i == pool ? 0 : kept < extents ? kept : extents;
	}
	n = extents * an_extent;
	if (n < 2)
		return;
	n = n - 1 < max_blocks(pool) ? n - 1 : max_blocks(pool);
	from = pool == WALK_RAW	  ? pools[walk_pick(2)] :
	       pool == WALK_PLAIN ? walk_plain_pool() :
				    walk_models[walk_pick(2)].pools[pool];
	expect(kv_blocks_take(from, (uint32_t)n, got, TIMEOUT) == 0,
	       "step %llu: '%s' doesn't get %llu blocks of %llu bytes although nobody else has anything",
	       (unsigned long long)walk_step, all[pool].name, (unsigned long long)n,
	       (unsigned long long)size);
	must(kv_blocks_give(from, (uint32_t)n, got));
	walked.claims++;
}

void walk_capacity(void)
{
	uint32_t what = walk_pick(1000);
	struct kv_pressure pressure;

	if (what < 330)
		take();
	else if (what < 700)
		give((int)walk_pick(2), 1 + walk_pick(8));
	else if (what < 760)
		set_limits();
	else if (what < 800)
		must(kv_ping(any_client(), TIMEOUT));
	else if (what < 880)
		kv_pool_pressure(pools[walk_pick(2)], &pressure);
	else if (what < 930) {
		must(kv_pool_compact(any_client(), all[walk_pick(WALK_POOLS)].name,
				     walk_pick(2) ? 0 : 64 << 20, TIMEOUT));
		walked.compactions++;
	} else if (what < 950) {
		must(kv_pool_drop(any_client(), all[walk_pick(WALK_POOLS)].name, TIMEOUT));
	} else if (what < 960) {
		new_epoch_of_groups();
	} else if (what < 965) {
		must(kv_pool_new_epoch(any_client(), "plain", NULL, NULL, TIMEOUT));
		walk_plain_new_epoch();
	} else if (what < 975) {
		audit();
	} else if (what < 980) {
		claim();
	} else if (what < 990) {
		walk_groups_end_one();
	} else {
		walk_plain_end_one();
	}
}
