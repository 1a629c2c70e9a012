/* SPDX-License-Identifier: Apache-2.0 */
/* Calls on state rows with arguments that are wrong: each is refused, and the text names the field.
 */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/error.h"
#include "kernels/gdn.h"

#define T   6
#define HK  2
#define HV  4
#define DIM 8
#define C   (2 * HK * DIM + HV * DIM)

static float x[T * C], gates[T * HV], out[T * HV * DIM], rows[6 * HV * DIM * DIM];
static float conv_rows[6 * 3 * C], weight[C * 4], a_log[HV], conv_out[T * C];
static int32_t loc[3], computed[2], reads[2], writes[2], accepted[2], table[2 * 3], steps[2 * 2];

static void good_arrays(void)
{
	static const int32_t good_loc[] = {0, 2, 6}, good_steps[] = {2, 3, 4, 5};

	memcpy(loc, good_loc, sizeof(loc));
	memcpy(steps, good_steps, sizeof(steps));
	computed[0] = 4;
	computed[1] = 0;
	reads[0] = 0;
	reads[1] = 1;
	writes[0] = 0;
	writes[1] = 1;
	accepted[0] = accepted[1] = 1;
	for (int i = 0; i < 6; i++)
		table[i] = -1;
}

static struct kv_gdn_args good_gdn(void)
{
	good_arrays();
	return (struct kv_gdn_args){
		.size = sizeof(struct kv_gdn_args),
		.device = KV_DEVICE_HOST,
		.dtype = KV_F32,
		.batch = {.n_seqs = 2,
			  .n_tokens = T,
			  .max_query_len = 4,
			  .null_row = -1,
			  .query_start_loc = loc,
			  .n_computed = computed,
			  .read_rows = reads,
			  .write_rows = writes},
		.n_heads_k = HK,
		.n_heads_v = HV,
		.dim_k = DIM,
		.dim_v = DIM,
		.q = x,
		.a = gates,
		.b = gates,
		.a_log = a_log,
		.normalize = 1,
		.out = out,
		.state = {.base = rows,
			  .block_stride = sizeof(float) * HV * DIM * DIM,
			  .head_stride = sizeof(float) * DIM * DIM,
			  .block_tokens = 1,
			  .n_heads = HV,
			  .head_dim = DIM * DIM,
			  .dtype = KV_F32,
			  .scale = 1},
		.conv_weight = weight,
		.conv_width = 4,
		.conv = {.base = conv_rows,
			 .row_stride = sizeof(float) * 3 * C,
			 .tap_stride = sizeof(float) * C,
			 .channel_stride = sizeof(float),
			 .dtype = KV_F32},
	};
}

/* In a list of these: the @i-th runs its statement and returns what the text must hold. */
#define BREAK(word, statement) \
	if (i-- == 0) {        \
		statement;     \
		return word;   \
	}

