/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Eight samples of one prompt by fork: they share its blocks until each writes its own.
 *
 *	cc sample_many.c $(pkg-config --cflags --libs kvclient) -lm -o sample_many
 *	./sample_many					(kvcached must run; KVCACHED_SOCKET names its socket)
 */
#include "toy.h"

#define N_SAMPLES   8
#define N_WRITTEN   24
#define TEMPERATURE 6

static const struct toy toy = {
	.name = "samples", .n_layers = 4, .n_heads = 8, .n_kv_heads = 2, .head_dim = 32};
static const char prompt[] = "The harbour master wrote down each ship that came in, and";

/* A number from 0 to 1. */
static double random_of(uint64_t *state)
{
	*state = *state * 6364136223846793005u + 1442695040888963407u;
	return (double)(*state >> 40) / (double)(1 << 24);
}

static int32_t choose(const float scores[TOY_N_LETTERS], uint64_t *random)
{
	double weights[TOY_N_LETTERS], sum = 0, at;
	uint32_t c = 0;

	for (uint32_t i = 0; i < TOY_N_LETTERS; i++) {
		weights[i] = exp(scores[i] / TEMPERATURE);
		sum += weights[i];
	}
	for (at = random_of(random) * sum; c < TOY_N_LETTERS - 1 && at >= weights[c]; c++)
		at -= weights[c];
	return toy_letters[c];
}

static size_t blocks_between(const struct kv_batch_item *items)
{
	const kv_block_id *ids, *others;
	size_t n_different = 0;

	for (int i = 0; i < N_SAMPLES; i++) {
		size_t n = kv_seq_blocks(items[i].seq, &ids);

		for (size_t b = 0; b < n; b++) {
			int seen = 0;

			for (int j = 0; j < i; j++)
				seen |= kv_seq_blocks(items[j].seq, &others) > b && others[b] == ids[b];
			n_different += !seen;
		}
	}
	return n_different;
}

/* All samples, one letter a step. Return: how many blocks were copied because they differ from there on. */
static size_t write_samples(struct kv_pool *pool, struct kv_batch *batch, struct kv_batch_item *items,
			    int32_t (*samples)[N_WRITTEN], uint64_t *random)
{
	float scores[N_SAMPLES][TOY_N_LETTERS];
	size_t n_prompt = strlen(prompt), n_copies = 0;

	for (int at = 1; at < N_WRITTEN; at++) {
		for (int i = 0; i < N_SAMPLES; i++) {
			/* Where it would write into a block that others have, it gets a copy. */
			if (toy_must(kv_seq_reserve(items[i].seq, n_prompt + (size_t)at, KV_SEC)))
				errx(1, "no room for a sample");
			toy_must(kv_seq_append(items[i].seq, &samples[i][at - 1], 1));
			items[i].n_query = 1;
		}
		toy_must(kv_batch_build(batch, items, N_SAMPLES, 0, 0));
		n_copies += kv_batch_data(batch)->n_copies;
		toy_step(&toy, pool, batch, scores);
		for (int i = 0; i < N_SAMPLES; i++)
			samples[i][at] = choose(scores[i], &random[i]);
	}
	return n_copies;
}

/* The same sample without any cache. */
static void check(const int32_t *sample, uint64_t random)
{
	static int32_t tokens[TOY_MAX_TOKENS];
	size_t n = toy_tokens(prompt, tokens);
	float scores[TOY_N_LETTERS];

	for (int at = 0; at < N_WRITTEN; at++) {
		toy_alone(&toy, tokens, n, scores);
		if (choose(scores, &random) != sample[at])
			errx(1, "token %d of a sample is another one without a cache", at);
		tokens[n++] = sample[at];
	}
}

int main(void)
{
	static int32_t tokens[TOY_MAX_TOKENS];
	size_t n_prompt = toy_tokens(prompt, tokens), n_held, n_copies;
	struct kv_client *client = toy_connect("sampler");
	struct kv_pool *pool = toy_open(client, &toy);
	struct kv_batch *batch = toy_batch(pool, N_SAMPLES);
	struct kv_batch_item items[N_SAMPLES] = {{.n_query = (uint32_t)n_prompt}};
	int32_t samples[N_SAMPLES][N_WRITTEN];
	uint64_t random[N_SAMPLES];
	float scores[1][TOY_N_LETTERS];

	toy_must(kv_seq_new(pool, &items[0].seq));
	if (toy_must(kv_seq_reserve(items[0].seq, n_prompt, KV_SEC)))
		errx(1, "no room for the prompt");
	toy_must(kv_seq_append(items[0].seq, tokens, n_prompt));
	toy_must(kv_batch_build(batch, items, 1, 0, 0));
	toy_step(&toy, pool, batch, scores);
	for (int i = 0; i < N_SAMPLES; i++) {
		if (i)
			toy_must(kv_seq_fork(items[0].seq, &items[i].seq));
		random[i] = (uint64_t)i + 1;
		samples[i][0] = choose(scores[0], &random[i]);
	}
	n_held = blocks_between(items);
	printf("%d sequences of %zu tokens hold %zu blocks between them\n", N_SAMPLES, n_prompt, n_held);
	n_copies = write_samples(pool, batch, items, samples, random);
	toy_print("the first", samples[0], N_WRITTEN);
	for (int i = 0; i < N_SAMPLES; i++)
		kv_seq_free(items[i].seq, NULL);
	kv_batch_free(batch);
	kv_pool_close(pool);
	kv_disconnect(client);

	if (n_held != (n_prompt + TOY_BLOCK - 1) / TOY_BLOCK)
		errx(1, "a fork holds blocks that it hasn't written to");
	if (n_copies < N_SAMPLES - 1 || n_copies > N_SAMPLES)
		errx(1, "%zu blocks were copied, one for each that wrote into a shared one was expected", n_copies);
	for (int i = 0; i < N_SAMPLES; i++)
		check(samples[i], (uint64_t)i + 1);
	printf("%zu blocks were copied when they began to differ; all samples are right\n", n_copies);
	return 0;
}
