/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvctl plan: what a model's cache costs and how much of it fits. Asks no daemon and no GPU.
 *
 *	kvctl plan config.json --budget 100G
 *	kvctl plan a.json,min=20G b.json,weight=2 --budget 120G
 */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/client.h>
#include <kvcached/plan.h>

#include "include/internal/cleanup.h"
#include "tools/kvctl.h"

#define MAX_MODELS	 16
#define MAX_ALTERNATIVES (2 * KV_PLAN_SLAB)

static const char *const kind_names[] = {"?", "full", "window", "chunked", "state", "cross"};

struct one {
	char path[1024];
	struct kv_arch *model;
	struct kv_plan_share share;
};

struct asked {
	struct kv_plan_options options;
	struct one models[MAX_MODELS];
	uint32_t n_models;
	struct kv_arch *draft;
	bool print_model;
	bool backends;
	const char *backend; /* a name of another engine's */
};

/* One other way to spend the same bytes. */
struct alternative {
	uint32_t layout, block_tokens, kv_type;
	uint64_t n_seqs, n_tokens, seq_bytes, waste_bytes;
};

static void free_asked(struct asked *a)
{
	for (uint32_t i = 0; i < a->n_models; i++)
		kv_arch_free(a->models[i].model);
	kv_arch_free(a->draft);
}

static void free_plan(struct kv_plan **plan)
{
	kv_plan_free(*plan);
}

static int parse_count(const char *text, uint32_t *ret)
{
	uint64_t n;

	if (kv_ctl_u64(text, &n) || n > UINT32_MAX)
		return -EINVAL;
	*ret = (uint32_t)n;
	return 0;
}

/* "config.json,min=20G,max=60G,weight=2" */
static int parse_model(struct kv_ctl *ctl, const char *text, struct one *m)
{
	char *rest, *item;
	int r = 0;

	if (strlen(text) >= sizeof(m->path))
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "%s: too long", text);
	strcpy(m->path, text);
	strtok_r(m->path, ",", &rest);
	while (!r && (item = strtok_r(NULL, ",", &rest))) {
		if (!strncmp(item, "min=", 4))
			r = kv_ctl_size(item + 4, &m->share.min_bytes);
		else if (!strncmp(item, "max=", 4))
			r = kv_ctl_size(item + 4, &m->share.max_bytes);
		else if (!strncmp(item, "weight=", 7))
			r = parse_count(item + 7, &m->share.weight);
		else
			r = -EINVAL;
		if (r)
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
					     "%s: '%s' is none of min=SIZE, max=SIZE, weight=N",
					     m->path, item);
	}
	r = kv_arch_read(m->path, &m->model);
	return r ? kv_ctl_broken(ctl, r) : KV_EXIT_DONE;
}

const struct option kv_plan_long_options[] = {
	{"budget", required_argument, NULL, 'b'},
	{"tp", required_argument, NULL, 't'},
	{"kv-dtype", required_argument, NULL, 'k'},
	{"scales", required_argument, NULL, 'q'},
	{"state-dtype", required_argument, NULL, 'S'},
	{"block-size", required_argument, NULL, 'n'},
	{"kernel-size", required_argument, NULL, 'K'},
	{"layout", required_argument, NULL, 'l'},
	{"draft", required_argument, NULL, 'd'},
	{"draft-tokens", required_argument, NULL, 'D'},
	{"max-seqs", required_argument, NULL, 'm'},
	{"context", required_argument, NULL, 'c'},
	{"chunk", required_argument, NULL, 'C'},
	{"checkpoints", required_argument, NULL, 'p'},
	{"fp4-indexer", no_argument, NULL, 'f'},
	{"model", no_argument, NULL, 'M'},
	{"backends", no_argument, NULL, 'B'},
	{"attention-backend", required_argument, NULL, 'A'},
	{"json", no_argument, NULL, 'j'},
	{NULL},
};

