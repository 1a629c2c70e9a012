/* SPDX-License-Identifier: Apache-2.0 */
/* Writing K and V into blocks, and copying blocks, on every backend of the device. */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "include/internal/error.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/number.h"
#include "tests/support/expect.h"
#include "tests/kernels/problem.h"
#include "tests/kernels/run.h"

#define COUNT(a) (int)(sizeof(a) / sizeof((a)[0]))

/* Of a view with K and V side by side in a block, in any of the layouts. */
static struct kv_view view_of(int dtype, int size, int heads, int dim, int gap, bool head_major,
			      float scale)
{
	int64_t row = (int64_t)(dim + gap) * (int64_t)kv_dtype_bytes(dtype);
	struct kv_view view = {.block_tokens = size,
			       .n_heads = heads,
			       .head_dim = dim,
			       .dtype = dtype,
			       .scale = scale};

	view.token_stride = head_major ? row : row * heads;
	view.head_stride = head_major ? row * size : row;
	view.block_stride = row * heads * size;
	return view;
}

static int64_t offset_of(const struct kv_view *view, int64_t block, int64_t token, int64_t head)
{
	return block * view->block_stride + token * view->token_stride + head * view->head_stride;
}

/* What goes into the cache: every kind of number there is. */
static double input(int t, int i)
{
	static const double kinds[] = {0.0,	 -0.0,	  NAN,	    INFINITY, -INFINITY, 448,
				       464,	 -1000,	  65504,    65520,    1e38,	 0x1p-9,
				       0x1p-10,	 0x3p-11, 0x1p-24,  0x1p-25,  0x3p-26,	 0x1p-126,
				       0x1p-149, 17,	  0x1.1p4f, 1.0625,   1.1875,	 -0x1.5p-7};

	if (i % 5 == 0)
		return kinds[(t * 7 + i / 5) % COUNT(kinds)];
	return 10 * number_random(3, (uint64_t)t, (uint64_t)i, 0);
}

/* Element @i of token @t goes to @slot of @view: what then lies there. */
static void expect_token(const struct kv_view *view, char *pool, const void *from, int64_t stride,
			 int dtype, int64_t t, int64_t slot)
{
	for (int64_t h = 0; h < view->n_heads; h++) {
		for (int64_t d = 0; d < view->head_dim; d++) {
			int64_t i = t * stride + h * view->head_dim + d;
			char *to = pool + offset_of(view, slot / view->block_tokens,
						    slot % view->block_tokens, h);
			uint32_t code = number_code(from, i, dtype);
			float x = (float)number_decode(dtype, code);

			if (dtype != view->dtype)
				code = number_encode(view->dtype, (double)(x / view->scale));
			number_set(to, d, view->dtype, code);
		}
	}
}

static bool same_number(int dtype, uint32_t a, uint32_t b)
{
	return a == b || (isnan(number_decode(dtype, a)) && isnan(number_decode(dtype, b)));
}

#define N_TOKENS 45

