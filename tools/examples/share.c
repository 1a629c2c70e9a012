/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine in one file, against the installed library alone. Run two of them, one after the other or at
 * once, with prompts that begin alike: the second finds what the first has computed.
 *
 *	cc share.c $(pkg-config --cflags --libs kvclient) -lm -o share
 *	./share TEXT					(kvcached must run; KVCACHED_SOCKET names its socket)
 *
 * Its model is a toy whose tokens are bytes: two layers without matrices. It writes 24 tokens by way
 * of the cache, then the same without any cache, and fails if they differ.
 */
#include <err.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/kvcached.h>

#define N_LAYERS   2
#define N_HEADS	   4
#define HEAD_DIM   32
#define WIDTH	   (N_HEADS * HEAD_DIM)
#define BLOCK	   16
#define MAX_TOKENS 1024
#define N_WRITTEN  24

static void must(int r)
{
	if (r < 0)
		errx(1, "%s", kv_error_text());
}

/* A number from -1 to 1 that looks random. */
static float mixed(uint32_t a, uint32_t b)
{
	uint32_t x = a * 0x9e3779b1u ^ (b + 0x7f4a7c15u) * 0x85ebca6bu;

	x = (x ^ x >> 15) * 0x2c1b3c6du;
	x ^= x >> 12;
	return (float)(int32_t)x / 2147483648.0f;
}

static void embed(int32_t token, int64_t position, float x[WIDTH])
{
	for (uint32_t i = 0; i < WIDTH; i++)
		x[i] = mixed((uint32_t)token, i) + mixed((uint32_t)position + 1000, i);
}

/* q, k or v of one token in one layer: its elements exchanged and weighted. */
static void project(const float x[WIDTH], uint32_t layer, uint32_t which, float ret[WIDTH])
{
	for (uint32_t i = 0; i < WIDTH; i++)
		ret[i] = x[(i * 37 + layer * 11 + which * 5) % WIDTH] * (1 + mixed(layer * 3 + which, i));
}

static int32_t next_token(const float x[WIDTH])
{
	static const char alphabet[] = "etaoinshrdlu ,.";
	float best = -INFINITY;
	int32_t token = 0;

	for (const char *c = alphabet; *c; c++) {
		float score = 0;

		for (uint32_t i = 0; i < WIDTH; i++)
			score += x[i] * mixed((uint32_t)*c + 500, i);
		if (score > best) {
			best = score;
			token = *c;
		}
	}
	return token;
}

static float hidden[MAX_TOKENS * WIDTH], query[MAX_TOKENS * WIDTH], key[MAX_TOKENS * WIDTH],
	value[MAX_TOKENS * WIDTH], out[MAX_TOKENS * WIDTH];

static void project_all(uint32_t layer, uint32_t n)
{
	for (uint32_t t = 0; t < n * WIDTH; t += WIDTH) {
		project(hidden + t, layer, 0, query + t);
		project(hidden + t, layer, 1, key + t);
		project(hidden + t, layer, 2, value + t);
	}
}

static void add_all(uint32_t n)
{
	for (uint32_t i = 0; i < n * WIDTH; i++)
		hidden[i] += 2 * out[i];
}

/* A layer's attention for the tokens of a batch: their K and V go to the shared blocks. */
static void attend_by_cache(struct kv_pool *pool, const struct kv_batch_data *data, uint32_t layer)
{
	struct kv_view k, v;

	must(kv_pool_view(pool, 0, 2 * layer, &k));
	must(kv_pool_view(pool, 0, 2 * layer + 1, &v));
	KV_OPTIONS(kv_write_args, store, .device = KV_DEVICE_HOST, .dtype = KV_F32,
		   .n_tokens = data->n_tokens, .key = key, .value = value, .slots = data->slots,
		   .k = k, .v = v);
	must(kv_write(&store));
	KV_OPTIONS(kv_attention_args, attend, .device = KV_DEVICE_HOST, .dtype = KV_F32,
		   .n_seqs = (int32_t)data->n_seqs, .n_tokens = (int32_t)data->n_tokens,
		   .n_heads_q = N_HEADS, .max_query_len = (int32_t)data->max_query_len,
		   .max_seq_len = (int32_t)data->max_seq_len,
		   .table_width = (int32_t)data->table_width, .q = query, .out = out,
		   .query_start_loc = data->query_start_loc, .seq_lens = data->seq_lens,
		   .block_table = data->block_table, .k = k, .v = v, .window_left = -1, .causal = 1);
	must(kv_attention(&attend));
}

