/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two models of different shape, two processes, one device's memory: a guaranteed minimum for each, and what is left for
 * whoever needs it.
 *
 *	cc two_models.c $(pkg-config --cflags --libs kvclient) -lm -o two_models
 *	./two_models					(kvcached must run; KVCACHED_SOCKET names its socket)
 */
#include <sys/wait.h>
#include <unistd.h>

#include "toy.h"

#define N_PROMPT  75
#define N_WRITTEN 12

/* An operator may change it later: kvctl pool set small --min 8M. */
#define MINIMUM (4 << 20) /* bytes */

static const struct toy models[] = {
	{.name = "small", .n_layers = 2, .n_heads = 4, .n_kv_heads = 4, .head_dim = 16,
	 .min_bytes = MINIMUM},
	{.name = "large", .n_layers = 6, .n_heads = 8, .n_kv_heads = 2, .head_dim = 32,
	 .min_bytes = MINIMUM},
};

/* An engine of its own. @ready: told when the tokens are right; @go: it stays attached until that is closed */
static int engine(const struct toy *toy, int ready, int go)
{
	static int32_t tokens[N_PROMPT + N_WRITTEN];
	struct kv_client *client = toy_connect(toy->name);
	struct kv_pool *pool = toy_open(client, toy);
	struct kv_batch *batch = toy_batch(pool, 1);
	struct kv_batch_item item = {.n_query = N_PROMPT};
	float scores[1][TOY_N_LETTERS];
	char c = 1;

	for (int i = 0; i < N_PROMPT; i++)
		tokens[i] = 'a' + i * 7 % 26;
	toy_must(kv_seq_new(pool, &item.seq));
	if (toy_must(kv_seq_reserve(item.seq, N_PROMPT + N_WRITTEN, KV_SEC)))
		errx(1, "no room for '%s'", toy->name);
	toy_must(kv_seq_append(item.seq, tokens, N_PROMPT));
	for (size_t n = N_PROMPT; n < N_PROMPT + N_WRITTEN; item.n_query = 1) {
		toy_must(kv_batch_build(batch, &item, 1, 0, 0));
		toy_step(toy, pool, batch, scores);
		toy_must(kv_seq_publish(item.seq, NULL));
		tokens[n++] = toy_best(scores[0]);
		toy_must(kv_seq_append(item.seq, tokens + n - 1, 1));
	}
	kv_seq_free(item.seq, NULL);
	kv_batch_free(batch);
	toy_must(kv_ping(client, KV_SEC));
	toy_check(toy, tokens, N_PROMPT, N_PROMPT + N_WRITTEN);
	if (write(ready, &c, 1) != 1)
		err(1, "write");
	close(ready);
	while (read(go, &c, 1) > 0)
		;
	kv_pool_close(pool);
	kv_disconnect(client);
	return 0;
}

/* What the daemon says of both, while both are attached. */
static void look_on(void)
{
	struct kv_client *client = toy_connect("onlooker");
	struct kv_pool_stats *pools;
	struct kv_check_result books;
	uint64_t block_bytes[2] = {0};
	size_t n;

	toy_must(kv_stats(client, KV_STAT_POOL, (void **)&pools, &n, KV_SEC));
	for (int i = 0; i < 2; i++) {
		for (const struct kv_pool_stats *p = pools; p < pools + n; p++) {
			if (strcmp(p->name, models[i].name))
				continue;
			printf("%s: blocks of %lu bytes, %lu of them cached, at least %lu MiB are its\n", p->name,
			       (unsigned long)p->block_bytes, (unsigned long)p->blocks_cached,
			       (unsigned long)(p->min_bytes >> 20));
			block_bytes[i] = p->block_bytes;
		}
	}
	free(pools);
	toy_must(kv_check(client, &books, KV_SEC));
	kv_disconnect(client);
	if (!block_bytes[0] || !block_bytes[1] || block_bytes[0] == block_bytes[1])
		errx(1, "two pools with blocks of different size were expected");
	if (books.n_errors)
		errx(1, "the daemon's books: %s", books.first_error);
}

int main(void)
{
	int go[2], failed = 0;
	pid_t pids[2];

	if (pipe(go))
		err(1, "pipe");
	for (int i = 0; i < 2; i++) {
		int ready[2];
		char c;

		if (pipe(ready))
			err(1, "pipe");
		pids[i] = fork(); /* before anything is connected */
		if (!pids[i]) {
			close(ready[0]);
			close(go[1]);
			return engine(&models[i], ready[1], go[0]);
		}
		close(ready[1]);
		failed |= read(ready[0], &c, 1) != 1;
		close(ready[0]);
	}
	if (!failed)
		look_on();
	close(go[1]);
	for (int i = 0; i < 2; i++) {
		int status;

		failed |= pids[i] < 0 || waitpid(pids[i], &status, 0) < 0 || status;
	}
	if (failed)
		errx(1, "a model failed");
	puts("both wrote what they write without a cache, and the daemon's books balance");
	return 0;
}
