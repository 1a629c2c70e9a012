/* SPDX-License-Identifier: Apache-2.0 */
/* Plans: options and their values as words, for command lines. */
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/plan.h>

#include "include/internal/error.h"
#include "include/internal/public.h"

#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static const char *const layouts[] = {"auto", "flat", "split", "paged", "grouped", "slab", NULL};
static const char *const kv_types[] = {"auto", "f32", "f16",	    "bf16", "fp8",
				       "int8", "fp4", "fp8_packed", NULL};

/* Words stand for 0, 1, 2, ...; an option without words is a number. */
static const struct {
	const char *name;
	const char *const *words;
	size_t offset;
} options[] = {
	{"tp", NULL, offsetof(struct kv_plan_options, tp)},
	{"block-size", NULL, offsetof(struct kv_plan_options, block_tokens)},
	{"kernel-size", NULL, offsetof(struct kv_plan_options, kernel_tokens)},
	{"layout", layouts, offsetof(struct kv_plan_options, layout)},
	{"kv-dtype", kv_types, offsetof(struct kv_plan_options, kv_type)},
	{"scales", WORDS("tensor", "head", "token_head"), offsetof(struct kv_plan_options, scales)},
	{"state-dtype", WORDS("auto", "f32", "f16", "bf16"),
	 offsetof(struct kv_plan_options, state_type)},
	{"max-seqs", NULL, offsetof(struct kv_plan_options, n_seqs)},
	{"chunk", NULL, offsetof(struct kv_plan_options, chunk_tokens)},
	{"draft-tokens", NULL, offsetof(struct kv_plan_options, draft_tokens)},
	{"checkpoints", NULL, offsetof(struct kv_plan_options, n_checkpoints)},
	{"fp4-indexer", WORDS("no", "yes"), offsetof(struct kv_plan_options, fp4_indexer)},
};

static int parse_number(const char *name, const char *value, uint64_t max, uint64_t *ret)
{
	char *end;

	errno = 0;
	*ret = strtoull(value, &end, 10);
	if (errno || end == value || *end || *value == '-' || *ret > max)
		return kv_error(-EINVAL, "%s: '%s' given, a number up to %llu is needed", name,
				value, (unsigned long long)max);
	return 0;
}

static int parse_word(const char *name, const char *const *words, const char *value, uint64_t *ret)
{
	char all[128] = "";
	size_t n = 0;

	for (*ret = 0; words[*ret]; (*ret)++) {
		if (!strcmp(words[*ret], value))
			return 0;
		n += (size_t)snprintf(all + n, sizeof(all) - n, "%s%s", n ? ", " : "", words[*ret]);
	}
	return kv_error(-EINVAL, "%s: '%s' given; %s exist", name, value, all);
}

KV_PUBLIC int kv_plan_option(struct kv_plan_options *o, const char *name, const char *value)
{
	uint64_t n;
	int r;

	if (!strcmp(name, "context")) {
		r = parse_number(name, value, UINT64_MAX, &n);
		if (!r)
			o->context = n;
		return r;
	}
	for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++) {
		if (strcmp(options[i].name, name))
			continue;
		r = options[i].words ? parse_word(name, options[i].words, value, &n)
				     : parse_number(name, value, UINT32_MAX, &n);
		if (!r)
			*(uint32_t *)(void *)((char *)o + options[i].offset) = (uint32_t)n;
		return r;
	}
	return kv_error(-ENOENT, "%s: not an option of plans", name);
}

KV_PUBLIC const char *kv_plan_layout_name(uint32_t layout)
{
	return layout <= KV_PLAN_SLAB ? layouts[layout] : "?";
}

KV_PUBLIC const char *kv_plan_kv_type_name(uint32_t kv_type)
{
	return kv_type <= KV_KV_F8_PACKED ? kv_types[kv_type] : "?";
}
