/* SPDX-License-Identifier: Apache-2.0 */
/* alloc/layout.c: no two elements share a byte, sizes are what they should be, errors have names.
 */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/layout.h"
#include "include/internal/error.h"
#include "tests/alloc/random.h"
#include "tests/support/expect.h"

#define MAX_COMPONENTS 12

/* ---- every byte belongs to one element at most ---- */

static const uint8_t dtypes[] = {KV_F32, KV_F16, KV_BF16, KV_F8_E4M3, KV_F8_E5M2};

static void random_layout(struct random *r, struct kv_component *components,
			  struct kv_layout *layout)
{
	*layout = (struct kv_layout){
		.kind = random_below(r, 2) ? KV_LAYOUT_FLAT : KV_LAYOUT_PAGED,
		.flags = random_below(r, 2) ? KV_LAYOUT_HEAD_MAJOR : 0,
		.block_tokens = 1 + random_below(r, 20),
		.n_components = 1 + random_below(r, MAX_COMPONENTS),
		.components = components,
	};
	for (uint32_t i = 0; i < layout->n_components; i++) {
		components[i] = (struct kv_component){
			.layer = (uint16_t)(i / 2),
			.role = (uint8_t)(KV_ROLE_K + random_below(r, 3)),
			.dtype = dtypes[random_below(r, 5)],
			.n_heads = 1 + random_below(r, 6),
			.head_dim = 1 + random_below(r, 40),
			.scale = 1,
		};
	}
}

struct area {
	char *arena; /* [bytes], at a multiple of KV_BLOCK_ALIGN */
	bool *taken; /* [bytes] */
	uint64_t bytes, block_bytes, slab_offset, n_blocks;
};

/* Takes the bytes of one element; they must be free, and inside its block (flat) or the slab. */
static void take_element(struct area *a, const struct kv_layout *layout, const char *at,
			 size_t size, uint64_t block)
{
	uint64_t from = (uint64_t)(at - a->arena), least = a->slab_offset;
	uint64_t end = least + a->n_blocks * a->block_bytes;

	if (layout->kind == KV_LAYOUT_FLAT) {
		least = block * a->block_bytes;
		end = least + a->block_bytes;
	}
	expect(from >= least && from + size <= end, "element at %llu is outside %llu..%llu",
	       (unsigned long long)from, (unsigned long long)least, (unsigned long long)end);
	for (size_t i = 0; i < size; i++) {
		expect(!a->taken[from + i], "byte %llu belongs to two elements",
		       (unsigned long long)from + i);
		a->taken[from + i] = true;
	}
}

static void take_component(struct area *a, const struct kv_layout *layout, uint32_t i)
{
	const struct kv_component *c = &layout->components[i];
	size_t size = kv_dtype_bytes(c->dtype);
	uint32_t n_tokens = c->role == KV_ROLE_STATE ? 1 : layout->block_tokens;
	struct kv_view v;

	kv_layout_view(layout, i, a->arena, a->slab_offset, a->n_blocks, &v);
	expect(v.block_tokens == (int32_t)layout->block_tokens && v.dtype == c->dtype &&
		       v.n_heads == (int32_t)c->n_heads && v.head_dim == (int32_t)c->head_dim &&
		       v.scale == c->scale,
	       "the view of component %u is of another component", i);
	expect(((char *)v.base - a->arena) % KV_BLOCK_ALIGN == 0 &&
		       v.block_stride % KV_BLOCK_ALIGN == 0,
	       "component %u does not start at a multiple of %d", i, KV_BLOCK_ALIGN);
	for (uint64_t block = 0; block < a->n_blocks; block++) {
		for (uint32_t token = 0; token < n_tokens; token++) {
			for (uint32_t head = 0; head < c->n_heads; head++) {
				const char *at = (char *)v.base + (int64_t)block * v.block_stride +
						 token * v.token_stride + head * v.head_stride;

				for (uint32_t k = 0; k < c->head_dim; k++)
					take_element(a, layout, at + k * size, size, block);
			}
		}
	}
}

