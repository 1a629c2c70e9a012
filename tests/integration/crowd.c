/* SPDX-License-Identifier: Apache-2.0 */
/*
 * crowd [SECONDS]: 64 client processes attach, lease, look up, fork, publish, roll back and leave
 * at random, in two pools of one arena that is too small for them, and are killed at random. Every
 * byte that one finds in a block is checked; while it goes on, one process has the daemon check its
 * books without pause and another one polls its numbers 100 times a second. At the end all must be
 * free or cached, and the daemon as it was at the start.
 *
 * Contents: what a sequence computes follows from all its tokens so far, so that a block of another
 * prefix never looks right. What is leased alone carries its owner's pid and a number that never
 * comes again, so that a second owner is seen even if both write the same tokens.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/client.h"
#include "tests/support/process.h"

#define N_CLIENTS  64
#define N_PROMPTS  60
#define N_FAMILIES 6
#define MAX_LEN	   1000
#define MAX_SEQS   10

static int seconds = 5;

/* What all processes share. */
static struct board {
	int stop; /* 1: clients leave; 2: those who watch, too */
	uint64_t lives, rounds, hit_tokens, checked_bytes, no_room, forks, checks, polls;
} * board;

#define count(field, n) __atomic_fetch_add(&board->field, (n), __ATOMIC_RELAXED)

static bool is_over(int for_whom)
{
	return __atomic_load_n(&board->stop, __ATOMIC_RELAXED) >= for_whom;
}

/* ---- a client ---- */

static unsigned seed;

static uint32_t below(uint32_t n)
{
	return (uint32_t)rand_r(&seed) % n;
}

/* Other processes run; now and then this one ends here, as if its plug were pulled. */
static void breathe(void)
{
	if (below(3000) == 0)
		raise(SIGKILL);
	if (below(4) == 0)
		usleep(below(3000));
}

/* Prompts of a family have the first third to half of their tokens in common. */
static void prompt_of(uint32_t prompt, int32_t *tokens)
{
	uint32_t family = prompt % N_FAMILIES, shared = 200 + family * 24;

	for (uint32_t i = 0; i < MAX_LEN; i++)
		tokens[i] = (int32_t)((i < shared ? family : 1000 + prompt) * 100000 + i);
}

struct engine {
	struct kv_client *client;
	struct kv_pool *pool;
	struct kv_batch *batch;
	struct kv_pool_info info;
	struct kv_view k;
	struct kv_seq *seqs[MAX_SEQS];
};

static uint32_t mix(uint32_t hash, int32_t token)
{
	hash = (hash ^ (uint32_t)token) * 0x9e3779b1u;
	return hash ^ hash >> 15;
}

/* The bytes of a token in K; V follows in the same block. */
static uint32_t *token_at(const struct engine *e, kv_block_id id, size_t offset)
{
	return (uint32_t *)((char *)e->k.base + id * e->k.block_stride +
			    (int64_t)offset * e->k.token_stride);
}

static void check_seq(const struct engine *e, const struct kv_seq *seq, size_t len,
		      const char *what)
{
	uint32_t hash = 1, n = (uint32_t)e->k.head_dim, size = e->info.block_tokens;
	const kv_block_id *ids;

	kv_seq_blocks(seq, &ids);
	for (size_t i = 0; i < len; i++) {
		const uint32_t *v = token_at(e, ids[i / size], i % size);

		hash = mix(hash, kv_seq_tokens(seq)[i]);
		for (uint32_t k = 0; k < n; k++)
			expect(v[k] == hash, "%s: token %zu of %zu, block %d: wrong bytes", what, i,
			       len, ids[i / size]);
	}
	count(checked_bytes, len * n * 4);
}

/* The last tokens of some sequences, in one batch: copies first, then their bytes. */
static void compute(struct engine *e, const struct kv_batch_item *items, uint32_t n)
{
	const struct kv_batch_data *d = kv_batch_data(e->batch);

	must(kv_batch_build(e->batch, items, n, 0, 0));
	must(kv_batch_copy(e->batch, NULL));
	for (uint32_t i = 0; i < n; i++) {
		const int32_t *tokens = kv_seq_tokens(items[i].seq);
		uint32_t hash = 1;

		for (int32_t p = 0; p < d->n_computed[i]; p++)
			hash = mix(hash, tokens[p]);
		for (int32_t t = d->query_start_loc[i]; t < d->query_start_loc[i + 1]; t++) {
			int64_t slot = d->slots[t];
			uint32_t *v = token_at(e, (kv_block_id)(slot / e->info.block_tokens),
					       (size_t)slot % e->info.block_tokens);

			hash = mix(hash, d->tokens[t]);
			for (int32_t k = 0; k < e->k.head_dim; k++)
				v[k] = hash;
		}
		breathe();
	}
}

