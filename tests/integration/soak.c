/* SPDX-License-Identifier: Apache-2.0 */
/*
 * soak SECONDS [host|gpu [SEED]]: 32 clients of 4 pools lease, look up, append, fork, publish, roll back,
 * release and attach anew, in an arena that is too small for them; once a second something dies or
 * stops: a client, the mover, the worker. Every block a client leases or finds is written with what
 * only its owner can know, and verified: on a GPU by kernels, some of which are in flight when
 * their process is killed. tests/soak.sh runs it on both event loops and in all builds.
 *
 * Contents: a token's words follow from all tokens of its sequence so far, so that a block of
 * another prefix never looks right; but the last one, its mark, from its writer's pid, a number that never
 * comes again, the block's id and the position: two that are given one block at once would write the same
 * words where their prompts begin alike, and other marks. Who wrote a token verifies its mark for as long as it
 * has that block. Of a block leased alone all words are marks.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/integration/soak_device.h"
#include "tests/support/client.h"
#include "tests/support/process.h"

#define N_CLIENTS 32
#define N_POOLS	  4
#define N_PROMPTS 40
#define MAX_LEN	  900
#define MAX_SEQS  6
#define MAX_HELD  32

static int seconds = 10, on_gpu;
static unsigned random_seed; /* of what is done to whom */

/* What all processes share. */
static struct board {
	int stop; /* 1: clients leave; 2: who watches, too */
	uint64_t lives, rounds, attached, hit_tokens, written_tokens, verified_tokens, no_room,
		forks;
	uint64_t verified_marks, lost, checks, wrong_words;
} * board;

#define count(field, n) __atomic_fetch_add(&board->field, (n), __ATOMIC_RELAXED)

static bool is_over(int for_whom)
{
	return __atomic_load_n(&board->stop, __ATOMIC_RELAXED) >= for_whom;
}

/* ---- a client ---- */

static const struct {
	const char *name;
	uint32_t block_tokens, head_dim;
} pools[N_POOLS] = {{"s0", 16, 16}, {"s1", 8, 20}, {"s2", 32, 64}, {"s3", 64, 8}};

static unsigned seed;

/* A sequence, and the marks of those of its tokens that this process has written. */
struct work {
	struct kv_seq *seq;
	kv_block_id at[MAX_LEN]; /* where they lie; -1: another has written it, or it was copied */
	uint32_t marks[MAX_LEN];
};

struct engine {
	uint32_t which; /* pool */
	struct soak_device *device;
	struct kv_client *client;
	struct kv_pool *pool;
	struct kv_batch *batch;
	struct kv_pool_info info;
	struct kv_view k;
	struct soak_memory memory, words, marks; /* all of a token, all but its mark, its mark */
	struct work works[MAX_SEQS];
};

static uint32_t below(uint32_t n)
{
	return (uint32_t)rand_r(&seed) % n;
}

static void breathe(void)
{
	if (below(3) == 0)
		usleep(below(on_gpu ? 4000 : 30000));
}

/*
 * 0; 1: no room. A worker that dies may take a call along: then this process goes without a word,
 * as an engine would that can't go on, and another comes.
 */
static int ok(int r, const char *what)
{
	if (r == -ECONNRESET || r == -ECONNREFUSED || r == -ETIMEDOUT) {
		count(lost, 1);
		fprintf(stderr, "cut off: %s: %d (%s)\n", what, r, kv_error_text());
		_exit(0);
	}
	expect(r >= 0, "%s: %d (%s)", what, r, kv_error_text());
	if (r)
		count(no_room, 1);
	return r != 0;
}
#define OK(call) ok(call, #call)

static uint32_t mix(uint32_t hash, int32_t token)
{
	hash = (hash ^ (uint32_t)token) * 0x9e3779b1u;
	return hash ^ hash >> 15;
}

/* Prompts of a family have the first third to half of their tokens in common. */
static void prompt_of(uint32_t prompt, int32_t *tokens)
{
	uint32_t family = prompt % 5, shared = 200 + family * 24;

	for (uint32_t i = 0; i < MAX_LEN; i++)
		tokens[i] = (int32_t)((i < shared ? family : 1000 + prompt) * 100000 + i);
}