static void check_write(const struct kv_attn_backend *backend, const struct kv_view *k,
			const struct kv_view *v, int dtype, int pad)
{
	const struct kv_view *views[] = {k, v};
	const int n = N_TOKENS, n_blocks = n / k->block_tokens + 3;
	int64_t slots[N_TOKENS];
	struct kv_write_args args = {.size = sizeof(args),
				     .device = buffer_device,
				     .dtype = dtype,
				     .n_tokens = n,
				     .slots = buffer_new(sizeof(slots)),
				     .k = *k,
				     .v = *v};
	char *right[2], *got;
	void *from[2];

	for (int t = 0; t < n; t++) /* all over the pool, each slot once; some tokens are padding */
		slots[t] = t % 6 == 4 ? -1 - t : (t * 7 + 3) % (n_blocks * k->block_tokens);
	for (int a = 0; a < n_blocks * k->block_tokens; a++)
		for (int t = 0, seen = 0; t < n; t++)
			if (slots[t] == a && seen++)
				slots[t] = -1;
	buffer_put((void *)(uintptr_t)args.slots, slots, sizeof(slots));
	for (int i = 0; i < 2; i++) {
		int64_t stride = views[i]->n_heads * views[i]->head_dim + pad;
		size_t pool_bytes = (size_t)(views[i]->block_stride * n_blocks);
		size_t bytes = (size_t)(n * stride) * kv_dtype_bytes(dtype);
		char *image = malloc(bytes);
		void *pool = buffer_new(pool_bytes);

		for (int64_t e = 0; e < n * stride; e++)
			number_set(image, e, dtype,
				   number_encode(dtype,
						 input((int)(e / stride), (int)(e % stride) + i)));
		right[i] = malloc(pool_bytes);
		memset(right[i], 0xa5, pool_bytes);
		for (int t = 0; t < n; t++)
			if (slots[t] >= 0)
				expect_token(views[i], right[i], image, stride, dtype, t, slots[t]);
		from[i] = buffer_new(bytes);
		buffer_put(from[i], image, bytes);
		buffer_fill(pool, 0xa5, pool_bytes);
		*(i ? &args.value : &args.key) = from[i];
		*(i ? &args.value_stride : &args.key_stride) = pad ? stride : 0;
		*(i ? &args.v.base : &args.k.base) = pool;
		free(image);
	}
	ck_assert_msg(kv_write_on(backend, &args) == 0, "%s: %s", backend->name, kv_error_text());
	for (int i = 0; i < 2; i++) {
		const struct kv_view *view = views[i];
		size_t pool_bytes = (size_t)(view->block_stride * n_blocks);
		int64_t n_elements = (int64_t)(pool_bytes / kv_dtype_bytes(view->dtype));

		got = malloc(pool_bytes);
		buffer_get(got, i ? args.v.base : args.k.base, pool_bytes);
		for (int64_t e = 0; e < n_elements; e++)
			expect(same_number(view->dtype, number_code(got, e, view->dtype),
					   number_code(right[i], e, view->dtype)),
			       "%s: %c, type %d to %d: element %lld is 0x%x, right is 0x%x",
			       backend->name, "KV"[i], dtype, view -> dtype, (long long)e,
			       number_code(got, e, view->dtype),
			       number_code(right[i], e, view->dtype));
		if (dtype == view->dtype) /* NaN too */
			ck_assert_mem_eq(got, right[i], pool_bytes);
		free(got);
		free(right[i]);
		buffer_free(from[i]);
		buffer_free(i ? args.v.base : args.k.base);
	}
	buffer_free((void *)(uintptr_t)args.slots);
}

START_TEST(tokens_are_written_to_their_slots_and_nowhere_else)
{
	static const int dims[] = {1, 8, 40, 64, 129, 256};
	static const int sizes[] = {1, 16, 7};
	int dim = dims[_i];

	for (int n = 0; n < 3 * 4 * 4 * 2 * 3; n++) {
		int dtype = KV_F32 + n % 3, k_dtype = KV_F32 + n / 3 % 4,
		    v_dtype = KV_F32 + n / 12 % 4;
		bool head_major = n / 48 % 2;
		int gap = n / 96 % 3, size = sizes[(n + _i) % 3];
		struct kv_view k = view_of(k_dtype, size, 3, dim, gap, head_major,
					   k_dtype == KV_F8_E4M3 ? 0.3f : 1);
		struct kv_view v = view_of(v_dtype, size, 3, dim == 40 ? 24 : dim, gap, head_major,
					   v_dtype == KV_F8_E4M3 ? 0.125f : 1);

		for (int i = 0; problem_backends()[i]; i++)
			check_write(problem_backends()[i], &k, &v, dtype, n % 2 ? 5 : 0);
	}
}
END_TEST

