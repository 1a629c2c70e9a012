/* SPDX-License-Identifier: Apache-2.0 */
/*
 * States of a group sequence.
 *
 *   own[]   rows that only this sequence has; steps write there, in place where they read there
 *   row     where the state is: one of own, a mark, or `found`
 *   marks   checkpoints of its own: rows that aren't written any more
 *   found   what was read from when it was found, or what a fork reads from
 *
 * A row that others may see, or that a fork reads from, is never written: another takes its place
 * in own[]. Rows go back by way of `drops`, which waits for a call that names the stream.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/killpoint.h"
#include "libclient/group.h"
#include "libclient/pin.h"

#define NONE ((kv_block_id)-1)
#define MOST_TOKENS 256u /* of a row's pool */

static struct kv_pool *pool_of(const struct kv_gseq *seq, uint32_t group)
{
	return seq->groups->groups[group].pool;
}

void kv_gstate_init(struct kv_gstate *state)
{
	state->row = state->found = state->read = NONE;
}

static int push(kv_block_id **list, size_t *n, size_t *room, kv_block_id id)
{
	int r = kv_seq_grow((void **)list, room, *n + 1, sizeof(**list));

	if (r < 0)
		return r;
	(*list)[(*n)++] = id;
	return 0;
}

/* Without memory for the list the row stays leased until the pool is closed. */
static void drop(struct kv_gstate *state, kv_block_id id)
{
	if (id != NONE)
		push(&state->drops, &state->n_drops, &state->drops_room, id);
}

int kv_gstate_flush(struct kv_gseq *seq, uint32_t group, void *stream)
{
	struct kv_gstate *state = &seq->states[group];
	int r;

	if (!state->n_drops)
		return 0;
	r = kv_later_release(pool_of(seq, group), stream, state->drops, (uint32_t)state->n_drops);
	if (!r)
		state->n_drops = 0;
	return r;
}

/* Used now: checkpoints among what is dropped, which a sequence held until it ended or gave way. */
static void stamp_drops(const struct kv_gstate *state, struct kv_pool *pool)
{
	struct kv_shm_blocks *shared = pool->blocks;
	uint64_t now = kv_add_relaxed(&shared->clock, 1) + 1;

	for (size_t i = 0; i < state->n_drops; i++) {
		if (pool->refs[state->drops[i]] & (KV_REF_CACHED | KV_REF_SUBMITTED))
			kv_store_relaxed(&pool->descriptors[state->drops[i]].stamp, now);
	}
}

void kv_gstate_deinit(struct kv_gstate *state, struct kv_pool *pool, void *stream)
{
	for (uint32_t i = 0; i < state->n_own; i++)
		drop(state, state->own[i]);
	for (size_t i = 0; i < state->n_spare; i++)
		drop(state, state->spare[i]);
	for (size_t i = 0; i < state->n_marks; i++)
		drop(state, state->marks[i].row);
	drop(state, state->found);
	if (!kv_forked(pool->fork_generation) && state->n_drops) {
		stamp_drops(state, pool);
		if (kv_later_release(pool, stream, state->drops, (uint32_t)state->n_drops) < 0)
			pool->lost = true;
	}
	free(state->own);
	free(state->spare);
	free(state->marks);
	free(state->drops);
}

static uint32_t n_boundaries(size_t interval, size_t from, size_t to)
{
	return to > from ? (uint32_t)(to / interval - from / interval) : 0;
}

static bool is_own(const struct kv_gstate *state, kv_block_id id)
{
	for (uint32_t i = 0; i < state->n_own; i++) {
		if (state->own[i] == id)
			return true;
	}
	return false;
}

void kv_gstate_need(const struct kv_gseq *seq, uint32_t group, size_t n_tokens, uint32_t *ret_must,
		   uint32_t *ret_may)
{
	const struct kv_group *g = &seq->groups->groups[group];
	const struct kv_gstate *state = &seq->states[group];
	uint32_t may = n_boundaries(g->interval, seq->len, n_tokens);

	*ret_must = state->n_own ? 0 : 1 + g->n_drafts;
	for (uint32_t i = 0; i < state->n_own; i++)
		*ret_must += kv_block_is_shared(g->pool, state->own[i]);
	*ret_may = may > state->n_spare ? may - (uint32_t)state->n_spare : 0;
}

/*
 * @id leaves own[] or the marks. It stays if it is where the state is, and if it is what the last step
 * read, as long as `found` isn't needed for the former.
 */
static void put_away(struct kv_gstate *state, kv_block_id id)
{
	bool stays = id == state->row || (id == state->read && state->found != state->row);

	drop(state, stays ? state->found : id);
	if (stays)
		state->found = id;
}

