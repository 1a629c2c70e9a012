/* SPDX-License-Identifier: Apache-2.0 */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/emit.h"

struct item {
	char name[16];
	uint64_t bytes;
	uint64_t age_ns;
	uint64_t n;
};

static const struct kv_stat_field fields[] = {
	{"name", "", "its name", KV_STAT_TEXT, offsetof(struct item, name)},
	{"bytes", "bytes", "its size", KV_STAT_NUMBER, offsetof(struct item, bytes)},
	{"age_ns", "ns", "its age", KV_STAT_NUMBER, offsetof(struct item, age_ns)},
	{"n", "", "its number", KV_STAT_NUMBER, offsetof(struct item, n)},
	{NULL},
};

static const struct item items[] = {
	{"one", 1536, 65000000000, 7},
	{"a \"b\"", UINT64_MAX, 0, (1ull << 53) + 1},
};

static struct kv_emit emit;
static FILE *out;
static char *text;
static size_t text_bytes;

static void begin(bool json)
{
	out = open_memstream(&text, &text_bytes);
	ck_assert_ptr_nonnull(out);
	kv_emit_init(&emit, out, json);
}

static void end_is(const char *expected)
{
	ck_assert_int_eq(kv_emit_end(&emit), 0);
	fclose(out);
	ck_assert_str_eq(text, expected);
	free(text);
}

/* One function for both forms, as the tools have them. */
static void show(void)
{
	kv_emit_open(&emit, NULL, '{');
	kv_emit_list(&emit, "items", fields, items, sizeof(items[0]), 2);
	kv_emit_close(&emit);
	kv_emit_head(&emit, "<NAME", ">SIZE", "<END", NULL);
	for (int i = 0; i < 2; i++) {
		kv_emit_cell(&emit, "%s", items[i].name);
		kv_emit_cell(&emit, "%s", kv_words_bytes(items[i].bytes).text);
		kv_emit_cell(&emit, "%d", i);
	}
	kv_emit_table(&emit);
	kv_emit_gap(&emit);
	kv_emit_line(&emit, "%d items", 2);
}

START_TEST(json_has_every_field_with_exact_numbers)
{
	begin(true);
	show();
	end_is("{\n"
	       "  \"items\": [\n"
	       "    {\n"
	       "      \"name\": \"one\",\n"
	       "      \"bytes\": 1536,\n"
	       "      \"age_ns\": 65000000000,\n"
	       "      \"n\": 7\n"
	       "    },\n"
	       "    {\n"
	       "      \"name\": \"a \\\"b\\\"\",\n"
	       "      \"bytes\": 18446744073709551615,\n"
	       "      \"age_ns\": 0,\n"
	       "      \"n\": 9007199254740993\n"
	       "    }\n"
	       "  ]\n"
	       "}\n");
}
END_TEST

START_TEST(people_get_aligned_columns_without_trailing_blanks)
{
	begin(false);
	show();
	end_is("NAME       SIZE  END\n"
	       "one     1.5 KiB  0\n"
	       "a \"b\"  16.0 EiB  1\n"
	       "\n"
	       "2 items\n");
}
END_TEST

START_TEST(json_stands_on_one_line_where_that_is_asked_for)
{
	begin(true);
	emit.one_line = true;
	kv_emit_open(&emit, NULL, '{');
	kv_emit_number(&emit, "n", 1);
	kv_emit_list(&emit, "items", fields, items, sizeof(items[0]), 1);
	kv_emit_close(&emit);
	end_is("{\"n\": 1, \"items\": [{\"name\": \"one\", \"bytes\": 1536, "
	       "\"age_ns\": 65000000000, \"n\": 7}]}\n");
}
END_TEST

START_TEST(empty_lists_and_objects_stay_valid)
{
	begin(true);
	kv_emit_open(&emit, NULL, '{');
	kv_emit_list(&emit, "items", fields, NULL, sizeof(items[0]), 0);
	kv_emit_open(&emit, "object", '{');
	kv_emit_close(&emit);
	kv_emit_close(&emit);
	end_is("{\n  \"items\": [],\n  \"object\": {}\n}\n");
}
END_TEST

