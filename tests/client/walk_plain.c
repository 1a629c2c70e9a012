/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The walk's sequences of one pool. What a token leaves in its block depends on epoch, salt and all tokens
 * up to it, so whatever is found wrongly is wrong in its bytes. What must be found: the blocks that a living
 * sequence holds and has had the daemon's answer for. What must be waited for: blocks that another
 * session has promised.
 */
#include <errno.h>
#include <string.h>

#include "tests/client/walk.h"

#define MOST_SEQS 10
#define TOKENS	  12 /* of a block */
#define ROW_BYTES 5120
#define MOST_BLOCKS (MOST_LEN / TOKENS)
#define MINUTE	  (60 * KV_SEC)
#define MARK	  0x504c4149u

struct own {
	struct kv_seq *seq;
	int who, salt;
	uint32_t prompt, epoch;
	int32_t tokens[MOST_LEN + 8];
	size_t sure; /* tokens that others must find while this one lives */
	bool partial; /* its last block was found for a part of it, and isn't copied yet */
	enum { NO, MAYBE, YES } promised[MOST_BLOCKS];
};

static struct kv_pool *pools[2];
static struct kv_view views[2];
static struct own owns[MOST_SEQS];
static uint32_t n_owns, epoch;

struct kv_pool *walk_pool_open(struct kv_client *client, const char *name, uint32_t block_tokens,
			       uint32_t row_bytes)
{
	struct kv_component k = {.role = KV_ROLE_K, .dtype = KV_F32, .n_heads = 1,
				 .head_dim = row_bytes / 4, .scale = 1};
	struct kv_layout layout = {.kind = KV_LAYOUT_FLAT, .block_tokens = block_tokens,
				   .n_components = 1, .components = &k};
	KV_OPTIONS(kv_pool_options, what, .name = name, .layout = &layout, .mapped = 1);
	struct kv_pool *pool;

	must(kv_pool_open(client, &what, &pool));
	return pool;
}

void walk_plain_open(void)
{
	for (int i = 0; i < 2; i++) {
		pools[i] = walk_pool_open(walk_models[i].client, "plain", TOKENS, ROW_BYTES);
		must(kv_pool_view(pools[i], 0, 0, &views[i]));
	}
}

void walk_plain_close(void)
{
	for (int i = 0; i < 2; i++)
		kv_pool_close(pools[i]);
}

static size_t in_common(const struct own *a, const struct own *b, size_t most);

/*
 * Its promises from block @first on end, and @own may end promises of other sequences of its session: a
 * word in the table says which session, not which sequence.
 */
static void withdraw(struct own *own, size_t first)
{
	for (size_t b = first; b < MOST_BLOCKS; b++)
		own->promised[b] = NO;
	for (uint32_t i = 0; i < n_owns; i++) {
		size_t n = &owns[i] == own || owns[i].who != own->who ?
				   0 : in_common(own, &owns[i], MOST_LEN) / TOKENS;

		for (size_t b = 0; b < n; b++) {
			if (owns[i].promised[b] == YES)
				owns[i].promised[b] = MAYBE;
		}
	}
}

static void publish(struct own *own)
{
	must(kv_seq_publish(own->seq, NULL));
	for (size_t b = 0; b < kv_seq_len(own->seq) / TOKENS; b++) {
		if (own->promised[b] == YES)
			own->promised[b] = MAYBE;
	}
	withdraw(own, MOST_BLOCKS);
}

static void end(uint32_t i)
{
	withdraw(&owns[i], 0);
	kv_seq_free(owns[i].seq, NULL);
	owns[i] = owns[--n_owns];
}

void walk_plain_end_one(void)
{
	if (n_owns)
		end(walk_pick(n_owns));
}

void walk_plain_end(void)
{
	while (n_owns)
		end(0);
}

struct kv_pool *walk_plain_pool(void)
{
	return pools[walk_pick(2)];
}

void walk_plain_new_epoch(void)
{
	epoch++;
}

static uint32_t *row_of(const struct own *own, size_t i)
{
	const kv_block_id *ids;

	kv_seq_blocks(own->seq, &ids);
	return (uint32_t *)(void *)((char *)views[own->who].base +
				    ids[i / TOKENS] * views[own->who].block_stride +
				    (int64_t)(i % TOKENS) * views[own->who].token_stride);
}

