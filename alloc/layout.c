/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "alloc/layout.h"
#include "include/internal/error.h"
#include "include/internal/public.h"

#define MAX_BLOCK_BYTES ((uint64_t)1 << 40)
#define MAX_HEADS 65536u
#define MAX_HEAD_DIM 65536u

KV_PUBLIC uint32_t kv_layout_uniform(struct kv_component *components, uint32_t n_layers,
				     uint32_t n_kv_heads, uint32_t head_dim, enum kv_dtype dtype,
				     float k_scale, float v_scale)
{
	for (uint32_t i = 0; i < 2 * n_layers; i++) {
		components[i] = (struct kv_component){
			.layer = (uint16_t)(i / 2),
			.role = i % 2 ? KV_ROLE_V : KV_ROLE_K,
			.dtype = (uint8_t)dtype,
			.n_heads = n_kv_heads,
			.head_dim = head_dim,
			.scale = i % 2 ? v_scale : k_scale,
		};
	}
	return 2 * n_layers;
}

static int check_component(const struct kv_component *c, uint32_t i)
{
	if (!kv_dtype_bytes(c->dtype))
		return kv_error(-EINVAL, "components[%u].dtype: %u is not a kv_dtype", i, c->dtype);
	if (c->role < KV_ROLE_K || c->role > KV_ROLE_V_SCALE)
		return kv_error(-EINVAL, "components[%u].role: %u is not a kv_role", i, c->role);
	if (c->n_heads < 1 || c->n_heads > MAX_HEADS)
		return kv_error(-EINVAL, "components[%u].n_heads: %u given, 1..%u allowed", i,
				c->n_heads, MAX_HEADS);
	if (c->head_dim < 1 || c->head_dim > MAX_HEAD_DIM)
		return kv_error(-EINVAL, "components[%u].head_dim: %u given, 1..%u allowed", i,
				c->head_dim, MAX_HEAD_DIM);
	if (!(c->scale > 0) || c->scale > 3e38f)
		return kv_error(-EINVAL,
				"components[%u].scale: %g given; a positive number is needed, 1 "
				"where there is no scale",
				i, (double)c->scale);
	if (c->dtype != KV_F8_E4M3 && c->dtype != KV_F8_E5M2 && c->scale != 1)
		return kv_error(-EINVAL, "components[%u].scale: %g given, but only 8-bit types have "
				"one: 1 is needed", i, (double)c->scale);
	if (c->n_rows > KV_MAX_BLOCK_TOKENS || (c->n_rows && c->role == KV_ROLE_STATE))
		return kv_error(-EINVAL, "components[%u].n_rows: %u given, at most %u, and 0 for a state",
				i, c->n_rows, KV_MAX_BLOCK_TOKENS);
	return 0;
}

static int check_place(const struct kv_layout *layout, uint32_t i)
{
	const struct kv_component *c = &layout->components[i];
	size_t unit = kv_dtype_bytes(c->dtype);

	if (!(layout->flags & KV_LAYOUT_PLACED))
		return c->offset ? kv_error(-EINVAL, "components[%u].offset: %llu given, without "
					    "KV_LAYOUT_PLACED it is 0", i,
					    (unsigned long long)c->offset) : 0;
	if (c->offset % unit || c->offset > MAX_BLOCK_BYTES)
		return kv_error(-EINVAL, "components[%u].offset: %llu given, a multiple of %zu up to 2^40 "
				"is needed", i, (unsigned long long)c->offset, unit);
	return 0;
}

int kv_layout_check(const struct kv_layout *layout)
{
	if (layout->kind != KV_LAYOUT_FLAT && layout->kind != KV_LAYOUT_PAGED)
		return kv_error(-EINVAL, "layout.kind: %u is not a kv_layout_kind", layout->kind);
	if (layout->flags & ~(KV_LAYOUT_HEAD_MAJOR | KV_LAYOUT_PLACED))
		return kv_error(-EINVAL, "layout.flags: %#x has unknown bits", layout->flags);
	if (layout->flags & KV_LAYOUT_PLACED && layout->kind != KV_LAYOUT_FLAT)
		return kv_error(-EINVAL, "layout.flags: KV_LAYOUT_PLACED is for flat layouts");
	if (layout->block_tokens < 1 || layout->block_tokens > KV_MAX_BLOCK_TOKENS)
		return kv_error(-EINVAL, "layout.block_tokens: %u given, 1..%u allowed",
				layout->block_tokens, KV_MAX_BLOCK_TOKENS);
	if (layout->n_components < 1 || layout->n_components > KV_MAX_COMPONENTS)
		return kv_error(-EINVAL, "layout.n_components: %u given, 1..%u allowed",
				layout->n_components, KV_MAX_COMPONENTS);
	if (!layout->components)
		return kv_error(-EINVAL, "layout.components: NULL given, n_components is %u", layout->n_components);
	for (uint32_t i = 0; i < layout->n_components; i++) {
		int r = check_component(&layout->components[i], i);

		if (!r)
			r = check_place(layout, i);
		if (r < 0)
			return r;
	}
	return 0;
}

static uint64_t rows_of(const struct kv_layout *layout, const struct kv_component *c)
{
	return c->role == KV_ROLE_STATE ? 1 : c->n_rows ? c->n_rows : layout->block_tokens;
}

