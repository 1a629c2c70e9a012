/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvctl plan --backends: which attention backends serve a model's layers, and why others don't; and what
 * a backend's name of another engine means for it.
 *
 *	kvctl plan config.json --backends --kv-dtype fp8
 *	kvctl plan config.json --backends --attention-backend fa3
 */
#include <errno.h>
#include <string.h>

#include <kvcached/backend.h>
#include <kvcached/plan.h>
#include <kvcached/state.h>

#include "alloc/compat_pools.h"
#include "tools/kvctl.h"

/* Layers that ask the same of a backend. */
struct kind {
	const struct kv_arch_layer *layer;
	uint32_t n;
	bool state; /* the recurrent part of it */
};

#define MAX_KINDS 16

static bool same(const struct kv_arch_layer *a, const struct kv_arch_layer *b)
{
	return a->kind == b->kind && a->form == b->form && a->n_kv_heads == b->n_kv_heads &&
	       a->head_dim == b->head_dim && a->v_head_dim == b->v_head_dim &&
	       a->latent_dim == b->latent_dim && a->rope_dim == b->rope_dim &&
	       a->index_dim == b->index_dim;
}

/* Return: kinds of layers; those past MAX_KINDS are left out. */
static size_t kinds_of(const struct kv_arch *model, struct kind *ret)
{
	size_t n = 0;

	for (uint32_t i = 0; i < model->n_layers; i++) {
		const struct kv_arch_layer *l = &model->layers[i];
		size_t k = 0;

		if (l->kind == KV_LAYER_NONE)
			continue;
		while (k < n && !same(ret[k].layer, l))
			k++;
		if (k == MAX_KINDS)
			continue;
		if (k == n)
			ret[n++] = (struct kind){l, 0, l->kind == KV_LAYER_STATE};
		ret[k].n++;
	}
	return n;
}

static const char *words_of(const struct kv_arch_layer *l, char *text, size_t size)
{
	static const char *const reach[] = {"", "all tokens", "a window", "chunks", "", "an encoder's output"};

	if (l->kind == KV_LAYER_STATE)
		snprintf(text, size, "recurrent state");
	else if (l->form == KV_FORM_V4)
		snprintf(text, size, "V4 rows of %u + %u", l->latent_dim, l->rope_dim);
	else if (l->form == KV_FORM_LATENT)
		snprintf(text, size, "latents of %u + %u%s", l->latent_dim, l->rope_dim,
			 l->index_dim ? ", chosen keys" : "");
	else
		snprintf(text, size, "%u heads of %u, %s", l->n_kv_heads, l->head_dim, reach[l->kind]);
	return text;
}

/* The cache's type as kernels know it; -1: none of them reads it. */
static int cache_type(const struct kv_arch *model, const struct kv_plan_options *o)
{
	static const int types[] = {0, KV_F32, KV_F16, KV_BF16, KV_F8_E4M3, -1, -1, KV_BYTES};

	return o->kv_type == KV_KV_AUTO ? model->dtype : types[o->kv_type];
}

static struct kv_attention_query query_of(const struct kv_arch *model, const struct kv_arch_layer *l,
					  const struct kv_plan_options *o)
{
	bool latent = l->form == KV_FORM_LATENT;
	int type = cache_type(model, o);
	struct kv_attention_query q = {
		.size = sizeof(q),
		.dtype = model->dtype,
		.k_dtype = type,
		.v_dtype = type,
		.head_dim_k = (int32_t)(latent ? l->latent_dim + l->rope_dim : l->head_dim),
		.head_dim_v = (int32_t)(latent ? l->latent_dim : l->v_head_dim ?: l->head_dim),
		.block_tokens = (int32_t)(o->kernel_tokens ?: o->block_tokens ?: 64),
		.kind = l->kind == KV_LAYER_CROSS ? KV_KIND_CROSS : KV_KIND_DECODER,
	};

	if (latent)
		q.features |= KV_ATTN_BIT(MLA);
	if (latent && l->index_dim)
		q.features |= KV_ATTN_BIT(SPARSE);
	if (l->kind == KV_LAYER_WINDOW)
		q.features |= KV_ATTN_BIT(WINDOW);
	if (l->kind == KV_LAYER_CROSS)
		q.features |= KV_ATTN_BIT(NON_CAUSAL);
	return q;
}

static void show_row(struct kv_emit *e, const struct kind *k, const char *layer, enum kv_device device,
		     const char *name, const char *why)
{
	const char *where = device == KV_DEVICE_CUDA ? "gpu" : "host";

	kv_emit_open(e, NULL, '{');
	kv_emit_number(e, "n_layers", k->n);
	kv_emit_text(e, "layer", layer);
	kv_emit_text(e, "device", where);
	kv_emit_text(e, "backend", name);
	kv_emit_bool(e, "serves", !*why);
	kv_emit_text(e, "why_not", why);
	kv_emit_close(e);
	kv_emit_cell(e, "%u", k->n);
	kv_emit_cell(e, "%s", layer);
	kv_emit_cell(e, "%s", where);
	kv_emit_cell(e, "%s", name);
	kv_emit_cell(e, "%s", *why ? why : "serves");
}