/* Goes over all tokens; those from @from on are written, the others compared. */
static void run(struct own *own, size_t from)
{
	uint32_t value = own->epoch * 7919 + (uint32_t)own->salt;

	for (size_t i = 0; i < kv_seq_len(own->seq); i++) {
		uint32_t *row = row_of(own, i);

		value = value * 31 + (uint32_t)own->tokens[i];
		if (i >= from) {
			expect(row[1] == 0 || row[1] == MARK,
			       "step %llu: a block of 'plain' has bytes of another pool (%#x)",
			       (unsigned long long)walk_step, row[1]);
			row[0] = value;
			row[1] = MARK;
		}
		expect(row[0] == value && row[1] == MARK,
		       "step %llu: token %zu of %zu has other bytes (%u of %zu were there)",
		       (unsigned long long)walk_step, i, kv_seq_len(own->seq), row[0] == value, from);
	}
}

/* Tokens that @a and @b have in common, if they could share anything. */
static size_t in_common(const struct own *a, const struct own *b, size_t most)
{
	size_t n = 0;

	if (a->salt != b->salt || a->epoch != b->epoch)
		return 0;
	while (n < most && a->tokens[n] == b->tokens[n])
		n++;
	return n / TOKENS * TOKENS;
}

/* What a lookup of the first @n tokens must find at least. */
static size_t must_find(const struct own *own, size_t n)
{
	size_t least = 0;

	for (uint32_t i = 0; i < n_owns; i++) {
		const struct own *other = &owns[i];
		size_t sure = other == own ? 0 : in_common(own, other, n - 1);

		sure = sure < other->sure ? sure : other->sure;
		least = sure > least ? sure : least;
	}
	return least;
}

/* Has a sequence of the other session promised the block after @len tokens? */
static int is_promised(const struct own *own, size_t len)
{
	int answer = NO;

	for (uint32_t i = 0; i < n_owns; i++) {
		const struct own *other = &owns[i];

		if (other->who != own->who && in_common(own, other, len + TOKENS) >= len + TOKENS &&
		    (int)other->promised[len / TOKENS] > answer)
			answer = (int)other->promised[len / TOKENS];
	}
	return answer;
}

/* A block may be on its way somewhere for a moment, and then a lookup misses it. */
static size_t found(struct own *own, size_t n)
{
	int (*look_up)(struct kv_seq *seq, const int32_t *tokens, size_t n, size_t *ret_hit) =
		walk_pick(2) ? kv_seq_lookup_partial : kv_seq_lookup;
	size_t least = must_find(own, n), hit;

	must(look_up(own->seq, own->tokens, n, &hit));
	for (int i = 0; hit < least && i < 3; i++) {
		must(kv_ping(walk_models[own->who].client, TIMEOUT));
		must(kv_seq_rollback(own->seq, 0, NULL));
		must(look_up(own->seq, own->tokens, n, &hit));
	}
	expect(look_up == kv_seq_lookup_partial || hit % TOKENS == 0, "%zu of %zu tokens are found", hit, n);
	walked.partial += hit % TOKENS;
	expect(hit >= least, "step %llu: %zu of %zu tokens are found, a living sequence holds %zu",
	       (unsigned long long)walk_step, hit, n, least);
	walked.sure += least > 0;
	return hit;
}

static size_t followed(struct own *own, size_t n)
{
	int64_t deadline = now_ns() + DEADLINE_MS * KV_MSEC;
	size_t hit;
	int r = kv_seq_follow(own->seq, own->tokens, n, 0, &hit);

	expect(r == 0 || r == KV_PROMISED, "follow: %d (%s)", r, kv_error_text());
	/* What was published and let go at once is promised a moment longer. */
	while (r == KV_PROMISED && is_promised(own, hit) == NO) {
		expect(now_ns() < deadline, "step %llu: a promise that nobody gives stands",
		       (unsigned long long)walk_step);
		r = kv_seq_follow(own->seq, own->tokens, n, 20 * KV_MSEC, &hit);
	}
	expect(r == KV_PROMISED || hit + TOKENS > n - 1 || is_promised(own, hit) != YES,
	       "step %llu: what another session has promised isn't waited for", (unsigned long long)walk_step);
	walked.followed += r == KV_PROMISED;
	return hit;
}