START_TEST(no_two_elements_share_a_byte)
{
	struct random r = {(uint64_t)_i};

	for (int round = 0; round < 100; round++) {
		struct kv_component components[MAX_COMPONENTS];
		struct kv_layout layout;
		struct area a = {.n_blocks = 1 + random_below(&r, 5)};

		random_layout(&r, components, &layout);
		expect(!kv_layout_block_bytes(&layout, NULL, &a.block_bytes), "%s",
		       kv_error_text());
		if (layout.kind == KV_LAYOUT_PAGED)
			a.slab_offset = random_below(&r, 4) * 4096;
		a.bytes = a.slab_offset + a.n_blocks * a.block_bytes;
		a.arena = aligned_alloc(KV_BLOCK_ALIGN, a.bytes);
		a.taken = calloc(a.bytes, 1);
		ck_assert(a.arena && a.taken);
		for (uint32_t i = 0; i < layout.n_components; i++)
			take_component(&a, &layout, i);
		free(a.arena);
		free(a.taken);
	}
}
END_TEST

START_TEST(components_follow_each_other_in_a_flat_block)
{
	const struct kv_component components[] = {
		{0, KV_ROLE_K, KV_F16, 2, 3, 1},     /* 4 * 12 bytes: 256 */
		{0, KV_ROLE_V, KV_F32, 4, 32, 1},    /* 4 * 512 = 2048 */
		{1, KV_ROLE_STATE, KV_F32, 1, 65, 1} /* 260: 512 */
	};
	const struct kv_layout layout = {KV_LAYOUT_FLAT, 0, 4, 3, components};
	static char arena[16 * 2816];
	uint64_t offsets[3], bytes;
	struct kv_view v;

	ck_assert_int_eq(kv_layout_block_bytes(&layout, offsets, &bytes), 0);
	ck_assert_uint_eq(bytes, 2816);
	ck_assert_uint_eq(offsets[0], 0);
	ck_assert_uint_eq(offsets[1], 256);
	ck_assert_uint_eq(offsets[2], 256 + 2048);
	kv_layout_view(&layout, 1, arena, 0, 0, &v);
	ck_assert_ptr_eq(v.base, arena + 256);
	ck_assert_int_eq(v.block_stride, 2816);
	ck_assert_int_eq(v.token_stride, 512);
	ck_assert_int_eq(v.head_stride, 128);
	kv_layout_view(&layout, 2, arena, 0, 0, &v);
	ck_assert_int_eq(v.token_stride, 0);
	ck_assert_int_eq(v.head_stride, 260);
}
END_TEST

START_TEST(a_paged_slab_has_each_component_of_all_blocks_together)
{
	struct kv_component components[4];
	struct kv_layout layout = {.kind = KV_LAYOUT_PAGED,
				   .flags = KV_LAYOUT_HEAD_MAJOR,
				   .block_tokens = 16,
				   .components = components};
	static char arena[4096 + 4 * 10 * 4096];
	struct kv_view v;

	layout.n_components = kv_layout_uniform(components, 2, 2, 64, KV_BF16, 1, 1);
	for (uint32_t i = 0; i < 4; i++) {
		kv_layout_view(&layout, i, arena, 4096, 10, &v);
		ck_assert_ptr_eq(v.base, arena + 4096 + i * 10 * 4096);
		ck_assert_int_eq(v.block_stride, 4096);
		ck_assert_int_eq(v.token_stride, 128);
		ck_assert_int_eq(v.head_stride, 16 * 128);
	}
}
END_TEST

START_TEST(offsets_past_32_bits_are_right)
{
	/* 64,000 blocks of 16 tokens, 32 heads of 128: K alone is 4,194,304,000 elements. */
	struct kv_component components[2];
	struct kv_layout layout = {
		.kind = KV_LAYOUT_PAGED, .block_tokens = 16, .components = components};
	char *arena = (char *)4096;
	struct kv_view v;

	layout.n_components = kv_layout_uniform(components, 1, 32, 128, KV_F16, 1, 1);
	kv_layout_view(&layout, 0, arena, 0, 64000, &v);
	ck_assert_int_eq(63999 * v.block_stride + 15 * v.token_stride, 2 * 4194299904ll);
	kv_layout_view(&layout, 1, arena, 0, 64000, &v);
	ck_assert_int_eq((char *)v.base - arena, 2 * 4194304000ll);
}
END_TEST

/* ---- sizes ---- */

static uint64_t block_bytes(uint32_t block_tokens, struct kv_component component)
{
	struct kv_layout layout = {KV_LAYOUT_FLAT, 0, block_tokens, 1, &component};
	uint64_t bytes = 0;

	component.scale = 1;
	ck_assert_int_eq(kv_layout_block_bytes(&layout, NULL, &bytes), 0);
	return bytes;
}