static int take_option(struct kv_ctl *ctl, struct asked *a, int c, const char *arg)
{
	const char *name = NULL;

	for (const struct option *o = kv_plan_long_options; o->name; o++)
		name = o->val == c ? o->name : name;
	switch (c) {
	case 'b':
		if (kv_ctl_size(arg, &a->options.budget_bytes))
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
					     "plan: --budget: '%s' given, a size is needed", arg);
		return KV_EXIT_DONE;
	case 'd':
		kv_arch_free(a->draft);
		a->draft = NULL;
		return kv_arch_read(arg, &a->draft) ? kv_ctl_broken(ctl, -EINVAL) : KV_EXIT_DONE;
	case 'M':
		a->print_model = true;
		return KV_EXIT_DONE;
	case 'A':
		a->backend = arg;
		/* fall through */
	case 'B':
		a->backends = true;
		return KV_EXIT_DONE;
	case 'j':
		ctl->emit.json = true;
		return KV_EXIT_DONE;
	default:
		if (kv_plan_option(&a->options, name, c == 'f' ? "yes" : arg))
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "plan: --%s", kv_error_text());
		return KV_EXIT_DONE;
	}
}

static int parse(struct kv_ctl *ctl, struct asked *a, int argc, char **argv)
{
	int c, r;

	optind = 0; /* the options before the command were parsed by the same getopt */
	opterr = 0;
	while ((c = getopt_long(argc, argv, "", kv_plan_long_options, NULL)) != -1) {
		if (c == '?')
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
					     "plan: %s: unknown, or lacks a value",
					     argv[optind - 1]);
		r = take_option(ctl, a, c, optarg);
		if (r)
			return r;
	}
	for (; optind < argc; optind++) {
		if (a->n_models == MAX_MODELS)
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "plan: more than %d models",
					     MAX_MODELS);
		r = parse_model(ctl, argv[optind], &a->models[a->n_models++]);
		if (r)
			return r;
	}
	if (!a->n_models)
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "plan: no config.json is given");
	if (!a->options.budget_bytes && !a->print_model && !a->backends)
		return kv_ctl_refuse(
			ctl, KV_EXIT_USAGE,
			"plan: --budget is missing: how many bytes is the cache to have");
	return KV_EXIT_DONE;
}

static bool better(const struct alternative *a, const struct alternative *b)
{
	if (a->n_seqs != b->n_seqs)
		return a->n_seqs > b->n_seqs;
	if (a->n_tokens != b->n_tokens)
		return a->n_tokens > b->n_tokens;
	return a->block_tokens < b->block_tokens; /* finer prefixes for the same capacity */
}

static struct alternative of_plan(const struct kv_plan *plan, const struct kv_plan_options *o)
{
	struct alternative a = {
		.layout = plan->layout,
		.kv_type = o->kv_type,
		.n_seqs = plan->n_seqs,
		.n_tokens = plan->n_tokens,
		.seq_bytes = plan->seq_bytes,
		.waste_bytes = plan->waste_bytes,
	};

	for (uint32_t p = 0; p < plan->n_pools; p++)
		if (plan->pools[p].block_tokens > a.block_tokens)
			a.block_tokens = plan->pools[p].block_tokens;
	return a;
}

/* Each layout in this type of values and in 8 bits, at the usual block size that fits most; the
 * best first. */
static size_t alternatives(const struct kv_arch *model, const struct kv_arch *draft,
			   const struct kv_plan_options *options, const struct alternative *chosen,
			   struct alternative *ret)
{
	static const uint32_t sizes[] = {16, 32, 64, 128, 256};
	uint32_t types[] = {options->kv_type, KV_KV_F8};
	size_t n = 0;

	for (uint32_t k = 0; k < 2 * KV_PLAN_SLAB; k++) {
		struct kv_plan_options o = *options;
		struct alternative best = {0};
		size_t at;

		o.layout = 1 + k % KV_PLAN_SLAB;
		o.kv_type = types[k / KV_PLAN_SLAB];
		if ((k >= KV_PLAN_SLAB && types[0] == KV_KV_F8) ||
		    (o.layout == chosen->layout && o.kv_type == chosen->kv_type))
			continue;
		for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
			struct kv_plan *plan;
			struct alternative x;

			o.block_tokens = sizes[i];
			if (kv_plan_arch(model, draft, &o, &plan))
				continue;
			x = of_plan(plan, &o);
			kv_plan_free(plan);
			if (!best.layout || better(&x, &best))
				best = x;
		}
		if (!best.layout)
			continue;
		for (at = n++; at > 0 && better(&best, &ret[at - 1]); at--)
			ret[at] = ret[at - 1];
		ret[at] = best;
	}
	return n;
}

