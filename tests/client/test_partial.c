/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blocks of which a prompt has only the beginning: found, held, copied, and what is in memory then (bytes.h). What
 * is cached was computed by another process.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/client/bytes.h"
#include "tests/support/process.h"

#define SIZE	 16
#define STEM	 2 /* tokens of a block by which it is found */
#define N_BLOCKS 40
#define MAX_LEN	 256

static struct kv_client *client;
static struct kv_pool *pool;
static struct kv_batch *batch;

static struct kv_batch *new_batch(struct kv_pool *p)
{
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = 8, .max_tokens = 8 * MAX_LEN,
		   .max_blocks_per_seq = N_BLOCKS);
	struct kv_batch *b;

	must(kv_batch_new(p, &sizes, &b));
	return b;
}

static void setup(void)
{
	daemon_start("--host", "16M");
	client = client_new();
	pool = bytes_pool(client, "pool", SIZE, N_BLOCKS);
	batch = new_batch(pool);
}

static void setup_colliding(void)
{
	setenv("KVCACHED_TEST_KEY_BITS", "0", 1);
	setup();
	unsetenv("KVCACHED_TEST_KEY_BITS");
}

static void teardown(void)
{
	kv_batch_free(batch);
	kv_pool_close(pool);
	books_balance(client);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_leased, 0);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached_held, 0);
	kv_disconnect(client);
	daemon_stop();
}

/* ---- what is cached ---- */

/* Computes and publishes; it is held no more. */
static void cache_in(struct kv_client *c, struct kv_pool *p, struct kv_batch *b, struct kv_seq *seq,
		     const int32_t *tokens, size_t n)
{
	struct kv_batch_item item = {.seq = seq};
	size_t hit;

	must(kv_seq_lookup(seq, tokens, n, &hit));
	must(kv_seq_reserve(seq, n, TIMEOUT));
	must(kv_seq_append(seq, tokens + hit, n - hit));
	item.n_query = (uint32_t)(n - hit);
	bytes_step(p, b, &item, 1);
	must(kv_seq_publish(seq, NULL));
	must(kv_ping(c, TIMEOUT));
	kv_seq_free(seq, NULL);
}

/* A process that computes prompts: it hears of one by its memory, and says when it is cached. */
static struct branch {
	int32_t prompt;
	size_t at, n;
} *branches;

static void writer(struct process *self, void *arg)
{
	int n = *(const int *)arg;
	struct kv_client *own = client_new();
	struct kv_pool *p = bytes_pool(own, "pool", SIZE, N_BLOCKS);
	struct kv_batch *b = new_batch(p);

	for (int i = 0; i < n; i++) {
		struct kv_seq *seq;

		must(kv_seq_new(p, &seq));
		cache_in(own, p, b, seq, branch_of(branches[i].prompt, branches[i].at, branches[i].n),
			 branches[i].n);
	}
	process_say(self, 0);
	kv_batch_free(b);
	kv_pool_close(p);
	kv_disconnect(own);
}

static void cached_by_another(struct branch *what, int n)
{
	struct process *other;

	branches = what;
	other = process_start(writer, &n);
	process_hear(other);
	process_end(other);
}

/* ---- helpers ---- */

static struct kv_seq *looked_up(const int32_t *tokens, size_t n, size_t expected)
{
	struct kv_seq *seq;
	size_t hit;

	must(kv_seq_new(pool, &seq));
	must(kv_seq_lookup_partial(seq, tokens, n, &hit));
	expect(hit == expected, "%zu of %zu tokens are found, %zu are there", hit, n, expected);
	expect(kv_seq_len(seq) == hit && !memcmp(kv_seq_tokens(seq), tokens, hit * sizeof(*tokens)),
	       "it has other tokens than were looked up");
	return seq;
}

static size_t partial_hit(const int32_t *tokens, size_t n)
{
	struct kv_seq *seq;
	size_t hit;

	must(kv_seq_new(pool, &seq));
	must(kv_seq_lookup_partial(seq, tokens, n, &hit));
	kv_seq_free(seq, NULL);
	return hit;
}

