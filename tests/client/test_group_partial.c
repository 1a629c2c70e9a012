/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a lookup finds of the blocks behind a hit when a model has several groups: as many tokens in each, with
 * their bytes (bytes.h), whatever sizes their blocks have; and what it lets go of.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/client/bytes.h"
#include "tests/support/process.h"

#define UNIT	 16
#define MAX_LEN	 96
#define N_BLOCKS 400
#define MOST	 4 /* groups */

/* Kinds of models; blocks of each group in a pool of its own. */
static const struct shape {
	struct kv_group groups[MOST];
	uint32_t block_tokens[MOST];
	uint32_t n;
} shapes[] = {
	{{{.kind = KV_GROUP_FULL}, {.kind = KV_GROUP_WINDOW, .window = 24}}, {16, 16}, 2},
	{{{.kind = KV_GROUP_FULL}, {.kind = KV_GROUP_WINDOW, .window = 13}}, {16, 4}, 2},
	{{{.kind = KV_GROUP_FULL}, {.kind = KV_GROUP_FULL}, {.kind = KV_GROUP_WINDOW, .window = 40}}, {4, 16, 8}, 3},
	{{{.kind = KV_GROUP_WINDOW, .window = 9}, {.kind = KV_GROUP_CHUNKED, .window = 20}}, {8, 16}, 2},
	{{{.kind = KV_GROUP_FULL}, {.kind = KV_GROUP_CHUNKED, .window = 32}}, {16, 8}, 2},
};
#define N_SHAPES (int)(sizeof(shapes) / sizeof(shapes[0]))

struct attached {
	struct kv_client *client;
	struct kv_pool *pools[MOST];
	struct kv_batch *batches[MOST];
	struct kv_groups *groups;
	const struct shape *shape;
};

static struct attached m;

static void attach(struct attached *a, const struct shape *shape, uint32_t n_blocks)
{
	struct kv_group groups[MOST];
	KV_OPTIONS(kv_groups_options, what, .groups = groups, .n_groups = shape->n);
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = 4, .max_tokens = 4 * MAX_LEN,
		   .max_blocks_per_seq = MAX_LEN);

	*a = (struct attached){.client = client_new(), .shape = shape};
	memcpy(groups, shape->groups, sizeof(groups));
	for (uint32_t g = 0; g < shape->n; g++) {
		a->pools[g] = bytes_pool(a->client, (const char[]){'p', (char)('0' + g), 0},
					 shape->block_tokens[g], n_blocks);
		must(kv_batch_new(a->pools[g], &sizes, &a->batches[g]));
		groups[g].pool = a->pools[g];
	}
	must(kv_groups_new(&what, &a->groups));
}

static void detach(struct attached *a)
{
	kv_groups_free(a->groups);
	for (uint32_t g = 0; g < a->shape->n; g++) {
		kv_batch_free(a->batches[g]);
		kv_pool_close(a->pools[g]);
	}
	kv_disconnect(a->client);
}

static void setup(void)
{
	daemon_start("--host", "32M");
}

static void teardown(void)
{
	struct kv_client *client = client_new();

	books_balance(client);
	for (uint32_t g = 0; g < m.shape->n; g++) {
		struct kv_pool_stats s = pool_stats(client, (const char[]){'p', (char)('0' + g), 0});

		expect(!s.blocks_leased && !s.blocks_cached_held, "group %u: %llu leased, %llu held", g,
		       (unsigned long long)s.blocks_leased, (unsigned long long)s.blocks_cached_held);
	}
	kv_disconnect(client);
	daemon_stop();
}

static struct kv_gseq *new_seq(const struct attached *a)
{
	struct kv_gseq *seq;

	must(kv_gseq_new(a->groups, &seq));
	return seq;
}

/* The first @at tokens of the prompt that is cached, then others, @n in all. Return: a sequence that finds @hit. */
static struct kv_gseq *partly_found(size_t at, size_t n, size_t hit)
{
	struct kv_gseq *seq = new_seq(&m);
	size_t found;

	must(kv_gseq_lookup_partial(seq, branch_of(5, at, n), n, &found));
	ck_assert_uint_eq(found, hit);
	return seq;
}

