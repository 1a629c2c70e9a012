/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Candidates leave a heap in falling order of their logits until k or p is reached: n + m log n for
 * m of n, where sorting a vocabulary would cost as much as a small model's step.
 */
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "include/internal/cleanup.h"
#include "tools/engine/error.h"
#include "tools/engine/sampler.h"

static int32_t largest(const float *logits, size_t n)
{
	size_t best = 0;

	for (size_t i = 1; i < n; i++)
		if (logits[i] > logits[best])
			best = i;
	return best;
}

/* [0, 1), by splitmix64 */
static double uniform(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 27) * 0x94d049bb133111eb;
	return ((z ^ z >> 31) >> 11) * 0x1p-53;
}

static bool before(const float *logits, int32_t a, int32_t b)
{
	return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static void sift(const float *logits, int32_t *heap, size_t n, size_t i)
{
	int32_t moved = heap[i];

	for (;;) {
		size_t child = 2 * i + 1;

		if (child + 1 < n && before(logits, heap[child + 1], heap[child]))
			child++;
		if (child >= n || !before(logits, heap[child], moved))
			break;
		heap[i] = heap[child];
		i = child;
	}
	heap[i] = moved;
}

int kv_sampler_pick(struct kv_sampler *s, const float *logits, size_t n)
{
	size_t k = s->top_k && s->top_k < n ? s->top_k : n, m;
	double total = 0, sum = 0, wanted;
	kv_cleanup(kv_freep) int32_t *ids = NULL;
	float max = logits[largest(logits, n)];

	if (!(s->temperature > 0))
		return largest(logits, n);

	ids = malloc(n * sizeof(*ids));
	if (!ids)
		return kv_engine_error(-ENOMEM, "no memory for %zu candidates", n);

	for (size_t i = 0; i < n; i++) {
		ids[i] = i;
		total += exp((logits[i] - max) / s->temperature);
	}
	for (size_t i = n / 2; i-- > 0;)
		sift(logits, ids, n, i);

	/* The m likeliest move to the end of the array; their weights add up to sum. */
	for (m = 0; m < k && (m == 0 || sum < s->top_p * total); m++) {
		int32_t top = ids[0];

		ids[0] = ids[n - 1 - m];
		sift(logits, ids, n - 1 - m, 0);
		ids[n - 1 - m] = top;
		sum += exp((logits[top] - max) / s->temperature);
	}

	wanted = uniform(&s->state) * sum;
	for (size_t i = 0; i < m; i++) {
		int32_t id = ids[n - 1 - i];

		wanted -= exp((logits[id] - max) / s->temperature);
		if (wanted < 0)
			return id;
	}
	return ids[n - m];
}
