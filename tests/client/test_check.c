/* SPDX-License-Identifier: Apache-2.0 */
/* The check of the books on a live daemon: what a client scribbles into shared pages is named. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "include/internal/atomic.h"
#include "include/internal/shm.h"
#include "tests/support/client.h"
#include "tests/support/process.h"

static struct kv_client *client;
static struct kv_pool *pool;

static void start(void)
{
	daemon_start("--host", "64M");
	client = client_new();
	pool = pool_new(client, "scribbled", 100);
}

static void stop(void)
{
	kv_pool_close(pool);
	kv_disconnect(client);
	daemon_stop();
}

/* This process's mapping of a memfd, as whoever scribbles in memory finds it. */
static void *mapping_of(const char *name, const char *rights)
{
	FILE *f = fopen("/proc/self/maps", "re");
	void *found = NULL;
	uintptr_t address;
	char line[512], as[8];

	ck_assert_ptr_nonnull(f);
	while (!found && fgets(line, sizeof(line), f)) {
		if (strstr(line, name) && sscanf(line, "%" SCNxPTR "-%*x %7s", &address, as) == 2 &&
		    !strncmp(as, rights, strlen(rights)))
			found = (void *)address;
	}
	fclose(f);
	expect(found, "no mapping of %s with %s", name, rights);
	return found;
}

static struct kv_shm_block *descriptors(void)
{
	return kv_shm_descriptors(mapping_of("memfd:kvcached-blocks", "rw"),
				  mapping_of("memfd:kvcached-index", "r"));
}

/* What a command of kvctl prints. Return: its exit status. */
static int run_kvctl(const char *what, char *text, size_t size)
{
	char command[512];
	size_t n;
	FILE *f;
	int status;

	snprintf(command, sizeof(command), "%s -s %s -t 20 %s", getenv("KVCTL_BIN"), daemon_socket(), what);
	f = popen(command, "re");
	ck_assert_ptr_nonnull(f);
	n = fread(text, 1, size - 1, f);
	text[n] = 0;
	status = pclose(f);
	ck_assert(WIFEXITED(status));
	return WEXITSTATUS(status);
}