static void show_numbers(struct kv_emit *e, const struct one *m, const struct kv_plan *plan)
{
	const struct {
		const char *key, *words;
		uint64_t number;
		bool bytes;
	} rows[] = {
		{"budget_bytes", "budget", plan->budget_bytes, true},
		{"used_bytes", "used", plan->used_bytes, true},
		{"waste_bytes", "too little for one more", plan->waste_bytes, true},
		{"null_bytes", "null blocks", plan->null_bytes, true},
		{"align_bytes", "padding in blocks", plan->align_bytes, true},
		{"token_bytes", "a token", plan->token_bytes, true},
		{"state_bytes", "a sequence's states", plan->state_bytes, true},
		{"prefix_tokens", "prefixes are multiples of", plan->prefix_tokens, false},
		{"context", "context, tokens", plan->context, false},
		{"seq_bytes", "a sequence of that length", plan->seq_bytes, true},
		{"seq_need_bytes", "of it holding something", plan->seq_need_bytes, true},
		{"n_seqs", "sequences of that length", plan->n_seqs, false},
		{"n_tokens", "tokens at once", plan->n_tokens, false},
	};

	kv_emit_text(e, "model", m->model->name);
	kv_emit_text(e, "architecture", m->model->architecture);
	kv_emit_number(e, "n_layers", m->model->n_layers);
	kv_emit_text(e, "layout", kv_plan_layout_name(plan->layout));
	kv_emit_line(e, "%s: %s, %u layers, layout %s", m->path, m->model->architecture,
		     m->model->n_layers, kv_plan_layout_name(plan->layout));
	kv_emit_gap(e);
	kv_emit_head(e, "<WHAT", ">VALUE", ">EXACT", NULL);
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		kv_emit_number(e, rows[i].key, rows[i].number);
		kv_emit_cell(e, "%s", rows[i].words);
		if (rows[i].bytes)
			kv_emit_cell(e, "%s", kv_words_bytes(rows[i].number).text);
		else
			kv_emit_cell(e, "%" PRIu64, rows[i].number);
		kv_emit_cell(e, "%" PRIu64, rows[i].number);
	}
	kv_emit_table(e);
	kv_emit_gap(e);
}

static void show_pools(struct kv_emit *e, const struct kv_plan *plan)
{
	kv_emit_open(e, "pools", '[');
	kv_emit_head(e, "<POOL", ">TOKENS", ">BLOCK BYTES", ">BLOCKS", ">SIZE", ">PER SEQUENCE",
		     ">ONCE", NULL);
	for (uint32_t p = 0; p < plan->n_pools; p++) {
		const struct kv_plan_pool *pool = &plan->pools[p];

		kv_emit_open(e, NULL, '{');
		kv_emit_text(e, "name", pool->name);
		kv_emit_bool(e, "paged", pool->paged);
		kv_emit_number(e, "block_tokens", pool->block_tokens);
		kv_emit_number(e, "block_bytes", pool->block_bytes);
		kv_emit_number(e, "payload_bytes", pool->payload_bytes);
		kv_emit_number(e, "n_blocks", pool->n_blocks);
		kv_emit_number(e, "offset", pool->offset);
		kv_emit_number(e, "bytes", pool->bytes);
		kv_emit_number(e, "blocks_per_seq", pool->blocks_per_seq);
		kv_emit_number(e, "blocks_once", pool->blocks_once);
		kv_emit_close(e);
		kv_emit_cell(e, "%s", pool->name);
		if (pool->block_tokens)
			kv_emit_cell(e, "%u", pool->block_tokens);
		else
			kv_emit_cell(e, "row");
		kv_emit_cell(e, "%" PRIu64, pool->block_bytes);
		kv_emit_cell(e, "%" PRIu64, pool->n_blocks);
		kv_emit_cell(e, "%s", kv_words_bytes(pool->bytes).text);
		kv_emit_cell(e, "%" PRIu64, pool->blocks_per_seq);
		kv_emit_cell(e, "%" PRIu64, pool->blocks_once);
	}
	kv_emit_table(e);
	kv_emit_close(e);
	kv_emit_gap(e);

	kv_emit_open(e, "groups", '[');
	kv_emit_head(e, "<GROUP", "<KEEPS", ">WINDOW", ">TOKENS", "<POOL", ">BYTES IN A BLOCK",
		     NULL);
	for (uint32_t g = 0; g < plan->n_groups; g++) {
		const struct kv_plan_group *group = &plan->groups[g];

		kv_emit_open(e, NULL, '{');
		kv_emit_text(e, "name", group->name);
		kv_emit_text(e, "kind", kind_names[group->kind]);
		kv_emit_number(e, "window", group->window);
		kv_emit_number(e, "stride", group->stride);
		kv_emit_number(e, "block_tokens", group->block_tokens);
		kv_emit_number(e, "pool", group->pool);
		kv_emit_number(e, "payload_bytes", group->payload_bytes);
		kv_emit_number(e, "blocks_per_seq", group->blocks_per_seq);
		kv_emit_close(e);
		kv_emit_cell(e, "%s", group->name);
		kv_emit_cell(e, "%s", kind_names[group->kind]);
		kv_emit_cell(e, "%u", group->window);
		kv_emit_cell(e, "%u", group->block_tokens);
		kv_emit_cell(e, "%s", plan->pools[group->pool].name);
		kv_emit_cell(e, "%" PRIu64, group->payload_bytes);
	}
	kv_emit_table(e);
	kv_emit_close(e);
	kv_emit_gap(e);
}

