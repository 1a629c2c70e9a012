/* SPDX-License-Identifier: Apache-2.0 */
/* Several pools in one arena: who has which memory, how it moves, and that nobody sees another's
 * bytes. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/support/client.h"
#include "tests/support/process.h"

#define MIB	((uint64_t)1 << 20)
#define ARENA	(64 * MIB)
#define MAX_IDS 40000

static struct kv_client *client;
static kv_block_id ids[MAX_IDS], more[MAX_IDS];

static void setup(void)
{
	daemon_start("--host", "64M");
	client = client_new();
}

static void teardown(void)
{
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

/*
 * Layouts of 2 KiB, of 12 KiB (an extent doesn't hold a whole number of them), of 4 KiB, of 96 KiB (a new
 * pool has 41 of them).
 */
static const struct kv_layout *layout_of(int i)
{
	static struct kv_component components[4][8];
	static struct kv_layout layouts[4];
	static const struct {
		uint32_t tokens, layers, heads, dim;
	} shapes[] = {{16, 1, 1, 16}, {32, 2, 3, 8}, {8, 1, 4, 16}, {32, 4, 6, 16}};

	layouts[i] = (struct kv_layout){.kind = KV_LAYOUT_FLAT,
					.block_tokens = shapes[i].tokens,
					.components = components[i]};
	layouts[i].n_components = kv_layout_uniform(components[i], shapes[i].layers,
						    shapes[i].heads, shapes[i].dim, KV_F32, 1, 1);
	return &layouts[i];
}

static struct kv_pool *open_pool(const char *name, int layout, uint64_t min, uint64_t max)
{
	KV_OPTIONS(kv_pool_options, what, .name = name, .layout = layout_of(layout),
		   .min_bytes = min, .max_bytes = max, .mapped = 1, .timeout = TIMEOUT);
	struct kv_pool *pool;

	must(kv_pool_open(client, &what, &pool));
	return pool;
}

static uint64_t bytes_of(struct kv_pool *pool)
{
	struct kv_pool_info info;

	kv_pool_info(pool, &info);
	return info.block_bytes;
}

/* As many blocks as there are; the last ones one by one. */
static uint32_t take_all(struct kv_pool *pool, kv_block_id *to)
{
	uint32_t n = 0;

	for (uint32_t step = 256; step; step /= 2) {
		while (n + step <= MAX_IDS && kv_blocks_take(pool, step, to + n, 0) == 0)
			n += step;
	}
	return n;
}

/* Prompts of 64 blocks until @bytes are cached that nobody holds. Return: how many prompts. */
static int32_t fill_cache(struct kv_pool *pool, uint64_t bytes)
{
	struct kv_pool_info info;
	int32_t n = 0;

	kv_pool_info(pool, &info);
	for (; n * 64 * info.block_bytes < bytes; n++)
		kv_seq_free(seq_published(client, pool, n, 64 * info.block_tokens), NULL);
	return n;
}

/* ---- whose bytes ---- */

START_TEST(pools_of_different_block_sizes_never_share_a_byte)
{
	struct kv_pool *pools[3];
	uint32_t n[3] = {300, 120, 200}, first = 0;

	for (int i = 0; i < 3; i++)
		pools[i] = open_pool((const char *[]){"a", "b", "c"}[i], i, 0, 0);
	ck_assert_uint_eq(bytes_of(pools[0]), 2048);
	ck_assert_uint_eq(bytes_of(pools[1]), 12288);
	ck_assert_uint_eq(bytes_of(pools[2]), 4096);
	/* In turns, so that their extents lie between each other's. */
	for (int round = 0; round < 3; round++) {
		for (int i = 0; i < 3; i++) {
			must(kv_blocks_take(pools[i], n[i], ids + first, TIMEOUT));
			for (uint32_t k = 0; k < n[i]; k++)
				block_fill(pools[i], ids[first + k], 16 * (i + 1) + round);
			first += n[i];
		}
	}
	first = 0;
	for (int round = 0; round < 3; round++) {
		for (int i = 0; i < 3; i++) {
			for (uint32_t k = 0; k < n[i]; k++)
				expect(block_is(pools[i], ids[first + k], 16 * (i + 1) + round),
				       "block %d of pool %d was written by others", ids[first + k],
				       i);
			first += n[i];
		}
	}
	books_balance(client);
	for (int i = 0; i < 3; i++)
		kv_pool_close(pools[i]);
}
END_TEST