int kv_gstate_reserve(struct kv_gseq *seq, uint32_t group, const kv_block_id *ids, uint32_t n_may)
{
	const struct kv_group *g = &seq->groups->groups[group];
	struct kv_gstate *state = &seq->states[group];
	int r = kv_seq_grow((void **)&state->spare, &state->spare_room, state->n_spare + n_may,
			    sizeof(*state->spare));

	/* Each spare row may become a mark: a step asks for no memory. */
	if (!r)
		r = kv_seq_grow((void **)&state->marks, &state->marks_room,
				state->n_marks + state->n_spare + n_may + 1, sizeof(*state->marks));
	if (r < 0)
		return r;
	if (!state->own) {
		state->own = calloc(1 + g->n_drafts, sizeof(*state->own));
		if (!state->own)
			return kv_no_memory();
	}
	for (; state->n_own < 1 + g->n_drafts; state->n_own++)
		state->own[state->n_own] = *ids++;
	for (uint32_t i = 0; i < state->n_own; i++) {
		if (!kv_block_is_shared(g->pool, state->own[i]))
			continue;
		put_away(state, state->own[i]);
		state->own[i] = *ids++;
	}
	for (uint32_t i = 0; i < n_may; i++)
		state->spare[state->n_spare++] = *ids++;
	return 0;
}

bool kv_gstate_may_step(const struct kv_gseq *seq, uint32_t group)
{
	const struct kv_gstate *state = &seq->states[group];

	for (uint32_t i = 0; i < state->n_own; i++) {
		if (kv_block_is_shared(pool_of(seq, group), state->own[i]))
			return false;
	}
	return state->n_own;
}

static void remove_mark(struct kv_gstate *state, size_t i)
{
	kv_block_id row = state->marks[i].row;

	state->n_marks--;
	memmove(&state->marks[i], &state->marks[i + 1],
		(state->n_marks - i) * sizeof(*state->marks));
	put_away(state, row);
}

static int add_mark(struct kv_gstate *state, size_t at, kv_block_id row)
{
	int r = kv_seq_grow((void **)&state->marks, &state->marks_room, state->n_marks + 1,
			    sizeof(*state->marks));

	if (r < 0)
		return r;
	state->marks[state->n_marks++] =
		(struct kv_mark){ .at = at, .row = row, .written = at == state->at };
	return 0;
}

static void keep_last_marks(struct kv_gstate *state, const struct kv_group *g)
{
	while (state->n_marks > (g->n_checkpoints ? g->n_checkpoints : 1))
		remove_mark(state, 0);
}

int kv_gstate_step(struct kv_gseq *seq, uint32_t group, size_t to)
{
	const struct kv_group *g = &seq->groups->groups[group];
	struct kv_gstate *state = &seq->states[group];
	size_t n = to - seq->len;
	size_t boundary = (seq->len / g->interval + 1) * g->interval;

	keep_last_marks(state, g);
	state->read = state->row;
	state->wrote_elsewhere = state->read != NONE && !is_own(state, state->read);
	if (state->found != state->read) {
		drop(state, state->found);
		state->found = NONE;
	}
	state->from = seq->len;
	state->by_steps = state->n_own > 1 && n <= state->n_own;
	state->at = to;
	/* The last one isn't among them: the row that this step writes has it. */
	for (; boundary < to && state->n_spare; boundary += g->interval) {
		int r = add_mark(state, boundary, state->spare[state->n_spare - 1]);

		if (r < 0)
			return r;
		state->n_spare--;
	}
	state->row = state->own[state->by_steps ? n - 1 : 0];
	return 0;
}

int kv_gstate_fork(const struct kv_gseq *seq, struct kv_gseq *child, uint32_t group)
{
	const struct kv_gstate *state = &seq->states[group];
	struct kv_gstate *other = &child->states[group];

	other->row = other->found = state->row;
	other->at = other->from = state->at;
	other->root = state->root;
	if (state->row != NONE)
		pool_of(seq, group)->refs[state->row]++;
	return 0;
}

/* Is the row still held? */
static bool is_kept(const struct kv_gstate *state, kv_block_id id)
{
	for (size_t i = 0; i < state->n_marks; i++) {
		if (state->marks[i].row == id)
			return true;
	}
	return state->found == id;
}

bool kv_gstate_row_at(const struct kv_gseq *seq, uint32_t group, size_t n, kv_block_id *ret)
{
	const struct kv_gstate *state = &seq->states[group];

	*ret = NONE;
	if (!n)
		return true;
	if (n == state->at) {
		*ret = state->row;
		return true;
	}
	for (size_t i = 0; i < state->n_marks; i++) {
		if (state->marks[i].at == n && state->marks[i].written) {
			*ret = state->marks[i].row;
			return true;
		}
	}
	if (state->by_steps && n > state->from && n < state->at) {
		*ret = state->own[n - state->from - 1];
		return true;
	}
	/* What the step read is still there if it wrote elsewhere. */
	if (n == state->from && state->wrote_elsewhere && is_kept(state, state->read)) {
		*ret = state->read;
		return true;
	}
	return false;
}

