/* SPDX-License-Identifier: Apache-2.0 */
/* libclient/stats_fields.c: the rows describe the structs of stats.h completely, in order. */
#include <check.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/stats.h>

static const struct {
	enum kv_stat_kind kind;
	size_t bytes;
} structs[] = {
	{KV_STAT_DAEMON, sizeof(struct kv_daemon_stats)},
	{KV_STAT_GPU, sizeof(struct kv_gpu_stats)},
	{KV_STAT_POOL, sizeof(struct kv_pool_stats)},
	{KV_STAT_SESSION, sizeof(struct kv_session_stats)},
	{KV_STAT_BALANCE, sizeof(struct kv_balance_stats)},
	{KV_STAT_ERROR, sizeof(struct kv_error_stats)},
	{KV_STAT_HISTORY, sizeof(struct kv_history_stats)},
};

/* The sizes of texts in stats.h. No neighbours add up to one of them, so a missing row shows. */
static bool is_text_size(size_t bytes)
{
	return bytes == 8 || bytes == 16 || bytes == 48 || bytes == KV_NAME_MAX || bytes == 96 ||
	       bytes == 192;
}

START_TEST(each_struct_is_covered_without_a_gap)
{
	const struct kv_stat_field *f = kv_stat_fields(structs[_i].kind);

	ck_assert_uint_eq(f->offset, 0);
	for (; f->name; f++) {
		size_t end = f[1].name ? f[1].offset : structs[_i].bytes;

		ck_assert_msg(end > f->offset, "%s: out of order", f->name);
		if (f->type == KV_STAT_NUMBER)
			ck_assert_msg(end - f->offset == 8, "a row is missing after %s", f->name);
		else
			ck_assert_msg(is_text_size(end - f->offset), "a row is missing after %s",
				      f->name);
	}
}
END_TEST

START_TEST(each_row_has_a_known_unit_and_a_short_meaning)
{
	static const char *const units[] = {"", "bytes", "blocks", "tokens", "ns"};

	for (const struct kv_stat_field *f = kv_stat_fields(structs[_i].kind); f->name; f++) {
		bool known = false;

		for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++)
			known |= !strcmp(f->unit, units[i]);
		ck_assert_msg(known, "%s: unit %s", f->name, f->unit);
		ck_assert_msg(*f->help && strlen(f->help) <= 46, "%s: %s", f->name, f->help);
		/* A name that tells its unit tells the right one. */
		if (strstr(f->name, "_ns"))
			ck_assert_str_eq(f->unit, "ns");
		if (strstr(f->name, "bytes"))
			ck_assert_str_eq(f->unit, "bytes");
		if (!strncmp(f->name, "blocks_", 7))
			ck_assert_str_eq(f->unit, "blocks");
	}
}
END_TEST

START_TEST(an_unknown_kind_has_no_fields)
{
	ck_assert_ptr_null(kv_stat_fields((enum kv_stat_kind)99)->name);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("client/stats_fields");
	TCase *rows = tcase_create("rows");
	int n = (int)(sizeof(structs) / sizeof(structs[0]));
	SRunner *runner;
	int n_failed;

	tcase_add_loop_test(rows, each_struct_is_covered_without_a_gap, 0, n);
	tcase_add_loop_test(rows, each_row_has_a_known_unit_and_a_short_meaning, 0, n);
	tcase_add_test(rows, an_unknown_kind_has_no_fields);
	suite_add_tcase(suite, rows);
	runner = srunner_create(suite);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
