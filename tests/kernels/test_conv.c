/* SPDX-License-Identifier: Apache-2.0 */
/* Causal convolution on state rows, of every backend of the device, against the answer in double.
 */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/error.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/run.h"
#include "tests/kernels/state_problem.h"

static const int types[] = {KV_BF16, KV_F32, KV_F16};

/* Every width, type and order of the rows; lanes shorter and longer than the history. */
START_TEST(every_width_and_type_agrees_with_the_answer)
{
	struct state_spec s = state_spec_default(PROBLEM_CONV);

	s.seed = _i + 1;
	s.conv_width = 2 + _i % 7;
	s.dtype = types[_i % 3];
	s.conv_dtype = types[_i % 4 == 3 ? 1 : _i % 3];
	s.channel_major = _i % 2;
	s.activation = _i % 5 ? KV_ACTIVATION_SILU : KV_ACTIVATION_NONE;
	s.heads_k = _i % 4 == 0 ? 1000 : _i % 4 == 1 ? 37 : 256; /* channels */
	s.gap = _i % 6 < 3 ? 0 : 8 * (_i % 3);
	s.spare_tokens = _i % 3;
	s.n_rows = 20;
	state_spec_add(&s, 1, 0, 3, 3);
	state_spec_add(&s, 1, 5, 1, 1);
	state_spec_add(&s, 2, 9, 2, 12);
	state_spec_add(&s, 0, 9, 16, 16);
	state_spec_add(&s, 3, 0, -1, 13);
	state_spec_add(&s, 70, 128, 4, 4);
	state_spec_add(&s, 129, 0, 5, 5);
	state_spec_add(&s, 4, 64, 6, 14);
	state_spec_add(&s, 1, 64, -1, -1);
	state_spec_check(&s);
}
END_TEST

/* Lanes that begin a token or two before the end of whatever tile a backend takes. */
START_TEST(history_is_right_wherever_a_lane_begins)
{
	struct state_spec s = state_spec_default(PROBLEM_CONV);

	s.n_rows = 40;
	for (int b = 0; b < 18; b++)
		state_spec_add(&s, 1 + (b * 5 + _i) % 19 + (b == 3 ? 200 : 0), b % 2 ? 30 : 0, b,
			       b);
	state_spec_check(&s);
}
END_TEST

START_TEST(checkpoints_and_steps_are_the_last_inputs_there)
{
	struct state_spec s = state_spec_default(PROBLEM_CONV);

	s.n_rows = 24;
	s.interval = _i ? 64 : 6;
	s.channel_major = _i;
	s.step_width = 3;
	for (int b = 0; b < 3; b++) {
		state_spec_add(&s, b ? b : 2 * s.interval + 2, b ? s.interval - 1 : 0, b, 3 + b);
		for (int c = 0; c < 3; c++)
			s.steps[b][c] = 6 + 3 * b + c;
		s.table[b][0] = 15 + 2 * b;
		s.table[b][1] = 16 + 2 * b;
	}
	state_spec_check(&s);
}
END_TEST

START_TEST(drafts_are_rolled_back_by_naming_an_earlier_state)
{
	struct state_spec s = state_spec_default(PROBLEM_CONV);

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
	Suite *suite = suite_create("kernels/conv");
	TCase *tcase = tcase_create("conv");

	tcase_add_loop_test(tcase, every_width_and_type_agrees_with_the_answer, 0, 24);
	tcase_add_loop_test(tcase, history_is_right_wherever_a_lane_begins, 0, 8);
	tcase_add_loop_test(tcase, checkpoints_and_steps_are_the_last_inputs_there, 0, 2);
	tcase_add_test(tcase, drafts_are_rolled_back_by_naming_an_earlier_state);
	tcase_set_timeout(tcase, 120);
	suite_add_tcase(suite, tcase);
	return run_on_device(suite);
}
