/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments that are wrong, and which backend is chosen. */
#include <check.h>
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "include/internal/error.h"
#include "kernels/attention.h"

#define T      8 /* tokens */
#define HEADS  2
#define DIM    8
#define ROOM   (T * HEADS * DIM)
#define N_LONG (600 * 9 * 64) /* elements of a call that is worth threads */

static float pool[4 * ROOM], q[ROOM], out[ROOM], lse[T * HEADS];
static int64_t slots[T];
static int32_t loc[] = {0, 1, 4}, lens[] = {5, 8}, table[] = {0, 1, 1, 0};

static const struct kv_view good_view = {pool,
					 sizeof(float) * HEADS *DIM * 4,
					 sizeof(float) * HEADS *DIM,
					 sizeof(float) * DIM,
					 4,
					 HEADS,
					 DIM,
					 KV_F32,
					 1,
					 0};

static struct kv_attention_args good_attention(void)
{
	return (struct kv_attention_args){.size = sizeof(struct kv_attention_args),
					  .device = KV_DEVICE_HOST,
					  .dtype = KV_F32,
					  .n_seqs = 2,
					  .n_tokens = T,
					  .n_heads_q = HEADS,
					  .max_query_len = 3,
					  .max_seq_len = 8,
					  .table_width = 2,
					  .q = q,
					  .out = out,
					  .lse = lse,
					  .query_start_loc = loc,
					  .seq_lens = lens,
					  .block_table = table,
					  .k = good_view,
					  .v = good_view,
					  .window_left = -1,
					  .causal = 1};
}

static struct kv_write_args good_write(void)
{
	return (struct kv_write_args){.size = sizeof(struct kv_write_args),
				      .device = KV_DEVICE_HOST,
				      .dtype = KV_F32,
				      .n_tokens = T,
				      .key = q,
				      .value = q,
				      .slots = slots,
				      .k = good_view,
				      .v = good_view};
}

/* In a list of these: the @i-th runs its statement and returns the field that is now wrong. */
#define BREAK(name, statement) \
	if (i-- == 0) {        \
		statement;     \
		return name;   \
	}

static const char *break_view(int i, struct kv_view *v)
{
	BREAK("dtype", v->dtype = 0)
	BREAK("dtype", v->dtype = 5)
	BREAK("block_tokens", v->block_tokens = 0)
	BREAK("block_tokens", v->block_tokens = KV_MAX_BLOCK_TOKENS + 1)
	BREAK("n_heads", v->n_heads = 0)
	BREAK("n_heads", v->n_heads = 65536)
	BREAK("head_dim", v->head_dim = 0)
	BREAK("head_dim", v->head_dim = 65537)
	BREAK("base", v->base = NULL)
	BREAK("base", v->base = (char *)v->base + 2)
	BREAK("token_stride", v->token_stride = DIM * 4 - 4)
	BREAK("token_stride", v->token_stride = -HEADS * DIM * 4)
	BREAK("token_stride", v->token_stride = INT64_MAX / 4 * 4)
	BREAK("head_stride", v->head_stride = DIM * 4 - 4)
	BREAK("head_stride", v->head_stride = DIM * 4 + 2)
	BREAK("block_stride", v->block_stride -= 4)
	BREAK("block_stride", v->block_stride = 0)
	BREAK("scale", v->scale = 2)
	BREAK("scale", v->scale = 0)
	BREAK("scale", (v->dtype = KV_F8_E4M3, v->scale = 0))
	BREAK("scale", (v->dtype = KV_F8_E4M3, v->scale = -1))
	BREAK("scale", (v->dtype = KV_F8_E4M3, v->scale = NAN))
	BREAK("scale", (v->dtype = KV_F8_E4M3, v->scale = INFINITY))
	return NULL;
}

