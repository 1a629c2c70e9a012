/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/daemon.h"
#include "daemon/events_stream.h"

#define RUN_MAX	 64   /* blocks of one event */
#define GONE_MAX 1024 /* of one that takes them back */

struct kv_event_entry {
	uint64_t serial;
	int32_t id;
};

int kv_event_stream_init(struct kv_event_stream *s, struct kv_pool *pool, uint32_t group,
			 bool legacy)
{
	*s = (struct kv_event_stream){.pool = pool, .group = group, .pack = {.legacy = legacy}};
	s->told = calloc(pool->books.head->id_limit / 64 + 1, sizeof(*s->told));
	return s->told ? 0 : -ENOMEM;
}

void kv_event_stream_deinit(struct kv_event_stream *s)
{
	size_t n;

	free(kv_pack_take(&s->pack, 0, 0, &n));
	free(s->list);
	free(s->told);
	free(s->gone);
}

static const char *medium_of(const struct kv_pool *pool)
{
	return pool->daemon->config.host ? "CPU" : "GPU";
}

static const char *kind_of(const struct kv_pool *pool)
{
	bool has_keys = false;

	for (uint32_t i = 0; i < pool->layout.n_components; i++) {
		if (pool->layout.components[i].role == KV_ROLE_V)
			return "full_attention";
		has_keys |= pool->layout.components[i].role == KV_ROLE_K;
	}
	return has_keys ? "mla_attention" : "mamba"; /* latents have no values beside them */
}

static bool is_told(const struct kv_event_stream *s, int32_t id)
{
	return s->told[id / 64] >> id % 64 & 1;
}

static void set_told(struct kv_event_stream *s, int32_t id, bool told)
{
	uint64_t bit = (uint64_t)1 << id % 64;

	s->told[id / 64] = told ? s->told[id / 64] | bit : s->told[id / 64] & ~bit;
}

/* The consumers' block @id is no more; a message that says so may be on its way. */
static void note_gone(struct kv_event_stream *s, int32_t id)
{
	set_told(s, id, false);
	if (s->n_gone == s->gone_room) {
		size_t room = s->gone_room ? 2 * s->gone_room : 64;
		void *more = realloc(s->gone, room * sizeof(*s->gone));

		if (!more)
			return;
		s->gone = more;
		s->gone_room = room;
	}
	s->gone[s->n_gone++] = s->pool->books.books[id].key.lo;
}

static int compare(const void *a, const void *b)
{
	const struct kv_event_entry *x = a, *y = b;

	return (x->serial > y->serial) - (x->serial < y->serial);
}

static int make_room(struct kv_event_stream *s, size_t n)
{
	size_t room = s->room ? s->room : 64;
	void *list;

	if (n <= s->room)
		return 0;
	while (room < n)
		room *= 2;
	list = realloc(s->list, room * sizeof(*s->list));
	if (!list)
		return -ENOMEM;
	s->list = list;
	s->room = room;
	return 0;
}

static bool is_reachable(const struct kv_books *b, int32_t id)
{
	return b->books[id].state == KV_BLOCK_CACHED && !b->books[id].stale;
}

int kv_event_stream_stored(struct kv_event_stream *s, int32_t id)
{
	/* Nobody takes it: all that is cached is a shorter list than what came and went. */
	if (s->n > 2 * (size_t)s->pool->books.n_total + 64)
		return -E2BIG;
	if (make_room(s, s->n + 1) < 0)
		return -ENOMEM;
	s->list[s->n++] = (struct kv_event_entry){s->pool->books.books[id].serial, id};
	return 0;
}

int kv_event_stream_stored_all(struct kv_event_stream *s)
{
	const struct kv_books *b = &s->pool->books;
	int r = make_room(s, b->n_cached);

	s->at = s->n = 0;
	if (r < 0)
		return r;
	for (uint32_t id = 0; id < b->head->id_limit && s->n < s->room; id++) {
		if (is_reachable(b, (int32_t)id))
			s->list[s->n++] = (struct kv_event_entry){b->books[id].serial, (int32_t)id};
	}
	qsort(s->list, s->n, sizeof(*s->list), compare);
	return 0;
}

