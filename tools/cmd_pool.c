/* SPDX-License-Identifier: Apache-2.0 */
/* kvctl pool list | show NAME | set NAME | compact NAME | drop NAME | epoch NAME */
#include <getopt.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <kvcached/identity.h>

#include "include/internal/cleanup.h"
#include "include/internal/nearest.h"
#include "tools/kvctl.h"
#include "tools/progress.h"

struct kv_words kv_words_gpus(uint64_t gpu_mask)
{
	struct kv_words words = {""};
	size_t n = 0;

	for (unsigned i = 0, last; i < 64 && n < sizeof(words.text); i = last + 1) {
		last = i;
		if (!(gpu_mask >> i & 1))
			continue;
		while (last + 1 < 64 && gpu_mask >> (last + 1) & 1)
			last++;
		n += snprintf(words.text + n, sizeof(words.text) - n, "%s%u", n ? "," : "", i);
		if (last > i && n < sizeof(words.text))
			n += snprintf(words.text + n, sizeof(words.text) - n, "-%u", last);
	}
	return words;
}

struct kv_words kv_words_blocks(const struct kv_pool_stats *pool, uint64_t n)
{
	if (!pool)
		return (struct kv_words){"?"};
	return kv_words_bytes(n * pool->block_bytes);
}

static void show_list(struct kv_emit *e, const struct kv_pool_stats *pools, size_t n)
{
	kv_emit_list(e, NULL, kv_stat_fields(KV_STAT_POOL), pools, sizeof(*pools), n);
	kv_emit_head(e, "<POOL", "<MODEL", "<GPU", ">BLOCK", ">SIZE", ">LEASED", ">CACHED", ">FREE",
		     ">HIT", ">SESSIONS", NULL);
	for (const struct kv_pool_stats *p = pools; p < pools + n; p++) {
		kv_emit_cell(e, "%s", p->name);
		kv_emit_cell(e, "%s", p->model);
		kv_emit_cell(e, "%s", kv_words_gpus(p->gpu_mask).text);
		kv_emit_cell(e, "%s", kv_words_bytes(p->block_bytes).text);
		kv_emit_cell(e, "%s", kv_words_blocks(p, p->blocks_total).text);
		kv_emit_cell(e, "%s", kv_words_blocks(p, p->blocks_leased).text);
		kv_emit_cell(e, "%s", kv_words_blocks(p, p->blocks_cached).text);
		kv_emit_cell(e, "%s", kv_words_blocks(p, p->blocks_free).text);
		kv_emit_cell(e, "%s",
			     kv_words_share(p->hit_tokens_total, p->lookup_tokens_total).text);
		kv_emit_cell(e, "%" PRIu64, p->n_sessions);
	}
	kv_emit_table(e);
}

int kv_cmd_pool_list(struct kv_ctl *ctl, int argc, char **argv)
{
	kv_cleanup(kv_freep) struct kv_pool_stats *pools = NULL;
	size_t n;
	int status = kv_ctl_ask(ctl, KV_STAT_POOL, &pools, &n);

	if (status)
		return status;
	show_list(&ctl->emit, pools, n);
	return KV_EXIT_DONE;
}

const struct kv_pool_stats *kv_pool_of(const struct kv_pool_stats *pools, size_t n,
				       const struct kv_session_stats *session)
{
	for (size_t i = 0; i < n; i++) {
		if (pools[i].id == session->pool_id)
			return &pools[i];
	}
	return NULL;
}

static const struct kv_pool_stats *find(const struct kv_pool_stats *pools, size_t n,
					const char *name)
{
	for (size_t i = 0; i < n; i++) {
		if (!strcmp(pools[i].name, name))
			return &pools[i];
	}
	return NULL;
}

int kv_ctl_no_pool(struct kv_ctl *ctl, const char *option, const char *name, const struct kv_pool_stats *pools,
		   size_t n)
{
	const char *nearest = NULL;

	for (size_t i = 0; i < n; i++) {
		if (kv_word_is_near(name, pools[i].name) &&
		    (!nearest || kv_word_distance(name, pools[i].name) < kv_word_distance(name, nearest)))
			nearest = pools[i].name;
	}
	if (nearest)
		return kv_ctl_refuse(ctl, KV_EXIT_FAILED, "%sno pool is called '%s'; the nearest is '%s' (see kvctl pool list)",
				     option, name, nearest);
	return kv_ctl_refuse(ctl, KV_EXIT_FAILED, "%sno pool is called '%s' (see kvctl pool list)", option, name);
}

