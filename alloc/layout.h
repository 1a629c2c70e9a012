/* SPDX-License-Identifier: Apache-2.0 */
/* What daemon and library both work out of a declared layout (include/kvcached/layout.h). */
#ifndef KV_ALLOC_LAYOUT_H
#define KV_ALLOC_LAYOUT_H

#include "include/kvcached/layout.h"

/* kv_layout_check() - 0, or -EINVAL with a text that names field, value and what would be right */
int kv_layout_check(const struct kv_layout *layout);

/* kv_layout_component_bytes() - bytes of component @i in one block, rounded up to KV_BLOCK_ALIGN */
uint64_t kv_layout_component_bytes(const struct kv_layout *layout, uint32_t i);

/**
 * kv_layout_view() - strides of component @i
 * @arena:	 address of the arena
 * @slab_offset: paged: where the slab starts in the arena
 * @slab_blocks: paged: its number of blocks
 */
void kv_layout_view(const struct kv_layout *layout, uint32_t i, void *arena, uint64_t slab_offset,
		    uint64_t slab_blocks, struct kv_view *ret);

/**
 * kv_layout_difference() - what two layouts disagree on
 * @text: filled with "block_tokens: 16 here, 32 asked; ..." ; [size]
 *
 * Return: how many fields differ; a differing list of components counts once.
 */
int kv_layout_difference(const struct kv_layout *have, const struct kv_layout *asked, char *text,
			 size_t size);

#endif
