/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Real clients of the library at work in two pools, while words of the pages that clients of pool
 * "a" may write change under their hands: rings, ops, grants, counters, descriptors, stamps,
 * holders, tokens. Clients of "a" may be refused, cut off or miss their cache; they and the daemon
 * must not crash or hang. The clients of pool "b", one of which only reads, see nothing of it: every
 * call is answered as ever and its blocks are its own. Built and run as fuzz_wire.c says.
 *
 * Input: actions of eight bytes, struct action. Client and daemon are one process (inside.h): while
 * a client waits, the daemon works and time goes on.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "libclient/internal.h"
#include "tests/fuzz/inside.h"
#include "tests/fuzz/pages_input.h"

/* The first one's session pages are written. The third is in pool "b", the last one reads it. */
#define N_SEQS	     4
#define MAX_TAKEN    128
#define BLOCK_TOKENS 16
#define MAX_LEN	     (24 * BLOCK_TOKENS)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
void fuzz_reached(FILE *f);
int __wrap_connect(int fd, const struct sockaddr *address, socklen_t size);
int __wrap_kv_socket_wait(int fd, short events, int64_t deadline_ns);

static struct user {
	struct kv_client *client;
	struct kv_pool *pool;
	struct kv_seq *seqs[N_SEQS];
	uint32_t salts[N_SEQS]; /* 0: none */
	kv_block_id taken[MAX_TAKEN];
	uint32_t n_taken, mark;
} users[N_CLIENTS];

/* What came to pass in the input before: for replay.c. */
enum reach {
	REACH_TAKEN,
	REACH_HIT,
	REACH_SALTED, /* a hit of blocks that have rows */
	REACH_PARTIAL,
	REACH_COPIED,
	REACH_TWIN,
	REACH_PROMISED, /* somebody else's was met */
	REACH_PEEKED,
	REACH_PREEMPTED,
	REACH_RESUMED, /* with blocks that were still there */
	REACH_EPOCH,
	REACH_LIMITS,
	REACH_COMPACTED,
	REACH_LOST, /* a scribbler was cut off or refused */
	N_REACHES
};
static uint64_t reached[N_REACHES];

int __wrap_connect(int fd, const struct sockaddr *address, socklen_t size)
{
	uint64_t peer;
	int end = inside_connect(&peer);

	(void)address;
	(void)size;
	inside_must(dup3(end, fd, O_CLOEXEC) == fd, "dup3: %m");
	kv_close(end);
	return 0;
}

int __wrap_kv_socket_wait(int fd, short events, int64_t deadline_ns)
{
	int64_t pause = KV_MSEC;

	for (;; pause *= 2) {
		struct pollfd p = {.fd = fd, .events = events};

		inside_step();
		if (poll(&p, 1, 0) > 0)
			return 0;
		if (kv_now() >= deadline_ns)
			return -ETIMEDOUT;
		inside_zero(false);
		inside_advance(pause);
	}
}

static bool is_honest(const struct user *u)
{
	return u >= &users[N_CLIENTS - 2];
}

static bool is_reader(const struct user *u)
{
	return u == &users[N_CLIENTS - 1];
}

/* What the honest client must never hear. */
static int heard(const struct user *u, int r)
{
	inside_must(r >= 0 || !is_honest(u), "%s", kv_error_text());
	reached[REACH_LOST] += r < 0;
	return r;
}

static void join(struct user *u)
{
	static const struct kv_component components[] = {{0, KV_ROLE_K, KV_F32, 1, 16, 1, 0, 0},
							 {0, KV_ROLE_V, KV_F32, 1, 16, 1, 0, 0}};
	static const struct kv_layout layout = {KV_LAYOUT_FLAT, 0, BLOCK_TOKENS, 2, components};
	KV_OPTIONS(kv_pool_options, what, .name = is_honest(u) ? "b" : "a", .layout = &layout,
		   /* so few that the cache has to go */
		   .max_bytes = 1 << 18, .mapped = 1, .read_only = is_reader(u));

	u->n_taken = 0;
	if (heard(u, kv_pool_open(u->client, &what, &u->pool)) < 0)
		u->pool = NULL;
}

