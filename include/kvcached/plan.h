/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans: what a token, a block and a state row of a model cost, how many fit, where each byte lies.
 *
 *	model -> groups and components -> pools within a budget
 *
 * Group: layers that keep the same tokens (all of them, a window, a state). Component: what one
 * layer keeps under one name ("k", "latent", "ssm"). Pool: blocks of one size; a group's blocks
 * come from one pool. A block holds the components of its pool, each at a multiple of
 * KV_BLOCK_ALIGN. Block 0 of each pool is the null block; it is part of the plan.
 *
 *	address(pool, block, component) = pool.offset + block*pool.block_bytes + component.offset
 *	sum of pool.bytes + waste_bytes == budget_bytes, exactly
 *
 * Arithmetic is in 64-bit integers and checked. Planning allocates nothing but the plan, asks no
 * device and no daemon, and takes less than a millisecond. No threads: one plan, one owner.
 */
#ifndef KVCACHED_PLAN_H
#define KVCACHED_PLAN_H

#include <kvcached/layout.h>
#include <kvcached/arch.h>

#ifdef __cplusplus
extern "C" {
#endif

enum kv_plan_layout {
	KV_PLAN_AUTO = 0,    /* the one that fits most sequences */
	KV_PLAN_FLAT = 1,    /* one pool; a block has all layers, and states as constant parts */
	KV_PLAN_SPLIT = 2,   /* as flat, with states in a pool of rows */
	KV_PLAN_PAGED = 3,   /* as split, with each component in one piece over all blocks */
	KV_PLAN_GROUPED = 4, /* a pool for each group */
	KV_PLAN_SLAB = 5,    /* groups share blocks of the largest group's size; states in rows */
};

enum kv_kv_type {
	KV_KV_AUTO = 0, /* the model's own type */
	KV_KV_F32 = 1,
	KV_KV_F16 = 2,
	KV_KV_BF16 = 3,
	KV_KV_F8 = 4, /* e4m3 */
	KV_KV_INT8 = 5,
	KV_KV_F4 = 6,	     /* two values a byte, one 8-bit scale for 16 */
	KV_KV_F8_PACKED = 7, /* latent rows: 8-bit latent, a float scale for 128, 16-bit position */
};

enum kv_kv_scales {
	KV_SCALES_TENSOR = 0,	  /* one a layer, kept with the weights: no bytes in blocks */
	KV_SCALES_HEAD = 1,	  /* one a head and layer, likewise */
	KV_SCALES_TOKEN_HEAD = 2, /* a float for each token and head, in the block */
};

struct kv_plan_options {
	size_t size;
	uint64_t budget_bytes;
	uint32_t tp;		/* ranks that share the heads; 0: 1 */
	uint32_t block_tokens;	/* 0: 64, or what the layout needs */
	uint32_t kernel_tokens; /* blocks that kernels read are parts of this size; 0: whole */
	uint32_t layout;	/* enum kv_plan_layout */
	uint32_t kv_type;	/* enum kv_kv_type */
	uint32_t scales;	/* enum kv_kv_scales */
	uint32_t state_type;	/* enum kv_dtype of recurrences; 0: the model's */
	uint32_t n_seqs;	/* sequences at once; 0: as many as fit */
	uint64_t context;	/* tokens of a sequence; 0: the model's */
	uint32_t chunk_tokens;	/* of a prefill in flight, kept beyond windows; 0: 2048 */
	uint32_t draft_tokens;	/* speculated: a state row for each */
	uint32_t n_checkpoints; /* state rows a sequence keeps for its prefix */
	uint32_t fp4_indexer;	/* V4: indexer keys in 4 bits */
};

/**
 * kv_plan_option() - set an option by its name on command lines
 * @name: "tp", "block-size", "kernel-size", "layout", "kv-dtype", "scales", "state-dtype", "max-seqs",
 *	  "context", "chunk", "draft-tokens", "checkpoints", "fp4-indexer"
 *
 * Return: 0; -EINVAL for a value that can't be (the text names name, value and what exists); -ENOENT
 *         if no option has that name.
 */
int kv_plan_option(struct kv_plan_options *options, const char *name, const char *value);

/* kv_plan_layout_name(), kv_plan_kv_type_name() - "split", "fp8"; "?" of what is none */
const char *kv_plan_layout_name(uint32_t layout);
const char *kv_plan_kv_type_name(uint32_t kv_type);

enum kv_group_kind {
	KV_GROUP_FULL = 1,
	KV_GROUP_WINDOW = 2,
	KV_GROUP_CHUNKED = 3,
	KV_GROUP_STATE = 4,
	KV_GROUP_CROSS = 5,
};

struct kv_plan_group {
	char name[24];
	uint8_t kind; /* enum kv_group_kind */
	uint32_t window;
	uint32_t stride;       /* tokens a stored row stands for */
	uint32_t block_tokens; /* 0 for states: a block is a row */
	uint32_t pool;
	uint64_t payload_bytes;	 /* of its components in a block */
	uint64_t blocks_per_seq; /* at the plan's context */
};

struct kv_plan_component {
	char name[16];
	uint16_t layer; /* of the model; a draft's layers follow the target's */
	uint16_t group;
	uint8_t role;  /* enum kv_role */
	uint8_t dtype; /* enum kv_dtype */
	uint32_t n_heads, head_dim;
	uint64_t slot_bytes;  /* of a stored row */
	uint64_t const_bytes; /* of a block */
	uint32_t round;	      /* bytes in a block are a multiple of this; 0: of 1 */
	/* Filled by the planner: */
	uint64_t offset; /* in a block */
	uint64_t bytes;	 /* in a block */
};

struct kv_plan_pool {
	char name[24];
	uint8_t paged; /* components in one piece each, not blocks */
	uint32_t block_tokens;
	uint64_t block_bytes;	/* a multiple of KV_BLOCK_ALIGN */
	uint64_t payload_bytes; /* of it in use; the rest is alignment */
	uint64_t n_blocks;	/* the null block included */
	uint64_t offset, bytes; /* in the budget */
	uint64_t blocks_per_seq;
	uint64_t blocks_once; /* besides sequences: the null block, and a prefill in flight */
};

struct kv_plan {
	uint32_t layout; /* enum kv_plan_layout */
	uint64_t budget_bytes;
	uint64_t used_bytes;
	uint64_t waste_bytes;	/* budget_bytes - used_bytes: too little for one more of anything */
	uint64_t null_bytes;	/* of used_bytes: null blocks */
	uint64_t align_bytes;	/* of used_bytes: padding in blocks */
	uint64_t token_bytes;	/* a token in all layers that keep all tokens */
	uint64_t state_bytes;	/* a sequence's states, one row each */
	uint64_t rows_per_seq;	/* state rows of a sequence: its own, drafts', checkpoints */
	uint64_t prefix_tokens; /* cached prefixes are multiples of this: all groups' blocks end
				   there */
	uint64_t context;
	uint64_t seq_bytes;	 /* a sequence of `context` tokens, in whole blocks */
	uint64_t seq_need_bytes; /* the same in bytes that hold something */
	uint64_t n_seqs;	 /* of that length, at once */
	uint64_t n_tokens;	 /* at once, if all belong to sequences of that length */
	uint32_t n_groups, n_components, n_pools;
	struct kv_plan_group *groups;
	struct kv_plan_component *components;
	struct kv_plan_pool *pools;
};

/**
 * kv_plan_arch() - plan the memory of a model and, with it, of its draft model
 * @draft: NULL: none. Its layers join the target's groups: one block id serves both.
 *
 * Return: 0; -EINVAL if a field is wrong or a combination can't be (kv_error_text() names it);
 *         -ENOSPC if the budget holds no block besides the null block (the text says how many
 *         bytes would); -EOVERFLOW; -ENOMEM. *ret_plan is for kv_plan_free().
 */
int kv_plan_arch(const struct kv_arch *model, const struct kv_arch *draft,
		 const struct kv_plan_options *options, struct kv_plan **ret_plan);

/**
 * kv_plan_groups() - plan groups and components given by hand
 * @groups:     name, kind, window, stride, block_tokens are read
 * @components: name, layer, group, sizes are read
 * @options:    layout is not KV_PLAN_AUTO, context is not 0; types and ranks are not read
 *
 * Return: as kv_plan_arch().
 */
int kv_plan_groups(const struct kv_plan_group *groups, uint32_t n_groups,
		   const struct kv_plan_component *components, uint32_t n_components,
		   const struct kv_plan_options *options, struct kv_plan **ret_plan);

/* kv_plan_free() - NULL is allowed. Return: NULL. */
struct kv_plan *kv_plan_free(struct kv_plan *plan);

/* kv_plan_check() - verify every equation of the plan. Return: 0; -EUCLEAN: the text says which. */
int kv_plan_check(const struct kv_plan *plan);

/* kv_plan_cost() - blocks of each pool that @tokens of one sequence take: ret_blocks[n_pools] */
void kv_plan_cost(const struct kv_plan *plan, uint64_t tokens, uint64_t *ret_blocks);

/* What a scheduler never exceeds. */
struct kv_plan_load {
	uint64_t n_seqs;	/* L: sequences at once */
	uint64_t n_tokens;	/* T: tokens of all of them together */
	uint64_t context;	/* C: of one */
	uint64_t step_tokens;	/* S: that one step computes */
	uint64_t ahead_tokens;	/* A: of a sequence, scheduled before the results of its last step are back; 0: none */
	uint64_t margin_blocks; /* M: besides */
};

/**
 * kv_plan_load_blocks() - blocks of a group with which a load always finds room, the null block included
 * @group: kind, window and block_tokens are read; FULL, WINDOW or STATE. block_tokens of a STATE are
 *	   those from checkpoint to checkpoint; 0: it keeps none
 *
 * A pool that several groups share needs the sum. What is cached for later takes nothing of it: it goes when
 * there is need.
 * Return: 0; -EINVAL: the text names group and field; -EOVERFLOW.
 */
int kv_plan_load_blocks(const struct kv_plan_group *group, const struct kv_plan_load *load, uint64_t *ret_blocks);

/**
 * kv_plan_table_columns() - columns of a block table that holds any sequence, for a graph to be captured with
 * @ahead_tokens: that are in flight at most: of a step, or of two where steps overlap
 * @compact:	  1: a WINDOW's table begins with the first block that is still there (slots.h); 0: with the
 *		  sequence, as those of batch.h
 *
 * Return: 0; -EINVAL: the text names group and field; -EOVERFLOW.
 */
int kv_plan_table_columns(const struct kv_plan_group *group, uint64_t context, uint64_t ahead_tokens, int compact,
			  uint64_t *ret_columns);

/**
 * kv_plan_pool_layout() - one pool of the plan as the layout that a pool is opened with
 * @components: room for all components of the plan
 *
 * Components come in the order of their offsets. Blocks of an encoder's output have its tokens;
 * a state's row is a block of 1 token.
 *
 * Where groups take turns in a block, or rows stand for several tokens or are rounded, it is a
 * KV_LAYOUT_PLACED one.
 *
 * Return: number of components; -EINVAL for a number out of range; -ENOTSUP if a kv_layout can't
 *         express the pool (the text says why): more than KV_MAX_BLOCK_TOKENS or KV_MAX_COMPONENTS.
 */
int kv_plan_pool_layout(const struct kv_plan *plan, uint32_t pool, struct kv_component *components,
			struct kv_layout *ret_layout);

/**
 * kv_plan_local_heads() - KV heads on each rank
 *
 * Return: heads / tp, or 1 where ranks share heads; -EINVAL if neither divides the other.
 */
int kv_plan_local_heads(uint32_t n_heads, uint32_t tp, uint32_t *ret_heads);

/* kv_plan_first_head() - the first head that @rank holds */
uint32_t kv_plan_first_head(uint32_t n_heads, uint32_t tp, uint32_t rank);

/* A device as one rank of a client sees it. */
struct kv_plan_rank {
	uint64_t total_bytes;
	uint64_t own_bytes;  /* of the client's weights and buffers there, as it declares them */
	uint64_t free_bytes; /* of the device now; UINT64_MAX: not measured */
};

/**
 * kv_plan_budget() - what a client may use for its cache on each rank, whoever else is there
 * @share_ppm: the client's share of each device, in millionths
 *
 * The least of share * total - own over the ranks. What is free now never makes it smaller: either
 * it is there, or the answer is no.
 *
 * Return: 0; -ENOSPC if a rank's own use leaves nothing of the share, or less is free than that:
 *         the text has the rank and the numbers.
 */
int kv_plan_budget(const struct kv_plan_rank *ranks, uint32_t n, uint32_t share_ppm,
		   uint64_t *ret_bytes);

struct kv_plan_share {
	uint64_t min_bytes;   /* guaranteed */
	uint64_t max_bytes;   /* 0: no limit */
	uint32_t weight;      /* of what is left; 0: 1 */
	uint64_t grant_bytes; /* filled */
};

/**
 * kv_plan_colocate() - divide a budget among pools
 *
 * Everyone's minimum first; the rest by weight up to each maximum; nothing is lost to rounding.
 * Return: 0; -ENOSPC if the minima exceed the budget: the text has the numbers.
 */
int kv_plan_colocate(uint64_t budget_bytes, struct kv_plan_share *shares, uint32_t n);

#ifdef __cplusplus
}
#endif
#endif
