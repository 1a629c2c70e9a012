/* SPDX-License-Identifier: Apache-2.0 */
/* Where the layout of a pool that is opened comes from: its options, a plan, or a config. */
#ifndef KV_LIBCLIENT_POOL_SOURCE_H
#define KV_LIBCLIENT_POOL_SOURCE_H

#include <stdbool.h>

#include <kvcached/client.h>

#include "libclient/arch_pools.h"

/* What options are made to point to. */
struct kv_pool_source {
	struct kv_arch_pools config;
	struct kv_component *components;
	struct kv_layout layout;
	char name[KV_NAME_MAX];
	bool sized; /* the plan has a budget of somebody's choice */
};

/**
 * kv_pool_source_init() - replace plan and config in @o by the layout, name, size and identity they
 * mean
 *
 * Return: 0, *source is for kv_pool_source_deinit() whatever comes; negative as kv_pool_open().
 */
int kv_pool_source_init(struct kv_pool_source *source, struct kv_pool_options *o);

void kv_pool_source_deinit(struct kv_pool_source *source);

#endif
