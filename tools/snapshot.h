/* SPDX-License-Identifier: Apache-2.0 */
/* All that the daemon says of itself at about one time. */
#ifndef KV_TOOLS_SNAPSHOT_H
#define KV_TOOLS_SNAPSHOT_H

#include <kvcached/stats.h>

#include "tools/emit.h"

struct kv_snapshot {
	struct kv_daemon_stats *daemon;
	struct kv_gpu_stats *gpus;
	struct kv_pool_stats *pools;
	struct kv_session_stats *sessions;
	size_t n_gpus, n_pools, n_sessions;
};

/* What a device's memory is used for. The rest of the arena is null blocks, quarantine and tails. */
struct kv_use {
	uint64_t leased, cached, free;
};

/* kv_snapshot_take() - 0; negative as kv_stats(), and then nothing has to be freed */
int kv_snapshot_take(struct kv_client *client, struct kv_snapshot *ret, int64_t timeout);
void kv_snapshot_deinit(struct kv_snapshot *s);

struct kv_use kv_snapshot_use(const struct kv_snapshot *s, const struct kv_gpu_stats *gpu);
struct kv_words kv_words_bar(const struct kv_use *use); /* "[###+++....]" */

#endif