/* The rest of the prompt is computed. */
static void go_on(struct kv_seq *seq, const int32_t *tokens, size_t n)
{
	size_t len;
	struct kv_batch_item item = {.seq = seq};

	must(kv_seq_reserve(seq, n, TIMEOUT));
	len = kv_seq_len(seq);
	must(kv_seq_append(seq, tokens + len, n - len));
	item.n_query = (uint32_t)(n - len);
	bytes_step(pool, batch, &item, 1);
}

static kv_block_id last_block(const struct kv_seq *seq)
{
	const kv_block_id *ids;
	size_t n = kv_seq_blocks(seq, &ids);

	ck_assert_uint_gt(n, 0);
	return ids[n - 1];
}

static uint64_t cached(void)
{
	return pool_stats(client, "pool").blocks_cached;
}

/* ---- tests ---- */

/* Prompts that part at every place of the third block, and of the first. */
START_TEST(what_a_prompt_has_in_common_with_a_block_is_found_copied_and_gone_on_from)
{
	size_t before = _i ? 2 * SIZE : 0;

	cached_by_another(&(struct branch){1, MAX_LEN, before + SIZE}, 1);
	for (size_t k = 0; k <= SIZE; k++) {
		const int32_t *tokens = branch_of(2 + (int32_t)k, before + k, before + SIZE + 8);
		struct kv_seq *seq = looked_up(tokens, before + SIZE + 8, before + (k < STEM ? 0 : k));
		kv_block_id shared = kv_seq_len(seq) ? last_block(seq) : 0;

		bytes_right(pool, seq, "before the copy", (int)k);
		go_on(seq, tokens, before + SIZE + 8);
		ck_assert_uint_eq(kv_batch_data(batch)->n_copies, k >= STEM && k < SIZE);
		bytes_right(pool, seq, "after it", (int)k);
		if (k >= STEM && k < SIZE)
			ck_assert_int_ne(last_block(seq), shared);
		kv_seq_free(seq, NULL);
	}
	/* Nothing of it was changed. */
	{
		struct kv_seq *seq = looked_up(tokens_of(1, before + SIZE + 1), before + SIZE + 1, before + SIZE);

		bytes_right(pool, seq, "the first", 0);
		kv_seq_free(seq, NULL);
	}
}
END_TEST

/* D26. */
START_TEST(a_prompt_that_is_cached_as_a_whole_leaves_one_token_to_compute)
{
	cached_by_another(&(struct branch){1, MAX_LEN, 4 * SIZE}, 1);
	for (size_t n = SIZE; n <= 4 * SIZE; n++) {
		size_t rest = (n - 1) % SIZE;
		struct kv_seq *seq =
			looked_up(tokens_of(1, n), n, rest < STEM ? n - 1 - rest : n - 1);

		go_on(seq, tokens_of(1, n), n);
		bytes_right(pool, seq, "all", (int)n);
		kv_seq_free(seq, NULL);
	}
	ck_assert_uint_eq(partial_hit(tokens_of(1, 1), 1), 0);
	ck_assert_uint_eq(partial_hit(tokens_of(1, 1), 0), 0);
}
END_TEST

START_TEST(of_several_blocks_the_one_that_goes_on_longest_is_taken)
{
	struct branch all[6];
	const int32_t *tokens;
	struct kv_seq *seq;

	for (int i = 0; i < 6; i++)
		all[i] = (struct branch){10 + i, SIZE + 3 + 2 * (size_t)((i * 5) % 6), 2 * SIZE};
	cached_by_another(all, 6);
	tokens = branch_of(99, 2 * SIZE - 1, 2 * SIZE + 5);
	seq = looked_up(tokens, 2 * SIZE + 5, SIZE + 13);
	bytes_right(pool, seq, "the longest", 0);
	/* Of the others none is held. */
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached_held, 2);
	kv_seq_free(seq, NULL);
}
END_TEST