/* A block's picture: the parts of its first two layers and of its last, for people. */
static void show_components(struct kv_emit *e, const struct kv_plan *plan)
{
	uint32_t n = plan->n_components;

	kv_emit_open(e, "components", '[');
	kv_emit_head(e, ">OFFSET", ">BYTES", ">LAYER", "<PART", "<GROUP", ">PER TOKEN", NULL);
	for (uint32_t i = 0; i < n; i++) {
		const struct kv_plan_component *c = &plan->components[i];

		kv_emit_open(e, NULL, '{');
		kv_emit_text(e, "name", c->name);
		kv_emit_number(e, "layer", c->layer);
		kv_emit_number(e, "group", c->group);
		kv_emit_number(e, "offset", c->offset);
		kv_emit_number(e, "bytes", c->bytes);
		kv_emit_number(e, "slot_bytes", c->slot_bytes);
		kv_emit_number(e, "const_bytes", c->const_bytes);
		kv_emit_number(e, "n_heads", c->n_heads);
		kv_emit_number(e, "head_dim", c->head_dim);
		kv_emit_close(e);
		if (n > 16 && i >= 8 && i < n - 4) {
			if (i == 8) {
				kv_emit_cell(e, "...");
				for (int k = 0; k < 5; k++)
					kv_emit_cell(e, " ");
			}
			continue;
		}
		kv_emit_cell(e, "%" PRIu64, c->offset);
		kv_emit_cell(e, "%" PRIu64, c->bytes);
		kv_emit_cell(e, "%u", c->layer);
		kv_emit_cell(e, "%s", c->name);
		kv_emit_cell(e, "%s", plan->groups[c->group].name);
		kv_emit_cell(e, "%" PRIu64, c->slot_bytes);
	}
	kv_emit_table(e);
	kv_emit_close(e);
	kv_emit_gap(e);
}

static void show_alternatives(struct kv_emit *e, const struct alternative *chosen,
			      const struct alternative *others, size_t n)
{
	kv_emit_open(e, "alternatives", '[');
	kv_emit_head(e, "<ALTERNATIVE", ">TOKENS", "<VALUES", ">SEQUENCES", ">TOKENS AT ONCE",
		     ">GAIN", NULL);
	for (size_t i = 0; i < n; i++) {
		const struct alternative *a = &others[i];
		double gain = chosen->n_tokens
				      ? 100.0 * ((double)a->n_tokens / (double)chosen->n_tokens - 1)
				      : 0;

		kv_emit_open(e, NULL, '{');
		kv_emit_text(e, "layout", kv_plan_layout_name(a->layout));
		kv_emit_number(e, "block_tokens", a->block_tokens);
		kv_emit_text(e, "kv_dtype", kv_plan_kv_type_name(a->kv_type));
		kv_emit_number(e, "n_seqs", a->n_seqs);
		kv_emit_number(e, "n_tokens", a->n_tokens);
		kv_emit_number(e, "seq_bytes", a->seq_bytes);
		kv_emit_real(e, "gain_percent", gain);
		kv_emit_close(e);
		kv_emit_cell(e, "%s", kv_plan_layout_name(a->layout));
		kv_emit_cell(e, "%u", a->block_tokens);
		kv_emit_cell(e, "%s", kv_plan_kv_type_name(a->kv_type));
		kv_emit_cell(e, "%" PRIu64, a->n_seqs);
		kv_emit_cell(e, "%" PRIu64, a->n_tokens);
		kv_emit_cell(e, "%+.1f%%", gain);
	}
	kv_emit_table(e);
	kv_emit_close(e);
}