static void end_seqs(struct user *u)
{
	for (int i = 0; i < N_SEQS; i++)
		u->seqs[i] = kv_seq_free(u->seqs[i], NULL);
}

static uint32_t *bytes_of(const struct user *u, kv_block_id id)
{
	struct kv_view view;

	heard(u, kv_pool_view(u->pool, 0, 0, &view));
	return (uint32_t *)((char *)view.base + (int64_t)id * view.block_stride);
}

static void give(struct user *u)
{
	for (uint32_t i = 0; is_honest(u) && i < u->n_taken; i++)
		inside_must(*bytes_of(u, u->taken[i]) == u->mark + i, "block %d has a second owner",
			    u->taken[i]);
	heard(u, kv_blocks_give(u->pool, u->n_taken, u->taken));
	u->n_taken = 0;
}

static void take(struct user *u, uint32_t n, int64_t timeout)
{
	static uint32_t marks;

	give(u);
	if (heard(u, kv_blocks_take(u->pool, n, u->taken, timeout)))
		return;
	reached[REACH_TAKEN] += n > 0;
	u->n_taken = n;
	u->mark = marks += 1000;
	for (uint32_t i = 0; is_honest(u) && i < n; i++)
		*bytes_of(u, u->taken[i]) = u->mark + i;
}

/* They part at a block's end, or in the midst of one. */
static const int32_t *prompt(uint32_t number)
{
	static int32_t tokens[MAX_LEN];

	number %= 64;
	for (int32_t i = 0; i < MAX_LEN; i++)
		tokens[i] = i < 64 + (int32_t)number / 8 ? i : (int32_t)number * 1000 + i;
	return tokens;
}

static uint32_t salt_of(const struct user *u, const struct kv_seq *seq)
{
	for (int i = 0; i < N_SEQS; i++) {
		if (u->seqs[i] == seq)
			return u->salts[i];
	}
	return 0;
}

/* Where a token of a sequence is, and what stands there. */
static uint32_t *place_of(const struct user *u, const struct kv_seq *seq, size_t token)
{
	const kv_block_id *ids;

	kv_seq_blocks(seq, &ids);
	return bytes_of(u, ids[token / BLOCK_TOKENS]) + token % BLOCK_TOKENS;
}

static uint32_t word_of(const struct user *u, const struct kv_seq *seq, size_t token)
{
	return (uint32_t)kv_seq_tokens(seq)[token] ^ salt_of(u, seq) << 24;
}

/* The bytes of a block follow from what its tokens are: what is found must be what was written. */
static void check_found(const struct user *u, const struct kv_seq *seq, size_t n)
{
	reached[REACH_HIT] += n >= BLOCK_TOKENS;
	reached[REACH_SALTED] += n >= BLOCK_TOKENS && salt_of(u, seq);
	reached[REACH_PARTIAL] += n % BLOCK_TOKENS != 0;
	for (size_t i = 0; is_honest(u) && i < n; i++)
		inside_must(*place_of(u, seq, i) == word_of(u, seq, i),
			    "token %zu of a prefix of %zu that was found has other bytes", i, n);
}

/* What a step does before it writes. */
static void do_copies(struct user *u)
{
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = 1, .max_tokens = 1,
		   .max_blocks_per_seq = 1);
	struct kv_batch *batch;

	if (heard(u, kv_batch_new(u->pool, &sizes, &batch)))
		return;
	if (!heard(u, kv_batch_build(batch, NULL, 0, 0, 0))) {
		reached[REACH_COPIED] += kv_batch_data(batch)->n_copies;
		heard(u, kv_batch_copy(batch, NULL));
	}
	kv_batch_free(batch);
}

static void compute(struct user *u, const struct kv_seq *seq, size_t from)
{
	do_copies(u);
	for (size_t i = from; is_honest(u) && i < kv_seq_len(seq); i++)
		*place_of(u, seq, i) = word_of(u, seq, i);
}

/* Grows a sequence along its prompt, if there is room. */
static void grow(struct user *u, struct kv_seq *seq, uint32_t number, size_t n, int64_t timeout)
{
	size_t len = kv_seq_len(seq);

	n = n > MAX_LEN ? MAX_LEN : n;
	if (n <= len || heard(u, kv_seq_reserve(seq, n, timeout)) ||
	    heard(u, kv_seq_append(seq, prompt(number) + len, n - len)))
		return;
	compute(u, seq, len);
}