/* More begin alike than one line has room for: then one of them is found, and it is right. */
START_TEST(of_many_that_begin_alike_one_is_found)
{
	struct branch all[30];

	for (int i = 0; i < 30; i++)
		all[i] = (struct branch){10 + i, SIZE + 6, 2 * SIZE};
	cached_by_another(all, 30);
	for (int i = 0; i < 30; i++) {
		const int32_t *tokens = branch_of(10 + i, SIZE + 6, 2 * SIZE);
		struct kv_seq *seq;
		size_t hit;

		must(kv_seq_new(pool, &seq));
		must(kv_seq_lookup_partial(seq, tokens, 2 * SIZE, &hit));
		expect(hit == SIZE + 6 || hit == 2 * SIZE - 1, "%zu tokens are found", hit);
		bytes_right(pool, seq, "one of many", i);
		kv_seq_free(seq, NULL);
	}
	books_balance(client);
}
END_TEST

START_TEST(the_source_stays_until_the_copy_is_done_whatever_others_need)
{
	cached_by_another(&(struct branch){1, MAX_LEN, 2 * SIZE}, 1);
	for (int when = 0; when < 3; when++) {
		const int32_t *tokens = branch_of(5, SIZE + 9, 2 * SIZE);
		struct kv_seq *seq = looked_up(tokens, 2 * SIZE, SIZE + 9);
		struct kv_pool *greedy = bytes_pool(client, "pool", SIZE, N_BLOCKS);
		kv_block_id ids[N_BLOCKS];
		uint32_t n = 0;

		/* Before its own block is reserved, or when the copy is noted, or built into a batch. */
		if (when > 0) {
			must(kv_seq_reserve(seq, 2 * SIZE, TIMEOUT));
			must(kv_seq_append(seq, tokens + SIZE + 9, 7));
		}
		if (when > 1)
			must(kv_batch_build(batch, &(struct kv_batch_item){seq, 7}, 1, 0, 0));
		while (!kv_blocks_take(greedy, 1, &ids[n], 0)) {
			block_fill(greedy, ids[n], 0x5a);
			n++;
		}
		ck_assert_uint_ge(n, N_BLOCKS - 4);
		ck_assert_uint_eq(cached(), 2);
		if (when == 0) {
			ck_assert_int_eq(kv_seq_len(seq), SIZE + 9);
			bytes_right(pool, seq, "with no room", when);
			must(kv_blocks_give(greedy, 1, &ids[--n]));
			must(kv_ping(client, TIMEOUT));
			go_on(seq, tokens, 2 * SIZE);
		} else {
			if (when == 1)
				must(kv_batch_build(batch, &(struct kv_batch_item){seq, 7}, 1, 0, 0));
			must(kv_batch_copy(batch, NULL));
			/* The copy alone: what was computed isn't there. */
			must(kv_seq_rollback(seq, SIZE + 9, NULL));
		}
		bytes_right(pool, seq, "when all is taken", when);
		must(kv_blocks_give(greedy, n, ids));
		kv_pool_close(greedy);
		kv_seq_free(seq, NULL);
	}
}
END_TEST

/* Its deadline is for what others hold. */
START_TEST(nobody_waits_for_a_block_that_is_held_for_a_part_of_it)
{
	const int32_t *tokens;
	kv_block_id ids[N_BLOCKS];
	struct kv_seq *seq;
	int64_t start;

	cached_by_another(&(struct branch){1, MAX_LEN, 2 * SIZE}, 1);
	must(kv_blocks_take(pool, N_BLOCKS - 2, ids, TIMEOUT));
	tokens = branch_of(5, SIZE + 9, 2 * SIZE);
	seq = looked_up(tokens, 2 * SIZE, SIZE + 9);
	start = now_ns();
	must(kv_seq_reserve(seq, 2 * SIZE, TIMEOUT));
	expect(now_ns() - start < TIMEOUT / 2, "it took %lld ms", (long long)((now_ns() - start) / KV_MSEC));
	ck_assert_uint_eq(kv_seq_len(seq), SIZE);
	kv_seq_free(seq, NULL);
	must(kv_blocks_give(pool, N_BLOCKS - 2, ids));
}
END_TEST