/* More tokens, if there is room. False: there is none. */
static bool extend(struct engine *e, struct kv_seq *seq, const int32_t *tokens, size_t n)
{
	struct kv_batch_item item = {seq, (uint32_t)n};
	int r = kv_seq_reserve(seq, kv_seq_len(seq) + n, below(2) ? 0 : below(30) * KV_MSEC);

	expect(r >= 0, "reserve: %s", kv_error_text());
	if (r) {
		count(no_room, 1);
		return false;
	}
	must(kv_seq_append(seq, tokens, n));
	breathe();
	compute(e, &item, 1);
	return true;
}

static void begin(struct engine *e, struct kv_seq **ret)
{
	int32_t tokens[MAX_LEN];
	size_t n = 1 + below(MAX_LEN - 100), hit;
	struct kv_seq *seq;

	prompt_of(below(N_PROMPTS), tokens);
	must(kv_seq_new(e->pool, &seq));
	must(kv_seq_lookup(seq, tokens, n, &hit));
	check_seq(e, seq, hit, "found");
	breathe();
	if (below(8) == 0 && kv_seq_reserve(seq, n, 0) == 0) {
		/* Perhaps somebody else computes it too, and is ahead by now. */
		breathe();
		must(kv_seq_lookup(seq, tokens, n, &hit));
		check_seq(e, seq, hit, "found later");
	}
	count(hit_tokens, hit);
	if (!extend(e, seq, tokens + hit, n - hit)) {
		kv_seq_free(seq, NULL);
		return;
	}
	if (below(8))
		must(kv_seq_publish(seq, NULL));
	*ret = seq;
}

static void decode(struct engine *e, struct kv_seq *seq)
{
	int32_t tokens[20];
	uint32_t n = 1 + below(20);

	if (kv_seq_len(seq) + n > MAX_LEN)
		return;
	for (uint32_t i = 0; i < n; i++)
		tokens[i] = (int32_t)below(3);
	extend(e, seq, tokens, n);
	if (below(2))
		must(kv_seq_publish(seq, NULL));
}

static void fork_and_go_on(struct engine *e, struct kv_seq *seq)
{
	struct kv_seq *other;

	must(kv_seq_fork(seq, &other));
	count(forks, 1);
	decode(e, other);
	decode(e, seq);
	check_seq(e, other, kv_seq_len(other), "fork");
	kv_seq_free(other, NULL);
}

/* Blocks of one's own: nobody else may write them, whatever happens. */
static void hold_blocks(struct engine *e)
{
	static uint32_t number;
	kv_block_id ids[40];
	uint32_t n = 1 + below(40), mark = (uint32_t)getpid() << 12 ^ ++number;
	size_t words = e->info.block_bytes / 4;
	int r = kv_blocks_take(e->pool, n, ids, below(20) * KV_MSEC);

	expect(r >= 0, "take: %s", kv_error_text());
	if (r) {
		count(no_room, 1);
		return;
	}
	for (uint32_t i = 0; i < n; i++) {
		uint32_t *at = token_at(e, ids[i], 0);

		for (size_t k = 0; k < words; k++)
			at[k] = mark + i + (uint32_t)k;
	}
	usleep(below(5000));
	breathe();
	for (uint32_t i = 0; i < n; i++) {
		const uint32_t *at = token_at(e, ids[i], 0);

		for (size_t k = 0; k < words; k++)
			expect(at[k] == mark + i + (uint32_t)k, "block %d has a second owner",
			       ids[i]);
	}
	count(checked_bytes, n * words * 4);
	must(kv_blocks_give(e->pool, n, ids));
}

