/* SPDX-License-Identifier: Apache-2.0 */
/* alloc/compat_rules.c, and what no golden vector asks for. The rest is tests/golden. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/compat_rules.h"
#include "include/internal/error.h"

START_TEST(hybrids_and_v4_are_forced_to_their_backends)
{
	const char *qwen35[] = {"Qwen3_5MoeForConditionalGeneration"};
	const char *next[] = {"Qwen3NextForCausalLM"};
	const char *v4[] = {"DeepseekV4ForCausalLMNextN"};
	struct kv_compat_class none = kv_compat_classify(next, 1);

	ck_assert(!none.hybrid && !none.v4);
	ck_assert_str_eq(kv_compat_forced_backend(kv_compat_classify(qwen35, 1), "fa3"),
			 "hybrid_linear_attn");
	ck_assert_str_eq(kv_compat_forced_backend(kv_compat_classify(v4, 1), NULL), "deepseek_v4");
	ck_assert_str_eq(kv_compat_forced_backend(none, "fa3"), "fa3");
	ck_assert_ptr_null(kv_compat_forced_backend(none, "hybrid_linear_attn"));
	ck_assert_int_eq(kv_compat_default_block(kv_compat_classify(v4, 1), 64), 256);
	ck_assert_int_eq(kv_compat_default_block(kv_compat_classify(v4, 1), 128), 128);
	ck_assert_int_eq(kv_compat_default_block(none, 64), 64);
}
END_TEST

START_TEST(an_unknown_backend_is_answered_with_all_that_exist)
{
	const char *class;

	ck_assert_int_eq(kv_compat_backend("nosuch", "MHA", true, &class),
			 KV_FAULT_UNKNOWN_BACKEND);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "flashinfer"));
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "trtllm_mla"));
	ck_assert_int_eq(kv_compat_backend("trtllm", "MHA", false, &class),
			 KV_FAULT_UNKNOWN_BACKEND);
	ck_assert_ptr_null(strstr(kv_error_text(), "trtllm_mla"));
	ck_assert_int_eq(kv_compat_backend(NULL, "RNN", true, &class), KV_FAULT_NO_DEFAULT_BACKEND);
	ck_assert_int_eq(kv_compat_backend("mha", "RNN", true, &class), KV_FAULT_UNSUPPORTED_ARCH);
}
END_TEST

START_TEST(backends_say_which_blocks_they_read)
{
	ck_assert_int_eq(kv_compat_check_page("trtllm_mla", 32, "bfloat16"), 0);
	ck_assert_int_eq(kv_compat_check_page("trtllm_mla", 128, "bfloat16"),
			 KV_FAULT_BAD_PAGE_SIZE);
	ck_assert_int_eq(kv_compat_check_page("tokenspeed_mla", 64, "bfloat16"),
			 KV_FAULT_BAD_KV_DTYPE);
	ck_assert_int_eq(kv_compat_check_page("tokenspeed_mla", 64, "float8_e4m3fn"), 0);
	ck_assert_int_eq(kv_compat_check_page("dsa", 32, "bfloat16"), KV_FAULT_BAD_PAGE_SIZE);
	ck_assert_int_eq(kv_compat_check_page("mha", 17, "bfloat16"), 0);
	ck_assert_int_eq(kv_compat_check_dsa_dtype("fp8", false), KV_FAULT_DSA_FP8_PLATFORM);
	ck_assert_int_eq(kv_compat_check_dsa_dtype("fp8", true), 0);
	ck_assert_int_eq(kv_compat_check_dsa_dtype("auto", false), 0);
	ck_assert_int_eq(kv_compat_check_dsa_dtype("int4", true), KV_FAULT_BAD_KV_DTYPE);
}
END_TEST

START_TEST(the_servers_switch_comes_before_the_configs)
{
	const bool on = true, off = false;

	ck_assert(!kv_compat_fp4_indexer(NULL, NULL));
	ck_assert(kv_compat_fp4_indexer(NULL, &on));
	ck_assert(!kv_compat_fp4_indexer(&off, &on));
	ck_assert(kv_compat_fp4_indexer(&on, &off));
}
END_TEST

START_TEST(layers_of_a_hybrid_pool_have_what_they_have)
{
	static struct kv_compat_mha_out out;
	struct kv_compat_mha_pool pool = {
		.tokens = 4 * 1088,
		.page_size = 1088,
		.dtype = "bfloat16",
		.local_heads = 2,
		.head_dim = 256,
		.n_layers = 4,
		.layers = "LLLF",
		.flat_ext = true,
		.load = {.n_requests = 1, .max_context = 1088, .decode_tokens = 1},
		.has_state = true,
		.conv_shape = {8192, 3},
		.ssm_shape = {32, 128, 128},
		.n_conv_dims = 2,
		.n_ssm_dims = 3,
		.conv_dtype = "bfloat16",
		.ssm_dtype = "float32",
	};
	int64_t x, order[2];

	ck_assert_int_eq(kv_compat_mha_tensors(&pool, &out), 0);
	ck_assert_int_eq(kv_compat_layer_state(&out, 4, 2, &x), 0);
	ck_assert_int_eq(x, 2);
	ck_assert_int_eq(kv_compat_layer_state(&out, 4, 3, &x), KV_FAULT_NOT_A_STATE_LAYER);
	ck_assert_int_eq(kv_compat_layer_kv(&out, 4, 3, &x), 0);
	ck_assert_int_eq(x, 0);
	ck_assert_int_eq(kv_compat_layer_kv(&out, 4, 0, &x), KV_FAULT_NO_KV_ON_STATE_LAYER);
	ck_assert_int_eq(kv_compat_layer_kv(&out, 4, 4, &x), KV_FAULT_OUT_OF_RANGE);
	ck_assert_int_eq(kv_compat_transfer_order(&out, 4, 3, order), KV_FAULT_PD_ON_FLAT_GDN);

	pool.has_state = false;
	pool.layers = "";
	ck_assert_int_eq(kv_compat_mha_tensors(&pool, &out), 0);
	ck_assert_int_eq(kv_compat_transfer_order(&out, 4, 3, order), 0);
	ck_assert_int_eq(order[0], 3);
	ck_assert_int_eq(order[1], 7);

	/* groups that share K and V have no layer's own to send */
	pool.layers = "SFSF";
	pool.window.scalar = (struct kv_compat_value){KV_COMPAT_INT, 128};
	pool.disaggregated = true;
	ck_assert_int_eq(kv_compat_mha_tensors(&pool, &out), KV_FAULT_SLAB_WITH_PD);
}
END_TEST