/* D40. Under load, with faults: tests/integration/soak.c. */
START_TEST(books_of_a_pool_in_use_add_up_in_pages_and_books_alike)
{
	struct kv_seq *seq = seq_published(client, pool, 1, 5 * BLOCK_TOKENS);
	struct kv_balance_stats *pools;
	struct kv_error_stats *errors;
	char text[4096];
	size_t n;

	must(kv_stats(client, KV_STAT_BALANCE, (void **)&pools, &n, TIMEOUT));
	ck_assert_uint_eq(n, 1);
	ck_assert_str_eq(pools->name, "scribbled");
	ck_assert_uint_gt(pools->blocks_total, 0);
	ck_assert_uint_ge(pools->blocks_cached, 4);
	ck_assert_uint_eq(pools->blocks_free + pools->blocks_leased + pools->blocks_cached +
			  pools->blocks_quarantined + pools->blocks_moving, pools->blocks_total);
	ck_assert_uint_eq(pools->pages_free, pools->blocks_free);
	ck_assert_uint_eq(pools->pages_leased, pools->blocks_leased);
	ck_assert_uint_eq(pools->pages_cached, pools->blocks_cached);
	ck_assert_uint_eq(pools->n_errors, 0);
	free(pools);
	must(kv_stats(client, KV_STAT_ERROR, (void **)&errors, &n, TIMEOUT));
	ck_assert_uint_eq(n, 0);
	free(errors);
	ck_assert_int_eq(run_kvctl("check", text, sizeof(text)), 0);
	expect(strstr(text, "books balance"), "%s", text);
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(a_block_whose_words_were_scribbled_is_named_with_both_opinions)
{
	struct kv_seq *seq = seq_published(client, pool, 1, 5 * BLOCK_TOKENS);
	struct kv_shm_block *d = descriptors();
	struct kv_check_result result;
	struct kv_error_stats *errors;
	char text[8192], wanted[256];
	uint64_t word = 0;
	int32_t id = -1;
	size_t n;

	for (int32_t i = 0; id < 0; i++)
		if (kv_block_state(kv_load_relaxed(&d[i].word)) == KV_BLOCK_CACHED)
			id = i;
	word = kv_load_relaxed(&d[id].word);
	kv_store_relaxed(&d[id].word, kv_block_word(4711, 9, KV_BLOCK_LEASED));

	must(kv_check(client, &result, TIMEOUT));
	ck_assert_uint_eq(result.n_errors, 1);
	must(kv_stats(client, KV_STAT_ERROR, (void **)&errors, &n, TIMEOUT));
	ck_assert_uint_eq(n, 1);
	ck_assert_str_eq(errors->pool, "scribbled");
	ck_assert_uint_eq(errors->is_block, 1);
	ck_assert_uint_eq(errors->block, (uint64_t)id);
	ck_assert_str_eq(errors->pages_state, "leased");
	ck_assert_uint_eq(errors->pages_slot, 9);
	ck_assert_uint_eq(errors->pages_generation, 4711);
	ck_assert_str_eq(errors->books_state, "cached");
	ck_assert_uint_eq(errors->books_generation, kv_block_generation(word));
	free(errors);

	ck_assert_int_eq(run_kvctl("check", text, sizeof(text)), 1);
	snprintf(wanted, sizeof(wanted), "block %d: pages say leased, slot 9, generation 4711; books say cached,", id);
	expect(strstr(text, wanted), "'%s' is not in: %s", wanted, text);
	expect(strstr(text, "1 error, the first: pool 'scribbled'"), "%s", text);

	kv_store_relaxed(&d[id].word, word);
	books_balance(client);
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(a_holder_that_is_no_session_is_named)
{
	struct kv_seq *seq = seq_published(client, pool, 1, 2 * BLOCK_TOKENS);
	struct kv_shm_block *d = descriptors();
	struct kv_error_stats *errors;
	uint64_t bit = (uint64_t)1 << 63;
	int32_t id = 0;
	size_t n;

	while (kv_block_state(kv_load_relaxed(&d[id].word)) != KV_BLOCK_CACHED)
		id++;
	__atomic_fetch_or(&d[id].holders[1], bit, __ATOMIC_SEQ_CST);
	must(kv_stats(client, KV_STAT_ERROR, (void **)&errors, &n, TIMEOUT));
	ck_assert_uint_eq(n, 1);
	ck_assert_uint_eq(errors->block, (uint64_t)id);
	expect(strstr(errors->text, "held by slot 127, where no session is"), "%s", errors->text);
	free(errors);
	__atomic_fetch_and(&d[id].holders[1], ~bit, __ATOMIC_SEQ_CST);
	books_balance(client);
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(more_errors_than_fit_one_answer_are_all_listed_up_to_a_thousand)
{
	struct kv_pool *large = pool_new(client, "large", 3000);
	struct kv_error_stats *errors;
	struct kv_shm_block *d;
	struct kv_check_result result;
	kv_block_id *ids = calloc(2000, sizeof(*ids));
	size_t n;

	ck_assert_ptr_nonnull(ids);
	kv_pool_close(pool); /* one mapping of each kind is left */
	must(kv_pool_drop(client, "scribbled", TIMEOUT));
	must(kv_blocks_take(large, 2000, ids, TIMEOUT));
	must(kv_ping(client, TIMEOUT));
	d = descriptors();
	for (int i = 0; i < 1500; i++)
		__atomic_fetch_xor(&d[ids[i]].word, UINT64_C(1) << 40, __ATOMIC_SEQ_CST);
	must(kv_check(client, &result, TIMEOUT));
	ck_assert_uint_eq(result.n_errors, 1500);
	must(kv_stats(client, KV_STAT_ERROR, (void **)&errors, &n, TIMEOUT));
	ck_assert_uint_ge(n, KV_CHECK_ERRORS);
	for (size_t i = 1; i < n; i++)
		expect(errors[i].block > errors[i - 1].block, "error %zu: block %" PRIu64 " again", i,
		       errors[i].block);
	free(errors);
	for (int i = 0; i < 1500; i++)
		__atomic_fetch_xor(&d[ids[i]].word, UINT64_C(1) << 40, __ATOMIC_SEQ_CST);
	must(kv_blocks_give(large, 2000, ids));
	must(kv_ping(client, TIMEOUT));
	books_balance(client);
	kv_pool_close(large);
	pool = NULL;
	free(ids);
}
END_TEST

static void loses_its_connection(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *mine = pool_new(own, "scribbled", 0);
	kv_block_id ids[8];

	(void)arg;
	must(kv_blocks_take(mine, 8, ids, TIMEOUT));
	cut_connections();
	process_say(self, 0);
	process_wait(self);
}

START_TEST(who_keeps_blocks_in_quarantine_is_said_and_its_end_releases_them)
{
	struct process *other = process_start(loses_its_connection, NULL);
	char text[4096], line[80];

	process_hear(other);
	wait_until(pool_stats(client, "scribbled").blocks_quarantined >= 8);
	ck_assert_int_eq(run_kvctl("stats", text, sizeof(text)), 0);
	snprintf(line, sizeof(line), "free when the processes end: %d\n", other->pid);
	expect(strstr(text, line) && strstr(text, "in quarantine"), "kvctl stats says '%s'", text);
	process_kill(other);
	wait_until(!pool_stats(client, "scribbled").blocks_quarantined);
	ck_assert_int_eq(run_kvctl("stats", text, sizeof(text)), 0);
	expect(!strstr(text, "quarantine"), "kvctl stats says '%s'", text);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("client/check");
	TCase *check = tcase_create("check");

	tcase_add_checked_fixture(check, start, stop);
	tcase_set_timeout(check, 60);
	tcase_add_test(check, books_of_a_pool_in_use_add_up_in_pages_and_books_alike);
	tcase_add_test(check, a_block_whose_words_were_scribbled_is_named_with_both_opinions);
	tcase_add_test(check, a_holder_that_is_no_session_is_named);
	tcase_add_test(check, who_keeps_blocks_in_quarantine_is_said_and_its_end_releases_them);
	tcase_add_test(check, more_errors_than_fit_one_answer_are_all_listed_up_to_a_thousand);
	suite_add_tcase(suite, check);
	return daemon_run_tests(suite);
}