/* Return: how many blocks the first group's pool still had. */
static uint32_t take_rest(kv_block_id *ids)
{
	uint32_t n = 0;

	while (!kv_blocks_take(m.pools[0], 1, &ids[n], 0))
		n++;
	return n;
}

/* One step to @n tokens, in all groups. Return: copies that it took. */
static uint32_t compute(const struct attached *a, struct kv_gseq *seq, const int32_t *tokens, size_t n)
{
	uint32_t n_copies = 0;
	size_t len;

	must(kv_gseq_reserve(seq, n, TIMEOUT));
	len = kv_gseq_len(seq);
	must(kv_gseq_append(seq, tokens + len, n - len));
	for (uint32_t g = 0; g < a->shape->n; g++) {
		struct kv_batch_item item = {kv_gseq_seq(seq, g), (uint32_t)(n - len)};

		bytes_step(a->pools[g], a->batches[g], &item, 1);
		n_copies += kv_batch_data(a->batches[g])->n_copies;
	}
	return n_copies;
}

static void right(const struct attached *a, const struct kv_gseq *seq, const char *what, int round)
{
	for (uint32_t g = 0; g < a->shape->n; g++)
		bytes_right(a->pools[g], kv_gseq_seq(seq, g), what, round);
}

/* All that the next token sees in a window has a block. */
static void sees_its_window(const struct attached *a, const struct kv_gseq *seq, uint32_t g)
{
	const struct kv_group *group = &a->shape->groups[g];
	size_t len = kv_gseq_len(seq), size = a->shape->block_tokens[g], first = 0;
	const kv_block_id *ids;
	struct kv_pool_info info;

	kv_pool_info(a->pools[g], &info);
	kv_seq_blocks(kv_gseq_seq(seq, g), &ids);
	if (group->kind == KV_GROUP_WINDOW)
		first = len >= group->window ? len - group->window + 1 : 0;
	if (group->kind == KV_GROUP_CHUNKED)
		first = len / group->window * group->window;
	for (size_t i = first; i < len; i++)
		expect(ids[i / size] != info.null_block, "group %u: token %zu of %zu has no block", g, i, len);
}

static void writer(struct process *self, void *arg)
{
	const struct shape *shape = arg;
	struct attached own;
	struct kv_gseq *seq;

	attach(&own, shape, N_BLOCKS);
	seq = new_seq(&own);
	compute(&own, seq, tokens_of(1, 4 * UNIT), 4 * UNIT);
	must(kv_gseq_publish(seq, NULL));
	must(kv_ping(own.client, TIMEOUT));
	kv_gseq_free(seq, NULL);
	process_say(self, 0);
	detach(&own);
}

static void cached_by_another(const struct shape *shape)
{
	struct process *other = process_start(writer, (void *)shape);

	process_hear(other);
	process_end(other);
}

/* What the group has of a prompt that goes another way after @d tokens. */
static size_t reach(const struct shape *shape, uint32_t g, size_t d)
{
	size_t size = shape->block_tokens[g], stem = size / 8 ? size / 8 : 1;

	return d % size < stem ? d - d % size : d;
}

START_TEST(as_many_tokens_are_found_as_all_groups_have)
{
	const struct shape *shape = &shapes[_i];

	attach(&m, shape, N_BLOCKS);
	cached_by_another(shape);
	for (size_t d = 0; d <= 4 * UNIT; d++) {
		const int32_t *tokens = branch_of(2 + (int32_t)d, d, 4 * UNIT + 9);
		struct kv_gseq *seq = new_seq(&m);
		size_t expected = d, hit;
		uint32_t n_copies = 0;

		for (uint32_t g = 0; g < shape->n; g++)
			expected = reach(shape, g, d) < expected ? reach(shape, g, d) : expected;
		for (uint32_t g = 0; g < shape->n; g++)
			n_copies += expected % shape->block_tokens[g] != 0;
		must(kv_gseq_lookup_partial(seq, tokens, 4 * UNIT + 9, &hit));
		expect(hit == expected && kv_gseq_len(seq) == hit, "%zu tokens in common: %zu found, %zu are there",
		       d, hit, expected);
		for (uint32_t g = 0; g < shape->n; g++) {
			ck_assert_uint_eq(kv_seq_len(kv_gseq_seq(seq, g)), hit);
			sees_its_window(&m, seq, g);
		}
		right(&m, seq, "before copies", (int)d);
		ck_assert_uint_eq(compute(&m, seq, tokens, 4 * UNIT + 9), n_copies);
		right(&m, seq, "after them", (int)d);
		kv_gseq_free(seq, NULL);
	}
	/* A prompt that is cached as a whole leaves one token. */
	for (size_t n = UNIT + 8; n <= 4 * UNIT; n += 8) {
		struct kv_gseq *seq = new_seq(&m);
		size_t hit;

		must(kv_gseq_lookup_partial(seq, tokens_of(1, n), n, &hit));
		ck_assert_uint_eq(hit, n - 1);
		compute(&m, seq, tokens_of(1, n), n);
		right(&m, seq, "cached as a whole", (int)n);
		kv_gseq_free(seq, NULL);
	}
	detach(&m);
}
END_TEST

