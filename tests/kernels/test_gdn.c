/* SPDX-License-Identifier: Apache-2.0 */
/* Gated delta net on state rows, of every backend of the device, against the answer in double. */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/error.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/number.h"
#include "tests/kernels/run.h"
#include "tests/kernels/state_problem.h"
#include "tests/support/expect.h"

#define COUNT(a) (int)(sizeof(a) / sizeof((a)[0]))

static const int types[] = {KV_BF16, KV_F32, KV_F16};

/* Rows 0..n-1 in an order of their own. */
static int permuted(int i, int n)
{
	return (int)(((int64_t)i * 7919 + 13) % n);
}

/* Lanes of one token, rows permuted; the loop's index picks batch, types, in or out of place. */
START_TEST(a_decode_step_of_any_batch_agrees_with_the_answer)
{
	static const int batches[] = {1, 2, 3, 5, 8, 33, 64, 200, 512};
	struct state_spec s = state_spec_default(PROBLEM_DELTA);
	int n = batches[_i / 2];
	bool apart = _i % 2;

	s.seed = _i + 1;
	s.state_dtype = _i % 4 < 2 ? KV_F32 : KV_BF16;
	s.dtype = types[_i % 3];
	s.conv_dtype = s.dtype;
	s.heads_k = n > 64 ? 1 : 2;
	s.group = n > 64 ? 1 : 2;
	s.gap = n > 64 ? 0 : 8 * (_i % 3);
	s.n_rows = (apart ? 2 : 1) * n + 1;
	while (s.n_rows % 7919 == 0)
		s.n_rows++;
	for (int b = 0; b < n; b++) {
		int row = permuted(b, s.n_rows);

		state_spec_add(&s, 1, b % 5 == 4 ? 0 : 100 + b, row,
			       apart ? permuted(b + n, s.n_rows) : row);
	}
	state_spec_check(&s);
}
END_TEST

static const struct {
	int heads_k, group, dim_k, dim_v;
} shapes[] = {{16, 2, 128, 128}, {4, 2, 128, 128}, {1, 1, 128, 128}, {2, 4, 128, 128},
	      {1, 8, 128, 128},	 {2, 3, 128, 64},  {2, 2, 64, 64},   {1, 2, 64, 128},
	      {1, 2, 256, 256},	 {2, 1, 128, 32},  {1, 1, 256, 64}};

START_TEST(every_head_shape_agrees_with_the_answer)
{
	struct state_spec s = state_spec_default(PROBLEM_DELTA);

	s.heads_k = shapes[_i].heads_k;
	s.group = shapes[_i].group;
	s.dim_k = shapes[_i].dim_k;
	s.dim_v = shapes[_i].dim_v;
	s.seed = 40 + _i;
	s.n_rows = 5;
	state_spec_add(&s, 1, 5, 3, 3);
	state_spec_add(&s, 3, 0, -1, 1);
	state_spec_add(&s, 1, 9, 0, 4);
	for (int conv = 0; conv < 2; conv++) {
		s.conv_width = conv ? 4 : 0;
		s.state_dtype = conv ? KV_BF16 : KV_F32;
		state_spec_check(&s);
	}
}
END_TEST

/* Ragged lengths around the chunk; first, middle and last chunks of sequences in one batch. */
START_TEST(a_ragged_batch_of_chunks_agrees_with_the_answer)
{
	static const int lens[][6] = {{1, 63, 64, 65, 128, 0},	{200, 1, 2, 17, 130, 64},
				      {3, 3, 3, 3, 3, 3},	{66, 0, 0, 127, 1, 129},
				      {64, 64, 64, 64, 64, 64}, {16, 17, 18, 19, 20, 21}};
	struct state_spec s = state_spec_default(PROBLEM_DELTA);

	s.seed = 60 + _i;
	s.n_rows = 12;
	s.gap = 8 * (_i % 2);
	s.spare_tokens = _i;
	s.conv_width = _i % 3 == 2 ? 0 : 4;
	s.state_dtype = _i % 2 ? KV_BF16 : KV_F32;
	s.activation = _i == 1 ? KV_ACTIVATION_NONE : KV_ACTIVATION_SILU;
	s.tolerance = 8e-3; /* products of bf16 */
	for (int b = 0; b < 6; b++)
		state_spec_add(&s, lens[_i][b], b % 3 == 0 ? 0 : 64 * b + b * (b % 2), 11 - b,
			       _i % 2 ? 11 - b : b);
	state_spec_check(&s);
}
END_TEST

