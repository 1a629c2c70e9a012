/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "alloc/worth.h"

#define AGE_LOG2   4
#define AGE_UNIT   (1u << AGE_LOG2) /* block uses: younger than this is one age */
#define LEARN_EACH 2048
#define FADE	   0.98
/* Of the first event of a class not much is to be believed: so much time without a use is added. */
#define PRIOR_EVENTS 2.0
#define PRIOR_USES   0.02

uint8_t kv_worth_class(uint32_t n_uses, bool went_on, uint64_t position)
{
	uint8_t uses = n_uses == 0 ? 0 : n_uses == 1 ? 1 : n_uses < 4 ? 2 : 3;
	uint8_t place = !went_on ? 0 : position < 1024 ? 1 : position < 12288 ? 2 : 3;

	return (uint8_t)(uses * 4 + place);
}

/* 8 * log2(1 + age / AGE_UNIT), rounded down, without a logarithm: it is asked for often. */
static int bucket_of(uint64_t age)
{
	/* 2^63 * 2^(i / 8) */
	static const uint64_t eighths[] = {0x8000000000000000, 0x8b95c1e3ea8bd6e8, 0x9837f0518db8a971,
					   0xa5fed6a9b15138eb, 0xb504f333f9de6485, 0xc5672a115506dadf,
					   0xd744fccad69d6af5, 0xeac0c6e7dd24392f};
	uint64_t x = age + AGE_UNIT, part;
	int whole = 63 - __builtin_clzll(x), i = 0;

	part = x << (63 - whole);
	for (int step = 4; step; step /= 2)
		i += part >= eighths[i + step] ? step : 0;
	i += 8 * (whole - AGE_LOG2);
	return i < KV_WORTH_AGES ? i : KV_WORTH_AGES - 1;
}

/* The youngest age of a bucket. */
static double age_of(int bucket)
{
	return AGE_UNIT * (exp2(bucket / 8.0) - 1);
}

static void learn_class(struct kv_worth *w, int c)
{
	const double *used = w->used[c], *unused = w->unused[c];
	double reached[KV_WORTH_AGES + 1]; /* how many came to be that old */

	reached[KV_WORTH_AGES] = 0;
	for (int i = KV_WORTH_AGES - 1; i >= 0; i--)
		reached[i] = reached[i + 1] + used[i] + unused[i];
	for (int i = 0; i < KV_WORTH_AGES; i++) {
		double best = 0, uses = PRIOR_USES, time = 0;

		for (int t = i; t < KV_WORTH_AGES && reached[t] > 1; t++) {
			double width = age_of(t + 1) - age_of(t);
			double rate;

			time += width * (reached[t] - 0.5 * (used[t] + unused[t]));
			uses += used[t];
			rate = uses / (time + PRIOR_EVENTS * width);
			best = rate > best ? rate : best;
		}
		/* Nothing known of so old a block: it goes before all of which something is. */
		w->index[c][i] = best > 0 ? best : 1e-9 / (1 + age_of(i));
	}
	for (int i = 0; i < KV_WORTH_AGES; i++) {
		w->used[c][i] *= FADE;
		w->unused[c][i] *= FADE;
	}
}

static void count(struct kv_worth *w, double *cell)
{
	*cell += 1;
	if (++w->n_events < LEARN_EACH)
		return;
	w->n_events = 0;
	w->learned = true;
	for (int c = 0; c < KV_WORTH_CLASSES; c++)
		learn_class(w, c);
}

void kv_worth_used(struct kv_worth *w, uint8_t class, uint64_t age)
{
	count(w, &w->used[class][bucket_of(age)]);
}

void kv_worth_unused(struct kv_worth *w, uint8_t class, uint64_t age)
{
	count(w, &w->unused[class][bucket_of(age)]);
}

uint64_t kv_worth_score(const struct kv_worth *w, uint8_t class, uint64_t age)
{
	double index = w->learned ? w->index[class][bucket_of(age)] : 1 / (1 + (double)age);
	uint64_t bits;

	/* Positive doubles are ordered as their bits are. */
	memcpy(&bits, &index, sizeof(bits));
	return bits;
}
