/* SPDX-License-Identifier: Apache-2.0 */
/* A sound file is read back; a broken one is refused with a text, whatever is broken. */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "include/internal/cleanup.h"
#include "tests/engine/image.h"
#include "tools/engine/error.h"
#include "tools/engine/tiny.h"

static const uint64_t dims_2x32[] = {32, 2};

static void sound(struct image *image, uint32_t version)
{
	static const char *const words[] = {"one", "", "three"};
	static const int32_t numbers[] = {-1, 0, 7};
	uint64_t wide = 1ull << 40;
	int8_t negative = -3;
	double pi = 3.25;
	float eps = 1e-5f;
	char data[200];

	image_header(image, version, 2, 8);
	image_pair_u32(image, "number", 77);
	image_pair_text(image, "text", "hello");
	image_pair_texts(image, "words", words, 3);
	image_pair_i32s(image, "numbers", numbers, 3);
	image_text(image, "wide");
	image_u32(image, KV_GGUF_U64);
	image_u64(image, wide);
	image_text(image, "negative");
	image_u32(image, KV_GGUF_I8);
	image_put(image, &negative, 1);
	image_text(image, "pi");
	image_u32(image, KV_GGUF_F64);
	image_put(image, &pi, sizeof(pi));
	image_text(image, "eps");
	image_u32(image, KV_GGUF_F32);
	image_put(image, &eps, sizeof(eps));
	image_tensor(image, "a", 2, dims_2x32, KV_WEIGHT_Q8_0, 0);
	image_tensor(image, "b", 1, dims_2x32, KV_WEIGHT_F16, 96);
	image_align(image, 32);
	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = i;
	image_put(image, data, 96 + 64);
}

static struct kv_gguf *open_sound(uint32_t version)
{
	struct kv_gguf *file = NULL;
	struct image image = {0};

	sound(&image, version);
	ck_assert_msg(image_open(&image, &file) == 0, "%s", kv_engine_error_text());
	return file;
}

START_TEST(a_sound_file_of_both_versions_is_read_back)
{
	struct kv_gguf *file = open_sound(_i);
	struct kv_text text, *words;
	const struct kv_tensor *t;
	int32_t *numbers;
	uint32_t u;
	float f;
	size_t n;

	ck_assert_int_eq(kv_gguf_u32(file, "number", &u), 0);
	ck_assert_uint_eq(u, 77);
	ck_assert_int_eq(kv_gguf_text(file, "text", &text), 0);
	ck_assert_uint_eq(text.len, 5);
	ck_assert_mem_eq(text.at, "hello", 5);
	ck_assert_int_eq(kv_gguf_texts(file, "words", &words, &n), 0);
	ck_assert_uint_eq(n, 3);
	ck_assert_uint_eq(words[1].len, 0);
	ck_assert_mem_eq(words[2].at, "three", 5);
	free(words);
	ck_assert_int_eq(kv_gguf_i32s(file, "numbers", &numbers, &n), 0);
	ck_assert_uint_eq(n, 3);
	ck_assert_int_eq(numbers[0], -1);
	ck_assert_int_eq(numbers[2], 7);
	free(numbers);
	ck_assert_int_eq(kv_gguf_f32(file, "pi", &f), 0);
	ck_assert_float_eq(f, 3.25f);
	ck_assert_int_eq(kv_gguf_f32(file, "eps", &f), 0);
	ck_assert_float_eq(f, 1e-5f);

	ck_assert_int_eq(kv_gguf_tensor(file, "a", &t), 0);
	ck_assert_uint_eq(t->n_cols, 32);
	ck_assert_uint_eq(t->n_rows, 2);
	ck_assert_uint_eq(t->row_bytes, 34);
	ck_assert_int_eq(((const char *)t->data)[33], 33);
	ck_assert_int_eq(kv_gguf_tensor(file, "b", &t), 0);
	ck_assert_uint_eq(t->row_bytes, 64);
	ck_assert_int_eq(((const char *)t->data)[1], 97);
	kv_gguf_free(file);
}
END_TEST

