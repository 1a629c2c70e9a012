/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "alloc/ghost.h"

#define TABLE_SHARE 4 /* places of the table to each of the ring */

void kv_ghosts_deinit(struct kv_ghosts *g)
{
	free(g->ring);
	free(g->table);
	memset(g, 0, sizeof(*g));
}

static struct kv_ghost *at(const struct kv_ghosts *g, uint64_t i)
{
	return &g->ring[i & (g->room - 1)];
}

static uint32_t *place(const struct kv_ghosts *g, struct kv_key key)
{
	return &g->table[key.hi & (TABLE_SHARE * (uint64_t)g->room - 1)];
}

static bool is_gone(const struct kv_ghost *ghost)
{
	return !ghost->key.lo && !ghost->key.hi;
}

static void note(struct kv_ghosts *g, uint64_t i)
{
	if (!is_gone(at(g, i)))
		*place(g, at(g, i)->key) = (uint32_t)(i & (g->room - 1)) + 1;
}

/* Room for @n in the ring, if there is memory. */
static void grow(struct kv_ghosts *g, uint32_t n)
{
	struct kv_ghosts more = {.room = g->room ? g->room : 256, .tail = g->tail, .head = g->head};

	if (n <= g->room || n > 1u << 26)
		return;
	while (more.room < n)
		more.room *= 2;
	more.ring = calloc(more.room, sizeof(*more.ring));
	more.table = calloc(TABLE_SHARE * (size_t)more.room, sizeof(*more.table));
	if (!more.ring || !more.table) {
		kv_ghosts_deinit(&more);
		return;
	}
	for (uint64_t i = g->tail; i < g->head; i++) {
		*at(&more, i) = *at(g, i);
		note(&more, i);
	}
	kv_ghosts_deinit(g);
	*g = more;
}

void kv_ghosts_add(struct kv_ghosts *g, const struct kv_ghost *ghost, uint32_t most)
{
	grow(g, most);
	if (!g->room)
		return;
	if (most > g->room)
		most = g->room;
	while (g->head - g->tail >= (most ? most : 1))
		g->tail++;
	*at(g, g->head) = *ghost;
	note(g, g->head++);
}

void kv_ghosts_prefetch(const struct kv_ghosts *g, struct kv_key key)
{
	if (g->room)
		__builtin_prefetch(place(g, key), 1);
}

bool kv_ghosts_take(struct kv_ghosts *g, struct kv_key key, struct kv_ghost *ret)
{
	uint32_t i = g->room ? *place(g, key) : 0;
	struct kv_ghost *ghost;

	if (!i)
		return false;
	ghost = &g->ring[i - 1];
	if (is_gone(ghost) || ghost->key.lo != key.lo || ghost->key.hi != key.hi)
		return false;
	*ret = *ghost;
	ghost->key = (struct kv_key){0, 0};
	*place(g, key) = 0;
	return true;
}

const struct kv_ghost *kv_ghosts_at(const struct kv_ghosts *g, uint64_t i)
{
	return is_gone(at(g, i)) ? NULL : at(g, i);
}
