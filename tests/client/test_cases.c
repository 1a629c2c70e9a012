/* SPDX-License-Identifier: Apache-2.0 */
/* Field cases with the numbers they were told with: D15, D18, D20, D23, D34 and D40 (tests/cases.md). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "include/internal/atomic.h"
#include "include/internal/shm.h"
#include "tests/client/hybrid.h"
#include "tests/support/process.h"
#include "tests/support/raw.h"

static struct kv_pool *of_tokens(struct kv_client *client, uint32_t block_tokens, uint32_t n_blocks)
{
	struct kv_component k = {.role = KV_ROLE_K, .dtype = KV_F32, .n_heads = 1, .head_dim = 16, .scale = 1};
	struct kv_layout layout = {.kind = KV_LAYOUT_FLAT, .block_tokens = block_tokens, .n_components = 1,
				   .components = &k};
	KV_OPTIONS(kv_pool_options, what, .name = "pool", .layout = &layout,
		   .max_bytes = (uint64_t)(n_blocks + 1) * block_tokens * 64, .timeout = TIMEOUT);
	struct kv_pool *pool;

	must(kv_pool_open(client, &what, &pool));
	return pool;
}

/* ---- D15 ---- */

/* Finds a prefix, with a row of state, and dies before it asks for room. */
static void finds_and_waits(struct process *self, void *arg)
{
	const int32_t *tokens = tokens_of(1, 80);
	static struct model own;
	struct kv_gseq *seq;
	size_t hit;

	(void)arg;
	model_open(&own, 40, 64, 0);
	must(kv_gseq_new(own.groups, &seq));
	must(kv_gseq_lookup(seq, tokens, 80, &hit));
	process_say(self, (int64_t)hit);
	process_wait(self);
}

START_TEST(d15_a_client_that_dies_between_finding_and_asking_for_room_leaves_nothing_behind)
{
	const int32_t *tokens = tokens_of(1, 80);
	struct kv_pool_stats before[3], now;
	static struct model m;
	struct kv_gseq *seq;

	daemon_start("--host", "32M");
	model_open(&m, 40, 64, 0);
	must(kv_gseq_new(m.groups, &seq));
	must(kv_gseq_reserve(seq, 24, TIMEOUT));
	must(kv_gseq_append(seq, tokens, 24));
	must(kv_gseq_publish(seq, NULL));
	must(kv_ping(m.client, TIMEOUT));
	must(kv_gseq_publish(seq, NULL));
	for (int g = 0; g < 3; g++)
		before[g] = pool_stats(m.client, model_names[g]);
	for (int i = 0; i < 20; i++) {
		struct process *other = process_start(finds_and_waits, NULL);

		ck_assert_int_eq(process_hear(other), 24);
		process_kill(other);
	}
	for (int g = 0; g < 3; g++) {
		wait_until(pool_stats(m.client, model_names[g]).n_sessions == 1);
		wait_until(!pool_stats(m.client, model_names[g]).blocks_quarantined);
		now = pool_stats(m.client, model_names[g]);
		ck_assert_uint_eq(now.blocks_cached, before[g].blocks_cached);
		ck_assert_uint_eq(now.blocks_cached_held, before[g].blocks_cached_held);
		ck_assert_uint_le(now.blocks_leased, before[g].blocks_leased);
	}
	books_balance(m.client);
	kv_gseq_free(seq, NULL);
	model_close(&m);
	daemon_stop();
}
END_TEST

/* ---- D18 ---- */

#define FILLED 64 /* tokens: four blocks */

/*
 * Who fills blocks leases them, and nobody else can say anything of them; who waits for them has none
 * to give back. So it is the writer's word, or its end, that frees them, whatever others do.
 */
