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

#define N_LAYERS   6
#define N_EMBD	   512
#define N_FF	   1024
#define N_HEADS	   8
#define N_KV_HEADS 2
#define HEAD_DIM   64
#define N_CTX	   8192
#define N_VOCAB	   256
#define ALIGNMENT  32
#define SEED	   20240229

enum kind {
	ONES,
	RANDOM,
	LETTERS, /* random in the rows of letters and space, zero elsewhere: never the greedy choice
		  */
};

struct tensor {
	const char *name; /* %d is the layer */
	uint64_t n_rows;
	uint64_t n_cols;
	enum kind kind;
	float gain;
};

static const struct tensor of_layer[] = {
	{"blk.%d.attn_norm.weight", 1, N_EMBD, ONES, 1},
	{"blk.%d.attn_q.weight", N_HEADS *HEAD_DIM, N_EMBD, RANDOM, 1.8},
	{"blk.%d.attn_k.weight", N_KV_HEADS *HEAD_DIM, N_EMBD, RANDOM, 1.8},
	{"blk.%d.attn_v.weight", N_KV_HEADS *HEAD_DIM, N_EMBD, RANDOM, 1.5},
	{"blk.%d.attn_output.weight", N_EMBD, N_HEADS *HEAD_DIM, RANDOM, 1.5},
	{"blk.%d.ffn_norm.weight", 1, N_EMBD, ONES, 1},
	{"blk.%d.ffn_gate.weight", N_FF, N_EMBD, RANDOM, 1.5},
	{"blk.%d.ffn_up.weight", N_FF, N_EMBD, RANDOM, 1.5},
	{"blk.%d.ffn_down.weight", N_EMBD, N_FF, RANDOM, 1.5},
};

static const struct tensor of_model[] = {
	{"token_embd.weight", N_VOCAB, N_EMBD, RANDOM, 1},
	{"output_norm.weight", 1, N_EMBD, ONES, 1},
	{"output.weight", N_VOCAB, N_EMBD, LETTERS, 3},
};

#define N_OF(table) (sizeof(table) / sizeof((table)[0]))

static uint64_t tensor_bytes(const struct tensor *t)
{
	return t->n_rows * t->n_cols * sizeof(float);
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

static void put_tensor(FILE *f, const struct tensor *t, int layer, uint64_t *offset)
{
	char name[64];

	snprintf(name, sizeof(name), t->name, layer);
	put_text(f, name);
	put_u32(f, 2);
	put_u64(f, t->n_cols);
	put_u64(f, t->n_rows);
	put_u32(f, KV_WEIGHT_F32);
	put_u64(f, *offset);
	*offset += tensor_bytes(t);
}

static void put_header(FILE *f, uint64_t *ret_data_bytes)
{
	uint64_t offset = 0;

	put(f, "GGUF", 4);
	put_u32(f, 3);
	put_u64(f, N_OF(of_model) + N_LAYERS * N_OF(of_layer));
	put_u64(f, 14); /* the pairs that follow */
	put_pair_text(f, "general.architecture", "llama");
	put_pair_text(f, "general.name", "tiny");
	put_pair_u32(f, "general.alignment", ALIGNMENT);
	put_pair_u32(f, "llama.block_count", N_LAYERS);
	put_pair_u32(f, "llama.embedding_length", N_EMBD);
	put_pair_u32(f, "llama.feed_forward_length", N_FF);
	put_pair_u32(f, "llama.attention.head_count", N_HEADS);
	put_pair_u32(f, "llama.attention.head_count_kv", N_KV_HEADS);
	put_pair_u32(f, "llama.context_length", N_CTX);
	put_pair_f32(f, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
	put_pair_text(f, "tokenizer.ggml.model", "gpt2");
	put_pair_text(f, "tokenizer.ggml.pre", "gpt-2");
	put_bytes_vocabulary(f); /* two */

	for (size_t i = 0; i < N_OF(of_model); i++)
		put_tensor(f, &of_model[i], 0, &offset);
	for (int layer = 0; layer < N_LAYERS; layer++)
		for (size_t i = 0; i < N_OF(of_layer); i++)
			put_tensor(f, &of_layer[i], layer, &offset);
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

static float *fill_tensor(const struct tensor *t, uint64_t *state, float *out)
{
	/* u uniform in [-2^23, 2^23): deviation 2^23 / sqrt(3) */
	float scale = t->gain * sqrtf(3.0f / t->n_cols) * 0x1p-23f;

	for (uint64_t row = 0; row < t->n_rows; row++) {
		for (uint64_t i = 0; i < t->n_cols; i++) {
			int32_t u = (int32_t)(random_bits(state) >> 40) - (1 << 23);

			out[i] = t->kind == ONES			 ? 1
				 : t->kind == LETTERS && !is_letter(row) ? 0
									 : u * scale;
		}
		out += t->n_cols;
	}
	return out;
}

int kv_tiny_new(struct kv_gguf **ret)
{
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
	put_header(f, &n_data);
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
		at = fill_tensor(&of_model[i], &state, at);
	for (int layer = 0; layer < N_LAYERS; layer++)
		for (size_t i = 0; i < N_OF(of_layer); i++)
			at = fill_tensor(&of_layer[i], &state, at);

	r = kv_gguf_new(image, start + n_data, ret);
	if (!r)
		kv_steal(image);
	return r;
}
