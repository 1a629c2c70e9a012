/* SPDX-License-Identifier: Apache-2.0 */
/* kv_read() on the device under test: rows of K and V from pools of random codes, element by
 * element. */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/attention.h>

#include "include/internal/error.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/number.h"
#include "tests/kernels/run.h"
#include "tests/support/expect.h"

#define COUNT(a) (int)(sizeof(a) / sizeof((a)[0]))
#define HEADS	 3
#define BLOCKS	 7
#define WIDTH	 3
#define SEQS	 4
#define ROWS	 60 /* of the outputs; the sequences' are 2..56 */

/* Some tokens into the second block; none; before the first; past the table. */
static const int32_t start_loc[SEQS + 1] = {2, 12, 12, 28, 56}, first[SEQS] = {11, 5, -3, 2};
static const int32_t table[SEQS][WIDTH] = {{4, 1, 6}, {0, 0, 0}, {2, 5, 3}, {6, 0, 4}};

enum scales { ONE, BY_HEAD, BY_ROW };

static int64_t offset_of(const struct kv_view *view, int64_t block, int64_t token, int64_t head)
{
	return block * view->block_stride + token * view->token_stride + head * view->head_stride;
}

static struct kv_view view_of(int dtype, int size, int dim, int gap, bool head_major, float scale)
{
	int64_t row = (int64_t)(dim + gap) * (int64_t)kv_dtype_bytes(dtype);

	return (struct kv_view){.block_stride = row * HEADS * size,
				.token_stride = head_major ? row : row * HEADS,
				.head_stride = head_major ? row * size : row,
				.block_tokens = size,
				.n_heads = HEADS,
				.head_dim = dim,
				.dtype = dtype,
				.scale = kv_dtype_bytes(dtype) == 1 ? scale : 1};
}

static void *upload(const void *from, size_t bytes)
{
	void *p = buffer_new(bytes);

	buffer_put(p, from, bytes);
	return p;
}

/* A pool of codes; every number there is, NaN included. */
static char *random_pool(const struct kv_view *view, int which)
{
	size_t bytes = (size_t)(view->block_stride * BLOCKS), element = kv_dtype_bytes(view->dtype);
	char *pool = malloc(bytes);

	for (size_t i = 0; i < bytes / element; i++) {
		double x = 5 * number_random((uint64_t)which, i, 0, 0);

		number_set(pool, (int64_t)i, view->dtype,
			   number_encode(view->dtype, i % 17 == 3   ? NAN
						      : i % 19 == 5 ? -0.0
								    : x));
	}
	return pool;
}

struct side {
	struct kv_view view, row_scales;
	char *pool;	   /* on the host */
	float *row_values; /* on the host */
	float head_values[HEADS];
	enum scales scales;
};

static void check_rows(const struct side *s, const char *name, const char *got, int dtype,
		       int64_t stride)
{
	size_t element = kv_dtype_bytes(dtype);
	bool written[ROWS] = {false};

	for (int b = 0; b < SEQS; b++) {
		for (int i = start_loc[b]; i < start_loc[b + 1]; i++) {
			int64_t j = first[b] + i - start_loc[b], column = j / s->view.block_tokens;
			int64_t token = j % s->view.block_tokens, block;

			if (j < 0 || column >= WIDTH)
				continue;
			written[i] = true;
			block = table[b][column];
			for (int e = 0; e < HEADS * s->view.head_dim; e++) {
				int h = e / s->view.head_dim;
				const char *row = s->pool + offset_of(&s->view, block, token, h);
				uint32_t code =
					number_code(row, e % s->view.head_dim, s->view.dtype);
				uint32_t have = number_code(got, i * stride + e, dtype);
				float scale = s->view.scale;

				if (s->scales == BY_HEAD)
					scale = s->head_values[h];
				if (s->scales == BY_ROW)
					scale = s->row_values[offset_of(&s->row_scales, block,
									token, h) /
							      4];
				if (s->view.dtype != dtype) {
					float x = (float)number_decode(s->view.dtype, code) * scale;

					code = number_encode(dtype, (double)x);
				}
				expect(code == have || (isnan(number_decode(dtype, code)) &&
							isnan(number_decode(dtype, have))),
				       "%s: row %d element %d is 0x%x, right is 0x%x", name, i, e,
				       have, code);
			}
		}
	}
	for (int64_t i = 0; i < ROWS; i++) { /* other rows, and gaps */
		int64_t from = written[i] ? HEADS * s->view.head_dim : 0;

		for (int64_t at = (i * stride + from) * (int64_t)element;
		     at < (i + 1) * stride * (int64_t)element; at++)
			expect(got[at] == 0x5a, "%s: row %lld was touched", name, (long long)i);
	}
}

static struct side side_new(int which, int dtype, int size, int dim, int gap, bool head_major,
			    enum scales scales)
{
	struct side s = {.view = view_of(dtype, size, dim, gap, head_major, 0.3f),
			 .scales = kv_dtype_bytes(dtype) == 1 ? scales : ONE,
			 .head_values = {0.25f, 3, 0.7f}};

	s.pool = random_pool(&s.view, which);
	s.view.base = upload(s.pool, (size_t)(s.view.block_stride * BLOCKS));
	if (s.scales != BY_ROW)
		return s;
	s.row_scales = view_of(KV_F32, size, 1, 0, head_major, 1);
	s.row_values = malloc((size_t)(s.row_scales.block_stride * BLOCKS));
	for (int i = 0; i < HEADS * size * BLOCKS; i++)
		s.row_values[i] = 0.01f * (float)(1 + i % 50);
	s.row_scales.base = upload(s.row_values, (size_t)(s.row_scales.block_stride * BLOCKS));
	return s;
}

