/* SPDX-License-Identifier: Apache-2.0 */
/* kvcached --pool: pools that are there before the first client. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/plan.h"
#include "daemon/daemon.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"
#include "libclient/arch_pools.h"

#define SCRUB_WAIT (60 * KV_SEC)
#define LOOK_AGAIN (2 * KV_MSEC)
#define MAX_POOLS  64 /* of one model */

/* What one --pool says. */
struct kv_wish {
	struct kv_link link; /* *kv_config::wishes */
	char name[KV_NAME_MAX], model[KV_NAME_MAX], revision[KV_NAME_MAX];
	struct kv_plan_options options;
	uint64_t min_bytes, max_bytes; /* of all pools of the model */
	uint32_t weight; /* 0: none given */
	uint32_t gpu_mask;
	struct kv_msg_pool_open *messages[MAX_POOLS]; /* owned; as a client would send them */
	uint32_t n_messages;
	char config[];
};

/* @r, with "@what@name: " in front of its text. */
static int blame(int r, const char *what, const char *name)
{
	char why[KV_ERROR_BYTES];

	snprintf(why, sizeof(why), "%s", kv_error_text());
	return kv_error(r, "%s%s: %s", what, name, why);
}

static void free_wish(struct kv_wish **wish)
{
	struct kv_wish *w = *wish;

	if (!w)
		return;
	for (uint32_t i = 0; i < w->n_messages; i++)
		free(w->messages[i]);
	kv_link_unlink(&w->link);
	free(w);
}

static int take_text(const char *key, const char *value, char to[KV_NAME_MAX])
{
	if (!*value || strlen(value) >= KV_NAME_MAX)
		return kv_error(-EINVAL, "%s: '%s' given; 1..%d bytes are needed", key, value,
				KV_NAME_MAX - 1);
	strcpy(to, value);
	return 0;
}

/* "0+1" */
static int take_gpus(const char *value, uint32_t *ret_mask)
{
	const char *p = value;

	*ret_mask = 0;
	for (;; p++) {
		char *end;
		unsigned long n = strtoul(p, &end, 10);

		if (!isdigit((unsigned char)*p) || (*end && *end != '+') || n >= KV_MAX_GPUS)
			return kv_error(-EINVAL, "gpus: '%s' given; numbers like 0+1 are needed, "
					"counted as --gpus lists them", value);
		*ret_mask |= 1u << n;
		p = end;
		if (!*end)
			return 0;
	}
}

static int take_weight(const char *value, uint32_t *ret)
{
	char *end;
	unsigned long n = strtoul(value, &end, 10);

	if (!isdigit((unsigned char)*value) || *end || !n || n > KV_WEIGHT_MAX)
		return kv_error(-EINVAL, "weight: '%s' given, 1 to %u are possible", value, KV_WEIGHT_MAX);
	*ret = (uint32_t)n;
	return 0;
}

static int take_item(struct kv_wish *w, char *item)
{
	char *value = strchr(item, '=');
	int r;

	if (!value)
		return kv_error(-EINVAL, "'%s' is not of the form KEY=VALUE", item);
	*value++ = 0;
	if (!strcmp(item, "min"))
		return kv_size_parse("min", value, &w->min_bytes);
	if (!strcmp(item, "max"))
		return kv_size_parse("max", value, &w->max_bytes);
	if (!strcmp(item, "weight"))
		return take_weight(value, &w->weight);
	if (!strcmp(item, "model"))
		return take_text("model", value, w->model);
	if (!strcmp(item, "revision"))
		return take_text("revision", value, w->revision);
	if (!strcmp(item, "gpus"))
		return take_gpus(value, &w->gpu_mask);
	r = kv_plan_option(&w->options, item, value);
	return r == -ENOENT ? kv_error(-EINVAL, "'%s' is no key; see kvcached(8)", item) : r;
}

int kv_wish_add(struct kv_link *wishes, const char *text)
{
	kv_cleanup(free_wish) struct kv_wish *w = calloc(1, sizeof(*w) + strlen(text) + 1);
	const char *path = strchr(text, '=');
	char *rest, *item;
	int r = 0;

	if (!w)
		return kv_error(-ENOMEM, "--pool: no memory");
	kv_link_init(&w->link);
	w->gpu_mask = 1;
	w->options.size = sizeof(w->options);
	if (!path || path == text || !path[1] || path[1] == ',')
		return kv_error(-EINVAL, "--pool: '%s' given; NAME=CONFIG[,KEY=VALUE...] is needed",
				text);
	strcpy(w->config, path + 1);
	snprintf(w->name, sizeof(w->name), "%.*s", (int)(path - text), text);
	if (path - text >= KV_NAME_MAX)
		r = kv_error(-EINVAL, "the name has more than %d bytes", KV_NAME_MAX - 1);
	strtok_r(w->config, ",", &rest);
	while (!r && (item = strtok_r(NULL, ",", &rest)))
		r = take_item(w, item);
	if (!r && w->max_bytes && w->min_bytes > w->max_bytes)
		r = kv_error(-EINVAL, "min: more than max");
	if (r)
		return blame(r, "--pool ", w->name);
	kv_list_append(wishes, &kv_steal(w)->link);
	return 0;
}