/* One step: the batch's tokens through the model. Return: the token that comes next. */
static int32_t step(struct kv_pool *pool, struct kv_batch *batch, struct kv_seq *seq, uint32_t n_new)
{
	struct kv_batch_item item = {.seq = seq, .n_query = n_new};
	const struct kv_batch_data *data;

	must(kv_batch_build(batch, &item, 1, 0, 0));
	must(kv_batch_copy(batch, NULL));
	data = kv_batch_data(batch);
	for (uint32_t t = 0; t < n_new; t++)
		embed(data->tokens[t], data->positions[t], hidden + t * WIDTH);
	for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
		project_all(layer, n_new);
		attend_by_cache(pool, data, layer);
		add_all(n_new);
	}
	return next_token(hidden + (n_new - 1) * WIDTH);
}

static size_t write_by_cache(struct kv_pool *pool, int32_t *tokens, size_t n_prompt)
{
	KV_OPTIONS(kv_batch_options, size, .max_seqs = 1, .max_tokens = MAX_TOKENS,
		   .max_blocks_per_seq = MAX_TOKENS / BLOCK);
	struct kv_batch *batch;
	struct kv_seq *seq;
	size_t hit, n = n_prompt;

	must(kv_batch_new(pool, &size, &batch));
	must(kv_seq_new(pool, &seq));
	must(kv_seq_lookup(seq, tokens, n, &hit));
	if (kv_seq_reserve(seq, n + N_WRITTEN, KV_SEC))
		errx(1, "the pool has no room for %zu tokens", n + N_WRITTEN);
	must(kv_seq_append(seq, tokens + hit, n - hit));
	tokens[n++] = step(pool, batch, seq, (uint32_t)(n_prompt - hit));
	must(kv_seq_publish(seq, NULL));
	while (n < n_prompt + N_WRITTEN) {
		must(kv_seq_append(seq, tokens + n - 1, 1));
		tokens[n++] = step(pool, batch, seq, 1);
	}
	must(kv_seq_publish(seq, NULL));
	kv_seq_free(seq, NULL);
	kv_batch_free(batch);
	return hit;
}

/* The same token without a cache: K and V of all tokens are computed, and attention is plain loops. */
static int32_t next_alone(const int32_t *tokens, uint32_t n)
{
	for (uint32_t t = 0; t < n; t++)
		embed(tokens[t], t, hidden + t * WIDTH);
	for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
		project_all(layer, n);
		for (uint32_t t = 0; t < n * N_HEADS; t++) {
			const float *q = query + t * HEAD_DIM;
			double sum = 0, x[HEAD_DIM] = {0};

			for (uint32_t s = t % N_HEADS; s <= t; s += N_HEADS) {
				double score = 0, p;

				for (uint32_t i = 0; i < HEAD_DIM; i++)
					score += (double)q[i] * key[s * HEAD_DIM + i];
				p = exp(score / sqrt(HEAD_DIM));
				sum += p;
				for (uint32_t i = 0; i < HEAD_DIM; i++)
					x[i] += p * value[s * HEAD_DIM + i];
			}
			for (uint32_t i = 0; i < HEAD_DIM; i++)
				out[t * HEAD_DIM + i] = (float)(x[i] / sum);
		}
		add_all(n);
	}
	return next_token(hidden + (n - 1) * WIDTH);
}

int main(int argc, char **argv)
{
	struct kv_component components[2 * N_LAYERS];
	struct kv_layout layout = {
		.kind = KV_LAYOUT_FLAT, .block_tokens = BLOCK, .components = components};
	static int32_t tokens[MAX_TOKENS];
	struct kv_client *client;
	struct kv_pool *pool;
	size_t n, hit;

	if (argc != 2 || !*argv[1] || strlen(argv[1]) > MAX_TOKENS - N_WRITTEN)
		errx(2, "usage: share TEXT (up to %d bytes)", MAX_TOKENS - N_WRITTEN);
	n = strlen(argv[1]);
	for (size_t i = 0; i < n; i++)
		tokens[i] = (unsigned char)argv[1][i];

	/* The same name, model and layout: the same cache. */
	layout.n_components = kv_layout_uniform(components, N_LAYERS, N_HEADS, HEAD_DIM, KV_F32, 1, 1);
	KV_OPTIONS(kv_connect_options, how, .name = "share");
	KV_OPTIONS(kv_pool_options, what, .name = "toy", .model = "toy", .layout = &layout, .mapped = 1);
	must(kv_connect(&how, &client));
	must(kv_pool_open(client, &what, &pool));
	hit = write_by_cache(pool, tokens, n);
	kv_pool_close(pool);
	kv_disconnect(client);

	printf("%zu of %zu tokens were cached; it wrote \"", hit, n);
	for (size_t i = n; i < n + N_WRITTEN; i++)
		putchar(tokens[i]);
	puts("\"");
	for (size_t i = n; i < n + N_WRITTEN; i++) {
		if (next_alone(tokens, (uint32_t)i) != tokens[i])
			errx(1, "token %zu is another one without a cache", i);
	}
	puts("without a cache it writes the same");
	return 0;
}
