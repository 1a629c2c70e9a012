/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Merging takes the candidate of lowest order from a heap, so that a long piece costs n log n. A candidate
 * is stale when its two symbols together are no longer as long as when it was put there: symbols only
 * ever grow, to the right.
 */
#include <errno.h>
#include <stdlib.h>

#include "tools/engine/error.h"
#include "tools/engine/tokenizer_parts.h"

struct kv_candidate {
	double order;
	int32_t at; /* index of the left symbol */
	int32_t id; /* of the two joined */
	uint32_t len;
};

static bool before(const struct kv_candidate *a, const struct kv_candidate *b)
{
	if (a->order != b->order)
		return a->order < b->order;
	return a->at < b->at;
}

static void heap_push(struct kv_merging *m, struct kv_candidate c)
{
	size_t i = m->n_heap++;

	for (; i && before(&c, &m->heap[(i - 1) / 2]); i = (i - 1) / 2)
		m->heap[i] = m->heap[(i - 1) / 2];
	m->heap[i] = c;
}

static struct kv_candidate heap_pop(struct kv_merging *m)
{
	struct kv_candidate top = m->heap[0], last = m->heap[--m->n_heap];
	size_t i = 0;

	for (;;) {
		size_t child = 2 * i + 1;

		if (child + 1 < m->n_heap && before(&m->heap[child + 1], &m->heap[child]))
			child++;
		if (child >= m->n_heap || !before(&m->heap[child], &last))
			break;
		m->heap[i] = m->heap[child];
		i = child;
	}
	m->heap[i] = last;
	return top;
}

int kv_merging_reserve(struct kv_merging *m, size_t n)
{
	if (n <= m->n_max)
		return 0;
	if (n > INT32_MAX)
		return kv_engine_error(-EINVAL, "a text of %zu bytes, %d at most", n, INT32_MAX);

	free(m->symbols);
	free(m->heap);
	m->n_max = n;
	m->symbols = calloc(n, sizeof(*m->symbols));
	/* n - 1 pairs, two more by each of n - 1 joins */
	m->heap = calloc(3 * n, sizeof(*m->heap));
	if (m->symbols && m->heap)
		return 0;
	kv_merging_deinit(m);
	return kv_engine_error(-ENOMEM, "no memory for a text of %zu bytes", n);
}

void kv_merging_deinit(struct kv_merging *m)
{
	free(m->symbols);
	free(m->heap);
	*m = (struct kv_merging){0};
}

void kv_merging_run(const struct kv_tokenizer *t, struct kv_merging *m, size_t n,
		    bool (*find)(const struct kv_tokenizer *t, const struct kv_symbol *left,
				 const struct kv_symbol *right, struct kv_joint *ret))
{
	struct kv_symbol *symbols = m->symbols;
	struct kv_joint joint;

	m->n_heap = 0;
	for (size_t i = 0; i < n; i++) {
		symbols[i].prev = (int32_t)i - 1;
		symbols[i].next = i + 1 < n ? (int32_t)i + 1 : -1;
		if (i + 1 < n && find(t, &symbols[i], &symbols[i + 1], &joint))
			heap_push(m, (struct kv_candidate){joint.order, (int32_t)i, joint.id,
							   symbols[i].len + symbols[i + 1].len});
	}

	while (m->n_heap) {
		struct kv_candidate c = heap_pop(m);
		struct kv_symbol *left = &symbols[c.at], *right;

		if (!left->len || left->next < 0)
			continue;
		right = &symbols[left->next];
		if (left->len + right->len != c.len)
			continue;

		left->id = c.id;
		left->len = c.len;
		left->next = right->next;
		right->len = 0;
		if (left->next >= 0) {
			right = &symbols[left->next];
			right->prev = c.at;
			if (find(t, left, right, &joint))
				heap_push(m, (struct kv_candidate){joint.order, c.at, joint.id,
								   left->len + right->len});
		}
		if (left->prev >= 0 && find(t, &symbols[left->prev], left, &joint))
			heap_push(m, (struct kv_candidate){joint.order, left->prev, joint.id,
							   symbols[left->prev].len + left->len});
	}
}