static void side_free(struct side *s)
{
	buffer_free(s->view.base);
	buffer_free(s->row_scales.base);
	free(s->row_values);
	free(s->pool);
}

START_TEST(rows_come_back_as_they_lie_in_their_blocks)
{
	static const int types[] = {KV_F32, KV_F16, KV_BF16, KV_F8_E4M3, KV_F8_E5M2};
	int dtype = KV_F32 + _i % 3, size = _i % 2 ? 8 : 7, gap = _i % 4, pad = _i % 3 ? 5 : 0;
	enum scales scales = (enum scales)(_i / 5 % 3);
	int both = scales == BY_ROW ? KV_F8_E4M3 : types[_i / 3 % 5];
	struct side k = side_new(1, both, size, 40, gap, _i & 1, scales);
	struct side v = side_new(2, scales == BY_ROW ? KV_F8_E5M2 : types[_i % 5], size, 24, gap,
				 _i & 2, scales);
	const struct side *sides[] = {&k, &v};
	struct kv_read_args a = {.size = sizeof(a),
				 .device = buffer_device,
				 .dtype = dtype,
				 .n_seqs = SEQS,
				 .n_tokens = ROWS,
				 .key_stride = pad ? HEADS * 40 + pad : 0,
				 .value_stride = pad ? HEADS * 24 + pad : 0,
				 .start_loc = upload(start_loc, sizeof(start_loc)),
				 .first = upload(first, sizeof(first)),
				 .block_table = upload(table, sizeof(table)),
				 .table_width = WIDTH,
				 .k = k.view,
				 .v = v.view,
				 .k_row_scales = k.row_scales,
				 .v_row_scales = v.row_scales};
	void *out[2];

	for (int i = 0; i < 2; i++) {
		size_t bytes = (size_t)(ROWS * (HEADS * sides[i]->view.head_dim + pad)) *
			       kv_dtype_bytes(dtype);

		out[i] = buffer_new(bytes);
		buffer_fill(out[i], 0x5a, bytes);
		if (sides[i]->scales == BY_HEAD)
			*(i ? &a.v_scales : &a.k_scales) =
				upload(sides[i]->head_values, sizeof(sides[i]->head_values));
	}
	a.key = out[0];
	a.value = _i % 7 == 6 ? NULL : out[1]; /* K alone, too */
	ck_assert_msg(kv_read(&a) == 0, "%s", kv_error_text());
	for (int i = 0; i < 2; i++) {
		int64_t stride = HEADS * sides[i]->view.head_dim + pad;
		size_t bytes = (size_t)(ROWS * stride) * kv_dtype_bytes(dtype);
		char *got = malloc(bytes);

		buffer_get(got, out[i], bytes);
		if (i == 0 || a.value)
			check_rows(sides[i], i ? "value" : "key", got, dtype, stride);
		free(got);
		buffer_free(out[i]);
	}
	buffer_free((void *)(uintptr_t)a.start_loc);
	buffer_free((void *)(uintptr_t)a.first);
	buffer_free((void *)(uintptr_t)a.block_table);
	buffer_free((void *)(uintptr_t)a.k_scales);
	buffer_free((void *)(uintptr_t)a.v_scales);
	side_free(&k);
	side_free(&v);
}
END_TEST

static float pool[64], rows[64];
static const int32_t starts[] = {0, 2}, falls[] = {2, 0}, ids[] = {0}, no_ids[] = {-1};

START_TEST(a_wrong_field_is_named)
{
	static const char *const fields[] = {"size",
					     "device",
					     "dtype",
					     "n_seqs",
					     "n_tokens",
					     "table_width",
					     "key_stride",
					     "value_stride",
					     "key, value",
					     "start_loc:",
					     "block_table:",
					     "start_loc[1]",
					     "block_table[0][0]",
					     "k.base"};
	struct kv_view view = {pool, 256, 32, 32, 8, 1, 8, KV_F32, 1, 0};
	struct kv_read_args a = {.size = sizeof(a) - (_i == 0),
				 .device = _i == 1 ? 9 : KV_DEVICE_HOST,
				 .dtype = _i == 2 ? KV_F8_E4M3 : KV_F32,
				 .n_seqs = _i == 3 ? -1 : 1,
				 .n_tokens = _i == 4 ? -1 : 2,
				 .table_width = _i == 5 ? -1 : 1,
				 .key_stride = _i == 6 ? 7 : 0,
				 .value_stride = _i == 7 ? 7 : 0,
				 .key = _i == 8 ? NULL : rows,
				 .start_loc = _i == 9	 ? NULL
					      : _i == 11 ? falls
							 : starts,
				 .block_table = _i == 10   ? NULL
						: _i == 12 ? no_ids
							   : ids,
				 .k = view,
				 .v = view};

	if (_i == 13)
		a.k.base = NULL;
	ck_assert_int_eq(kv_read(&a), -EINVAL);
	ck_assert_msg(strstr(kv_error_text(), fields[_i]), "\"%s\" has no %s", kv_error_text(),
		      fields[_i]);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("kernels/read");
	TCase *tcase = tcase_create("read");

	suite_add_tcase(suite, tcase);
	tcase_add_loop_test(tcase, rows_come_back_as_they_lie_in_their_blocks, 0, 60);
	tcase_add_loop_test(tcase, a_wrong_field_is_named, 0, 14);
	return run_on_device(suite);
}