static const char *break_gdn(int i, struct kv_gdn_args *a)
{
	BREAK("kv_gdn_args.size", a->size--)
	BREAK("device", a->device = 7)
	BREAK("dtype", a->dtype = KV_F8_E4M3)
	BREAK("n_seqs", a->batch.n_seqs = -1)
	BREAK("n_tokens", a->batch.n_tokens = -1)
	BREAK("max_query_len", a->batch.max_query_len = -1)
	BREAK("null_row", a->batch.null_row = -2)
	BREAK("n_heads_k", a->n_heads_k = 0)
	BREAK("n_heads_v", a->n_heads_v = 5)
	BREAK("dim_k", a->dim_k = 257)
	BREAK("dim_v", a->dim_v = 0)
	BREAK("q_stride", a->q_stride = C - 1)
	BREAK("a_stride", a->a_stride = 1)
	BREAK("out_stride", a->out_stride = 3)
	BREAK("normalize", a->normalize = 2)
	BREAK("scale", a->scale = NAN)
	BREAK("q: NULL", a->q = NULL)
	BREAK("a: NULL", a->a = NULL)
	BREAK("b: NULL", a->b = NULL)
	BREAK("a_log", a->a_log = NULL)
	BREAK("out: NULL", a->out = NULL)
	BREAK("out: the same memory as q", a->out = x)
	BREAK("state.dtype", a->state.dtype = KV_F16)
	BREAK("state.n_heads", a->state.n_heads = 3)
	BREAK("state.head_dim", a->state.head_dim = DIM)
	BREAK("state.head_stride", a->state.head_stride -= 4)
	BREAK("state.block_stride", a->state.block_stride -= 4)
	BREAK("state.base", a->state.base = NULL)
	BREAK("width", a->conv_width = 9)
	BREAK("activation", a->conv_activation = 2)
	BREAK("conv state.dtype", a->conv.dtype = KV_BYTES)
	BREAK("conv state.row_stride", a->conv.row_stride -= 4)
	BREAK("conv state.tap_stride", a->conv.tap_stride = 2)
	BREAK("conv state.base", a->conv.base = NULL)
	BREAK("query_start_loc: NULL", a->batch.query_start_loc = NULL)
	BREAK("query_start_loc[1]", loc[1] = 5)
	BREAK("query_start_loc[2]", loc[2] = 1)
	BREAK("query_start_loc[2]", loc[2] = 7)
	BREAK("n_computed[0]", computed[0] = -1)
	BREAK("read_rows", a->batch.read_rows = a->batch.write_rows = NULL)
	BREAK("row 1, which lane 0 reads", reads[0] = 1)
	BREAK("row 1, which lane 1 writes", writes[0] = 1)
	BREAK("step_width", a->batch.step_width = 2)
	BREAK("step_width", a->batch.step_rows = steps)
	BREAK("n_accepted", a->batch.n_accepted = accepted)
	BREAK("interval", a->batch.table = table)
	BREAK("workspace", a->workspace_bytes = 1)
	return NULL;
}

START_TEST(a_wrong_field_of_gdn_is_refused_by_name)
{
	struct kv_gdn_args a = good_gdn();
	int n = 0;

	ck_assert_msg(kv_gdn(&a) == 0, "%s", kv_error_text());
	for (;; n++) {
		const char *word;

		a = good_gdn();
		word = break_gdn(n, &a);
		if (!word)
			break;
		ck_assert_msg(kv_gdn(&a) == -EINVAL, "case %d, %s", n, word);
		ck_assert_msg(strstr(kv_error_text(), word) != NULL, "%s: %s", word,
			      kv_error_text());
	}
	ck_assert_int_gt(n, 40);
}
END_TEST

START_TEST(what_a_table_cannot_hold_is_refused)
{
	struct kv_gdn_args a = good_gdn();

	a.batch.table = table;
	a.batch.table_width = 3;
	a.batch.interval = 2;
	a.batch.read_rows = a.batch.write_rows = NULL;
	table[1] = 0;
	table[2] = 2;
	table[3 + 1] = 3;
	ck_assert_msg(kv_gdn(&a) == 0, "%s", kv_error_text());
	computed[0] = 7;
	ck_assert_int_eq(kv_gdn(&a), -EINVAL);
	ck_assert_msg(strstr(kv_error_text(), "column 3"), "%s", kv_error_text());
	computed[0] = 6; /* its first state is in the table, its last is not */
	ck_assert_int_eq(kv_gdn(&a), -EINVAL);
	ck_assert_msg(strstr(kv_error_text(), "column 3"), "%s", kv_error_text());
	computed[0] = 4;
	a.batch.n_computed = NULL;
	ck_assert_int_eq(kv_gdn(&a), -EINVAL);
	a.batch.n_computed = computed;
	table[3 + 0] = 2; /* a checkpoint of lane 1 where lane 0 ends */
	ck_assert_int_eq(kv_gdn(&a), -EINVAL);
	ck_assert_msg(strstr(kv_error_text(), "row 2"), "%s", kv_error_text());
}
END_TEST