static uint64_t aligned(uint64_t bytes)
{
	return (bytes + KV_BLOCK_ALIGN - 1) / KV_BLOCK_ALIGN * KV_BLOCK_ALIGN;
}

uint64_t kv_layout_component_bytes(const struct kv_layout *layout, uint32_t i)
{
	const struct kv_component *c = &layout->components[i];

	return aligned(rows_of(layout, c) * c->n_heads * c->head_dim * kv_dtype_bytes(c->dtype));
}

/* Where component @i starts, and the bytes of a block. */
static uint64_t place_of(const struct kv_layout *layout, uint32_t i, uint64_t *ret_block_bytes)
{
	bool placed = layout->flags & KV_LAYOUT_PLACED;
	uint64_t next = 0, start = 0, end = 0;

	/* Each term is below 2^51 and there are at most 2^10: no overflow on the way. */
	for (uint32_t k = 0; k < layout->n_components; k++) {
		const struct kv_component *c = &layout->components[k];
		uint64_t bytes = rows_of(layout, c) * c->n_heads * c->head_dim *
				 kv_dtype_bytes(c->dtype);
		uint64_t at = placed ? c->offset : next;

		start = k == i ? at : start;
		next = aligned(at + bytes);
		end = next > end ? next : end;
	}
	*ret_block_bytes = end;
	return start;
}

KV_PUBLIC int kv_layout_block_bytes(const struct kv_layout *layout, uint64_t *ret_offsets,
				    uint64_t *ret_bytes)
{
	uint64_t bytes;
	int r = kv_layout_check(layout);

	if (r < 0)
		return r;
	place_of(layout, 0, &bytes);
	for (uint32_t i = 0; ret_offsets && i < layout->n_components; i++)
		ret_offsets[i] = place_of(layout, i, &bytes);
	if (bytes > MAX_BLOCK_BYTES)
		return kv_error(-EOVERFLOW, "layout: a block would have %llu bytes, at most 2^40 are "
				"allowed", (unsigned long long)bytes);
	*ret_bytes = bytes;
	return 0;
}

void kv_layout_view(const struct kv_layout *layout, uint32_t i, void *arena, uint64_t slab_offset,
		    uint64_t slab_blocks, struct kv_view *ret)
{
	const struct kv_component *c = &layout->components[i];
	int64_t element = (int64_t)kv_dtype_bytes(c->dtype);
	int64_t row = element * c->head_dim, n_rows = (int64_t)rows_of(layout, c);
	uint64_t block_bytes, before = place_of(layout, i, &block_bytes);

	*ret = (struct kv_view){
		.block_tokens = (int32_t)(c->role == KV_ROLE_STATE ? layout->block_tokens : n_rows),
		.n_heads = (int32_t)c->n_heads,
		.head_dim = (int32_t)c->head_dim,
		.dtype = c->dtype,
		.scale = c->scale,
	};
	if (layout->kind == KV_LAYOUT_FLAT) {
		ret->base = (char *)arena + before;
		ret->block_stride = (int64_t)block_bytes;
	} else {
		ret->base = (char *)arena + slab_offset + before * slab_blocks;
		ret->block_stride = (int64_t)kv_layout_component_bytes(layout, i);
	}
	if (c->role == KV_ROLE_STATE) {
		ret->head_stride = row;
	} else if (layout->flags & KV_LAYOUT_HEAD_MAJOR) {
		ret->token_stride = row;
		ret->head_stride = row * n_rows;
	} else {
		ret->token_stride = row * c->n_heads;
		ret->head_stride = row;
	}
}

static int differ(char *text, size_t size, const char *field, unsigned have, unsigned asked)
{
	size_t used = strlen(text);

	if (have == asked)
		return 0;
	snprintf(text + used, size - used, "%s%s: %u here, %u asked", used ? "; " : "", field, have,
		 asked);
	return 1;
}

int kv_layout_difference(const struct kv_layout *have, const struct kv_layout *asked, char *text,
			 size_t size)
{
	int n = 0;

	n += differ(text, size, "layout.kind", have->kind, asked->kind);
	n += differ(text, size, "layout.flags", have->flags, asked->flags);
	n += differ(text, size, "layout.block_tokens", have->block_tokens, asked->block_tokens);
	n += differ(text, size, "layout.n_components", have->n_components, asked->n_components);
	if (have->n_components != asked->n_components)
		return n;
	for (uint32_t i = 0; i < have->n_components; i++) {
		const struct kv_component *a = &have->components[i], *b = &asked->components[i];
		size_t used = strlen(text);

		if (a->layer == b->layer && a->role == b->role && a->dtype == b->dtype &&
		    a->n_heads == b->n_heads && a->head_dim == b->head_dim && a->scale == b->scale &&
		    a->n_rows == b->n_rows && a->offset == b->offset)
			continue;
		snprintf(text + used, size - used,
			 "%scomponents[%u] (layer, role, dtype, heads, dim, scale, rows, offset): "
			 "%u %u %u %u %u %g %u %llu here, %u %u %u %u %u %g %u %llu asked",
			 used ? "; " : "", i, a->layer, a->role, a->dtype, a->n_heads, a->head_dim,
			 (double)a->scale, a->n_rows, (unsigned long long)a->offset, b->layer, b->role,
			 b->dtype, b->n_heads, b->head_dim, (double)b->scale, b->n_rows,
			 (unsigned long long)b->offset);
		return n + 1;
	}
	return n;
}
