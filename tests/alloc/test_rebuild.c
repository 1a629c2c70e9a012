/* SPDX-License-Identifier: Apache-2.0 */
/*
 * alloc/pool_rebuild.c: the owner of the books is killed with SIGKILL at any instruction, and another one
 * goes on with what it left. And what it does with memory that no owner would leave.
 */
#include <check.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "alloc/pool.h"
#include "tests/alloc/random.h"
#include "tests/support/expect.h"

#define N_BLOCKS     600
#define ID_LIMIT     (N_BLOCKS + 1)
#define BLOCK_TOKENS 4
#define N_SLOTS	     3
#define KILLS	     400

/* All of it is shared with the owners, which are other processes. */
static struct world {
	struct kv_shm_pool head;
	uint64_t granted[KV_MAX_SESSIONS];
	uint64_t n_steps;
	struct random random;
} *world;
static uint64_t *index_words;
static void *shared, *saved;
static struct kv_books books;

static void *pages(uint64_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	ck_assert_ptr_ne(p, MAP_FAILED);
	return p;
}

static void setup(void)
{
	const uint64_t descriptors = 4096;
	const uint64_t tokens = descriptors + ID_LIMIT * sizeof(struct kv_shm_block);

	world = pages(sizeof(*world));
	world->head = (struct kv_shm_pool){.seed = 99,
					   .key_mask = UINT64_MAX,
					   .block_tokens = BLOCK_TOKENS,
					   .id_limit = ID_LIMIT,
					   .n_buckets = kv_prefix_buckets(ID_LIMIT),
					   .n_stem_buckets = kv_stem_buckets(ID_LIMIT, BLOCK_TOKENS),
					   .descriptors_offset = descriptors,
					   .tokens_offset = tokens};
	index_words = pages((world->head.n_buckets + world->head.n_stem_buckets) * KV_BUCKET_WORDS *
			    sizeof(uint64_t));
	shared = pages(tokens + (uint64_t)ID_LIMIT * BLOCK_TOKENS * 4 + (1 << 20));
	((struct kv_shm_blocks *)shared)->clock = 1;
	saved = pages(kv_books_saved_bytes(ID_LIMIT));
	world->random.state = 7;
	ck_assert_int_eq(kv_books_init_in(&books, &world->head, index_words, shared, saved), 0);
	for (int32_t id = 0; id < ID_LIMIT; id++)
		ck_assert_int_eq(kv_books_add(&books, id), 0);
}

static void teardown(void)
{
	kv_books_deinit(&books);
}

/* ---- an owner at work ---- */

/* Some block of a state, from a random place on; -1: none. */
static int32_t any(struct kv_books *b, struct random *r, uint8_t state)
{
	uint32_t start = random_below(r, ID_LIMIT);

	for (uint32_t i = 0; i < ID_LIMIT; i++) {
		int32_t id = (int32_t)((start + i) % ID_LIMIT);

		if (b->books[id].state == state)
			return id;
	}
	return -1;
}

static void grant(struct kv_books *b, struct random *r)
{
	uint32_t slot = random_below(r, N_SLOTS), n = random_below(r, 8);

	n = n < b->n_free ? n : b->n_free;
	for (uint32_t i = 0; i < n; i++)
		kv_books_grant_one(b, slot, world->granted[slot] + i);
	kv_store_release(&world->granted[slot], world->granted[slot] + n);
}

static void publish(struct kv_books *b, struct random *r)
{
	int32_t id = any(b, r, KV_BLOCK_LEASED);
	struct kv_op op = {.kind = KV_OP_PUBLISH, .id = id, .parent = -1, .stamp = 1};
	int32_t *tokens;

	if (id < 0)
		return;
	if (random_below(r, 4))
		op.parent = any(b, r, KV_BLOCK_CACHED);
	tokens = kv_shm_tokens(shared, &world->head, id);
	for (int i = 0; i < BLOCK_TOKENS; i++)
		tokens[i] = (int32_t)random_below(r, 3); /* there are twins */
	op.key_lo = (uint64_t)(tokens[0] + 3 * tokens[1]) << 8 | (uint64_t)(op.parent + 1) << 20;
	op.key_hi = (uint64_t)tokens[2] << 33 | (uint64_t)tokens[3];
	if (op.parent >= 0)
		op.parent_serial = b->books[op.parent].serial;
	expect(kv_books_publish(b, b->books[id].owner, &op) >= 0, "publish");
}

