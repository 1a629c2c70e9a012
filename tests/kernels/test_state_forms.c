/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What holds for every kind of work on state rows (gated delta net, Mamba-2, the convolution alone):
 * many tokens in one call or in many, in chunks, in a batch of any size, in place or from row to row.
 */
#include <check.h>
#include <math.h>
#include <stdlib.h>

#include "tests/kernels/buffer.h"
#include "tests/kernels/number.h"
#include "tests/kernels/run.h"
#include "tests/kernels/state_problem.h"
#include "tests/support/expect.h"

#define COUNT(a) (int)(sizeof(a) / sizeof((a)[0]))

static const int kinds[] = {PROBLEM_DELTA, PROBLEM_SSD, PROBLEM_CONV};

/* Tokens @from.. of @whole's lane, as a problem of their own that goes on from @row. */
static struct state_problem *cut(const struct state_problem *whole, int from, int len,
				 const char *row)
{
	struct state_spec spec = whole->spec;
	struct state_problem *p;
	int64_t element = (int64_t)kv_dtype_bytes(spec.dtype);
	int64_t state = spec.kind == PROBLEM_CONV ? 0 : whole->row_bytes;
	size_t gates = (size_t)(len * whole->heads * element);

	spec.q_lens[0] = len;
	spec.computed[0] = from;
	p = state_problem_new(&spec);
	if (from) {
		buffer_put(p->rows, row, (size_t)state);
		buffer_put(p->conv_rows, row + state, (size_t)p->conv_row_bytes);
	}
	buffer_put(p->arrays[0], whole->x + from * p->in_stride * element,
		   (size_t)(len * p->in_stride * element));
	buffer_put(p->arrays[1], whole->a + (int64_t)from * p->heads * element, gates);
	buffer_put(p->arrays[2], whole->b + (int64_t)from * p->heads * element, gates);
	return p;
}

/* A sum of squares, and that of the differences. */
struct apart {
	double error, norm;
};

static void compare(struct apart *sum, const char *a, const char *b, int64_t n, int dtype)
{
	for (int64_t i = 0; i < n; i++) {
		double x = number_get(a, i, dtype), d = number_get(b, i, dtype) - x;

		sum->error += d * d;
		sum->norm += x * x;
	}
}

/* The rows of both are equal: inputs to the bit, states but for what is lost from call to call. */
static void expect_rows_equal(const struct state_problem *p, const char *a, const char *b, double tolerance)
{
	struct apart states = {0, 0}, inputs = {0, 0};
	int64_t state = p->spec.kind == PROBLEM_CONV ? 0 : p->row_bytes;

	compare(&states, a, b, state / 4, KV_F32);
	expect(states.error <= tolerance * tolerance * states.norm, "the state is off by %g",
	       sqrt(states.error / states.norm));
	compare(&inputs, a + state, b + state, conv_elements(p), p->spec.conv_dtype);
	expect(inputs.error == 0, "the convolution's inputs are off by %g", sqrt(inputs.error / inputs.norm));
}

/* @backend, or for parts that it leaves to others, as a chunk form does a single token, the first that can. */
static const struct kv_state_backend *part_backend(struct state_problem *p,
						   const struct kv_state_backend *backend)
{
	for (int i = 0; !state_problem_can_run(p, backend); i++) {
		backend = state_problem_backends()[i];
		ck_assert_msg(backend != NULL, "no backend runs this part");
	}
	return backend;
}

/*
 * A prompt in parts of @lens tokens, each a call that goes on from the row that the last one left: out
 * and row are those of one call.
 */
static void expect_parts_equal(const struct kv_state_backend *backend, struct state_problem *whole,
			       const int *lens, int n, bool to_the_bit, double tolerance)
{
	int64_t element = (int64_t)kv_dtype_bytes(whole->spec.dtype);
	char *out = state_problem_run(whole, backend), *once = state_problem_row(whole, 0), *row = NULL;
	struct apart sum = {0, 0};
	int done = 0;

	for (int c = 0; c < n; c++) {
		struct state_problem *p = cut(whole, done, lens[c], row);
		const char *right = out + done * p->out_stride * element;
		char *got;

		got = state_problem_run(p, part_backend(p, backend));
		if (to_the_bit)
			ck_assert_mem_eq(got, right, (size_t)(lens[c] * p->out_stride * element));
		compare(&sum, right, got, lens[c] * p->out_stride, p->spec.dtype);
		free(got);
		free(row);
		row = state_problem_row(p, 0);
		done += lens[c];
		state_problem_free(p);
	}
	expect(sum.error <= tolerance * tolerance * sum.norm, "%s: out is off by %g", backend->name,
	       sqrt(sum.error / sum.norm));
	if (to_the_bit && buffer_device == KV_DEVICE_CUDA)
		ck_assert_mem_eq(once, row, (size_t)state_problem_row_bytes(whole));
	expect_rows_equal(whole, once, row, tolerance);
	free(out);
	free(once);
	free(row);
}

