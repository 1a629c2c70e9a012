/* SPDX-License-Identifier: Apache-2.0 */
/* How much of the worker's time one client can take, whatever it asks for. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/client.h"
#include "tests/support/raw_session.h"

#define N_BLOCKS 30000

static struct kv_client *client;
static int32_t ids[N_BLOCKS];

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

/* CPU time that the worker has had, in ns. */
static int64_t worker_time(void)
{
	unsigned long user, system;
	char path[64], text[1024], *p;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/stat", daemon_worker());
	f = fopen(path, "r");
	ck_assert_ptr_nonnull(f);
	ck_assert_ptr_nonnull(fgets(text, sizeof(text), f));
	fclose(f);
	/* Behind the name: state, ten numbers, then these two. */
	p = strrchr(text, ')');
	ck_assert_int_eq(sscanf(p, ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system), 2);
	return (int64_t)(user + system) * KV_SEC / sysconf(_SC_CLK_TCK);
}

/* A chain of all blocks there are. */
static void publish_chain(struct raw_session *s)
{
	raw_lease(s, N_BLOCKS, 0);
	ck_assert_int_eq(raw_leased(s, NULL), 0);
	ck_assert_uint_eq(raw_take(s, ids, N_BLOCKS), N_BLOCKS);
	for (uint32_t i = 0; i < N_BLOCKS; i++) {
		raw_op(s, &(struct kv_op){.kind = KV_OP_PUBLISH,
					  .id = ids[i],
					  .parent = i ? ids[i - 1] : -1,
					  .key_lo = i * 0x9e3779b97f4a7c15ull,
					  .key_hi = i * 0xc2b2ae3d27d4eb4full});
		if (i % 4000 == 3999)
			raw_ping(s);
	}
	raw_ping(s);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached, N_BLOCKS);
}

START_TEST(a_ring_full_of_touches_of_a_long_chain_is_done_in_a_moment)
{
	struct raw_session s = raw_session("pool", 0);
	int64_t start;

	publish_chain(&s);
	start = worker_time();
	for (int k = 0; k < 4000; k++)
		raw_op(&s, &(struct kv_op){.kind = KV_OP_TOUCH, .id = ids[N_BLOCKS - 1], .parent = INT_MAX});
	raw_ping(&s);
	expect(worker_time() - start < KV_SEC / 4, "it took %lld ms of the worker",
	       (long long)((worker_time() - start) / KV_MSEC));
	raw_session_close(&s);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/work");
	TCase *t = tcase_create("work");

	tcase_set_timeout(t, 60);
	tcase_add_checked_fixture(t, setup, teardown);
	tcase_add_test(t, a_ring_full_of_touches_of_a_long_chain_is_done_in_a_moment);
	suite_add_tcase(s, t);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
