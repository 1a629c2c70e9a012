/* SPDX-License-Identifier: Apache-2.0 */
/* kvctl session list | show ID */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "tools/kvctl.h"
#include "tools/trouble.h"

struct kv_words kv_words_since(const struct kv_session_stats *session)
{
	if (!strcmp(session->state, "live") && kv_process_stopped(session->pid))
		return (struct kv_words){"stopped"};
	if (!strcmp(session->state, "live"))
		return kv_words_time(session->since_ns);
	return kv_words_cut(session->state, sizeof(session->state));
}

static void show_list(struct kv_emit *e, const struct kv_session_stats *sessions, size_t n,
		      const struct kv_pool_stats *pools, size_t n_pools)
{
	kv_emit_list(e, NULL, kv_stat_fields(KV_STAT_SESSION), sessions, sizeof(*sessions), n);
	kv_emit_head(e, ">ID", "<POOL", "<CLIENT", ">PID", ">UID", ">LEASED", ">IDLE", ">HELD",
		     ">HIT", ">SINCE", NULL);
	for (const struct kv_session_stats *s = sessions; s < sessions + n; s++) {
		const struct kv_pool_stats *pool = kv_pool_of(pools, n_pools, s);
		/* The client says it now and then, and may have used some of them since. */
		uint64_t idle =
			s->blocks_idle < s->blocks_leased ? s->blocks_idle : s->blocks_leased;

		kv_emit_cell(e, "%" PRIu64, s->id);
		kv_emit_cell(e, "%s", s->pool);
		kv_emit_cell(e, "%s", s->client);
		kv_emit_cell(e, "%" PRIu64, s->pid);
		kv_emit_cell(e, "%" PRIu64, s->uid);
		kv_emit_cell(e, "%s", kv_words_blocks(pool, s->blocks_leased).text);
		kv_emit_cell(e, "%s", kv_words_blocks(pool, idle).text);
		kv_emit_cell(e, "%s", kv_words_blocks(pool, s->blocks_held).text);
		kv_emit_cell(e, "%s",
			     kv_words_share(s->hit_tokens_total, s->lookup_tokens_total).text);
		kv_emit_cell(e, "%s", kv_words_since(s).text);
	}
	kv_emit_table(e);
}

int kv_cmd_session_list(struct kv_ctl *ctl, int argc, char **argv)
{
	kv_cleanup(kv_freep) struct kv_session_stats *sessions = NULL;
	kv_cleanup(kv_freep) struct kv_pool_stats *pools = NULL;
	size_t n, n_pools;
	int status = kv_ctl_ask(ctl, KV_STAT_SESSION, &sessions, &n);

	if (!status)
		status = kv_ctl_ask(ctl, KV_STAT_POOL, &pools, &n_pools);
	if (status)
		return status;
	show_list(&ctl->emit, sessions, n, pools, n_pools);
	return KV_EXIT_DONE;
}

static void show_session(struct kv_emit *e, const struct kv_session_stats *session)
{
	kv_emit_open(e, NULL, '{');
	kv_emit_fields(e, kv_stat_fields(KV_STAT_SESSION), session);
	kv_emit_close(e);
	kv_emit_describe(e, kv_stat_fields(KV_STAT_SESSION), session);
	if (!kv_process_stopped(session->pid))
		return;
	kv_emit_line(e, "its process is stopped");
	kv_emit_line(e, "  -> kill -CONT %" PRIu64 " lets it go on, kill -KILL %" PRIu64 " frees what it leases",
		     session->pid, session->pid);
}

int kv_cmd_session_show(struct kv_ctl *ctl, int argc, char **argv)
{
	kv_cleanup(kv_freep) struct kv_session_stats *sessions = NULL;
	uint64_t id;
	size_t n;
	int status;

	if (kv_ctl_u64(argv[1], &id) < 0)
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
				     "session show: ID '%s' given, a number expected", argv[1]);
	status = kv_ctl_ask(ctl, KV_STAT_SESSION, &sessions, &n);
	if (status)
		return status;
	for (size_t i = 0; i < n; i++) {
		if (sessions[i].id != id)
			continue;
		show_session(&ctl->emit, &sessions[i]);
		return KV_EXIT_DONE;
	}
	return kv_ctl_refuse(ctl, KV_EXIT_FAILED,
			     "no session has the id %" PRIu64 " (see kvctl session list)", id);
}
