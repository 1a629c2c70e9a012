/* SPDX-License-Identifier: Apache-2.0 */
/* Reference calculators: the flat memory plan of hybrid models. */
#include <stdio.h>
#include <string.h>

#include "alloc/compat.h"
#include "include/internal/error.h"

size_t kv_compat_flat_components(const char *layers, int64_t kv_slot_bytes,
				 const struct kv_compat_named_bytes *state, size_t n_state,
				 struct kv_compat_component *ret_components)
{
	int64_t seen[256] = {0};
	size_t n = 0;

	for (size_t i = 0; layers[i]; i++) {
		int64_t layer = seen[(unsigned char)layers[i]]++;
		bool is_state = layers[i] == 'L';

		for (size_t k = 0; k < (is_state ? n_state : 1); k++) {
			struct kv_compat_component *c = &ret_components[n++];

			memset(c, 0, sizeof(*c));
			snprintf(c->group, sizeof(c->group), "%s", kv_compat_label(layers[i]));
			snprintf(c->name, sizeof(c->name), "%s", is_state ? state[k].name : "kv");
			c->layer = layer;
			c->slot_bytes = is_state ? 0 : kv_slot_bytes;
			c->const_bytes = is_state ? state[k].bytes : 0;
		}
	}
	return n;
}

static bool same_row(const struct kv_compat_component *a, const struct kv_compat_component *b)
{
	return a->layer == b->layer && !strcmp(a->group, b->group);
}

int kv_compat_equalize(const struct kv_compat_component *components, size_t n, int64_t block_tokens,
		       int64_t align, int64_t *ret_block_tokens, int64_t *ret_row_bytes)
{
	int64_t max_slot = 0, max_const = 0, needed;

	for (size_t i = 0; i < n; i++) {
		int64_t slot = 0, constant = 0;

		for (size_t k = 0; k < n; k++) {
			if (!same_row(&components[i], &components[k]))
				continue;
			slot += components[k].slot_bytes;
			constant += components[k].const_bytes;
		}
		if (slot > 0 && constant > 0)
			return kv_error(KV_FAULT_MIXED_ROW,
					"group %s layer %lld: bytes per token and per block mixed",
					components[i].group, (long long)components[i].layer);
		max_slot = kv_max64(max_slot, slot);
		max_const = kv_max64(max_const, constant);
	}
	if (max_const > 0 && !max_slot)
		return kv_error(KV_FAULT_CONST_WITHOUT_LINEAR,
				"state of %lld bytes, and no layer has bytes per token",
				(long long)max_const);
	if (max_const > 0) {
		needed = kv_ceil_div(max_const, max_slot);
		if (needed > block_tokens)
			block_tokens = align * kv_ceil_div(needed, align);
	}
	*ret_block_tokens = block_tokens;
	if (ret_row_bytes)
		*ret_row_bytes = kv_max64(max_slot * block_tokens, max_const);
	return 0;
}

static int check_blocks(int64_t budget, int64_t per_block, int64_t *ret_n_blocks)
{
	int64_t n_blocks;

	if (!per_block)
		return kv_error(KV_FAULT_DIVISION_BY_ZERO, "components: a block has 0 bytes");
	n_blocks = kv_floor_div(budget, per_block);
	if (n_blocks <= 1) /* block 0 is the null block */
		return kv_error(
			KV_FAULT_BUDGET_TOO_SMALL,
			"budget: %lld bytes given, %lld needed for the null block and one more",
			(long long)budget, (long long)(2 * per_block));
	*ret_n_blocks = n_blocks;
	return 0;
}

int kv_compat_flat_plan(const struct kv_compat_component *components, size_t n,
			int64_t block_tokens, int64_t reserved_per_block, int64_t budget,
			struct kv_compat_flat *ret_plan, struct kv_compat_binding *ret_bindings)
{
	int64_t per_block = reserved_per_block, n_blocks = 0;
	int r;

	for (size_t i = 0; i < n; i++)
		per_block += components[i].slot_bytes * block_tokens + components[i].const_bytes;
	r = check_blocks(budget, per_block, &n_blocks);
	if (r)
		return r;
	for (size_t i = 0; i < n; i++)
		ret_bindings[i] = (struct kv_compat_binding){
			.tensor = (int64_t)i,
			.component = i,
			.bytes =
				components[i].slot_bytes * block_tokens + components[i].const_bytes,
		};
	*ret_plan = (struct kv_compat_flat){
		.block_tokens = block_tokens,
		.block_bytes = per_block,
		.n_blocks = n_blocks,
		.n_tensors = (int64_t)n,
		.total_bytes = n_blocks * (per_block - reserved_per_block),
	};
	return 0;
}

/* Which of its group's distinct layers a component belongs to, in order of first appearance. */
static int64_t slot_of(const struct kv_compat_component *components, size_t i)
{
	int64_t slot = 0;

	for (size_t k = 0; k < i; k++) {
		bool first = true;

		if (strcmp(components[k].group, components[i].group))
			continue;
		if (components[k].layer == components[i].layer)
			return slot_of(components, k);
		for (size_t m = 0; m < k; m++)
			if (same_row(&components[m], &components[k]))
				first = false;
		slot += first;
	}
	return slot;
}

int kv_compat_slot_plan(const struct kv_compat_component *components, size_t n,
			int64_t block_tokens, int64_t budget, struct kv_compat_flat *ret_plan,
			struct kv_compat_binding *ret_bindings, int64_t *ret_tensor_bytes)
{
	int64_t n_slots = 0, per_block = 0, n_blocks = 0;
	size_t n_bindings = 0;
	int r;

	for (size_t i = 0; i < n; i++)
		n_slots = kv_max64(n_slots, slot_of(components, i) + 1);
	for (int64_t slot = 0; slot < n_slots; slot++) {
		ret_tensor_bytes[slot] = 0;
		/* Groups in order of appearance; a group's row offsets restart at 0. */
		for (size_t g = 0; g < n; g++) {
			int64_t offset = 0;
			bool first = true;

			for (size_t k = 0; k < g; k++)
				if (!strcmp(components[k].group, components[g].group))
					first = false;
			if (!first)
				continue;
			for (size_t i = g; i < n; i++) {
				int64_t bytes = components[i].slot_bytes * block_tokens +
						components[i].const_bytes;

				if (strcmp(components[i].group, components[g].group) ||
				    slot_of(components, i) != slot)
					continue;
				ret_bindings[n_bindings++] = (struct kv_compat_binding){
					.tensor = slot,
					.component = i,
					.bytes = bytes,
					.row_offset = offset,
				};
				offset += bytes;
			}
			ret_tensor_bytes[slot] += offset;
		}
		per_block += ret_tensor_bytes[slot];
	}
	r = check_blocks(budget, per_block, &n_blocks);
	if (r)
		return r;
	for (int64_t slot = 0; slot < n_slots; slot++)
		ret_tensor_bytes[slot] *= n_blocks;
	*ret_plan = (struct kv_compat_flat){
		.block_tokens = block_tokens,
		.block_bytes = per_block,
		.n_blocks = n_blocks,
		.n_tensors = n_slots,
		.total_bytes = n_blocks * per_block,
	};
	return 0;
}