static void one_round(struct engine *e)
{
	struct kv_seq **seq = &e->seqs[below(MAX_SEQS)];

	count(rounds, 1);
	switch (*seq ? below(8) : 8) {
	case 0:
	case 1:
		check_seq(e, *seq, kv_seq_len(*seq), "at its end");
		*seq = kv_seq_free(*seq, NULL);
		break;
	case 2:
		must(kv_seq_rollback(*seq, kv_seq_len(*seq) - below(30) % kv_seq_len(*seq), NULL));
		decode(e, *seq);
		break;
	case 3:
		fork_and_go_on(e, *seq);
		break;
	case 4:
		hold_blocks(e);
		break;
	case 8:
		begin(e, seq);
		break;
	default:
		decode(e, *seq);
	}
	breathe();
}

/* Blocks of 16 tokens and 2 KiB, or of 8 tokens and 1,280 bytes, which no extent is a multiple of.
 */
static struct kv_pool *open_one(struct kv_client *client, int which)
{
	static const struct kv_component components[] = {{0, KV_ROLE_K, KV_F32, 1, 16, 1},
							 {0, KV_ROLE_V, KV_F32, 1, 24, 1}};
	static const struct kv_layout layout = {KV_LAYOUT_FLAT, 0, 8, 2, components};
	KV_OPTIONS(kv_pool_options, what, .name = which ? "b" : "a", .model = which ? "b" : "a",
		   .layout = which ? &layout : small_layout(), .mapped = 1, .timeout = TIMEOUT);
	struct kv_pool *pool;

	must(kv_pool_open(client, &what, &pool));
	return pool;
}

static void live(void)
{
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = 1, .max_tokens = MAX_LEN,
		   .max_blocks_per_seq = MAX_LEN / 8 + 1);
	struct engine e = {.client = client_new()};
	uint32_t n_rounds = 5 + below(150);

	e.pool = open_one(e.client, below(3) == 0);
	kv_pool_info(e.pool, &e.info);
	must(kv_pool_view(e.pool, 0, 0, &e.k));
	must(kv_batch_new(e.pool, &sizes, &e.batch));
	for (uint32_t i = 0; i < n_rounds && !is_over(1); i++)
		one_round(&e);
	if (below(4) == 0)
		_exit(0); /* without a word */
	for (int i = 0; i < MAX_SEQS; i++)
		kv_seq_free(e.seqs[i], NULL);
	kv_batch_free(e.batch);
	kv_pool_close(e.pool);
	kv_disconnect(e.client);
}

static pid_t start_client(void)
{
	static unsigned n;
	pid_t pid = fork();

	expect(pid >= 0, "fork");
	n++;
	if (pid)
		return pid;
	seed = n * 7919 + 1;
	live();
	_exit(0);
}

/* ---- who watches ---- */

static void checks(struct process *self, void *arg)
{
	struct kv_client *client = client_new();

	(void)arg;
	process_say(self, 0);
	while (!is_over(2)) {
		struct kv_check_result result;

		must(kv_check(client, &result, TIMEOUT));
		expect(!result.n_errors, "%llu errors in the books, the first: %s",
		       (unsigned long long)result.n_errors, result.first_error);
		count(checks, 1);
		usleep(5000);
	}
	kv_disconnect(client);
}

static void polls(struct process *self, void *arg)
{
	struct kv_client *client = client_new();

	(void)arg;
	process_say(self, 0);
	while (!is_over(2)) {
		numbers_add_up(client);
		count(polls, 1);
		usleep(10000);
	}
	kv_disconnect(client);
}

/* ---- the conductor ---- */

/* Has it ended? In good order, or by SIGKILL. */
static bool has_ended(pid_t pid)
{
	int status;

	if (waitpid(pid, &status, WNOHANG) != pid)
		return false;
	expect((WIFEXITED(status) && !WEXITSTATUS(status)) ||
		       (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL),
	       "client %d failed: status %#x", pid, status);
	count(lives, 1);
	return true;
}

static void run_crowd(struct kv_client *client)
{
	int64_t end = now_ns() + seconds * KV_SEC, next_kill = 0, next_mover = 0;
	pid_t clients[N_CLIENTS];

	for (int i = 0; i < N_CLIENTS; i++)
		clients[i] = start_client();
	while (now_ns() < end) {
		for (int i = 0; i < N_CLIENTS; i++) {
			if (has_ended(clients[i]))
				clients[i] = start_client();
		}
		if (now_ns() > next_kill) {
			kill(clients[rand() % N_CLIENTS], SIGKILL);
			next_kill = now_ns() + rand() % 60 * KV_MSEC;
		}
		if (now_ns() > next_mover) {
			pid_t mover = (pid_t)gpu_stats(client).mover_pid;

			if (mover)
				kill(mover, SIGKILL);
			next_mover = now_ns() + 2 * KV_SEC;
		}
		sleep_ms(1);
	}
	__atomic_store_n(&board->stop, 1, __ATOMIC_RELAXED);
	for (int i = 0; i < N_CLIENTS; i++)
		wait_until(has_ended(clients[i]));
	__atomic_store_n(&board->stop, 2, __ATOMIC_RELAXED);
}