/* Its own block and the one that is copied don't fit beside all the others. */
START_TEST(where_there_is_no_room_for_source_and_copy_it_is_a_plain_hit)
{
	const int32_t *tokens;
	kv_block_id ids[N_BLOCKS];
	struct kv_seq *seq;
	uint32_t n = N_BLOCKS - 2;

	cached_by_another(&(struct branch){1, MAX_LEN, 2 * SIZE}, 1);
	must(kv_blocks_take(pool, n, ids, TIMEOUT));
	tokens = branch_of(5, SIZE + 9, 2 * SIZE);
	seq = looked_up(tokens, 2 * SIZE, SIZE + 9);
	ck_assert_uint_eq(pool_stats(client, "pool").hit_tokens_total, SIZE + 9);
	go_on(seq, tokens, 2 * SIZE);
	ck_assert_uint_eq(kv_batch_data(batch)->n_copies, 0);
	bytes_right(pool, seq, "a plain hit", 0);
	ck_assert_uint_eq(cached(), 1);
	ck_assert_uint_eq(pool_stats(client, "pool").hit_tokens_total, SIZE);
	kv_seq_free(seq, NULL);

	/* And where even that doesn't fit: no room, with the whole blocks held. */
	must(kv_blocks_take(pool, 1, &ids[n++], TIMEOUT));
	must(kv_seq_new(pool, &seq));
	{
		size_t hit;

		must(kv_seq_lookup_partial(seq, tokens, 2 * SIZE, &hit));
		ck_assert_uint_eq(hit, SIZE);
	}
	ck_assert_int_eq(kv_seq_reserve(seq, 2 * SIZE, 0), KV_NO_ROOM);
	ck_assert_uint_eq(kv_seq_len(seq), SIZE);
	kv_seq_free(seq, NULL);
	must(kv_blocks_give(pool, n, ids));
}
END_TEST

/* It could be resumed, and had the first tokens of one prompt and the others of another. */
START_TEST(another_prompt_ends_what_was_kept_of_a_preempted_sequence_also_where_it_finds_no_room)
{
	kv_block_id ids[N_BLOCKS];
	struct kv_seq *seq;
	uint32_t n = 0;
	size_t hit;

	cached_by_another(&(struct branch){1, MAX_LEN, SIZE}, 1);
	must(kv_seq_new(pool, &seq));
	must(kv_seq_reserve(seq, 20, TIMEOUT));
	must(kv_seq_append(seq, branch_of(7, 0, 20), 20));
	must(kv_seq_preempt(seq, NULL));
	must(kv_seq_lookup_partial(seq, branch_of(8, 0, SIZE + 1), SIZE + 1, &hit));
	ck_assert_uint_eq(hit, 0);
	ck_assert_uint_eq(kv_seq_preempted(seq), 20);
	must(kv_seq_lookup_partial(seq, branch_of(5, 9, SIZE + 1), SIZE + 1, &hit));
	ck_assert_uint_eq(hit, 9);
	while (!kv_blocks_take(pool, 1, &ids[n], 0))
		n++;
	ck_assert_int_eq(kv_seq_reserve(seq, 2 * SIZE, 0), KV_NO_ROOM);
	ck_assert_uint_eq(kv_seq_len(seq), 0);
	expect(!kv_seq_preempted(seq), "%zu tokens can be resumed, the first of another prompt", kv_seq_preempted(seq));
	kv_seq_free(seq, NULL);
	must(kv_blocks_give(pool, n, ids));
}
END_TEST

