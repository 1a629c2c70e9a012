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
	u->n_taken = n;
	u->mark = marks += 1000;
	for (uint32_t i = 0; is_honest(u) && i < n; i++)
		*bytes_of(u, u->taken[i]) = u->mark + i;
}

static const int32_t *prompt(uint32_t number)
{
	static int32_t tokens[MAX_LEN];

	for (int32_t i = 0; i < MAX_LEN; i++)
		tokens[i] = i < 64 ? i : (int32_t)(number % 8 * 1000) + i;
	return tokens;
}

/* What stands in a block of a sequence that has these tokens, and this salt. */
static uint32_t word_of(const struct user *u, const struct kv_seq *seq, size_t block)
{
	uint32_t salt = 0;

	for (int i = 0; i < N_SEQS; i++)
		salt = u->seqs[i] == seq ? u->salts[i] : salt;
	return (uint32_t)kv_seq_tokens(seq)[(block + 1) * BLOCK_TOKENS - 1] ^ salt << 24;
}

/* The bytes of a block follow from what its tokens are: what is found must be what was written. */
static void check_found(const struct user *u, const struct kv_seq *seq, size_t n)
{
	const kv_block_id *ids;

	kv_seq_blocks(seq, &ids);
	for (size_t i = 0; is_honest(u) && i < n / BLOCK_TOKENS; i++)
		inside_must(*bytes_of(u, ids[i]) == word_of(u, seq, i),
			    "block %zu of a prefix found has other bytes", i);
}

static void compute(const struct user *u, const struct kv_seq *seq, size_t from)
{
	const kv_block_id *ids;

	kv_seq_blocks(seq, &ids);
	for (size_t i = from / BLOCK_TOKENS; is_honest(u) && i < kv_seq_len(seq) / BLOCK_TOKENS;
	     i++)
		*bytes_of(u, ids[i]) = word_of(u, seq, i);
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
		inside_must(*bytes_of(u, ids[i]) ==
				    (uint32_t)tokens[(i + 1) * BLOCK_TOKENS - 1],
			    "block %lld of a prefix that was looked at has other bytes", (long long)i);
	inside_must(n < 0 || kv_pool_peeked(u->pool, ids, words, (size_t)n) == (size_t)n,
		    "what was looked at has changed");
}

static void begin(struct user *u, struct kv_seq **seq, const struct action *a)
{
	uint32_t *salt = &u->salts[seq - u->seqs];
	size_t n = a->b % MAX_LEN + 1, hit = 0;

	*salt = a->a & BEGIN_SALT ? 1 + (a->a >> 8 & 3) : 0;
	if (heard(u, kv_seq_new(u->pool, seq)))
		return;
	/* Rows beside its blocks. */
	if (*salt && heard(u, kv_seq_field(*seq, KV_TAG_SALT, salt, sizeof(*salt))))
		return;
	if (a->a & BEGIN_PROMISE) {
		heard(u, kv_seq_promise(*seq, prompt(a->a), n, KV_SEC, NULL));
		/* Nobody else works while it would wait. */
		if (!heard(u, kv_seq_follow(*seq, prompt(a->a), n, 0, &hit)))
			check_found(u, *seq, hit);
	}
	if (!heard(u, kv_seq_lookup(*seq, prompt(a->a), n, &hit)))
		check_found(u, *seq, hit);
	grow(u, *seq, a->a, n, 0);
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
			heard(u, kv_seq_publish(*seq, NULL));
		break;
	case ACT_GROW:
		if (*seq && len)
			grow(u, *seq, (uint32_t)kv_seq_tokens(*seq)[len - 1] / 1000,
			     len + a->b % 64, a->a % 4 * KV_MSEC);
		break;
	case ACT_FORK:
		if (*seq)
			fork_seq(u, seq, &u->seqs[a->b % N_SEQS]);
		break;
	case ACT_ROLLBACK:
		if (*seq)
			heard(u,
			      kv_seq_rollback(*seq, a->b % (len + 1) / BLOCK_TOKENS * BLOCK_TOKENS,
					      NULL));
		break;
	case ACT_END:
		*seq = kv_seq_free(*seq, NULL);
		break;
	case ACT_PING:
		heard(u, kv_ping(u->client, 0));
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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	KV_OPTIONS(kv_connect_options, how, .socket = "/", .name = "fuzz");
	struct action a;

	inside_start(size >= sizeof(a) && data[offsetof(struct action, user)] & PAGES_ISOLATE);
	memset(users, 0, sizeof(users));
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