START_TEST(what_is_missing_or_of_another_type_is_said)
{
	struct kv_gguf *file = open_sound(3);
	const struct kv_tensor *t;
	struct kv_text text, *words;
	int32_t *numbers;
	uint32_t u;
	float f;
	size_t n;

	ck_assert_int_eq(kv_gguf_u32(file, "nothing", &u), -ENOENT);
	ck_assert_ptr_nonnull(strstr(kv_engine_error_text(), "nothing is missing"));
	ck_assert_int_eq(kv_gguf_u32(file, "text", &u), -EINVAL);
	ck_assert_int_eq(kv_gguf_u32(file, "words", &u), -EINVAL);
	ck_assert_int_eq(kv_gguf_u32(file, "wide", &u), -EINVAL);
	ck_assert_int_eq(kv_gguf_u32(file, "negative", &u), -EINVAL);
	ck_assert_int_eq(kv_gguf_f32(file, "number", &f), -EINVAL);
	ck_assert_int_eq(kv_gguf_text(file, "number", &text), -EINVAL);
	ck_assert_int_eq(kv_gguf_texts(file, "numbers", &words, &n), -EINVAL);
	ck_assert_int_eq(kv_gguf_texts(file, "text", &words, &n), -EINVAL);
	ck_assert_int_eq(kv_gguf_i32s(file, "words", &numbers, &n), -EINVAL);
	ck_assert_int_eq(kv_gguf_tensor(file, "c", &t), -ENOENT);
	kv_gguf_free(file);
}
END_TEST

START_TEST(a_file_cut_at_any_byte_is_refused)
{
	struct image whole = {0};
	struct kv_gguf *file;

	sound(&whole, 3);
	for (size_t n = 0; n < whole.n; n++) {
		struct image part = {0};

		image_put(&part, whole.bytes, n);
		ck_assert_int_eq(image_open(&part, &file), -EINVAL);
		ck_assert_str_ne(kv_engine_error_text(), "");
	}
	free(whole.bytes);
}
END_TEST

/* Everything a reader of models would ask for; what comes out must lie in the file. */
static void read_all(const struct kv_gguf *file)
{
	static const char *const keys[] = {"number", "text", "words", "numbers",
					   "wide",   "pi",   "eps",   "negative"};
	static const char *const names[] = {"a", "b"};
	const struct kv_tensor *t;
	unsigned sum = 0;

	for (size_t i = 0; i < 8; i++) {
		struct kv_text text, *texts = NULL;
		int32_t *numbers = NULL;
		uint32_t u;
		float f;
		size_t n;

		kv_gguf_u32(file, keys[i], &u);
		kv_gguf_f32(file, keys[i], &f);
		if (!kv_gguf_text(file, keys[i], &text))
			for (size_t j = 0; j < text.len; j++)
				sum += text.at[j];
		if (!kv_gguf_texts(file, keys[i], &texts, &n))
			for (size_t j = 0; j < n; j++)
				sum += texts[j].len ? texts[j].at[texts[j].len - 1] : 0;
		if (!kv_gguf_i32s(file, keys[i], &numbers, &n))
			sum += n ? numbers[n - 1] : 0;
		free(texts);
		free(numbers);
	}
	for (size_t i = 0; i < 2; i++)
		if (!kv_gguf_tensor(file, names[i], &t))
			for (size_t j = 0; j < t->n_rows * t->row_bytes; j++)
				sum += ((const char *)t->data)[j];
	ck_assert_uint_ne(sum, 1u << 31); /* the bytes are really read */
}

START_TEST(a_file_with_any_byte_changed_is_refused_or_read)
{
	static const unsigned char values[] = {0, 1, 8, 9, 0x7f, 0x80, 0xff};
	struct image whole = {0};
	struct kv_gguf *file;
	int n_refused = 0;

	sound(&whole, 3);
	for (size_t at = 0; at < whole.n; at++) {
		for (size_t v = 0; v < sizeof(values); v++) {
			struct image changed = {0};
			int r;

			image_put(&changed, whole.bytes, whole.n);
			changed.bytes[at] = values[v];
			r = image_open(&changed, &file);
			n_refused += r < 0;
			if (!r) {
				read_all(file);
				kv_gguf_free(file);
			}
		}
	}
	ck_assert_int_gt(n_refused, 500);
	free(whole.bytes);
}
END_TEST

static void no_tensor(struct image *image)
{
	image_header(image, 4, 0, 0);
}

