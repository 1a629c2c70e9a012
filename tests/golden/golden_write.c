/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of cache writes: what kv_write() and kv_mla_write() leave in memory, byte for byte. */
#include <stdio.h>
#include <string.h>

#include <kvcached/attention.h>
#include <kvcached/mla.h>
#include <kvcached/schedule.h>

#include "tests/golden/golden.h"

static const int64_t slot_0[] = {0};

static float *in_floats(const json_t *in, const char *key, size_t *ret_n)
{
	const json_t *list = json_object_get(in, key);
	float *values;

	*ret_n = json_array_size(list);
	values = golden_alloc(*ret_n, sizeof(*values));
	for (size_t i = 0; i < *ret_n; i++)
		values[i] = (float)json_number_value(json_array_get(list, i));
	return values;
}

static json_t *out_bytes(const uint8_t *bytes, size_t n)
{
	json_t *list = json_array();

	for (size_t i = 0; i < n; i++)
		json_array_append_new(list, json_integer(bytes[i]));
	return list;
}

static json_t *out_floats(const float *x, size_t n)
{
	json_t *list = json_array();

	for (size_t i = 0; i < n; i++)
		json_array_append_new(list, json_real((double)x[i]));
	return list;
}

/* One row of @n elements in a block of its own. */
static struct kv_view row_view(void *base, int dtype, size_t n, float scale)
{
	int64_t bytes = (int64_t)n * (int64_t)kv_dtype_bytes(dtype);

	return (struct kv_view){.base = base,
				.block_stride = bytes,
				.token_stride = bytes,
				.head_stride = bytes,
				.block_tokens = 1,
				.n_heads = 1,
				.head_dim = (int32_t)n,
				.dtype = dtype,
				.scale = scale};
}

/* f32 rows, as K and V, to slot 0. */
static int write_row(const float *x, const struct kv_view *view, const struct kv_view *row_scales)
{
	struct kv_write_args args = {.size = sizeof(args),
				     .device = KV_DEVICE_HOST,
				     .dtype = KV_F32,
				     .n_tokens = 1,
				     .key = x,
				     .value = x,
				     .slots = slot_0,
				     .k = *view,
				     .v = *view};

	if (row_scales)
		args.k_row_scales = args.v_row_scales = *row_scales;
	return kv_write(&args);
}

static int f8_store(const json_t *in, json_t **ret_out)
{
	int dtype = strcmp(in_text(in, "format", ""), "e5m2") ? KV_F8_E4M3 : KV_F8_E5M2;
	static const int32_t start_loc[] = {0, 1}, table[] = {0};
	size_t n;
	float *x = in_floats(in, "source_bf16_as_float", &n),
	      *back = golden_alloc(n, sizeof(*back));
	uint8_t *codes = golden_alloc(n, 1);
	struct kv_view view = row_view(codes, dtype, n, (float)in_real(in, "scale", 1));
	struct kv_read_args read = {.size = sizeof(read),
				    .device = KV_DEVICE_HOST,
				    .dtype = KV_F32,
				    .n_seqs = 1,
				    .n_tokens = 1,
				    .key = back,
				    .start_loc = start_loc,
				    .block_table = table,
				    .table_width = 1,
				    .k = view,
				    .v = view};

	if (write_row(x, &view, NULL) < 0 || kv_read(&read) < 0)
		return KV_FAULT_BAD_CONFIG;
	*ret_out = json_pack("{s:o, s:o}", "bytes", out_bytes(codes, n), "dequant_fp32",
			     out_floats(back, n));
	return 0;
}

static int row_scaled_store(const json_t *in, json_t **ret_out)
{
	size_t n;
	float *x = in_floats(in, "head_vector", &n), *scale = golden_alloc(1, sizeof(*scale));
	uint8_t *codes = golden_alloc(n, 1);
	struct kv_view view = row_view(codes, KV_F8_E4M3, n, 1),
		       scales = row_view(scale, KV_F32, 1, 1);

	if (strcmp(in_text(in, "format", ""), "fp8"))
		return GOLDEN_SKIP; /* int8: no type of ours */
	if (write_row(x, &view, &scales) < 0)
		return KV_FAULT_BAD_CONFIG;
	*ret_out = json_pack("{s:o, s:o}", "codes", out_bytes(codes, n), "scale_fp32",
			     json_real((double)*scale));
	return 0;
}

static uint16_t bf16_of(float x) /* which it is already */
{
	uint32_t bits;

	memcpy(&bits, &x, sizeof(bits));
	return (uint16_t)(bits >> 16);
}