START_TEST(a_sequence_that_has_its_blocks_already_has_the_copy_noted_at_once)
{
	const int32_t *tokens;
	struct kv_seq *seq;
	size_t hit;

	cached_by_another(&(struct branch){1, MAX_LEN, 3 * SIZE}, 1);
	tokens = branch_of(5, 2 * SIZE + 7, 3 * SIZE);
	must(kv_seq_new(pool, &seq));
	must(kv_seq_reserve(seq, 3 * SIZE, TIMEOUT));
	must(kv_seq_lookup_partial(seq, tokens, 3 * SIZE, &hit));
	ck_assert_uint_eq(hit, 2 * SIZE + 7);
	must(kv_seq_append(seq, tokens + hit, 3 * SIZE - hit));
	bytes_step(pool, batch, &(struct kv_batch_item){seq, (uint32_t)(3 * SIZE - hit)}, 1);
	ck_assert_uint_eq(kv_batch_data(batch)->n_copies, 1);
	bytes_right(pool, seq, "reserved before", 0);
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(forks_of_a_partial_hit_each_have_their_copy)
{
	struct kv_seq *seqs[4];
	const int32_t *tokens;

	cached_by_another(&(struct branch){1, MAX_LEN, 2 * SIZE}, 1);
	tokens = branch_of(5, SIZE + 6, SIZE + 10);
	seqs[0] = looked_up(tokens, SIZE + 10, SIZE + 6);
	for (int i = 1; i < 4; i++)
		must(kv_seq_fork(seqs[i - 1], &seqs[i]));
	for (int i = 0; i < 4; i++) {
		go_on(seqs[i], branch_of(20 + i, SIZE + 6, 2 * SIZE + 3), 2 * SIZE + 3);
		must(kv_seq_publish(seqs[i], NULL));
	}
	for (int i = 0; i < 4; i++) {
		bytes_right(pool, seqs[i], "fork", i);
		kv_seq_free(seqs[i], NULL);
	}
	must(kv_ping(client, TIMEOUT));
	/* What they have computed can be found likewise. */
	for (int i = 0; i < 4; i++) {
		struct kv_seq *seq = looked_up(branch_of(20 + i, SIZE + 6, 2 * SIZE), 2 * SIZE, 2 * SIZE - 1);

		bytes_right(pool, seq, "found again", i);
		kv_seq_free(seq, NULL);
	}
}
END_TEST

START_TEST(a_partial_hit_is_given_up_by_a_rollback_and_by_preemption)
{
	const int32_t *tokens;
	struct kv_seq *seq;
	size_t len;

	cached_by_another(&(struct branch){1, MAX_LEN, 2 * SIZE}, 1);
	tokens = branch_of(5, SIZE + 9, 2 * SIZE);
	seq = looked_up(tokens, 2 * SIZE, SIZE + 9);
	must(kv_seq_rollback(seq, SIZE + 4, NULL)); /* still in that block */
	go_on(seq, branch_of(6, SIZE + 4, 2 * SIZE), 2 * SIZE);
	bytes_right(pool, seq, "less of it", 0);
	kv_seq_free(seq, NULL);

	tokens = branch_of(5, SIZE + 9, 2 * SIZE);
	seq = looked_up(tokens, 2 * SIZE, SIZE + 9);
	must(kv_seq_rollback(seq, SIZE, NULL));
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached_held, 1);
	must(kv_seq_lookup_partial(seq, tokens, 2 * SIZE, &len)); /* and found once more */
	ck_assert_uint_eq(len, SIZE + 9);
	must(kv_seq_preempt(seq, NULL));
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached_held, 0);
	must(kv_seq_resume(seq, 2 * SIZE, TIMEOUT, &len));
	ck_assert_uint_eq(len, SIZE);
	must(kv_seq_append(seq, tokens + len, SIZE));
	bytes_step(pool, batch, &(struct kv_batch_item){seq, SIZE}, 1);
	bytes_right(pool, seq, "resumed", 0);
	kv_seq_free(seq, NULL);
}
END_TEST

/* ---- what else decides ---- */

static void publish_as(uint32_t tag, const char *value, const struct kv_extra *extra)
{
	struct kv_seq *seq;

	must(kv_seq_new(pool, &seq));
	if (value)
		must(kv_seq_field(seq, tag, value, strlen(value)));
	if (extra)
		must(kv_seq_extra(seq, extra));
	cache_in(client, pool, batch, seq, tokens_of(1, 2 * SIZE), 2 * SIZE);
}

static size_t found_as(uint32_t tag, const char *value, const struct kv_extra *extra, const int32_t *tokens,
		       size_t n)
{
	struct kv_seq *seq;
	size_t hit;

	must(kv_seq_new(pool, &seq));
	if (value)
		must(kv_seq_field(seq, tag, value, strlen(value)));
	if (extra)
		must(kv_seq_extra(seq, extra));
	must(kv_seq_lookup_partial(seq, tokens, n, &hit));
	kv_seq_free(seq, NULL);
	return hit;
}

