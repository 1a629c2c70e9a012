/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decode steps as graphs, on a device whose memory is the host's and whose graphs do nothing: what is recorded is
 * computed at once, from where a replay would find it. So a step that is recorded gives what its replay gives on a
 * GPU, and must have the bits of one that is launched piece by piece.
 */
#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/engine/cache.h"
#include "tools/engine/error.h"
#include "tools/engine/model_parts.h"
#include "tools/engine/tiny.h"

#define N_VOCAB	 256
#define MAX_SEQS 6 /* no power of two: the largest graph is cut short */
#define BLOCKS	 8 /* of a sequence */
#define STEPS	 20

static struct kv_gguf *file;
static struct kv_dense *dense;
static struct kv_dense_ops ops;
static int n_recorded, n_replayed, n_graphs;
static bool recording;

static const void *show(struct kv_dense *d, void *room, const void *from, size_t bytes)
{
	(void)d;
	memcpy(room, from, bytes);
	return room;
}

static int record(struct kv_dense *d)
{
	(void)d;
	recording = true;
	return 0;
}

static int recorded(struct kv_dense *d, void **ret)
{
	(void)d;
	recording = false;
	n_recorded++;
	n_graphs++;
	*ret = malloc(1);
	return 0;
}

static void replay(struct kv_dense *d, void *graph)
{
	(void)d;
	ck_assert_ptr_nonnull(graph);
	n_replayed++;
}

static void graph_free(struct kv_dense *d, void *graph)
{
	(void)d;
	n_graphs -= graph != NULL;
	free(graph);
}

static void *alloc_host(struct kv_dense *d, size_t bytes)
{
	(void)d;
	return calloc(1, bytes);
}

static void release_host(struct kv_dense *d, void *p)
{
	(void)d;
	free(p);
}

static void setup(void)
{
	ck_assert_int_eq(kv_tiny_new("tiny", &file), 0);
	ck_assert_int_eq(kv_dense_cpu(1, &dense), 0);
	ops = *dense->ops;
	ops.show = show;
	ops.record = record;
	ops.recorded = recorded;
	ops.replay = replay;
	ops.graph_free = graph_free;
	ops.alloc_host = alloc_host;
	ops.release_host = release_host;
	n_recorded = n_replayed = n_graphs = 0;
}

static void teardown(void)
{
	kv_dense_close(dense);
	kv_gguf_free(file);
}

static struct kv_model *model_new(bool graphs, uint32_t n_groups)
{
	uint32_t of_layer[KV_MODEL_MAX_LAYERS];
	struct kv_model *model;

	dense->ops = &ops;
	ck_assert_msg(kv_model_new(file, dense, 512, MAX_SEQS, BLOCKS, &model) == 0, "%s",
		      kv_engine_error_text());
	for (uint32_t i = 0; i < kv_model_shape(model)->n_layers; i++)
		of_layer[i] = i % n_groups;
	ck_assert_int_eq(kv_model_use_groups(model, of_layer, n_groups), 0);
	if (graphs)
		ck_assert_int_eq(kv_model_use_graphs(model), 0);
	return model;
}

/* A step of @n sequences, each of which has @lens[i] tokens by its end, the last new; group g has blocks of its own. */
static int decode(struct kv_model *model, const struct cache *cache, uint32_t n, const int32_t *lens,
		  const int32_t *tokens, float *logits)
{
	int32_t tables[KV_MODEL_MAX_GROUPS][MAX_SEQS][BLOCKS], starts[MAX_SEQS + 1], rows[MAX_SEQS];
	int64_t slots[KV_MODEL_MAX_GROUPS][MAX_SEQS], positions[MAX_SEQS];
	struct kv_batch_data batches[KV_MODEL_MAX_GROUPS];

	for (uint32_t g = 0; g < model->n_groups; g++) {
		for (uint32_t i = 0; i < n; i++) {
			int32_t position = lens[i] - 1;

			for (uint32_t c = 0; c < BLOCKS; c++)
				tables[g][i][c] = cache->table[(i * BLOCKS + c + 3 * g) % cache->n_blocks];
			slots[g][i] = (int64_t)tables[g][i][position / CACHE_BLOCK_TOKENS] * CACHE_BLOCK_TOKENS +
				      position % CACHE_BLOCK_TOKENS;
			positions[i] = position;
			starts[i] = rows[i] = (int32_t)i;
		}
		starts[n] = (int32_t)n;
		batches[g] = (struct kv_batch_data){
			.n_seqs = n, .n_tokens = n, .n_real_seqs = n, .n_real_tokens = n, .max_query_len = 1,
			.max_seq_len = BLOCKS * CACHE_BLOCK_TOKENS, .table_width = BLOCKS,
			.block_table = tables[g][0], .slots = slots[g], .query_start_loc = starts,
			.seq_lens = lens, .positions = positions, .tokens = tokens,
		};
	}
	return kv_model_step(model, batches, cache->views, rows, n, logits);
}

