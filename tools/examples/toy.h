/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine that these examples have in common: a toy model, which computes in host memory. Its tokens are bytes, its
 * layers have attention and no matrices. First the half that works by way of the shared cache: what
 * an engine adds to its model. Then the model itself, and the same without a cache, to check against.
 */
#ifndef TOY_H
#define TOY_H

#include <err.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/kvcached.h>

#define TOY_BLOCK      16   /* tokens */
#define TOY_MAX_TOKENS 1024 /* of a sequence, and of a step */
#define TOY_MAX_LAYERS 8
#define TOY_MAX_WIDTH  256 /* n_heads * head_dim */
#define TOY_N_LETTERS  15

struct toy {
	const char *name; /* of its pool, too */
	uint32_t n_layers, n_heads, n_kv_heads, head_dim;
	uint64_t min_bytes; /* of its pool, guaranteed from its first opening on */
};

/* Negative: something is wrong, and the library has words for it. Positive: an answer, listed in the call's comment. */
static inline int toy_must(int r)
{
	if (r < 0)
		errx(1, "%s", kv_error_text());
	return r;
}

/* ---- by way of the cache ---- */

static inline struct kv_client *toy_connect(const char *who)
{
	KV_OPTIONS(kv_connect_options, how, .name = who);
	struct kv_client *client;

	toy_must(kv_connect(&how, &client));
	return client;
}

/* The model's pool. All who give the same name, model and layout have the same cache. */
static inline struct kv_pool *toy_open(struct kv_client *client, const struct toy *toy)
{
	struct kv_component components[2 * TOY_MAX_LAYERS];
	struct kv_layout layout = {
		.kind = KV_LAYOUT_FLAT, .block_tokens = TOY_BLOCK, .components = components};
	KV_OPTIONS(kv_pool_options, what, .name = toy->name, .model = toy->name, .layout = &layout,
		   .min_bytes = toy->min_bytes, .mapped = 1);
	struct kv_pool_info info;
	struct kv_pool *pool;

	layout.n_components =
		kv_layout_uniform(components, toy->n_layers, toy->n_kv_heads, toy->head_dim, KV_F32, 1, 1);
	toy_must(kv_pool_open(client, &what, &pool));
	kv_pool_info(pool, &info);
	if (info.device != KV_DEVICE_HOST)
		errx(1, "the pool lies on a GPU, and this model computes on the host: start kvcached with --host");
	return pool;
}

static inline struct kv_batch *toy_batch(struct kv_pool *pool, uint32_t max_seqs)
{
	KV_OPTIONS(kv_batch_options, size, .max_seqs = max_seqs, .max_tokens = TOY_MAX_TOKENS,
		   .max_blocks_per_seq = TOY_MAX_TOKENS / TOY_BLOCK);
	struct kv_batch *batch;

	toy_must(kv_batch_new(pool, &size, &batch));
	return batch;
}

static inline void toy_embed(const struct toy *toy, int32_t token, int64_t position, float *ret);
static inline void toy_project(const struct toy *toy, uint32_t layer, size_t n_tokens);
static inline void toy_add(const struct toy *toy, size_t n_tokens);
static inline void toy_score(const struct toy *toy, const float *x, float ret[TOY_N_LETTERS]);

/* [TOY_MAX_TOKENS, heads, head_dim] */
static float toy_x[TOY_MAX_TOKENS * TOY_MAX_WIDTH], toy_q[TOY_MAX_TOKENS * TOY_MAX_WIDTH],
	toy_k[TOY_MAX_TOKENS * TOY_MAX_WIDTH], toy_v[TOY_MAX_TOKENS * TOY_MAX_WIDTH],
	toy_out[TOY_MAX_TOKENS * TOY_MAX_WIDTH];