START_TEST(a_token_costs_what_its_shape_says)
{
	struct kv_component components[160];
	struct kv_layout layout = {
		.kind = KV_LAYOUT_FLAT, .block_tokens = 16, .components = components};
	uint64_t bytes;

	/* 8 heads of 128, 16 bits, K and V: 4,096 bytes a token and layer. */
	layout.n_components = kv_layout_uniform(components, 1, 8, 128, KV_BF16, 1, 1);
	ck_assert_int_eq(kv_layout_block_bytes(&layout, NULL, &bytes), 0);
	ck_assert_uint_eq(bytes, 16 * 4096);
	layout.block_tokens = 64;
	ck_assert_int_eq(kv_layout_block_bytes(&layout, NULL, &bytes), 0);
	ck_assert_uint_eq(bytes, 262144);
	layout.n_components = kv_layout_uniform(components, 80, 8, 128, KV_BF16, 1, 1);
	ck_assert_int_eq(kv_layout_block_bytes(&layout, NULL, &bytes), 0);
	ck_assert_uint_eq(bytes, 64 * 327680);

	/* One vector a token: 512 latent and 64 positional elements, no factor of two. */
	ck_assert_uint_eq(block_bytes(64, (struct kv_component){0, KV_ROLE_K, KV_BF16, 1, 576, 1}),
			  73728);
	ck_assert_uint_eq(
		block_bytes(64, (struct kv_component){0, KV_ROLE_K, KV_F8_E4M3, 1, 576, 1}), 36864);
	/* Packed with its scales: 656 and 584 bytes a token. */
	ck_assert_uint_eq(
		block_bytes(64, (struct kv_component){0, KV_ROLE_K, KV_F8_E4M3, 1, 656, 1}), 41984);
	ck_assert_uint_eq(
		block_bytes(64, (struct kv_component){0, KV_ROLE_K, KV_F8_E4M3, 1, 584, 1}), 37376);
}
END_TEST

START_TEST(a_state_row_costs_the_same_whatever_the_block_size)
{
	const struct kv_component convolution = {0, KV_ROLE_STATE, KV_BF16, 3, 2048, 1};
	const struct kv_component recurrent16 = {0, KV_ROLE_STATE, KV_BF16, 8, 128 * 128, 1};
	const struct kv_component recurrent32 = {0, KV_ROLE_STATE, KV_F32, 8, 128 * 128, 1};

	for (uint32_t tokens = 1; tokens <= KV_MAX_BLOCK_TOKENS; tokens *= 2) {
		ck_assert_uint_eq(block_bytes(tokens, convolution), 12288);
		ck_assert_uint_eq(block_bytes(tokens, recurrent16), 262144);
		ck_assert_uint_eq(block_bytes(tokens, recurrent32), 524288);
	}
}
END_TEST

START_TEST(uniform_layers_are_k_and_v_in_turn)
{
	struct kv_component c[6];

	ck_assert_uint_eq(kv_layout_uniform(c, 3, 4, 80, KV_F8_E4M3, 0.5f, 0.25f), 6);
	for (uint32_t i = 0; i < 6; i++) {
		ck_assert_uint_eq(c[i].layer, i / 2);
		ck_assert_uint_eq(c[i].role, i % 2 ? KV_ROLE_V : KV_ROLE_K);
		ck_assert_uint_eq(c[i].dtype, KV_F8_E4M3);
		ck_assert_uint_eq(c[i].n_heads, 4);
		ck_assert_uint_eq(c[i].head_dim, 80);
		ck_assert(c[i].scale == (i % 2 ? 0.25f : 0.5f));
	}
}
END_TEST

