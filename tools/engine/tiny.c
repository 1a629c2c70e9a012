/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weights are uniform with standard deviation gain / sqrt(row length), so that activations neither
 * grow nor vanish. The gains were chosen by looking at the text: sharp attention (scores with a
 * deviation of 3 or so) and layers that outweigh the embedding make the next token depend on many
 * earlier ones, and greedy text does not run into a loop.
 */
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "tools/engine/error.h"
#include "tools/engine/tiny.h"

#define HEAD_DIM  64
#define N_CTX	  8192
#define N_VOCAB	  256
#define ALIGNMENT 32
#define SEED	  20240229

static const struct shape {
	const char *name;
	uint32_t n_layers;
	uint32_t n_embd;
	uint32_t n_ff;
	uint32_t n_heads;
	uint32_t n_kv_heads;
} shapes[] = {
	{"tiny", 6, 512, 1024, 8, 2},
	{"small", 6, 1536, 4096, 24, 6}, /* 160 M weights: keeps a GPU busy for a moment */
};

enum size {
	ONE,
	EMBD,
	FF,
	QUERIES,
	KEYS,
	VOCAB,
};

enum kind {
	ONES,
	RANDOM,
	LETTERS, /* random in the rows of letters and space, zero elsewhere: never the greedy choice
		  */
};

struct tensor {
	const char *name; /* %u is the layer */
	enum size rows;
	enum size cols;
	enum kind kind;
	float gain;
};

static const struct tensor of_layer[] = {
	{"blk.%u.attn_norm.weight", ONE, EMBD, ONES, 1},
	{"blk.%u.attn_q.weight", QUERIES, EMBD, RANDOM, 1.8},
	{"blk.%u.attn_k.weight", KEYS, EMBD, RANDOM, 1.8},
	{"blk.%u.attn_v.weight", KEYS, EMBD, RANDOM, 1.5},
	{"blk.%u.attn_output.weight", EMBD, QUERIES, RANDOM, 1.5},
	{"blk.%u.ffn_norm.weight", ONE, EMBD, ONES, 1},
	{"blk.%u.ffn_gate.weight", FF, EMBD, RANDOM, 1.5},
	{"blk.%u.ffn_up.weight", FF, EMBD, RANDOM, 1.5},
	{"blk.%u.ffn_down.weight", EMBD, FF, RANDOM, 1.5},
};

static const struct tensor of_model[] = {
	{"token_embd.weight", VOCAB, EMBD, RANDOM, 1},
	{"output_norm.weight", ONE, EMBD, ONES, 1},
	{"output.weight", VOCAB, EMBD, LETTERS, 3},
};

#define N_OF(table) (sizeof(table) / sizeof((table)[0]))

static uint64_t size_of(const struct shape *shape, enum size size)
{
	switch (size) {
	case EMBD:
		return shape->n_embd;
	case FF:
		return shape->n_ff;
	case QUERIES:
		return (uint64_t)shape->n_heads * HEAD_DIM;
	case KEYS:
		return (uint64_t)shape->n_kv_heads * HEAD_DIM;
	case VOCAB:
		return N_VOCAB;
	default:
		return 1;
	}
}

static void put(FILE *f, const void *p, size_t n)
{
	fwrite(p, 1, n, f); /* into memory: what fails is noticed by fclose() */
}

static void put_u32(FILE *f, uint32_t value)
{
	put(f, &value, sizeof(value));
}

static void put_u64(FILE *f, uint64_t value)
{
	put(f, &value, sizeof(value));
}

static void put_text(FILE *f, const char *s)
{
	put_u64(f, strlen(s));
	put(f, s, strlen(s));
}

static void put_pair_text(FILE *f, const char *key, const char *value)
{
	put_text(f, key);
	put_u32(f, KV_GGUF_STRING);
	put_text(f, value);
}

static void put_pair_u32(FILE *f, const char *key, uint32_t value)
{
	put_text(f, key);
	put_u32(f, KV_GGUF_U32);
	put_u32(f, value);
}

static void put_pair_f32(FILE *f, const char *key, float value)
{
	put_text(f, key);
	put_u32(f, KV_GGUF_F32);
	put(f, &value, sizeof(value));
}