/* A layer's attention for the tokens of a batch: their K and V go into the shared blocks. */
static inline void toy_attend(const struct toy *toy, struct kv_pool *pool, const struct kv_batch_data *data,
			      uint32_t layer)
{
	struct kv_view k, v;

	toy_must(kv_pool_view(pool, 0, 2 * layer, &k));
	toy_must(kv_pool_view(pool, 0, 2 * layer + 1, &v));
	KV_OPTIONS(kv_write_args, store, .device = KV_DEVICE_HOST, .dtype = KV_F32, .n_tokens = data->n_tokens,
		   .key = toy_k, .value = toy_v, .slots = data->slots, .k = k, .v = v);
	toy_must(kv_write(&store));
	KV_OPTIONS(kv_attention_args, attend, .device = KV_DEVICE_HOST, .dtype = KV_F32,
		   .n_seqs = (int32_t)data->n_seqs, .n_tokens = (int32_t)data->n_tokens,
		   .n_heads_q = (int32_t)toy->n_heads, .max_query_len = (int32_t)data->max_query_len,
		   .max_seq_len = (int32_t)data->max_seq_len, .table_width = (int32_t)data->table_width,
		   .q = toy_q, .out = toy_out, .query_start_loc = data->query_start_loc,
		   .seq_lens = data->seq_lens, .block_table = data->block_table, .k = k, .v = v,
		   .window_left = -1, .causal = 1);
	toy_must(kv_attention(&attend));
}

/* One step of a batch that was built. @ret: [n_seqs] a score for each letter that may come next */
static inline void toy_step(const struct toy *toy, struct kv_pool *pool, struct kv_batch *batch,
			    float (*ret)[TOY_N_LETTERS])
{
	const struct kv_batch_data *data = kv_batch_data(batch);
	size_t width = toy->n_heads * toy->head_dim;

	toy_must(kv_batch_copy(batch, NULL)); /* blocks that forks have shared so far */
	for (uint32_t t = 0; t < data->n_tokens; t++)
		toy_embed(toy, data->tokens[t], data->positions[t], toy_x + t * width);
	for (uint32_t layer = 0; layer < toy->n_layers; layer++) {
		toy_project(toy, layer, data->n_tokens);
		toy_attend(toy, pool, data, layer);
		toy_add(toy, data->n_tokens);
	}
	for (uint32_t i = 0; i < data->n_seqs; i++)
		toy_score(toy, toy_x + (size_t)(data->query_start_loc[i + 1] - 1) * width, ret[i]);
}

/* ---- the model ---- */

/* A number from -1 to 1 that looks random. */
static inline float toy_mixed(uint32_t a, uint32_t b)
{
	uint32_t x = a * 0x9e3779b1u ^ (b + 0x7f4a7c15u) * 0x85ebca6bu;

	x = (x ^ x >> 15) * 0x2c1b3c6du;
	x ^= x >> 12;
	return (float)(int32_t)x / 2147483648.0f;
}

static inline void toy_embed(const struct toy *toy, int32_t token, int64_t position, float *ret)
{
	for (uint32_t i = 0; i < toy->n_heads * toy->head_dim; i++)
		ret[i] = toy_mixed((uint32_t)token, i) + toy_mixed((uint32_t)position + 1000, i);
}

/* The elements of a normed x exchanged and weighted. @which: 0 q, 1 k, 2 v */
static inline void toy_part(const struct toy *toy, uint32_t layer, uint32_t which, const float *x, float *ret)
{
	uint32_t width = toy->n_heads * toy->head_dim;
	uint32_t n = which ? toy->n_kv_heads * toy->head_dim : width;
	float sum = 0;

	for (uint32_t i = 0; i < width; i++)
		sum += x[i] * x[i];
	for (uint32_t i = 0; i < n; i++)
		ret[i] = x[(i * 37 + layer * 11 + which * 5) % width] / sqrtf(sum / (float)width) *
			 (1 + toy_mixed(layer * 3 + which, i));
}