static int64_t place(const struct engine *e, kv_block_id id, size_t position)
{
	return id * e->k.block_stride +
	       (int64_t)(position % e->info.block_tokens) * e->k.token_stride;
}

/* A number that never comes again: of this process, and no other. */
static uint32_t new_mark(void)
{
	static uint32_t number;

	number++;
	return (uint32_t)getpid() * 2654435761u ^ number << 20 ^ number >> 12;
}

static uint32_t mark_of(uint32_t mark, kv_block_id id, size_t position)
{
	return mix(mix(mark, id), (int32_t)position);
}

/* All of a wrong block's words count; the process that finds them goes on. */
static void wait_for_device(struct engine *e)
{
	static int64_t known;
	int64_t n = soak_device_wait(e->device);

	expect(n >= 0, "the device is broken");
	if (n > known) {
		count(wrong_words, (uint64_t)(n - known));
		fprintf(stderr, "pool %s: %lld wrong words\n", pools[e->which].name,
			(long long)(n - known));
	}
	known = n;
}

static void verify(struct engine *e, const struct work *work, size_t len)
{
	struct soak_token tokens[MAX_LEN], marks[MAX_LEN];
	const kv_block_id *ids;
	uint32_t hash = 1, n_marks = 0;

	kv_seq_blocks(work->seq, &ids);
	for (size_t i = 0; i < len; i++) {
		kv_block_id id = ids[i / e->info.block_tokens];

		hash = mix(hash, kv_seq_tokens(work->seq)[i]);
		tokens[i] = (struct soak_token){place(e, id, i), hash, 0};
		if (work->at[i] == id)
			marks[n_marks++] = (struct soak_token){place(e, id, i), work->marks[i], 0};
	}
	soak_device_verify(e->device, &e->words, tokens, (uint32_t)len);
	soak_device_verify(e->device, &e->marks, marks, n_marks);
	count(verified_tokens, len);
	count(verified_marks, n_marks);
}

/*
 * What is copied has its writer's marks, wherever it lies: and the block it comes to may be one that was this
 * sequence's before, at this place, given back for the twin that is copied now.
 */
static void forget_copied(struct work *work, const struct kv_batch_data *d, size_t len)
{
	for (uint32_t c = 0; c < d->n_copies; c++) {
		for (size_t i = 0; i < len; i++) {
			if (work->at[i] == d->copies[2 * c + 1])
				work->at[i] = -1;
		}
	}
}

/* The last @n tokens, as a step of an engine does it: copies first, then their bytes. */
static void compute(struct engine *e, struct work *work, uint32_t n)
{
	const struct kv_batch_data *d = kv_batch_data(e->batch);
	struct kv_batch_item item = {work->seq, n};
	struct soak_token tokens[MAX_LEN], marks[MAX_LEN];
	size_t len = kv_seq_len(work->seq);
	uint32_t hash = 1, mark = new_mark();

	must(kv_batch_build(e->batch, &item, 1, 0, 0));
	must(kv_batch_copy(e->batch, soak_device_stream(e->device)));
	forget_copied(work, d, len - n);
	for (size_t i = 0; i < len - n; i++)
		hash = mix(hash, kv_seq_tokens(work->seq)[i]);
	for (uint32_t t = 0; t < n; t++) {
		uint32_t size = e->info.block_tokens;
		kv_block_id id = (kv_block_id)(d->slots[t] / size);
		int64_t offset = place(e, id, (size_t)d->slots[t] % size);
		size_t i = len - n + t;

		hash = mix(hash, d->tokens[t]);
		tokens[t] = (struct soak_token){offset, hash, 0};
		work->at[i] = id;
		work->marks[i] = mark_of(mark, id, i);
		marks[t] = (struct soak_token){offset, work->marks[i], 0};
	}
	soak_device_write(e->device, &e->words, tokens, n, below(8) ? 0 : below(5000));
	soak_device_write(e->device, &e->marks, marks, n, 0);
	count(written_tokens, n);
}

/* More tokens, if there is room. */
static void extend(struct engine *e, struct work *work, const int32_t *tokens, uint32_t n)
{
	if (OK(kv_seq_reserve(work->seq, kv_seq_len(work->seq) + n, below(2) ? 0 : below(30) * KV_MSEC)))
		return;
	must(kv_seq_append(work->seq, tokens, n));
	breathe();
	compute(e, work, n);
}

