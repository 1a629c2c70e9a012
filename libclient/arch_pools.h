/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From a config to pools, for whoever opens them: the library for its user, the daemon at its
 * start. Both come to the same names, layouts and identity, so that one finds what the other made.
 */
#ifndef KV_LIBCLIENT_ARCH_POOLS_H
#define KV_LIBCLIENT_ARCH_POOLS_H

#include <kvcached/plan.h>

struct kv_arch_pools {
	struct kv_plan *plan;
	char model[KV_NAME_MAX];	     /* the config's name, or its architecture */
	char revision[KV_ARCH_DIGEST_BYTES]; /* of the config: kv_arch_digest() */
};

/**
 * kv_arch_pools_read() - read a config and plan it
 * @options: KV_PLAN_AUTO is KV_PLAN_SPLIT, since what fits most depends on the budget, and all who
 *	     open the pools must come to the same. Without a budget sizes of pools mean nothing.
 *	     All of the struct is read: its size is the caller's to check.
 *
 * Return: 0; negative as kv_arch_read() and kv_plan_arch(); the text begins with the path.
 */
int kv_arch_pools_read(const char *path, const struct kv_plan_options *options,
		       struct kv_arch_pools *ret);

void kv_arch_pools_deinit(struct kv_arch_pools *pools);

#endif
