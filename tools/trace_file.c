/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "tools/trace_file.h"

/* Which number a key has: open addressing, less than half full. */
struct numbers {
	struct place {
		struct kv_trace_key key;
		uint64_t number; /* + 1; 0: empty */
	} *places;
	size_t n_places; /* a power of two */
	uint64_t n;
};

static int grow(void **array, size_t *room, size_t n, size_t item)
{
	size_t more = *room ? *room : 64;
	void *p;

	while (more < n)
		more *= 2;
	if (more == *room)
		return 0;
	p = realloc(*array, more * item);
	if (!p)
		return -ENOMEM;
	*array = p;
	*room = more;
	return 0;
}

/* A session's requests are numbered: what is missing between two of them was lost on the way. */
static void count_lost(struct kv_recording *r, const struct kv_trace_record *record)
{
	for (size_t i = r->n; i--;) {
		if (r->requests[i].record.session != record->session)
			continue;
		if (record->number > r->requests[i].record.number)
			r->n_lost += record->number - r->requests[i].record.number - 1;
		return;
	}
}

int kv_recording_add(struct kv_recording *r, const struct kv_msg_trace_part *part)
{
	const char *at = (const char *)part->items, *end = (const char *)part + part->head.size;

	for (uint32_t i = 0; i < part->n; i++) {
		struct kv_recorded next = {.first_key = r->n_keys};
		struct kv_trace_record *record = &next.record;

		if ((size_t)(end - at) < sizeof(*record))
			return -EPROTO;
		memcpy(record, at, sizeof(*record));
		at += sizeof(*record);
		if (record->n_keys > (size_t)(end - at) / sizeof(*r->keys) ||
		    record->n_keys != record->n_input / KV_TRACE_TOKENS + !!(record->n_input % KV_TRACE_TOKENS))
			return -EPROTO;
		if (grow((void **)&r->requests, &r->room, r->n + 1, sizeof(*r->requests)) < 0 ||
		    grow((void **)&r->keys, &r->keys_room, r->n_keys + record->n_keys + 1, sizeof(*r->keys)) < 0)
			return -ENOMEM;
		memcpy(r->keys + r->n_keys, at, record->n_keys * sizeof(*r->keys));
		at += record->n_keys * sizeof(*r->keys);
		r->n_keys += record->n_keys;
		count_lost(r, record);
		r->requests[r->n++] = next;
		r->n_input += record->n_input;
		r->n_hit += record->n_hit;
		r->n_output += record->n_output;
	}
	return 0;
}

static int by_start(const void *a, const void *b)
{
	const struct kv_recorded *x = a, *y = b;

	return x->record.start_ns < y->record.start_ns ? -1 : x->record.start_ns > y->record.start_ns;
}

static uint64_t number_of(struct numbers *numbers, const struct kv_trace_key *key)
{
	size_t at = key->lo & (numbers->n_places - 1);

	while (numbers->places[at].number &&
	       (numbers->places[at].key.lo != key->lo || numbers->places[at].key.hi != key->hi))
		at = (at + 1) & (numbers->n_places - 1);
	if (!numbers->places[at].number)
		numbers->places[at] = (struct place){*key, ++numbers->n};
	return numbers->places[at].number - 1;
}

static void write_request(FILE *f, const struct kv_recording *r, const struct kv_recorded *q, int64_t start_ns,
			  struct numbers *numbers)
{
	/* What began before the recording has its lookup noted only since then. */
	int64_t ms = q->record.start_ns > start_ns ? (q->record.start_ns - start_ns) / 1000000 : 0;

	fprintf(f, "{\"timestamp\": %" PRId64 ", \"input_length\": %" PRIu64 ", \"output_length\": %" PRIu64
		   ", \"hash_ids\": [", ms, q->record.n_input, q->record.n_output);
	for (uint64_t i = 0; i < q->record.n_keys; i++)
		fprintf(f, "%s%" PRIu64, i ? ", " : "", number_of(numbers, &r->keys[q->first_key + i]));
	fprintf(f, "], \"hit_length\": %" PRIu64 ", \"pool_id\": %" PRIu64 "}\n", q->record.n_hit, q->record.pool);
}

int kv_recording_write(struct kv_recording *r, const char *path, int64_t start_ns)
{
	struct numbers numbers = {.n_places = 64};
	FILE *f;
	int e = 0;

	while (numbers.n_places < 2 * r->n_keys + 2)
		numbers.n_places *= 2;
	numbers.places = calloc(numbers.n_places, sizeof(*numbers.places));
	if (!numbers.places)
		return -ENOMEM;
	f = strcmp(path, "-") ? fopen(path, "we") : stdout;
	if (!f) {
		e = -errno;
		free(numbers.places);
		return e;
	}
	if (r->n)
		qsort(r->requests, r->n, sizeof(*r->requests), by_start);
	for (size_t i = 0; i < r->n; i++)
		write_request(f, r, &r->requests[i], start_ns, &numbers);
	free(numbers.places);
	errno = EIO;
	if (ferror(f))
		e = -EIO;
	if ((f == stdout ? fflush(f) : fclose(f)) && !e)
		e = -errno;
	return e;
}

void kv_recording_deinit(struct kv_recording *r)
{
	free(r->requests);
	free(r->keys);
}
