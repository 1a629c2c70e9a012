/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls of group sequences in any order, also in those that no engine has: reserved before they are looked up, looked
 * up in parts, appended without a reservation, rolled back, forked and preempted at any length. Three processes do so
 * in pools that are too small for them. After each call all groups have as many tokens as a plain model says, and
 * those; what was computed has its bytes (bytes.h).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/client/bytes.h"
#include "tests/support/process.h"

#define MAX_LEN	  96
#define MOST_SEQS 6
#define MOST	  3 /* groups */
#define STEPS	  4000
#define OTHERS	  2
#define ROOM	  600 /* tokens in each pool */

static const struct shape {
	struct kv_group groups[MOST];
	uint32_t block_tokens[MOST];
	uint32_t n;
} shapes[] = {
	{{{.kind = KV_GROUP_FULL}}, {16}, 1},
	{{{.kind = KV_GROUP_FULL}, {.kind = KV_GROUP_WINDOW, .window = 24}}, {16, 16}, 2},
	{{{.kind = KV_GROUP_FULL}, {.kind = KV_GROUP_WINDOW, .window = 13}}, {16, 4}, 2},
	{{{.kind = KV_GROUP_WINDOW, .window = 9}, {.kind = KV_GROUP_CHUNKED, .window = 20}}, {4, 16}, 2},
	{{{.kind = KV_GROUP_WINDOW, .window = 20}, {.kind = KV_GROUP_WINDOW, .window = 40}, {.kind = KV_GROUP_FULL}},
	 {16, 8, 4}, 3},
};
#define N_SHAPES (int)(sizeof(shapes) / sizeof(shapes[0]))

struct own {
	struct kv_gseq *seq;
	int32_t tokens[MAX_LEN + 1];
	size_t len, preempted;
	size_t whole;  /* of a lookup: whole units that it found */
	bool partial;  /* the tokens behind them may be let go yet */
};

static const struct shape *shape;
static struct kv_client *client;
static struct kv_pool *pools[MOST];
static struct kv_batch *batches[MOST];
static struct kv_groups *groups;
static struct own owns[MOST_SEQS];
static uint32_t n_owns;
static uint64_t state;
static int step;

static uint32_t pick(uint32_t n)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (uint32_t)(state >> 16) % n;
}

static void attach(void)
{
	struct kv_group own[MOST];
	KV_OPTIONS(kv_groups_options, what, .groups = own, .n_groups = shape->n);
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = 1, .max_tokens = MAX_LEN, .max_blocks_per_seq = MAX_LEN);

	client = client_new();
	memcpy(own, shape->groups, sizeof(own));
	for (uint32_t g = 0; g < shape->n; g++) {
		pools[g] = bytes_pool(client, (const char[]){'p', (char)('0' + g), 0}, shape->block_tokens[g],
				      ROOM / shape->block_tokens[g]);
		must(kv_batch_new(pools[g], &sizes, &batches[g]));
		own[g].pool = pools[g];
	}
	must(kv_groups_new(&what, &groups));
}

static void detach(void)
{
	kv_groups_free(groups);
	for (uint32_t g = 0; g < shape->n; g++) {
		kv_batch_free(batches[g]);
		kv_pool_close(pools[g]);
	}
	kv_disconnect(client);
}

/* ---- what must be true after each call ---- */

static size_t seen_first(const struct kv_group *group, size_t len)
{
	if (group->kind == KV_GROUP_CHUNKED)
		return len / group->window * group->window;
	return group->kind == KV_GROUP_WINDOW && len >= group->window ? len - group->window + 1 : 0;
}

static void is_as_told(const struct own *own, const char *what)
{
	size_t len = kv_gseq_len(own->seq);

	expect(len == own->len, "step %d, %s: %zu tokens, not %zu", step, what, len, own->len);
	expect(kv_gseq_preempted(own->seq) == own->preempted, "step %d, %s: %zu preempted, not %zu", step, what,
	       kv_gseq_preempted(own->seq), own->preempted);
	for (uint32_t g = 0; g < shape->n; g++) {
		const struct kv_seq *part = kv_gseq_seq(own->seq, g);
		size_t size = shape->block_tokens[g], n;
		const kv_block_id *ids;
		struct kv_pool_info info;

		n = kv_seq_blocks(part, &ids);
		kv_pool_info(pools[g], &info);
		expect(kv_seq_len(part) == len && n * size >= len, "step %d, %s: group %u has %zu tokens, %zu blocks",
		       step, what, g, kv_seq_len(part), n);
		expect(!len || !memcmp(kv_seq_tokens(part), own->tokens, len * sizeof(*own->tokens)),
		       "step %d, %s: group %u has other tokens", step, what, g);
		for (size_t i = seen_first(&shape->groups[g], len); i < len; i++)
			expect(ids[i / size] != info.null_block, "step %d, %s: group %u has no block for token %zu",
			       step, what, g, i);
	}
}