static void show_kind(struct kv_emit *e, const struct kv_arch *model, const struct kind *k,
		      const struct kv_plan_options *o, enum kv_device device)
{
	const char *const *names = k->state ? kv_state_backend_names(device) : kv_backend_names(device);
	struct kv_attention_query q = query_of(model, k->layer, o);
	char layer[64], why[1024];

	words_of(k->layer, layer, sizeof(layer));
	if (q.features & KV_ATTN_BIT(SPARSE)) { /* a call of its own, of dsa.h */
		if (*names)
			show_row(e, k, layer, device, "kv_sparse_mla", "");
		return;
	}
	for (; *names; names++) {
		struct kv_attention_caps caps = {.size = sizeof(caps)};

		*why = 0;
		if (k->state)
			; /* by the shapes of a call: kv_gdn_validate(), kv_ssd_validate() */
		else if (k->layer->form == KV_FORM_V4)
			snprintf(why, sizeof(why), "no kernel reads V4 rows");
		else if (cache_type(model, o) < 0)
			snprintf(why, sizeof(why), "kv-dtype: no kernel reads %s",
				 kv_plan_kv_type_name(o->kv_type));
		else if (kv_attention_caps(device, *names, &caps) == 0)
			kv_attention_compare(&caps, &q, why, sizeof(why));
		show_row(e, k, layer, device, *names, why);
	}
}

/* What another engine (alloc/compat.h) takes for the model: its architecture, and a name it forces. */
static const char *elsewhere(const struct kv_arch *model, bool *ret_hybrid, const char **ret_forced)
{
	const char *arch = "MHA";

	*ret_hybrid = !strncmp(model->architecture, "Qwen3_5ForConditionalGeneration", 31) ||
		      !strncmp(model->architecture, "Qwen3_5MoeForConditionalGeneration", 34);
	*ret_forced = NULL;
	for (uint32_t i = 0; i < model->n_layers; i++) {
		const struct kv_arch_layer *l = &model->layers[i];

		if (l->kind == KV_LAYER_NONE || l->kind == KV_LAYER_STATE)
			continue;
		if (l->form == KV_FORM_V4) {
			arch = "MLA";
			*ret_forced = "deepseek_v4";
		} else if (l->form == KV_FORM_LATENT) {
			arch = l->index_dim ? "DSA" : "MLA";
		}
	}
	return arch;
}

static int show_elsewhere(struct kv_ctl *ctl, const struct kv_arch *model, const char *name)
{
	const char *class, *forced, *arch;
	bool hybrid;
	int r;

	arch = elsewhere(model, &hybrid, &forced);
	if (name && !strcmp(name, "hybrid_linear_attn")) /* it takes that itself, where it is right */
		name = NULL;
	r = kv_compat_backend(forced ? forced : name, arch, true, &class);
	if (r)
		return kv_ctl_refuse(ctl, KV_EXIT_FAILED, "plan: %s", kv_error_text());
	kv_emit_open(&ctl->emit, "tokenspeed", '{');
	kv_emit_text(&ctl->emit, "architecture", arch);
	kv_emit_text(&ctl->emit, "backend", class);
	kv_emit_bool(&ctl->emit, "hybrid", hybrid);
	kv_emit_bool(&ctl->emit, "forced", forced != NULL);
	kv_emit_close(&ctl->emit);
	kv_emit_line(&ctl->emit, "TokenSpeed runs it as %s with %s%s%s", arch, class,
		     hybrid ? ", inside HybridLinearAttnBackend" : "",
		     forced && name ? ", whatever name is asked for" : "");
	return KV_EXIT_DONE;
}

int kv_ctl_backends(struct kv_ctl *ctl, const struct kv_arch *model, const struct kv_plan_options *options,
		    const char *name)
{
	struct kv_emit *e = &ctl->emit;
	struct kind kinds[MAX_KINDS];
	size_t n = kinds_of(model, kinds);
	int r;

	kv_emit_open(e, NULL, '{');
	kv_emit_text(e, "model", model->name);
	kv_emit_text(e, "architecture", model->architecture);
	kv_emit_open(e, "backends", '[');
	kv_emit_head(e, ">LAYERS", "<OF", "<DEVICE", "<BACKEND", "<SERVES, OR WHY NOT", NULL);
	for (size_t k = 0; k < n; k++) {
		show_kind(e, model, &kinds[k], options, KV_DEVICE_CUDA);
		show_kind(e, model, &kinds[k], options, KV_DEVICE_HOST);
	}
	kv_emit_table(e);
	kv_emit_close(e);
	kv_emit_gap(e);
	r = show_elsewhere(ctl, model, name);
	kv_emit_close(e);
	return r;
}