/* D03: 64 tokens in a batch padded to 128 rows; the padding's K and V are NaN. */
START_TEST(padded_rows_touch_nothing)
{
	const int heads = 2, dim = 64, n = 128;
	int64_t row = heads * dim * 2;
	int64_t slots[128];
	char *from = malloc((size_t)(n * row)), *got = malloc((size_t)(80 * row));

	for (int t = 0; t < n; t++)
		slots[t] = t < 64 ? 16 + t : -1;
	memset(from, 0xff, (size_t)(n * row));
	for (int64_t e = 0; e < 64 * heads * dim; e++)
		number_set(from, e, KV_BF16,
			   number_encode(KV_BF16, number_random(4, (uint64_t)e, 0, 0)));
	for (int i = 0; problem_backends()[i]; i++) {
		struct kv_view view = view_of(KV_BF16, 16, heads, dim, 0, false, 1);
		struct kv_write_args args = {.size = sizeof(args),
					     .device = buffer_device,
					     .dtype = KV_BF16,
					     .n_tokens = n,
					     .key = buffer_new((size_t)(n * row)),
					     .slots = buffer_new(sizeof(slots)),
					     .k = view,
					     .v = view};

		args.value = args.key;
		args.k.base = buffer_new((size_t)(80 * row));
		args.v.base = buffer_new((size_t)(80 * row));
		buffer_put((void *)(uintptr_t)args.key, from, (size_t)(n * row));
		buffer_put((void *)(uintptr_t)args.slots, slots, sizeof(slots));
		buffer_fill(args.k.base, 0x77, (size_t)(80 * row));
		buffer_fill(args.v.base, 0x77, (size_t)(80 * row));
		ck_assert_msg(kv_write_on(problem_backends()[i], &args) == 0, "%s",
			      kv_error_text());
		for (int side = 0; side < 2; side++) {
			buffer_get(got, side ? args.v.base : args.k.base, (size_t)(80 * row));
			for (int64_t b = 0; b < 16 * row; b++)
				expect(got[b] == 0x77, "byte %lld was written", (long long)b);
			ck_assert_mem_eq(got + 16 * row, from, (size_t)(64 * row));
		}
		buffer_free((void *)(uintptr_t)args.key);
		buffer_free((void *)(uintptr_t)args.slots);
		buffer_free(args.k.base);
		buffer_free(args.v.base);
	}
	free(from);
	free(got);
}
END_TEST

/* One sequence of 16 tokens in block 0 of 8-bit K and V, every K and V element the same. */
struct fp8_pool {
	struct kv_write_args write;
	struct kv_attention_args attend;
};

static void *upload(const void *from, size_t bytes)
{
	void *p = buffer_new(bytes);

	buffer_put(p, from, bytes);
	return p;
}

static void fp8_pool_init(struct fp8_pool *p, void *pool, float k_scale, float v_scale, float key,
			  float value)
{
	const int heads = 2, dim = 64, n = 16;
	int32_t loc[] = {0, 1}, len = n, table = 0;
	int64_t slots[16];
	float *from = malloc(sizeof(float) * (size_t)(n * heads * dim));
	size_t bytes = sizeof(float) * (size_t)(n * heads * dim);

	*p = (struct fp8_pool){0};
	for (int t = 0; t < n; t++)
		slots[t] = t;
	p->write.size = sizeof(p->write);
	p->write.device = buffer_device;
	p->write.dtype = KV_F32;
	p->write.n_tokens = n;
	p->write.slots = upload(slots, sizeof(slots));
	for (int e = 0; e < n * heads * dim; e++)
		from[e] = key;
	p->write.key = upload(from, bytes);
	for (int e = 0; e < n * heads * dim; e++)
		from[e] = value;
	p->write.value = upload(from, bytes);
	p->write.k = view_of(KV_F8_E4M3, 16, heads, dim, 0, false, k_scale);
	p->write.v = view_of(KV_F8_E4M3, 16, heads, dim, 0, false, v_scale);
	p->write.k.block_stride *= 2;
	p->write.v.block_stride *= 2;
	p->write.k.base = pool;
	p->write.v.base = (char *)pool + n * heads * dim;

	p->attend.size = sizeof(p->attend);
	p->attend.device = buffer_device;
	p->attend.dtype = KV_F32;
	p->attend.n_seqs = p->attend.n_tokens = p->attend.table_width = 1;
	p->attend.n_heads_q = heads;
	p->attend.max_query_len = 1;
	p->attend.max_seq_len = n;
	p->attend.q = p->write.key; /* a row of it */
	p->attend.out = buffer_new((size_t)(heads * dim) * sizeof(float));
	p->attend.lse = buffer_new((size_t)heads * sizeof(float));
	p->attend.query_start_loc = upload(loc, sizeof(loc));
	p->attend.seq_lens = upload(&len, sizeof(len));
	p->attend.block_table = upload(&table, sizeof(table));
	p->attend.k = p->write.k;
	p->attend.v = p->write.v;
	p->attend.window_left = -1;
	p->attend.causal = 1;
	free(from);
}

