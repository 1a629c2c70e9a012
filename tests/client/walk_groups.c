/* SPDX-License-Identifier: Apache-2.0 */
/* The walk's sequences of three groups. */
#include <errno.h>
#include <string.h>

#include "tests/client/walk.h"

#define MOST_SEQS 10

struct own {
	struct kv_gseq *seq;
	const struct model *model;
	int32_t tokens[MOST_LEN + 8];
	int salt;
};

static struct own owns[MOST_SEQS];
static uint32_t n_owns;

static void end(uint32_t i)
{
	kv_gseq_free(owns[i].seq, NULL);
	owns[i] = owns[--n_owns];
}

void walk_groups_end_one(void)
{
	if (n_owns)
		end(walk_pick(n_owns));
}

void walk_groups_end(void)
{
	while (n_owns)
		end(0);
}

static void begin(void)
{
	struct own *own;
	size_t hit, n;

	if (n_owns == MOST_SEQS)
		end(walk_pick(n_owns));
	own = &owns[n_owns++];
	own->model = &walk_models[walk_pick(2)];
	own->salt = (int)walk_pick(3);
	must(kv_gseq_new(own->model->groups, &own->seq));
	if (own->salt)
		must(kv_gseq_field(own->seq, KV_TAG_SALT, own->salt == 1 ? "a" : "b", 1));
	walk_tokens(own->tokens, walk_pick(N_PROMPTS));
	n = 1 + walk_pick(MOST_LEN);
	must(kv_gseq_lookup(own->seq, own->tokens, n, &hit));
	expect(hit < n && hit % INTERVAL == 0, "%zu of %zu tokens are found", hit, n);
	walked.hits += hit;
}

/* Return: whether there is room; if not, somebody makes some. */
static bool answered(int r, size_t n_tokens)
{
	uint64_t n = (n_tokens + SIZE - 1) / SIZE;

	expect(r == 0 || r == KV_NO_ROOM || r == KV_TOO_LARGE, "reserve: %d (%s)", r, kv_error_text());
	if (r == KV_TOO_LARGE) {
		expect(walk_too_large(WALK_FULL, n) || walk_too_large(WALK_WINDOW, n) ||
			       walk_too_large(WALK_STATE, 1 + N_DRAFTS),
		       "step %llu: %zu tokens fit, and are too many", (unsigned long long)walk_step,
		       n_tokens);
		walked.too_large++;
	}
	walked.refused += r == KV_NO_ROOM;
	return !r;
}

static void resume(uint32_t i)
{
	struct own *own = &owns[i];
	size_t n = kv_gseq_preempted(own->seq), len;

	if (!answered(kv_gseq_resume(own->seq, n + walk_pick(4), 0, &len), n + 3)) {
		expect(kv_gseq_preempted(own->seq) == n && !kv_gseq_len(own->seq),
		       "what couldn't be resumed has changed");
		end(walk_pick(n_owns));
		return;
	}
	expect(len < n && len % INTERVAL == 0 && kv_gseq_len(own->seq) == len,
	       "%zu of %zu tokens are there again", len, n);
	expect(!memcmp(kv_gseq_tokens(own->seq), own->tokens, n * sizeof(*own->tokens)),
	       "a preempted sequence has other tokens");
	walked.resumed_tokens += len;
}

/* A step; now and then one of drafts, of which some are rolled back. */
static void compute(uint32_t i)
{
	struct own *own = &owns[i];
	size_t len = kv_gseq_len(own->seq), n = 1 + walk_pick(walk_pick(2) ? 4 : 30), keep;

	if (kv_gseq_preempted(own->seq)) {
		resume(i);
		return;
	}
	if (len + n > MOST_LEN)
		n = MOST_LEN - len;
	if (!n) {
		end(i);
		return;
	}
	if (!answered(kv_gseq_reserve(own->seq, len + n, walk_pick(50) ? 0 : KV_MSEC), len + n)) {
		expect(kv_gseq_len(own->seq) == len, "reserve changed the length");
		end(walk_pick(n_owns));
		return;
	}
	must(kv_gseq_append(own->seq, own->tokens + len, n));
	model_copy(own->model, own->seq);
	expect(model_run(own->model, own->seq, own->tokens, n) ==
		       expected_output(own->tokens, len + n),
	       "step %llu: sequence %u is wrong after %zu + %zu tokens", (unsigned long long)walk_step,
	       i, len, n);
	keep = len + n;
	if (n > 1 && n <= 1 + N_DRAFTS && walk_pick(3) == 0) {
		keep = len + 1 + walk_pick((uint32_t)n);
		keep = keep > len + n ? len + n : keep;
		must(kv_gseq_rollback(own->seq, keep, NULL));
		for (size_t k = keep; k < MOST_LEN + 8; k++) /* what comes is something else */
			own->tokens[k] += 7;
	}
	if (walk_pick(4))
		must(kv_gseq_publish(own->seq, NULL));
	if (walk_pick(4))
		must(kv_gseq_done(own->seq, keep, NULL));
}

static void fork_one(uint32_t i)
{
	struct own *child;

	if (n_owns == MOST_SEQS)
		return;
	child = &owns[n_owns++];
	*child = owns[i];
	must(kv_gseq_fork(owns[i].seq, &child->seq));
	for (size_t k = kv_gseq_len(child->seq) + kv_gseq_preempted(child->seq); k < MOST_LEN + 8; k++)
		child->tokens[k] += (int32_t)walk_pick(2);
	walked.forks++;
}

static void roll_back(uint32_t i)
{
	struct own *own = &owns[i];
	size_t len = kv_gseq_len(own->seq), to = walk_pick((uint32_t)len + 1);
	int r = kv_gseq_rollback(own->seq, to, NULL);

	expect(r == 0 || r == -ENODATA, "rollback: %d (%s)", r, kv_error_text());
	expect(kv_gseq_len(own->seq) == (r ? len : to), "rollback: %zu tokens", kv_gseq_len(own->seq));
	walked.rollbacks += !r;
	walked.impossible += r != 0;
}

static void preempt(uint32_t i)
{
	size_t len = kv_gseq_len(owns[i].seq);

	must(kv_gseq_preempt(owns[i].seq, NULL));
	expect(!kv_gseq_len(owns[i].seq), "a preempted sequence has tokens");
	walked.preempted += len > 0;
}

void walk_groups(void)
{
	uint32_t what = walk_pick(1000), i;

	if (!n_owns || what < 60) {
		begin();
		return;
	}
	i = walk_pick(n_owns);
	if (what < 790)
		compute(i);
	else if (what < 830)
		fork_one(i);
	else if (what < 910)
		roll_back(i);
	else if (what < 935)
		preempt(i);
	else
		end(i);
}