static void begin(struct engine *e, struct work *work)
{
	int32_t tokens[MAX_LEN];
	size_t n = 1 + below(MAX_LEN - 150), hit;

	prompt_of(below(N_PROMPTS), tokens);
	must(kv_seq_new(e->pool, &work->seq));
	memset(work->at, 0xff, sizeof(work->at));
	must(kv_seq_lookup(work->seq, tokens, n, &hit));
	verify(e, work, hit);
	count(hit_tokens, hit);
	breathe();
	if (n > hit)
		extend(e, work, tokens + hit, (uint32_t)(n - hit));
	if (below(8))
		OK(kv_seq_publish(work->seq, soak_device_stream(e->device)));
}

static void decode(struct engine *e, struct work *work)
{
	int32_t tokens[20];
	uint32_t n = 1 + below(20);

	if (kv_seq_len(work->seq) + n > MAX_LEN)
		return;
	for (uint32_t i = 0; i < n; i++)
		tokens[i] = (int32_t)below(3);
	extend(e, work, tokens, n);
	if (below(2))
		OK(kv_seq_publish(work->seq, soak_device_stream(e->device)));
}

static void fork_and_go_on(struct engine *e, struct work *work)
{
	struct work other = *work;

	must(kv_seq_fork(work->seq, &other.seq));
	count(forks, 1);
	decode(e, &other);
	decode(e, work);
	verify(e, &other, kv_seq_len(other.seq));
	verify(e, work, kv_seq_len(work->seq));
	kv_seq_free(other.seq, soak_device_stream(e->device));
}

/* Blocks of one's own: nobody else may write them, whatever happens. */
static void hold_blocks(struct engine *e)
{
	struct soak_token tokens[MAX_HELD * 64];
	uint32_t n = 1 + below(MAX_HELD), size = e->info.block_tokens, mark = new_mark();
	kv_block_id ids[MAX_HELD];

	if (OK(kv_blocks_take(e->pool, n, ids, below(20) * KV_MSEC)))
		return;
	for (uint32_t i = 0; i < n * size; i++)
		tokens[i] = (struct soak_token){place(e, ids[i / size], i % size),
						mark_of(mark, ids[i / size], i % size), 0};
	soak_device_write(e->device, &e->memory, tokens, n * size, below(4) ? 0 : below(20000));
	usleep(below(10000));
	soak_device_verify(e->device, &e->memory, tokens, n * size);
	count(verified_tokens, n * size);
	count(verified_marks, n * size);
	wait_for_device(e); /* nothing may be under way when they are given */
	OK(kv_blocks_give(e->pool, n, ids));
}

static void one_round(struct engine *e)
{
	struct work *work = &e->works[below(MAX_SEQS)];
	struct kv_seq *seq = work->seq;

	count(rounds, 1);
	switch (seq && kv_seq_len(seq) ? below(8) : seq ? 0 : 8) {
	case 0:
	case 1:
		verify(e, work, kv_seq_len(seq));
		work->seq = kv_seq_free(seq, soak_device_stream(e->device));
		break;
	case 2:
		must(kv_seq_rollback(seq, kv_seq_len(seq) - below(30) % kv_seq_len(seq),
				     soak_device_stream(e->device)));
		decode(e, work);
		break;
	case 3:
		fork_and_go_on(e, work);
		break;
	case 4:
		hold_blocks(e);
		break;
	case 8:
		begin(e, work);
		break;
	default:
		decode(e, work);
	}
	if (below(4) == 0)
		wait_for_device(e);
	breathe();
}

static int open_pool(struct kv_client *client, uint32_t which, int mapped, struct kv_pool **ret)
{
	const uint32_t dim = pools[which].head_dim;
	const struct kv_component components[] = {{0, KV_ROLE_K, KV_F32, 1, dim, 1, 0, 0},
						  {0, KV_ROLE_V, KV_F32, 1, dim, 1, 0, 0}};
	const struct kv_layout layout = {KV_LAYOUT_FLAT, 0, pools[which].block_tokens, 2,
					 components};
	KV_OPTIONS(kv_pool_options, what, .name = pools[which].name, .model = "soak",
		   .layout = &layout, .mapped = mapped, .timeout = TIMEOUT);

	return kv_pool_open(client, &what, ret);
}