/* @sessions: [n] of all pools */
static void show_pool(struct kv_emit *e, const struct kv_pool_stats *pool,
		      const struct kv_session_stats *sessions, size_t n)
{
	const struct kv_stat_field *fields = kv_stat_fields(KV_STAT_SESSION);

	kv_emit_open(e, NULL, '{');
	kv_emit_fields(e, kv_stat_fields(KV_STAT_POOL), pool);
	kv_emit_describe(e, kv_stat_fields(KV_STAT_POOL), pool);
	kv_emit_open(e, "sessions", '[');
	kv_emit_gap(e);
	kv_emit_head(e, "<SESSION", "<CLIENT", ">PID", ">LEASED", ">HELD", ">HIT", ">SINCE", NULL);
	for (const struct kv_session_stats *s = sessions; s < sessions + n; s++) {
		if (s->pool_id != pool->id)
			continue;
		kv_emit_open(e, NULL, '{');
		kv_emit_fields(e, fields, s);
		kv_emit_close(e);
		kv_emit_cell(e, "%" PRIu64, s->id);
		kv_emit_cell(e, "%s", s->client);
		kv_emit_cell(e, "%" PRIu64, s->pid);
		kv_emit_cell(e, "%s", kv_words_blocks(pool, s->blocks_leased).text);
		kv_emit_cell(e, "%s", kv_words_blocks(pool, s->blocks_held).text);
		kv_emit_cell(e, "%s",
			     kv_words_share(s->hit_tokens_total, s->lookup_tokens_total).text);
		kv_emit_cell(e, "%s", kv_words_since(s).text);
	}
	kv_emit_table(e);
	kv_emit_close(e);
	kv_emit_close(e);
}

int kv_cmd_pool_show(struct kv_ctl *ctl, int argc, char **argv)
{
	kv_cleanup(kv_freep) struct kv_pool_stats *pools = NULL;
	kv_cleanup(kv_freep) struct kv_session_stats *sessions = NULL;
	const struct kv_pool_stats *pool;
	size_t n_pools, n_sessions;
	int status = kv_ctl_ask(ctl, KV_STAT_POOL, &pools, &n_pools);

	if (status)
		return status;
	pool = find(pools, n_pools, argv[1]);
	if (!pool)
		return kv_ctl_no_pool(ctl, "", argv[1], pools, n_pools);
	status = kv_ctl_ask(ctl, KV_STAT_SESSION, &sessions, &n_sessions);
	if (status)
		return status;
	show_pool(&ctl->emit, pool, sessions, n_sessions);
	return KV_EXIT_DONE;
}

const struct option kv_limit_options[] = {
	{"min", required_argument, NULL, 'm'},	  {"max", required_argument, NULL, 'M'},
	{"weight", required_argument, NULL, 'w'}, {"revision", required_argument, NULL, 'r'},
	{"json", no_argument, NULL, 'j'},	  {NULL},
};

static int take_limit(struct kv_pool_limits *l, int c, const char *text)
{
	uint64_t n;
	int r = 0;

	switch (c) {
	case 'm':
		l->change |= KV_LIMIT_MIN;
		return kv_ctl_size(text, &l->min_bytes);
	case 'M':
		l->change |= KV_LIMIT_MAX;
		return kv_ctl_size(text, &l->max_bytes);
	case 'w':
		r = kv_ctl_u64(text, &n);
		if (r || n < 1 || n > KV_WEIGHT_MAX)
			return -EINVAL;
		l->change |= KV_LIMIT_WEIGHT;
		l->weight = (uint32_t)n;
		return 0;
	case 'r':
		return kv_ctl_u64(text, &l->revision);
	}
	return 0; /* --json: it was looked for first */
}

static void show_limits(struct kv_emit *e, const struct kv_pool_stats *pool)
{
	kv_emit_open(e, NULL, '{');
	kv_emit_text(e, "name", pool->name);
	kv_emit_number(e, "limits_revision", pool->limits_revision);
	kv_emit_number(e, "min_bytes", pool->min_bytes);
	kv_emit_number(e, "max_bytes", pool->max_bytes);
	kv_emit_number(e, "weight", pool->weight);
	kv_emit_number(e, "share_bytes", pool->share_bytes);
	kv_emit_number(e, "extent_bytes", pool->extent_bytes);
	kv_emit_close(e);
	kv_emit_line(e,
		     "'%s': min %s, max %s, weight %" PRIu64 ": a share of %s; it has %s "
		     "(revision %" PRIu64 ")",
		     pool->name, kv_words_bytes(pool->min_bytes).text,
		     kv_words_bytes(pool->max_bytes).text, pool->weight,
		     kv_words_bytes(pool->share_bytes).text,
		     kv_words_bytes(pool->extent_bytes).text, pool->limits_revision);
}