/* The 256 bytes as vocabularies write them: printable ones as themselves, others from U+0100 on */
static void put_bytes_vocabulary(FILE *f)
{
	uint32_t next = 256;

	put_text(f, "tokenizer.ggml.tokens");
	put_u32(f, KV_GGUF_ARRAY);
	put_u32(f, KV_GGUF_STRING);
	put_u64(f, N_VOCAB);
	for (uint32_t byte = 0; byte < N_VOCAB; byte++) {
		bool plain =
			(byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
		uint32_t point = plain ? byte : next++;
		char utf8[] = {0xc0 | point >> 6, 0x80 | (point & 0x3f), 0};

		if (point < 0x80) {
			utf8[0] = point;
			utf8[1] = 0;
		}
		put_text(f, utf8);
	}

	put_text(f, "tokenizer.ggml.merges");
	put_u32(f, KV_GGUF_ARRAY);
	put_u32(f, KV_GGUF_STRING);
	put_u64(f, 0);
}

static void put_tensor(FILE *f, const struct shape *shape, const struct tensor *t, uint32_t layer,
		       uint64_t *offset)
{
	uint64_t n_rows = size_of(shape, t->rows), n_cols = size_of(shape, t->cols);
	char name[64];

	snprintf(name, sizeof(name), t->name, layer);
	put_text(f, name);
	put_u32(f, 2);
	put_u64(f, n_cols);
	put_u64(f, n_rows);
	put_u32(f, KV_WEIGHT_F32);
	put_u64(f, *offset);
	*offset += n_rows * n_cols * sizeof(float);
}

static void put_header(FILE *f, const struct shape *shape, uint64_t *ret_data_bytes)
{
	uint64_t offset = 0;

	put(f, "GGUF", 4);
	put_u32(f, 3);
	put_u64(f, N_OF(of_model) + shape->n_layers * N_OF(of_layer));
	put_u64(f, 14); /* the pairs that follow */
	put_pair_text(f, "general.architecture", "llama");
	put_pair_text(f, "general.name", shape->name);
	put_pair_u32(f, "general.alignment", ALIGNMENT);
	put_pair_u32(f, "llama.block_count", shape->n_layers);
	put_pair_u32(f, "llama.embedding_length", shape->n_embd);
	put_pair_u32(f, "llama.feed_forward_length", shape->n_ff);
	put_pair_u32(f, "llama.attention.head_count", shape->n_heads);
	put_pair_u32(f, "llama.attention.head_count_kv", shape->n_kv_heads);
	put_pair_u32(f, "llama.context_length", N_CTX);
	put_pair_f32(f, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
	put_pair_text(f, "tokenizer.ggml.model", "gpt2");
	put_pair_text(f, "tokenizer.ggml.pre", "gpt-2");
	put_bytes_vocabulary(f); /* two */

	for (size_t i = 0; i < N_OF(of_model); i++)
		put_tensor(f, shape, &of_model[i], 0, &offset);
	for (uint32_t layer = 0; layer < shape->n_layers; layer++)
		for (size_t i = 0; i < N_OF(of_layer); i++)
			put_tensor(f, shape, &of_layer[i], layer, &offset);
	*ret_data_bytes = offset;
}

/* splitmix64: a good 64-bit number from each counter value */
static uint64_t random_bits(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 27) * 0x94d049bb133111eb;
	return z ^ z >> 31;
}

static bool is_letter(uint64_t token)
{
	return (token >= 'a' && token <= 'z') || token == ' ';
}

static float *fill_tensor(const struct shape *shape, const struct tensor *t, uint64_t *state,
			  float *out)
{
	uint64_t n_rows = size_of(shape, t->rows), n_cols = size_of(shape, t->cols);
	/* u uniform in [-2^23, 2^23): deviation 2^23 / sqrt(3) */
	float scale = t->gain * sqrtf(3.0f / n_cols) * 0x1p-23f;

	for (uint64_t row = 0; row < n_rows; row++) {
		for (uint64_t i = 0; i < n_cols; i++) {
			int32_t u = (int32_t)(random_bits(state) >> 40) - (1 << 23);

			out[i] = t->kind == ONES			 ? 1
				 : t->kind == LETTERS && !is_letter(row) ? 0
									 : u * scale;
		}
		out += n_cols;
	}
	return out;
}

static const struct shape *find_shape(const char *name)
{
	for (size_t i = 0; i < N_OF(shapes); i++)
		if (!strcmp(shapes[i].name, name))
			return &shapes[i];
	return NULL;
}

bool kv_tiny_is(const char *name)
{
	return find_shape(name);
}

int kv_tiny_new(const char *name, struct kv_gguf **ret)
{
	const struct shape *shape = find_shape(name);
	kv_cleanup(kv_freep) char *header = NULL;
	kv_cleanup(kv_freep) char *image = NULL;
	size_t n_header = 0, start;
	uint64_t n_data = 0, state = SEED;
	float *at;
	FILE *f;
	int r;

	f = open_memstream(&header, &n_header);
	if (!f)
		return kv_engine_error(-ENOMEM, "no memory for the tiny model");
	put_header(f, shape, &n_data);
	if (fclose(f))
		return kv_engine_error(-ENOMEM, "no memory for the tiny model");

	start = (n_header + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1);
	image = aligned_alloc(ALIGNMENT, start + n_data);
	if (!image)
		return kv_engine_error(-ENOMEM, "no memory for the tiny model");
	memset(image, 0, start);
	memcpy(image, header, n_header);

	at = (float *)(void *)(image + start);
	for (size_t i = 0; i < N_OF(of_model); i++)
		at = fill_tensor(shape, &of_model[i], &state, at);
	for (uint32_t layer = 0; layer < shape->n_layers; layer++)
		for (size_t i = 0; i < N_OF(of_layer); i++)
			at = fill_tensor(shape, &of_layer[i], &state, at);

	r = kv_gguf_new(image, start + n_data, ret);
	if (!r)
		kv_steal(image);
	return r;
}