START_TEST(every_kind_of_value_is_json)
{
	begin(true);
	kv_emit_open(&emit, NULL, '[');
	kv_emit_number(&emit, NULL, 0);
	kv_emit_real(&emit, NULL, 0.25);
	kv_emit_real(&emit, NULL, NAN);
	kv_emit_real(&emit, NULL, -INFINITY);
	kv_emit_bool(&emit, NULL, true);
	kv_emit_bool(&emit, NULL, false);
	kv_emit_text(&emit, NULL, "");
	kv_emit_close(&emit);
	end_is("[\n  0,\n  0.25,\n  null,\n  null,\n  true,\n  false,\n  \"\"\n]\n");
}
END_TEST

/* What may come in a name, and how either form shows it. */
static const struct {
	const char *raw, *json, *people;
} strings[] = {
	{"plain", "plain", "plain"},
	{"quote\" back\\slash", "quote\\\" back\\\\slash", "quote\" back\\slash"},
	{"line\nfeed\ttab", "line\\u000afeed\\u0009tab", "line?feed?tab"},
	{"\x1b[31mred", "\\u001b[31mred", "?[31mred"},
	{"del\x7f", "del\\u007f", "del?"},
	{"c1\xc2\x9b", "c1\\u009b", "c1?"},
	{"h\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", "h\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80",
	 "h\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"},
	{"lone\x80", "lone\\ufffd", "lone?"},
	{"cut\xe2\x82", "cut\\ufffd\\ufffd", "cut??"},
	{"overlong\xc0\xaf", "overlong\\ufffd\\ufffd", "overlong??"},
	{"overlong\xe0\x80\xaf", "overlong\\ufffd\\ufffd\\ufffd", "overlong???"},
	{"surrogate\xed\xa0\x80", "surrogate\\ufffd\\ufffd\\ufffd", "surrogate???"},
	{"beyond\xf4\x90\x80\x80", "beyond\\ufffd\\ufffd\\ufffd\\ufffd", "beyond????"},
	{"%s%n", "%s%n", "%s%n"},
};

START_TEST(strings_are_escaped_and_terminals_protected)
{
	char expected[128];

	begin(true);
	kv_emit_text(&emit, NULL, strings[_i].raw);
	snprintf(expected, sizeof(expected), "\"%s\"\n", strings[_i].json);
	end_is(expected);

	begin(false);
	kv_emit_line(&emit, "%s", strings[_i].raw);
	snprintf(expected, sizeof(expected), "%s\n", strings[_i].people);
	end_is(expected);
}
END_TEST

START_TEST(columns_align_by_characters_not_by_bytes)
{
	begin(false);
	kv_emit_head(&emit, "<A", ">B", NULL);
	kv_emit_cell(&emit, "h\xc3\xa9h\xc3\xa9");
	kv_emit_cell(&emit, "1");
	kv_emit_cell(&emit, "four");
	kv_emit_cell(&emit, "23");
	kv_emit_table(&emit);
	end_is("A      B\nh\xc3\xa9h\xc3\xa9   1\nfour  23\n");
}
END_TEST

START_TEST(a_described_struct_shows_field_value_meaning)
{
	begin(false);
	kv_emit_describe(&emit, fields, &items[0]);
	end_is("FIELD   VALUE      MEANING\n"
	       "name    one        its name\n"
	       "bytes   1.5 KiB    its size\n"
	       "age_ns  1 min 5 s  its age\n"
	       "n       7          its number\n");
}
END_TEST

START_TEST(a_write_that_fails_is_reported)
{
	FILE *full = fopen("/dev/full", "w");

	ck_assert_ptr_nonnull(full);
	kv_emit_init(&emit, full, true);
	kv_emit_text(&emit, NULL, "lost");
	ck_assert_int_eq(kv_emit_end(&emit), -EIO);
	fclose(full);
}
END_TEST