/* D37 */
START_TEST(two_mappings_of_two_pools_show_the_same_bytes_at_the_right_places)
{
	struct kv_pool *a[2], *b[2];
	kv_block_id in_a, in_b;

	for (int i = 0; i < 2; i++) {
		a[i] = open_pool("a", 0, 0, 0);
		b[i] = open_pool("b", 1, 0, 0);
	}
	must(kv_blocks_take(a[0], 1, &in_a, TIMEOUT));
	must(kv_blocks_take(b[0], 1, &in_b, TIMEOUT));
	block_fill(a[0], in_a, 0xaa);
	block_fill(b[0], in_b, 0xbb);
	ck_assert(block_is(a[1], in_a, 0xaa));
	ck_assert(block_is(b[1], in_b, 0xbb));
	block_fill(b[1], in_b, 0xcc);
	ck_assert(block_is(b[0], in_b, 0xcc));
	ck_assert(block_is(a[0], in_a, 0xaa));
	for (int i = 0; i < 2; i++) {
		kv_pool_close(b[i]);
		ck_assert(block_is(a[1], in_a, 0xaa));
	}
	kv_pool_close(a[0]);
	kv_pool_close(a[1]);
}
END_TEST

/* The same memory in another pool, whose blocks have another size: nothing of the old bytes. */
static void expect_all_zero(struct kv_pool *pool, const kv_block_id *list, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		expect(block_is(pool, list[i], 0), "block %d has old bytes", list[i]);
}

static void dirty_all_and_die(struct process *self, void *arg)
{
	struct kv_pool *pool;
	uint32_t n;

	(void)arg;
	client = client_new();
	pool = open_pool("dirty", 0, 0, 0);
	n = take_all(pool, ids);
	for (uint32_t i = 0; i < n; i++)
		block_fill(pool, ids[i], 0xff);
	process_say(self, n);
	process_wait(self);
}

/* D05. */
START_TEST(memory_that_comes_from_another_pool_is_zero)
{
	struct process *other = process_start(dirty_all_and_die, NULL);
	struct kv_pool *pool;
	uint32_t n;

	ck_assert_int_gt(process_hear(other), 30000);
	process_kill(other);
	wait_until(daemon_stats(client).n_sessions == 0);
	/* The pool is still there, empty; its memory moves. */
	pool = open_pool("clean", 1, 0, 0);
	must(kv_blocks_take(pool, 4000, ids, TIMEOUT));
	expect_all_zero(pool, ids, 4000);
	for (uint32_t i = 0; i < 4000; i++)
		block_fill(pool, ids[i], 0xff);
	must(kv_blocks_give(pool, 4000, ids));
	kv_pool_close(pool);
	must(kv_pool_drop(client, "clean", TIMEOUT));
	must(kv_pool_drop(client, "dirty", TIMEOUT));

	/* And the other way round. */
	pool = open_pool("third", 2, 0, 0);
	must(kv_blocks_take(pool, 12000, ids, TIMEOUT));
	expect_all_zero(pool, ids, 12000);
	n = take_all(pool, more);
	expect_all_zero(pool, more, n);
	kv_pool_close(pool);
	ck_assert_uint_gt(gpu_stats(client).scrubbed_bytes_total, 0);
}
END_TEST

/* ---- how capacity moves ---- */