START_TEST(counts_outside_the_steps_are_refused)
{
	struct kv_gdn_args a = good_gdn();

	a.batch.step_rows = steps;
	a.batch.step_width = 2;
	a.batch.n_accepted = accepted;
	a.batch.read_rows = a.batch.write_rows = NULL;
	ck_assert_msg(kv_gdn(&a) == 0, "%s", kv_error_text());
	for (int n = 0; n < 4; n += 3) {
		accepted[0] = n;
		ck_assert_int_eq(kv_gdn(&a), -EINVAL);
		ck_assert_msg(strstr(kv_error_text(), "n_accepted[0]"), "%s", kv_error_text());
	}
}
END_TEST

static struct kv_ssd_args good_ssd(void)
{
	struct kv_gdn_args g = good_gdn();

	return (struct kv_ssd_args){.size = sizeof(struct kv_ssd_args),
				    .device = KV_DEVICE_HOST,
				    .dtype = KV_F32,
				    .batch = g.batch,
				    .n_groups = HK,
				    .n_heads = HV,
				    .head_dim = DIM,
				    .state_dim = DIM,
				    .x = x,
				    .b = x,
				    .c = x,
				    .dt = gates,
				    .a_log = a_log,
				    .out = out,
				    .state = g.state};
}

static const char *break_ssd(int i, struct kv_ssd_args *a)
{
	BREAK("kv_ssd_args.size", a->size = 0)
	BREAK("n_groups", a->n_groups = 0)
	BREAK("n_heads", a->n_heads = 3)
	BREAK("head_dim", a->head_dim = 300)
	BREAK("state_dim", a->state_dim = -1)
	BREAK("x_stride", a->x_stride = 1)
	BREAK("dt_stride", a->dt_stride = 1)
	BREAK("dt_min", a->dt_min = -1)
	BREAK("dt_max", a->dt_max = NAN)
	BREAK("x: NULL", a->x = NULL)
	BREAK("c: NULL", a->c = NULL)
	BREAK("dt: NULL", a->dt = NULL)
	return NULL;
}

START_TEST(a_wrong_field_of_ssd_is_refused_by_name)
{
	struct kv_ssd_args a = good_ssd();

	ck_assert_msg(kv_ssd(&a) == 0, "%s", kv_error_text());
	for (int n = 0;; n++) {
		const char *word;

		a = good_ssd();
		word = break_ssd(n, &a);
		if (!word)
			break;
		ck_assert_msg(kv_ssd(&a) == -EINVAL, "case %d, %s", n, word);
		ck_assert_msg(strstr(kv_error_text(), word) != NULL, "%s: %s", word,
			      kv_error_text());
	}
}
END_TEST

static const char *break_conv(int i, struct kv_conv1d_args *a)
{
	BREAK("kv_conv1d_args.size", a->size = 0)
	BREAK("n_channels", a->n_channels = 0)
	BREAK("width", a->width = 1)
	BREAK("x_stride", a->x_stride = 1)
	BREAK("x: NULL", a->x = NULL)
	BREAK("weight", a->weight = NULL)
	BREAK("out: the same memory as x", a->out = x)
	BREAK("channel_stride", a->state.channel_stride = 0)
	return NULL;
}

START_TEST(a_wrong_field_of_a_convolution_is_refused_by_name)
{
	struct kv_conv1d_args a;

	for (int n = 0;; n++) {
		struct kv_gdn_args g = good_gdn();
		const char *word;

		a = (struct kv_conv1d_args){.size = sizeof(a),
					    .device = KV_DEVICE_HOST,
					    .dtype = KV_F32,
					    .batch = g.batch,
					    .n_channels = C,
					    .width = 4,
					    .x = x,
					    .weight = weight,
					    .out = conv_out,
					    .state = g.conv};
		ck_assert_msg(kv_conv1d(&a) == 0, "%s", kv_error_text());
		word = break_conv(n, &a);
		if (!word)
			break;
		ck_assert_msg(kv_conv1d(&a) == -EINVAL, "case %d, %s", n, word);
		ck_assert_msg(strstr(kv_error_text(), word) != NULL, "%s: %s", word,
			      kv_error_text());
	}
}
END_TEST