static void fills_for_another(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool = pool_new(own, "pool", 15);
	size_t promised;
	struct kv_seq *seq;

	(void)arg;
	must(kv_seq_new(pool, &seq));
	must(kv_seq_promise(seq, tokens_of(1, FILLED + 1), FILLED + 1, 60 * KV_SEC, &promised));
	must(kv_seq_reserve(seq, FILLED, 0));
	process_say(self, (int64_t)promised);
	process_wait(self);
	must(kv_seq_append(seq, tokens_of(1, FILLED), FILLED));
	must(kv_seq_publish(seq, NULL));
	must(kv_ping(own, TIMEOUT));
	process_say(self, 0);
	process_wait(self);
	kv_seq_free(seq, NULL);
	must(kv_ping(own, TIMEOUT));
	process_say(self, 0);
	process_wait(self);
	kv_pool_close(pool);
	kv_disconnect(own);
}

/* Return: a sequence that waits for the writer's blocks. */
static struct kv_seq *attached(struct kv_pool *pool)
{
	struct kv_seq *seq;
	size_t hit;

	must(kv_seq_new(pool, &seq));
	ck_assert_int_eq(kv_seq_follow(seq, tokens_of(1, FILLED + 1), FILLED + 1, 0, &hit), KV_PROMISED);
	ck_assert_uint_eq(hit, 0);
	return seq;
}

static uint64_t n_to_be_had(struct kv_client *client)
{
	struct kv_pool_stats s = pool_stats(client, "pool");

	return s.blocks_free + s.blocks_cached - s.blocks_cached_held;
}

START_TEST(d18_blocks_that_another_fills_are_free_when_it_is_done_or_gone_and_not_when_who_waits_aborts)
{
	const int aborts_first = _i != 1, dies = _i == 2;
	struct process *writer;
	struct kv_client *client;
	struct kv_pool *pool;
	struct kv_seq *seq;
	size_t hit;

	daemon_start("--host", "32M");
	client = client_new();
	pool = pool_new(client, "pool", 15);
	writer = process_start(fills_for_another, NULL);
	ck_assert_int_eq(process_hear(writer), FILLED);
	seq = attached(pool);
	ck_assert_uint_eq(n_to_be_had(client), 11);
	if (aborts_first) {
		seq = kv_seq_free(seq, NULL);
		must(kv_ping(client, TIMEOUT));
		sleep_ms(500);
		ck_assert_uint_eq(n_to_be_had(client), 11); /* they may still be written */
	}
	if (dies) {
		process_kill(writer);
		wait_until(n_to_be_had(client) == 15);
		ck_assert_uint_eq(pool_stats(client, "pool").blocks_leased, 0);
	} else {
		process_go(writer);
		process_hear(writer);
		ck_assert_uint_eq(n_to_be_had(client), 11);
		if (!aborts_first) {
			must(kv_seq_follow(seq, tokens_of(1, FILLED + 1), FILLED + 1, TIMEOUT, &hit));
			ck_assert_uint_eq(hit, FILLED);
		}
		process_go(writer);
		process_hear(writer);
		/* Done: free at that moment, or when who waited has aborted. */
		ck_assert_uint_eq(n_to_be_had(client), aborts_first ? 15 : 11);
		kv_seq_free(seq, NULL);
		must(kv_ping(client, TIMEOUT));
		ck_assert_uint_eq(n_to_be_had(client), 15);
		process_go(writer);
		process_end(writer);
	}
	books_balance(client);
	kv_pool_close(pool);
	kv_disconnect(client);
	daemon_stop();
}
END_TEST

struct report {
	uint32_t kind;
	kv_block_id id;
};

/* Says of a block that isn't leased to it that it is done with it. */
static void reports(struct process *self, void *arg)
{
	const struct report *report = arg;
	struct kv_shm_session *s;
	int fd = raw_hello(), fds[3];
	struct kv_op *op;

	ck_assert_uint_eq(raw_open(fd, "pool", 0, fds)->type, KV_MSG_POOL_OPENED);
	s = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fds[2], 0);
	op = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fds[2], (off_t)s->ops_offset);
	*op = (struct kv_op){.kind = report->kind, .id = report->id, .parent = -1, .key_lo = 1};
	kv_store_release(&s->ops.head, 1);
	raw_send(fd, KV_MSG_PING, NULL, 0);
	expect(!raw_receive(fd, NULL), "it is heard about block %d, which isn't its own", report->id);
	process_say(self, 0);
}