START_TEST(a_busy_pool_gets_what_another_only_caches)
{
	struct kv_pool *idle = open_pool("idle", 0, 0, 0), *busy;
	int32_t n = fill_cache(idle, 50 * MIB), found = 0;
	uint64_t before = pool_stats(client, "idle").blocks_cached;

	busy = open_pool("busy", 1, 0, 0);
	must(kv_blocks_take(busy, 2500, ids, TIMEOUT)); /* 29 MiB of the 64 */
	expect_all_zero(busy, ids, 2500);
	ck_assert_uint_lt(pool_stats(client, "idle").blocks_cached, before);
	ck_assert_uint_ge(pool_stats(client, "idle").blocks_cached, before / 4);
	books_balance(client);

	/* What was used last is still there, what was used first has gone. */
	for (int32_t i = 0; i < n; i++)
		found += hit_of(idle, i, 64 * 16 + 1) == 64 * 16;
	ck_assert_int_gt(found, n / 5);
	ck_assert_uint_eq(hit_of(idle, n - 1, 64 * 16 + 1), 64 * 16);

	/* And back again. */
	must(kv_blocks_give(busy, 2500, ids));
	must(kv_ping(client, TIMEOUT));
	must(kv_blocks_take(idle, 28000, ids, TIMEOUT));
	books_balance(client);
	kv_pool_close(busy);
	kv_pool_close(idle);
}
END_TEST

/* A pool evicted nearly all that it had cached, for its magazine, beside extents that were owned and empty. */
START_TEST(a_pool_keeps_its_cache_while_the_extents_of_others_are_empty)
{
	enum { PROMPTS = 24, BLOCKS = 4 }; /* 9 MiB */
	struct kv_pool *c = open_pool("c", 3, 0, 0), *a = open_pool("a", 0, 0, 0), *b = open_pool("b", 2, 0, 0);
	struct kv_pool_stats stats;

	ck_assert_uint_eq(bytes_of(c), 96 << 10);
	/* Each grows by half of the arena, or what is left of it. */
	must(kv_blocks_take(a, 1100, ids, TIMEOUT));
	must(kv_blocks_take(b, 600, more, TIMEOUT));
	ck_assert_uint_gt(pool_stats(client, "a").spare_bytes, 20 * MIB);
	ck_assert_uint_gt(pool_stats(client, "b").spare_bytes, 10 * MIB);
	for (int32_t i = 0; i < PROMPTS; i++)
		kv_seq_free(seq_published(client, c, i, BLOCKS * 32), NULL);
	stats = pool_stats(client, "c");
	ck_assert_uint_eq(stats.evictions_total, 0);
	for (int32_t i = 0; i < PROMPTS; i++)
		ck_assert_uint_eq(hit_of(c, i, BLOCKS * 32 + 1), BLOCKS * 32);
	/* Nor for requests, which others make room for first, also when it has more than its share. */
	must(kv_blocks_take(c, 240, ids, TIMEOUT));
	must(kv_blocks_take(c, 90, ids, TIMEOUT));
	ck_assert_uint_eq(pool_stats(client, "c").evictions_total, 0);
	kv_pool_close(a);
	kv_pool_close(b);
	kv_pool_close(c);
}
END_TEST

START_TEST(blocks_in_use_never_move)
{
	struct kv_pool *one = open_pool("one", 0, 0, 0), *two = open_pool("two", 1, 0, 0);
	struct kv_seq *held;
	uint32_t n;

	held = seq_published(client, one, 1, 64 * 16);
	n = take_all(one, ids);
	ck_assert_uint_gt(n, 20000);
	for (uint32_t i = 0; i < n; i++)
		block_fill(one, ids[i], 0x77);
	ck_assert_int_eq(kv_blocks_take(two, 3000, more, 0), KV_NO_ROOM);
	ck_assert_int_eq(kv_blocks_take(two, 3000, more, 50 * KV_MSEC), KV_NO_ROOM);
	ck_assert_uint_eq(hit_of(one, 1, 64 * 16 + 1), 64 * 16);
	for (uint32_t i = 0; i < n; i++)
		expect(block_is(one, ids[i], 0x77), "block %d was taken away", ids[i]);
	must(kv_blocks_give(one, n, ids));
	must(kv_ping(client, TIMEOUT));
	must(kv_blocks_take(two, 3000, more, TIMEOUT));
	ck_assert_uint_eq(hit_of(one, 1, 64 * 16 + 1), 64 * 16);
	kv_seq_free(held, NULL);
	kv_pool_close(one);
	kv_pool_close(two);
}
END_TEST

