/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvctl prefix show TOKENS|TEXT: what of it is cached, in which pool, and who holds it. A pool is opened for
 * reading for a moment (its session shows as "reads"), and nothing in it is held or counted as used.
 *
 * The daemon doesn't know a model's groups. They are found out: group k of a pool that keeps all tokens is a
 * chain; blocks of a window's group and states are found each by itself, by a digest of all before it.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/group.h>
#include <kvcached/identity.h>

#include "include/internal/cleanup.h"
#include "libclient/peek.h"
#include "tools/engine/error.h"
#include "tools/engine/gguf.h"
#include "tools/engine/tiny.h"
#include "tools/engine/tokenizer.h"
#include "tools/kvctl.h"

#define TAG_GROUP  255u /* of the second and later groups that keep all tokens: libclient/group.c */
#define MOST_BYTES (64u << 20)

enum { OPT_POOL = 256, OPT_SPACE, OPT_MODEL, OPT_CHAT, OPT_ADAPTER, OPT_SALT, OPT_FIELD, OPT_FILE };

const struct option kv_prefix_options[] = {
	{"pool", required_argument, NULL, OPT_POOL},	   {"name-space", required_argument, NULL, OPT_SPACE},
	{"model", required_argument, NULL, OPT_MODEL},	   {"chat", no_argument, NULL, OPT_CHAT},
	{"adapter", required_argument, NULL, OPT_ADAPTER}, {"salt", required_argument, NULL, OPT_SALT},
	{"field", required_argument, NULL, OPT_FIELD},	   {"file", required_argument, NULL, OPT_FILE},
	{"json", no_argument, NULL, 'j'},		   {NULL}};

struct asked {
	struct kv_ctl *ctl;
	const char *pool, *name_space, *model, *file;
	bool chat;
	char *text; /* the words, or the file */
	size_t len;
	struct kv_tokens tokens;
	struct kv_identity identity;
};

struct found {
	kv_block_id id;
	size_t first, end; /* tokens; a state: equal */
	uint64_t holders[KV_HOLDER_WORDS];
};

static const char usage[] = "usage: kvctl prefix show [--pool NAME] [--name-space TEXT] [--adapter TEXT] "
			    "[--salt TEXT] [--field TAG=TEXT] [--model GGUF [--chat]] TOKEN...|TEXT|--file FILE";

static int add_field(struct asked *a, const char *option, uint32_t tag, const char *text)
{
	struct kv_item item = {.tag = tag, .bytes = (uint8_t *)text, .n_bytes = strlen(text)};
	int r = kv_item_add(&a->identity, option, &item);

	return r < 0 ? kv_ctl_refuse(a->ctl, KV_EXIT_USAGE, "--%s", kv_error_text()) : KV_EXIT_DONE;
}

static int add_numbered(struct asked *a, char *text)
{
	char *value = strchr(text, '=');
	uint64_t tag;

	if (value)
		*value++ = 0;
	if (!value || kv_ctl_u64(text, &tag) < 0 || !tag || tag > UINT32_MAX)
		return kv_ctl_refuse(a->ctl, KV_EXIT_USAGE,
				     "--field: '%s' given, TAG=TEXT with a TAG from 1 expected", text);
	return add_field(a, "field", (uint32_t)tag, value);
}

static int add_words(struct asked *a, const char *word)
{
	size_t n = strlen(word);
	char *text = realloc(a->text, a->len + n + 2);

	if (!text)
		return kv_ctl_refuse(a->ctl, KV_EXIT_FAILED, "no memory");
	a->text = text;
	if (a->len)
		a->text[a->len++] = ' ';
	memcpy(a->text + a->len, word, n + 1);
	a->len += n;
	return KV_EXIT_DONE;
}

static int read_file(struct asked *a)
{
	FILE *f = strcmp(a->file, "-") ? fopen(a->file, "re") : stdin;
	size_t room = 0, got = 1;
	int error = 0;

	if (!f)
		return kv_ctl_refuse(a->ctl, KV_EXIT_FAILED, "--file: %s: %s", a->file, strerror(errno));
	while (got && !error) {
		if (room - a->len < 2) {
			char *more = room < MOST_BYTES ? realloc(a->text, room += 65536) : NULL;

			if (!more) {
				error = ENOMEM;
				break;
			}
			a->text = more;
		}
		got = fread(a->text + a->len, 1, room - a->len - 1, f);
		a->len += got;
		error = ferror(f) ? errno : 0;
	}
	if (f != stdin)
		fclose(f);
	if (error)
		return kv_ctl_refuse(a->ctl, KV_EXIT_FAILED, "--file: %s: %s", a->file, strerror(error));
	a->text[a->len] = 0;
	return KV_EXIT_DONE;
}