int kv_gstate_rollback(struct kv_gseq *seq, uint32_t group, size_t n, void *stream)
{
	struct kv_gstate *state = &seq->states[group];
	kv_block_id row;

	if (n == state->at || !kv_gstate_row_at(seq, group, n, &row))
		return 0;
	state->row = row;
	state->at = n;
	for (size_t i = state->n_marks; i; i--) {
		if (state->marks[i - 1].at > n)
			remove_mark(state, i - 1);
	}
	if (!n) {
		state->read = NONE;
		state->wrote_elsewhere = state->by_steps = false;
		state->from = 0;
	}
	if (state->found != NONE && state->found != state->row && state->found != state->read) {
		drop(state, state->found);
		state->found = NONE;
	}
	return kv_gstate_flush(seq, group, stream);
}

/* What stands in the shared table of tokens for the state of @n tokens: the last of them. */
static void last_tokens(const struct kv_gseq *seq, const struct kv_pool *pool, size_t n,
			const int32_t *tokens, int32_t *ret)
{
	uint32_t size = pool->head.block_tokens;
	size_t have = n < size ? n : size;

	memset(ret, 0, size * sizeof(*ret));
	memcpy(ret, tokens + n - have, have * sizeof(*ret));
}

static int publish_mark(struct kv_gseq *seq, uint32_t group, struct kv_mark *mark, void *stream)
{
	struct kv_pool *pool = pool_of(seq, group);
	struct kv_shm_blocks *shared = pool->blocks;
	int32_t *tokens = kv_shm_tokens(pool->blocks, &pool->head, mark->row);
	struct kv_op op = { .kind = KV_OP_PUBLISH,
			    .id = mark->row,
			    .parent = -1,
			    .flags = KV_OP_ROW,
			    .parent_serial = seq->states[group].root };
	struct kv_shm_row row;
	struct kv_key key;

	last_tokens(seq, pool, mark->at, seq->tokens, tokens);
	kv_group_key(seq, group, mark->at, mark->at, tokens, &key, &row);
	*kv_shm_row(pool->blocks, &pool->head, mark->row) = row;
	op.key_lo = key.lo;
	op.key_hi = key.hi;
	op.stamp = kv_add_relaxed(&shared->clock, 1) + 1;
	mark->published = true;
	pool->refs[mark->row] |= KV_REF_SUBMITTED;
	KV_KILLPOINT(client_mark_written);
	return kv_later_publish(pool, stream, &op, 1);
}

/* The row that ends at a boundary becomes a mark, if there is another to take its place. */
static int mark_row(struct kv_gseq *seq, uint32_t group)
{
	const struct kv_group *g = &seq->groups->groups[group];
	struct kv_gstate *state = &seq->states[group];
	int r;

	if (!state->at || state->at % g->interval || !state->n_spare || !is_own(state, state->row) ||
	    kv_block_is_shared(g->pool, state->row))
		return 0;
	r = add_mark(state, state->at, state->row);
	if (r < 0)
		return r;
	for (uint32_t i = 0; i < state->n_own; i++) {
		if (state->own[i] == state->row)
			state->own[i] = state->spare[--state->n_spare];
	}
	return 0;
}

int kv_gstate_publish(struct kv_gseq *seq, uint32_t group, void *stream)
{
	const struct kv_group *g = &seq->groups->groups[group];
	struct kv_gstate *state = &seq->states[group];
	int r = mark_row(seq, group);

	for (size_t i = 0; i < state->n_marks && !r;) {
		struct kv_mark *mark = &state->marks[i];

		if (!mark->written) {
			remove_mark(state, i);
			continue;
		}
		if (!mark->published)
			r = publish_mark(seq, group, mark, stream);
		i++;
	}
	if (r < 0)
		return r;
	keep_last_marks(state, g);
	return kv_gstate_flush(seq, group, stream);
}

kv_block_id kv_gstate_find(const struct kv_gseq *seq, uint32_t group, size_t n)
{
	struct kv_pool *pool = pool_of(seq, group);
	int32_t tokens[MOST_TOKENS];
	uint32_t cursor = 0;
	struct kv_shm_row row;
	struct kv_key key;
	kv_block_id id;

	last_tokens(seq, pool, n, seq->tokens, tokens);
	kv_group_key(seq, group, n, n, tokens, &key, &row);
	do {
		id = kv_prefix_find(&pool->prefix, key, &cursor);
	} while (id >= 0 &&
		 !kv_pin(pool, id, seq->states[group].root | KV_SERIAL_ROW, tokens,
			 pool->head.block_tokens, &row));
	return id;
}