/* Of one group a block in the middle is gone. */
START_TEST(what_one_group_lacks_no_group_has)
{
	const struct shape *shape = &shapes[0];
	struct kv_gseq *seq;
	kv_block_id ids[N_BLOCKS];

	attach(&m, shape, N_BLOCKS);
	cached_by_another(shape);
	/* The window's pool is emptied, then has the first two blocks again. */
	must(kv_blocks_take(m.pools[1], N_BLOCKS, ids, TIMEOUT));
	must(kv_blocks_give(m.pools[1], N_BLOCKS, ids));
	seq = new_seq(&m);
	compute(&m, seq, tokens_of(1, 2 * UNIT), 2 * UNIT);
	must(kv_gseq_publish(seq, NULL));
	kv_gseq_free(seq, NULL);
	must(kv_ping(m.client, TIMEOUT));

	seq = partly_found(2 * UNIT + 9, 3 * UNIT, 2 * UNIT);
	kv_gseq_free(seq, NULL);
	seq = partly_found(UNIT + 9, 3 * UNIT, UNIT + 9);
	ck_assert_uint_eq(pool_stats(m.client, "p0").blocks_cached_held, 2);
	right(&m, seq, "both have it", 0);
	kv_gseq_free(seq, NULL);
	detach(&m);
}
END_TEST

START_TEST(where_one_group_has_no_room_for_its_copy_all_are_back_at_whole_units)
{
	const struct shape *shape = &shapes[1];
	kv_block_id ids[N_BLOCKS];
	struct kv_gseq *seq;
	uint32_t n;

	attach(&m, shape, N_BLOCKS);
	cached_by_another(shape);
	seq = partly_found(UNIT + 7, 2 * UNIT, UNIT + 7);
	n = take_rest(ids);
	/* The block that it lets go of is the one that it needs. */
	ck_assert_uint_eq(compute(&m, seq, branch_of(5, UNIT + 7, 2 * UNIT), 2 * UNIT), 0);
	right(&m, seq, "with whole units", 0);
	ck_assert_uint_eq(pool_stats(m.client, "p0").blocks_cached, 1);
	/* And another needs one more. */
	ck_assert_int_eq(kv_gseq_reserve(seq, 3 * UNIT, 0), KV_NO_ROOM);
	for (uint32_t g = 0; g < shape->n; g++)
		ck_assert_uint_eq(kv_seq_len(kv_gseq_seq(seq, g)), 2 * UNIT);
	must(kv_blocks_give(m.pools[0], n, ids));
	kv_gseq_free(seq, NULL);
	detach(&m);
}
END_TEST