static const char *break_attention(int i, struct kv_attention_args *a)
{
	BREAK("size", a->size = 0)
	BREAK("size", a->size += 8)
	BREAK("device", a->device = 0)
	BREAK("dtype", a->dtype = 0)
	BREAK("dtype", a->dtype = KV_F8_E4M3)
	BREAK("n_seqs", a->n_seqs = -1)
	BREAK("n_tokens", a->n_tokens = -1)
	BREAK("n_heads_q", a->n_heads_q = 0)
	BREAK("n_heads_q", a->n_heads_q = 3)
	BREAK("max_query_len", a->max_query_len = -1)
	BREAK("max_seq_len", a->max_seq_len = -1)
	BREAK("table_width", a->table_width = -1)
	BREAK("q: ", a->q = NULL)
	BREAK("q: ", a->q = (const char *)q + 1)
	BREAK("out", a->out = NULL)
	BREAK("out", a->out = q)
	BREAK("lse", a->lse = (float *)(void *)((char *)lse + 2))
	BREAK("query_start_loc", a->query_start_loc = NULL)
	BREAK("seq_lens", a->seq_lens = NULL)
	BREAK("block_table", a->block_table = NULL)
	BREAK("sm_scale", a->sm_scale = NAN)
	BREAK("softcap", a->softcap = -1)
	BREAK("softcap", a->softcap = INFINITY)
	BREAK("window_left", a->window_left = -2)
	BREAK("causal", a->causal = 2)
	BREAK("invariant", a->invariant = 2)
	BREAK("workspace", (a->workspace_bytes = 1, a->workspace = NULL))
	BREAK("v.n_heads", (a->v.n_heads = 1, a->v.head_stride = 0))
	BREAK("v.block_tokens", a->v.block_tokens = 3)
	BREAK("query_start_loc[0]", loc[0] = -1)
	BREAK("query_start_loc[1]", (loc[0] = 2, loc[1] = 1))
	BREAK("query_start_loc[2]", a->max_query_len = 2)
	BREAK("query_start_loc[2]", a->n_tokens = 3)
	BREAK("seq_lens[0]", lens[0] = -1)
	BREAK("seq_lens[1]", a->max_seq_len = 7)
	BREAK("seq_lens[1]", a->table_width = 1; lens[0] = 1)
	BREAK("block_table[1][0]", table[2] = -1)
	return NULL;
}

static const char *break_write(int i, struct kv_write_args *a)
{
	BREAK("size", a->size = 0)
	BREAK("device", a->device = 3)
	BREAK("dtype", a->dtype = KV_F8_E4M3)
	BREAK("n_tokens", a->n_tokens = -1)
	BREAK("key: ", a->key = NULL)
	BREAK("value: ", a->value = NULL)
	BREAK("value: ", a->value = (const char *)q + 2)
	BREAK("slots", a->slots = NULL)
	BREAK("key_stride", a->key_stride = HEADS * DIM - 1)
	BREAK("value_stride", a->value_stride = -1)
	BREAK("v.n_heads", (a->v.n_heads = 1, a->v.head_stride = 0))
	return NULL;
}

static kv_block_id pairs[] = {0, 1, 2, 3, 4, 4};
static struct kv_view views[2];

static const char *break_copy(int i, struct kv_copy_args *a)
{
	BREAK("size", a->size = 1)
	BREAK("device", a->device = -1)
	BREAK("n_pairs", a->n_pairs = -1)
	BREAK("n_views", a->n_views = -1)
	BREAK("pairs: NULL", a->pairs = NULL)
	BREAK("views: NULL", a->views = NULL)
	BREAK("pairs[1]", pairs[2] = -1)
	BREAK("block 1 is the destination of two", pairs[3] = 1)
	BREAK("block 3 is a source", pairs[0] = 3)
	BREAK("block 4 is the destination of two", pairs[1] = 4)
	BREAK("block 4 is a source", pairs[0] = 4)
	BREAK("views[1].head_dim", views[1].head_dim = 0)
	return NULL;
}

static void expect_refusal(int r, const char *prefix, const char *field)
{
	ck_assert_msg(r == -EINVAL, "%s%s: got %d", prefix, field, r);
	ck_assert_msg(strstr(kv_error_text(), field), "%s%s: text is \"%s\"", prefix, field,
		      kv_error_text());
	ck_assert_msg(strstr(kv_error_text(), prefix), "%s%s: text is \"%s\"", prefix, field,
		      kv_error_text());
}

/* Each test has its own process: what is broken stays broken there alone. */
START_TEST(attention_names_the_field_that_is_wrong)
{
	struct kv_attention_args a = good_attention();
	const char *field;

	ck_assert_msg(kv_attention(&a) == 0, "%s", kv_error_text());
	memset(out, 0x5a, sizeof(out));
	field = break_attention(_i, &a);
	if (!field)
		return;
	expect_refusal(kv_attention(&a), "", field);
	for (size_t i = 0; i < sizeof(out); i++)
		ck_assert(((char *)out)[i] == 0x5a);
}
END_TEST

START_TEST(every_call_names_the_field_of_the_view_that_is_wrong)
{
	struct kv_attention_args attention = good_attention();
	struct kv_write_args write = good_write();
	const char *field;

	if (!break_view(_i, &attention.k))
		return;
	field = break_view(_i, &write.v);
	expect_refusal(kv_attention(&attention), "k.", field);
	expect_refusal(kv_write(&write), "v.", field);
}
END_TEST