/*
 * So many lanes that states stream: new ones, padding of NaN, of several tokens and (of f16, which
 * has no chunks) one too long for it, with checkpoints or a state a token, with and without a convolution in front.
 */
START_TEST(a_big_batch_of_all_kinds_of_lanes_agrees_with_the_answer)
{
	struct state_spec s = state_spec_default(PROBLEM_DELTA);
	const int n = 60;

	s.seed = 80 + _i;
	s.state_dtype = _i % 2 ? KV_BF16 : KV_F32;
	s.dtype = s.conv_dtype = _i < 3 ? KV_BF16 : KV_F16;
	s.conv_width = _i % 3 == 2 ? 0 : 4;
	s.dim_v = _i == 3 ? 64 : 128;
	s.nan_inputs = true;
	s.gap = 8 * (_i % 2);
	s.n_rows = 4 * n + 1;
	s.null_row = 4 * n;
	s.tolerance = _i < 3 ? 0 : 4e-3;
	if (_i == 1)
		s.interval = 4;
	if (_i == 2)
		s.step_width = 3;
	for (int b = 0; b < n; b++) {
		int len = b == 7 ? (_i < 3 ? 12 : 20) : b % 4 == 3 ? 1 + b % 5 : 1, from = b % 6 == 5 ? 0 : 9 + b % 4;
		bool pad = b % 10 == 8;

		state_spec_add(&s, len, pad ? 5 : from, pad ? s.null_row - (b & 1) * 1000 : 4 * b,
			       pad ? -1 : 4 * b + 1);
		if (_i == 1 && !pad)
			s.table[b][from / 4] = 4 * b + 2;
		for (int i = 0; i < s.step_width && !pad; i++)
			s.steps[b][i] = i == 1 ? -1 : 4 * b + 2 + i / 2;
	}
	state_spec_check(&s);
}
END_TEST

/* D07: padding is NaN, in rows that are null in both ways; nothing but the live rows changes. */
START_TEST(padded_lanes_change_nothing_and_put_out_zero)
{
	struct state_spec s = state_spec_default(PROBLEM_DELTA);

	s.n_rows = 17;
	s.null_row = 16;
	s.nan_inputs = true;
	s.no_write = _i % 2;
	for (int b = 0; b < 5; b++)
		state_spec_add(&s, 1, 20 + b, 3 * b, 3 * b);
	state_spec_add(&s, 1, 0, -1, -1);
	state_spec_add(&s, 1, 7, 16, 16);
	state_spec_add(&s, 1, 7, -1, -1);
	if (_i % 2) /* in place: a new lane needs its row named */
		s.computed[5] = 3;
	state_spec_check(&s);
}
END_TEST

/* D07: 100 steps of 5 lanes in a launch of 8, with 3 more sequences parked in their rows. */
START_TEST(a_hundred_padded_steps_leave_parked_rows_alone)
{
	struct state_spec s = state_spec_default(PROBLEM_DELTA), bare;

	s.heads_k = 1;
	s.n_rows = 16;
	s.nan_inputs = true;
	for (int b = 0; b < 5; b++)
		state_spec_add(&s, 1, 20, 2 * b, 2 * b);
	bare = s;
	for (int b = 5; b < 8; b++)
		state_spec_add(&s, 1, 20, -1, -1);
	for (int i = 0; state_problem_backends()[i]; i++) {
		const struct kv_state_backend *backend = state_problem_backends()[i];
		struct state_problem *p = state_problem_new(&s), *q = state_problem_new(&bare);
		size_t bytes = (size_t)state_problem_row_bytes(p);
		void *parked[3], *now;

		for (int k = 0; k < 3; k++) {
			state_problem_fill(p, 11 + k, 5 + (uint64_t)k);
			parked[k] = state_problem_row(p, 11 + k);
		}
		if (!state_problem_can_run(p, backend) || !state_problem_can_run(q, backend))
			continue;
		for (int step = 0; step < 100; step++) {
			state_problem_inputs(p, step);
			state_problem_inputs(q, step);
			free(state_problem_run(p, backend));
			free(state_problem_run(q, backend));
		}
		for (int k = 0; k < 3; k++) {
			now = state_problem_row(p, 11 + k);
			ck_assert_mem_eq(now, parked[k], bytes);
			free(now);
			free(parked[k]);
		}
		for (int b = 0; b < 5; b++) {
			void *unpadded = state_problem_row(q, 2 * b);

			now = state_problem_row(p, 2 * b);
			ck_assert_mem_eq(now, unpadded, bytes);
			free(now);
			free(unpadded);
		}
		state_problem_free(p);
		state_problem_free(q);
	}
}
END_TEST

