/* SPDX-License-Identifier: Apache-2.0 */
/* Calls captured in a CUDA graph, and calls on streams that run at the same time. */
#include <check.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/error.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/problem.h"
#include "tests/kernels/run.h"

#define cuda_ok(call)                                                                      \
	do {                                                                               \
		cudaError_t e_ = (call);                                                   \
		ck_assert_msg(e_ == cudaSuccess, "%s: %s", #call, cudaGetErrorString(e_)); \
	} while (0)

static struct problem *new_problem(int name, int len_a, int len_b)
{
	struct problem_spec spec = problem_default();

	spec.n_seqs = 2;
	spec.names[0] = name;
	spec.names[1] = name + 1;
	spec.q_lens[0] = 1;
	spec.q_lens[1] = 3;
	spec.lens[0] = len_a;
	spec.lens[1] = len_b;
	return problem_new(&spec);
}

static void copy_over(const void *to, const void *from, size_t bytes)
{
	cuda_ok(cudaMemcpy((void *)(uintptr_t)to, from, bytes, cudaMemcpyDeviceToDevice));
}

/* The batch changes between replays, the launch does not: lengths, tables, q, K and V. */
START_TEST(a_captured_step_runs_on_whatever_its_buffers_hold)
{
	struct problem *a = new_problem(1, 100, 37), *b = new_problem(5, 98, 33);
	const struct kv_attn_backend *backend = problem_backends()[0];
	size_t out_bytes = (size_t)(a->args.n_tokens * a->n_heads_q * 64) * 2;
	char *got = malloc(out_bytes);
	kv_block_id pairs[] = {0, 2};
	int64_t slots[] = {3, -1, 17, 4};
	size_t token = 2 * 64 * 2, side = 3 * 16 * token; /* a pool of 3 blocks */
	char *spare = buffer_new(2 * side), block[16 * 2 * 64 * 2], *from = buffer_new(4 * token);
	struct kv_view view = {
		spare, 16 * (int64_t)token, (int64_t)token, 64 * 2, 16, 2, 64, KV_F16, 1, 0};
	struct kv_view views[] = {view, view};
	struct kv_write_args write = {.size = sizeof(write),
				      .device = KV_DEVICE_CUDA,
				      .dtype = KV_F16,
				      .n_tokens = 4,
				      .key = from,
				      .value = from,
				      .slots = buffer_new(sizeof(slots))};
	struct kv_copy_args copy = {.size = sizeof(copy),
				    .device = KV_DEVICE_CUDA,
				    .n_pairs = 1,
				    .pairs = pairs,
				    .n_views = 2,
				    .views = views};
	struct kv_attention_args attend = a->args;
	cudaGraphExec_t replay;
	cudaGraph_t graph;
	cudaStream_t stream;
	float *lse;
	void *right;

	views[1].base = spare + side;
	write.k = views[0];
	write.v = views[1];
	attend.out = buffer_new(out_bytes);
	cuda_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	write.stream = copy.stream = attend.stream = stream;
	buffer_fill(spare, 0, 2 * side);

	cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
	ck_assert_msg(kv_write_on(backend, &write) == 0, "%s", kv_error_text());
	ck_assert_msg(kv_copy_blocks_on(backend, &copy) == 0, "%s", kv_error_text());
	ck_assert_msg(kv_attention_on(backend, &attend) == 0, "%s", kv_error_text());
	cuda_ok(cudaStreamEndCapture(stream, &graph));
	cuda_ok(cudaGraphInstantiate(&replay, graph, 0));
	memset(pairs, 0xff, sizeof(pairs)); /* they went by value */

	ck_assert_int_eq(a->pool_bytes, b->pool_bytes);
	for (int round = 0; round < 2; round++) {
		if (round) {
			copy_over(a->pool, b->pool, a->pool_bytes);
			copy_over(attend.q, b->args.q, out_bytes);
			copy_over(attend.seq_lens, b->args.seq_lens, 2 * sizeof(int32_t));
			copy_over(attend.block_table, b->args.block_table,
				  (size_t)(2 * attend.table_width) * sizeof(int32_t));
			slots[1] = 5;
		}
		problem_run(round ? b : a, backend, &right, &lse);
		buffer_put((void *)(uintptr_t)write.slots, slots, sizeof(slots));
		buffer_fill(from, 0x11 * (round + 1), 4 * token);
		cuda_ok(cudaDeviceSynchronize()); /* the stream waits for no other */
		cuda_ok(cudaGraphLaunch(replay, stream));
		cuda_ok(cudaStreamSynchronize(stream));
		buffer_get(got, attend.out, out_bytes);
		ck_assert_mem_eq(got, right, out_bytes);
		buffer_get(block, spare + side + 2 * 16 * token, sizeof(block)); /* V, block 2 */
		for (int t = 0; t < 16; t++)
			ck_assert_int_eq(block[t * (int)token],
					 t == 3 || t == 4 || (t == 5 && round) ? 0x11 * (round + 1)
									       : 0);
		free(right);
		free(lse);
	}
	cuda_ok(cudaGraphExecDestroy(replay));
	cuda_ok(cudaGraphDestroy(graph));
	cuda_ok(cudaStreamDestroy(stream));
	buffer_free(attend.out);
	buffer_free(spare);
	buffer_free(from);
	buffer_free((void *)(uintptr_t)write.slots);
	problem_free(a);
	problem_free(b);
	free(got);
}
END_TEST

START_TEST(a_launch_that_fails_says_so_and_leaves_no_error_behind)
{
	struct problem *p = new_problem(1, 20, 30);
	const struct kv_attn_backend *backend = problem_backends()[0];
	struct kv_attention_args args = p->args;
	cudaStream_t stream, other;
	cudaGraph_t graph;

	/* The legacy stream can't be used while another is being captured. */
	cuda_ok(cudaStreamCreate(&stream));
	cuda_ok(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
	args.out = buffer_new((size_t)(args.n_tokens * p->n_heads_q * 64) * 2);
	cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
	ck_assert_int_eq(kv_attention_on(backend, &args), -EIO);
	ck_assert_msg(strstr(kv_error_text(), "attention: CUDA: cudaError"), "%s", kv_error_text());
	ck_assert_int_eq(cudaPeekAtLastError(), cudaSuccess);
	cudaStreamEndCapture(stream, &graph); /* the attempt has spoiled the capture */
	cudaGetLastError();
	args.stream = other;
	ck_assert_msg(kv_attention_on(backend, &args) == 0, "%s", kv_error_text());
	cuda_ok(cudaStreamSynchronize(other));
	cuda_ok(cudaStreamDestroy(stream));
	cuda_ok(cudaStreamDestroy(other));
	buffer_free(args.out);
	problem_free(p);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("kernels/graph");
	TCase *tcase = tcase_create("graph");

	tcase_add_test(tcase, a_captured_step_runs_on_whatever_its_buffers_hold);
	tcase_add_test(tcase, a_launch_that_fails_says_so_and_leaves_no_error_behind);
	suite_add_tcase(suite, tcase);
	return run_on_device(suite);
}