/* Nobody else runs meanwhile: what was found is still there. */
static void peek(struct user *u, const struct action *a)
{
	const int32_t *tokens = prompt(a->a);
	kv_block_id ids[MAX_LEN / BLOCK_TOKENS];
	uint64_t words[MAX_LEN / BLOCK_TOKENS];
	int64_t n = kv_pool_peek(u->pool, tokens, a->b % MAX_LEN + 1, ids, words,
				 MAX_LEN / BLOCK_TOKENS);

	for (int64_t i = 0; i < heard(u, (int)n); i++)
		inside_must(bytes_of(u, ids[i])[BLOCK_TOKENS - 1] ==
				    (uint32_t)tokens[(i + 1) * BLOCK_TOKENS - 1],
			    "block %lld of a prefix that was looked at has other bytes",
			    (long long)i);
	reached[REACH_PEEKED] += n > 0;
	inside_must(n < 0 || kv_pool_peeked(u->pool, ids, words, (size_t)n) == (size_t)n,
		    "what was looked at has changed");
}

static void begin(struct user *u, struct kv_seq **seq, const struct action *a)
{
	uint32_t *salt = &u->salts[seq - u->seqs];
	size_t n = a->b % MAX_LEN + 1, hit = 0;
	int r;

	*salt = a->a & BEGIN_SALT ? 1 + (a->a >> 8 & 3) : 0;
	if (heard(u, kv_seq_new(u->pool, seq)))
		return;
	/* Rows beside its blocks. */
	if (*salt && heard(u, kv_seq_field(*seq, KV_TAG_SALT, salt, sizeof(*salt))))
		return;
	if (a->a & BEGIN_PROMISE) {
		heard(u, kv_seq_promise(*seq, prompt(a->a), n, KV_SEC, NULL));
		/* Nobody else works while it would wait. */
		r = heard(u, kv_seq_follow(*seq, prompt(a->a), n, 0, &hit));
		reached[REACH_PROMISED] += r == KV_PROMISED;
		if (!r)
			check_found(u, *seq, hit);
	}
	r = a->a & BEGIN_PARTIAL ? kv_seq_lookup_partial(*seq, prompt(a->a), n, &hit)
				 : kv_seq_lookup(*seq, prompt(a->a), n, &hit);
	if (!heard(u, r))
		check_found(u, *seq, hit);
	grow(u, *seq, a->a, n, 0);
}

static void publish(struct user *u, struct kv_seq *seq)
{
	const kv_block_id *ids;
	size_t n = kv_seq_blocks(seq, &ids);

	for (size_t i = 0; i < n; i++) {
		uint64_t word = kv_load_relaxed(&u->pool->descriptors[ids[i]].word);

		reached[REACH_TWIN] += kv_block_state(word) == KV_BLOCK_TWIN;
	}
	heard(u, kv_seq_publish(seq, NULL));
}

static void resume(struct user *u, struct kv_seq *seq, int64_t timeout)
{
	size_t n = kv_seq_preempted(seq), len;

	if (heard(u, kv_seq_resume(seq, n + 1, timeout, &len)))
		return;
	reached[REACH_RESUMED] += len > 0;
	check_found(u, seq, len);
	if (!heard(u, kv_seq_append(seq, kv_seq_tokens(seq) + len, n - len)))
		compute(u, seq, len);
}

/* What an operator may ask for. */
static void ask(struct user *u, const struct action *a)
{
	KV_OPTIONS(kv_pool_limits, limits, .change = KV_LIMIT_MAX,
		   .max_bytes = (a->b % 4 + 1) << 17);
	const char *name = is_honest(u) ? "b" : "a";
	uint64_t epoch;

	if (a->a & PING_COMPACT)
		reached[REACH_COMPACTED] += !heard(u, kv_pool_compact(u->client, name, 0, 0));
	else if (a->a & PING_EPOCH && !is_honest(u))
		reached[REACH_EPOCH] +=
			!heard(u, kv_pool_new_epoch(u->client, name, &epoch, NULL, 0));
	else if (a->a & PING_LIMITS && !is_honest(u))
		reached[REACH_LIMITS] += !heard(u, kv_pool_set(u->client, name, &limits, NULL, 0));
	else
		heard(u, kv_ping(u->client, 0));
}