/* One attachment: opens a pool, works, and goes, one time in four without a word. */
static void attach(struct engine *e)
{
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = 1, .max_tokens = MAX_LEN,
		   .max_blocks_per_seq = MAX_LEN / 8 + 1);
	uint32_t n_rounds = 5 + below(60), dim;
	struct kv_view v;
	int r;

	/* A pool that had ended needs an extent; when all are held, its place is refused, and no more. */
	e->which = below(N_POOLS);
	r = open_pool(e->client, e->which, 1, &e->pool);
	if (r == -ENOMEM) {
		breathe();
		return;
	}
	OK(r);
	kv_pool_info(e->pool, &e->info);
	must(kv_pool_view(e->pool, 0, 0, &e->k));
	must(kv_pool_view(e->pool, 0, 1, &v));
	dim = (uint32_t)e->k.head_dim;
	e->memory = (struct soak_memory){{e->k.base, v.base}, dim};
	e->words = (struct soak_memory){{e->k.base, v.base}, dim - 1};
	e->marks = (struct soak_memory){{(uint32_t *)e->k.base + dim - 1, (uint32_t *)v.base + dim - 1}, 1};
	must(kv_batch_new(e->pool, &sizes, &e->batch));
	count(attached, 1);
	for (uint32_t i = 0; i < n_rounds && !is_over(1); i++)
		one_round(e);
	if (below(16) == 0)
		_exit(0);
	for (int i = 0; i < MAX_SEQS; i++) {
		if (e->works[i].seq)
			verify(e, &e->works[i], kv_seq_len(e->works[i].seq));
		e->works[i].seq = kv_seq_free(e->works[i].seq, soak_device_stream(e->device));
	}
	wait_for_device(e);
	kv_batch_free(e->batch);
	kv_pool_close(e->pool);
}

static void live(void)
{
	KV_OPTIONS(kv_connect_options, how, .socket = daemon_socket(), .name = "soak",
		   .timeout = TIMEOUT);
	static struct engine e;

	if (soak_device_open(on_gpu, &e.device) < 0)
		_exit(77);
	OK(kv_connect(&how, &e.client));
	while (!is_over(1))
		attach(&e);
	kv_disconnect(e.client);
}

static pid_t start_client(void)
{
	static unsigned n;
	pid_t parent = getpid(), pid = fork();

	expect(pid >= 0, "fork");
	n++;
	if (pid)
		return pid;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(1);
	seed = n * 7919 + random_seed;
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
		int r = kv_check(client, &result, TIMEOUT);

		if (r == -ECONNRESET) { /* the worker has died; this connection is not a pool's */
			kv_disconnect(client);
			client = client_new();
			continue;
		}
		must(r);
		expect(!result.n_errors, "%llu errors in the books, the first: %s",
		       (unsigned long long)result.n_errors, result.first_error);
		count(checks, 1);
		usleep(20000);
	}
	kv_disconnect(client);
}

/* ---- the conductor ---- */

static struct {
	uint32_t clients, movers, workers, stops, stopped_movers, stopped_workers;
	uint64_t rss[2]; /* the most in the first half of the time, and in the second */
} done;

/* Has it ended? In good order, or by SIGKILL. */
static bool has_ended(pid_t pid)
{
	int status;

	if (waitpid(pid, &status, WNOHANG) != pid)
		return false;
	expect(!WIFEXITED(status) || WEXITSTATUS(status) != 77, "there is no such device");
	expect((WIFEXITED(status) && !WEXITSTATUS(status)) ||
		       (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL),
	       "client %d failed: status %#x", pid, status);
	count(lives, 1);
	return true;
}

/* The worker's first child; 0: it has none now. */
static pid_t mover(void)
{
	char path[64];
	int pid = 0;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/task/%d/children", daemon_worker(), daemon_worker());
	f = fopen(path, "r");
	if (f && fscanf(f, "%d", &pid) != 1)
		pid = 0;
	if (f)
		fclose(f);
	return pid;
}

