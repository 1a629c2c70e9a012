/* SPDX-License-Identifier: Apache-2.0 */
/* Work on state rows captured in a CUDA graph: the launch stays, what its arrays hold changes. */
#include <check.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/error.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/run.h"
#include "tests/kernels/state_problem.h"

#define cuda_ok(call)                                                                      \
	do {                                                                               \
		cudaError_t e_ = (call);                                                   \
		ck_assert_msg(e_ == cudaSuccess, "%s: %s", #call, cudaGetErrorString(e_)); \
	} while (0)

static size_t out_bytes(const struct state_problem *p)
{
	return (size_t)(p->n_tokens * p->out_stride) * kv_dtype_bytes(p->spec.dtype);
}

/* New lanes' rows, new inputs, a padded lane that was none; then the same by a call. */
static void replay_beside_call(struct state_problem *p, const struct kv_state_backend *backend,
			       cudaGraphExec_t graph, cudaStream_t stream)
{
	size_t rows = (size_t)(p->row_bytes * p->spec.n_rows);
	char *before = malloc(rows), *replayed = malloc(rows), *called = malloc(rows);
	char *out = malloc(out_bytes(p)), *right;

	buffer_get(before, p->rows, rows);
	buffer_fill(p->out, 0x7e, out_bytes(p));
	cuda_ok(cudaDeviceSynchronize());
	cuda_ok(cudaGraphLaunch(graph, stream));
	cuda_ok(cudaStreamSynchronize(stream));
	buffer_get(out, p->out, out_bytes(p));
	buffer_get(replayed, p->rows, rows);
	buffer_put(p->rows, before, rows);
	right = state_problem_run(p, backend);
	buffer_get(called, p->rows, rows);
	ck_assert_mem_eq(out, right, out_bytes(p));
	ck_assert_mem_eq(replayed, called, rows);
	free(before);
	free(replayed);
	free(called);
	free(out);
	free(right);
}

/* Loop: gated delta net and Mamba-2, lanes of one token and of chunks. */
START_TEST(a_replay_is_the_call_on_whatever_the_arrays_hold)
{
	struct state_spec s = state_spec_default(_i % 2 ? PROBLEM_SSD : PROBLEM_DELTA);
	bool chunks = _i / 2;

	s.n_rows = 10;
	s.conv_width = 0; /* whose rows would have to be put back as well */
	for (int b = 0; b < 4; b++)
		state_spec_add(&s, chunks ? 40 + 30 * b : 1, 64 * b, b, b);
	for (int i = 0; state_problem_backends()[i]; i++) {
		const struct kv_state_backend *backend = state_problem_backends()[i];
		struct state_problem *p = state_problem_new(&s);
		cudaGraphExec_t exec;
		cudaStream_t stream;
		cudaGraph_t graph;

		if (!state_problem_can_run(p, backend)) {
			state_problem_free(p);
			continue;
		}
		cuda_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
		cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
		ck_assert_msg(state_problem_call(p, backend, stream) == 0, "%s", kv_error_text());
		cuda_ok(cudaStreamEndCapture(stream, &graph));
		cuda_ok(cudaGraphInstantiate(&exec, graph, 0));
		for (int round = 0; round < 3; round++) {
			replay_beside_call(p, backend, exec, stream);
			state_problem_inputs(p, 90 + round);
			p->spec.read[round] = p->spec.write[round] = 5 + round;
			p->spec.computed[round] = 7 * round;
			state_problem_fill(p, 5 + round, 3);
			if (round == 1)
				p->spec.read[3] = p->spec.write[3] = -1;
			if (chunks && round) { /* one a step now, its tokens another's */
				p->spec.q_lens[0] = 3;
				p->spec.q_lens[1] = 107;
			}
			state_problem_batch(p);
		}
		cuda_ok(cudaGraphExecDestroy(exec));
		cuda_ok(cudaGraphDestroy(graph));
		cuda_ok(cudaStreamDestroy(stream));
		state_problem_free(p);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("kernels/gdn_graph");
	TCase *tcase = tcase_create("graph");

	tcase_add_loop_test(tcase, a_replay_is_the_call_on_whatever_the_arrays_hold, 0, 4);
	suite_add_tcase(suite, tcase);
	return run_on_device(suite);
}