START_TEST(d18_a_report_of_who_has_the_blocks_no_more_changes_nothing)
{
	struct kv_pool_stats before, after;
	struct kv_client *client;
	struct kv_pool *pool;
	kv_block_id ids[15];

	daemon_start("--host", "32M");
	client = client_new();
	pool = pool_new(client, "pool", 15);
	must(kv_blocks_take(pool, 15, ids, TIMEOUT));
	/* They are somebody else's, then half of them nobody's. */
	for (int round = 0; round < 2; round++) {
		before = pool_stats(client, "pool");
		for (int i = 0; i < 4; i++) {
			struct report report = {i % 2 ? KV_OP_GIVE : KV_OP_PUBLISH, ids[i / 2]};
			struct process *other = process_start(reports, &report);

			process_hear(other);
			process_end(other);
			wait_until(pool_stats(client, "pool").n_sessions == 1);
			after = pool_stats(client, "pool");
			ck_assert_uint_eq(after.blocks_leased, before.blocks_leased);
			ck_assert_uint_eq(after.blocks_free, before.blocks_free);
			ck_assert_uint_eq(after.blocks_cached, 0);
		}
		books_balance(client);
		if (!round)
			must(kv_blocks_give(pool, 7, ids));
		must(kv_ping(client, TIMEOUT));
	}
	refused(kv_blocks_give(pool, 1, ids), -EINVAL, "block");
	must(kv_blocks_give(pool, 8, ids + 7));
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_eq(n_to_be_had(client), 15);
	kv_pool_close(pool);
	kv_disconnect(client);
	daemon_stop();
}
END_TEST

/* ---- D20 ---- */

START_TEST(d20_salts_and_other_fields_of_one_text_are_not_taken_for_one_another)
{
	static const struct {
		const char *salt, *extra;
	} said[] = {{"ab", "c"}, {"a", "bc"}, {"org_1", "2345"}, {"org_12345", ""}, {"org_12345", NULL},
		    {NULL, "org_12345"}, {"", NULL}, {NULL, NULL}};
	struct kv_client *client;
	struct kv_pool *pool;

	daemon_start("--host", "32M");
	client = client_new();
	pool = pool_new(client, "pool", 0);
	for (int i = 0; i < 8; i++) {
		for (int k = 0; k < 8; k++) {
			struct kv_seq *seq;
			size_t hit;

			must(kv_seq_new(pool, &seq));
			if (said[k].salt)
				must(kv_seq_field(seq, KV_TAG_SALT, said[k].salt, strlen(said[k].salt)));
			if (said[k].extra)
				must(kv_seq_field(seq, KV_TAG_OWN, said[k].extra, strlen(said[k].extra)));
			must(kv_seq_lookup(seq, tokens_of(1, 65), 65, &hit));
			expect(hit == (k < i ? 64u : 0u), "%d finds %zu when %d are there", k, hit, i);
			if (k == i) {
				must(kv_seq_reserve(seq, 64, TIMEOUT));
				must(kv_seq_append(seq, tokens_of(1, 64), 64));
				must(kv_seq_publish(seq, NULL));
				must(kv_ping(client, TIMEOUT));
			}
			kv_seq_free(seq, NULL);
			if (k == i)
				break;
		}
	}
	kv_pool_close(pool);
	kv_disconnect(client);
	daemon_stop();
}
END_TEST

/* ---- D23 ---- */

START_TEST(d23_thirteen_blocks_of_64_are_found_not_found_and_found_again)
{
	struct kv_client *client;
	struct kv_pool *pool;
	uint64_t epoch;

	daemon_start("--host", "32M");
	client = client_new();
	pool = of_tokens(client, 64, 100);
	kv_seq_free(seq_published(client, pool, 1, 853), NULL);
	ck_assert_uint_eq(hit_of(pool, 1, 853), 832);
	must(kv_pool_new_epoch(client, "pool", &epoch, NULL, TIMEOUT));
	ck_assert_uint_eq(hit_of(pool, 1, 853), 0);
	kv_seq_free(seq_published(client, pool, 1, 853), NULL);
	ck_assert_uint_eq(hit_of(pool, 1, 853), 832);
	kv_pool_close(pool);
	kv_disconnect(client);
	daemon_stop();
}
END_TEST