static void fp8_pool_deinit(struct fp8_pool *p)
{
	buffer_free((void *)(uintptr_t)p->write.slots);
	buffer_free((void *)(uintptr_t)p->write.key);
	buffer_free((void *)(uintptr_t)p->write.value);
	buffer_free(p->attend.out);
	buffer_free(p->attend.lse);
	buffer_free((void *)(uintptr_t)p->attend.query_start_loc);
	buffer_free((void *)(uintptr_t)p->attend.seq_lens);
	buffer_free((void *)(uintptr_t)p->attend.block_table);
}

/*
 * A reader's view of the pool: q is all ones, so out is the value exactly, and from the scores,
 * all equal, lse = 64 / 8 * key + ln 16.
 */
static bool reads(const struct fp8_pool *p, const struct kv_attn_backend *backend, float key,
		  float value)
{
	float out[2 * 64], lse[2];

	if (kv_attention_on(backend, &p->attend) != 0)
		return false;
	buffer_get(out, p->attend.out, sizeof(out));
	buffer_get(lse, p->attend.lse, sizeof(lse));
	for (int i = 0; i < COUNT(out); i++)
		if (out[i] != value)
			return false;
	return fabsf(lse[0] - (8 * key + logf(16))) < 1e-5f;
}

/* D34. On the host the reader is another process that got the pool, the scales, and no more. */
START_TEST(eight_bit_kv_uses_one_scale_on_both_sides)
{
	const size_t bytes = 2 * 16 * 2 * 64;
	int n_ran = 0;

	for (int i = 0; problem_backends()[i]; i++) {
		const struct kv_attn_backend *backend = problem_backends()[i];
		bool host = buffer_device == KV_DEVICE_HOST;
		void *pool = host ? mmap(NULL, bytes, PROT_READ | PROT_WRITE,
					 MAP_SHARED | MAP_ANONYMOUS, -1, 0)
				  : buffer_new(bytes);
		unsigned char codes[2 * 16 * 2 * 64];
		struct fp8_pool p;
		int status = 0;

		fp8_pool_init(&p, pool, 0.0625f, 0.125f, 1.0f, 0.75f);
		ck_assert_msg(kv_write_on(backend, &p.write) == 0, "%s", kv_error_text());
		/* f32 in and out: not every backend has that; one that must is among them. */
		if (kv_attention_on(backend, &p.attend) == -ENOTSUP) {
			fp8_pool_deinit(&p);
			if (host)
				munmap(pool, bytes);
			else
				buffer_free(pool);
			continue;
		}
		n_ran++;
		buffer_get(codes, pool, bytes);
		for (size_t c = 0; c < bytes; c++)
			ck_assert(number_decode(KV_F8_E4M3, codes[c]) ==
				  (c < bytes / 2 ? 16.0 : 6.0));
		if (host) {
			pid_t pid = fork();

			if (pid == 0)
				_exit(reads(&p, backend, 1.0f, 0.75f) ? 0 : 1);
			ck_assert_int_eq(waitpid(pid, &status, 0), pid);
			ck_assert_int_eq(status, 0);
		} else {
			ck_assert(reads(&p, backend, 1.0f, 0.75f));
		}

		p.attend.v.scale = 0; /* a reader who did not receive the scales */
		ck_assert_int_eq(kv_attention_on(backend, &p.attend), -EINVAL);
		ck_assert_ptr_nonnull(strstr(kv_error_text(), "v.scale"));
		p.attend.v.scale = NAN;
		ck_assert_int_eq(kv_attention_on(backend, &p.attend), -EINVAL);
		p.write.k.scale = 0;
		ck_assert_int_eq(kv_write_on(backend, &p.write), -EINVAL);
		ck_assert_ptr_nonnull(strstr(kv_error_text(), "k.scale"));
		fp8_pool_deinit(&p);

		fp8_pool_init(&p, pool, 1, 1, 1000, -1000);
		ck_assert_int_eq(kv_write_on(backend, &p.write), 0);
		buffer_get(codes, pool, bytes);
		for (size_t c = 0; c < bytes; c++)
			expect(codes[c] == (c < bytes / 2 ? 0x7e : 0xfe), "0x%x is not +-448",
			       codes[c]);
		fp8_pool_deinit(&p);
		if (host)
			munmap(pool, bytes);
		else
			buffer_free(pool);
	}
	ck_assert_int_gt(n_ran, 0);
}
END_TEST

