/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "alloc/worth.h"

#define AGE_LOG2 4
#define AGE_UNIT (1u << AGE_LOG2) /* block uses: younger than this is one age */
/* So many uses at the rate of all classes are added to those of a class at an age, and of all
 * classes at the rate RARE / age, at which hardly anything comes back. */
#define PRIOR_USES 16.0
#define RARE	   0.05

uint8_t kv_worth_class(uint32_t n_uses, bool went_on, uint64_t position)
{
	uint8_t uses = n_uses == 0 ? 0 : n_uses == 1 ? 1 : n_uses < 4 ? 2 : 3;
	uint8_t place = !went_on ? 0 : position < 1024 ? 1 : position < 12288 ? 2 : 3;

	return (uint8_t)(uses * 4 + place);
}

/*
 * 8 * log2(1 + age / AGE_UNIT), rounded down, without a logarithm: it is asked for often. *@ret_part:
 * how far into the bucket the age is, 0 to 1.
 */
static int bucket_of(uint64_t age, double *ret_part)
{
	/* 2^63 * 2^(i / 8) */
	static const uint64_t eighths[] = {0x8000000000000000, 0x8b95c1e3ea8bd6e8,
					   0x9837f0518db8a971, 0xa5fed6a9b15138eb,
					   0xb504f333f9de6485, 0xc5672a115506dadf,
					   0xd744fccad69d6af5, 0xeac0c6e7dd24392f,
					   UINT64_MAX};
	uint64_t x = age + AGE_UNIT, part;
	int whole = 63 - __builtin_clzll(x), i = 0, bucket;

	part = x << (63 - whole);
	for (int step = 4; step; step /= 2)
		i += part >= eighths[i + step] ? step : 0;
	bucket = i + 8 * (whole - AGE_LOG2);
	*ret_part = (double)(part - eighths[i]) / (double)(eighths[i + 1] - eighths[i]);
	return bucket < KV_WORTH_AGES ? bucket : KV_WORTH_AGES - 1;
}

/* The youngest age of a bucket. */
static double age_of(int bucket)
{
	return AGE_UNIT * (exp2(bucket / 8.0) - 1);
}

void kv_worth_used(struct kv_worth *w, uint8_t class, uint64_t age)
{
	double part;

	w->used[class][bucket_of(age, &part)] += 1;
}

void kv_worth_lived(struct kv_worth *w, uint8_t class, uint64_t age, double n, uint64_t time)
{
	double part;

	w->lived[class][bucket_of(age, &part)] += n * (double)time;
}

/* A stretch of ages, for who is alive at its beginning: uses, time, and who is left at its end. */
struct stretch {
	double uses, time, left;
};

static double rate_of(const struct stretch *s)
{
	return s->uses / s->time;
}

/*
 * @rates to indexes. From the oldest age to the youngest, stretches are joined as long as that makes
 * the rate of the whole larger: what is on top at the end is the best stretch from there on.
 */
static void index_of(const double *rates, const double *widths, double *index)
{
	struct stretch stack[KV_WORTH_AGES];
	int n = 0;

	for (int i = KV_WORTH_AGES - 1; i >= 0; i--) {
		double left = exp(-rates[i] * widths[i]);
		struct stretch s = {1 - left, (1 - left) / rates[i], left};

		while (n && rate_of(&stack[n - 1]) > rate_of(&s)) {
			const struct stretch *older = &stack[--n];

			s.uses += s.left * older->uses;
			s.time += s.left * older->time;
			s.left *= older->left;
		}
		stack[n++] = s;
		index[i] = rate_of(&s);
	}
}

/* Of an age and those beside it: what is used together is of one age, and few such uses are much noise. */
static double around(const double *sums, int i)
{
	static const double weights[] = {3, 2, 1};
	double sum = weights[0] * sums[i];

	for (int d = 1; d < 3; d++)
		sum += weights[d] * (sums[i - d > 0 ? i - d : 0] +
				     sums[i + d < KV_WORTH_AGES ? i + d : KV_WORTH_AGES - 1]);
	return sum / 9;
}

void kv_worth_learn(struct kv_worth *w, double keep)
{
	double rates[KV_WORTH_AGES], all[KV_WORTH_AGES], widths[KV_WORTH_AGES];

	for (int i = 0; i < KV_WORTH_AGES; i++) {
		double used = PRIOR_USES, lived = PRIOR_USES * (age_of(i) + AGE_UNIT) / RARE;

		for (int c = 0; c < KV_WORTH_CLASSES; c++) {
			used += around(w->used[c], i);
			lived += around(w->lived[c], i);
		}
		all[i] = used / lived;
		widths[i] = age_of(i + 1) - age_of(i);
	}
	for (int c = 0; c < KV_WORTH_CLASSES; c++) {
		double used = PRIOR_USES, expected = PRIOR_USES;

		for (int i = 0; i < KV_WORTH_AGES; i++) {
			used += w->used[c][i];
			expected += w->lived[c][i] * all[i];
		}
		for (int i = 0; i < KV_WORTH_AGES; i++) {
			double prior = all[i] * used / expected;

			rates[i] = (around(w->used[c], i) + PRIOR_USES) /
				   (around(w->lived[c], i) + PRIOR_USES / prior);
		}
		index_of(rates, widths, w->index[c]);
		for (int i = 0; i < KV_WORTH_AGES; i++) {
			w->used[c][i] *= keep;
			w->lived[c][i] *= keep;
		}
	}
	w->learned = 1;
}

uint64_t kv_worth_score(const struct kv_worth *w, uint8_t class, uint64_t age)
{
	double index = 1 / (1 + (double)age), part;
	uint64_t bits;

	if (w->learned > 0) {
		int i = bucket_of(age, &part), next = i + 1 < KV_WORTH_AGES ? i + 1 : i;

		index = w->index[class][i] + part * (w->index[class][next] - w->index[class][i]);
	}
	/* Positive doubles are ordered as their bits are. */
	memcpy(&bits, &index, sizeof(bits));
	return bits;
}
