/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group_holder MODEL TOKENS: a client for shell tests, whose model keeps all tokens, a window and a state: pools
 * MODEL.full, MODEL.window and MODEL.state. It looks up TOKENS tokens, those of holder, publishes a group sequence of
 * them step by step and keeps it, says "ready HIT", and stays until its stdin ends.
 *
 * Blocks have 16 tokens, the window 32; each 64 tokens there is a checkpoint of the state.
 */
#include <err.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <kvcached/kvcached.h>

#define BLOCK	 16
#define WINDOW	 32
#define INTERVAL 64
#define CHUNK	 16
#define TIMEOUT	 (10 * KV_SEC)

static void must(int r, const char *what)
{
	if (r < 0)
		errx(1, "%s: %s", what, kv_error_text());
	if (r > 0)
		errx(1, "%s: answer %d", what, r);
}

static struct kv_pool *open_pool(struct kv_client *client, const char *model, const char *kind, bool state)
{
	struct kv_component component = {.role = state ? KV_ROLE_STATE : KV_ROLE_K, .dtype = KV_F32, .n_heads = 1,
					 .head_dim = 64, .scale = 1};
	struct kv_layout layout = {.kind = KV_LAYOUT_FLAT, .block_tokens = state ? 1 : BLOCK,
				   .n_components = 1, .components = &component};
	char name[KV_NAME_MAX];
	KV_OPTIONS(kv_pool_options, what, .name = name, .model = model, .layout = &layout, .timeout = TIMEOUT);
	struct kv_pool *pool;

	snprintf(name, sizeof(name), "%s.%s", model, kind);
	must(kv_pool_open(client, &what, &pool), "open");
	return pool;
}

/* A step of a model that computes nothing: what matters here is which rows and blocks are told of. */
static void step(struct kv_gseq *seq, const int32_t *tokens, size_t n)
{
	size_t end = kv_gseq_len(seq) + n;

	must(kv_gseq_reserve(seq, end, TIMEOUT), "reserve");
	must(kv_gseq_append(seq, tokens + end - n, n), "append");
	must(kv_gseq_publish(seq, NULL), "publish");
	must(kv_gseq_done(seq, end, NULL), "done");
}

int main(int argc, char **argv)
{
	KV_OPTIONS(kv_connect_options, how, .name = "group_holder", .timeout = TIMEOUT);
	struct kv_group groups[3] = {{.kind = KV_GROUP_FULL},
				     {.kind = KV_GROUP_WINDOW, .window = WINDOW},
				     {.kind = KV_GROUP_STATE, .interval = INTERVAL}};
	KV_OPTIONS(kv_groups_options, what, .groups = groups, .n_groups = 3);
	struct kv_client *client;
	struct kv_groups *all;
	struct kv_gseq *seq;
	size_t n_tokens, hit;
	int32_t *tokens;
	char c;

	if (argc != 3)
		errx(2, "usage: group_holder MODEL TOKENS");
	n_tokens = strtoul(argv[2], NULL, 10);
	tokens = calloc(n_tokens + 1, sizeof(*tokens));
	if (!tokens)
		errx(1, "no memory for %zu tokens", n_tokens);
	for (size_t i = 0; i < n_tokens; i++)
		tokens[i] = (int32_t)(i * 7 % 1000);
	must(kv_connect(&how, &client), "connect");
	groups[0].pool = open_pool(client, argv[1], "full", false);
	groups[1].pool = open_pool(client, argv[1], "window", false);
	groups[2].pool = open_pool(client, argv[1], "state", true);
	must(kv_groups_new(&what, &all), "groups");
	must(kv_gseq_new(all, &seq), "sequence");
	must(kv_gseq_lookup(seq, tokens, n_tokens, &hit), "lookup");
	while (kv_gseq_len(seq) < n_tokens) {
		size_t left = n_tokens - kv_gseq_len(seq);

		step(seq, tokens, left < CHUNK ? left : CHUNK);
	}
	/* The daemon has worked off what was published. */
	must(kv_ping(client, TIMEOUT), "ping");
	printf("ready %zu\n", hit);
	fflush(stdout);
	while (read(STDIN_FILENO, &c, 1) > 0)
		;
	kv_gseq_free(seq, NULL);
	kv_groups_free(all);
	for (int g = 0; g < 3; g++)
		kv_pool_close(groups[g].pool);
	kv_disconnect(client);
	free(tokens);
	return 0;
}