/* What a client that opens this pool of the plan with the same options would send. */
static int make_message(struct kv_wish *w, const struct kv_arch_pools *pools, uint32_t i)
{
	const struct kv_plan *plan = pools->plan;
	kv_cleanup(kv_freep) struct kv_component *components =
		calloc(plan->n_components, sizeof(*components));
	struct kv_msg_pool_open *msg;
	struct kv_layout layout;
	uint32_t size;
	int n;

	if (!components)
		return kv_error(-ENOMEM, "no memory for %u components", plan->n_components);
	n = kv_plan_pool_layout(plan, i, components, &layout);
	if (n < 0)
		return n;
	size = (uint32_t)(sizeof(*msg) + (uint32_t)n * sizeof(*components));
	msg = calloc(1, size);
	if (!msg)
		return kv_error(-ENOMEM, "no memory for what is asked of a pool");
	w->messages[w->n_messages++] = msg;
	strcpy(msg->model, w->model[0] ? w->model : pools->model);
	strcpy(msg->revision, w->revision[0] ? w->revision : pools->revision);
	msg->head.type = KV_MSG_POOL_OPEN;
	msg->head.size = size;
	msg->tp_ranks = w->options.tp ? w->options.tp : 1;
	msg->gpu_mask = w->gpu_mask;
	msg->max_bytes = w->max_bytes ? plan->pools[i].bytes : 0;
	msg->weight = w->weight;
	msg->layout_kind = layout.kind;
	msg->layout_flags = layout.flags;
	msg->block_tokens = layout.block_tokens;
	msg->n_components = layout.n_components;
	memcpy(msg->components, components, (size_t)n * sizeof(*components));
	return kv_plan_pool_name(plan, i, w->name, msg->name);
}

/* Divides what is guaranteed among the model's pools, as it divides the maximum. */
static int guarantee(struct kv_wish *w)
{
	struct kv_arch_pools pools;
	int r;

	w->options.budget_bytes = w->min_bytes;
	r = kv_arch_pools_read(w->config, &w->options, &pools);
	if (r)
		return blame(r, "", "min");
	for (uint32_t i = 0; i < w->n_messages; i++)
		w->messages[i]->min_bytes = pools.plan->pools[i].bytes;
	kv_arch_pools_deinit(&pools);
	return 0;
}

static int read_wish(struct kv_wish *w)
{
	struct kv_arch_pools pools;
	int r;

	w->options.budget_bytes = w->max_bytes;
	r = kv_arch_pools_read(w->config, &w->options, &pools);
	if (r)
		return r == -ENOSPC ? blame(r, "", "max") : r;
	if (pools.plan->n_pools > MAX_POOLS)
		r = kv_error(-ENOTSUP, "%s: its plan has %u pools, at most %d are made", w->config,
			     pools.plan->n_pools, MAX_POOLS);
	for (uint32_t i = 0; !r && i < pools.plan->n_pools; i++)
		r = make_message(w, &pools, i);
	kv_arch_pools_deinit(&pools);
	return r || !w->min_bytes ? r : guarantee(w);
}

int kv_wishes_read(struct kv_link *wishes)
{
	for (struct kv_link *l = wishes->next; l != wishes; l = l->next) {
		struct kv_wish *w = kv_container_of(l, struct kv_wish, link);
		int r = read_wish(w);

		if (r)
			return blame(r, "--pool ", w->name);
	}
	return 0;
}

/* Device memory is zeroed by the movers first, which have just been started. */
static int create(struct kv_daemon *d, const struct kv_msg_pool_open *msg)
{
	uint32_t all = d->n_gpus == 32 ? UINT32_MAX : (1u << d->n_gpus) - 1;
	int64_t deadline = kv_now() + SCRUB_WAIT;
	struct kv_pool *pool;
	int r;

	if (kv_pool_find(d, msg->name))
		return kv_error(-EEXIST, "there is a pool '%s' already", msg->name);
	if (msg->gpu_mask & ~all)
		return kv_error(-EINVAL, "gpus: mask %#x given, this daemon has devices of mask %#x",
				msg->gpu_mask, all);
	r = kv_pool_create(d, msg, &pool);
	while (r == -EAGAIN && !d->stopping) {
		if (kv_now() > deadline)
			return kv_error(-ETIMEDOUT, "memory for it was not zeroed in %d s",
					(int)(SCRUB_WAIT / KV_SEC));
		r = kv_loop_step(d->loop, LOOK_AGAIN);
		if (r >= 0)
			r = kv_pool_create(d, msg, &pool);
	}
	return r == -EAGAIN ? 0 : r;
}

int kv_wishes_grant(struct kv_daemon *d)
{
	struct kv_link *wishes = d->config.wishes;

	for (struct kv_link *l = wishes->next; l != wishes; l = l->next) {
		struct kv_wish *w = kv_container_of(l, struct kv_wish, link);

		for (uint32_t i = 0; i < w->n_messages; i++) {
			int r = create(d, w->messages[i]);

			if (r < 0)
				return blame(blame(r, "", w->config), "--pool ", w->name);
		}
	}
	return 0;
}

void kv_wishes_free(struct kv_link *wishes)
{
	while (!kv_link_is_alone(wishes)) {
		struct kv_wish *w = kv_container_of(wishes->next, struct kv_wish, link);

		free_wish(&w);
	}
}
