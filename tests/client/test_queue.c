/* SPDX-License-Identifier: Apache-2.0 */
/* Requests that wait for room: in which order they are served, and what whoever waits can do to others. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/client.h"
#include "tests/support/raw_session.h"

#define MIB	 ((uint64_t)1 << 20)
#define EXTENT	 (2 * MIB / BLOCK_BYTES) /* blocks */
#define LONG	 (600 * KV_SEC)
#define N_BLOCKS 100

static struct kv_client *client;
static int32_t ids[64 * EXTENT];

static void setup(void)
{
	daemon_start("--host", "28M");
	client = client_new();
}

static void teardown(void)
{
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

static uint64_t bytes_of(uint32_t n_blocks)
{
	return (n_blocks + 1) * (uint64_t)BLOCK_BYTES;
}

/* A lease that is answered at once, and whose blocks are in use from then on. */
static void take(struct raw_session *s, uint32_t n)
{
	uint32_t n_leased;

	raw_lease(s, n, 0);
	ck_assert_int_eq(raw_leased(s, &n_leased), 0);
	ck_assert_uint_eq(n_leased, n);
	ck_assert_uint_eq(raw_take(s, ids, sizeof(ids) / sizeof(ids[0])), n);
}

static void give(struct raw_session *s, const int32_t *which, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		raw_op(s, &(struct kv_op){.kind = KV_OP_GIVE, .id = which[i]});
	raw_kick(s);
}

/* All of the blocks that lie in one extent with the last of @n. Return: how many are left. */
static uint32_t give_extent(struct raw_session *s, uint32_t n)
{
	int32_t last = ids[n - 1] / (int32_t)EXTENT;
	uint32_t first = n;

	while (first && ids[first - 1] / (int32_t)EXTENT == last)
		first--;
	give(s, ids + first, n - first);
	return first;
}

static bool waits(uint64_t n)
{
	uint64_t sum = 0;
	void *items;
	size_t n_pools;

	must(kv_stats(client, KV_STAT_POOL, &items, &n_pools, TIMEOUT));
	for (size_t i = 0; i < n_pools; i++)
		sum += ((struct kv_pool_stats *)items)[i].waiting;
	free(items);
	return sum == n;
}

START_TEST(a_waiting_session_that_is_hung_up_on_for_its_idle_leases_takes_no_other_along)
{
	struct raw_session honest = raw_session("pool", bytes_of(N_BLOCKS));
	struct raw_session liar = raw_session("pool", bytes_of(N_BLOCKS));
	int32_t *stack = (int32_t *)((char *)liar.shm + liar.shm->stack_offset);

	take(&liar, N_BLOCKS / 2);
	take(&honest, N_BLOCKS / 2);
	raw_lease(&honest, 10, LONG);
	wait_until(waits(1));
	/* Behind it in the queue, with an idle lease that it doesn't have: found out while the other is served. */
	raw_lease(&liar, 10, LONG);
	wait_until(waits(2));
	stack[0] = ids[0];
	kv_store_release(&liar.shm->n_stack, 1);
	wait_until(pool_stats(client, "pool").blocks_quarantined == N_BLOCKS / 2);
	wait_until(waits(1));
	ck_assert_ptr_null(raw_receive(liar.fd, NULL));
	/* The other one is served as soon as there is room. */
	give(&honest, ids, 10);
	ck_assert_int_eq(raw_leased(&honest, NULL), 0);
	raw_session_end(&liar);
	raw_session_close(&honest);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_quarantined, N_BLOCKS / 2);
}
END_TEST

START_TEST(a_client_that_gave_up_a_lease_while_the_daemon_stood_still_asks_again)
{
	struct raw_session owner = raw_session("pool", bytes_of(N_BLOCKS));
	struct raw_session other = raw_session("pool", bytes_of(N_BLOCKS));
	struct kv_msg_lease want = {.n = 5};

	take(&owner, N_BLOCKS);
	raw_lease(&other, 10, LONG);
	wait_until(waits(1));
	/* Its call has ended by its own deadline; the daemon hasn't noticed. */
	ck_assert_int_eq(raw_send(other.fd, KV_MSG_WANT, (char *)&want + sizeof(want.head),
				  sizeof(want) - sizeof(want.head)), 0);
	raw_lease(&other, 20, LONG);
	ck_assert_int_eq(raw_leased(&other, NULL), KV_NO_ROOM); /* of the first */
	wait_until(waits(1));
	ck_assert(!raw_is_answered(&other, 0));
	raw_session_close(&owner);
	ck_assert_int_eq(raw_leased(&other, NULL), 0);
	ck_assert_uint_ge(pool_stats(client, "pool").blocks_leased, 20);
	raw_session_close(&other);
}
END_TEST

START_TEST(more_than_a_pool_may_ever_have_is_refused_at_once_also_while_others_wait)
{
	struct raw_session owner = raw_session("pool", bytes_of(N_BLOCKS));
	struct raw_session first = raw_session("pool", bytes_of(N_BLOCKS));
	struct raw_session other = raw_session("pool", bytes_of(N_BLOCKS));

	take(&owner, N_BLOCKS);
	raw_lease(&first, 10, LONG);
	wait_until(waits(1));
	raw_lease(&other, UINT32_MAX, LONG);
	ck_assert_int_eq(raw_leased(&other, NULL), KV_TOO_LARGE);
	ck_assert(waits(1));
	raw_session_close(&owner);
	ck_assert_int_eq(raw_leased(&first, NULL), 0);
	raw_session_close(&first);
	raw_session_close(&other);
}
END_TEST

START_TEST(a_pool_whose_requests_were_not_served_in_time_keeps_its_turn)
{
	struct raw_session hoarder = raw_session("hoarder", 0), eager, other;
	uint32_t n = 12 * EXTENT - 1;

	eager = raw_session("eager", 0);
	other = raw_session("other", 0);
	take(&eager, EXTENT - 1);
	take(&other, EXTENT - 1);
	take(&hoarder, n);
	/* What it is granted stays in its ring: it is at it, and nothing is called back. */
	kv_store_release(&eager.shm->busy, 1);
	/* Five times it asks for more than there is, and gives up. */
	for (int i = 0; i < 5; i++) {
		raw_lease(&eager, 3 * EXTENT, 20 * KV_MSEC);
		ck_assert_int_eq(raw_leased(&eager, NULL), KV_NO_ROOM);
	}
	/* Now both ask for the same, it first: what comes is its own first. */
	raw_lease(&eager, EXTENT / 2, LONG);
	wait_until(waits(1));
	raw_lease(&other, EXTENT / 2, LONG);
	wait_until(waits(2));
	n = give_extent(&hoarder, n);
	ck_assert_int_eq(raw_leased(&eager, NULL), 0);
	ck_assert(!raw_is_answered(&other, 200));
	give_extent(&hoarder, n);
	ck_assert_int_eq(raw_leased(&other, NULL), 0);
	raw_session_close(&hoarder);
	raw_session_close(&eager);
	raw_session_close(&other);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/queue");
	TCase *t = tcase_create("queue");

	tcase_set_timeout(t, 60);
	tcase_add_checked_fixture(t, setup, teardown);
	tcase_add_test(t, a_waiting_session_that_is_hung_up_on_for_its_idle_leases_takes_no_other_along);
	tcase_add_test(t, a_client_that_gave_up_a_lease_while_the_daemon_stood_still_asks_again);
	tcase_add_test(t, more_than_a_pool_may_ever_have_is_refused_at_once_also_while_others_wait);
	tcase_add_test(t, a_pool_whose_requests_were_not_served_in_time_keeps_its_turn);
	suite_add_tcase(s, t);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