/* D06: a used row, all 7.0, is as good as a new one for a first chunk, and goes on from there. */
START_TEST(a_first_chunk_starts_from_zero_even_in_a_used_row)
{
	struct state_spec s = state_spec_default(PROBLEM_DELTA);

	s.n_rows = 3;
	s.tolerance = 8e-3;
	state_spec_add(&s, _i ? 70 : 1, 0, 0, 0);
	for (int i = 0; state_problem_backends()[i]; i++) {
		const struct kv_state_backend *backend = state_problem_backends()[i];
		struct state_problem *p = state_problem_new(&s), *q = state_problem_new(&s);

		state_problem_set(p, 0, 7.0);
		if (state_problem_can_run(p, backend) && state_problem_can_run(q, backend)) {
			size_t bytes = (size_t)state_problem_row_bytes(p);

			for (int chunk = 0; chunk < 2; chunk++) {
				void *used = state_problem_check(p, backend), *used_row;
				void *fresh = state_problem_check(q, backend), *fresh_row;

				ck_assert_mem_eq(used, fresh, (size_t)p->n_tokens * 512 * 2);
				used_row = state_problem_row(p, 0);
				fresh_row = state_problem_row(q, 0);
				ck_assert_mem_eq(used_row, fresh_row, bytes);
				free(used);
				free(fresh);
				free(used_row);
				free(fresh_row);
				/* the second one continues: its check starts from the row */
				p->spec.computed[0] = q->spec.computed[0] = p->n_tokens;
				state_problem_batch(p);
				state_problem_batch(q);
			}
		}
		state_problem_free(p);
		state_problem_free(q);
	}
}
END_TEST

/* Read from one row, run on in another, with what stands at multiples of the interval kept. */
START_TEST(checkpoints_stand_at_block_ends)
{
	struct state_spec s = state_spec_default(PROBLEM_DELTA);
	static const int intervals[] = {64, 128, 96, 16};

	s.interval = intervals[_i];
	s.n_rows = 24;
	s.heads_k = 1;
	s.tolerance = 8e-3;
	state_spec_add(&s, 2 * s.interval + 5, 0, -1, 3);
	s.table[0][0] = 7;
	s.table[0][1] = 2;
	s.table[0][2] = 20;
	state_spec_add(&s, s.interval, s.interval, 12, 4);
	s.table[1][1] = 9;
	state_spec_add(&s, 1, 2 * s.interval - 1, 13, 13);
	s.table[2][1] = 0;
	state_spec_add(&s, s.interval + 1, s.interval / 2, 14, 14); /* keeps none: null */
	state_spec_check(&s);
	s.no_write = true; /* the last state goes where the table says */
	s.table[3][0] = 15;
	s.table[3][1] = 16;
	state_spec_check(&s);
}
END_TEST

/* The flat layout: state and convolution lie in a block behind K and V; and pools of rows alone. */
START_TEST(rows_in_flat_blocks_and_rows_in_pools_of_their_own_give_the_same_bits)
{
	struct state_spec s = state_spec_default(PROBLEM_DELTA);
	const size_t kv = 4096;

	s.n_rows = 6;
	s.state_dtype = _i ? KV_BF16 : KV_F32;
	s.tolerance = 8e-3;
	state_spec_add(&s, 1, 10, 4, 4);
	state_spec_add(&s, _i ? 70 : 3, 0, -1, 2);
	state_spec_add(&s, 2, 64, 1, 5);
	for (int i = 0; state_problem_backends()[i]; i++) {
		const struct kv_state_backend *backend = state_problem_backends()[i];
		struct state_problem *p = state_problem_new(&s);
		size_t row = (size_t)p->row_bytes, conv = (size_t)p->conv_row_bytes;
		size_t block = kv + row + conv, n = (size_t)s.n_rows;
		char *pool = buffer_new(block * n), *flat = malloc(block * n), *out, *right;

		if (!state_problem_can_run(p, backend)) {
			state_problem_free(p);
			buffer_free(pool);
			free(flat);
			continue;
		}
		memset(flat, 0x5a, block * n);
		for (size_t b = 0; b < n; b++) {
			char *content = state_problem_row(p, (int)b);

			memcpy(flat + b * block + kv, content, row + conv);
			free(content);
		}
		buffer_put(pool, flat, block * n);
		right = state_problem_run(p, backend);
		p->gdn.state.base = pool + kv;
		p->gdn.conv.base = pool + kv + row;
		p->gdn.state.block_stride = p->gdn.conv.row_stride = (int64_t)block;
		out = state_problem_run(p, backend);
		ck_assert_mem_eq(out, right, (size_t)(p->n_tokens * p->out_stride * 2));
		buffer_get(flat, pool, block * n);
		for (size_t b = 0; b < n; b++) {
			char *content = state_problem_row(p, (int)b);

			ck_assert_mem_eq(flat + b * block + kv, content, row + conv);
			for (size_t at = 0; at < kv; at++)
				expect(flat[b * block + at] == 0x5a, "block %zu: K and V", b);
			free(content);
		}
		free(out);
		free(right);
		free(flat);
		buffer_free(pool);
		state_problem_free(p);
	}
}
END_TEST