static void let_go(struct kv_books *b, struct random *r)
{
	int32_t id = any(b, r, KV_BLOCK_CACHED);

	if (id >= 0)
		memset(b->descriptors[id].holders, 0, sizeof(b->descriptors[id].holders));
}

static void give(struct kv_books *b, struct random *r)
{
	int32_t id = any(b, r, random_below(r, 2) ? KV_BLOCK_LEASED : KV_BLOCK_TWIN);

	if (id >= 0)
		expect(!kv_books_give(b, b->books[id].owner, id), "give %d", id);
}

static void work(void)
{
	static void (*const steps[])(struct kv_books * b, struct random * r) = {grant, publish, publish,
									      let_go, let_go, give};

	for (;;) {
		steps[random_below(&world->random, 6)](&books, &world->random);
		if (!random_below(&world->random, 8))
			kv_books_evict(&books, random_below(&world->random, 20), random_below(&world->random, 2));
		world->n_steps++;
	}
}

/* ---- its death ---- */

static void rebuild(struct kv_books_found *found)
{
	char text[200] = "";
	uint64_t n;

	for (uint32_t i = 0; i < N_SLOTS; i++) {
		found->live[i] = true;
		found->granted[i] = world->granted[i];
	}
	kv_books_deinit(&books);
	ck_assert_int_eq(kv_books_init_in(&books, &world->head, index_words, shared, saved), 0);
	ck_assert_int_eq(kv_books_rebuild(&books, found), 0);
	n = kv_books_check(&books, found->live, text, sizeof(text));
	expect(!n, "after step %llu: %llu errors, the first: %s", (unsigned long long)world->n_steps,
	       (unsigned long long)n, text);
	ck_assert_uint_eq(books.n_total, N_BLOCKS);
}

static void kill_one_after(uint32_t us)
{
	struct timespec pause = {.tv_nsec = us * 1000};
	uint64_t before = world->n_steps;
	pid_t owner = fork();

	ck_assert_int_ge(owner, 0);
	if (!owner)
		work();
	while (kv_load_relaxed(&world->n_steps) == before)
		usleep(50);
	nanosleep(&pause, NULL);
	kill(owner, SIGKILL);
	ck_assert_int_eq(waitpid(owner, NULL, 0), owner);
}

START_TEST(an_owner_that_dies_at_any_instruction_leaves_books_that_balance)
{
	struct random r = {3};
	uint64_t n_unposted = 0, n_mirrored = 0;

	for (int i = 0; i < KILLS; i++) {
		struct kv_books_found found = {0};
		uint64_t serial = books.next_serial;

		kill_one_after(random_below(&r, 300));
		rebuild(&found);
		n_unposted += found.n_unposted;
		n_mirrored += found.n_mirrored;
		/* Nothing is in doubt, and at most the blocks in hand said something else. */
		ck_assert_uint_eq(found.n_dropped, 0);
		ck_assert_uint_le(found.n_index, 1);
		ck_assert_uint_ge(books.next_serial, serial);
		for (int32_t id = 0; id < ID_LIMIT; id++) {
			const struct kv_book *book = &books.books[id];

			expect(book->state != KV_BLOCK_CACHED || book->serial < books.next_serial,
			       "block %d: a serial may be given out twice", id);
		}
	}
	expect(world->n_steps > 10000, "%llu steps", (unsigned long long)world->n_steps);
	expect(n_unposted, "no owner died between granting and posting");
	expect(n_mirrored, "no owner died in the middle of a change");
}
END_TEST

