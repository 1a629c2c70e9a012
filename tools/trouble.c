/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <string.h>

#include "tools/trouble.h"

struct troubles {
	const struct kv_snapshot *s;
	struct kv_trouble *at;
	size_t n, max;
};

/* The next one to be filled in; NULL: no more are asked for. */
static struct kv_trouble *add(struct troubles *t)
{
	return t->n < t->max ? &t->at[t->n++] : NULL;
}

bool kv_process_stopped(uint64_t pid)
{
	char path[64], line[512], *state;
	bool stopped = false;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%" PRIu64 "/stat", pid);
	f = fopen(path, "re");
	if (!f)
		return false;
	/* "PID (NAME) STATE ...": a name may have blanks and parentheses. */
	if (fgets(line, sizeof(line), f)) {
		state = strrchr(line, ')');
		stopped = state && state[1] && (state[2] == 'T' || state[2] == 't');
	}
	fclose(f);
	return stopped;
}

/* " 4711 4712": whose ends are waited for */
static void list_dying(const struct kv_snapshot *s, const struct kv_pool_stats *p, char *ret, size_t size)
{
	size_t used = 0;

	*ret = 0;
	for (size_t i = 0; i < s->n_sessions; i++) {
		if (s->sessions[i].pool_id == p->id && !strcmp(s->sessions[i].state, "dying") && used + 24 < size)
			used += (size_t)snprintf(ret + used, size - used, " %" PRIu64, s->sessions[i].pid);
	}
}

/* Is there, below its maximum, no room for one more extent? One that is all of an arena limits nothing. */
static bool at_maximum(const struct kv_snapshot *s, const struct kv_pool_stats *p)
{
	for (size_t i = 0; i < s->n_gpus; i++) {
		const struct kv_gpu_stats *g = &s->gpus[i];

		if (g->index < 64 && p->gpu_mask >> g->index & 1 && p->max_bytes && p->max_bytes < g->bytes_arena &&
		    p->extent_bytes + g->bytes_extent > p->max_bytes)
			return true;
	}
	return false;
}

/* Who leases most on the devices of @p; NULL: nobody leases anything. */
static const struct kv_session_stats *largest(const struct kv_snapshot *s, const struct kv_pool_stats *p,
					      uint64_t *ret_bytes)
{
	const struct kv_session_stats *found = NULL;

	*ret_bytes = 0;
	for (size_t i = 0; i < s->n_sessions; i++) {
		for (size_t j = 0; j < s->n_pools; j++) {
			uint64_t bytes = s->sessions[i].blocks_leased * s->pools[j].block_bytes;

			if (s->pools[j].id != s->sessions[i].pool_id || !(s->pools[j].gpu_mask & p->gpu_mask) ||
			    bytes <= *ret_bytes)
				continue;
			*ret_bytes = bytes;
			found = &s->sessions[i];
		}
	}
	return found;
}

static void find_waiting(struct troubles *t, const struct kv_pool_stats *p)
{
	const struct kv_session_stats *most;
	struct kv_words pool = kv_words_cut(p->name, 24);
	struct kv_trouble *x;
	uint64_t bytes;
	int n;

	if (!p->waiting)
		return;
	x = add(t);
	if (!x)
		return;
	n = snprintf(x->seen, sizeof(x->seen), "%s: %" PRIu64 " request%s for room", pool.text, p->waiting,
		     p->waiting == 1 ? " waits" : "s wait");
	if (at_maximum(t->s, p)) {
		snprintf(x->seen + n, sizeof(x->seen) - (size_t)n, "; it is at its maximum, %s",
			 kv_words_bytes(p->max_bytes).text);
		snprintf(x->change, sizeof(x->change), "kvctl pool set %s --max SIZE (0: as much as there is)", p->name);
		return;
	}
	most = largest(t->s, p, &bytes);
	if (most)
		snprintf(x->seen + n, sizeof(x->seen) - (size_t)n, "; session %" PRIu64 " (%s, pid %" PRIu64 ") leases %s",
			 most->id, kv_words_cut(most->client, 16).text, most->pid, kv_words_bytes(bytes).text);
	snprintf(x->change, sizeof(x->change), "fewer sequences at once there, or more memory for kvcached");
}

static void find_quarantined(struct troubles *t, const struct kv_pool_stats *p)
{
	struct kv_trouble *x;
	char pids[96];

	if (!p->blocks_quarantined)
		return;
	x = add(t);
	if (!x)
		return;
	list_dying(t->s, p, pids, sizeof(pids));
	snprintf(x->seen, sizeof(x->seen), "%s: %s in quarantine", kv_words_cut(p->name, 24).text,
		 kv_words_bytes(p->blocks_quarantined * p->block_bytes).text);
	snprintf(x->change, sizeof(x->change), "these blocks are free when the processes end:%s", pids);
}

static void find_stopped(struct troubles *t, const struct kv_session_stats *session)
{
	struct kv_trouble *x;

	if (!kv_process_stopped(session->pid))
		return;
	x = add(t);
	if (!x)
		return;
	snprintf(x->seen, sizeof(x->seen), "session %" PRIu64 " (%s, pid %" PRIu64 ") is stopped and keeps %" PRIu64
		 " blocks", session->id, kv_words_cut(session->client, 16).text, session->pid,
		 session->blocks_leased + session->blocks_held);
	snprintf(x->change, sizeof(x->change), "kill -CONT %" PRIu64 " lets it go on, kill -KILL %" PRIu64
		 " frees what it leases", session->pid, session->pid);
}

static void find_mover(struct troubles *t, const struct kv_gpu_stats *gpu)
{
	struct kv_trouble *x;

	if (!*gpu->mover_error)
		return;
	x = add(t);
	if (!x)
		return;
	snprintf(x->seen, sizeof(x->seen), "gpu %" PRIu64 ": its mover failed: %s", gpu->index, gpu->mover_error);
	snprintf(x->change, sizeof(x->change), "see the daemon's log, and kvctl doctor driver; %s wait to be zeroed",
		 kv_words_bytes(gpu->bytes_scrubbing).text);
}

size_t kv_trouble_find(const struct kv_snapshot *s, struct kv_trouble *ret, size_t max)
{
	struct troubles t = {.s = s, .at = ret, .max = max};

	for (size_t i = 0; i < s->n_gpus; i++)
		find_mover(&t, &s->gpus[i]);
	for (size_t i = 0; i < s->n_pools; i++)
		find_waiting(&t, &s->pools[i]);
	for (size_t i = 0; i < s->n_sessions; i++)
		find_stopped(&t, &s->sessions[i]);
	for (size_t i = 0; i < s->n_pools; i++)
		find_quarantined(&t, &s->pools[i]);
	return t.n;
}

unsigned kv_trouble_emit(struct kv_emit *e, const struct kv_snapshot *s)
{
	struct kv_trouble troubles[KV_MOST_TROUBLES];
	size_t n = kv_trouble_find(s, troubles, KV_MOST_TROUBLES);

	for (size_t i = 0; i < n; i++) {
		kv_emit_line(e, "%s", troubles[i].seen);
		kv_emit_line(e, "  -> %s", troubles[i].change);
	}
	return 2 * (unsigned)n;
}
