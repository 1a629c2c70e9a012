/* SPDX-License-Identifier: Apache-2.0 */
/* Latent decode captured in a CUDA graph: the launches stay, lengths change. */
#include <check.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/error.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/mla_problem.h"
#include "tests/kernels/run.h"

#define cuda_ok(call)                                                                      \
	do {                                                                               \
		cudaError_t e_ = (call);                                                   \
		ck_assert_msg(e_ == cudaSuccess, "%s: %s", #call, cudaGetErrorString(e_)); \
	} while (0)

/* Loop: 16 heads, 128 heads, packed rows. */
START_TEST(a_replay_is_the_call_whatever_the_lengths_have_become)
{
	struct mla_spec s = mla_spec_default();
	struct mla_problem *p;
	int n = 0;

	s.heads = _i == 1 ? 128 : 16;
	s.kv_dtype = _i == 2 ? KV_BYTES : KV_BF16;
	s.pad_seqs = 2;
	s.pad_tokens = 3;
	for (int b = 0; b < 6; b++)
		mla_spec_add(&s, 100 + 333 * b, 1 + b % 2);
	p = mla_problem_new(&s);
	for (int i = 0; kv_attn_backends[i]; i++) {
		const struct kv_attn_backend *backend = kv_attn_backends[i];
		struct kv_attention_args a = p->args;
		int32_t lens[6];
		cudaGraphExec_t exec;
		cudaStream_t stream;
		cudaGraph_t graph;
		int r;

		if (backend->device != buffer_device)
			continue;
		a.workspace_bytes = backend->workspace_bytes ? backend->workspace_bytes(&a) : 0;
		a.workspace = buffer_new(a.workspace_bytes);
		buffer_fill(a.workspace, 0, a.workspace_bytes);
		cuda_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
		a.stream = stream;
		cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
		r = kv_attention_on(backend, &a);
		cuda_ok(cudaStreamEndCapture(stream, &graph));
		if (r == 0) {
			n++;
			cuda_ok(cudaGraphInstantiate(&exec, graph, 0));
			for (int round = 0; round < 4; round++) {
				char *out = malloc(p->out_bytes), *called;
				float *lse = malloc(p->lse_bytes), *lse_called;
				double error, lse_error;
				size_t real = (size_t)(p->n_tokens - s.pad_tokens);

				for (int b = 0; b < 6; b++)
					lens[b] = (100 + 333 * b) / (1 + round * (b % 3));
				mla_problem_lengths(p, lens);
				buffer_fill(a.out, 0xff, p->out_bytes);
				cuda_ok(cudaDeviceSynchronize());
				cuda_ok(cudaGraphLaunch(exec, stream));
				cuda_ok(cudaGraphLaunch(exec, stream));
				cuda_ok(cudaStreamSynchronize(stream));
				buffer_get(out, a.out, p->out_bytes);
				buffer_get(lse, a.lse, p->lse_bytes);
				mla_problem_errors(p, out, lse, &error, &lse_error);
				ck_assert_msg(error <= mla_problem_tolerance(&p->spec) &&
						      lse_error <= 2e-3,
					      "%s: round %d: %g, %g", backend->name, round, error,
					      lse_error);
				ck_assert_int_eq(mla_problem_run(p, backend, 0x7e, NULL, &called,
								 &lse_called), 0);
				ck_assert_mem_eq(out, called, real * (size_t)s.heads * 512 * 2);
				ck_assert_mem_eq(lse, lse_called, real * (size_t)s.heads * 4);
				free(out);
				free(lse);
				free(called);
				free(lse_called);
			}
			cuda_ok(cudaGraphExecDestroy(exec));
		}
		cuda_ok(cudaGraphDestroy(graph));
		cuda_ok(cudaStreamDestroy(stream));
		buffer_free(a.workspace);
	}
	ck_assert_int_gt(n, _i < 2 ? 1 : 0); /* bf16: the fast one and the portable one */
	mla_problem_free(p);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("kernels/mla_graph");
	TCase *tcase = tcase_create("graph");

	tcase_add_loop_test(tcase, a_replay_is_the_call_whatever_the_lengths_have_become, 0, 3);
	suite_add_tcase(suite, tcase);
	return run_on_device(suite);
}