static void has_its_bytes(const struct own *own, const char *what)
{
	for (uint32_t g = 0; g < shape->n; g++)
		bytes_right(pools[g], kv_gseq_seq(own->seq, g), what, step);
}

/* ---- calls ---- */

static void end(uint32_t i)
{
	kv_gseq_free(owns[i].seq, NULL);
	owns[i] = owns[--n_owns];
}

/* Prompts share beginnings of any length. */
static void begin(void)
{
	uint32_t prompt = pick(3), at = pick(MAX_LEN), branch = pick(4) * 1000;
	struct own *own;

	if (n_owns == MOST_SEQS)
		end(pick(n_owns));
	own = &owns[n_owns++];
	*own = (struct own){0};
	for (uint32_t i = 0; i <= MAX_LEN; i++)
		own->tokens[i] = (int32_t)(prompt * 10000 + i + (i < at ? 0 : branch));
	must(kv_gseq_new(groups, &own->seq));
}

static void look_up(struct own *own)
{
	size_t unit = kv_groups_unit(groups), n = own->len + pick(MAX_LEN - (uint32_t)own->len + 1), hit;
	uint32_t how = pick(3);
	int r = how == 0 ? kv_gseq_lookup(own->seq, own->tokens, n, &hit) :
		how == 1 ? kv_gseq_lookup_partial(own->seq, own->tokens, n, &hit) :
			   kv_gseq_follow(own->seq, own->tokens, n, pick(2) ? 0 : KV_MSEC, &hit);

	if (own->len % unit) {
		ck_assert_int_eq(r, -EINVAL);
		return;
	}
	expect(r == 0 || (r == KV_PROMISED && how == 2), "step %d: lookup: %d (%s)", step, r, kv_error_text());
	expect(hit >= own->len && (hit == own->len || hit < n) && (how == 1 || hit % unit == 0),
	       "step %d: %zu tokens, then %zu of %zu are found", step, own->len, hit, n);
	if (hit > own->len) {
		own->whole = hit / unit * unit;
		own->partial = hit % unit;
	}
	own->len = hit;
	own->preempted = kv_gseq_preempted(own->seq); /* a search that found nothing may end that, too */
	is_as_told(own, "looked up");
}

/* True: there is room. */
static bool reserve(struct own *own, size_t n)
{
	int r = kv_gseq_reserve(own->seq, n, pick(8) ? 0 : KV_MSEC * (1 + pick(15)));
	size_t len = kv_gseq_len(own->seq);

	expect(r == 0 || r == KV_NO_ROOM, "step %d: reserve: %d (%s)", step, r, kv_error_text());
	if (len != own->len) {
		expect(own->partial && len == own->whole, "step %d: reserve makes %zu tokens %zu", step, own->len, len);
		own->len = len;
		own->partial = false;
	}
	if (!r && n > len)
		own->partial = false;
	is_as_told(own, "reserved");
	if (r && pick(2))
		end(pick(n_owns));
	return !r;
}

static void compute(struct own *own)
{
	uint32_t n = 1 + pick(pick(2) ? 3 : 30);
	int r;

	if (own->len + n > MAX_LEN || (pick(3) && !reserve(own, own->len + n)))
		return;
	if (own->len + n > MAX_LEN)
		return;
	r = kv_gseq_append(own->seq, own->tokens + own->len, n);
	if (r == -ENOSPC || r == -EPERM) {
		is_as_told(own, "refused");
		return;
	}
	must(r);
	own->len += n;
	own->partial = false;
	own->preempted = 0;
	for (uint32_t g = 0; g < shape->n; g++)
		bytes_step(pools[g], batches[g], &(struct kv_batch_item){kv_gseq_seq(own->seq, g), n}, 1);
	is_as_told(own, "computed");
	has_its_bytes(own, "computed");
}

static void roll_back(struct own *own)
{
	size_t to = pick((uint32_t)own->len + 1), unit = kv_groups_unit(groups);
	int r = kv_gseq_rollback(own->seq, to, NULL);

	expect(!r || r == -ENODATA, "step %d: rollback: %d (%s)", step, r, kv_error_text());
	if (!r) {
		own->len = to;
		own->preempted = 0;
		if (to <= own->whole) {
			own->whole = to / unit * unit;
			own->partial = false;
		}
		for (size_t i = to; i <= MAX_LEN; i++)
			own->tokens[i] += (int32_t)pick(2);
	}
	is_as_told(own, "rolled back");
}

