/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans: blocks and table columns for a load that an engine's scheduler bounds.
 *
 *	full	ceil(T / B) + L + P + 1 + M		each sequence's last block is begun anew
 *	state	min(2 L + T / B + P + 1 + M, full)	the row that is read, the row that is
 *written, checkpoints P = L ceil(A / B): tokens of a step that is scheduled before the last one's
 *results are back
 *
 * k + n tokens lie in at most (k + n + 2 B - 2) / B blocks: the first of them may be a block's
 *last. Of a window k = min(W - 1, C) + A are there before the step, and its S tokens take most
 *where each sequence is brought over the next boundary, for e = B - (k + 2 B - 2) % B of them, and
 *the rest goes on in whole blocks:
 *
 *	window	L ((k + 2 B - 2) / B) + (S < L e ? S / e : L + (S - L e) / B) + 1 + M
 *		or those of L whole contexts, if they are fewer
 */
#include <errno.h>
#include <kvcached/plan.h>

#include "include/internal/error.h"
#include "include/internal/public.h"

typedef unsigned __int128 wide;

#define MOST ((uint64_t)1 << 60) /* of any number that is given: products of two fit into a wide \
				  */

static wide ceil_div(wide a, uint64_t b)
{
	return (a + b - 1) / b;
}

static uint64_t least(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

static int check_group(const struct kv_plan_group *group)
{
	if (group->kind != KV_GROUP_FULL && group->kind != KV_GROUP_WINDOW &&
	    group->kind != KV_GROUP_STATE)
		return kv_error(-EINVAL,
				"group '%s': kind is %u; full, window and state grow with a load",
				group->name, group->kind);
	if (!group->block_tokens && group->kind != KV_GROUP_STATE)
		return kv_error(-EINVAL, "group '%s': block_tokens is 0, 1 or more is needed",
				group->name);
	if (group->kind == KV_GROUP_WINDOW && !group->window)
		return kv_error(-EINVAL, "group '%s': window is 0, 1 or more is needed",
				group->name);
	return 0;
}

static int check_number(const char *name, uint64_t n)
{
	return n > MOST ? kv_error(-EOVERFLOW, "%s: %llu given, at most 2^60 allowed", name,
				   (unsigned long long)n)
			: 0;
}

static int check_load(const struct kv_plan_load *load)
{
	int r = check_number("n_seqs", load->n_seqs);

	r = r ? r : check_number("n_tokens", load->n_tokens);
	r = r ? r : check_number("context", load->context);
	r = r ? r : check_number("step_tokens", load->step_tokens);
	r = r ? r : check_number("ahead_tokens", load->ahead_tokens);
	return r ? r : check_number("margin_blocks", load->margin_blocks);
}

static int hand_over(wide n, const char *what, uint64_t *ret)
{
	if (n > INT64_MAX)
		return kv_error(-EOVERFLOW, "%s: more than 2^63", what);
	*ret = (uint64_t)n;
	return 0;
}

static wide window_blocks(const struct kv_plan_group *group, const struct kv_plan_load *load)
{
	uint64_t size = group->block_tokens;
	wide live = load->n_seqs,
	     whole = live * ceil_div((wide)load->context + load->ahead_tokens, size);
	wide behind =
		(wide)least(group->window - 1, load->context) + load->ahead_tokens + 2 * size - 2;
	wide edge = size - behind % size, step = load->step_tokens;
	wide blocks = live * (behind / size);

	blocks += step < live * edge ? step / edge : live + (step - live * edge) / size;
	return blocks < whole ? blocks : whole;
}

KV_PUBLIC int kv_plan_load_blocks(const struct kv_plan_group *group,
				  const struct kv_plan_load *load, uint64_t *ret_blocks)
{
	uint64_t size = group->block_tokens;
	wide once = (wide)1 + load->margin_blocks, live = load->n_seqs, blocks, full;
	int r = check_group(group);

	r = r ? r : check_load(load);
	if (r < 0)
		return r;
	if (!size) /* rows, and no checkpoints */
		return hand_over(2 * live + once, "blocks", ret_blocks);
	once += live * ceil_div(load->ahead_tokens, size);
	full = ceil_div(load->n_tokens, size) + live + once;
	blocks = full;
	if (group->kind == KV_GROUP_WINDOW)
		blocks = window_blocks(group, load) + 1 + load->margin_blocks;
	else if (group->kind == KV_GROUP_STATE && 2 * live + load->n_tokens / size + once < full)
		blocks = 2 * live + load->n_tokens / size + once;
	return hand_over(blocks, "blocks", ret_blocks);
}

KV_PUBLIC int kv_plan_table_columns(const struct kv_plan_group *group, uint64_t context,
				    uint64_t ahead_tokens, int compact, uint64_t *ret_columns)
{
	int r = check_group(group);

	r = r ? r : check_number("context", context);
	r = r ? r : check_number("ahead_tokens", ahead_tokens);
	if (r < 0)
		return r;
	if (!ahead_tokens)
		return kv_error(-EINVAL, "ahead_tokens: 0 given, a step has 1 or more");
	if (!group->block_tokens)
		return kv_error(-EINVAL, "group '%s': block_tokens is 0: its rows have no table",
				group->name);
	if (compact && group->kind == KV_GROUP_WINDOW) /* it begins in the midst of a block */
		return hand_over(ceil_div((wide)least(group->window, context) + ahead_tokens,
					  group->block_tokens) +
					 1,
				 "columns", ret_columns);
	return hand_over(ceil_div((wide)context + ahead_tokens, group->block_tokens), "columns",
			 ret_columns);
}