static void expect_words(const char *text, const char *const *words)
{
	for (; *words; words++)
		ck_assert_msg(strstr(text, *words) != NULL, "%s: not in: %s", *words, text);
}

START_TEST(a_refusal_has_every_wrong_field)
{
	static const char *const gdn[] = {"dtype: ",   "n_heads_v", "dim_k",   "normalize", "a_stride",
					  "null_row",  "interval",  "a: NULL", "b: NULL",   "a_log",
					  "state.base", "width",     "conv state.base", NULL};
	static const char *const ssd[] = {"n_heads", "c: NULL", "dt: NULL", "dt_min", "x_stride", NULL};
	static const char *const conv[] = {"n_channels", "width", "activation", "x: NULL",
					   "weight: NULL", NULL};
	struct kv_gdn_args a = good_gdn();
	struct kv_ssd_args b = {.size = sizeof(b),
				.dtype = KV_F32,
				.batch = a.batch,
				.n_groups = 2,
				.n_heads = 3,
				.head_dim = DIM,
				.state_dim = DIM,
				.x_stride = 1,
				.x = x,
				.b = x,
				.a_log = a_log,
				.dt_min = 2,
				.dt_max = 1,
				.out = out,
				.state = a.state};
	struct kv_conv1d_args c = {.size = sizeof(c),
				   .dtype = KV_F32,
				   .batch = a.batch,
				   .width = 1,
				   .activation = 9,
				   .out = conv_out,
				   .state = a.conv};
	uint64_t reasons = 7;
	char text[2048];

	a.dtype = KV_F8_E4M3;
	a.n_heads_v = 5;
	a.dim_k = 0;
	a.normalize = 3;
	a.a_stride = 1;
	a.batch.null_row = -2;
	a.batch.table = table;
	a.a = a.b = NULL;
	a.a_log = NULL;
	a.state.base = NULL;
	a.conv_width = 1;
	a.conv.base = NULL;
	ck_assert_int_eq(kv_gdn_validate("ref", &a, &reasons, text, sizeof(text)), -EINVAL);
	ck_assert_uint_eq(reasons, 0);
	expect_words(text, gdn);
	ck_assert_int_eq(kv_gdn(&a), -EINVAL);
	ck_assert_str_eq(kv_error_text(), text);
	ck_assert_int_eq(kv_ssd_validate("ref", &b, NULL, text, sizeof(text)), -EINVAL);
	expect_words(text, ssd);
	ck_assert_int_eq(kv_conv1d_validate("ref", &c, NULL, text, sizeof(text)), -EINVAL);
	expect_words(text, conv);

	a = good_gdn();
	ck_assert_int_eq(kv_gdn_validate("ref", &a, &reasons, text, sizeof(text)), 0);
	ck_assert_str_eq(text, "");
	ck_assert_int_eq(kv_gdn_validate("none", &a, &reasons, text, 12), -ENOENT);
	ck_assert_uint_eq(strlen(text), 11);
	ck_assert_int_eq(kv_gdn_validate("none", &a, NULL, NULL, 0), -ENOENT);
	computed[0] = -1; /* rows and lengths are looked at on the host */
	ck_assert_int_eq(kv_gdn_validate("ref", &a, NULL, text, sizeof(text)), -EINVAL);
	ck_assert_ptr_nonnull(strstr(text, "n_computed[0]"));
}
END_TEST