/* Drafts: a state a position, of which the next call goes on from the last accepted one. */
START_TEST(a_verification_is_rolled_back_by_naming_an_earlier_state)
{
	struct state_spec s = state_spec_default(PROBLEM_DELTA);

	s.n_rows = 20;
	s.step_width = 4;
	s.accepts = true;
	s.no_write = true;
	s.state_dtype = _i ? KV_BF16 : KV_F32;
	for (int b = 0; b < 3; b++) {
		state_spec_add(&s, 4 - b, 30, -1, -1);
		for (int i = 0; i < 4; i++)
			s.steps[b][i] = 6 * b + i;
	}
	state_spec_add(&s, 2, 30, -1, -1); /* padding */
	state_spec_check_drafts(&s, 4);
}
END_TEST

/* D29, the kernels' part: what goes on from the checkpoint at 16 is a run of 16, to the bit. */
START_TEST(going_on_from_a_checkpoint_equals_a_run_that_ended_there)
{
	struct state_spec s = state_spec_default(PROBLEM_DELTA), once;
	int64_t column = -1;

	s.heads_k = 1;
	s.n_rows = 6;
	s.interval = 16;
	s.no_write = true;
	state_spec_add(&s, 20, 0, -1, -1);
	s.table[0][0] = 2;
	s.table[0][1] = 4;
	once = s;
	once.q_lens[0] = 16;

	ck_assert_int_eq(kv_state_column(18, 16, COLUMNS, &column), KV_STATE_RUNNING);
	ck_assert_int_eq(column, 1); /* the state of 20 by then: no way back to 18 */
	ck_assert_int_eq(kv_state_column(16, 16, COLUMNS, &column), 0);
	ck_assert_int_eq(column, 0);
	ck_assert_int_eq(kv_state_column(0, 16, COLUMNS, &column), -EINVAL); /* zero state */

	for (int i = 0; state_problem_backends()[i]; i++) {
		const struct kv_state_backend *backend = state_problem_backends()[i];
		struct state_problem *p = state_problem_new(&s), *q = state_problem_new(&once);

		if (state_problem_can_run(p, backend) && state_problem_can_run(q, backend)) {
			char *a, *b;

			free(state_problem_check(p, backend));
			free(state_problem_check(q, backend));
			a = state_problem_row(p, 2);
			b = state_problem_row(q, 2);
			ck_assert_mem_eq(a, b, (size_t)state_problem_row_bytes(p));
			free(a);
			free(b);
		}
		state_problem_free(p);
		state_problem_free(q);
	}
}
END_TEST

/* D27: the table of states counts in its own unit. */
START_TEST(states_are_found_in_their_own_unit)
{
	static const struct {
		int64_t n, interval, column;
		int answer;
	} rows[] = {{100096, 2176, 45, 0},    {100096, 128, -1, -ERANGE},
		    {2176, 2176, 0, 0},	      {2177, 2176, 1, KV_STATE_RUNNING},
		    {4352, 2176, 1, 0},	      {131072, 2176, 60, KV_STATE_RUNNING},
		    {61 * 2176, 2176, 60, 0}, {61 * 2176 + 1, 2176, -1, -ERANGE},
		    {0, 2176, -1, -EINVAL},   {1, 0, -1, -EINVAL}};

	for (int i = 0; i < COUNT(rows); i++) {
		int64_t column = -1;

		ck_assert_int_eq(kv_state_column(rows[i].n, rows[i].interval, 61, &column),
				 rows[i].answer);
		ck_assert_int_eq(column, rows[i].column);
	}
	ck_assert_int_eq(kv_state_column(100096, 128, 61, &(int64_t){0}), -ERANGE);
	ck_assert_msg(strstr(kv_error_text(), "781"), "%s", kv_error_text());
}
END_TEST

