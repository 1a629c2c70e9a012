/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "tools/snapshot.h"

#define BAR_CELLS 10

void kv_snapshot_deinit(struct kv_snapshot *s)
{
	free(s->sessions);
	free(s->pools);
	free(s->gpus);
	free(s->daemon);
	*s = (struct kv_snapshot){0};
}

int kv_snapshot_take(struct kv_client *client, struct kv_snapshot *ret, int64_t timeout)
{
	struct kv_snapshot s = {0};
	size_t n_daemons;
	int r = kv_stats(client, KV_STAT_DAEMON, (void **)&s.daemon, &n_daemons, timeout);

	if (!r)
		r = kv_stats(client, KV_STAT_GPU, (void **)&s.gpus, &s.n_gpus, timeout);
	if (!r)
		r = kv_stats(client, KV_STAT_POOL, (void **)&s.pools, &s.n_pools, timeout);
	if (!r)
		r = kv_stats(client, KV_STAT_SESSION, (void **)&s.sessions, &s.n_sessions, timeout);
	if (r < 0)
		kv_snapshot_deinit(&s);
	else
		*ret = s;
	return r;
}

/* [leased cached free] in cells: "###+++...." Whatever is not nothing gets a cell. */
struct kv_words kv_words_bar(const struct kv_use *use)
{
	struct kv_words words;
	uint64_t part[] = {use->leased, use->cached, use->free};
	const char glyph[] = "#+.";
	uint64_t whole = part[0] + part[1] + part[2];
	unsigned cells[3] = {0}, n = 0, largest = 0;
	char *to = words.text;

	for (unsigned i = 0; i < 3 && whole; i++) {
		cells[i] = (unsigned)((double)part[i] / (double)whole * BAR_CELLS + 0.5);
		cells[i] += part[i] && !cells[i];
		n += cells[i];
		largest = cells[i] > cells[largest] ? i : largest;
	}
	cells[largest] += whole ? BAR_CELLS - n : 0; /* what rounding took or added */
	*to++ = '[';
	for (unsigned i = 0; i < 3; i++) {
		memset(to, glyph[i], cells[i]);
		to += cells[i];
	}
	*to++ = ']';
	*to = '\0';
	return words;
}

struct kv_use kv_snapshot_use(const struct kv_snapshot *s, const struct kv_gpu_stats *gpu)
{
	struct kv_use use = {.free = gpu->bytes_free + gpu->bytes_scrubbing};

	for (const struct kv_pool_stats *p = s->pools; p < s->pools + s->n_pools; p++) {
		if (gpu->index >= 64 || !(p->gpu_mask >> gpu->index & 1))
			continue;
		use.leased += p->blocks_leased * p->block_bytes;
		use.cached += p->blocks_cached * p->block_bytes;
		use.free += p->blocks_free * p->block_bytes;
	}
	return use;
}