START_TEST(a_backend_tells_every_reason_against_a_problem)
{
	static const uint64_t steps_bits = KV_STATE_REASON_DIM_K | KV_STATE_REASON_DIM_V |
					   KV_STATE_REASON_ALIGNMENT | KV_STATE_REASON_CONV_WIDTH |
					   KV_STATE_REASON_CONV_DTYPE | KV_STATE_REASON_CONV_WEIGHT;
	static const uint64_t chunk_bits = KV_STATE_REASON_DTYPE | KV_STATE_REASON_SHORT |
					   KV_STATE_REASON_STEPS | KV_STATE_REASON_WORKSPACE;
	static const char *const words[] = {"dtype: 1",	     "dim_k",	  "dim_v",	"max_query_len",
					    "step_rows",     "workspace_bytes", "state: base",
					    "conv_width: 3", "conv_weight", "conv state.dtype", NULL};
	struct kv_gdn_args a = good_gdn();
	uint64_t reasons = 0;
	char text[2048];

	a.device = KV_DEVICE_CUDA;
	a.dtype = KV_F16;
	a.batch.step_rows = steps;
	a.batch.step_width = 2;
	a.state.base = (char *)rows + 8;
	a.conv_width = 3;
	a.conv_weight = (char *)weight + 4;
	if (!kv_state_backend_names(KV_DEVICE_CUDA)[0]) {
		ck_assert_int_eq(kv_gdn_validate("chunk", &a, NULL, text, sizeof(text)), -ENOENT);
		return;
	}
	ck_assert_int_eq(kv_gdn_validate("chunk", &a, &reasons, text, sizeof(text)), -ENOTSUP);
	ck_assert_msg((reasons & ~(uint64_t)KV_STATE_REASON_CAPABILITY) == (steps_bits | chunk_bits),
		      "%llx: %s", (unsigned long long)reasons, text);
	expect_words(text, words);
	ck_assert_int_eq(kv_gdn_validate("cuda", &a, &reasons, text, sizeof(text)), -ENOTSUP);
	ck_assert_uint_eq(reasons & ~(uint64_t)KV_STATE_REASON_CAPABILITY, steps_bits);
	ck_assert_ptr_null(strstr(text, "workspace"));
}
END_TEST

START_TEST(nothing_to_do_is_done)
{
	struct kv_gdn_args a = good_gdn();

	a.batch.n_seqs = a.batch.n_tokens = a.batch.max_query_len = 0;
	a.batch.query_start_loc = NULL;
	a.q = a.out = NULL;
	ck_assert_msg(kv_gdn(&a) == 0, "%s", kv_error_text());
}
END_TEST

START_TEST(the_reference_needs_no_workspace_and_is_last)
{
	const char *const *names = kv_state_backend_names(KV_DEVICE_HOST);
	struct kv_gdn_args a = good_gdn();
	size_t bytes = 7;
	int n = 0;

	while (names[n])
		n++;
	ck_assert_int_gt(n, 0);
	ck_assert_str_eq(names[n - 1], "ref");
	ck_assert_int_eq(kv_gdn_workspace_bytes(&a, &bytes), 0);
	ck_assert_uint_eq(bytes, 0);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("kernels/gdn_check");
	TCase *tcase = tcase_create("check");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	tcase_add_test(tcase, a_wrong_field_of_gdn_is_refused_by_name);
	tcase_add_test(tcase, what_a_table_cannot_hold_is_refused);
	tcase_add_test(tcase, counts_outside_the_steps_are_refused);
	tcase_add_test(tcase, a_wrong_field_of_ssd_is_refused_by_name);
	tcase_add_test(tcase, a_wrong_field_of_a_convolution_is_refused_by_name);
	tcase_add_test(tcase, a_refusal_has_every_wrong_field);
	tcase_add_test(tcase, a_backend_tells_every_reason_against_a_problem);
	tcase_add_test(tcase, nothing_to_do_is_done);
	tcase_add_test(tcase, the_reference_needs_no_workspace_and_is_last);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_NORMAL);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