START_TEST(placed_components_lie_where_they_say_and_may_overlap)
{
	/* Two groups that take turns: 64 rows of 584 bytes; 16 rows of 2 heads of 64 f16, twice. */
	struct kv_component c[] = {
		{.role = KV_ROLE_K,
		 .dtype = KV_BYTES,
		 .n_heads = 1,
		 .head_dim = 584,
		 .scale = 1,
		 .n_rows = 64},
		{.role = KV_ROLE_K, .dtype = KV_F16, .n_heads = 2, .head_dim = 64, .scale = 1},
		{.role = KV_ROLE_V,
		 .dtype = KV_F16,
		 .n_heads = 2,
		 .head_dim = 64,
		 .scale = 1,
		 .offset = 16 * 256},
	};
	struct kv_layout layout = {KV_LAYOUT_FLAT, KV_LAYOUT_PLACED, 16, 3, c};
	uint64_t offsets[3], bytes;
	struct kv_view view;
	char arena[1];

	ck_assert_int_eq(kv_layout_block_bytes(&layout, offsets, &bytes), 0);
	ck_assert_uint_eq(bytes, 37376); /* 64 * 584, a multiple of 256 already */
	ck_assert_uint_eq(offsets[0], 0);
	ck_assert_uint_eq(offsets[1], 0);
	ck_assert_uint_eq(offsets[2], 4096);
	kv_layout_view(&layout, 0, arena, 0, 0, &view);
	ck_assert_int_eq(view.block_tokens, 64);
	ck_assert_int_eq(view.token_stride, 584);
	ck_assert_int_eq(view.block_stride, 37376);
	kv_layout_view(&layout, 2, arena, 0, 0, &view);
	ck_assert_ptr_eq(view.base, arena + 4096);
	ck_assert_int_eq(view.block_tokens, 16);
	ck_assert_int_eq(view.block_stride, 37376);

	c[2].offset = 4097;
	ck_assert_int_eq(kv_layout_block_bytes(&layout, offsets, &bytes), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "components[2].offset: 4097"));
	c[2].offset = 4096;
	layout.flags = 0;
	ck_assert_int_eq(kv_layout_block_bytes(&layout, offsets, &bytes), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "KV_LAYOUT_PLACED"));
}
END_TEST

START_TEST(a_block_may_have_2_to_the_40_bytes_and_no_more)
{
	/* 2^15 heads of 2^14 f32 in 2^9 tokens: 2^40 bytes. */
	struct kv_component c = {0, KV_ROLE_K, KV_F32, 1 << 15, 1 << 14, 1};
	struct kv_layout layout = {KV_LAYOUT_FLAT, 0, 1 << 9, 1, &c};
	struct kv_component many[KV_MAX_COMPONENTS];
	uint64_t bytes = 7;
	char total[24];

	ck_assert_int_eq(kv_layout_block_bytes(&layout, NULL, &bytes), 0);
	ck_assert_uint_eq(bytes, 1ull << 40);
	c.n_heads++;
	bytes = 7;
	ck_assert_int_eq(kv_layout_block_bytes(&layout, NULL, &bytes), -EOVERFLOW);
	ck_assert_uint_eq(bytes, 7);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "2^40"));

	/* The largest that can be said: still no wrap-around. */
	snprintf(total, sizeof(total), "%llu", 4ull * 65536 * 65536 * KV_MAX_BLOCK_TOKENS * 1024);
	for (int i = 0; i < KV_MAX_COMPONENTS; i++)
		many[i] = (struct kv_component){0, KV_ROLE_K, KV_F32, 65536, 65536, 1};
	layout =
		(struct kv_layout){KV_LAYOUT_FLAT, 0, KV_MAX_BLOCK_TOKENS, KV_MAX_COMPONENTS, many};
	ck_assert_int_eq(kv_layout_block_bytes(&layout, NULL, &bytes), -EOVERFLOW);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), total));
}
END_TEST

/* ---- what is refused ---- */

struct invalid {
	const char
		*text; /* must stand in the error: the field, and the value where it is a number */
	struct kv_layout layout;
	struct kv_component component;
};

#define GOOD_LAYOUT    .layout = {KV_LAYOUT_FLAT, 0, 16, 2, NULL}
#define GOOD_COMPONENT .component = {0, KV_ROLE_V, KV_F16, 2, 64, 1}
#define LAYOUT(...)    .layout = {__VA_ARGS__, NULL}, GOOD_COMPONENT
#define COMPONENT(...) GOOD_LAYOUT, .component = {0, __VA_ARGS__}