static void fork_seq(struct user *u, struct kv_seq **from, struct kv_seq **other)
{
	struct kv_seq *seq = *from;

	if (*other == seq)
		return;
	u->salts[other - u->seqs] = u->salts[from - u->seqs];
	*other = kv_seq_free(*other, NULL);
	heard(u, kv_seq_fork(seq, other));
}

/* ---- words that change ---- */

static uint64_t value_of(const struct action *a)
{
	static const uint64_t values[] = {0,
					  1,
					  2,
					  63,
					  64,
					  127,
					  128,
					  4095,
					  4096,
					  65535,
					  65536,
					  INT32_MAX,
					  (uint64_t)INT32_MAX + 1,
					  UINT32_MAX,
					  (uint64_t)1 << 32,
					  INT64_MAX,
					  (uint64_t)1 << 63,
					  UINT64_MAX};

	return a->a % 2 ? a->b >> 16 : values[(a->b >> 16) % (sizeof(values) / sizeof(values[0]))];
}

static void write_blocks(struct kv_pool *pool, const struct action *a)
{
	uint32_t id = a->b % 150 % pool->head.id_limit, field = a->a >> 1;

	if (field % 12 == 10)
		((uint64_t *)kv_shm_row(pool->blocks, &pool->head, (int32_t)id))[field / 12 % 16] =
			value_of(a);
	else if (field % 12 == 11)
		kv_shm_promises(pool->blocks, &pool->head)[(a->b ^ field) % KV_PROMISES] = value_of(a);
	else if (field % 12 == 8)
		kv_shm_tokens(pool->blocks, &pool->head, (int32_t)id)[field % BLOCK_TOKENS] =
			(int32_t)value_of(a);
	else if (field % 12 == 9)
		((uint64_t *)pool->blocks)[field % 16] = value_of(a); /* struct kv_shm_blocks */
	else
		((uint64_t *)&pool->descriptors[id])[field % 8] = value_of(a);
}

/* The op that was posted last once more, with another word in it. */
static void post_another(struct kv_pool *pool, uint32_t word, uint32_t value)
{
	struct kv_op op = pool->ops[(pool->op_head - 1) & (pool->op_capacity - 1)];

	((uint32_t *)&op)[word] = value;
	op.kind = word || op.kind ? op.kind : KV_OP_GIVE;
	pool->ops[pool->op_head & (pool->op_capacity - 1)] = op;
	kv_store_release(&pool->session->ops.head, ++pool->op_head);
}

static void write_session(struct kv_pool *pool, const struct action *a)
{
	uint32_t i = a->a >> 1;

	switch (a->b % 8) {
	case 0:
		((uint32_t *)pool->grants)[i % pool->grant_capacity] = (uint32_t)value_of(a);
		break;
	case 1:
		((uint32_t *)&pool->ops[i / 16 % pool->op_capacity])[i % 16] =
			(uint32_t)value_of(a);
		break;
	case 2:
	case 3:
	case 4:
		post_another(pool, i % 8, (uint32_t)value_of(a));
		break;
	case 5:
		pool->session->ops.head += (uint32_t)value_of(a);
		break;
	default:
		((uint32_t *)pool->session)[i % (sizeof(*pool->session) / 4)] =
			(uint32_t)value_of(a);
	}
}

static void scribble(struct user *u, const struct action *a)
{
	if (is_honest(u))
		return;
	if (u == &users[0] && a->b & 8)
		write_session(u->pool, a);
	else
		write_blocks(u->pool, a);
}

/* ---- ends ---- */

static void leave(struct user *u)
{
	end_seqs(u);
	give(u);
	u->pool = kv_pool_close(u->pool);
}

/* Without a word: what it holds goes when its process has ended. */
static void die(struct user *u)
{
	uint64_t session = u->pool->session_number;

	kv_connection_close(&u->pool->connection);
	u->pool->connection.fd = -1;
	u->pool->connection.socket = NULL;
	u->pool->lost = true;
	end_seqs(u);
	u->pool = kv_pool_close(u->pool);
	inside_step();
	if (inside_peer_of(session))
		inside_ended(inside_peer_of(session));
}

