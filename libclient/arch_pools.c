/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/public.h"
#include "libclient/arch.h"
#include "libclient/arch_pools.h"

#define NO_BUDGET ((uint64_t)1 << 60) /* more than any device has */

static void free_arch(struct kv_arch **model)
{
	kv_arch_free(*model);
}

KV_PUBLIC int kv_arch_digest(const struct kv_arch *model, char ret_digest[KV_ARCH_DIGEST_BYTES])
{
	kv_cleanup(kv_freep) char *text = kv_arch_print(model);
	XXH128_hash_t hash;

	if (!text)
		return kv_error(-EINVAL, "name: '%s' can't be printed: no UTF-8, or no memory",
				model->name);
	hash = XXH3_128bits(text, strlen(text));
	snprintf(ret_digest, KV_ARCH_DIGEST_BYTES, "%016llx%016llx",
		 (unsigned long long)hash.high64, (unsigned long long)hash.low64);
	return 0;
}

int kv_arch_pools_read(const char *path, const struct kv_plan_options *options,
		       struct kv_arch_pools *ret)
{
	kv_cleanup(free_arch) struct kv_arch *model = NULL;
	struct kv_plan_options o = *options;
	struct kv_arch_pools pools = {0};
	int r;

	if (!o.layout)
		o.layout = KV_PLAN_SPLIT;
	if (!o.budget_bytes)
		o.budget_bytes = NO_BUDGET;
	r = kv_arch_read(path, &model);
	if (r)
		return r;
	r = kv_arch_digest(model, pools.revision);
	if (!r)
		r = kv_plan_arch(model, NULL, &o, &pools.plan);
	if (r)
		return kv_arch_named(r, path);
	snprintf(pools.model, sizeof(pools.model), "%s",
		 model->name[0] ? model->name : model->architecture);
	*ret = pools;
	return 0;
}

void kv_arch_pools_deinit(struct kv_arch_pools *pools)
{
	kv_plan_free(pools->plan);
	pools->plan = NULL;
}
