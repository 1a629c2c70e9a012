/* SPDX-License-Identifier: Apache-2.0 */
/* kvctl block show ID [--pool NAME]: what a block is, who has it, whose tokens are in it. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "tools/kvctl.h"

#define TOKENS_A_LINE 12

struct shown {
	struct kv_block_stats block;
	struct kv_session_stats *sessions;
	int32_t *tokens;
};

const struct option kv_block_options[] = {
	{"pool", required_argument, NULL, 'p'}, {"json", no_argument, NULL, 'j'}, {NULL}};

struct kv_words kv_words_comm(uint64_t pid)
{
	struct kv_words words = {"?"};
	char path[64];
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%" PRIu64 "/comm", pid);
	f = fopen(path, "re");
	if (!f)
		return words;
	if (!fgets(words.text, sizeof(words.text), f))
		strcpy(words.text, "?");
	words.text[strcspn(words.text, "\n")] = 0;
	fclose(f);
	return words;
}

void kv_show_holders(struct kv_emit *e, const struct kv_session_stats *sessions, size_t n)
{
	const struct kv_stat_field *fields = kv_stat_fields(KV_STAT_SESSION);

	kv_emit_open(e, "sessions", '[');
	if (n)
		kv_emit_head(e, "<SESSION", "<CLIENT", ">PID", "<COMMAND", ">UID", ">SINCE",
			     NULL);
	for (const struct kv_session_stats *s = sessions; s < sessions + n; s++) {
		kv_emit_open(e, NULL, '{');
		kv_emit_fields(e, fields, s);
		kv_emit_text(e, "comm", kv_words_comm(s->pid).text);
		kv_emit_close(e);
		kv_emit_cell(e, "%" PRIu64, s->id);
		kv_emit_cell(e, "%s", s->client);
		kv_emit_cell(e, "%" PRIu64, s->pid);
		kv_emit_cell(e, "%s", kv_words_comm(s->pid).text);
		kv_emit_cell(e, "%" PRIu64, s->uid);
		kv_emit_cell(e, "%s", kv_words_since(s).text);
	}
	if (n)
		kv_emit_table(e);
	kv_emit_close(e);
}

static void show_tokens(struct kv_emit *e, const struct kv_block_stats *b, const int32_t *tokens)
{
	kv_emit_open(e, "tokens", '[');
	for (uint64_t i = 0; i < b->n_listed; i++)
		kv_emit_number(e, NULL, (uint32_t)tokens[i]);
	kv_emit_close(e);
	if (!b->n_listed)
		return;
	kv_emit_gap(e);
	if (b->is_loose)
		kv_emit_line(e, "tokens, of a group that finds each block by itself:");
	else
		kv_emit_line(e, "tokens %" PRIu64 " to %" PRIu64 " of a prefix:", b->position,
			     b->position + b->n_tokens - 1);
	for (uint64_t i = 0; i < b->n_listed; i += TOKENS_A_LINE) {
		char line[TOKENS_A_LINE * 12 + 1] = "";
		size_t used = 0;

		for (uint64_t k = i; k < i + TOKENS_A_LINE && k < b->n_listed; k++)
			used += (size_t)snprintf(line + used, sizeof(line) - used, " %" PRId32, tokens[k]);
		kv_emit_line(e, " %s", line);
	}
}

static void show(struct kv_emit *e, const struct shown *shown, const struct kv_pool_stats *pool)
{
	const struct kv_block_stats *b = &shown->block;
	const struct kv_stat_field *fields = kv_stat_fields(KV_STAT_BLOCK);

	kv_emit_open(e, NULL, '{');
	kv_emit_fields(e, fields, b);
	kv_emit_text(e, "model", pool->model);
	kv_emit_text(e, "revision", pool->revision);
	kv_emit_text(e, "name_space", pool->name_space);
	kv_emit_describe(e, fields, b);
	kv_emit_gap(e);
	kv_emit_line(e, "of model '%s', revision '%s', name space '%s'", pool->model, pool->revision,
		     pool->name_space);
	kv_emit_gap(e);
	if (b->n_sessions)
		kv_emit_line(e, "%s by", b->state);
	else
		kv_emit_line(e, "no session has it");
	kv_show_holders(e, shown->sessions, b->n_sessions);
	show_tokens(e, b, shown->tokens);
	kv_emit_close(e);
}

static void free_shown(struct shown *s)
{
	free(s->sessions);
	free(s->tokens);
}

static bool is_there(const struct kv_block_stats *b)
{
	return strcmp(b->state, "absent") != 0;
}

/* The pool that has the block: @name, or the only one. NULL: *ret_status says why. */
static const struct kv_pool_stats *find_pool(struct kv_ctl *ctl, const struct kv_pool_stats *pools, size_t n,
					     const char *name, kv_block_id id, struct shown *shown,
					     int *ret_status)
{
	const struct kv_pool_stats *found = NULL;

	*ret_status = KV_EXIT_FAILED;
	for (size_t i = 0; i < n; i++) {
		struct shown s = {0};
		int r;

		if (name && strcmp(pools[i].name, name))
			continue;
		r = kv_block_show(ctl->client, pools[i].name, id, &s.block, &s.sessions, &s.tokens,
				  kv_ctl_left(ctl));
		/* Pools of larger blocks have fewer, and some aren't this user's business. */
		if (!name && (r == -EINVAL || r == -EACCES || r == -ENOENT))
			continue;
		if (r < 0) {
			*ret_status = kv_ctl_broken(ctl, r);
			return NULL;
		}
		if (!name && !is_there(&s.block)) {
			free_shown(&s);
			continue;
		}
		if (found) {
			kv_ctl_refuse(ctl, KV_EXIT_FAILED,
				      "ID %d: pools '%s' and '%s' both have a block of that number; give --pool",
				      id, found->name, pools[i].name);
			free_shown(&s);
			return NULL;
		}
		found = &pools[i];
		*shown = s;
	}
	if (!found && name)
		kv_ctl_no_pool(ctl, "--pool: ", name, pools, n);
	else if (!found)
		kv_ctl_refuse(ctl, KV_EXIT_FAILED,
			      "ID %d: no pool that you may read has that block now (see kvctl pool list)", id);
	return found;
}

int kv_cmd_block_show(struct kv_ctl *ctl, int argc, char **argv)
{
	kv_cleanup(kv_freep) struct kv_pool_stats *pools = NULL;
	kv_cleanup(free_shown) struct shown shown = {0};
	const struct kv_pool_stats *pool;
	const char *name = NULL, *word = NULL;
	uint64_t id = 0;
	int c, status;
	size_t n;

	optind = 0;
	opterr = 0;
	while ((c = getopt_long(argc, argv, "-:jp:", kv_block_options, NULL)) != -1) {
		if (c == 'p')
			name = optarg;
		else if (c == ':')
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "option '%s' needs a value", argv[optind - 1]);
		else if (c == 1 && !word)
			word = optarg;
		else if (c != 'j')
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "'%s': kvctl block show ID [--pool NAME]",
					     argv[optind - 1]);
	}
	if (!word)
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "usage: kvctl block show ID [--pool NAME]");
	if (kv_ctl_u64(word, &id) < 0 || id > INT32_MAX)
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
				     "block show: ID '%s' given, a number from 0 to %d expected", word, INT32_MAX);
	status = kv_ctl_ask(ctl, KV_STAT_POOL, &pools, &n);
	if (status)
		return status;
	pool = find_pool(ctl, pools, n, name, (kv_block_id)id, &shown, &status);
	if (!pool)
		return status;
	show(&ctl->emit, &shown, pool);
	return KV_EXIT_DONE;
}