static void act(struct user *u, const struct action *a)
{
	struct kv_seq **seq = &u->seqs[a->a % N_SEQS];
	size_t len = *seq ? kv_seq_len(*seq) : 0;
	uint32_t kind = a->kind % N_ACTIONS;

	if (is_reader(u) && kind < ACT_PING) {
		inside_must(kv_blocks_take(u->pool, 1, u->taken, 0) == -EACCES,
			    "who only reads may lease");
		peek(u, a);
		return;
	}
	switch (kind) {
	case ACT_TAKE:
		take(u, a->b % MAX_TAKEN, a->a % 4 * KV_MSEC);
		break;
	case ACT_GIVE:
		give(u);
		break;
	case ACT_BEGIN:
		*seq = kv_seq_free(*seq, NULL);
		begin(u, seq, a);
		break;
	case ACT_PUBLISH:
		if (*seq)
			publish(u, *seq);
		break;
	case ACT_GROW:
		if (*seq && kv_seq_preempted(*seq))
			resume(u, *seq, a->a % 4 * KV_MSEC);
		else if (*seq && len)
			grow(u, *seq, (uint32_t)kv_seq_tokens(*seq)[len - 1] / 1000,
			     len + a->b % 64, a->a % 4 * KV_MSEC);
		break;
	case ACT_FORK:
		if (*seq)
			fork_seq(u, seq, &u->seqs[a->b % N_SEQS]);
		break;
	case ACT_ROLLBACK:
		len = a->b % (len + 1);
		if (*seq)
			heard(u, kv_seq_rollback(*seq,
						 a->a & ROLLBACK_ANY
							 ? len
							 : len / BLOCK_TOKENS * BLOCK_TOKENS,
						 NULL));
		break;
	case ACT_END:
		if (*seq && a->a & END_PREEMPT)
			reached[REACH_PREEMPTED] += !heard(u, kv_seq_preempt(*seq, NULL));
		else
			*seq = kv_seq_free(*seq, NULL);
		break;
	case ACT_PING:
		ask(u, a);
		break;
	case ACT_LEAVE:
		leave(u);
		join(u);
		break;
	case ACT_DIE:
		die(u);
		join(u);
		break;
	case ACT_STEP:
		inside_step();
		break;
	case ACT_RESTART: /* who is not scribbled on goes on without noticing */
		inside_restart(NULL, 0);
		break;
	default:
		scribble(u, a);
	}
}

void fuzz_reached(FILE *f)
{
	static const char *const names[N_REACHES] = {
		"taken",  "hit",       "salted",  "partial", "copied", "twin",	    "promised",
		"peeked", "preempted", "resumed", "epoch",   "limits", "compacted", "lost"};

	for (int i = 0; i < N_REACHES; i++) {
		if (reached[i])
			fprintf(f, " %s", names[i]);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	KV_OPTIONS(kv_connect_options, how, .socket = "/", .name = "fuzz");
	struct action a;

	inside_start(size >= sizeof(a) && data[offsetof(struct action, user)] & PAGES_ISOLATE);
	memset(users, 0, sizeof(users));
	memset(reached, 0, sizeof(reached));
	for (struct user *u = users; u < users + N_CLIENTS; u++) {
		inside_must(!kv_connect(&how, &u->client), "%s", kv_error_text());
		join(u);
	}
	for (int n = 0; n < MAX_ACTIONS && size >= sizeof(a); n++) {
		memcpy(&a, data, sizeof(a));
		data += sizeof(a);
		size -= sizeof(a);
		a.user = a.user % PAGES_ISOLATE % N_CLIENTS;
		if (users[a.user].pool)
			act(&users[a.user], &a);
		else
			join(&users[a.user]);
		if (n % 16 == 0)
			inside_check("a");
	}
	for (struct user *u = users; u < users + N_CLIENTS; u++) {
		if (u->pool)
			leave(u);
		kv_disconnect(u->client);
	}
	inside_step();
	inside_check("a");
	inside_ended(INSIDE_ALL);
	inside_check("a");
	inside_is_quiet();
	inside_stop();
	return 0;
}