/* One lane of @n tokens in row 0, of kind @kind. */
static struct state_spec prompt_of(int kind, int n, int dtype)
{
	struct state_spec s = state_spec_default(kind);

	s.heads_k = kind == PROBLEM_CONV ? 256 : 1;
	s.n_rows = 2;
	s.dtype = s.conv_dtype = dtype;
	state_spec_add(&s, n, 0, 0, 0);
	return s;
}

/*
 * The step form and the chunk form: as many calls as there are tokens, and one. Of bf16 by 1e-2, which
 * is what its products lose in chunks; f32 has none, so 1e-4.
 */
START_TEST(a_call_of_many_tokens_equals_as_many_calls_of_one)
{
	struct state_spec s = prompt_of(kinds[_i / 2], 90, _i % 2 ? KV_F32 : KV_BF16);
	int ones[90];
	int n = 0;

	for (int i = 0; i < COUNT(ones); i++)
		ones[i] = 1;
	for (int i = 0; state_problem_backends()[i]; i++) {
		struct state_problem *whole = state_problem_new(&s);

		if (state_problem_can_run(whole, state_problem_backends()[i])) {
			expect_parts_equal(state_problem_backends()[i], whole, ones, COUNT(ones), false,
					   _i % 2 ? 1e-4 : 1e-2);
			n++;
		}
		state_problem_free(whole);
	}
	ck_assert_int_gt(n, 0);
}
END_TEST

/* First, middle and last chunk of a prompt, at multiples of 64 and wherever else. */
START_TEST(a_prompt_in_chunks_equals_one_call)
{
	static const int cuts[][3] = {{128, 64, 40}, {1, 130, 101}, {65, 2, 165}};
	struct state_spec s = prompt_of(kinds[_i % 3], 232, KV_BF16);
	bool whole_chunks = _i / 3 == 0 && kinds[_i % 3] == PROBLEM_DELTA;

	for (int i = 0; state_problem_backends()[i]; i++) {
		struct state_problem *whole = state_problem_new(&s);

		if (state_problem_can_run(whole, state_problem_backends()[i]))
			expect_parts_equal(state_problem_backends()[i], whole, cuts[_i / 3], 3,
					   whole_chunks, whole_chunks ? 1e-6 : 1e-2);
		state_problem_free(whole);
	}
}
END_TEST

/* A token a lane, rows permuted, padding of NaN; the loop's index picks kind, batch, in or out of place. */
START_TEST(a_step_of_any_batch_agrees_with_the_answer)
{
	static const int batches[] = {1, 2, 7, 64, 129, 512};
	int kind = _i % 2 ? PROBLEM_CONV : PROBLEM_SSD, n = batches[_i / 4];
	bool apart = _i / 2 % 2;
	struct state_spec s = state_spec_default(kind);

	s.seed = 200 + _i;
	s.heads_k = kind == PROBLEM_CONV ? 256 : 1;
	s.group = n > 64 ? 1 : 2;
	s.state_dtype = _i % 3 ? KV_F32 : KV_BF16;
	s.n_rows = (apart ? 2 : 1) * n + 1; /* 7919 divides none of them */
	s.nan_inputs = true;
	for (int b = 0; b < n; b++) {
		int read = (int)((b * 7919LL + 5) % s.n_rows), write = (int)(((b + n) * 7919LL + 5) % s.n_rows);
		bool pad = b % 7 == 6;

		state_spec_add(&s, 1, b % 3 ? 17 : 0, pad ? -1 : read, pad ? -1 : apart ? write : read);
	}
	state_spec_check(&s);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("kernels/state_forms");
	TCase *tcase = tcase_create("forms");

	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, a_call_of_many_tokens_equals_as_many_calls_of_one, 0, 2 * COUNT(kinds));
	tcase_add_loop_test(tcase, a_prompt_in_chunks_equals_one_call, 0, 3 * COUNT(kinds));
	tcase_add_loop_test(tcase, a_step_of_any_batch_agrees_with_the_answer, 0, 24);
	suite_add_tcase(suite, tcase);
	return run_on_device(suite);
}