static int take_option(struct asked *a, int c)
{
	switch (c) {
	case OPT_POOL:
		a->pool = optarg;
		return KV_EXIT_DONE;
	case OPT_SPACE:
		a->name_space = optarg;
		return KV_EXIT_DONE;
	case OPT_MODEL:
		a->model = optarg;
		return KV_EXIT_DONE;
	case OPT_FILE:
		a->file = optarg;
		return KV_EXIT_DONE;
	case OPT_CHAT:
		a->chat = true;
		return KV_EXIT_DONE;
	case OPT_ADAPTER:
		return add_field(a, "adapter", KV_TAG_ADAPTER, optarg);
	case OPT_SALT:
		return add_field(a, "salt", KV_TAG_SALT, optarg);
	case OPT_FIELD:
		return add_numbered(a, optarg);
	case 1:
		return add_words(a, optarg);
	}
	return KV_EXIT_DONE; /* --json: it was looked for first */
}

static int read_options(struct asked *a, int argc, char **argv)
{
	int c, status = KV_EXIT_DONE;

	optind = 0;
	opterr = 0;
	while (!status && (c = getopt_long(argc, argv, "-:j", kv_prefix_options, NULL)) != -1) {
		if (c == ':')
			return kv_ctl_refuse(a->ctl, KV_EXIT_USAGE, "option '%s' needs a value", argv[optind - 1]);
		if (c == '?')
			return kv_ctl_unknown(a->ctl, argv[optind - 1], kv_prefix_options);
		status = take_option(a, c);
	}
	while (!status && optind < argc) /* behind "--" */
		status = add_words(a, argv[optind++]);
	if (status)
		return status;
	if (a->file && a->text)
		return kv_ctl_refuse(a->ctl, KV_EXIT_USAGE, "'%s' and --file %s: one of them", a->text, a->file);
	if (a->chat && !a->model)
		return kv_ctl_refuse(a->ctl, KV_EXIT_USAGE, "--chat needs --model, whose template it is");
	if (!a->file && !a->text)
		return kv_ctl_refuse(a->ctl, KV_EXIT_USAGE, "%s", usage);
	return a->file ? read_file(a) : KV_EXIT_DONE;
}

static int read_numbers(struct asked *a)
{
	static const char between[] = " \t\r\n,[]";
	char *text = a->text;

	for (char *word = strtok(text, between); word; word = strtok(NULL, between)) {
		uint64_t n;

		if (kv_ctl_u64(word, &n) < 0 || n > INT32_MAX)
			return kv_ctl_refuse(a->ctl, KV_EXIT_USAGE,
					     "token %zu: '%s' given, a number from 0 to %d expected; for a text "
					     "give --model GGUF, whose tokenizer it is",
					     a->tokens.n + 1, word, INT32_MAX);
		if (kv_tokens_push(&a->tokens, (int32_t)n) < 0)
			return kv_ctl_refuse(a->ctl, KV_EXIT_FAILED, "no memory");
	}
	return KV_EXIT_DONE;
}

static int tokenize(struct asked *a)
{
	struct kv_tokenizer *tokenizer = NULL;
	struct kv_gguf *file = NULL;
	/* The models that kvengine makes itself have names in place of files. */
	int r = kv_tiny_is(a->model) ? kv_tiny_new(a->model, &file) : kv_gguf_open(a->model, &file);

	if (!r)
		r = kv_tokenizer_new(file, &tokenizer);
	if (!r)
		r = kv_tokenizer_prompt(tokenizer, a->text, a->len, a->chat, &a->tokens);
	kv_tokenizer_free(tokenizer);
	kv_gguf_free(file);
	/* The text of these names the file already. */
	return r < 0 ? kv_ctl_refuse(a->ctl, KV_EXIT_FAILED, "--model: %s", kv_engine_error_text())
		     : KV_EXIT_DONE;
}

/* ---- one pool ---- */

struct look {
	const struct asked *asked;
	struct kv_pool *pool;
	struct kv_session_stats *sessions; /* of all pools */
	size_t n_sessions;
	uint64_t pool_id;
	uint32_t n_groups; /* that had something */
};

static void note_holders(const struct kv_pool *pool, struct found *f)
{
	for (uint32_t w = 0; w < KV_HOLDER_WORDS; w++)
		f->holders[w] = kv_load_relaxed(&pool->descriptors[f->id].holders[w]);
}

static bool holds(const struct found *f, size_t n, uint64_t slot)
{
	for (size_t i = 0; i < n; i++) {
		if (f[i].holders[slot / 64] >> slot % 64 & 1)
			return true;
	}
	return false;
}

