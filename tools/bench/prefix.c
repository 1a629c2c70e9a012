/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench prefix: finding a prompt's beginning in the cache. A chain of n blocks of 16 tokens is
 * looked up (hashed, found, pinned, verified token by token) and let go again.
 *
 * Beside it, in turns, the floor: what cannot be left out by anyone who looks at n blocks. The same
 * hash over the same tokens, one key after the other, and for each block the cache line of its
 * descriptor and that of its tokens, at the same ids, in private memory.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "include/internal/cleanup.h"
#include "tools/bench/bench.h"

#define BLOCK_TOKENS	16u
#define LINE_BYTES	64u
#define ROUNDS		31
#define BLOCKS_A_ROUND	8192u /* in as many lookups as it takes */
#define POOL_BLOCKS	16384u
#define HOST_BYTES	((uint64_t)64 << 20)
#define PUBLISH_TIMEOUT (10 * KV_SEC)

static const uint32_t lengths[] = {1, 4, 16, 64, 256, 1024, 4096};

#define LENGTHS (sizeof(lengths) / sizeof(lengths[0]))

struct chain {
	uint32_t n;
	int32_t *tokens;  /* [n * BLOCK_TOKENS + 1]: one is left to compute */
	kv_block_id *ids; /* [n] */
};

struct prefix {
	struct kv_bench *bench;
	struct kv_pool *pool;
	char *descriptors; /* [id_limit * LINE_BYTES] the floor's own memory */
	char *tokens;	   /* likewise */
};

/* ns of one lookup of a chain */
struct times {
	double lookup, release, floor;
};

static void chain_deinit(struct chain *c)
{
	free(c->tokens);
	free(c->ids);
}

/* Chains differ from their first token on. */
static int chain_init(struct chain *c, uint32_t n)
{
	*c = (struct chain){.n = n,
			    .tokens = calloc(n * BLOCK_TOKENS + 1, sizeof(int32_t)),
			    .ids = calloc(n, sizeof(kv_block_id))};
	if (!c->tokens || !c->ids)
		return -ENOMEM;
	for (uint32_t i = 0; i <= n * BLOCK_TOKENS; i++)
		c->tokens[i] = (int32_t)((i + n) * 2654435761u >> 1);
	c->tokens[0] = (int32_t)n;
	return 0;
}

/* Holds what is cached of the chain; @ret_seq is to be freed. */
static int look_up(struct kv_pool *pool, const struct chain *c, struct kv_seq **ret_seq,
		   size_t *ret_hit)
{
	int r = kv_seq_new(pool, ret_seq);

	if (r)
		return r;
	r = kv_seq_lookup(*ret_seq, c->tokens, (size_t)c->n * BLOCK_TOKENS + 1, ret_hit);
	if (r)
		kv_seq_free(*ret_seq, NULL);
	return r;
}

/* Waits until all of the chain can be found; notes where it lies. */
static int await(struct kv_pool *pool, struct chain *c)
{
	int64_t deadline = kv_bench_now() + PUBLISH_TIMEOUT;
	const kv_block_id *ids;
	struct kv_seq *seq;
	size_t hit, n;
	int r;

	while (!(r = look_up(pool, c, &seq, &hit))) {
		bool found = hit == (size_t)c->n * BLOCK_TOKENS;

		n = kv_seq_blocks(seq, &ids);
		if (found)
			memcpy(c->ids, ids, n * sizeof(*ids));
		kv_seq_free(seq, NULL);
		if (found)
			return 0;
		if (kv_bench_now() > deadline)
			return -ETIMEDOUT;
		poll(NULL, 0, 1);
	}
	return r;
}

static int publish(struct kv_pool *pool, struct chain *c)
{
	size_t n_tokens = (size_t)c->n * BLOCK_TOKENS;
	struct kv_seq *seq;
	int r = kv_seq_new(pool, &seq);

	if (r)
		return r;
	r = kv_seq_reserve(seq, n_tokens, 0);
	if (!r)
		r = kv_seq_append(seq, c->tokens, n_tokens);
	if (!r)
		r = kv_seq_publish(seq, NULL);
	kv_seq_free(seq, NULL);
	return r ? r : await(pool, c);
}

static int time_lookups(const struct prefix *p, const struct chain *c, uint32_t times,
			struct times *ret)
{
	int64_t lookup = 0, release = 0;

	for (uint32_t i = 0; i < times; i++) {
		int64_t start = kv_bench_now(), found;
		struct kv_seq *seq;
		size_t hit;
		int r = look_up(p->pool, c, &seq, &hit);

		if (r)
			return r;
		found = kv_bench_now();
		kv_seq_free(seq, NULL);
		release += kv_bench_now() - found;
		lookup += found - start;
		if (hit != (size_t)c->n * BLOCK_TOKENS)
			return -ENODATA;
	}
	ret->lookup = (double)lookup / times;
	ret->release = (double)release / times;
	return 0;
}