START_TEST(forks_and_rollbacks_of_a_partial_hit_are_right_in_all_groups)
{
	const struct shape *shape = &shapes[2];
	struct kv_gseq *seq, *fork;
	size_t hit;

	attach(&m, shape, N_BLOCKS);
	cached_by_another(shape);
	for (size_t to = UNIT; to <= UNIT + 11; to++) {
		seq = partly_found(UNIT + 11, 2 * UNIT, UNIT + 11);
		must(kv_gseq_fork(seq, &fork));
		must(kv_gseq_rollback(seq, to, NULL));
		compute(&m, seq, branch_of(6, to, 2 * UNIT), 2 * UNIT);
		right(&m, seq, "rolled back", (int)to);
		compute(&m, fork, branch_of(7, UNIT + 11, 3 * UNIT), 3 * UNIT);
		right(&m, fork, "fork", (int)to);
		must(kv_gseq_preempt(fork, NULL));
		must(kv_gseq_resume(fork, 3 * UNIT, TIMEOUT, &hit));
		compute(&m, fork, branch_of(7, UNIT + 11, 3 * UNIT), 3 * UNIT);
		right(&m, fork, "resumed", (int)to);
		kv_gseq_free(seq, NULL);
		kv_gseq_free(fork, NULL);
	}
	detach(&m);
}
END_TEST

/*
 * One group finds more than another has, and lets go of it again. Once the rest of the prompt was forgotten with
 * it: what was computed of an image was shown to whoever had the same tokens and another image, or none.
 */
START_TEST(what_is_said_of_a_prompt_stays_when_one_group_has_less_of_it)
{
	static const struct shape two = {{{.kind = KV_GROUP_FULL}, {.kind = KV_GROUP_FULL}}, {16, 16}, 2};
	const struct kv_extra image = {.tag = KV_TAG_IMAGE, .position = 2 * UNIT + 3, .n_tokens = 4,
				       .bytes = "image a", .n_bytes = 7};
	kv_block_id ids[N_BLOCKS];
	struct kv_seq *plain;
	size_t hit;

	attach(&m, &two, N_BLOCKS);
	for (int round = 0; round < 2; round++) {
		struct kv_gseq *seq = new_seq(&m);

		must(kv_gseq_extra(seq, &image));
		must(kv_gseq_lookup(seq, tokens_of(1, 4 * UNIT), 4 * UNIT, &hit));
		ck_assert_uint_eq(hit, 0);
		compute(&m, seq, tokens_of(1, 4 * UNIT), 4 * UNIT);
		must(kv_gseq_publish(seq, NULL));
		must(kv_ping(m.client, TIMEOUT));
		kv_gseq_free(seq, NULL);
		/* The second group loses all it has. */
		must(kv_blocks_take(m.pools[1], N_BLOCKS, ids, TIMEOUT));
		must(kv_blocks_give(m.pools[1], N_BLOCKS, ids));
	}
	must(kv_seq_new(m.pools[0], &plain));
	must(kv_seq_lookup(plain, tokens_of(1, 4 * UNIT + 1), 4 * UNIT + 1, &hit));
	ck_assert_uint_eq(hit, 2 * UNIT);
	kv_seq_free(plain, NULL);
	detach(&m);
}
END_TEST

/*
 * Who had room before the search appends behind what was found and asks for nothing. Later requests that found no
 * room once forgot as many of the sequence's last tokens as the search had found: computed ones by then.
 */
START_TEST(what_was_appended_behind_a_partial_hit_stays_when_there_is_no_room_for_more)
{
	const struct shape *shape = &shapes[_i];
	kv_block_id ids[N_BLOCKS];
	struct kv_gseq *seq;
	const int32_t *tokens;
	uint32_t n;
	size_t hit;

	attach(&m, shape, N_BLOCKS);
	cached_by_another(shape);
	seq = new_seq(&m);
	must(kv_gseq_reserve(seq, 2 * UNIT, TIMEOUT));
	tokens = branch_of(5, UNIT + 7, 2 * UNIT);
	must(kv_gseq_lookup_partial(seq, tokens, 2 * UNIT, &hit));
	ck_assert_uint_eq(hit, UNIT + 7);
	must(kv_gseq_append(seq, tokens + hit, 2 * UNIT - hit));
	for (uint32_t g = 0; g < shape->n; g++) {
		struct kv_batch_item item = {kv_gseq_seq(seq, g), (uint32_t)(2 * UNIT - hit)};

		bytes_step(m.pools[g], m.batches[g], &item, 1);
	}
	right(&m, seq, "appended", 0);
	n = take_rest(ids);
	ck_assert_int_eq(kv_gseq_reserve(seq, 3 * UNIT, 0), KV_NO_ROOM);
	expect(kv_gseq_len(seq) == 2 * UNIT, "%d tokens were computed, %zu are left", 2 * UNIT, kv_gseq_len(seq));
	right(&m, seq, "no room", 0);
	must(kv_blocks_give(m.pools[0], n, ids));
	kv_gseq_free(seq, NULL);
	detach(&m);
}
END_TEST