static int plan_one(struct kv_ctl *ctl, const struct asked *a, const struct one *m, uint64_t budget)
{
	kv_cleanup(free_plan) struct kv_plan *plan = NULL;
	struct alternative others[MAX_ALTERNATIVES], chosen;
	struct kv_plan_options o = a->options;
	size_t n;
	int r;

	o.budget_bytes = budget;
	r = kv_plan_arch(m->model, a->draft, &o, &plan);
	if (r)
		return kv_ctl_broken(ctl, r);
	chosen = of_plan(plan, &o);
	n = alternatives(m->model, a->draft, &o, &chosen, others);
	kv_emit_open(&ctl->emit, NULL, '{');
	show_numbers(&ctl->emit, m, plan);
	show_pools(&ctl->emit, plan);
	show_components(&ctl->emit, plan);
	show_alternatives(&ctl->emit, &chosen, others, n);
	kv_emit_close(&ctl->emit);
	return KV_EXIT_DONE;
}

/* Bytes for one sequence of the whole context: what a model needs to be of any use. */
static int least(struct kv_ctl *ctl, const struct asked *a, struct one *m)
{
	kv_cleanup(free_plan) struct kv_plan *plan = NULL;
	struct kv_plan_options o = a->options;
	int r;

	if (m->share.min_bytes)
		return KV_EXIT_DONE;
	o.n_seqs = 0;
	r = kv_plan_arch(m->model, a->draft, &o, &plan);
	if (r)
		return kv_ctl_broken(ctl, r);
	for (uint32_t p = 0; p < plan->n_pools; p++)
		m->share.min_bytes += (plan->pools[p].blocks_once + plan->pools[p].blocks_per_seq) *
				      plan->pools[p].block_bytes;
	return KV_EXIT_DONE;
}

static int plan_several(struct kv_ctl *ctl, struct asked *a)
{
	struct kv_plan_share shares[MAX_MODELS];
	int r;

	for (uint32_t i = 0; i < a->n_models; i++) {
		r = least(ctl, a, &a->models[i]);
		if (r)
			return r;
		shares[i] = a->models[i].share;
	}
	r = kv_plan_colocate(a->options.budget_bytes, shares, a->n_models);
	if (r)
		return kv_ctl_broken(ctl, r);
	kv_emit_open(&ctl->emit, NULL, '[');
	for (uint32_t i = 0; i < a->n_models; i++) {
		if (i)
			kv_emit_gap(&ctl->emit);
		r = plan_one(ctl, a, &a->models[i], shares[i].grant_bytes);
		if (r)
			return r;
	}
	kv_emit_close(&ctl->emit);
	return KV_EXIT_DONE;
}

int kv_cmd_plan(struct kv_ctl *ctl, int argc, char **argv)
{
	kv_cleanup(free_asked) struct asked a = {.options = {.size = sizeof(a.options)}};
	int r;

	r = parse(ctl, &a, argc, argv);
	if (r)
		return r;
	if (a.print_model) {
		kv_cleanup(kv_freep) char *text = kv_arch_print(a.models[0].model);

		if (!text)
			return kv_ctl_refuse(ctl, KV_EXIT_FAILED, "no memory");
		fprintf(ctl->emit.out, "%s\n", text);
		return KV_EXIT_DONE;
	}
	if (a.backends)
		return kv_ctl_backends(ctl, a.models[0].model, &a.options, a.backend);
	return a.n_models > 1 ? plan_several(ctl, &a)
			      : plan_one(ctl, &a, &a.models[0], a.options.budget_bytes);
}