/* Batches of one to all sequences, of other lengths each step. */
START_TEST(a_recorded_step_has_the_bits_of_one_that_is_launched_piece_by_piece)
{
	uint32_t n_groups = (uint32_t)_i;
	struct kv_model *eager = model_new(false, n_groups), *graphs = model_new(true, n_groups);
	struct cache caches[2];

	for (int k = 0; k < 2; k++)
		cache_init(&caches[k], dense, kv_model_shape(eager), KV_F32, MAX_SEQS * BLOCKS);
	for (int step = 0; step < STEPS; step++) {
		static float logits[2][MAX_SEQS * N_VOCAB];
		uint32_t n = 1 + (uint32_t)(step * 5 % MAX_SEQS);
		int32_t lens[MAX_SEQS], tokens[MAX_SEQS];

		for (uint32_t i = 0; i < n; i++) {
			lens[i] = 1 + (step * 7 + (int32_t)i * 13) % (BLOCKS * CACHE_BLOCK_TOKENS);
			tokens[i] = (step * 31 + (int32_t)i * 17) % N_VOCAB;
		}
		/* Other views, though only to the eye: each step is recorded anew. */
		caches[1].views[0].reserved = step;
		ck_assert_int_eq(decode(eager, &caches[0], n, lens, tokens, logits[0]), 0);
		ck_assert_int_eq(decode(graphs, &caches[1], n, lens, tokens, logits[1]), 0);
		ck_assert_mem_eq(logits[0], logits[1], n * N_VOCAB * sizeof(float));
		ck_assert_int_eq(n_replayed, step + 1);
	}
	ck_assert_int_eq(n_recorded, STEPS);
	kv_model_free(eager);
	kv_model_free(graphs);
	ck_assert_int_eq(n_graphs, 0);
	for (int k = 0; k < 2; k++)
		cache_deinit(&caches[k]);
}
END_TEST

/* It once was kept: the next step replayed some of the layers and gave logits of nothing. */
START_TEST(a_graph_of_a_part_of_the_layers_is_not_replayed)
{
	struct kv_model *model = model_new(true, 1);
	int32_t lens[] = {5, 9}, tokens[] = {1, 2};
	float logits[2 * N_VOCAB];
	struct cache cache;

	cache_init(&cache, dense, kv_model_shape(model), KV_F32, MAX_SEQS * BLOCKS);
	cache.views[2 * kv_model_shape(model)->n_layers - 1].dtype = 999;
	for (int i = 0; i < 2; i++)
		ck_assert_int_lt(decode(model, &cache, 2, lens, tokens, logits), 0);
	ck_assert_int_eq(n_replayed, 0);
	ck_assert_int_eq(n_graphs, 0);
	ck_assert(!recording);
	kv_model_free(model);
	cache_deinit(&cache);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("engine/model_graph");
	TCase *tcase = tcase_create("model_graph");
	SRunner *runner;
	int n_failed;

	tcase_set_timeout(tcase, 120);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_loop_test(tcase, a_recorded_step_has_the_bits_of_one_that_is_launched_piece_by_piece, 1, 3);
	tcase_add_test(tcase, a_graph_of_a_part_of_the_layers_is_not_replayed);
	suite_add_tcase(s, tcase);
	runner = srunner_create(s);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