void kv_gstate_adopt(struct kv_gseq *seq, uint32_t group, size_t n, kv_block_id row)
{
	struct kv_pool *pool = pool_of(seq, group);
	struct kv_gstate *state = &seq->states[group];
	struct kv_shm_blocks *shared = pool->blocks;

	drop(state, state->found);
	state->found = state->row = row;
	state->read = NONE;
	state->wrote_elsewhere = state->by_steps = false;
	state->at = state->from = n;
	kv_store_relaxed(&pool->descriptors[row].stamp, kv_add_relaxed(&shared->clock, 1) + 1);
	kv_ops_try(pool, &(struct kv_op){ .kind = KV_OP_TOUCH, .id = row, .parent = 1 });
}

/* ---- what kernels are given ---- */

static int check_lanes(struct kv_gseq *const *seqs, uint32_t n_seqs, uint32_t n_lanes,
		       uint32_t group, const struct kv_state_lanes *lanes)
{
	if (n_lanes < n_seqs || !n_seqs || !lanes->read_rows || !lanes->write_rows)
		return kv_error(-EINVAL, "lanes: %u lanes for %u sequences, read_rows and write_rows "
				"are needed", n_lanes, n_seqs);
	for (uint32_t i = 0; i < n_seqs; i++) {
		const struct kv_groups *groups = seqs[i]->groups;
		const struct kv_gstate *state;

		if (groups != seqs[0]->groups || group >= groups->n ||
		    groups->groups[group].kind != KV_GROUP_STATE)
			return kv_error(-EINVAL, "lanes: group %u of sequence %u is no state of the same "
					"groups", group, i);
		state = &seqs[i]->states[group];
		if (state->by_steps && !lanes->step_rows)
			return kv_error(-EINVAL, "step_rows: sequence %u has a step of drafts, none are "
					"given", i);
		if (lanes->table && state->at / groups->groups[group].interval > lanes->table_width)
			return kv_error(-EINVAL, "table_width: %u given, sequence %u has %zu tokens and a "
					"checkpoint each %u", lanes->table_width, i, state->at,
					groups->groups[group].interval);
	}
	return 0;
}

static void fill(int32_t *to, int32_t with, size_t n)
{
	for (size_t i = 0; to && i < n; i++)
		to[i] = with;
}

static void fill_lane(struct kv_gseq *seq, uint32_t group, uint32_t i,
		      const struct kv_state_lanes *lanes)
{
	const struct kv_group *g = &seq->groups->groups[group];
	struct kv_gstate *state = &seq->states[group];
	size_t width = 1 + g->n_drafts;

	lanes->read_rows[i] = state->read;
	lanes->write_rows[i] = state->by_steps || !state->n_own ? NONE : state->row;
	if (lanes->n_computed)
		lanes->n_computed[i] = (int32_t)state->from;
	if (lanes->step_rows) {
		fill(lanes->step_rows + i * width, NONE, width);
		for (size_t k = 0; state->by_steps && k < state->at - state->from; k++)
			lanes->step_rows[i * width + k] = state->own[k];
	}
	if (!lanes->table)
		return;
	fill(lanes->table + (size_t)i * lanes->table_width, NONE, lanes->table_width);
	for (size_t k = 0; k < state->n_marks; k++) {
		size_t at = state->marks[k].at;

		if (at <= state->from || at >= state->at)
			continue;
		lanes->table[(size_t)i * lanes->table_width + at / g->interval - 1] =
			state->marks[k].row;
		state->marks[k].written = true;
	}
}

KV_PUBLIC int kv_state_lanes(struct kv_gseq *const *seqs, uint32_t n_seqs, uint32_t n_lanes,
			     uint32_t group, const struct kv_state_lanes *lanes)
{
	int r = check_lanes(seqs, n_seqs, n_lanes, group, lanes);
	const struct kv_group *g;
	int32_t null_row;

	if (r < 0)
		return r;
	g = &seqs[0]->groups->groups[group];
	null_row = g->pool->head.null_block;
	for (uint32_t i = 0; i < n_seqs; i++)
		fill_lane(seqs[i], group, i, lanes);
	for (uint32_t i = n_seqs; i < n_lanes; i++) {
		lanes->read_rows[i] = lanes->write_rows[i] = null_row;
		if (lanes->n_computed)
			lanes->n_computed[i] = 0;
		if (lanes->step_rows)
			fill(lanes->step_rows + (size_t)i * (1 + g->n_drafts), null_row,
			     1 + g->n_drafts);
		if (lanes->table)
			fill(lanes->table + (size_t)i * lanes->table_width, null_row,
			     lanes->table_width);
	}
	return 0;
}