START_TEST(layers_without_a_place_are_refused)
{
	const int64_t full[] = {3, 7, 11};
	int64_t x;

	ck_assert_int_eq(kv_compat_map_layer(full, 3, 7, &x), 0);
	ck_assert_int_eq(x, 1);
	ck_assert_int_eq(kv_compat_map_layer(full, 3, 4, &x), KV_FAULT_OUT_OF_RANGE);
}
END_TEST

START_TEST(copies_have_tiles_by_the_size_of_rows)
{
	static const int64_t rows[][3] = {
		{128, 128, 4}, {4095, 128, 4}, {4096, 256, 4}, {8191, 256, 4}, {8192, 512, 8}};

	for (size_t i = 0; i < 5; i++) {
		int64_t tile;
		int warps;

		kv_compat_copy_tile(rows[i][0], &tile, &warps);
		ck_assert_int_eq(tile, rows[i][1]);
		ck_assert_int_eq(warps, rows[i][2]);
	}
}
END_TEST

START_TEST(every_fault_has_a_name)
{
	ck_assert_str_eq(kv_fault_name(KV_FAULT_NOT_DIVISIBLE), "NOT_DIVISIBLE");
	ck_assert_str_eq(kv_fault_name(KV_FAULT_OUT_OF_RANGE), "OUT_OF_RANGE");
	ck_assert_str_eq(kv_fault_name(0), "");
	ck_assert_str_eq(kv_fault_name(-1), "");
	ck_assert_str_eq(kv_fault_name(KV_FAULT_OUT_OF_RANGE + 1), "");
}
END_TEST

int main(void)
{
	Suite *s = suite_create("alloc/compat");
	TCase *t = tcase_create("rules");
	SRunner *runner;
	int failed;

	tcase_add_test(t, hybrids_and_v4_are_forced_to_their_backends);
	tcase_add_test(t, an_unknown_backend_is_answered_with_all_that_exist);
	tcase_add_test(t, backends_say_which_blocks_they_read);
	tcase_add_test(t, the_servers_switch_comes_before_the_configs);
	tcase_add_test(t, layers_of_a_hybrid_pool_have_what_they_have);
	tcase_add_test(t, layers_without_a_place_are_refused);
	tcase_add_test(t, copies_have_tiles_by_the_size_of_rows);
	tcase_add_test(t, every_fault_has_a_name);
	suite_add_tcase(s, t);
	runner = srunner_create(s);
	srunner_run_all(runner, CK_ENV);
	failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