#define D01_SIDE ((size_t)64000 * 16 * 32 * 128 * 2) /* bytes of K, and of V: 7.8 GiB */

/* K (or V) element @i of block @block, as stored. */
static uint16_t d01_code(int side, int block, int64_t i)
{
	return (uint16_t)number_encode(
		KV_F16, number_random(5, (uint64_t)side, (uint64_t)block, (uint64_t)i));
}

/* Reads a block of K or V back. */
static void d01_read(const void *pool, int side, int block, uint16_t *to)
{
	size_t bytes = (size_t)16 * 32 * 128 * 2;

	buffer_get(to, (const char *)pool + (size_t)side * D01_SIDE + (size_t)block * bytes, bytes);
}

/* Three sequences of one block each, in a small pool of such blocks. */
static struct problem *d01_small(int heads, int dim)
{
	struct problem_spec spec = problem_default();

	spec.n_heads_kv = heads;
	spec.group = 1;
	spec.dk = spec.dv = dim;
	spec.kind = KV_LAYOUT_PAGED;
	for (int b = 0; b < 3; b++) {
		spec.q_lens[b] = 1;
		spec.lens[b] = 16;
	}
	spec.n_seqs = 3;
	return problem_new(&spec);
}

/* D01. Blocks of 16 tokens, 32 heads of 128, 64,000 of them: offsets pass 2^31 elements. */
START_TEST(a_pool_past_two_to_the_31_elements_is_read_and_written_at_the_right_place)
{
	static const int blocks[] = {1, 32000, 63999}, untouched[] = {0, 31999, 2, 63998};
	static const int others[] = {32767, 32768, 16384}; /* where offsets of 32 bits would wrap */
	const int heads = 32, dim = 128, size = 16, n = 48;
	const int64_t per_block = heads * dim * size;
	size_t bytes = (size_t)per_block * 2;
	uint16_t *from = malloc(3 * bytes), *got = malloc(bytes);
	int32_t loc[] = {0, 1, 2, 3}, lens[] = {16, 16, 16}, table[] = {1, 32000, 63999};
	int64_t slots[48];
	char *pool;
	int n_ran = 0;

	if (buffer_device == KV_DEVICE_CUDA && buffer_bytes_free() < (size_t)20 << 30) {
		printf("skipped: a pool of 15.6 GiB needs 20 GiB free on the GPU\n");
		return;
	}
	pool = buffer_new_sparse(2 * D01_SIDE);
	for (int t = 0; t < n; t++)
		slots[t] = blocks[t / size] * size + t % size;
	for (int i = 0; problem_backends()[i]; i++) {
		const struct kv_attn_backend *backend = problem_backends()[i];
		struct problem *p = d01_small(heads, dim);

		if (!problem_can_run(p, backend)) {
			problem_free(p);
			continue;
		}
		n_ran++;
		struct kv_view view = view_of(KV_F16, size, heads, dim, 0, false, 1);
		struct kv_write_args write = {.size = sizeof(write),
					      .device = buffer_device,
					      .dtype = KV_F16,
					      .n_tokens = n,
					      .slots = upload(slots, sizeof(slots)),
					      .k = view,
					      .v = view};
		struct kv_attention_args attend;
		size_t out_bytes = (size_t)3 * 32 * 128 * 2;
		char *out = malloc(out_bytes), *right = malloc(out_bytes);
		float *lse;
		void *small;

		write.k.base = pool;
		write.v.base = pool + D01_SIDE;
		for (int side = 0; side < 2; side++) {
			for (int b = 0; b < 3; b++)
				for (int64_t e = 0; e < per_block; e++)
					from[b * per_block + e] = d01_code(side, blocks[b], e);
			*(side ? &write.value : &write.key) = upload(from, 3 * bytes);
		}
		ck_assert_msg(kv_write_on(backend, &write) == 0, "%s", kv_error_text());
		for (int side = 0; side < 2; side++) {
			for (int b = 0; b < 3; b++) {
				d01_read(pool, side, blocks[b], got);
				for (int64_t e = 0; e < per_block; e++)
					expect(got[e] == d01_code(side, blocks[b], e),
					       "block %d differs", blocks[b]);
			}
			for (int b = 0; b < COUNT(untouched) + COUNT(others); b++) {
				int id = b < COUNT(untouched) ? untouched[b]
							      : others[b - COUNT(untouched)];

				d01_read(pool, side, id, got);
				for (int64_t e = 0; e < per_block; e++)
					expect(got[e] == 0, "block %d was written", id);
			}
		}

		problem_check(p, backend);
		attend = p->args;
		for (int side = 0; side < 2; side++)
			for (int b = 0; b < 3; b++) {
				struct kv_view *small_view = side ? &p->args.v : &p->args.k;
				int32_t id;

				for (int64_t e = 0; e < per_block; e++)
					got[e] = d01_code(side, blocks[b], e);
				buffer_get(&id, p->args.block_table + b, sizeof(id));
				buffer_put((char *)small_view->base + id * small_view->block_stride,
					   got, bytes);
			}
		problem_run(p, backend, &small, &lse);
		memcpy(right, small, out_bytes);
		attend.k = write.k;
		attend.v = write.v;
		attend.block_table = upload(table, sizeof(table));
		attend.query_start_loc = upload(loc, sizeof(loc));
		attend.seq_lens = upload(lens, sizeof(lens));
		attend.out = buffer_new(out_bytes);
		ck_assert_msg(kv_attention_on(backend, &attend) == 0, "%s", kv_error_text());
		buffer_get(out, attend.out, out_bytes);
		ck_assert_mem_eq(out, right, out_bytes);

		buffer_free((void *)(uintptr_t)write.slots);
		buffer_free((void *)(uintptr_t)write.key);
		buffer_free((void *)(uintptr_t)write.value);
		buffer_free((void *)(uintptr_t)attend.block_table);
		buffer_free((void *)(uintptr_t)attend.query_start_loc);
		buffer_free((void *)(uintptr_t)attend.seq_lens);
		buffer_free(attend.out);
		problem_free(p);
		free(small);
		free(lse);
		free(out);
		free(right);
	}
	ck_assert_int_gt(n_ran, 0);
	free(from);
	free(got);
	buffer_free_sparse(pool, 2 * D01_SIDE);
}
END_TEST