START_TEST(a_new_pool_finds_room_where_another_has_cached_everything)
{
	struct kv_pool *first = open_pool("first", 0, 0, 0), *second;

	fill_cache(first, 80 * MIB); /* more than there is: the arena is full of cached blocks */
	ck_assert_uint_eq(gpu_stats(client).bytes_free, 0);
	second = open_pool("second", 1, 0, 0);
	must(kv_blocks_take(second, 100, ids, TIMEOUT));
	expect_all_zero(second, ids, 100);
	kv_pool_close(first);
	kv_pool_close(second);
}
END_TEST

/* ---- limits of a pool ---- */

START_TEST(a_guaranteed_minimum_is_there_when_it_is_claimed)
{
	struct kv_pool *has = open_pool("has", 0, 32 * MIB, 0),
		       *wants = open_pool("wants", 1, 0, 0);
	uint32_t n = take_all(wants, ids);

	/* The other one has taken all it can; the promise was not used until now. */
	ck_assert_uint_gt(n, 2000);
	ck_assert_uint_le(pool_stats(client, "wants").extent_bytes, ARENA - 32 * MIB);
	must(kv_blocks_take(has, 32 * MIB / 2048 - 2048, more, 0));
	books_balance(client);
	kv_pool_close(wants);
	kv_pool_close(has);
}
END_TEST

START_TEST(a_minimum_that_others_are_using_is_refused)
{
	struct kv_pool *has = open_pool("has", 0, 0, 0), *wants = NULL;
	KV_OPTIONS(kv_pool_options, what, .name = "wants", .layout = layout_of(1),
		   .min_bytes = 32 * MIB, .timeout = TIMEOUT);

	must(kv_blocks_take(has, 40 * MIB / 2048, ids, TIMEOUT));
	refused(kv_pool_open(client, &what, &wants), -ENOMEM, "needs 16 extents");
	ck_assert_ptr_null(wants);
	must(kv_blocks_give(has, 40 * MIB / 2048, ids));
	must(kv_ping(client, TIMEOUT));
	must(kv_pool_open(client, &what, &wants));
	/* From now on it is kept for it. */
	take_all(has, ids);
	must(kv_blocks_take(wants, 32 * MIB / 12288 - 400, more, 0));
	kv_pool_close(wants);
	kv_pool_close(has);
}
END_TEST

START_TEST(a_cache_within_its_guaranteed_minimum_stays)
{
	struct kv_pool *has = open_pool("has", 0, 24 * MIB, 0),
		       *wants = open_pool("wants", 1, 0, 0);

	fill_cache(has, 50 * MIB);
	take_all(wants, ids);
	/* Waits for zeroing are over when nothing more comes. */
	for (int i = 0; i < 3; i++)
		ck_assert_int_eq(kv_blocks_take(wants, 500, more, 20 * KV_MSEC), KV_NO_ROOM);
	ck_assert_uint_ge(pool_stats(client, "has").extent_bytes, 24 * MIB);
	ck_assert_uint_ge(pool_stats(client, "has").blocks_cached, 17 * MIB / 2048);
	kv_pool_close(wants);
	kv_pool_close(has);
}
END_TEST

START_TEST(a_pool_stays_below_its_maximum)
{
	struct kv_pool *pool = open_pool("limited", 1, 0, 10 * MIB);
	struct kv_pool_info info;

	kv_pool_info(pool, &info);
	ck_assert_uint_eq(info.max_blocks, 10 * MIB / 12288 - 1);
	ck_assert_uint_eq(take_all(pool, ids), info.max_blocks);
	ck_assert_int_eq(kv_blocks_take(pool, (uint32_t)info.max_blocks + 1, more, TIMEOUT),
			 KV_TOO_LARGE);
	ck_assert_uint_le(pool_stats(client, "limited").extent_bytes, 10 * MIB + 4 * MIB);
	kv_pool_close(pool);
}
END_TEST

START_TEST(every_byte_of_the_arena_can_be_had)
{
	/* Whatever the size of blocks: what is not in blocks is less than the extents at the ends.
	 */
	for (int i = 0; i < 3; i++) {
		struct kv_pool *pool = open_pool("all", i, 0, 0);
		uint64_t bytes = take_all(pool, ids) * bytes_of(pool);

		expect(bytes > ARENA - 2 * MIB, "layout %d: %llu bytes", i,
		       (unsigned long long)bytes);
		kv_pool_close(pool);
		must(kv_pool_drop(client, "all", TIMEOUT));
		wait_until(gpu_stats(client).bytes_free == ARENA);
	}
}
END_TEST