/* ---- D40 ---- */

#define N_CLIENTS 64
#define N_SEQS	  4 /* of each client */
#define COMMON	  4096
#define OWN	  1536
#define N_BLOCKS  14686

static void serves_and_aborts(struct process *self, void *arg)
{
	int number = (int)(intptr_t)arg;
	struct kv_client *client = client_new();
	struct kv_pool *pool = of_tokens(client, 32, N_BLOCKS);
	int32_t *tokens = calloc(COMMON + OWN, sizeof(*tokens));

	srandom((unsigned)number);
	process_say(self, 0);
	process_wait(self);
	memcpy(tokens, tokens_of(0, COMMON), COMMON * sizeof(*tokens));
	for (int i = 0; i < N_SEQS; i++) {
		size_t n = random() % 3 ? COMMON + OWN : (size_t)(1 + random() % (COMMON + OWN)), hit;
		struct kv_seq *seq;

		for (int k = 0; k < OWN; k++)
			tokens[COMMON + k] = (number * N_SEQS + i) * 10000 + k;
		must(kv_seq_new(pool, &seq));
		must(kv_seq_lookup(seq, tokens, n, &hit));
		if (!kv_seq_reserve(seq, n, random() % 2 ? 0 : 100 * KV_MSEC)) {
			must(kv_seq_append(seq, tokens + hit, n - hit));
			if (random() % 4) /* else it is aborted */
				must(kv_seq_publish(seq, NULL));
		}
		kv_seq_free(seq, NULL);
	}
	must(kv_ping(client, TIMEOUT));
	process_say(self, 0);
	process_wait(self);
	kv_pool_close(pool);
	kv_disconnect(client);
	free(tokens);
}

static void adds_up(const struct kv_pool_stats *s)
{
	uint64_t sum = s->blocks_free + s->blocks_leased + s->blocks_cached + s->blocks_quarantined +
		       s->blocks_moving;

	expect(sum == s->blocks_total && s->blocks_total <= N_BLOCKS && s->blocks_cached_held <= s->blocks_cached,
	       "%llu blocks in all, %llu by states", (unsigned long long)s->blocks_total,
	       (unsigned long long)sum);
}

START_TEST(d40_no_look_at_the_numbers_finds_a_block_in_two_states_or_in_none)
{
	struct process *clients[N_CLIENTS];
	struct kv_client *client;
	struct kv_pool_stats s;
	struct kv_pool *pool;
	int n_polls = 0;

	daemon_start("--host", "128M");
	client = client_new();
	pool = of_tokens(client, 32, N_BLOCKS);
	for (int i = 0; i < N_CLIENTS; i++)
		clients[i] = process_start(serves_and_aborts, (void *)(intptr_t)i);
	for (int i = 0; i < N_CLIENTS; i++)
		process_hear(clients[i]);
	for (int i = 0; i < N_CLIENTS; i++)
		process_go(clients[i]);
	/* At most 256 sequences publish; 100 looks a second while they do. */
	for (int i = 0; i < 150; i++, n_polls++) {
		s = pool_stats(client, "pool");
		adds_up(&s);
		sleep_ms(10);
	}
	for (int i = 0; i < N_CLIENTS; i++)
		process_hear(clients[i]);
	for (int i = 0; i < N_CLIENTS; i++) {
		process_go(clients[i]);
		process_end(clients[i]);
	}
	must(kv_ping(client, TIMEOUT));
	wait_until(pool_stats(client, "pool").n_sessions == 1);
	wait_until(!pool_stats(client, "pool").blocks_leased);
	s = pool_stats(client, "pool");
	adds_up(&s);
	/* Nobody does anything: nothing is in use, and what is shared is there once. */
	ck_assert_uint_eq(s.blocks_quarantined, 0);
	ck_assert_uint_eq(s.blocks_cached_held, 0);
	ck_assert_uint_eq(s.blocks_free + s.blocks_cached, s.blocks_total);
	ck_assert_uint_ge(s.blocks_cached, COMMON / 32);
	ck_assert_uint_ge(hit_of(pool, 0, COMMON + 1), COMMON);
	books_balance(client);
	kv_pool_close(pool);
	kv_disconnect(client);
	daemon_stop();
}
END_TEST

