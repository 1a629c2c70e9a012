/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvctl stats: the daemon, its devices, pools and sessions on one screen of 80 x 24.
 *
 * Long names are cut and, where many sessions are attached, those that hold most are shown. JSON,
 * and the `list` and `show` commands, leave nothing out.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "tools/kvctl.h"
#include "tools/snapshot.h"
#include "tools/trouble.h"

#define SCREEN_LINES 24

/* Return: lines of the screen used, here and below. */
static unsigned show_daemon(struct kv_emit *e, const struct kv_daemon_stats *d, const char *socket)
{
	kv_emit_open(e, "daemon", '{');
	kv_emit_fields(e, kv_stat_fields(KV_STAT_DAEMON), d);
	kv_emit_close(e);
	kv_emit_line(e, "kvcached %s on %s, pid %" PRIu64 ", up %s", d->version, socket, d->pid,
		     kv_words_time(d->uptime_ns).text);
	kv_emit_line(e, "event loop: %s (%s)", d->event_loop, d->event_loop_why);
	kv_emit_line(e, "heap: %s, %s; %" PRIu64 " client%s, %" PRIu64 " session%s", d->heap,
		     kv_words_bytes(d->heap_bytes).text, d->n_clients, d->n_clients == 1 ? "" : "s",
		     d->n_sessions, d->n_sessions == 1 ? "" : "s");
	return 3;
}

static unsigned show_gpus(struct kv_emit *e, const struct kv_snapshot *s)
{
	unsigned n_lines = 2;

	kv_emit_list(e, "gpus", kv_stat_fields(KV_STAT_GPU), s->gpus, sizeof(*s->gpus), s->n_gpus);
	kv_emit_gap(e);
	kv_emit_head(e, "<GPU", "<DEVICE", "<EXPORT", ">RESERVED", ">#LEASED", ">+CACHED", ">.FREE",
		     "<USE", NULL);
	for (const struct kv_gpu_stats *g = s->gpus; g < s->gpus + s->n_gpus; g++, n_lines++) {
		struct kv_use use = kv_snapshot_use(s, g);

		kv_emit_cell(e, "%" PRIu64, g->index);
		kv_emit_cell(e, "%s", kv_words_cut(g->name, 12).text);
		kv_emit_cell(e, "%s", g->export_kind);
		kv_emit_cell(e, "%s", kv_words_bytes(g->bytes_arena).text);
		kv_emit_cell(e, "%s", kv_words_bytes(use.leased).text);
		kv_emit_cell(e, "%s", kv_words_bytes(use.cached).text);
		kv_emit_cell(e, "%s", kv_words_bytes(use.free).text);
		kv_emit_cell(e, "%s", kv_words_bar(&use).text);
	}
	kv_emit_table(e);
	for (const struct kv_gpu_stats *g = s->gpus; g < s->gpus + s->n_gpus; g++) {
		/* Nothing to tell of what is usual. */
		if (strcmp(g->export_kind, "ipc"))
			continue;
		kv_emit_line(e, "gpu %" PRIu64 ": %s", g->index, g->export_why);
		kv_emit_line(e, "gpu %" PRIu64 ": %s", g->index, g->export_limits);
		n_lines += 2;
	}
	return n_lines;
}

/* "engine-a engine-b +2": as many names as fit */
static struct kv_words attached(const struct kv_snapshot *s, const struct kv_pool_stats *pool)
{
	struct kv_words words = {"-"};
	size_t n = 0;
	uint64_t n_named = 0;

	for (size_t i = 0; i < s->n_sessions; i++) {
		const struct kv_session_stats *session = &s->sessions[i];
		size_t left = 15 - n;

		if (session->pool_id != pool->id)
			continue;
		if (strlen(session->client) + 1 > left && n)
			break;
		n += snprintf(words.text + n, sizeof(words.text) - n, "%s%s", n ? " " : "",
			      kv_words_cut(session->client, 12).text);
		n_named++;
	}
	if (n_named < pool->n_sessions)
		snprintf(words.text + n, sizeof(words.text) - n, " +%" PRIu64,
			 pool->n_sessions - n_named);
	return words;
}