/* What stands still for a second; a worker for a quarter of it: calls wait for that, and go on. */
static void stop_one(pid_t *stopped, pid_t pid, uint32_t *counter)
{
	if (!pid || kill(pid, SIGSTOP))
		return;
	*stopped = pid;
	++*counter;
}

static void do_harm(pid_t *clients, pid_t *stopped)
{
	pid_t *one = &clients[rand() % N_CLIENTS], pid;

	switch (rand() % 16) {
	case 0:
	case 1:
		pid = mover();
		if (pid && !kill(pid, SIGKILL)) {
			done.movers++;
			return;
		}
		break;
	case 2:
	case 3:
	case 4:
	case 5:
		daemon_kill_worker();
		done.workers++;
		return;
	case 6:
		stop_one(stopped, *one, &done.stops);
		return;
	case 7:
		stop_one(stopped, mover(), &done.stopped_movers);
		if (*stopped)
			return;
		break;
	case 8:
		stop_one(stopped, daemon_worker(), &done.stopped_workers);
		sleep_ms(250);
		kill(*stopped, SIGCONT);
		*stopped = 0;
		return;
	default:
		break;
	}
	kill(*one, SIGKILL);
	done.clients++;
}

static void conduct(void)
{
	int64_t start = now_ns(), end = start + seconds * KV_SEC, next = start + KV_SEC, look = 0;
	pid_t clients[N_CLIENTS], stopped = 0;

	for (int i = 0; i < N_CLIENTS; i++)
		clients[i] = start_client();
	while (now_ns() < end) {
		for (int i = 0; i < N_CLIENTS; i++) {
			if (has_ended(clients[i]))
				clients[i] = start_client();
		}
		if (now_ns() > next) {
			if (stopped)
				kill(stopped, SIGCONT);
			stopped = 0;
			do_harm(clients, &stopped);
			next += KV_SEC;
		}
		if (now_ns() > look) {
			uint64_t rss = daemon_rss(), *most = &done.rss[now_ns() - start > (end - start) / 2];

			*most = rss > *most ? rss : *most;
			look = now_ns() + KV_SEC / 5;
		}
		sleep_ms(5);
	}
	if (stopped)
		kill(stopped, SIGCONT);
	__atomic_store_n(&board->stop, 1, __ATOMIC_RELAXED);
	for (int i = 0; i < N_CLIENTS; i++)
		wait_until(has_ended(clients[i]));
	__atomic_store_n(&board->stop, 2, __ATOMIC_RELAXED);
}

/*
 * Return: blocks that are neither free nor cached when nobody is there. A pool that was left alone
 * while others needed its memory has ended with its cache: it has nothing to lose.
 */
static uint64_t lost_blocks(struct kv_client *client)
{
	struct kv_pool_stats *all;
	uint64_t lost = 0;
	size_t n;

	wait_until(daemon_stats(client).n_sessions == 0);
	must(kv_stats(client, KV_STAT_POOL, (void **)&all, &n, TIMEOUT));
	for (size_t i = 0; i < n; i++)
		lost += all[i].blocks_total - all[i].blocks_free - all[i].blocks_cached +
			all[i].blocks_cached_held;
	free(all);
	return lost;
}

static void report(uint64_t lost, int fds)
{
	const struct board *b = board;

	printf("%d s, %s: %llu lives, %llu attachments, %llu rounds, %llu forks, %llu tokens "
	       "found, "
	       "%llu written, %llu verified, %llu times no room, %llu calls cut off, %llu checks\n",
	       seconds, on_gpu ? "gpu" : "host", (unsigned long long)b->lives,
	       (unsigned long long)b->attached, (unsigned long long)b->rounds,
	       (unsigned long long)b->forks, (unsigned long long)b->hit_tokens,
	       (unsigned long long)b->written_tokens, (unsigned long long)b->verified_tokens,
	       (unsigned long long)b->no_room, (unsigned long long)b->lost,
	       (unsigned long long)b->checks);
	printf("%llu marks of their writers verified\n", (unsigned long long)b->verified_marks);
	printf("killed: %u clients, %u movers, %u workers; stopped: %u clients, %u movers, %u workers\n",
	       done.clients, done.movers, done.workers, done.stops, done.stopped_movers,
	       done.stopped_workers);
	printf("%llu wrong bytes, %llu lost blocks, %d leaked descriptors, at most %llu MiB "
	       "resident, %llu in the second half\n",
	       (unsigned long long)b->wrong_words * 4, (unsigned long long)lost, fds,
	       (unsigned long long)((done.rss[0] > done.rss[1] ? done.rss[0] : done.rss[1]) >> 20),
	       (unsigned long long)(done.rss[1] >> 20));
}