static void expect_all_quiet(struct kv_client *client, const char *name)
{
	struct kv_pool_stats s;

	wait_until(pool_stats(client, name).n_sessions == 0);
	s = pool_stats(client, name);
	expect(!s.blocks_leased && !s.blocks_quarantined && !s.blocks_cached_held && !s.waiting &&
		       s.blocks_free + s.blocks_cached == s.blocks_total,
	       "pool %s: %llu free, %llu leased, %llu cached (%llu held), %llu quarantined, %llu "
	       "wait",
	       name, (unsigned long long)s.blocks_free, (unsigned long long)s.blocks_leased,
	       (unsigned long long)s.blocks_cached, (unsigned long long)s.blocks_cached_held,
	       (unsigned long long)s.blocks_quarantined, (unsigned long long)s.waiting);
	expect(s.evictions_total > 100 && s.duplicates_total > 10 && s.hit_tokens_total > 1000,
	       "pool %s: %llu evictions, %llu duplicates, %llu tokens hit: nothing was tried", name,
	       (unsigned long long)s.evictions_total, (unsigned long long)s.duplicates_total,
	       (unsigned long long)s.hit_tokens_total);
	printf("pool %s: %llu published, %llu duplicates, %llu evicted, %llu granted, %llu no "
	       "room\n",
	       name, (unsigned long long)s.published_total, (unsigned long long)s.duplicates_total,
	       (unsigned long long)s.evictions_total, (unsigned long long)s.grants_total,
	       (unsigned long long)s.no_room_total);
}

START_TEST(clients_that_share_and_die_at_random_break_nothing)
{
	struct kv_client *client;
	struct process *watchers[2];
	struct kv_pool *pools[2];
	uint32_t fds;

	board = mmap(NULL, sizeof(*board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		     0);
	ck_assert_ptr_ne(board, MAP_FAILED);
	daemon_start("--host", "10M");
	client = client_new();
	wait_until(daemon_stats(client).n_clients == 1);
	fds = daemon_fds();
	for (int i = 0; i < 2; i++) /* both exist, whoever comes first */
		pools[i] = open_one(client, i);
	watchers[0] = process_start(checks, NULL);
	watchers[1] = process_start(polls, NULL);
	for (int i = 0; i < 2; i++)
		process_hear(watchers[i]);
	run_crowd(client);
	for (int i = 0; i < 2; i++) {
		process_end(watchers[i]);
		kv_pool_close(pools[i]);
	}
	expect_all_quiet(client, "a");
	expect_all_quiet(client, "b");
	books_balance(client);
	must(kv_pool_drop(client, "a", TIMEOUT));
	must(kv_pool_drop(client, "b", TIMEOUT));
	wait_until(gpu_stats(client).bytes_free == 10 << 20);
	wait_until(daemon_stats(client).n_clients == 1);
	wait_until(daemon_fds() == fds);
	printf("%d s: %llu lives, %llu rounds, %llu forks, %llu tokens found, %llu MB compared, "
	       "%llu times no room, %llu checks, %llu polls\n",
	       seconds, (unsigned long long)board->lives, (unsigned long long)board->rounds,
	       (unsigned long long)board->forks, (unsigned long long)board->hit_tokens,
	       (unsigned long long)board->checked_bytes / 1000000,
	       (unsigned long long)board->no_room, (unsigned long long)board->checks,
	       (unsigned long long)board->polls);
	ck_assert_uint_gt(board->polls, 3u * (unsigned)seconds);
	kv_disconnect(client);
	daemon_stop();
}
END_TEST

int main(int argc, char **argv)
{
	Suite *s = suite_create("integration/crowd");
	TCase *tcase = tcase_create("crowd");

	if (argc > 1)
		seconds = atoi(argv[1]);
	tcase_set_timeout(tcase, seconds + 60);
	tcase_add_test(tcase, clients_that_share_and_die_at_random_break_nothing);
	suite_add_tcase(s, tcase);
	return daemon_run_tests(s);
}