#define D02_PAGES 262145 /* of 32 latent vectors of 512: the last begins at element 2^32 */

/* D02. A backend without latents of 512 says so; the others, and every write and copy, reach the end. */
START_TEST(a_latent_pool_past_two_to_the_32_elements_shows_each_page_its_own_values)
{
	const int dim = 512, size = 32, last = D02_PAGES - 1;
	const size_t page = (size_t)size * dim * 2, bytes = D02_PAGES * page;
	uint16_t *ones = malloc(2 * page), *out = malloc((size_t)2 * dim * 2), *got = malloc(page);
	int32_t loc[] = {0, 1, 2}, lens[] = {32, 32}, table[] = {0, last};
	int64_t slots[64];
	char *pool;
	int n_ran = 0;

	if (buffer_device == KV_DEVICE_CUDA && buffer_bytes_free() < (size_t)10 << 30) {
		printf("skipped: a pool of 8 GiB needs 10 GiB free on the GPU\n");
		return;
	}
	for (int t = 0; t < 64; t++) {
		slots[t] = (int64_t)table[t / size] * size + t % size;
		for (int d = 0; d < dim; d++)
			ones[t * dim + d] = (uint16_t)number_encode(KV_F16, t < size ? 1 : 2);
	}
	for (int i = 0; problem_backends()[i]; i++) {
		const struct kv_attn_backend *backend = problem_backends()[i];
		struct kv_view view = view_of(KV_F16, size, 1, dim, 0, false, 1);
		int32_t pairs[] = {last, 2};
		struct kv_write_args write = {.size = sizeof(write),
					      .device = buffer_device,
					      .dtype = KV_F16,
					      .n_tokens = 64,
					      .key = upload(ones, 2 * page),
					      .slots = upload(slots, sizeof(slots))};
		struct kv_attention_args attend = {.size = sizeof(attend),
						   .device = buffer_device,
						   .dtype = KV_F16,
						   .n_seqs = 2,
						   .n_tokens = 2,
						   .n_heads_q = 1,
						   .max_query_len = 1,
						   .max_seq_len = 32,
						   .table_width = 1,
						   .latent_dim = dim,
						   .q = write.key,
						   .sm_scale = 0.04F,
						   .window_left = -1,
						   .causal = 1};
		struct kv_copy_args copy = {.size = sizeof(copy),
					    .device = buffer_device,
					    .n_pairs = 1,
					    .pairs = pairs,
					    .n_views = 1,
					    .views = &view};
		int r;

		pool = buffer_new_sparse(bytes);
		view.base = pool;
		write.value = write.key; /* one vector is K and V */
		write.k = write.v = attend.k = view;
		ck_assert_msg(kv_write_on(backend, &write) == 0, "%s", kv_error_text());
		ck_assert_msg(kv_copy_blocks_on(backend, &copy) == 0, "%s", kv_error_text());
		buffer_get(got, pool + 2 * page, page);
		ck_assert_mem_eq(got, ones + size * dim, page);
		buffer_get(got, pool + page, page);
		for (int e = 0; e < size * dim; e++)
			expect(got[e] == 0, "page 1 was written");

		attend.block_table = upload(table, sizeof(table));
		attend.query_start_loc = upload(loc, sizeof(loc));
		attend.seq_lens = upload(lens, sizeof(lens));
		attend.out = buffer_new((size_t)2 * dim * 2);
		r = kv_attention_on(backend, &attend);
		if (r == -ENOTSUP) {
			expect(strstr(kv_error_text(), backend->name), "%s", kv_error_text());
		} else {
			n_ran++;
			ck_assert_msg(r == 0, "%s", kv_error_text());
			buffer_get(out, attend.out, (size_t)2 * dim * 2);
			for (int e = 0; e < 2 * dim; e++)
				expect(out[e] == ones[(e < dim ? 0 : size * dim) + e % dim],
				       "sequence %d reads another page", e / dim);
		}
		buffer_free((void *)(uintptr_t)write.key);
		buffer_free((void *)(uintptr_t)write.slots);
		buffer_free((void *)(uintptr_t)attend.block_table);
		buffer_free((void *)(uintptr_t)attend.query_start_loc);
		buffer_free((void *)(uintptr_t)attend.seq_lens);
		buffer_free(attend.out);
		buffer_free_sparse(pool, bytes);
	}
	ck_assert_int_gt(n_ran, 0);
	free(ones);
	free(out);
	free(got);
}
END_TEST