static const struct invalid invalids[] = {
	{"layout.kind: 0", LAYOUT(0, 0, 16, 2)},
	{"layout.kind: 3", LAYOUT(3, 0, 16, 2)},
	{"layout.flags: 0x4", LAYOUT(KV_LAYOUT_FLAT, 4, 16, 2)},
	{"KV_LAYOUT_PLACED is for flat", LAYOUT(KV_LAYOUT_PAGED, KV_LAYOUT_PLACED, 16, 2)},
	{"layout.flags: 0x80000001", LAYOUT(KV_LAYOUT_FLAT, 0x80000001, 16, 2)},
	{"layout.block_tokens: 0", LAYOUT(KV_LAYOUT_FLAT, 0, 0, 2)},
	{"layout.block_tokens: 65537 given, 1..65536", LAYOUT(KV_LAYOUT_FLAT, 0, 65537, 2)},
	{"layout.block_tokens: 4294967295", LAYOUT(KV_LAYOUT_PAGED, 0, UINT32_MAX, 2)},
	{"layout.n_components: 0", LAYOUT(KV_LAYOUT_FLAT, 0, 16, 0)},
	{"layout.n_components: 1025 given, 1..1024", LAYOUT(KV_LAYOUT_FLAT, 0, 16, 1025)},
	{"components[1].dtype: 0", COMPONENT(KV_ROLE_V, 0, 2, 64, 1)},
	{"components[1].dtype: 7", COMPONENT(KV_ROLE_V, 7, 2, 64, 1)},
	{"components[1].dtype: 255", COMPONENT(KV_ROLE_V, 255, 2, 64, 1)},
	{"components[1].role: 0", COMPONENT(0, KV_F16, 2, 64, 1)},
	{"components[1].role: 7", COMPONENT(7, KV_F16, 2, 64, 1)},
	{"components[1].n_heads: 0", COMPONENT(KV_ROLE_V, KV_F16, 0, 64, 1)},
	{"components[1].n_heads: 65537 given, 1..65536",
	 COMPONENT(KV_ROLE_V, KV_F16, 65537, 64, 1)},
	{"components[1].head_dim: 0", COMPONENT(KV_ROLE_V, KV_F16, 2, 0, 1)},
	{"components[1].head_dim: 4294967295", COMPONENT(KV_ROLE_V, KV_F16, 2, UINT32_MAX, 1)},
	{"components[1].scale: 0 given", COMPONENT(KV_ROLE_V, KV_F8_E4M3, 2, 64, 0)},
	{"components[1].scale: -1", COMPONENT(KV_ROLE_V, KV_F8_E4M3, 2, 64, -1)},
	{"components[1].scale: nan", COMPONENT(KV_ROLE_V, KV_F8_E4M3, 2, 64, NAN)},
	{"components[1].scale: inf", COMPONENT(KV_ROLE_V, KV_F8_E4M3, 2, 64, INFINITY)},
	/* A scale nobody would ever apply: F16 is stored as it is. */
	{"components[1].scale: 0.5 given, but only 8-bit",
	 COMPONENT(KV_ROLE_V, KV_F16, 2, 64, 0.5f)},
};

START_TEST(a_field_that_is_out_of_range_is_named)
{
	const struct invalid *i = &invalids[_i];
	struct kv_component components[] = {{0, KV_ROLE_K, KV_F16, 2, 64, 1}, i->component};
	struct kv_layout layout = i->layout;
	uint64_t bytes = 7;

	layout.components = components;
	ck_assert_int_eq(kv_layout_check(&layout), -EINVAL);
	ck_assert_msg(strstr(kv_error_text(), i->text), "'%s' says nothing of '%s'",
		      kv_error_text(), i->text);
	ck_assert_int_eq(kv_layout_block_bytes(&layout, NULL, &bytes), -EINVAL);
	ck_assert_uint_eq(bytes, 7);
}
END_TEST

START_TEST(scales_are_for_8_bit_types)
{
	struct kv_component c = {0, KV_ROLE_K, KV_F8_E4M3, 2, 64, 0.0625f};
	struct kv_layout layout = {KV_LAYOUT_FLAT, 0, 16, 1, &c};
	struct kv_view v;

	ck_assert_int_eq(kv_layout_check(&layout), 0);
	kv_layout_view(&layout, 0, &v, 0, 0, &v);
	ck_assert(v.scale == 0.0625f);
}
END_TEST

/* ---- differences ---- */

START_TEST(equal_layouts_do_not_differ)
{
	struct kv_component a[4], b[4];
	struct kv_layout one = {KV_LAYOUT_FLAT, 0, 16, 4, a}, two = {KV_LAYOUT_FLAT, 0, 16, 4, b};
	char text[100] = "";

	kv_layout_uniform(a, 2, 2, 64, KV_F16, 1, 1);
	kv_layout_uniform(b, 2, 2, 64, KV_F16, 1, 1);
	ck_assert_int_eq(kv_layout_difference(&one, &two, text, sizeof(text)), 0);
	ck_assert_str_eq(text, "");
}
END_TEST