static void begin(void)
{
	struct own *own;
	size_t n = 1 + walk_pick(MOST_LEN), hit;

	if (n_owns == MOST_SEQS)
		end(walk_pick(n_owns));
	own = &owns[n_owns++];
	*own = (struct own){.who = (int)walk_pick(2), .salt = (int)walk_pick(3), .epoch = epoch};
	own->prompt = walk_pick(N_PROMPTS);
	/* Often what another one has, or computes. */
	if (n_owns > 1 && walk_pick(2)) {
		const struct own *other = &owns[walk_pick(n_owns - 1)];

		own->prompt = other->prompt;
		own->salt = other->salt;
	}
	must(kv_seq_new(pools[own->who], &own->seq));
	if (own->salt)
		must(kv_seq_field(own->seq, KV_TAG_SALT, own->salt == 1 ? "a" : "b", 1));
	walk_tokens(own->tokens, own->prompt);
	hit = walk_pick(2) ? found(own, n) : followed(own, n);
	expect(hit < n, "%zu of %zu tokens are found", hit, n);
	own->partial = hit % TOKENS;
	run(own, hit);
	walked.hits += hit;
	if (walk_pick(2)) {
		size_t promised;

		must(kv_seq_promise(own->seq, own->tokens, MOST_LEN, MINUTE, &promised));
		expect(promised >= hit / TOKENS * TOKENS, "%zu tokens promised, %zu are there", promised, hit);
		for (size_t b = hit / TOKENS; b < promised / TOKENS; b++)
			own->promised[b] = YES;
		walked.promised += promised > hit;
	}
}

static bool answered(int r, size_t n_tokens)
{
	expect(r == 0 || r == KV_NO_ROOM || r == KV_TOO_LARGE, "reserve: %d (%s)", r, kv_error_text());
	if (r == KV_TOO_LARGE) {
		expect(walk_too_large(WALK_PLAIN, (n_tokens + TOKENS - 1) / TOKENS),
		       "step %llu: %zu tokens fit, and are too many", (unsigned long long)walk_step,
		       n_tokens);
		walked.too_large++;
	}
	walked.refused += r == KV_NO_ROOM;
	return !r;
}

static void copy_noted(struct own *own)
{
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = 1, .max_tokens = 128, .max_blocks_per_seq = 32);
	struct kv_batch_item item = {own->seq, 1};
	struct kv_batch *batch;

	must(kv_batch_new(pools[own->who], &sizes, &batch));
	must(kv_batch_build(batch, &item, 1, 0, 0));
	must(kv_batch_copy(batch, NULL));
	kv_batch_free(batch);
}

static void resume(struct own *own)
{
	size_t n = kv_seq_preempted(own->seq), len;

	if (!answered(kv_seq_resume(own->seq, n, 0, &len), n)) {
		expect(kv_seq_preempted(own->seq) == n && !kv_seq_capacity(own->seq),
		       "what couldn't be resumed has changed");
		end(walk_pick(n_owns));
		return;
	}
	own->epoch = epoch;
	own->partial = false;
	expect(!memcmp(kv_seq_tokens(own->seq), own->tokens, n * sizeof(*own->tokens)),
	       "a preempted sequence has other tokens");
	must(kv_seq_append(own->seq, kv_seq_tokens(own->seq) + len, n - len));
	run(own, len);
	walked.resumed_tokens += len;
}