/* Copies in a model of the pool what the call must copy in the pool. */
static void model_copy(char *pool, const struct kv_view *view, int64_t from, int64_t to)
{
	int64_t row = view->head_dim * (int64_t)kv_dtype_bytes(view->dtype);

	for (int64_t t = 0; t < view->block_tokens; t++)
		for (int64_t h = 0; h < view->n_heads; h++)
			memcpy(pool + offset_of(view, to, t, h), pool + offset_of(view, from, t, h),
			       (size_t)row);
}

#define COPY_VIEWS 29 /* more than one launch takes */

/*
 * A pool whose views are of all types and layouts, some with gaps; pairs in a random order. Views
 * and pairs are more than a launch of CUDA takes.
 */
START_TEST(blocks_are_copied_in_every_view_and_gaps_stay_as_they_were)
{
	static const int pair_counts[] = {1, 2, 300, 600};
	const int n_blocks = 1300, n_pairs = pair_counts[_i];
	const int n_views = n_pairs > 100 ? COPY_VIEWS : 3 + n_pairs;

	for (int i = 0; problem_backends()[i]; i++) {
		struct kv_view views[COPY_VIEWS];
		int64_t starts[COPY_VIEWS], block_bytes = 0;
		kv_block_id *pairs = malloc(sizeof(*pairs) * 2 * (size_t)n_pairs);
		struct kv_copy_args args = {.size = sizeof(args),
					    .device = buffer_device,
					    .n_pairs = n_pairs,
					    .pairs = pairs,
					    .n_views = n_views,
					    .views = views};
		size_t bytes;
		char *right, *got, *pool;

		for (int v = 0; v < n_views; v++) {
			int dtype = KV_F32 + v % 4, dim = v % 5 ? 8 : 3 + v, gap = v % 3 == 2;

			views[v] = view_of(dtype, 1 + v % 4, 1 + v % 2, dim, gap, v % 7 > 3, 1);
			starts[v] = block_bytes;
			block_bytes += (views[v].block_stride + 15) / 16 * 16;
		}
		bytes = (size_t)(block_bytes * n_blocks);
		right = malloc(bytes);
		got = malloc(bytes);
		for (size_t b = 0; b < bytes; b++)
			right[b] = (char)(b * 2654435761u >> 13);
		for (int p = 0; p < n_pairs; p++) {
			pairs[2 * p] = (p * 2 + 1) % n_blocks; /* odd; to even ones, each once */
			pairs[2 * p + 1] = (p * 14 + 4) % n_blocks;
		}
		pairs[0] = pairs[1]; /* onto itself: skipped */
		pool = buffer_new(bytes);
		buffer_put(pool, right, bytes);
		for (int v = 0; v < n_views; v++) {
			views[v].base = pool + starts[v];
			views[v].block_stride = block_bytes;
		}
		ck_assert_msg(kv_copy_blocks_on(problem_backends()[i], &args) == 0, "%s",
			      kv_error_text());
		buffer_get(got, pool, bytes);
		buffer_free(pool);
		for (int p = 0; p < n_pairs; p++)
			for (int v = 0; v < n_views && pairs[2 * p] != pairs[2 * p + 1]; v++)
				model_copy(right + starts[v], &views[v], pairs[2 * p],
					   pairs[2 * p + 1]);
		ck_assert_msg(memcmp(got, right, bytes) == 0, "%s", problem_backends()[i]->name);
		free(right);
		free(got);
		free(pairs);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("kernels/blocks");
	TCase *tcase = tcase_create("blocks");

	tcase_set_timeout(tcase, 300);
	tcase_add_loop_test(tcase, tokens_are_written_to_their_slots_and_nowhere_else, 0, 6);
	tcase_add_test(tcase, padded_rows_touch_nothing);
	tcase_add_test(tcase, eight_bit_kv_uses_one_scale_on_both_sides);
	tcase_add_test(tcase,
		       a_pool_past_two_to_the_31_elements_is_read_and_written_at_the_right_place);
	tcase_add_test(tcase,
		       a_latent_pool_past_two_to_the_32_elements_shows_each_page_its_own_values);
	tcase_add_loop_test(tcase, blocks_are_copied_in_every_view_and_gaps_stay_as_they_were, 0,
			    4);
	suite_add_tcase(suite, tcase);
	return run_on_device(suite);
}