int kv_cmd_pool_set(struct kv_ctl *ctl, int argc, char **argv)
{
	KV_OPTIONS(kv_pool_limits, limits);
	kv_cleanup(kv_freep) struct kv_pool_stats *pools = NULL;
	const struct kv_pool_stats *pool;
	const char *name = NULL;
	int c, status, r;
	size_t n;

	optind = 0;
	opterr = 0;
	while ((c = getopt_long(argc, argv, "-:j", kv_limit_options, NULL)) != -1) {
		if (c == ':')
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "option '%s' needs a value",
					     argv[optind - 1]);
		if (c == '?' || (c == 1 && name))
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
					     "'%s': kvctl pool set NAME [--min SIZE] [--max SIZE] "
					     "[--weight N] [--revision N]",
					     argv[optind - 1]);
		if (c == 1)
			name = optarg;
		else if (take_limit(&limits, c, optarg) < 0)
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
					     "'%s' given; a size like 4G, 1 to %u for --weight, a "
					     "number for --revision",
					     optarg, KV_WEIGHT_MAX);
	}
	if (!name || !limits.change)
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
				     "usage: kvctl pool set NAME [--min SIZE] [--max SIZE] "
				     "[--weight N] [--revision N]");
	status = kv_ctl_connect(ctl);
	if (status)
		return status;
	r = kv_pool_set(ctl->client, name, &limits, NULL, kv_ctl_left(ctl));
	if (r < 0)
		return kv_ctl_broken(ctl, r);
	status = kv_ctl_ask(ctl, KV_STAT_POOL, &pools, &n);
	pool = status ? NULL : find(pools, n, name);
	if (!pool)
		return status ? status : kv_ctl_refuse(ctl, KV_EXIT_FAILED, "'%s' has gone", name);
	show_limits(&ctl->emit, pool);
	return KV_EXIT_DONE;
}

const struct option kv_compact_options[] = {
	{"wait", no_argument, NULL, 'W'}, {"json", no_argument, NULL, 'j'}, {NULL},
};

static int one_pool(struct kv_ctl *ctl, const char *name, struct kv_pool_stats *ret)
{
	kv_cleanup(kv_freep) struct kv_pool_stats *pools = NULL;
	const struct kv_pool_stats *pool;
	size_t n;
	int status = kv_ctl_ask(ctl, KV_STAT_POOL, &pools, &n);

	pool = status ? NULL : find(pools, n, name);
	if (pool)
		*ret = *pool;
	return pool || status ? status : kv_ctl_no_pool(ctl, "", name, pools, n);
}

/* Until it is over, however long; each look at it has the command's time. @before: when it was asked for */
static int wait_for_compaction(struct kv_ctl *ctl, const char *name, const struct kv_pool_stats *before,
			       uint64_t *ret_bytes)
{
	int64_t limit = kv_ctl_left(ctl);
	struct timespec pause = {.tv_nsec = 50000000};
	struct kv_progress progress;
	struct kv_pool_stats pool;
	uint64_t gaps, closed;
	int status;

	kv_progress_init(&progress, ctl->emit.json);
	for (;;) {
		ctl->deadline = kv_ctl_now() + limit;
		status = one_pool(ctl, name, &pool);
		if (status)
			break;
		*ret_bytes = pool.compacted_bytes_total - before->compacted_bytes_total;
		if (!pool.compacting)
			break;
		gaps = before->fragmented_bytes;
		closed = gaps > pool.fragmented_bytes ? gaps - pool.fragmented_bytes : 0;
		kv_progress_show(&progress, closed >> 20, gaps >> 20, "MiB of gaps closed");
		nanosleep(&pause, NULL);
	}
	kv_progress_end(&progress);
	return status;
}