/* D27 in the call: a lane goes on from column 45 of its row of the table; 781 is never read. */
START_TEST(a_lane_is_found_by_its_computed_tokens)
{
	struct kv_state_backend const *const *list = state_problem_backends();
	struct state_spec s = state_spec_default(PROBLEM_DELTA);

	s.heads_k = 1;
	s.n_rows = 4;
	s.state_dtype = _i ? KV_BF16 : KV_F32;
	state_spec_add(&s, 1, 100096, 2, 3);
	for (int i = 0; list[i]; i++) {
		struct state_problem *p = state_problem_new(&s);
		struct kv_state_batch *t = &p->gdn.batch;
		int32_t wide[61], *table;
		void *right, *got, *right_row, *got_row;
		size_t bytes = (size_t)state_problem_row_bytes(p);

		if (!state_problem_can_run(p, list[i])) {
			state_problem_free(p);
			continue;
		}
		right = state_problem_check(p, list[i]);
		right_row = state_problem_row(p, 3);
		for (int c = 0; c < 61; c++)
			wide[c] = c == 45 ? 2 : c == 46 ? 3 : 0;
		table = buffer_new(sizeof(wide));
		buffer_put(table, wide, sizeof(wide));
		t->read_rows = t->write_rows = NULL;
		t->table = table;
		t->table_width = 61;
		t->interval = 2176;
		state_problem_set(p, 3, NAN);
		got = state_problem_run(p, list[i]);
		got_row = state_problem_row(p, 3);
		ck_assert_mem_eq(got, right, (size_t)(p->n_tokens * p->out_stride * 2));
		ck_assert_mem_eq(got_row, right_row, bytes);
		free(got);
		free(got_row);

		t->interval = 128; /* column 781 */
		if (buffer_device == KV_DEVICE_HOST) {
			ck_assert_int_eq(state_problem_call(p, list[i], NULL), -EINVAL);
			ck_assert_msg(strstr(kv_error_text(), "781"), "%s", kv_error_text());
		} else { /* padding */
			got = state_problem_run(p, list[i]);
			for (int64_t e = 0; e < p->out_width; e++)
				ck_assert(number_get(got, e, KV_BF16) == 0);
			free(got);
		}
		got_row = state_problem_row(p, 3);
		ck_assert_mem_eq(got_row, right_row, bytes);
		free(right);
		free(got_row);
		free(right_row);
		buffer_free(table);
		state_problem_free(p);
	}
}
END_TEST

/* D02, for rows: 64-bit offsets, with element 2^32 of the pool in the row that is read. */
START_TEST(rows_past_four_billion_elements_are_read_and_written)
{
	struct state_spec s = state_spec_default(PROBLEM_DELTA);
	int64_t far = ((int64_t)1 << 32) / (2 * 128 * 128) + 1; /* row of 2 heads */

	s.heads_k = 1;
	s.n_rows = 2;
	s.conv_width = 0;
	s.state_dtype = KV_BF16;
	state_spec_add(&s, 1, 10, 1, 1);
	for (int i = 0; state_problem_backends()[i]; i++) {
		const struct kv_state_backend *backend = state_problem_backends()[i];
		struct state_problem *p = state_problem_new(&s);
		size_t bytes = (size_t)(p->row_bytes * (far + 1));
		int32_t row = (int32_t)far;
		char *got, *right, *right_row, *row_then;
		char *pool;

		if (buffer_bytes_free() < bytes + bytes / 8 || !state_problem_can_run(p, backend)) {
			state_problem_free(p);
			continue;
		}
		row_then = state_problem_row(p, 1);
		right = state_problem_check(p, backend);
		right_row = state_problem_row(p, 1);
		pool = buffer_new_sparse(bytes);
		buffer_put(pool + p->row_bytes * far, row_then, (size_t)p->row_bytes);
		p->gdn.state.base = pool;
		buffer_put((void *)(uintptr_t)p->gdn.batch.read_rows, &row, sizeof(row));
		buffer_put((void *)(uintptr_t)p->gdn.batch.write_rows, &row, sizeof(row));
		got = state_problem_run(p, backend);
		ck_assert_mem_eq(got, right, (size_t)(p->out_stride * 2));
		buffer_get(row_then, pool + p->row_bytes * far, (size_t)p->row_bytes);
		ck_assert_mem_eq(row_then, right_row, (size_t)p->row_bytes);
		for (int64_t low = 0; low < 2; low++) { /* and nothing at its place mod 2^32 */
			buffer_get(row_then, pool + p->row_bytes * low, (size_t)p->row_bytes);
			for (int64_t e = 0; e < p->row_bytes; e++)
				expect(row_then[e] == 0, "row %lld was written", (long long)low);
		}
		free(got);
		free(right);
		free(right_row);
		free(row_then);
		buffer_free_sparse(pool, bytes);
		state_problem_free(p);
	}
}
END_TEST