START_TEST(what_an_ended_session_leased_is_free_after_a_rebuild)
{
	struct kv_books_found found = {.live = {true, false, true}};
	int32_t id = kv_books_grant_one(&books, 1, 0);
	int32_t kept = kv_books_grant_one(&books, 2, 0);
	int32_t unposted = kv_books_grant_one(&books, 2, 1);

	found.granted[2] = 1;
	kv_books_deinit(&books);
	ck_assert_int_eq(kv_books_init_in(&books, &world->head, index_words, shared, saved), 0);
	ck_assert_int_eq(kv_books_rebuild(&books, &found), 0);
	ck_assert(kv_books_is_free(&books, id));
	ck_assert(kv_books_is_free(&books, unposted));
	ck_assert_uint_eq(books.books[kept].state, KV_BLOCK_LEASED);
	ck_assert_uint_eq(books.n_leased, 1);
	ck_assert_uint_eq(found.n_unposted, 2);
}
END_TEST

/* A chain of three, all held by slot 0. */
static void make_chain(int32_t ids[3])
{
	for (int i = 0; i < 3; i++) {
		struct kv_op op = {.kind = KV_OP_PUBLISH,
				   .parent = i ? ids[i - 1] : -1,
				   .key_lo = 100 + (uint64_t)i,
				   .key_hi = (uint64_t)i << 32};

		op.id = ids[i] = kv_books_grant_one(&books, 0, world->granted[0]++);
		ck_assert_int_eq(kv_books_publish(&books, 0, &op), KV_PUBLISHED);
	}
}

START_TEST(descriptors_and_index_that_were_scribbled_on_are_put_right)
{
	struct kv_books_found found = {0};
	int32_t ids[3];
	uint32_t cursor = 0;

	make_chain(ids);
	books.descriptors[ids[0]].word = 12345;
	books.descriptors[ids[1]].serial = 1 << 20;
	books.descriptors[ids[2]].key_hi = 0;
	index_words[3] = 77;
	index_words[11] = 78;
	rebuild(&found);
	ck_assert_uint_eq(found.n_mirrored, 3);
	for (uint32_t i = 0; i < 3; i++) {
		struct kv_key key = {100 + i, (uint64_t)i << 32};

		cursor = 0;
		ck_assert_int_eq(kv_prefix_find(&books.prefix, key, &cursor), ids[i]);
	}
}
END_TEST

START_TEST(cached_blocks_without_a_parent_go_or_are_kept_out_of_reach_while_held)
{
	struct kv_books_found found = {0};
	int32_t ids[3];

	make_chain(ids);
	memset(books.descriptors[ids[2]].holders, 0, sizeof(books.descriptors[ids[2]].holders));
	books.books[ids[1]].parent_serial += 1000; /* ids[1] is held, ids[2] follows it */
	books.books[ids[2]].parent = ids[0];
	rebuild(&found);
	ck_assert_uint_eq(found.n_dropped, 2);
	ck_assert_uint_eq(books.books[ids[0]].state, KV_BLOCK_CACHED);
	ck_assert_uint_eq(books.books[ids[1]].state, KV_BLOCK_CACHED);
	ck_assert_int_eq(books.books[ids[1]].parent, -1);
	ck_assert_uint_ne(books.descriptors[ids[1]].parent_serial, 0);
	ck_assert(kv_books_is_free(&books, ids[2]));
	/* Once it is let go it can be evicted like any other. */
	memset(books.descriptors[ids[1]].holders, 0, sizeof(books.descriptors[ids[1]].holders));
	ck_assert_uint_eq(kv_books_evict(&books, 1, false), 1);
}
END_TEST

START_TEST(other_memory_is_no_books)
{
	struct kv_books_found found = {0};

	books.saved->magic++;
	ck_assert_int_lt(kv_books_rebuild(&books, &found), 0);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("alloc/rebuild");
	TCase *tcase = tcase_create("rebuild");
	SRunner *runner;
	int n_failed;

	tcase_set_timeout(tcase, 120);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, an_owner_that_dies_at_any_instruction_leaves_books_that_balance);
	tcase_add_test(tcase, what_an_ended_session_leased_is_free_after_a_rebuild);
	tcase_add_test(tcase, descriptors_and_index_that_were_scribbled_on_are_put_right);
	tcase_add_test(tcase, cached_blocks_without_a_parent_go_or_are_kept_out_of_reach_while_held);
	tcase_add_test(tcase, other_memory_is_no_books);
	suite_add_tcase(s, tcase);
	runner = srunner_create(s);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