/* ---- D34 ---- */

static int open_scaled(struct kv_client *client, const char *name, float k_scale, struct kv_pool **ret)
{
	struct kv_component components[2];
	struct kv_layout layout = {KV_LAYOUT_FLAT, 0, 16, 2, components};
	KV_OPTIONS(kv_pool_options, what, .name = name, .model = "8 bit", .layout = &layout,
		   .max_bytes = 1 << 20, .mapped = 1, .timeout = TIMEOUT);

	kv_layout_uniform(components, 1, 2, 64, KV_F8_E4M3, k_scale, 0.125f);
	return kv_pool_open(client, &what, ret);
}

/* What was stored with one scale is never read with another: a pool has its scales for ever. */
START_TEST(d34_another_scale_is_refused_while_blocks_are_committed)
{
	KV_OPTIONS(kv_pool_options, join, .name = "scaled", .model = "8 bit", .mapped = 1,
		   .timeout = TIMEOUT);
	struct kv_pool *pool, *other = NULL;
	struct kv_client *client;
	struct kv_view view;

	daemon_start("--host", "16M");
	client = client_new();
	refused(open_scaled(client, "scaled", 0, &pool), -EINVAL, "components[0].scale: 0");
	must(open_scaled(client, "scaled", 0.0625f, &pool));
	kv_seq_free(seq_published(client, pool, 1, 64), NULL);
	ck_assert_uint_eq(hit_of(pool, 1, 65), 64);

	refused(open_scaled(client, "scaled", 0.03125f, &other), -EEXIST, "components[0]");
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "0.0625"));
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "0.03125"));
	kv_pool_close(pool); /* the blocks stay cached, and the refusal with them */
	wait_until(pool_stats(client, "scaled").n_sessions == 0);
	refused(open_scaled(client, "scaled", 0.03125f, &other), -EEXIST, "components[0]");
	ck_assert_ptr_null(other);

	must(kv_pool_open(client, &join, &pool)); /* a reader who names no layout is given the scales */
	ck_assert_uint_eq(hit_of(pool, 1, 65), 64);
	must(kv_pool_view(pool, 0, 0, &view));
	ck_assert_float_eq(view.scale, 0.0625f);
	must(kv_pool_view(pool, 0, 1, &view));
	ck_assert_float_eq(view.scale, 0.125f);

	must(open_scaled(client, "anew", 0.03125f, &other)); /* another pool: nothing is found there */
	ck_assert_uint_eq(hit_of(other, 1, 65), 0);
	kv_pool_close(other);
	kv_pool_close(pool);
	wait_until(pool_stats(client, "scaled").n_sessions == 0);
	must(kv_pool_drop(client, "scaled", TIMEOUT));
	must(open_scaled(client, "scaled", 0.03125f, &pool)); /* the same name, and nothing of before */
	ck_assert_uint_eq(hit_of(pool, 1, 65), 0);
	must(kv_pool_view(pool, 0, 0, &view));
	ck_assert_float_eq(view.scale, 0.03125f);
	kv_pool_close(pool);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("cases");
	TCase *tcase = tcase_create("cases");

	tcase_set_timeout(tcase, 120);
	tcase_add_test(tcase, d15_a_client_that_dies_between_finding_and_asking_for_room_leaves_nothing_behind);
	tcase_add_loop_test(tcase, d18_blocks_that_another_fills_are_free_when_it_is_done_or_gone_and_not_when_who_waits_aborts,
			    0, 3);
	tcase_add_test(tcase, d18_a_report_of_who_has_the_blocks_no_more_changes_nothing);
	tcase_add_test(tcase, d20_salts_and_other_fields_of_one_text_are_not_taken_for_one_another);
	tcase_add_test(tcase, d23_thirteen_blocks_of_64_are_found_not_found_and_found_again);
	tcase_add_test(tcase, d34_another_scale_is_refused_while_blocks_are_committed);
	tcase_add_test(tcase, d40_no_look_at_the_numbers_finds_a_block_in_two_states_or_in_none);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
