/* SPDX-License-Identifier: Apache-2.0 */
/* The indexer and sparse attention captured in a CUDA graph: the launches stay, lengths change. */
#include <check.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/error.h"
#include "kernels/dsa.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/number.h"
#include "tests/kernels/run.h"
#include "tests/support/expect.h"

#define SEQS	6
#define TOKENS	9 /* queries: 1, 2, 1, 2, 1, 2 */
#define LONGEST 5000
#define WIDTH	79 /* blocks of 64 */
#define HEADS	64
#define TOP_K	512
#define LATENT	512
#define DIM	576
#define ROUNDS	4

#define cuda_ok(call)                                                                      \
	do {                                                                               \
		cudaError_t e_ = (call);                                                   \
		ck_assert_msg(e_ == cudaSuccess, "%s: %s", #call, cudaGetErrorString(e_)); \
	} while (0)

/* One backend's step: choose, then attend over what was chosen. */
struct step {
	const struct kv_dsa_backend *choose, *attend;
	struct kv_index_args index;
	struct kv_sparse_mla_args attention;
	void *buffers[16];
	int n_buffers;
};

static const size_t n_scores = (size_t)TOKENS * LONGEST, n_chosen = (size_t)TOKENS * TOP_K;
static const size_t n_out = (size_t)TOKENS * HEADS * LATENT, n_lse = (size_t)TOKENS * HEADS;

/* What a step gave. */
struct answer {
	float *scores;
	int32_t *chosen;
	uint16_t *out;
	float *lse;
};

static void *put(struct step *s, const void *from, size_t bytes)
{
	void *b = buffer_new(bytes);

	if (from)
		buffer_put(b, from, bytes);
	else
		buffer_fill(b, 0x7e, bytes);
	s->buffers[s->n_buffers++] = b;
	return b;
}

/* Random codes of @dtype in [-1, 1) */
static void *random_put(struct step *s, size_t n, int dtype, int seed)
{
	char *host = malloc(n * kv_dtype_bytes(dtype));
	void *b;

	for (size_t i = 0; i < n; i++)
		number_set(host, (int64_t)i, dtype,
			   number_encode(dtype, number_random((uint64_t)seed, i, 0, 0)));
	b = put(s, host, n * kv_dtype_bytes(dtype));
	free(host);
	return b;
}

static void lengths(const struct step *s, int round)
{
	int32_t lens[SEQS];

	for (int b = 0; b < SEQS; b++)
		lens[b] = (LONGEST - 900 * b) / (1 + round * (b % 3)); /* 500 is fewer than top_k */
	buffer_put((void *)s->index.seq_lens, lens, sizeof(lens));
}

static void step_set_up(struct step *s, bool packed)
{
	size_t n_rows = (size_t)SEQS * WIDTH * 64, packed_bytes = 656;
	int32_t table[SEQS * WIDTH], loc[SEQS + 1];
	int64_t *slots = malloc(n_rows * sizeof(*slots));
	size_t workspace;

	for (int i = 0; i < SEQS * WIDTH; i++)
		table[i] =
			(int32_t)((int64_t)i * 101 % (SEQS * WIDTH)); /* 101: a prime, not of 474 */
	for (int b = 0; b <= SEQS; b++)
		loc[b] = b + b / 2;
	for (size_t i = 0; i < n_rows; i++)
		slots[i] = (int64_t)i;
	KV_OPTIONS(kv_index_write_args, w, .device = buffer_device, .dtype = KV_BF16,
		   .n_tokens = (int64_t)n_rows,
		   .cache = {.block_stride = 64 * KV_INDEX_ROW_FP8,
			     .block_tokens = 64,
			     .n_heads = 1,
			     .head_dim = KV_INDEX_ROW_FP8,
			     .dtype = KV_BYTES});
	w.cache.base = put(s, NULL, n_rows * KV_INDEX_ROW_FP8);
	w.key = random_put(s, n_rows * KV_INDEX_DIM, KV_BF16, 1);
	w.slots = put(s, slots, n_rows * sizeof(*slots));
	ck_assert_msg(kv_index_write(&w) == 0, "%s", kv_error_text());
	free(slots);
	KV_OPTIONS(kv_index_args, a, .device = buffer_device, .n_seqs = SEQS, .n_tokens = TOKENS,
		   .max_query_len = 2, .max_seq_len = LONGEST, .table_width = WIDTH,
		   .n_heads = HEADS, .top_k = TOP_K, .cache = w.cache, .scores_stride = LONGEST);
	a.q = random_put(s, (size_t)TOKENS * HEADS * KV_INDEX_DIM, KV_F8_E4M3, 2);
	a.weights = random_put(s, (size_t)TOKENS * HEADS, KV_F32, 3);
	a.query_start_loc = put(s, loc, sizeof(loc));
	a.seq_lens = put(s, NULL, sizeof(int32_t) * SEQS);
	a.block_table = put(s, table, sizeof(table));
	a.scores = put(s, NULL, n_scores * sizeof(float));
	a.chosen = put(s, NULL, n_chosen * sizeof(int32_t));
	s->index = a;
	KV_OPTIONS(kv_sparse_mla_args, m, .device = buffer_device, .dtype = KV_BF16,
		   .n_tokens = TOKENS, .n_heads = HEADS, .latent_dim = LATENT,
		   .rope_dim = DIM - LATENT, .top_k = TOP_K, .sm_scale = 0.0722f,
		   .chosen = a.chosen,
		   .cache = {.block_tokens = 64,
			     .n_heads = 1,
			     .head_dim = packed ? (int32_t)packed_bytes : DIM,
			     .dtype = packed ? KV_BYTES : KV_BF16,
			     .scale = 1});
	m.cache.token_stride = packed ? (int64_t)packed_bytes : 2 * DIM;
	m.cache.head_stride = m.cache.token_stride;
	m.cache.block_stride = 64 * m.cache.token_stride;
	m.cache.base = random_put(s, n_rows * (size_t)m.cache.token_stride / 2, KV_BF16, 4);
	if (packed) { /* codes that are numbers; scales and rope of 0.0115 */
		char *rows = malloc(n_rows * packed_bytes);

		for (size_t i = 0; i < n_rows * packed_bytes; i++)
			rows[i] = (char)(i % packed_bytes < LATENT ? i * 37 % 61 : 0x3c);
		buffer_put(m.cache.base, rows, n_rows * packed_bytes);
		free(rows);
	}
	m.q = random_put(s, (size_t)TOKENS * HEADS * DIM, KV_BF16, 5);
	m.out = put(s, NULL, n_out * 2);
	m.lse = put(s, NULL, n_lse * sizeof(float));
	ck_assert_msg(kv_sparse_mla_workspace_bytes(&m, &workspace) == 0, "%s", kv_error_text());
	m.workspace_bytes = workspace;
	m.workspace = workspace ? put(s, NULL, workspace) : NULL;
	s->attention = m;
	lengths(s, 0);
}

/* Return: 0; -ENOTSUP if a backend is not for this. */
static int step_call(const struct step *s, cudaStream_t stream)
{
	struct kv_index_args a = s->index;
	struct kv_sparse_mla_args m = s->attention;
	int r;

	a.stream = m.stream = stream;
	r = kv_index_choose_on(s->choose, &a);
	return r ? r : kv_sparse_mla_on(s->attend, &m);
}

static void forget(const struct step *s)
{
	buffer_fill(s->index.scores, 0xff, n_scores * sizeof(float));
	buffer_fill(s->index.chosen, 0x7e, n_chosen * sizeof(int32_t));
	buffer_fill(s->attention.out, 0xff, n_out * 2);
	buffer_fill(s->attention.lse, 0xff, n_lse * sizeof(float));
	cuda_ok(cudaDeviceSynchronize());
}

static struct answer answer_get(const struct step *s)
{
	struct answer a = {malloc(n_scores * sizeof(float)), malloc(n_chosen * sizeof(int32_t)),
			   malloc(n_out * 2), malloc(n_lse * sizeof(float))};

	cuda_ok(cudaDeviceSynchronize());
	buffer_get(a.scores, s->index.scores, n_scores * sizeof(float));
	buffer_get(a.chosen, s->index.chosen, n_chosen * sizeof(int32_t));
	buffer_get(a.out, s->attention.out, n_out * 2);
	buffer_get(a.lse, s->attention.lse, n_lse * sizeof(float));
	return a;
}

static void answer_free(struct answer *a)
{
	free(a->scores);
	free(a->chosen);
	free(a->out);
	free(a->lse);
}

/* The last query, whose sequence was 500 tokens long at the capture, has as many as it has now. */
static void check_last(const struct answer *a, int n_keys)
{
	const int32_t *chosen = a->chosen + (TOKENS - 1) * TOP_K;

	for (int i = 0; i < TOP_K; i++)
		expect(i < n_keys ? chosen[i] >= 0 && chosen[i] < SEQS * WIDTH * 64
				  : chosen[i] == -1,
		       "%d of %d chosen: %d", i, n_keys, chosen[i]);
	for (size_t i = 0; i < n_lse; i++)
		expect(isfinite(a->lse[i]), "lse of row %zu: %g", i, (double)a->lse[i]);
	for (size_t i = 0; i < n_out; i++)
		expect(a->out[i] != 0xffff, "element %zu was not written", i);
}

/* Loop: rows of bf16, packed rows. */
START_TEST(a_replay_is_the_call_whatever_the_lengths_have_become)
{
	struct step s = {.n_buffers = 0};
	int n = 0;

	step_set_up(&s, _i == 1);
	for (int i = 0; kv_dsa_backends[i]; i++)
		for (int j = 0; kv_dsa_backends[j]; j++) {
			cudaGraphExec_t exec;
			cudaStream_t stream;
			cudaGraph_t graph;
			int r;

			s.choose = kv_dsa_backends[i];
			s.attend = kv_dsa_backends[j];
			if (s.choose->device != buffer_device || !s.choose->score ||
			    s.attend->device != buffer_device || !s.attend->attend)
				continue;
			lengths(&s, 0);
			cuda_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
			cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
			r = step_call(&s, stream);
			cuda_ok(cudaStreamEndCapture(stream, &graph));
			if (r == 0) {
				n++;
				cuda_ok(cudaGraphInstantiate(&exec, graph, 0));
				for (int round = 0; round < ROUNDS; round++) {
					struct answer called, replayed;

					lengths(&s, round);
					forget(&s);
					cuda_ok(cudaGraphLaunch(exec, stream));
					cuda_ok(cudaGraphLaunch(exec, stream));
					replayed = answer_get(&s);
					forget(&s);
					ck_assert_int_eq(step_call(&s, stream), 0);
					called = answer_get(&s);
					check_last(&replayed, 500 / (1 + 2 * round));
					ck_assert_mem_eq(replayed.scores, called.scores,
							 n_scores * sizeof(float));
					ck_assert_mem_eq(replayed.chosen, called.chosen,
							 n_chosen * sizeof(int32_t));
					ck_assert_mem_eq(replayed.out, called.out, n_out * 2);
					ck_assert_mem_eq(replayed.lse, called.lse,
							 n_lse * sizeof(float));
					answer_free(&replayed);
					answer_free(&called);
				}
				cuda_ok(cudaGraphExecDestroy(exec));
			}
			cuda_ok(cudaGraphDestroy(graph));
			cuda_ok(cudaStreamDestroy(stream));
		}
	ck_assert_int_gt(n, 0);
	for (int i = 0; i < s.n_buffers; i++)
		buffer_free(s.buffers[i]);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("kernels/dsa_graph");
	TCase *tcase = tcase_create("graph");

	tcase_add_loop_test(tcase, a_replay_is_the_call_whatever_the_lengths_have_become, 0, 2);
	suite_add_tcase(suite, tcase);
	return run_on_device(suite);
}