/* The sessions that hold any of @f, as JSON, and for people in @ret. */
static void show_who(const struct look *l, const struct found *f, size_t n, char *ret, size_t size)
{
	struct kv_emit *e = &l->asked->ctl->emit;
	size_t used = 0;

	*ret = 0;
	kv_emit_open(e, "sessions", '[');
	for (const struct kv_session_stats *s = l->sessions; s < l->sessions + l->n_sessions; s++) {
		if (s->pool_id != l->pool_id || s->slot >= KV_MAX_SESSIONS || !holds(f, n, s->slot))
			continue;
		kv_emit_number(e, NULL, s->id);
		if (used < size)
			used += (size_t)snprintf(ret + used, size - used, "%s%s %" PRIu64 " (%" PRIu64 ")",
						 used ? ", " : "", s->client, s->id, s->pid);
	}
	kv_emit_close(e);
	if (!used)
		snprintf(ret, size, "-");
}

static void show_blocks(const struct look *l, const struct found *f, size_t n)
{
	struct kv_emit *e = &l->asked->ctl->emit;

	kv_emit_open(e, "blocks", '[');
	for (; n--; f++) {
		kv_emit_open(e, NULL, '{');
		kv_emit_number(e, "id", (uint64_t)f->id);
		kv_emit_number(e, "first_token", f->first);
		kv_emit_number(e, "end_token", f->end);
		kv_emit_close(e);
	}
	kv_emit_close(e);
}

static void show_group(struct look *l, const struct kv_pool_stats *stats, uint32_t group, const char *kind,
		       const struct found *f, size_t n)
{
	struct kv_emit *e = &l->asked->ctl->emit;
	size_t tokens = 0, leading = 0;
	char who[256];

	for (size_t i = 0; i < n; i++) {
		tokens += f[i].end - f[i].first;
		leading = f[i].first == leading ? f[i].end : leading;
	}
	kv_emit_open(e, NULL, '{');
	kv_emit_text(e, "pool", stats->name);
	kv_emit_number(e, "pool_id", stats->id);
	kv_emit_text(e, "name_space", stats->name_space);
	kv_emit_number(e, "epoch", kv_pool_epoch(l->pool));
	kv_emit_number(e, "block_tokens", l->pool->head.block_tokens);
	kv_emit_number(e, "group", group);
	kv_emit_text(e, "kind", kind);
	kv_emit_number(e, "n_blocks", n);
	kv_emit_number(e, "n_tokens", tokens);
	kv_emit_number(e, "leading_tokens", leading);
	kv_emit_number(e, "last_token", n ? f[n - 1].end : 0);
	show_who(l, f, n, who, sizeof(who));
	show_blocks(l, f, n);
	kv_emit_close(e);
	kv_emit_cell(e, "%s", kv_words_cut(stats->name, 24).text);
	kv_emit_cell(e, "%" PRIu32, group);
	kv_emit_cell(e, "%s", kind);
	kv_emit_cell(e, "%zu", n);
	kv_emit_cell(e, "%zu", tokens);
	kv_emit_cell(e, "%zu", leading);
	kv_emit_cell(e, "%zu", n ? f[n - 1].end : 0);
	kv_emit_cell(e, "%s", who);
	l->n_groups++;
}

static size_t find_chain(const struct look *l, uint32_t group, struct found *f, size_t max)
{
	kv_cleanup(kv_freep) kv_block_id *ids = malloc((max + 1) * sizeof(*ids));
	kv_cleanup(kv_freep) uint64_t *words = malloc((max + 1) * sizeof(*words));
	kv_cleanup(kv_identity_deinit) struct kv_identity identity = {0};
	struct kv_item which = {.tag = TAG_GROUP, .bytes = (uint8_t *)&group, .n_bytes = sizeof(group)};
	struct kv_peek peek = {l->pool, &identity, l->asked->tokens.at, l->asked->tokens.n};
	size_t n = 0, size = l->pool->head.block_tokens;

	if (ids && words && !kv_identity_copy(&identity, &l->asked->identity) &&
	    (!group || !kv_identity_add(&identity, &which)))
		n = kv_peek_chain(&peek, ids, words, max);
	for (size_t i = 0; i < n; i++) {
		f[i] = (struct found){.id = ids[i], .first = i * size, .end = (i + 1) * size};
		note_holders(l->pool, &f[i]);
	}
	return n;
}

/* @step: tokens from one look to the next, @size those of a block, 0 of a state */
static size_t find_loose(const struct look *l, uint32_t group, struct found *f, size_t step, size_t size)
{
	const struct kv_tokens *t = &l->asked->tokens;
	struct kv_peek peek = {l->pool, &l->asked->identity, t->at, t->n};
	size_t n = 0;
	struct kv_blake2b hash;

	kv_blake2b_init(&hash);
	for (size_t at = 0; at + size <= t->n; at += step) {
		struct kv_prefix_digest before;

		kv_prefix_digest(&hash, at, &l->asked->identity, &before);
		f[n].id = size || at ? kv_peek_loose(&peek, &before, group, at, at + size) : -1;
		if (f[n].id >= 0) {
			f[n].first = at;
			f[n].end = at + size;
			note_holders(l->pool, &f[n++]);
		}
		if (at + step <= t->n)
			kv_blake2b_add(&hash, t->at + at, step * sizeof(*t->at));
	}
	return n;
}

