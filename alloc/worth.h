/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What keeping a block is worth, learned from what happened to blocks like it.
 *
 * A block is in a class (how often it was used, whether a chain went on from it, where in its
 *prompt it stands). For each class two histograms over age, the time since the last use, say how
 *often such a block was used again at that age, and how often it was given up unused. Their worth
 *at age a is
 *
 *	max over t of  P(used again within t | unused so far) / E[time until then, at most t]
 *
 * the Gittins index of the question "keep it or not": hits to be had per time it occupies its
 *place. What was evicted is still watched for a while (alloc/ghost.h), so that a block which would
 *have been used again later counts as such. Counts fade, so that the classes follow the load;
 *without any, an older block is worth less, which is LRU.
 *
 * Sources: J. C. Gittins, Bandit Processes and Dynamic Allocation Indices, 1979; the idea of
 *ranking by hit density: N. Beckmann et al., LHD, NSDI 2018.
 */
#ifndef KV_ALLOC_WORTH_H
#define KV_ALLOC_WORTH_H

#include <stdbool.h>
#include <stdint.h>

#define KV_WORTH_CLASSES 16
#define KV_WORTH_AGES	 128 /* 8 to each doubling of age */

struct kv_worth {
	double used[KV_WORTH_CLASSES][KV_WORTH_AGES];
	double unused[KV_WORTH_CLASSES][KV_WORTH_AGES];
	double index[KV_WORTH_CLASSES][KV_WORTH_AGES];
	uint32_t n_events; /* since the indexes were worked out */
	bool learned;
};

/* kv_worth_class() - @position in tokens from the beginning of its prompt */
uint8_t kv_worth_class(uint32_t n_uses, bool went_on, uint64_t position);

void kv_worth_used(struct kv_worth *worth, uint8_t class, uint64_t age);
void kv_worth_unused(struct kv_worth *worth, uint8_t class, uint64_t age);

/* kv_worth_score() - larger is worth more; comparable between classes and ages */
uint64_t kv_worth_score(const struct kv_worth *worth, uint8_t class, uint64_t age);

#endif
