/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What keeping a block is worth, learned from what happened to blocks like it.
 *
 * A block is in a class (how often it was used, whether a chain went on from it, where in its prompt
 * it stands). For each class and age, the time since the last use, two sums are kept: how often such
 * a block was used again, and for how long blocks were of that class and age, found by counting those
 * that are (alloc/census.c). Their quotient is the rate at which such blocks are used. What was evicted
 * is still watched for a while (alloc/ghost.h), and counts in both. The worth of a block of age a is
 *
 *	max over t of  P(used again within t | unused so far) / E[time until then, at most t]
 *
 * the Gittins index of the question "keep it or not": hits to be had per time it occupies its
 * place. Sums fade, so that the classes follow the load. Where little is known of a class, all
 * classes of that age speak for it, and where little is known of an age, that an older block is worth
 * less, which is LRU.
 *
 * Sources: J. C. Gittins, Bandit Processes and Dynamic Allocation Indices, 1979; the idea of ranking
 * by hit density: N. Beckmann et al., LHD, NSDI 2018; rates from occurrences and time at risk: the
 * usual estimator of a hazard from censored observations.
 */
#ifndef KV_ALLOC_WORTH_H
#define KV_ALLOC_WORTH_H

#include <stdbool.h>
#include <stdint.h>

#define KV_WORTH_CLASSES 16
#define KV_WORTH_AGES	 128 /* 8 to each doubling of age */

struct kv_worth {
	double used[KV_WORTH_CLASSES][KV_WORTH_AGES];
	double lived[KV_WORTH_CLASSES][KV_WORTH_AGES]; /* block times uses of the pool */
	double index[KV_WORTH_CLASSES][KV_WORTH_AGES]; /* at the youngest age of each */
	double learned;				       /* not 0: there are indexes */
};

/* kv_worth_class() - @position in tokens from the beginning of its prompt */
uint8_t kv_worth_class(uint32_t n_uses, bool went_on, uint64_t position);

void kv_worth_used(struct kv_worth *worth, uint8_t class, uint64_t age);

/* kv_worth_lived() - @n blocks of an age have stood there unused for @time uses of the pool */
void kv_worth_lived(struct kv_worth *worth, uint8_t class, uint64_t age, double n, uint64_t time);

/* kv_worth_learn() - works out the indexes; what was counted fades by @keep, 0 to 1 */
void kv_worth_learn(struct kv_worth *worth, double keep);

/* kv_worth_score() - larger is worth more; comparable between classes and ages */
uint64_t kv_worth_score(const struct kv_worth *worth, uint8_t class, uint64_t age);

#endif