/* Several lanes go on from one row: a prefix that was hit. */
START_TEST(lanes_may_share_the_row_they_read)
{
	struct state_spec s = state_spec_default(PROBLEM_DELTA);

	s.n_rows = 6;
	s.tolerance = 8e-3;
	for (int b = 0; b < 4; b++)
		state_spec_add(&s, b == 2 ? 65 : 1 + b, 64, 5, b);
	state_spec_check(&s);
}
END_TEST

/* The same call twice, from the same rows: the same bits. */
START_TEST(a_call_is_repeatable_to_the_bit)
{
	struct state_spec s = state_spec_default(PROBLEM_DELTA);

	s.n_rows = 8;
	s.tolerance = 8e-3;
	for (int b = 0; b < 4; b++)
		state_spec_add(&s, b == 2 ? 150 : 1 + b, 10, b, 4 + b);
	for (int i = 0; state_problem_backends()[i]; i++) {
		const struct kv_state_backend *backend = state_problem_backends()[i];
		struct state_problem *p = state_problem_new(&s);

		if (state_problem_can_run(p, backend)) {
			size_t bytes = (size_t)(p->n_tokens * p->out_stride * 2);
			char *first = state_problem_run(p, backend), *row, *again, *row_again;

			row = state_problem_row(p, 6);
			state_problem_set(p, 6, NAN);
			again = state_problem_run(p, backend);
			row_again = state_problem_row(p, 6);
			ck_assert_mem_eq(first, again, bytes);
			ck_assert_mem_eq(row, row_again, (size_t)state_problem_row_bytes(p));
			free(first);
			free(again);
			free(row);
			free(row_again);
		}
		state_problem_free(p);
	}
}
END_TEST

static void add_tests(TCase *tcase)
{
	tcase_add_loop_test(tcase, a_decode_step_of_any_batch_agrees_with_the_answer, 0, 18);
	tcase_add_loop_test(tcase, every_head_shape_agrees_with_the_answer, 0, COUNT(shapes));
	tcase_add_loop_test(tcase, a_ragged_batch_of_chunks_agrees_with_the_answer, 0, 6);
	tcase_add_loop_test(tcase, a_big_batch_of_all_kinds_of_lanes_agrees_with_the_answer, 0, 5);
	tcase_add_loop_test(
		tcase, rows_in_flat_blocks_and_rows_in_pools_of_their_own_give_the_same_bits, 0, 2);
	tcase_add_loop_test(tcase, padded_lanes_change_nothing_and_put_out_zero, 0, 2);
	tcase_add_test(tcase, a_hundred_padded_steps_leave_parked_rows_alone);
	tcase_add_loop_test(tcase, a_first_chunk_starts_from_zero_even_in_a_used_row, 0, 2);
	tcase_add_loop_test(tcase, checkpoints_stand_at_block_ends, 0, 4);
	tcase_add_loop_test(tcase, a_verification_is_rolled_back_by_naming_an_earlier_state, 0, 2);
	tcase_add_test(tcase, going_on_from_a_checkpoint_equals_a_run_that_ended_there);
	tcase_add_test(tcase, states_are_found_in_their_own_unit);
	tcase_add_loop_test(tcase, a_lane_is_found_by_its_computed_tokens, 0, 2);
	tcase_add_test(tcase, rows_past_four_billion_elements_are_read_and_written);
	tcase_add_test(tcase, lanes_may_share_the_row_they_read);
	tcase_add_test(tcase, a_call_is_repeatable_to_the_bit);
}

int main(void)
{
	Suite *suite = suite_create("kernels/gdn");
	TCase *tcase = tcase_create("gdn");

	add_tests(tcase);
	tcase_set_timeout(tcase, 120);
	suite_add_tcase(suite, tcase);
	return run_on_device(suite);
}