static void compute(uint32_t i)
{
	struct own *own = &owns[i];
	size_t len = kv_seq_len(own->seq), n = 1 + walk_pick(30);
	bool fell_back;
	int r;

	if (kv_seq_preempted(own->seq)) {
		resume(own);
		return;
	}
	if (len + n > MOST_LEN)
		n = MOST_LEN - len;
	if (!n) {
		end(i);
		return;
	}
	r = kv_seq_reserve(own->seq, len + n, walk_pick(50) ? 0 : KV_MSEC);
	/* What was found of a part of a block goes where there is no room. */
	fell_back = kv_seq_len(own->seq) != len;
	expect(!fell_back || (len % TOKENS && own->partial && kv_seq_len(own->seq) == len / TOKENS * TOKENS),
	       "reserve made %zu tokens of %zu", kv_seq_len(own->seq), len);
	walked.fell_back += fell_back;
	n += len - kv_seq_len(own->seq);
	len = kv_seq_len(own->seq);
	own->partial = own->partial && r && !fell_back;
	if (!answered(r, len + n)) {
		end(walk_pick(n_owns));
		return;
	}
	/* What it had promised was of its epoch. */
	if (!len && own->epoch != epoch) {
		withdraw(own, 0);
		own->epoch = epoch;
	}
	must(kv_seq_append(own->seq, own->tokens + len, n));
	copy_noted(own);
	run(own, len);
	if (walk_pick(3))
		publish(own);
}

/* Tokens of @own whose very blocks the other session finds. */
static size_t shown(const struct own *own)
{
	size_t len = kv_seq_len(own->seq), n = 0, hit;
	const kv_block_id *theirs, *ours;
	struct kv_seq *seq;

	must(kv_seq_new(pools[!own->who], &seq));
	if (own->salt)
		must(kv_seq_field(seq, KV_TAG_SALT, own->salt == 1 ? "a" : "b", 1));
	must(kv_seq_lookup(seq, own->tokens, len + 1, &hit));
	kv_seq_blocks(seq, &theirs);
	kv_seq_blocks(own->seq, &ours);
	while (n < hit / TOKENS && theirs[n] == ours[n])
		n++;
	kv_seq_free(seq, NULL);
	return own->epoch == epoch ? n * TOKENS : 0;
}

/*
 * Publishes, and knows what has come of it. Not all need be shown: where the same was cached already, and
 * evicted before this sequence could change over to it, its own blocks are shown at the next call.
 */
static void settle(struct own *own)
{
	publish(own);
	must(kv_ping(walk_models[own->who].client, TIMEOUT));
	must(kv_seq_publish(own->seq, NULL));
	own->sure = shown(own);
	walked.settled += kv_seq_len(own->seq) / TOKENS;
	walked.private += kv_seq_len(own->seq) / TOKENS - own->sure / TOKENS;
	run(own, kv_seq_len(own->seq));
}

static void fork_one(uint32_t i)
{
	struct own *child;

	if (n_owns == MOST_SEQS)
		return;
	child = &owns[n_owns++];
	*child = owns[i];
	must(kv_seq_fork(owns[i].seq, &child->seq));
	memset(child->promised, 0, sizeof(child->promised));
	for (size_t k = kv_seq_len(child->seq) + kv_seq_preempted(child->seq); k < MOST_LEN + 8; k++)
		child->tokens[k] += (int32_t)walk_pick(2);
	walked.forks++;
}

static void roll_back(struct own *own)
{
	size_t to = walk_pick((uint32_t)kv_seq_len(own->seq) + 1), whole = to / TOKENS * TOKENS;

	withdraw(own, to / TOKENS);
	own->partial = own->partial && to > kv_seq_len(own->seq) / TOKENS * TOKENS;
	must(kv_seq_rollback(own->seq, to, NULL));
	own->sure = own->sure < whole ? own->sure : whole;
	for (size_t k = to; k < MOST_LEN + 8; k++)
		own->tokens[k] += (int32_t)walk_pick(2);
	run(own, to);
	walked.rollbacks++;
}

static void preempt(struct own *own)
{
	walked.preempted += kv_seq_len(own->seq) > 0;
	withdraw(own, 0);
	must(kv_seq_preempt(own->seq, NULL));
	own->sure = 0;
	own->partial = false;
}

void walk_plain(void)
{
	uint32_t what = walk_pick(1000), i;

	if (!n_owns || what < 100) {
		begin();
		return;
	}
	i = walk_pick(n_owns);
	if (what < 700)
		compute(i);
	else if (what < 780)
		settle(&owns[i]);
	else if (what < 820)
		fork_one(i);
	else if (what < 900)
		roll_back(&owns[i]);
	else if (what < 930)
		preempt(&owns[i]);
	else
		end(i);
}
