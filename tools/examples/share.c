/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine against the installed library alone. Run two of them, one after the other or at once, with prompts that
 * begin alike: the second finds what the first has computed.
 *
 *	cc share.c $(pkg-config --cflags --libs kvclient) -lm -o share
 *	./share TEXT					(kvcached must run; KVCACHED_SOCKET names its socket)
 *
 * It writes 24 tokens by way of the cache, then the same without any cache, and fails if they differ.
 */
#include "toy.h"

#define N_WRITTEN 24

static const struct toy toy = {.name = "toy", .n_layers = 2, .n_heads = 4, .n_kv_heads = 4, .head_dim = 32};

/* One step with the last @n_new tokens of a sequence. Return: the token that comes next. */
static int32_t step(struct kv_pool *pool, struct kv_batch *batch, struct kv_seq *seq, size_t n_new)
{
	struct kv_batch_item item = {.seq = seq, .n_query = (uint32_t)n_new};
	float scores[1][TOY_N_LETTERS];

	toy_must(kv_batch_build(batch, &item, 1, 0, 0)); /* block table, slots, positions */
	toy_step(&toy, pool, batch, scores);
	return toy_best(scores[0]);
}

/* @tokens: the prompt, and room for what is written. Return: how much of the prompt was found. */
static size_t write_on(struct kv_pool *pool, int32_t *tokens, size_t n_prompt)
{
	struct kv_batch *batch = toy_batch(pool, 1);
	struct kv_seq *seq;
	size_t hit, n = n_prompt;

	toy_must(kv_seq_new(pool, &seq));
	toy_must(kv_seq_lookup(seq, tokens, n, &hit));
	if (toy_must(kv_seq_reserve(seq, n + N_WRITTEN, KV_SEC)))
		errx(1, "the pool has no room for %zu tokens", n + N_WRITTEN);
	toy_must(kv_seq_append(seq, tokens + hit, n - hit));
	tokens[n++] = step(pool, batch, seq, n_prompt - hit);
	toy_must(kv_seq_publish(seq, NULL)); /* the next engine finds it */
	while (n < n_prompt + N_WRITTEN) {
		toy_must(kv_seq_append(seq, tokens + n - 1, 1));
		tokens[n++] = step(pool, batch, seq, 1);
	}
	toy_must(kv_seq_publish(seq, NULL));
	kv_seq_free(seq, NULL);
	kv_batch_free(batch);
	return hit;
}

int main(int argc, char **argv)
{
	static int32_t tokens[TOY_MAX_TOKENS];
	struct kv_client *client;
	struct kv_pool *pool;
	size_t n, hit;

	if (argc != 2 || !*argv[1] || strlen(argv[1]) > TOY_MAX_TOKENS - N_WRITTEN)
		errx(2, "usage: share TEXT (up to %d bytes)", TOY_MAX_TOKENS - N_WRITTEN);
	n = toy_tokens(argv[1], tokens);
	client = toy_connect("share");
	pool = toy_open(client, &toy);
	hit = write_on(pool, tokens, n);
	kv_pool_close(pool);
	kv_disconnect(client);

	printf("%zu of %zu tokens were cached; ", hit, n);
	toy_print("it", tokens + n, N_WRITTEN);
	toy_check(&toy, tokens, n, n + N_WRITTEN);
	puts("without a cache it writes the same");
	return 0;
}
