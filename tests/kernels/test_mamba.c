/* SPDX-License-Identifier: Apache-2.0 */
/* Mamba-2 on state rows, of every backend of the device, against the answer in double. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/error.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/run.h"
#include "tests/kernels/state_problem.h"

#define COUNT(a) (int)(sizeof(a) / sizeof((a)[0]))

static const int types[] = {KV_BF16, KV_F32, KV_F16};

static const struct {
	int groups, heads, head_dim, state_dim;
} shapes[] = {{1, 8, 64, 128}, {2, 16, 64, 128}, {8, 8, 64, 64},
	      {1, 3, 32, 128}, {1, 20, 64, 128}, {1, 2, 128, 256}};

START_TEST(a_step_of_every_shape_agrees_with_the_answer)
{
	struct state_spec s = state_spec_default(PROBLEM_SSD);

	s.seed = _i + 1;
	s.heads_k = shapes[_i % COUNT(shapes)].groups;
	s.group = shapes[_i % COUNT(shapes)].heads / s.heads_k;
	s.dim_v = shapes[_i % COUNT(shapes)].head_dim;
	s.dim_k = shapes[_i % COUNT(shapes)].state_dim;
	s.dtype = types[_i % 3];
	s.state_dtype = _i % 2 ? KV_BF16 : KV_F32;
	s.gap = 8 * (_i % 4);
	s.n_rows = 9;
	s.nan_inputs = true;
	state_spec_add(&s, 1, 3, 2, 2);
	state_spec_add(&s, 1, 0, 4, 4);
	state_spec_add(&s, 1, 9, -1, -1);
	state_spec_add(&s, 3, 9, 5, 0);
	state_spec_check(&s);
}
END_TEST

START_TEST(a_ragged_batch_of_chunks_agrees_with_the_answer)
{
	static const int lens[][5] = {
		{1, 63, 64, 65, 128}, {200, 1, 2, 17, 130}, {66, 0, 0, 127, 1}};
	struct state_spec s = state_spec_default(PROBLEM_SSD);

	s.seed = 30 + _i;
	s.group = 4;
	s.n_rows = 16;
	s.state_dtype = _i % 2 ? KV_BF16 : KV_F32;
	s.interval = _i == 1 ? 64 : 0;
	s.tolerance = 8e-3; /* products of bf16 */
	for (int b = 0; b < 5; b++) {
		state_spec_add(&s, lens[_i][b], b % 3 == 0 ? 0 : 32 * b, 9 - b, _i % 2 ? 9 - b : b);
		s.table[b][0] = 10 + b;
	}
	state_spec_check(&s);
}
END_TEST

START_TEST(drafts_are_rolled_back_by_naming_an_earlier_state)
{
	struct state_spec s = state_spec_default(PROBLEM_SSD);

	s.n_rows = 8;
	s.step_width = 4;
	s.accepts = s.no_write = true;
	for (int b = 0; b < 2; b++) {
		state_spec_add(&s, 4, 30, -1, -1);
		for (int i = 0; i < 4; i++)
			s.steps[b][i] = 4 * b + i;
	}
	state_spec_check_drafts(&s, 4);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("kernels/mamba");
	TCase *tcase = tcase_create("mamba");

	tcase_add_loop_test(tcase, a_step_of_every_shape_agrees_with_the_answer, 0,
			    2 * COUNT(shapes));
	tcase_add_loop_test(tcase, a_ragged_batch_of_chunks_agrees_with_the_answer, 0, 3);
	tcase_add_test(tcase, drafts_are_rolled_back_by_naming_an_earlier_state);
	tcase_set_timeout(tcase, 120);
	suite_add_tcase(suite, tcase);
	return run_on_device(suite);
}