START_TEST(write_names_the_field_that_is_wrong)
{
	struct kv_write_args a = good_write();
	const char *field;

	ck_assert_msg(kv_write(&a) == 0, "%s", kv_error_text());
	field = break_write(_i, &a);
	if (field)
		expect_refusal(kv_write(&a), "", field);
}
END_TEST

START_TEST(copy_names_the_field_that_is_wrong)
{
	static float blocks[5 * HEADS * DIM * 4];
	struct kv_copy_args a = {.size = sizeof(a),
				 .device = KV_DEVICE_HOST,
				 .n_pairs = 3,
				 .pairs = pairs,
				 .n_views = 2,
				 .views = views};
	const char *field;

	views[0] = views[1] = good_view;
	views[0].base = views[1].base = blocks;
	ck_assert_msg(kv_copy_blocks(&a) == 0, "%s", kv_error_text());
	field = break_copy(_i, &a);
	if (field)
		expect_refusal(kv_copy_blocks(&a), "", field);
}
END_TEST

START_TEST(nothing_to_do_is_done_without_looking_at_pointers)
{
	struct kv_attention_args attention = good_attention();
	struct kv_write_args write = good_write();
	struct kv_copy_args copy = {.size = sizeof(copy), .device = KV_DEVICE_HOST};

	attention.n_seqs = 0;
	attention.q = attention.out = NULL;
	attention.query_start_loc = attention.seq_lens = attention.block_table = NULL;
	ck_assert_int_eq(kv_attention(&attention), 0);
	write.n_tokens = 0;
	write.key = write.value = NULL;
	write.slots = NULL;
	ck_assert_int_eq(kv_write(&write), 0);
	ck_assert_int_eq(kv_copy_blocks(&copy), 0);
}
END_TEST

START_TEST(table_entries_that_no_query_sees_may_be_anything)
{
	struct kv_attention_args a = good_attention();

	a.window_left = 0;
	table[0] = -1; /* of a window's sequence, freed long ago */
	table[2] = -1;
	lens[0] = 8;
	loc[2] = 2; /* one query each */
	ck_assert_msg(kv_attention(&a) == 0, "%s", kv_error_text());
}
END_TEST

START_TEST(backends_are_listed_and_found)
{
	const char *const *names = kv_backend_names(KV_DEVICE_HOST);

	ck_assert_str_eq(names[0], "cpu");
	ck_assert_str_eq(names[1], "ref");
	ck_assert_ptr_null(names[2]);
	for (int i = 0; kv_backend_names(KV_DEVICE_CUDA)[i]; i++)
		ck_assert_ptr_nonnull(
			kv_attn_find(kv_backend_names(KV_DEVICE_CUDA)[i], KV_DEVICE_CUDA));
	ck_assert_ptr_null(kv_attn_find("ref", KV_DEVICE_CUDA));
	ck_assert_ptr_null(kv_attn_find("", KV_DEVICE_HOST));
}
END_TEST

START_TEST(a_device_that_the_build_lacks_is_refused)
{
	struct kv_write_args a = good_write();

	if (kv_backend_names(KV_DEVICE_CUDA)[0])
		return;
	a.device = KV_DEVICE_CUDA;
	ck_assert_int_eq(kv_write(&a), -ENOTSUP);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "no CUDA"));
}
END_TEST

static void fill(float *x, int n)
{
	for (int i = 0; i < n; i++)
		x[i] = (float)((unsigned)i * 7919u % 1000) / 500 - 1;
}

START_TEST(the_environment_picks_the_backend)
{
	struct kv_attention_args a = good_attention();
	float by[3][ROOM];

	fill(q, ROOM);
	fill(pool, 4 * ROOM);
	setenv("KVCACHED_BACKEND", "ref", 1);
	ck_assert_msg(kv_attention(&a) == 0, "%s", kv_error_text());
	memcpy(by[0], out, sizeof(out));
	ck_assert_int_eq(kv_attention_on(kv_attn_find("ref", KV_DEVICE_HOST), &a), 0);
	memcpy(by[1], out, sizeof(out));
	ck_assert_int_eq(kv_attention_on(kv_attn_find("cpu", KV_DEVICE_HOST), &a), 0);
	memcpy(by[2], out, sizeof(out));
	ck_assert_mem_eq(by[0], by[1], sizeof(out));
	ck_assert_mem_ne(by[0], by[2], sizeof(out));
}
END_TEST

