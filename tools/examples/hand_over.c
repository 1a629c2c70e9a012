/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A prefill process computes a prompt, a decode process goes on with it: in the same blocks, nothing is copied.
 *
 *	cc hand_over.c $(pkg-config --cflags --libs kvclient) -lm -o hand_over
 *	./hand_over					(kvcached must run; KVCACHED_SOCKET names its socket)
 */
#include <sys/wait.h>
#include <unistd.h>

#include "toy.h"

#define N_PROMPT  200
#define N_WRITTEN 16
#define CHUNK	  64 /* tokens of the prompt in a step */

static const struct toy toy = {
	.name = "handed-over", .n_layers = 4, .n_heads = 8, .n_kv_heads = 2, .head_dim = 32};
static int32_t tokens[N_PROMPT + N_WRITTEN];

/* What prefill tells decode. It says which blocks only for decode to compare: an engine sends the tokens, if those. */
struct news {
	uint32_t n;
	kv_block_id blocks[N_PROMPT / TOY_BLOCK];
};

static struct news whole_blocks(const struct kv_seq *seq, size_t n_tokens)
{
	struct news news = {.n = (uint32_t)(n_tokens / TOY_BLOCK)};
	const kv_block_id *ids;

	kv_seq_blocks(seq, &ids);
	memcpy(news.blocks, ids, news.n * sizeof(*ids));
	return news;
}

static int prefill(int to_decode, int from_decode)
{
	struct kv_client *client = toy_connect("prefill");
	struct kv_pool *pool = toy_open(client, &toy);
	struct kv_batch *batch = toy_batch(pool, 1);
	float scores[1][TOY_N_LETTERS];
	struct kv_seq *seq;
	struct news news;
	char c;

	toy_must(kv_seq_new(pool, &seq));
	if (toy_must(kv_seq_reserve(seq, N_PROMPT, KV_SEC)))
		errx(1, "no room for the prompt");
	for (size_t at = 0; at < N_PROMPT; at += CHUNK) {
		size_t n = N_PROMPT - at < CHUNK ? N_PROMPT - at : CHUNK;
		struct kv_batch_item item = {.seq = seq, .n_query = (uint32_t)n};

		toy_must(kv_seq_append(seq, tokens + at, n));
		toy_must(kv_batch_build(batch, &item, 1, 0, 0));
		toy_step(&toy, pool, batch, scores);
		toy_must(kv_seq_publish(seq, NULL)); /* decode may already follow: kv_seq_follow() */
	}
	toy_must(kv_ping(client, KV_SEC)); /* all that was published is found from here on */
	news = whole_blocks(seq, N_PROMPT);
	if (write(to_decode, &news, sizeof(news)) != sizeof(news))
		err(1, "write");
	/* Hold on until decode does: what nobody holds may be evicted when memory is short. */
	while (read(from_decode, &c, 1) > 0)
		;
	kv_seq_free(seq, NULL);
	kv_batch_free(batch);
	kv_pool_close(pool);
	kv_disconnect(client);
	return 0;
}

/* Return: the blocks that it has found. */
static struct news decode(int to_prefill)
{
	struct kv_client *client = toy_connect("decode");
	struct kv_pool *pool = toy_open(client, &toy);
	struct kv_batch *batch = toy_batch(pool, 1);
	struct kv_batch_item item = {0};
	float scores[1][TOY_N_LETTERS];
	size_t hit, n = N_PROMPT;
	struct news found;

	toy_must(kv_seq_new(pool, &item.seq));
	toy_must(kv_seq_lookup(item.seq, tokens, n, &hit));
	found = whole_blocks(item.seq, hit);
	close(to_prefill); /* held here: prefill may let go */
	if (toy_must(kv_seq_reserve(item.seq, n + N_WRITTEN, KV_SEC)))
		errx(1, "no room for %d tokens more", N_WRITTEN);
	/* The part of a block that is left of the prompt is computed anew: 8 tokens of 200. */
	toy_must(kv_seq_append(item.seq, tokens + hit, n - hit));
	for (item.n_query = (uint32_t)(n - hit); n < N_PROMPT + N_WRITTEN; item.n_query = 1) {
		toy_must(kv_batch_build(batch, &item, 1, 0, 0));
		toy_step(&toy, pool, batch, scores);
		tokens[n++] = toy_best(scores[0]);
		toy_must(kv_seq_append(item.seq, tokens + n - 1, 1));
	}
	kv_seq_free(item.seq, NULL);
	kv_batch_free(batch);
	kv_pool_close(pool);
	kv_disconnect(client);
	return found;
}

int main(void)
{
	struct news computed, found;
	int there[2], back[2], status;
	pid_t pid;

	for (int i = 0; i < N_PROMPT; i++)
		tokens[i] = i * i % 251;
	if (pipe(there) || pipe(back))
		err(1, "pipe");
	pid = fork(); /* before anything is connected */
	if (!pid) {
		close(there[0]);
		close(back[1]);
		return prefill(there[1], back[0]);
	}
	close(there[1]);
	close(back[0]);
	if (pid < 0 || read(there[0], &computed, sizeof(computed)) != sizeof(computed))
		errx(1, "prefill failed");
	printf("prefill computed %d tokens into blocks %d to %d and others\n", N_PROMPT, computed.blocks[0],
	       computed.blocks[computed.n - 1]);
	found = decode(back[1]);
	if (waitpid(pid, &status, 0) < 0 || status)
		errx(1, "prefill failed");
	printf("decode found %d of them in blocks %d to %d and others, and ", (int)found.n * TOY_BLOCK,
	       found.blocks[0], found.blocks[found.n - 1]);
	fflush(stdout);
	toy_print("it", tokens + N_PROMPT, N_WRITTEN);
	if (found.n != computed.n || memcmp(found.blocks, computed.blocks, found.n * sizeof(*found.blocks)))
		errx(1, "these are other blocks");
	toy_check(&toy, tokens, N_PROMPT, N_PROMPT + N_WRITTEN);
	puts("the same blocks, and the tokens that are written without a cache");
	return 0;
}