int kv_cmd_pool_compact(struct kv_ctl *ctl, int argc, char **argv)
{
	const char *name = NULL, *given = NULL;
	uint64_t rate = 0, n_bytes = 0;
	struct kv_pool_stats before;
	bool waits = false;
	int c, status, r;

	optind = 0;
	opterr = 0;
	while ((c = getopt_long(argc, argv, "-:j", kv_compact_options, NULL)) != -1) {
		if (c == 'W')
			waits = true;
		else if (c == 'j')
			ctl->emit.json = true;
		else if (c == 1 && !name)
			name = optarg;
		else if (c == 1 && !given)
			given = optarg;
		else
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "'%s': kvctl pool compact NAME [RATE] [--wait]",
					     argv[optind - 1]);
	}
	if (!name)
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "usage: kvctl pool compact NAME [RATE] [--wait]");
	if (given && kv_ctl_size(given, &rate) < 0)
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
				     "'%s' given; bytes a second like 10G, or nothing", given);
	status = kv_ctl_connect(ctl);
	if (status)
		return status;
	if (waits) {
		status = one_pool(ctl, name, &before);
		if (status)
			return status;
	}
	r = kv_pool_compact(ctl->client, name, rate, kv_ctl_left(ctl));
	if (r < 0)
		return kv_ctl_broken(ctl, r);
	if (waits) {
		status = wait_for_compaction(ctl, name, &before, &n_bytes);
		if (status)
			return status;
	}
	kv_emit_open(&ctl->emit, NULL, '{');
	kv_emit_text(&ctl->emit, "name", name);
	kv_emit_number(&ctl->emit, "rate", rate);
	if (waits)
		kv_emit_number(&ctl->emit, "compacted_bytes", n_bytes);
	kv_emit_close(&ctl->emit);
	if (waits)
		kv_emit_line(&ctl->emit, "compaction of '%s' is over", name);
	else
		kv_emit_line(&ctl->emit, "compaction of '%s' has begun (see kvctl pool show)", name);
	return KV_EXIT_DONE;
}

/* @pool: what is left of it; NULL if it was removed */
static void show_dropped(struct kv_emit *e, const char *name, const struct kv_pool_stats *pool)
{
	kv_emit_open(e, NULL, '{');
	kv_emit_text(e, "name", name);
	kv_emit_bool(e, "removed", !pool);
	kv_emit_number(e, "blocks_cached", pool ? pool->blocks_cached : 0);
	kv_emit_number(e, "n_sessions", pool ? pool->n_sessions : 0);
	kv_emit_close(e);
	if (pool)
		kv_emit_line(e,
			     "dropped what nobody held of '%s'; %s still cached, "
			     "%" PRIu64 " session%s attached",
			     name, kv_words_blocks(pool, pool->blocks_cached).text,
			     pool->n_sessions, pool->n_sessions == 1 ? "" : "s");
	else
		kv_emit_line(e, "removed '%s'", name);
}

int kv_cmd_pool_drop(struct kv_ctl *ctl, int argc, char **argv)
{
	kv_cleanup(kv_freep) struct kv_pool_stats *pools = NULL;
	size_t n;
	int status = kv_ctl_connect(ctl);
	int r;

	if (status)
		return status;
	r = kv_pool_drop(ctl->client, argv[1], kv_ctl_left(ctl));
	if (r < 0)
		return kv_ctl_broken(ctl, r);
	status = kv_ctl_ask(ctl, KV_STAT_POOL, &pools, &n);
	if (status)
		return status;
	show_dropped(&ctl->emit, argv[1], find(pools, n, argv[1]));
	return KV_EXIT_DONE;
}

int kv_cmd_pool_epoch(struct kv_ctl *ctl, int argc, char **argv)
{
	struct kv_emit *e = &ctl->emit;
	uint64_t epoch, n_held;
	int status = kv_ctl_connect(ctl);
	int r;

	if (status)
		return status;
	r = kv_pool_new_epoch(ctl->client, argv[1], &epoch, &n_held, kv_ctl_left(ctl));
	if (r < 0)
		return kv_ctl_broken(ctl, r);
	kv_emit_open(e, NULL, '{');
	kv_emit_text(e, "name", argv[1]);
	kv_emit_number(e, "epoch", epoch);
	kv_emit_number(e, "blocks_held", n_held);
	kv_emit_close(e);
	kv_emit_line(e, "'%s' is in epoch %" PRIu64 "; sequences hold %" PRIu64 " block%s of older ones",
		     argv[1], epoch, n_held, n_held == 1 ? "" : "s");
	return KV_EXIT_DONE;
}