static int look(struct look *l, const struct kv_pool_stats *stats)
{
	bool states = l->pool->layout.n_components && l->pool->layout.components[0].role == KV_ROLE_STATE;
	size_t size = l->pool->head.block_tokens, n_tokens = l->asked->tokens.n;
	size_t max = states ? n_tokens : n_tokens / size;
	kv_cleanup(kv_freep) struct found *f = calloc(max + 2, sizeof(*f));

	if (!f)
		return -ENOMEM;
	/* Groups are numbered without gaps: some that has nothing may stand between two that have. */
	for (uint32_t g = 0; g < KV_MAX_GROUPS; g++) {
		size_t n = states ? 0 : find_chain(l, g, f, max);

		if (n)
			show_group(l, stats, g, "all", f, n);
		n = states ? find_loose(l, g, f, 1, 0) : find_loose(l, g, f, size, size);
		if (n)
			show_group(l, stats, g, states ? "state" : "window", f, n);
	}
	if (!l->n_groups)
		show_group(l, stats, 0, "-", f, 0);
	return 0;
}

static int look_in(struct asked *a, const struct kv_pool_stats *stats, struct kv_session_stats *sessions,
		   size_t n_sessions)
{
	KV_OPTIONS(kv_pool_options, how, .name = stats->name, .model = stats->model, .revision = stats->revision,
		   .name_space = stats->name_space, .tp_ranks = (uint32_t)stats->tp_ranks,
		   .gpu_mask = (uint32_t)stats->gpu_mask, .read_only = 1, .timeout = kv_ctl_left(a->ctl));
	struct look l = {.asked = a, .sessions = sessions, .n_sessions = n_sessions, .pool_id = stats->id};
	int r = kv_pool_open(a->ctl->client, &how, &l.pool);

	/* Not named, and gone by now or not to be read by this user: the others count. */
	if (!a->pool && (r == -ENOENT || r == -EACCES))
		return KV_EXIT_DONE;
	if (r < 0)
		return kv_ctl_broken(a->ctl, r);
	r = look(&l, stats);
	kv_pool_close(l.pool);
	return r < 0 ? kv_ctl_refuse(a->ctl, KV_EXIT_FAILED, "no memory") : KV_EXIT_DONE;
}

static int show(struct asked *a)
{
	kv_cleanup(kv_freep) struct kv_session_stats *sessions = NULL;
	kv_cleanup(kv_freep) struct kv_pool_stats *pools = NULL;
	struct kv_emit *e = &a->ctl->emit;
	size_t n_pools = 0, n_sessions = 0, n_seen = 0;
	int status = kv_ctl_ask(a->ctl, KV_STAT_POOL, &pools, &n_pools);

	if (!status)
		status = kv_ctl_ask(a->ctl, KV_STAT_SESSION, &sessions, &n_sessions);
	for (size_t i = 0; !status && a->pool && i < n_pools; i++)
		n_seen += !strcmp(pools[i].name, a->pool);
	if (!status && a->pool && !n_seen)
		return kv_ctl_no_pool(a->ctl, "--pool: ", a->pool, pools, n_pools);
	if (status)
		return status;
	kv_emit_open(e, NULL, '{');
	kv_emit_number(e, "n_tokens", a->tokens.n);
	kv_emit_open(e, "groups", '[');
	kv_emit_line(e, "%zu tokens", a->tokens.n);
	kv_emit_head(e, "<POOL", ">GROUP", "<KEEPS", ">BLOCKS", ">TOKENS", ">LEADING", ">UP TO", "<HELD BY",
		     NULL);
	for (size_t i = 0; i < n_pools && !status; i++) {
		if ((!a->pool || !strcmp(pools[i].name, a->pool)) &&
		    (!a->name_space || !strcmp(pools[i].name_space, a->name_space)))
			status = look_in(a, &pools[i], sessions, n_sessions);
	}
	kv_emit_table(e);
	kv_emit_close(e);
	kv_emit_close(e);
	return status;
}

int kv_cmd_prefix_show(struct kv_ctl *ctl, int argc, char **argv)
{
	struct asked a = {.ctl = ctl};
	int status = read_options(&a, argc, argv);

	if (!status)
		status = a.model ? tokenize(&a) : read_numbers(&a);
	if (!status)
		status = show(&a);
	kv_tokens_deinit(&a.tokens);
	kv_identity_deinit(&a.identity);
	free(a.text);
	return status;
}