static unsigned show_pools(struct kv_emit *e, const struct kv_snapshot *s)
{
	unsigned n_lines = 2;

	kv_emit_list(e, "pools", kv_stat_fields(KV_STAT_POOL), s->pools, sizeof(*s->pools),
		     s->n_pools);
	kv_emit_gap(e);
	kv_emit_head(e, "<POOL", "<GPU", ">LEASED", ">CACHED", ">FREE", ">HIT", ">EVICTED",
		     "<ATTACHED", NULL);
	for (const struct kv_pool_stats *p = s->pools; p < s->pools + s->n_pools; p++, n_lines++) {
		kv_emit_cell(e, "%s", kv_words_cut(p->name, 12).text);
		kv_emit_cell(e, "%s", kv_words_gpus(p->gpu_mask).text);
		kv_emit_cell(e, "%s", kv_words_blocks(p, p->blocks_leased).text);
		kv_emit_cell(e, "%s", kv_words_blocks(p, p->blocks_cached).text);
		kv_emit_cell(e, "%s", kv_words_blocks(p, p->blocks_free).text);
		kv_emit_cell(e, "%s",
			     kv_words_share(p->hit_tokens_total, p->lookup_tokens_total).text);
		kv_emit_cell(e, "%" PRIu64, p->evictions_total);
		kv_emit_cell(e, "%s", attached(s, p).text);
	}
	kv_emit_table(e);
	return n_lines + kv_trouble_emit(e, s);
}

static int by_blocks(const void *a, const void *b)
{
	const struct kv_session_stats *x = a, *y = b;
	uint64_t nx = x->blocks_leased + x->blocks_held, ny = y->blocks_leased + y->blocks_held;

	return nx != ny ? (nx < ny) - (nx > ny) : (x->id > y->id) - (x->id < y->id);
}

/* @n_lines: what is left of the screen */
static void show_sessions(struct kv_emit *e, struct kv_snapshot *s, unsigned n_lines)
{
	/* A blank line and the heading come first, and one line may say how many there are more. */
	size_t n = n_lines < 8 ? 5 : n_lines - 3;

	kv_emit_list(e, "sessions", kv_stat_fields(KV_STAT_SESSION), s->sessions,
		     sizeof(*s->sessions), s->n_sessions);
	if (!s->n_sessions)
		return;
	n = s->n_sessions < n ? s->n_sessions : n;
	qsort(s->sessions, s->n_sessions, sizeof(*s->sessions), by_blocks);
	kv_emit_gap(e);
	kv_emit_head(e, "<SESSION", "<POOL", "<CLIENT", ">PID", ">LEASED", ">HELD", ">SINCE", NULL);
	for (size_t i = 0; i < n; i++) {
		const struct kv_session_stats *session = &s->sessions[i];
		const struct kv_pool_stats *pool = kv_pool_of(s->pools, s->n_pools, session);

		kv_emit_cell(e, "%" PRIu64, session->id);
		kv_emit_cell(e, "%s", kv_words_cut(session->pool, 12).text);
		kv_emit_cell(e, "%s", kv_words_cut(session->client, 14).text);
		kv_emit_cell(e, "%" PRIu64, session->pid);
		kv_emit_cell(e, "%s", kv_words_blocks(pool, session->blocks_leased).text);
		kv_emit_cell(e, "%s", kv_words_blocks(pool, session->blocks_held).text);
		kv_emit_cell(e, "%s", kv_words_since(session).text);
	}
	kv_emit_table(e);
	if (n < s->n_sessions)
		kv_emit_line(e, "and %zu that hold less (see kvctl session list)",
			     s->n_sessions - n);
}

int kv_cmd_stats(struct kv_ctl *ctl, int argc, char **argv)
{
	kv_cleanup(kv_snapshot_deinit) struct kv_snapshot snapshot = {0};
	struct kv_emit *e = &ctl->emit;
	int status = kv_ctl_connect(ctl);
	unsigned n_lines = 1; /* the prompt below */
	int r;

	if (status)
		return status;
	r = kv_snapshot_take(ctl->client, &snapshot, kv_ctl_left(ctl));
	if (r < 0)
		return kv_ctl_broken(ctl, r);
	kv_emit_open(e, NULL, '{');
	n_lines += show_daemon(e, snapshot.daemon, ctl->socket);
	n_lines += show_gpus(e, &snapshot);
	n_lines += show_pools(e, &snapshot);
	show_sessions(e, &snapshot, n_lines < SCREEN_LINES ? SCREEN_LINES - n_lines : 0);
	kv_emit_close(e);
	return KV_EXIT_DONE;
}