static inline void toy_project(const struct toy *toy, uint32_t layer, size_t n_tokens)
{
	size_t width = toy->n_heads * toy->head_dim, kv_width = toy->n_kv_heads * toy->head_dim;

	for (size_t t = 0; t < n_tokens; t++) {
		toy_part(toy, layer, 0, toy_x + t * width, toy_q + t * width);
		toy_part(toy, layer, 1, toy_x + t * width, toy_k + t * kv_width);
		toy_part(toy, layer, 2, toy_x + t * width, toy_v + t * kv_width);
	}
}

static inline void toy_add(const struct toy *toy, size_t n_tokens)
{
	for (size_t i = 0; i < n_tokens * toy->n_heads * toy->head_dim; i++)
		toy_x[i] += toy_out[i];
}

static const char toy_letters[TOY_N_LETTERS + 1] = "etaoinshrdlu ,.";

static inline void toy_score(const struct toy *toy, const float *x, float ret[TOY_N_LETTERS])
{
	for (uint32_t c = 0; c < TOY_N_LETTERS; c++) {
		ret[c] = 0;
		for (uint32_t i = 0; i < toy->n_heads * toy->head_dim; i++)
			ret[c] += x[i] * toy_mixed((uint32_t)toy_letters[c] + 500, i);
	}
}

static inline int32_t toy_best(const float scores[TOY_N_LETTERS])
{
	uint32_t best = 0;

	for (uint32_t c = 1; c < TOY_N_LETTERS; c++)
		best = scores[c] > scores[best] ? c : best;
	return toy_letters[best];
}

/* @ret: [strlen(text)]. Return: how many. */
static inline size_t toy_tokens(const char *text, int32_t *ret)
{
	size_t n = strlen(text);

	for (size_t i = 0; i < n; i++)
		ret[i] = (unsigned char)text[i];
	return n;
}

static inline void toy_print(const char *who, const int32_t *tokens, size_t n)
{
	printf("%s wrote \"", who);
	for (size_t i = 0; i < n; i++)
		putchar(tokens[i]);
	puts("\"");
	fflush(stdout);
}

/* ---- without a cache ---- */

/* Scores for what comes after @n tokens: K and V of all of them anew, and attention as plain loops. */
static inline void toy_alone(const struct toy *toy, const int32_t *tokens, size_t n, float ret[TOY_N_LETTERS])
{
	uint32_t dim = toy->head_dim, heads = toy->n_heads, kv_heads = toy->n_kv_heads;

	for (size_t t = 0; t < n; t++)
		toy_embed(toy, tokens[t], (int64_t)t, toy_x + t * heads * dim);
	for (uint32_t layer = 0; layer < toy->n_layers; layer++) {
		toy_project(toy, layer, n);
		for (size_t row = 0; row < n * heads; row++) {
			const float *q = toy_q + row * dim;
			double sum = 0, x[TOY_MAX_WIDTH] = {0};

			for (size_t s = 0; s <= row / heads; s++) {
				size_t at = (s * kv_heads + row % heads / (heads / kv_heads)) * dim;
				double score = 0, p;

				for (uint32_t i = 0; i < dim; i++)
					score += (double)q[i] * toy_k[at + i];
				p = exp(score / sqrt(dim));
				sum += p;
				for (uint32_t i = 0; i < dim; i++)
					x[i] += p * toy_v[at + i];
			}
			for (uint32_t i = 0; i < dim; i++)
				toy_out[row * dim + i] = (float)(x[i] / sum);
		}
		toy_add(toy, n);
	}
	toy_score(toy, toy_x + (n - 1) * heads * dim, ret);
}

/* All tokens from @n_prompt on are those that are written without a cache. */
static inline void toy_check(const struct toy *toy, const int32_t *tokens, size_t n_prompt, size_t n)
{
	float scores[TOY_N_LETTERS];

	for (size_t i = n_prompt; i < n; i++) {
		toy_alone(toy, tokens, i, scores);
		if (toy_best(scores) != tokens[i])
			errx(1, "%s: token %zu is another one without a cache", toy->name, i);
	}
}

#endif