static double floor_of(const struct prefix *p, const struct chain *c, uint32_t times)
{
	int64_t start = kv_bench_now();

	for (uint32_t i = 0; i < times; i++) {
		XXH128_hash_t key = {0, 0};

		for (uint32_t k = 0; k < c->n; k++) {
			size_t line = (size_t)c->ids[k] * LINE_BYTES;

			key = XXH3_128bits_withSeed(c->tokens + k * BLOCK_TOKENS,
						    BLOCK_TOKENS * sizeof(int32_t),
						    key.low64 ^ key.high64);
			(void)*(volatile const char *)(p->descriptors + line);
			(void)*(volatile const char *)(p->tokens + line);
		}
		__asm__ volatile("" : : "r"(key.low64) : "memory");
	}
	return (double)(kv_bench_now() - start) / times;
}

static int measure(const struct prefix *p, const struct chain *c, struct times *ret)
{
	uint32_t times = BLOCKS_A_ROUND / c->n;
	double lookup[ROUNDS], release[ROUNDS], least[ROUNDS];
	struct times t;

	/* Pages of the floor's own, as the pool's are: not the kernel's page of zeros. */
	for (uint32_t k = 0; k < c->n; k++)
		p->descriptors[c->ids[k] * (size_t)LINE_BYTES] =
			p->tokens[c->ids[k] * (size_t)LINE_BYTES] = 1;
	for (int round = 0; round < ROUNDS; round++) {
		int r = time_lookups(p, c, times, &t);

		if (r)
			return r;
		lookup[round] = t.lookup;
		release[round] = t.release;
		least[round] = floor_of(p, c, times);
	}
	ret->lookup = kv_bench_median(lookup, ROUNDS);
	ret->release = kv_bench_median(release, ROUNDS);
	ret->floor = kv_bench_median(least, ROUNDS);
	return 0;
}

static void show(struct kv_emit *e, const struct times *times)
{
	kv_emit_open(e, NULL, '{');
	kv_emit_open(e, "chains", '[');
	kv_emit_head(e, ">BLOCKS", ">LOOKUP US", ">NS/BLOCK", ">FREE US", ">NS/BLOCK", ">FLOOR US",
		     ">NS/BLOCK", ">LOOKUP/FLOOR", NULL);
	for (size_t i = 0; i < LENGTHS; i++) {
		const struct times *t = &times[i];

		kv_emit_cell(e, "%u", lengths[i]);
		kv_emit_cell(e, "%.2f", t->lookup / 1000);
		kv_emit_cell(e, "%.1f", t->lookup / lengths[i]);
		kv_emit_cell(e, "%.2f", t->release / 1000);
		kv_emit_cell(e, "%.1f", t->release / lengths[i]);
		kv_emit_cell(e, "%.2f", t->floor / 1000);
		kv_emit_cell(e, "%.1f", t->floor / lengths[i]);
		kv_emit_cell(e, "%.2f", t->lookup / t->floor);
		kv_emit_open(e, NULL, '{');
		kv_emit_number(e, "blocks", lengths[i]);
		kv_emit_real(e, "lookup_ns", t->lookup);
		kv_emit_real(e, "free_ns", t->release);
		kv_emit_real(e, "floor_ns", t->floor);
		kv_emit_close(e);
	}
	kv_emit_table(e);
	kv_emit_close(e);
	kv_emit_close(e);
}

static int run(struct prefix *p)
{
	struct times times[LENGTHS];
	struct kv_pool_info info;
	int r = 0;

	kv_pool_info(p->pool, &info);
	p->descriptors = calloc((size_t)info.id_limit, LINE_BYTES);
	p->tokens = calloc((size_t)info.id_limit, LINE_BYTES);
	if (!p->descriptors || !p->tokens)
		return kv_bench_broken(p->bench, "prefix", -ENOMEM);
	for (size_t i = 0; i < LENGTHS && !r; i++) {
		__attribute__((cleanup(chain_deinit))) struct chain chain;

		kv_bench_progress(p->bench, i, LENGTHS, "lengths");
		r = chain_init(&chain, lengths[i]);
		if (!r)
			r = publish(p->pool, &chain);
		if (!r)
			r = measure(p, &chain, &times[i]);
		if (r == -ENODATA || r == -ETIMEDOUT)
			return kv_bench_refuse(p->bench, KV_BENCH_FAILED,
					       "a published chain of %u blocks can't be found",
					       lengths[i]);
	}
	kv_bench_progress(p->bench, LENGTHS, LENGTHS, "lengths");
	if (r)
		return kv_bench_broken(p->bench, "prefix", r);
	show(&p->bench->emit, times);
	return KV_BENCH_DONE;
}

int kv_bench_prefix(struct kv_bench *b)
{
	char name[KV_NAME_MAX];
	struct kv_bench_pool what = {
		.name = name, .block_tokens = BLOCK_TOKENS, .n_blocks = POOL_BLOCKS};
	struct prefix p = {.bench = b};
	struct kv_client *client;
	int status = kv_bench_serve(b, HOST_BYTES);

	kv_bench_pool_name(name, "prefix");
	if (!status)
		status = kv_bench_connect(b, &client);
	if (status)
		return status;
	status = kv_bench_open(b, client, &what, &p.pool);
	if (!status) {
		status = run(&p);
		kv_pool_close(p.pool);
		kv_pool_drop(client, name, KV_BENCH_TIMEOUT);
	}
	free(p.descriptors);
	free(p.tokens);
	kv_disconnect(client);
	return status;
}