/* The block that a rolled back sequence still holds for its first tokens may be what it waits for. */
START_TEST(a_partial_hit_that_was_rolled_back_is_let_go_where_there_is_no_room_for_its_copy)
{
	const struct shape *shape = &shapes[1];
	kv_block_id ids[N_BLOCKS];
	struct kv_gseq *seq;
	uint32_t n;

	attach(&m, shape, N_BLOCKS);
	cached_by_another(shape);
	seq = partly_found(UNIT + 7, 2 * UNIT, UNIT + 7);
	/* Room for less than it has changes nothing. */
	must(kv_gseq_reserve(seq, UNIT, 0));
	must(kv_gseq_rollback(seq, UNIT + 5, NULL));
	n = take_rest(ids);
	ck_assert_uint_eq(compute(&m, seq, branch_of(5, UNIT + 5, 2 * UNIT), 2 * UNIT), 0);
	right(&m, seq, "with whole units", 0);
	must(kv_blocks_give(m.pools[0], n, ids));
	kv_gseq_free(seq, NULL);
	detach(&m);
}
END_TEST

/*
 * Where what the first group found ended with one of its blocks the others were not asked, and had tokens all the same:
 * without blocks, or with blocks of whatever was there before.
 */
START_TEST(prompts_of_every_length_are_found_in_all_groups)
{
	const struct shape *shape = &shapes[_i];

	attach(&m, shape, N_BLOCKS);
	cached_by_another(shape);
	for (size_t n = 1; n <= 4 * UNIT; n++) {
		struct kv_gseq *seq, *other = new_seq(&m);
		size_t expected = n - 1, hit;

		/* Its memory serves the next sequence, with what stands there. */
		compute(&m, other, branch_of(2 + (int32_t)n, 0, 4 * UNIT), 4 * UNIT);
		kv_gseq_free(other, NULL);
		seq = new_seq(&m);
		for (uint32_t g = 0; g < shape->n; g++)
			expected = reach(shape, g, expected);
		must(kv_gseq_lookup_partial(seq, tokens_of(1, n), n, &hit));
		expect(hit == expected, "prompt of %zu tokens: %zu found, %zu are there", n, hit, expected);
		for (uint32_t g = 0; g < shape->n; g++) {
			const struct kv_seq *part = kv_gseq_seq(seq, g);
			const kv_block_id *ids;

			ck_assert_uint_eq(kv_seq_len(part), hit);
			expect(kv_seq_blocks(part, &ids) * shape->block_tokens[g] >= hit, "group %u has no blocks", g);
			expect(!hit || !memcmp(kv_seq_tokens(part), tokens_of(1, n), hit * sizeof(int32_t)),
			       "prompt of %zu tokens: group %u has others", n, g);
			sees_its_window(&m, seq, g);
		}
		compute(&m, seq, tokens_of(1, n), n);
		right(&m, seq, "computed", (int)n);
		kv_gseq_free(seq, NULL);
	}
	detach(&m);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/group_partial");
	TCase *tcase = tcase_create("group_partial");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_loop_test(tcase, as_many_tokens_are_found_as_all_groups_have, 0, N_SHAPES);
	tcase_add_loop_test(tcase, prompts_of_every_length_are_found_in_all_groups, 0, N_SHAPES);
	tcase_add_test(tcase, what_one_group_lacks_no_group_has);
	tcase_add_test(tcase, where_one_group_has_no_room_for_its_copy_all_are_back_at_whole_units);
	tcase_add_test(tcase, forks_and_rollbacks_of_a_partial_hit_are_right_in_all_groups);
	tcase_add_test(tcase, what_is_said_of_a_prompt_stays_when_one_group_has_less_of_it);
	tcase_add_loop_test(tcase, what_was_appended_behind_a_partial_hit_stays_when_there_is_no_room_for_more, 0, 2);
	tcase_add_test(tcase, a_partial_hit_that_was_rolled_back_is_let_go_where_there_is_no_room_for_its_copy);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
