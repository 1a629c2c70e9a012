/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One user of the machine floods the daemon from many connections with what costs it most: another user's
 * leases come nearly as soon as in the quiet. Both are processes of their own users.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "include/internal/ring.h"
#include "tests/support/client.h"
#include "tests/support/process.h"
#include "tests/support/raw_session.h"

#define FLOODER 3001
#define OTHER	3002
#define MIB	((uint64_t)1 << 20)
#define N_CONNECTIONS 24
#define N_RINGS	      100
#define N_BLOCKS      150000u /* that the flooder has cached: a check of them is some 20 ms of work */
#define CHAIN	      1000u
#define N_SAMPLES     300
#define MEASURE	      (4 * KV_SEC)

/* What a flood is of. */
static const struct flood {
	const char *name;
	uint16_t type;
	uint32_t kind; /* STATS: enum kv_stat_kind */
	bool leases, rings;
} floods[] = {
	{"CHECK", KV_MSG_CHECK, 0, false},
	{"STATS of pools", KV_MSG_STATS, KV_STAT_POOL, false},
	{"STATS of sessions", KV_MSG_STATS, KV_STAT_SESSION, false},
	{"STATS of balances", KV_MSG_STATS, KV_STAT_BALANCE, false},
	{"STATS of errors", KV_MSG_STATS, KV_STAT_ERROR, false},
	{"LEASE", KV_MSG_LEASE, 0, true},
	{"PING behind full rings", KV_MSG_PING, 0, false, true},
};
#define N_FLOODS ((int)(sizeof(floods) / sizeof(floods[0])))

static void setup(void)
{
	chmod(daemon_folder(), 0711);
	daemon_start("--host", "512M", "--socket-mode", "0666", "--log-level", "error");
}

static void teardown(void)
{
	daemon_stop();
}

/* ---- the flooder ---- */

/* Chains of cached blocks, one of which stays held. */
static struct kv_seq *fill(struct kv_client *own, struct kv_pool *pool)
{
	struct kv_seq *kept = NULL;

	for (uint32_t i = 0; i < N_BLOCKS / CHAIN; i++) {
		struct kv_seq *seq = seq_published(own, pool, (int32_t)i, CHAIN * BLOCK_TOKENS);

		if (i)
			kv_seq_free(seq, NULL);
		else
			kept = seq;
	}
	return kept;
}

static void send_one(int fd, const struct flood *flood)
{
	struct kv_msg_lease lease = {.n = N_BLOCKS};
	struct kv_msg_stats stats = {.kind = flood->kind};
	struct kv_wire_head *head = flood->leases ? &lease.head : &stats.head;
	uint32_t size = flood->leases		     ? sizeof(lease) :
			flood->type == KV_MSG_STATS ? sizeof(stats) :
						       sizeof(struct kv_msg_plain);

	kv_wire_init(head, flood->type, size, 1);
	expect(send(fd, head, size, MSG_NOSIGNAL | MSG_DONTWAIT) == size || errno == EAGAIN, "hung up: %s",
	       strerror(errno));
}

static struct raw_session rings[N_RINGS];

/* As many ops as there is room for, of the kind that costs most without a block of one's own. */
static void fill_rings(void)
{
	static uint32_t n;

	for (int i = 0; i < N_RINGS; i++) {
		struct raw_session *s = &rings[i];

		while (kv_ring_writable(&s->shm->ops, s->op_head, s->shm->op_capacity) > 0) {
			n = n * 1664525 + 1013904223;
			raw_op(s, &(struct kv_op){.kind = KV_OP_TOUCH,
						  .id = (int32_t)(n >> 8) % (int32_t)N_BLOCKS,
						  .parent = CHAIN});
		}
	}
}

/* Every connection has always more to be answered; what comes is read, or the daemon hangs up. */
static void floods_on(const struct flood *flood, const int *fds)
{
	static char answer[KV_WIRE_MAX];
	struct pollfd polls[N_CONNECTIONS];

	for (int i = 0; i < N_CONNECTIONS; i++) {
		polls[i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
		for (int k = 0; k < 8; k++)
			send_one(fds[i], flood);
	}
	for (;;) {
		poll(polls, N_CONNECTIONS, -1);
		if (flood->rings)
			fill_rings();
		for (int i = 0; i < N_CONNECTIONS; i++) {
			if (!polls[i].revents)
				continue;
			expect(recv(fds[i], answer, sizeof(answer), MSG_DONTWAIT) > 0, "hung up");
			send_one(fds[i], flood);
		}
	}
}

static void floods_when_told(struct process *self, void *arg)
{
	const struct flood *flood = arg;
	struct kv_client *own;
	struct kv_pool *pool;
	int fds[N_CONNECTIONS];

	process_become(FLOODER, FLOODER);
	own = client_new();
	pool = pool_new(own, "floods", N_BLOCKS);
	fill(own, pool);
	for (int i = 0; i < N_CONNECTIONS; i++)
		fds[i] = flood->leases ? raw_session("floods", 0).fd : raw_hello();
	for (int i = 0; flood->rings && i < N_RINGS; i++)
		rings[i] = raw_session("floods", 0);
	process_say(self, 0);
	process_wait(self);
	floods_on(flood, fds);
}

/* ---- the other ---- */

static int compare(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return (x > y) - (x < y);
}

/* Leases of one block that is given back: the 99th of 100 by time. */
static int64_t p99_of_leases(struct raw_session *s)
{
	int64_t times[N_SAMPLES], end = now_ns() + MEASURE;
	uint32_t n_leased;
	int n = 0;

	for (; n < N_SAMPLES && now_ns() < end; n++) {
		int64_t before = now_ns();
		int32_t id;

		raw_lease(s, 1, TIMEOUT);
		expect(!raw_leased(s, &n_leased) && n_leased == 1, "no block");
		times[n] = now_ns() - before;
		ck_assert_uint_eq(raw_take(s, &id, 1), 1);
		raw_op(s, &(struct kv_op){.kind = KV_OP_GIVE, .id = id});
		usleep(500);
	}
	qsort(times, (size_t)n, sizeof(*times), compare);
	return times[(n * 99 - 1) / 100];
}

static void leases(struct process *self, void *arg)
{
	struct raw_session s;

	(void)arg;
	process_become(OTHER, OTHER);
	s = raw_session("other", 8 * MIB);
	process_say(self, p99_of_leases(&s));
	process_wait(self);
	process_say(self, p99_of_leases(&s));
	raw_session_close(&s);
}

START_TEST(a_flood_of_one_user_does_not_hold_up_anothers_leases)
{
	struct process *flooder = process_start(floods_when_told, (void *)&floods[_i]);
	struct process *other;
	int64_t quiet, flooded;

	process_hear(flooder);
	other = process_start(leases, NULL);
	quiet = process_hear(other);
	process_go(flooder);
	sleep_ms(50);
	process_go(other);
	flooded = process_hear(other);
	/* A machine that is busy with other things adds some 10 ms; without turns it is seconds. */
	expect(flooded < 10 * quiet + 100 * KV_MSEC, "%s: p99 of a lease %lld us in the quiet, %lld us in the flood",
	       floods[_i].name, (long long)quiet / 1000, (long long)flooded / 1000);
	process_end(other);
	process_kill(flooder);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("client/fair");
	TCase *tcase = tcase_create("fair");

	if (geteuid()) {
		fprintf(stderr, "skipped: becoming other users takes root\n");
		return 77;
	}
	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_loop_test(tcase, a_flood_of_one_user_does_not_hold_up_anothers_leases, 0, N_FLOODS);
	suite_add_tcase(s, tcase);
	return daemon_run_tests(s);
}