static int packed_row(const json_t *in, json_t **ret_out)
{
	size_t n, n_rope;
	float *latent = in_floats(in, "kv_c_bf16_as_float", &n), scale;
	float *rope = in_floats(in, "k_pe_bf16_as_float", &n_rope);
	uint16_t *from = golden_alloc(n + n_rope, sizeof(*from));
	int32_t bytes = kv_mla_packed_bytes((int32_t)n, (int32_t)n_rope);
	uint8_t *row = golden_alloc((size_t)bytes, 1);
	char *hex = golden_alloc((size_t)bytes, 2);
	json_t *scales = json_array();
	struct kv_mla_write_args args = {.size = sizeof(args),
					 .device = KV_DEVICE_HOST,
					 .dtype = KV_BF16,
					 .n_tokens = 1,
					 .latent_dim = (int32_t)n,
					 .rope_dim = (int32_t)n_rope,
					 .latent = from,
					 .rope = from + n,
					 .slots = slot_0,
					 .cache = row_view(row, KV_BYTES, (size_t)bytes, 1)};

	for (size_t i = 0; i < n + n_rope; i++)
		from[i] = bf16_of(i < n ? latent[i] : rope[i - n]);
	if (kv_mla_write(&args) < 0) {
		json_decref(scales);
		return KV_FAULT_BAD_CONFIG;
	}
	for (int32_t i = 0; i < bytes; i++)
		snprintf(hex + 2 * (size_t)i, 3, "%02x", row[i]);
	for (size_t i = 0; i < n / KV_MLA_TILE; i++) {
		memcpy(&scale, row + kv_mla_scales_at((int32_t)n) + 4 * i, sizeof(scale));
		json_array_append_new(scales, json_real((double)scale));
	}
	*ret_out = json_pack("{s:s, s:o, s:i}", "row_hex", hex, "tile_scales", scales, "row_bytes",
			     bytes);
	return 0;
}

/* Where an element lands: it alone is 1, all others are 0. */
static int address(const json_t *in, json_t **ret_out)
{
	size_t n_strides;
	int64_t *strides = in_ints(in, "strides_block_token_head", &n_strides), slot[1];
	int64_t dim = in_int(in, "dim", 0), head = in_int(in, "head", 0), at = -1;
	int64_t width = strides[1] < strides[2] ? strides[1] : strides[2], n_blocks, n;
	struct kv_view view = {.block_stride = strides[0] * 4,
			       .token_stride = strides[1] * 4,
			       .head_stride = strides[2] * 4,
			       .block_tokens = (int32_t)in_int(in, "block_size", 1),
			       .n_heads = (int32_t)head + 1,
			       .head_dim = (int32_t)width,
			       .dtype = KV_F32,
			       .scale = 1};
	float *from = golden_alloc((size_t)((head + 1) * width), sizeof(*from)), *pool;
	struct kv_write_args args = {.size = sizeof(args),
				     .device = KV_DEVICE_HOST,
				     .dtype = KV_F32,
				     .n_tokens = 1,
				     .key = from,
				     .value = from,
				     .slots = slot};

	slot[0] = in_int(in, "slot", 0);
	if (slot[0] < 0) /* strides of 1 hold one element: a block of them would overlap */
		view.block_tokens = 1;
	n_blocks = slot[0] < 0 ? 1 : slot[0] / view.block_tokens + 1;
	n = n_blocks * strides[0];
	pool = golden_alloc((size_t)n, sizeof(*pool));
	from[head * width + dim] = 1;
	view.base = pool;
	args.k = args.v = view;
	if (kv_write(&args) < 0)
		return KV_FAULT_BAD_CONFIG;
	for (int64_t i = 0; i < n; i++)
		if (pool[i] != 0)
			at = i;
	*ret_out = json_pack("{s:b, s:o}", "written", at >= 0, "element_offset",
			     at >= 0 ? json_integer(at) : json_null());
	return 0;
}

static int encoder_slots(const json_t *in, json_t **ret_out)
{
	size_t n, n_rows, width;
	int32_t *lens = in_ints32(in, "encoder_seq_lens", &n);
	int32_t *table = in_table(in, "block_table", &n_rows, &width);
	int64_t slots[4096], count;

	count = kv_encoder_slots(lens, (int32_t)n, table, (int32_t)width,
				 (int32_t)in_int(in, "block_size", 1), slots);
	*ret_out = json_pack("{s:o}", "slot_mapping", out_ints(slots, (size_t)count));
	return 0;
}

static int cache_write(const json_t *in, json_t **ret_out)
{
	if (json_object_get(in, "encoder_seq_lens"))
		return encoder_slots(in, ret_out);
	if (json_object_get(in, "head_vector"))
		return row_scaled_store(in, ret_out);
	if (json_object_get(in, "kv_c_bf16_as_float"))
		return packed_row(in, ret_out);
	if (json_object_get(in, "strides_block_token_head"))
		return address(in, ret_out);
	if (json_object_get(in, "source_bf16_as_float"))
		return f8_store(in, ret_out);
	return GOLDEN_SKIP; /* nvfp4, and K with elements apart: no layouts of ours */
}

const struct golden_kind golden_write[] = {
	{"cache_write", cache_write},
	{NULL, NULL},
};