static uint32_t n_harms(void)
{
	return done.clients + done.movers + done.workers + done.stops + done.stopped_movers +
	       done.stopped_workers;
}

START_TEST(whatever_dies_no_byte_is_wrong_and_no_block_is_lost)
{
	struct kv_pool *open[N_POOLS];
	struct kv_client *client;
	struct process *watcher;
	uint64_t lost, n_pools;
	int fds;

	board = mmap(NULL, sizeof(*board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		     0);
	ck_assert_ptr_ne(board, MAP_FAILED);
	if (on_gpu)
		daemon_start("--gpus", "0", "--reserve", "16M");
	else
		daemon_start("--host", "10M");
	client = client_new();
	wait_until(daemon_stats(client).n_clients == 1);
	for (uint32_t i = 0; i < N_POOLS; i++) {
		/* Host-only: with a device of its own its children could have none. */
		must(open_pool(client, i, 0, &open[i]));
		kv_pool_close(open[i]);
	}
	/* A worker that has taken over holds other descriptors than the first: begin with one. */
	kv_disconnect(client);
	daemon_kill_worker();
	client = client_new();
	wait_until(daemon_stats(client).n_clients == 1);
	/* The mover of the first may take its time to end: with its own one it holds all it will. */
	wait_until(daemon_children() == 1);
	fds = (int)daemon_fds();
	watcher = process_start(checks, NULL);
	process_hear(watcher);
	conduct();
	process_end(watcher);
	kv_disconnect(client);
	client = client_new();
	lost = lost_blocks(client);
	books_balance(client);
	wait_until(daemon_stats(client).n_clients == 1);
	wait_until(daemon_children() == 1);
	fds = (int)daemon_fds() - fds;
	n_pools = daemon_stats(client).n_pools;
	report(lost, fds);
	fflush(stdout);
	ck_assert_uint_eq(board->wrong_words, 0);
	ck_assert_uint_eq(lost, 0);
	/* A pool that has ended took its descriptors along. */
	ck_assert_int_le(fds, 0);
	expect(!fds || n_pools < N_POOLS, "%d descriptors are gone, and no pool", -fds);
	ck_assert_uint_eq(board->lost, 0);
	ck_assert_uint_gt(board->verified_tokens, 1000);
	ck_assert_uint_gt(board->verified_marks, 1000);
	ck_assert_uint_gt(board->hit_tokens, 100);
	/* One a second, and of each kind. */
	expect(n_harms() + 2 >= (uint32_t)seconds, "only %u things were done in %d s", n_harms(), seconds);
	expect(seconds < 60 || (done.clients && done.movers && done.workers && done.stops),
	       "something was never done");
	/* What grows with time is more in its second half. */
	expect(seconds < 20 || done.rss[1] < done.rss[0] + NO_GROWTH, "%llu KiB became %llu KiB",
	       (unsigned long long)(done.rss[0] >> 10), (unsigned long long)(done.rss[1] >> 10));
	kv_disconnect(client);
	daemon_stop();
}
END_TEST

int main(int argc, char **argv)
{
	Suite *s = suite_create("integration/soak");
	TCase *tcase = tcase_create("soak");

	if (argc > 1)
		seconds = atoi(argv[1]);
	on_gpu = argc > 2 && !strcmp(argv[2], "gpu");
	random_seed = argc > 3 ? (unsigned)strtoul(argv[3], NULL, 10) : (unsigned)now_ns();
	srand(random_seed);
	printf("seed %u\n", random_seed);
	fflush(stdout);
	tcase_set_timeout(tcase, seconds + 120);
	tcase_add_test(tcase, whatever_dies_no_byte_is_wrong_and_no_block_is_lost);
	suite_add_tcase(s, tcase);
	return daemon_run_tests(s);
}
