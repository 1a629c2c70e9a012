/* SPDX-License-Identifier: Apache-2.0 */
/* What pools held and did in the last hours, in memory whose size is bounded: kvctl report plots it. */
#ifndef KV_DAEMON_HISTORY_H
#define KV_DAEMON_HISTORY_H

#include <stdint.h>

struct kv_daemon;
struct kv_history;

/* kv_history_new() - begins at once. Return: 0 or -ENOMEM. */
int kv_history_new(struct kv_daemon *d, struct kv_history **ret);
struct kv_history *kv_history_free(struct kv_history *history);

/* kv_history_count() - samples of pools that there still are */
uint32_t kv_history_count(const struct kv_daemon *d);

/* kv_history_items() - struct kv_history_stats from the @first on, oldest first. Return: how many. */
uint32_t kv_history_items(struct kv_daemon *d, uint32_t first, uint32_t n, void *items);

#endif