START_TEST(fields_and_extras_must_be_the_same)
{
	const int32_t *in_first = branch_of(5, 10, 2 * SIZE), *tokens;
	const struct kv_extra image = {.tag = KV_TAG_IMAGE, .position = SIZE + 2, .n_tokens = 4,
				       .bytes = "image a", .n_bytes = 7};
	struct kv_extra other = image, later = image;

	publish_as(KV_TAG_SALT, "a", NULL);
	ck_assert_uint_eq(found_as(KV_TAG_SALT, "a", NULL, in_first, 2 * SIZE), 10);
	ck_assert_uint_eq(found_as(KV_TAG_SALT, "b", NULL, in_first, 2 * SIZE), 0);
	ck_assert_uint_eq(found_as(KV_TAG_ADAPTER, "a", NULL, in_first, 2 * SIZE), 0);
	ck_assert_uint_eq(found_as(0, NULL, NULL, in_first, 2 * SIZE), 0);

	publish_as(0, NULL, &image);
	other.bytes = "image b";
	later.position = SIZE + 3;
	tokens = branch_of(5, SIZE + 12, 2 * SIZE);
	ck_assert_uint_eq(found_as(0, NULL, &image, tokens, 2 * SIZE), SIZE + 12);
	ck_assert_uint_eq(found_as(0, NULL, &other, tokens, 2 * SIZE), SIZE);
	ck_assert_uint_eq(found_as(0, NULL, &later, tokens, 2 * SIZE), SIZE);
	ck_assert_uint_eq(found_as(0, NULL, NULL, tokens, 2 * SIZE), SIZE);
	ck_assert_uint_eq(found_as(KV_TAG_SALT, "a", &image, tokens, 2 * SIZE), SIZE);
}
END_TEST

START_TEST(after_a_weight_update_nothing_is_found_in_part)
{
	const int32_t *tokens;

	cached_by_another((struct branch[]){{1, MAX_LEN, 2 * SIZE}}, 1);
	tokens = branch_of(5, SIZE + 9, 2 * SIZE);
	ck_assert_uint_eq(partial_hit(tokens, 2 * SIZE), SIZE + 9);
	{
		/* Held over the update: its blocks are still there then. */
		struct kv_seq *seq = looked_up(tokens, 2 * SIZE, SIZE + 9);
		uint64_t epoch;

		must(kv_pool_new_epoch(client, "pool", &epoch, NULL, TIMEOUT));
		ck_assert_uint_eq(partial_hit(tokens, 2 * SIZE), 0);
		bytes_right(pool, seq, "of the old weights", 0);
		kv_seq_free(seq, NULL);
	}
	ck_assert_uint_eq(partial_hit(tokens, 2 * SIZE), 0);
	cached_by_another((struct branch[]){{1, MAX_LEN, 2 * SIZE}}, 1);
	ck_assert_uint_eq(partial_hit(tokens, 2 * SIZE), SIZE + 9);
}
END_TEST

/* All keys are the same, of blocks and of stems: what differs is a miss. */
START_TEST(stems_that_collide_cost_a_miss_and_no_wrong_hit)
{
	struct branch all[10];

	for (int i = 0; i < 10; i++)
		all[i] = (struct branch){10 + i, (size_t)i + 1, 2 * SIZE};
	cached_by_another(all, 10);
	for (int i = 0; i < 10; i++) {
		const int32_t *tokens = branch_of(50 + i, (size_t)i + 4, 2 * SIZE);
		struct kv_seq *seq;
		size_t hit;

		must(kv_seq_new(pool, &seq));
		must(kv_seq_lookup_partial(seq, tokens, 2 * SIZE, &hit));
		bytes_right(pool, seq, "colliding", i);
		go_on(seq, tokens, 2 * SIZE);
		bytes_right(pool, seq, "colliding, gone on", i);
		kv_seq_free(seq, NULL);
	}
}
END_TEST

/* ---- deaths ---- */