/* ---- paged pools ---- */

static int open_paged(const char *name, uint64_t max, struct kv_pool **ret)
{
	struct kv_layout layout = *layout_of(0);
	KV_OPTIONS(kv_pool_options, what, .name = name, .layout = &layout, .max_bytes = max,
		   .mapped = 1, .timeout = TIMEOUT);

	layout.kind = KV_LAYOUT_PAGED;
	return kv_pool_open(client, &what, ret);
}

START_TEST(a_paged_pool_is_one_slab_of_blocks_from_0_on)
{
	struct kv_pool *flat = open_pool("flat", 1, 0, 0), *paged, *second = NULL;
	uint32_t n_blocks = (uint32_t)(20 * MIB / 2048), n;
	struct kv_pool_info info;
	struct kv_view k, v;

	must(kv_blocks_take(flat, 100, more, TIMEOUT));
	for (int i = 0; i < 100; i++)
		block_fill(flat, more[i], 0xee);
	must(open_paged("paged", 20 * MIB, &paged));
	kv_pool_info(paged, &info);
	ck_assert_int_eq(info.null_block, 0);
	ck_assert_int_eq(info.id_limit, (int)n_blocks);
	ck_assert_uint_eq(info.max_blocks, n_blocks - 1);
	must(kv_pool_view(paged, 0, 0, &k));
	must(kv_pool_view(paged, 0, 1, &v));
	ck_assert_int_eq(k.block_stride, 1024);
	ck_assert_int_eq((char *)v.base - (char *)k.base, n_blocks * 1024);
	n = take_all(paged, ids);
	ck_assert_uint_eq(n, n_blocks - 1);
	for (uint32_t i = 0; i < n; i++) {
		memset((char *)k.base + ids[i] * k.block_stride, 0x11, 1024);
		memset((char *)v.base + ids[i] * v.block_stride, 0x22, 1024);
	}
	for (int i = 0; i < 100; i++)
		expect(block_is(flat, more[i], 0xee), "a slab overlaps block %d", more[i]);

	/* All at once, or not at all. */
	refused(open_paged("second", 60 * MIB, &second), -ENOMEM, "'second'");
	ck_assert_ptr_null(second);
	kv_pool_close(paged);
	must(kv_pool_drop(client, "paged", TIMEOUT));
	must(open_paged("second", 40 * MIB, &second));
	must(kv_blocks_take(second, 1000, ids, TIMEOUT));
	must(kv_pool_view(second, 0, 0, &k));
	for (uint32_t i = 0; i < 1000; i++) {
		const char *at = (char *)k.base + ids[i] * k.block_stride;

		expect(!at[0] && !memcmp(at, at + 1, 1023), "block %d has old bytes", ids[i]);
	}
	kv_pool_close(second);
	kv_pool_close(flat);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/pools");
	TCase *tcase = tcase_create("pools");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, pools_of_different_block_sizes_never_share_a_byte);
	tcase_add_test(tcase, two_mappings_of_two_pools_show_the_same_bytes_at_the_right_places);
	tcase_add_test(tcase, memory_that_comes_from_another_pool_is_zero);
	tcase_add_test(tcase, a_busy_pool_gets_what_another_only_caches);
	tcase_add_test(tcase, a_pool_keeps_its_cache_while_the_extents_of_others_are_empty);
	tcase_add_test(tcase, blocks_in_use_never_move);
	tcase_add_test(tcase, a_new_pool_finds_room_where_another_has_cached_everything);
	tcase_add_test(tcase, a_guaranteed_minimum_is_there_when_it_is_claimed);
	tcase_add_test(tcase, a_minimum_that_others_are_using_is_refused);
	tcase_add_test(tcase, a_cache_within_its_guaranteed_minimum_stays);
	tcase_add_test(tcase, a_pool_stays_below_its_maximum);
	tcase_add_test(tcase, every_byte_of_the_arena_can_be_had);
	tcase_add_test(tcase, a_paged_pool_is_one_slab_of_blocks_from_0_on);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