START_TEST(a_backend_that_is_not_there_is_no_reason_to_use_another)
{
	struct kv_write_args a = good_write();

	setenv("KVCACHED_BACKEND", "cudnn", 1);
	ck_assert_int_eq(kv_write(&a), -ENOTSUP);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "KVCACHED_BACKEND=cudnn"));
}
END_TEST

static int count_threads(void)
{
	DIR *dir = opendir("/proc/self/task");
	int n = 0;

	while (readdir(dir))
		n++;
	closedir(dir);
	return n - 2;
}

/* Waits for that: a thread that was joined may be listed for a moment longer. */
static bool settles_to(int n_threads)
{
	for (int ms = 0; ms < 2000 && count_threads() > n_threads; ms++)
		usleep(1000);
	return count_threads() <= n_threads;
}

/* A prefill of 600 tokens, with as many threads as the environment says. */
static void run_long(float *ret_out)
{
	const int heads = 9, dim = 64, len = 600;
	float *k = malloc(sizeof(float) * (size_t)(len * dim)), *x = malloc(sizeof(float) * N_LONG);
	int32_t long_loc[] = {0, len}, long_len = len, ids[600];
	struct kv_view view = {k, dim * 4, dim * 4, 0, 1, 1, dim, KV_F32, 1, 0};
	struct kv_attention_args a = good_attention();

	fill(k, len * dim);
	fill(x, N_LONG);
	for (int i = 0; i < len; i++)
		ids[i] = (i * 7) % len;
	a.n_seqs = 1;
	a.n_tokens = a.max_query_len = a.max_seq_len = a.table_width = len;
	a.n_heads_q = heads;
	a.q = x;
	a.out = ret_out;
	a.lse = NULL;
	a.query_start_loc = long_loc;
	a.seq_lens = &long_len;
	a.block_table = ids;
	a.k = a.v = view;
	if (kv_attention(&a) != 0)
		abort();
	free(k);
	free(x);
}

START_TEST(the_number_of_threads_leaves_no_trace)
{
	static const char *const settings[] = {"1", "2", "5", "64", "nonsense"};
	size_t bytes = sizeof(float) * N_LONG;
	float *shared =
		mmap(NULL, 5 * bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	for (int i = 0; i < 5; i++) {
		pid_t pid = fork();
		int status, n_threads;

		if (pid == 0) {
			setenv("KVCACHED_THREADS", settings[i], 1);
			run_long(shared + (size_t)i * N_LONG);
			usleep(20000);
			n_threads = count_threads(); /* a sanitizer may have its own by now */
			run_long(shared + (size_t)i * N_LONG);
			if (!settles_to(n_threads))
				_exit(1);
			pid = fork(); /* and a child may call again */
			if (pid == 0) {
				run_long(shared + (size_t)i * N_LONG);
				_exit(0);
			}
			_exit(waitpid(pid, &status, 0) == pid && status == 0 ? 0 : 2);
		}
		ck_assert_int_eq(waitpid(pid, &status, 0), pid);
		ck_assert_msg(status == 0, "KVCACHED_THREADS=%s: status 0x%x", settings[i], status);
		ck_assert_mem_eq(shared, shared + (size_t)i * N_LONG, bytes);
	}
	munmap(shared, 5 * bytes);
}
END_TEST

#define MAX_BREAKS 40 /* of any list; an index past a list's end breaks nothing */

int main(void)
{
	Suite *suite = suite_create("kernels/check");
	TCase *tcase = tcase_create("check");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(tcase, attention_names_the_field_that_is_wrong, 0, MAX_BREAKS);
	tcase_add_loop_test(tcase, every_call_names_the_field_of_the_view_that_is_wrong, 0,
			    MAX_BREAKS);
	tcase_add_loop_test(tcase, write_names_the_field_that_is_wrong, 0, MAX_BREAKS);
	tcase_add_loop_test(tcase, copy_names_the_field_that_is_wrong, 0, MAX_BREAKS);
	tcase_add_test(tcase, nothing_to_do_is_done_without_looking_at_pointers);
	tcase_add_test(tcase, table_entries_that_no_query_sees_may_be_anything);
	tcase_add_test(tcase, backends_are_listed_and_found);
	tcase_add_test(tcase, a_device_that_the_build_lacks_is_refused);
	tcase_add_test(tcase, the_environment_picks_the_backend);
	tcase_add_test(tcase, a_backend_that_is_not_there_is_no_reason_to_use_another);
	tcase_add_test(tcase, the_number_of_threads_leaves_no_trace);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_NORMAL);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