static const struct {
	uint64_t bytes;
	const char *words;
} sizes[] = {
	{0, "0 B"},
	{1023, "1023 B"},
	{1024, "1.0 KiB"},
	{1536, "1.5 KiB"},
	{102348, "99.9 KiB"},
	{102399, "100 KiB"},
	{1048064, "1.0 MiB"},
	{268435456, "256 MiB"},
	{85899345920, "80.0 GiB"},
	{1ull << 50, "1.0 PiB"},
	{UINT64_MAX, "16.0 EiB"},
};

START_TEST(sizes_in_words)
{
	ck_assert_str_eq(kv_words_bytes(sizes[_i].bytes).text, sizes[_i].words);
}
END_TEST

static const struct {
	uint64_t ns;
	const char *words;
} times[] = {
	{0, "0 ns"},
	{999, "999 ns"},
	{1000, "1.0 us"},
	{13250, "13.2 us"},
	{4500000, "4.5 ms"},
	{1000000000, "1 s"},
	{59999999999, "59 s"},
	{60000000000, "1 min 0 s"},
	{3599000000000, "59 min 59 s"},
	{11520000000000, "3 h 12 min"},
	{90000000000000, "1 d 1 h"},
	{UINT64_MAX, "213503 d 23 h"},
};

START_TEST(times_in_words)
{
	ck_assert_str_eq(kv_words_time(times[_i].ns).text, times[_i].words);
}
END_TEST

START_TEST(shares_in_words)
{
	ck_assert_str_eq(kv_words_share(0, 0).text, "-");
	ck_assert_str_eq(kv_words_share(0, 5).text, "0.0%");
	ck_assert_str_eq(kv_words_share(618, 1000).text, "61.8%");
	ck_assert_str_eq(kv_words_share(UINT64_MAX, UINT64_MAX).text, "100.0%");
}
END_TEST

static const struct {
	const char *text;
	unsigned width;
	const char *words;
} names[] = {
	{"", 4, ""},
	{"engine", 6, "engine"},
	{"engine-a", 6, "engin+"},
	{"h\xc3\xa9h\xc3\xa9", 4, "h\xc3\xa9h\xc3\xa9"},
	{"h\xc3\xa9h\xc3\xa9h", 4, "h\xc3\xa9h+"},
	{"cut\xe2\x82", 4, "cut+"},
};

START_TEST(long_names_are_cut_between_characters)
{
	ck_assert_str_eq(kv_words_cut(names[_i].text, names[_i].width).text, names[_i].words);
}
END_TEST

#define N(a) ((int)(sizeof(a) / sizeof((a)[0])))

int main(void)
{
	Suite *suite = suite_create("tools/emit");
	TCase *forms = tcase_create("forms");
	TCase *words = tcase_create("words");
	SRunner *runner;
	int n_failed;

	tcase_add_test(forms, json_has_every_field_with_exact_numbers);
	tcase_add_test(forms, people_get_aligned_columns_without_trailing_blanks);
	tcase_add_test(forms, json_stands_on_one_line_where_that_is_asked_for);
	tcase_add_test(forms, empty_lists_and_objects_stay_valid);
	tcase_add_test(forms, every_kind_of_value_is_json);
	tcase_add_loop_test(forms, strings_are_escaped_and_terminals_protected, 0, N(strings));
	tcase_add_test(forms, columns_align_by_characters_not_by_bytes);
	tcase_add_test(forms, a_described_struct_shows_field_value_meaning);
	tcase_add_test(forms, a_write_that_fails_is_reported);
	tcase_add_loop_test(words, sizes_in_words, 0, N(sizes));
	tcase_add_loop_test(words, times_in_words, 0, N(times));
	tcase_add_test(words, shares_in_words);
	tcase_add_loop_test(words, long_names_are_cut_between_characters, 0, N(names));
	suite_add_tcase(suite, forms);
	suite_add_tcase(suite, words);
	runner = srunner_create(suite);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