int kv_event_stream_stored_alike(struct kv_event_stream *s, const struct kv_event_stream *other)
{
	int r = make_room(s, other->n);

	s->at = s->n = 0;
	if (r < 0 || !other->n)
		return r;
	memcpy(s->list, other->list, other->n * sizeof(*s->list));
	s->n = other->n;
	return 0;
}

/* From the list's next on: blocks that follow one another, as one event. Return: entries used. */
static size_t pack_run(struct kv_event_stream *s, size_t most)
{
	const struct kv_books *b = &s->pool->books;
	uint64_t hashes[RUN_MAX], extras[RUN_MAX], before = 0;
	const int32_t *tokens[RUN_MAX];
	struct kv_stored event = {.block_tokens = s->pool->layout.block_tokens,
				  .hashes = hashes,
				  .tokens = tokens,
				  .extras = extras,
				  .medium = medium_of(s->pool),
				  .kind = kind_of(s->pool),
				  .group = s->group};
	size_t used = 0;

	for (; used < most && event.n_blocks < RUN_MAX; used++) {
		const struct kv_event_entry *entry = &s->list[s->at + used];
		const struct kv_book *book = &b->books[entry->id];
		uint32_t i = event.n_blocks;

		if (!is_reachable(b, entry->id) || book->serial != entry->serial)
			continue;
		if (i && (book->parent < 0 || b->books[book->parent].serial != before))
			break;
		if (!i && book->parent >= 0) {
			event.has_parent = true;
			event.parent = b->books[book->parent].key.lo;
		}
		hashes[i] = book->key.lo;
		extras[i] = book->parent_serial & KV_SERIAL_ROW ? book->key.hi : 0;
		tokens[i] = kv_shm_tokens(s->pool->blocks, s->pool->head, entry->id);
		before = book->serial;
		set_told(s, entry->id, true);
		event.n_blocks++;
	}
	if (event.n_blocks)
		kv_pack_stored(&s->pack, &event);
	return used;
}

bool kv_event_stream_pack(struct kv_event_stream *s, size_t most)
{
	while (s->at < s->n && most) {
		size_t left = s->n - s->at, used = pack_run(s, left < most ? left : most);

		s->at += used;
		most -= used < most ? used : most;
	}
	if (s->at == s->n)
		s->at = s->n = 0;
	return s->n;
}

bool kv_event_stream_left(struct kv_event_stream *s, int32_t id, bool in_doubt)
{
	if (!is_told(s, id))
		return false;
	note_gone(s, id);
	if (!in_doubt)
		kv_pack_removed(&s->pack, &s->pool->books.books[id].key.lo, 1, medium_of(s->pool),
				s->group);
	return true;
}

void kv_event_stream_take_back(struct kv_event_stream *s, struct kv_pack *pack)
{
	uint32_t n_words = s->pool->books.head->id_limit / 64 + 1;

	for (uint32_t w = 0; w < n_words; w++) {
		while (s->told[w])
			note_gone(s, (int32_t)(w * 64 + (uint32_t)__builtin_ctzll(s->told[w])));
	}
	for (size_t at = 0; at < s->n_gone; at += GONE_MAX) {
		size_t n = s->n_gone - at < GONE_MAX ? s->n_gone - at : GONE_MAX;

		kv_pack_removed(pack, s->gone + at, (uint32_t)n, medium_of(s->pool), s->group);
	}
}

static int compare_moves(const void *a, const void *b)
{
	const struct kv_books_move *x = a, *y = b;

	return (x->from > y->from) - (x->from < y->from);
}

void kv_event_stream_moved(struct kv_event_stream *s, const struct kv_books_move *moves, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		if (is_told(s, moves[i].from)) {
			set_told(s, moves[i].from, false);
			set_told(s, moves[i].to, true);
		}
	}
	for (size_t i = s->at; i < s->n; i++) {
		struct kv_books_move key = {.from = s->list[i].id};
		const struct kv_books_move *move =
			bsearch(&key, moves, n, sizeof(*moves), compare_moves);

		if (move && s->pool->books.books[move->to].serial == s->list[i].serial)
			s->list[i].id = move->to;
	}
}
