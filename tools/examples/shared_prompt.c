/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two replicas of one model, two processes: each has a question behind the same system prompt, and the second finds
 * what the first has computed of it.
 *
 *	cc shared_prompt.c $(pkg-config --cflags --libs kvclient) -lm -o shared_prompt
 *	./shared_prompt					(kvcached must run; KVCACHED_SOCKET names its socket)
 */
#include <sys/wait.h>
#include <unistd.h>

#include "toy.h"

#define N_WRITTEN 16

static const struct toy toy = {
	.name = "replicas", .n_layers = 4, .n_heads = 8, .n_kv_heads = 2, .head_dim = 32};

static const char system_prompt[] = "You keep the store of a small town. Answer in one sentence, name the shelf, and "
				    "say so if there is none of it.";
static const char *const questions[] = {" Where are the lamps?", " Is there rope?"};

static int replica(int i)
{
	static int32_t tokens[TOY_MAX_TOKENS];
	size_t n_system = toy_tokens(system_prompt, tokens);
	size_t n = n_system + toy_tokens(questions[i], tokens + n_system), n_prompt = n, hit;
	struct kv_client *client = toy_connect("replica");
	struct kv_pool *pool = toy_open(client, &toy);
	struct kv_batch *batch = toy_batch(pool, 1);
	struct kv_batch_item item;
	float scores[1][TOY_N_LETTERS];
	struct kv_seq *seq;

	toy_must(kv_seq_new(pool, &seq));
	toy_must(kv_seq_lookup(seq, tokens, n, &hit));
	if (toy_must(kv_seq_reserve(seq, n + N_WRITTEN, KV_SEC)))
		errx(1, "no room for a replica");
	toy_must(kv_seq_append(seq, tokens + hit, n - hit));
	for (item = (struct kv_batch_item){seq, (uint32_t)(n - hit)}; n < n_prompt + N_WRITTEN; item.n_query = 1) {
		toy_must(kv_batch_build(batch, &item, 1, 0, 0));
		toy_step(&toy, pool, batch, scores);
		toy_must(kv_seq_publish(seq, NULL));
		tokens[n++] = toy_best(scores[0]);
		toy_must(kv_seq_append(seq, tokens + n - 1, 1));
	}
	kv_seq_free(seq, NULL);
	kv_batch_free(batch);
	toy_must(kv_ping(client, KV_SEC)); /* from here on others find it */
	kv_pool_close(pool);
	kv_disconnect(client);

	printf("replica %d: %zu of %zu tokens of its prompt were cached; ", i + 1, hit, n_prompt);
	toy_print("it", tokens + n_prompt, N_WRITTEN);
	toy_check(&toy, tokens, n_prompt, n);
	if (i && hit < n_system / TOY_BLOCK * TOY_BLOCK)
		errx(1, "it should have found all whole blocks of the system prompt's %zu tokens", n_system);
	return 0;
}

int main(void)
{
	for (int i = 0; i < 2; i++) {
		/* Fork first and connect then: what the library has opened is not for children. */
		pid_t pid = fork();
		int status;

		if (!pid)
			return replica(i);
		if (pid < 0 || waitpid(pid, &status, 0) < 0 || status)
			errx(1, "replica %d failed", i + 1);
	}
	puts("both wrote what they write without a cache");
	return 0;
}