static void holder(struct process *self, void *arg)
{
	int when = *(const int *)arg;
	struct kv_client *own = client_new();
	struct kv_pool *p = bytes_pool(own, "pool", SIZE, N_BLOCKS);
	const int32_t *tokens = branch_of(5, SIZE + 9, 2 * SIZE);
	struct kv_seq *seq;
	size_t hit;

	must(kv_seq_new(p, &seq));
	must(kv_seq_lookup_partial(seq, tokens, 2 * SIZE, &hit));
	if (when)
		must(kv_seq_reserve(seq, 2 * SIZE, TIMEOUT));
	process_say(self, (int64_t)hit);
	process_wait(self);
}

START_TEST(who_dies_between_hit_and_copy_leaves_nothing_held)
{
	cached_by_another(&(struct branch){1, MAX_LEN, 2 * SIZE}, 1);
	for (int when = 0; when < 2; when++) {
		struct process *other = process_start(holder, &when);

		ck_assert_int_eq(process_hear(other), SIZE + 9);
		ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached_held, 2);
		process_kill(other);
		wait_until(pool_stats(client, "pool").blocks_cached_held == 0 &&
			   pool_stats(client, "pool").blocks_leased == 0);
		books_balance(client);
	}
}
END_TEST

START_TEST(another_worker_finds_beginnings_of_what_the_one_before_had_cached)
{
	const int32_t *tokens;
	struct kv_seq *seq;

	cached_by_another((struct branch[]){{1, MAX_LEN, 3 * SIZE}}, 1);
	for (int i = 0; i < 3; i++) {
		daemon_kill_worker();
		must(kv_ping(client, TIMEOUT));
		books_balance(client);
		tokens = branch_of(5 + i, 2 * SIZE + 9, 3 * SIZE);
		seq = looked_up(tokens, 3 * SIZE, 2 * SIZE + 9);
		go_on(seq, tokens, 3 * SIZE);
		bytes_right(pool, seq, "after a worker's death", i);
		must(kv_seq_publish(seq, NULL));
		kv_seq_free(seq, NULL);
	}
	must(kv_ping(client, TIMEOUT));
	books_balance(client);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/partial");
	TCase *tcase = tcase_create("partial"), *colliding = tcase_create("colliding");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_loop_test(tcase,
			    what_a_prompt_has_in_common_with_a_block_is_found_copied_and_gone_on_from, 0, 2);
	tcase_add_test(tcase, a_prompt_that_is_cached_as_a_whole_leaves_one_token_to_compute);
	tcase_add_test(tcase, of_several_blocks_the_one_that_goes_on_longest_is_taken);
	tcase_add_test(tcase, of_many_that_begin_alike_one_is_found);
	tcase_add_test(tcase, the_source_stays_until_the_copy_is_done_whatever_others_need);
	tcase_add_test(tcase, nobody_waits_for_a_block_that_is_held_for_a_part_of_it);
	tcase_add_test(tcase, where_there_is_no_room_for_source_and_copy_it_is_a_plain_hit);
	tcase_add_test(tcase, another_prompt_ends_what_was_kept_of_a_preempted_sequence_also_where_it_finds_no_room);
	tcase_add_test(tcase, a_sequence_that_has_its_blocks_already_has_the_copy_noted_at_once);
	tcase_add_test(tcase, forks_of_a_partial_hit_each_have_their_copy);
	tcase_add_test(tcase, a_partial_hit_is_given_up_by_a_rollback_and_by_preemption);
	tcase_add_test(tcase, fields_and_extras_must_be_the_same);
	tcase_add_test(tcase, after_a_weight_update_nothing_is_found_in_part);
	tcase_add_test(tcase, who_dies_between_hit_and_copy_leaves_nothing_held);
	tcase_add_test(tcase, another_worker_finds_beginnings_of_what_the_one_before_had_cached);
	suite_add_tcase(s, tcase);
	tcase_set_timeout(colliding, 60);
	tcase_add_checked_fixture(colliding, setup_colliding, teardown);
	tcase_add_test(colliding, stems_that_collide_cost_a_miss_and_no_wrong_hit);
	suite_add_tcase(s, colliding);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