static void fork_one(const struct own *own)
{
	struct own *child = &owns[n_owns];

	if (n_owns == MOST_SEQS)
		return;
	*child = *own;
	must(kv_gseq_fork(own->seq, &child->seq));
	n_owns++;
	for (size_t i = child->len + child->preempted; i <= MAX_LEN; i++)
		child->tokens[i] += (int32_t)pick(2);
	is_as_told(child, "forked");
}

static void preempt(struct own *own)
{
	must(kv_gseq_preempt(own->seq, NULL));
	own->preempted = own->len ? own->len : own->preempted;
	own->len = own->whole = 0;
	own->partial = false;
	is_as_told(own, "preempted");
}

static void resume(struct own *own)
{
	size_t len;
	int r = kv_gseq_resume(own->seq, own->preempted + pick(4), pick(2) ? 0 : KV_MSEC, &len);

	if (!own->preempted) {
		ck_assert_int_eq(r, -EINVAL);
		return;
	}
	expect(r == 0 || r == KV_NO_ROOM, "step %d: resume: %d (%s)", step, r, kv_error_text());
	if (!r) {
		expect(len < own->preempted, "step %d: %zu of %zu tokens are there again", step, len, own->preempted);
		own->len = own->whole = len;
		own->preempted = 0;
		own->partial = false;
	}
	is_as_told(own, "resumed");
	if (r && pick(2))
		end(pick(n_owns));
}

/* Blocks that no later token sees have left windows, wherever they came from. */
static void done(const struct own *own)
{
	size_t n = pick((uint32_t)own->len + 1);

	must(kv_gseq_done(own->seq, n, NULL));
	is_as_told(own, "done");
	for (uint32_t g = 0; g < shape->n; g++) {
		const kv_block_id *ids;
		struct kv_pool_info info;

		kv_seq_blocks(kv_gseq_seq(own->seq, g), &ids);
		kv_pool_info(pools[g], &info);
		for (size_t i = 0; i < seen_first(&shape->groups[g], n) / shape->block_tokens[g]; i++)
			expect(ids[i] == info.null_block, "step %d: group %u keeps block %zu after %zu tokens", step, g,
			       i, n);
	}
}

static void one_call(void)
{
	uint32_t what = pick(100);
	struct own *own;

	if (!n_owns || what < 8) {
		begin();
		return;
	}
	own = &owns[pick(n_owns)];
	if (what < 32)
		look_up(own);
	else if (what < 45)
		reserve(own, pick(3) ? own->len + 1 + pick(40) : pick((uint32_t)own->len + 2));
	else if (what < 70)
		compute(own);
	else if (what < 76)
		roll_back(own);
	else if (what < 80)
		fork_one(own);
	else if (what < 86)
		must(kv_gseq_publish(own->seq, NULL));
	else if (what < 89)
		preempt(own);
	else if (what < 92)
		resume(own);
	else if (what < 94)
		must(kv_gseq_promise(own->seq, own->tokens, own->len + pick(MAX_LEN - (uint32_t)own->len + 1),
				     KV_MSEC * pick(30), NULL));
	else if (what < 97)
		done(own);
	else
		end(pick(n_owns));
}

static void walk(uint64_t seed)
{
	state = (seed + 1) * 0x9e3779b97f4a7c15ull;
	attach();
	for (step = 0; step < STEPS; step++)
		one_call();
	while (n_owns)
		end(0);
	detach();
}

static void other(struct process *self, void *arg)
{
	(void)self;
	walk(*(const uint64_t *)arg);
}

START_TEST(whatever_is_called_when_tokens_and_bytes_are_those_that_were_given)
{
	uint64_t seeds[OTHERS];
	struct process *others[OTHERS];

	shape = &shapes[_i];
	daemon_start("--host", "32M");
	for (int k = 0; k < OTHERS; k++) {
		seeds[k] = (uint64_t)_i * 10 + 1 + (uint64_t)k;
		others[k] = process_start(other, &seeds[k]);
	}
	walk((uint64_t)_i * 10);
	for (int k = 0; k < OTHERS; k++)
		process_end(others[k]);
	client = client_new();
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/orders");
	TCase *tcase = tcase_create("orders");

	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, whatever_is_called_when_tokens_and_bytes_are_those_that_were_given, 0, N_SHAPES);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