START_TEST(each_field_that_differs_is_listed_with_both_values)
{
	struct kv_component a[4], b[4];
	struct kv_layout one = {KV_LAYOUT_FLAT, 0, 16, 4, a};
	struct kv_layout two = {KV_LAYOUT_PAGED, 1, 32, 4, b};
	char text[500] = "";

	kv_layout_uniform(a, 2, 2, 64, KV_F16, 1, 1);
	kv_layout_uniform(b, 2, 2, 64, KV_F16, 1, 1);
	b[3].head_dim = 128;
	ck_assert_int_eq(kv_layout_difference(&one, &two, text, sizeof(text)), 4);
	ck_assert_str_eq(text, "layout.kind: 1 here, 2 asked; layout.flags: 0 here, 1 asked; "
			       "layout.block_tokens: 16 here, 32 asked; "
			       "components[3] (layer, role, dtype, heads, dim, scale, rows, "
			       "offset): 1 2 2 2 64 1 0 0 here, 1 2 2 2 128 1 0 0 asked");

	two = one;
	two.n_components = 3;
	text[0] = 0;
	ck_assert_int_eq(kv_layout_difference(&one, &two, text, sizeof(text)), 1);
	ck_assert_str_eq(text, "layout.n_components: 4 here, 3 asked");
}
END_TEST

START_TEST(each_field_of_a_component_counts)
{
	struct kv_component a = {1, KV_ROLE_K, KV_F8_E4M3, 2, 64, 1}, b;
	struct kv_layout one = {KV_LAYOUT_FLAT, 0, 16, 1, &a}, two = {KV_LAYOUT_FLAT, 0, 16, 1, &b};

	for (int field = 0; field < 6; field++) {
		char text[200] = "";

		b = a;
		b.layer += field == 0;
		b.role += field == 1;
		b.dtype -= field == 2;
		b.n_heads += field == 3;
		b.head_dim += field == 4;
		b.scale += field == 5;
		ck_assert_int_eq(kv_layout_difference(&one, &two, text, sizeof(text)), 1);
		ck_assert_ptr_nonnull(strstr(text, "components[0]"));
	}
}
END_TEST

START_TEST(a_list_too_long_for_its_text_is_cut)
{
	struct kv_component c = {0, KV_ROLE_K, KV_F16, 1, 1, 1};
	struct kv_layout one = {KV_LAYOUT_FLAT, 0, 16, 1, &c},
			 two = {KV_LAYOUT_PAGED, 1, 32, 1, &c};

	for (size_t size = 1; size < 100; size++) {
		char *text = calloc(size, 1); /* a sanitizer sees what is written past it */

		ck_assert_int_eq(kv_layout_difference(&one, &two, text, size), 3);
		ck_assert(memchr(text, 0, size));
		free(text);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("alloc/layout");
	TCase *tcase = tcase_create("layout");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(tcase, no_two_elements_share_a_byte, 0, 4);
	tcase_add_test(tcase, components_follow_each_other_in_a_flat_block);
	tcase_add_test(tcase, a_paged_slab_has_each_component_of_all_blocks_together);
	tcase_add_test(tcase, offsets_past_32_bits_are_right);
	tcase_add_test(tcase, a_token_costs_what_its_shape_says);
	tcase_add_test(tcase, a_state_row_costs_the_same_whatever_the_block_size);
	tcase_add_test(tcase, uniform_layers_are_k_and_v_in_turn);
	tcase_add_test(tcase, placed_components_lie_where_they_say_and_may_overlap);
	tcase_add_test(tcase, a_block_may_have_2_to_the_40_bytes_and_no_more);
	tcase_add_loop_test(tcase, a_field_that_is_out_of_range_is_named, 0,
			    sizeof(invalids) / sizeof(invalids[0]));
	tcase_add_test(tcase, scales_are_for_8_bit_types);
	tcase_add_test(tcase, equal_layouts_do_not_differ);
	tcase_add_test(tcase, each_field_that_differs_is_listed_with_both_values);
	tcase_add_test(tcase, each_field_of_a_component_counts);
	tcase_add_test(tcase, a_list_too_long_for_its_text_is_cut);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
