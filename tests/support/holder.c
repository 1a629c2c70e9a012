/* SPDX-License-Identifier: Apache-2.0 */
/*
 * holder POOL BLOCKS TOKENS [SALT]: a client for shell tests. It opens a pool, leases BLOCKS blocks,
 * publishes a sequence of TOKENS tokens and keeps it, says "ready SESSION", and stays until its
 * stdin ends. Then it gives everything back; kill it to see what happens to one that doesn't.
 *
 * $HOLDER_NAME is what it calls itself; "holder" otherwise. Blocks have 16 tokens and 16 KiB. Two holders with the same TOKENS share the whole blocks of
 * them.
 */
#include <err.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <kvcached/kvcached.h>

#define N_LAYERS 2
#define TIMEOUT	 (10 * KV_SEC)

static void must(int r, const char *what)
{
	if (r < 0)
		errx(1, "%s: %s", what, kv_error_text());
	if (r > 0)
		errx(1, "%s: answer %d", what, r);
}

static struct kv_pool *open_pool(struct kv_client *client, const char *name)
{
	struct kv_component components[2 * N_LAYERS];
	struct kv_layout layout = {
		.kind = KV_LAYOUT_FLAT, .block_tokens = 16, .components = components};
	KV_OPTIONS(kv_pool_options, what, .name = name, .model = "holder", .layout = &layout,
		   .timeout = TIMEOUT);
	struct kv_pool *pool;

	layout.n_components = kv_layout_uniform(components, N_LAYERS, 2, 64, KV_F16, 1, 1);
	must(kv_pool_open(client, &what, &pool), "open");
	return pool;
}

static struct kv_seq *publish(struct kv_pool *pool, uint32_t n, const char *salt)
{
	int32_t *tokens = calloc(n + 1, sizeof(*tokens));
	struct kv_seq *seq;
	size_t hit;

	if (!tokens)
		errx(1, "no memory for %u tokens", n);
	for (uint32_t i = 0; i < n; i++)
		tokens[i] = (int32_t)(i * 7 % 1000);
	must(kv_seq_new(pool, &seq), "sequence");
	if (salt)
		must(kv_seq_field(seq, KV_TAG_SALT, salt, strlen(salt)), "salt");
	/* Twice, as an engine does that computes a prompt in pieces; it counts once. */
	must(kv_seq_lookup(seq, tokens, n, &hit), "lookup");
	must(kv_seq_lookup(seq, tokens, n, &hit), "lookup");
	must(kv_seq_reserve(seq, n, TIMEOUT), "reserve");
	must(kv_seq_append(seq, tokens + hit, n - hit), "append");
	must(kv_seq_publish(seq, NULL), "publish");
	free(tokens);
	return seq;
}

int main(int argc, char **argv)
{
	const char *name = getenv("HOLDER_NAME");
	KV_OPTIONS(kv_connect_options, how, .name = name ? name : "holder", .timeout = TIMEOUT);
	struct kv_client *client;
	struct kv_pool *pool;
	struct kv_pool_info info;
	struct kv_seq *seq = NULL;
	kv_block_id *ids;
	uint32_t n_blocks, n_tokens;
	char c;

	if (argc != 4 && argc != 5)
		errx(2, "usage: holder POOL BLOCKS TOKENS [SALT]");
	n_blocks = (uint32_t)strtoul(argv[2], NULL, 10);
	n_tokens = (uint32_t)strtoul(argv[3], NULL, 10);
	ids = calloc(n_blocks + 1, sizeof(*ids));
	if (!ids)
		errx(1, "no memory for %u ids", n_blocks);
	must(kv_connect(&how, &client), "connect");
	pool = open_pool(client, argv[1]);
	if (n_blocks)
		must(kv_blocks_take(pool, n_blocks, ids, TIMEOUT), "take");
	if (n_tokens)
		seq = publish(pool, n_tokens, argv[4]);
	/* The daemon has worked off what was published. */
	must(kv_ping(client, TIMEOUT), "ping");
	kv_pool_info(pool, &info);
	printf("ready %u\n", info.session);
	fflush(stdout);
	while (read(STDIN_FILENO, &c, 1) > 0)
		;
	kv_seq_free(seq, NULL);
	if (n_blocks)
		must(kv_blocks_give(pool, n_blocks, ids), "give");
	kv_pool_close(pool);
	kv_disconnect(client);
	free(ids);
	return 0;
}