static void other_magic(struct image *image)
{
	image_put(image, "GGML", 4);
	image_put(image, "\3\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 20);
}

static void many_pairs(struct image *image)
{
	image_header(image, 3, 0, UINT64_MAX);
}

static void many_tensors(struct image *image)
{
	image_header(image, 3, UINT64_MAX / 2, 0);
}

static void long_key(struct image *image)
{
	image_header(image, 3, 0, 1);
	image_u64(image, UINT64_MAX - 3);
	image_text(image, "some bytes more");
}

static void long_array(struct image *image)
{
	image_header(image, 3, 0, 1);
	image_text(image, "k");
	image_u32(image, KV_GGUF_ARRAY);
	image_u32(image, KV_GGUF_U64);
	image_u64(image, (UINT64_MAX >> 3) + 2); /* * 8 is 8 */
	image_u64(image, 0);
}

static void nested_array(struct image *image)
{
	image_header(image, 3, 0, 1);
	image_text(image, "k");
	image_u32(image, KV_GGUF_ARRAY);
	image_u32(image, KV_GGUF_ARRAY);
	image_u64(image, 0);
}

static void unknown_type(struct image *image)
{
	image_header(image, 3, 0, 1);
	image_text(image, "key");
	image_u32(image, 13);
	image_u64(image, 0);
}

static void one_tensor(struct image *image, uint32_t n_dims, const uint64_t *dims, uint32_t type,
		       uint64_t offset)
{
	image_header(image, 3, 1, 0);
	image_tensor(image, "t", n_dims, dims, type, offset);
	image_align(image, 32);
	for (int i = 0; i < 64; i++)
		image_put(image, "x", 1);
}

static void past_the_end(struct image *image)
{
	one_tensor(image, 1, dims_2x32, KV_WEIGHT_F32, 0);
}

static void far_past_the_end(struct image *image)
{
	one_tensor(image, 1, dims_2x32, KV_WEIGHT_Q8_0, UINT64_MAX - 31);
}

static void misaligned(struct image *image)
{
	one_tensor(image, 1, dims_2x32, KV_WEIGHT_Q8_0, 8);
}

static void no_dimension(struct image *image)
{
	one_tensor(image, 0, NULL, KV_WEIGHT_F32, 0);
}

static void five_dimensions(struct image *image)
{
	static const uint64_t dims[] = {1, 1, 1, 1, 1};

	one_tensor(image, 5, dims, KV_WEIGHT_F32, 0);
}

static void huge_dimensions(struct image *image)
{
	static const uint64_t dims[] = {1, 1ull << 32, 1ull << 32};

	one_tensor(image, 3, dims, KV_WEIGHT_F32, 0);
}

static void huge_row(struct image *image)
{
	static const uint64_t dims[] = {1ull << 62};

	one_tensor(image, 1, dims, KV_WEIGHT_F32, 0);
}

static void huge_product(struct image *image)
{
	static const uint64_t dims[] = {1ull << 31, 1ull << 31};

	one_tensor(image, 2, dims, KV_WEIGHT_F32, 0);
}

static void empty_tensor(struct image *image)
{
	static const uint64_t dims[] = {32, 0};

	one_tensor(image, 2, dims, KV_WEIGHT_F32, 0);
}

static void broken_row(struct image *image)
{
	static const uint64_t dims[] = {33};

	one_tensor(image, 1, dims, KV_WEIGHT_Q4_0, 0);
}

static void odd_alignment(struct image *image)
{
	image_header(image, 3, 0, 1);
	image_pair_u32(image, "general.alignment", 48);
}

static void no_alignment(struct image *image)
{
	image_header(image, 3, 0, 1);
	image_pair_u32(image, "general.alignment", 0);
}

static const struct {
	void (*make)(struct image *image);
	int r;
	const char *text;
} broken[] = {
	{no_tensor, -ENOTSUP, "version 4"},
	{other_magic, -EINVAL, "doesn't start with"},
	{many_pairs, -EINVAL, "metadata pairs"},
	{many_tensors, -EINVAL, "tensors don't fit"},
	{long_key, -EINVAL, "metadata key"},
	{long_array, -EINVAL, "metadata value"},
	{nested_array, -EINVAL, "type 9"},
	{unknown_type, -EINVAL, "type 13"},
	{past_the_end, -EINVAL, "past the end"},
	{far_past_the_end, -EINVAL, "past the end"},
	{misaligned, -EINVAL, "no multiple of 32"},
	{no_dimension, -EINVAL, "0 dimensions"},
	{five_dimensions, -EINVAL, "5 dimensions"},
	{huge_dimensions, -EINVAL, "tensor size"},
	{huge_row, -EINVAL, "rows of"},
	{huge_product, -EINVAL, "past the end"},
	{empty_tensor, -EINVAL, "tensor t"},
	{broken_row, -EINVAL, "rows of 33"},
	{odd_alignment, -EINVAL, "power of two"},
	{no_alignment, -EINVAL, "power of two"},
};

START_TEST(each_kind_of_damage_is_named)
{
	struct image image = {0};
	struct kv_gguf *file;

	broken[_i].make(&image);
	ck_assert_int_eq(image_open(&image, &file), broken[_i].r);
	ck_assert_msg(strstr(kv_engine_error_text(), broken[_i].text), "%s instead of %s",
		      kv_engine_error_text(), broken[_i].text);
}
END_TEST

START_TEST(a_tensor_of_an_unknown_type_is_refused_when_it_is_asked_for)
{
	const struct kv_tensor *t;
	struct image image = {0};
	struct kv_gguf *file;

	one_tensor(&image, 1, dims_2x32, 10, 0);
	ck_assert_int_eq(image_open(&image, &file), 0);
	ck_assert_int_eq(kv_gguf_tensor(file, "t", &t), -ENOTSUP);
	ck_assert_ptr_nonnull(strstr(kv_engine_error_text(), "type 10"));
	kv_gguf_free(file);
}
END_TEST

START_TEST(a_file_on_disk_has_the_digest_of_its_bytes)
{
	char path[] = "/tmp/kv-test-gguf-XXXXXX", a[KV_GGUF_DIGEST_BYTES], b[KV_GGUF_DIGEST_BYTES];
	kv_cleanup(kv_closep) int fd = mkstemp(path);
	struct kv_gguf *in_memory = open_sound(3), *on_disk, *other = open_sound(2);
	struct image image = {0};

	sound(&image, 3);
	ck_assert_int_eq(write(fd, image.bytes, image.n), (ssize_t)image.n);
	ck_assert_int_eq(kv_gguf_open(path, &on_disk), 0);
	kv_gguf_digest(in_memory, a);
	kv_gguf_digest(on_disk, b);
	ck_assert_str_eq(a, b);
	ck_assert_uint_eq(strlen(a), KV_GGUF_DIGEST_BYTES - 1);
	kv_gguf_digest(other, b);
	ck_assert_str_ne(a, b);
	kv_gguf_free(on_disk);
	kv_gguf_free(in_memory);
	kv_gguf_free(other);
	free(image.bytes);

	ck_assert_int_eq(ftruncate(fd, 0), 0);
	ck_assert_int_eq(kv_gguf_open(path, &on_disk), -EINVAL);
	unlink(path);
	ck_assert_int_eq(kv_gguf_open(path, &on_disk), -ENOENT);
	ck_assert_ptr_nonnull(strstr(kv_engine_error_text(), path));
	ck_assert_int_eq(kv_gguf_open("/tmp", &on_disk), -EINVAL);
}
END_TEST

START_TEST(the_tiny_model_is_always_the_same)
{
	char a[KV_GGUF_DIGEST_BYTES], b[KV_GGUF_DIGEST_BYTES];
	struct kv_gguf *file;

	ck_assert_int_eq(kv_tiny_new("tiny", &file), 0);
	kv_gguf_digest(file, a);
	kv_gguf_free(file);
	ck_assert_int_eq(kv_tiny_new("tiny", &file), 0);
	kv_gguf_digest(file, b);
	kv_gguf_free(file);
	ck_assert_str_eq(a, b);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("engine/gguf");
	TCase *tests = tcase_create("tests");
	SRunner *runner;
	int n_failed;

	tcase_set_timeout(tests, 120);
	tcase_add_loop_test(tests, a_sound_file_of_both_versions_is_read_back, 2, 4);
	tcase_add_test(tests, what_is_missing_or_of_another_type_is_said);
	tcase_add_test(tests, a_file_cut_at_any_byte_is_refused);
	tcase_add_test(tests, a_file_with_any_byte_changed_is_refused_or_read);
	tcase_add_loop_test(tests, each_kind_of_damage_is_named, 0,
			    sizeof(broken) / sizeof(broken[0]));
	tcase_add_test(tests, a_tensor_of_an_unknown_type_is_refused_when_it_is_asked_for);
	tcase_add_test(tests, a_file_on_disk_has_the_digest_of_its_bytes);
	tcase_add_test(tests, the_tiny_model_is_always_the_same);
	suite_add_tcase(suite, tests);
	runner = srunner_create(suite);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
