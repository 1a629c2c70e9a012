/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The books against another engine's block pool (tests/golden/README.md has where its answers are from):
 * who gets blocks, how many are left, what is found, who holds what, and which cached block goes first.
 *
 * Ids are each one's own: a block here is known by when it was handed out. Policy is `lru`, whose
 * stamps clients write when they let go, as there. All traces are played to their end. Three things are
 * different here, and from then on the difference itself is what is compared:
 *
 *   a second block of one content      here it is a twin: leased, never cached, free when it is given back
 *   a name taken from one block        here names go all at once (an epoch): it is found as before
 *   a name moved to another block      here it stays: the other one is as a twin
 *
 * A second name of one block isn't given here, where its content is its only one: who looks that up isn't compared.
 */
#include <check.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/alloc/pages.h"
#include "tests/support/expect.h"

#define BLOCK_TOKENS 16
#define MOST_BLOCKS  32
#define MOST_LABELS  16
#define FIRST_SLOT   60 /* the k-th who refers to a block is session FIRST_SLOT + k: two words of holders */

static struct pages p;
static struct kv_books *const b = &p.books;
static int32_t ours[MOST_BLOCKS];    /* [their id]; -1: it is none of theirs now */
static uint32_t n_refs[MOST_BLOCKS]; /* likewise */
static bool is_twin[MOST_BLOCKS];    /* likewise: named there and not here */
static int32_t kept[MOST_BLOCKS];    /* [our id] the name that it has here and no more there, or -1 */
static uint32_t n_twins, n_kept, n_gone; /* how often that came; names not found, after steps */
static const char *labels[MOST_LABELS];
static bool is_second[MOST_LABELS];
static uint32_t n_labels, n_second;
static const char *id_of_trace;
static size_t step;

static int32_t label_of(const char *name)
{
	for (uint32_t i = 0; i < n_labels; i++) {
		if (!strcmp(labels[i], name))
			return (int32_t)i;
	}
	expect(n_labels < MOST_LABELS, "%s: too many names", id_of_trace);
	labels[n_labels] = name;
	is_second[n_labels] = false;
	return (int32_t)n_labels++;
}

static const int32_t *tokens_of(int32_t label)
{
	static int32_t tokens[BLOCK_TOKENS];

	for (int32_t i = 0; i < BLOCK_TOKENS; i++)
		tokens[i] = label * 100 + i;
	return tokens;
}

static uint64_t tick(void)
{
	return ++((struct kv_shm_blocks *)p.shared)->clock;
}

/* Return: the block that is found under the name, or -1; nobody holds it by that. */
static int32_t find(int32_t label)
{
	const uint32_t reader = 120;
	int32_t id = client_find(&p, reader, pages_key(&p, (struct kv_key){0}, tokens_of(label)),
				 kv_serial_root(b->epoch), tokens_of(label));

	if (id >= 0)
		client_unpin(&p, id, reader);
	return id;
}

static bool is_hashed(int32_t theirs)
{
	return ours[theirs] >= 0 && pages_state(&p, ours[theirs]) == KV_BLOCK_CACHED;
}

static bool is_kept(int32_t id)
{
	return kept[id] >= 0 && pages_state(&p, id) == KV_BLOCK_CACHED;
}

/* Return: our block that has kept the name, or -1. */
static int32_t keeper_of(int32_t label)
{
	for (int32_t id = 0; id < MOST_BLOCKS; id++) {
		if (kept[id] == label && is_kept(id))
			return id;
	}
	return -1;
}

static void get(uint32_t n, const json_t *result)
{
	const json_t *ids = json_object_get(result, "ids");
	uint32_t missing = n > b->n_free ? n - b->n_free : 0;
	int32_t got[MOST_BLOCKS];
	bool fits = !missing || kv_books_evict(b, missing, true) == missing;

	expect(fits == !!ids, "%s, step %zu: %u blocks: %s", id_of_trace, step, n,
	       fits ? "there are none there" : "there are as many there");
	if (!fits)
		return;
	kv_books_grant(b, FIRST_SLOT, n, got);
	for (uint32_t i = 0; i < n; i++) {
		int32_t theirs = (int32_t)json_integer_value(json_array_get(ids, i));

		for (int32_t k = 0; k < MOST_BLOCKS; k++)
			ours[k] = ours[k] == got[i] ? -1 : ours[k];
		ours[theirs] = got[i];
		n_refs[theirs] = 1;
		is_twin[theirs] = false;
		kept[got[i]] = -1;
	}
}

static void release(const json_t *ids)
{
	const json_t *x;
	size_t i;

	json_array_foreach(ids, i, x) {
		int32_t theirs = (int32_t)json_integer_value(x), id = ours[theirs];

		if (!theirs) {
			ck_assert_int_eq(kv_books_give(b, FIRST_SLOT, 0), -EINVAL);
			continue;
		}
		n_refs[theirs]--;
		if (is_hashed(theirs)) {
			if (!n_refs[theirs])
				b->descriptors[id].stamp = tick();
			client_unpin(&p, id, FIRST_SLOT + n_refs[theirs]);
		} else if (!n_refs[theirs]) {
			/* References to what only its owner knows are counted by the owner. */
			ck_assert_int_eq(kv_books_give(b, FIRST_SLOT, id), 0);
			ours[theirs] = -1;
		}
	}
}

static void touch(const json_t *ids)
{
	const json_t *x;
	size_t i;

	json_array_foreach(ids, i, x) {
		int32_t theirs = (int32_t)json_integer_value(x);

		if (!theirs) {
			ck_assert(!client_pin(&p, 0, FIRST_SLOT));
			continue;
		}
		expect(n_refs[theirs] || is_hashed(theirs), "%s, step %zu: free block %d by its id", id_of_trace, step,
		       theirs);
		if (is_hashed(theirs))
			ck_assert(client_pin(&p, ours[theirs], FIRST_SLOT + n_refs[theirs]));
		n_refs[theirs]++;
	}
}

static void name(int32_t theirs, const char *text)
{
	int32_t label = label_of(text), known = find(label), id = ours[theirs];
	struct kv_op op = {.kind = KV_OP_PUBLISH, .id = id, .parent = -1};
	struct kv_key key = pages_key(&p, (struct kv_key){0}, tokens_of(label));
	int r;

	if (is_hashed(theirs)) {
		is_second[label] |= known != id;
		n_second += known != id;
		return;
	}
	if (is_twin[theirs]) { /* it stays one, of what it was first */
		is_second[label] = true;
		n_second++;
		return;
	}
	expect(n_refs[theirs], "%s, step %zu: a name for free block %d", id_of_trace, step, theirs);
	op.parent_serial = kv_serial_root(b->epoch);
	op.key_lo = key.lo;
	op.key_hi = key.hi;
	op.stamp = tick();
	memcpy(kv_shm_tokens(p.shared, &p.head, id), tokens_of(label), BLOCK_TOKENS * sizeof(int32_t));
	r = kv_books_publish(b, FIRST_SLOT, &op);
	ck_assert_int_eq(r, known >= 0 ? KV_PUBLISH_TWIN : KV_PUBLISHED);
	if (known >= 0) {
		ck_assert_int_eq(find(label), known); /* the first one, as there */
		ck_assert_int_eq(pages_state(&p, id), KV_BLOCK_TWIN);
		is_twin[theirs] = true;
		n_twins++;
		return;
	}
	for (uint32_t k = 1; k < n_refs[theirs]; k++)
		ck_assert(client_pin(&p, id, FIRST_SLOT + k));
}

/* There it is found no more, here it is. */
static void keep_name(int32_t theirs)
{
	if (!is_hashed(theirs))
		return;
	for (uint32_t k = 0; k < n_labels && kept[ours[theirs]] < 0; k++)
		kept[ours[theirs]] = find((int32_t)k) == ours[theirs] ? (int32_t)k : -1;
	ck_assert_int_ge(kept[ours[theirs]], 0);
	n_kept++;
}

static void take_names(const json_t *ids)
{
	const json_t *x;
	size_t i;

	json_array_foreach(ids, i, x)
		keep_name((int32_t)json_integer_value(x));
}

static void move_name(int32_t from, int32_t to)
{
	keep_name(from);
	is_twin[to] = true;
	n_twins++;
}

static void reset(const json_t *result)
{
	bool in_use = b->n_leased || kv_books_count(b, NULL, NULL);

	ck_assert_int_eq(!in_use, json_is_true(json_object_get(result, "ok")));
	if (in_use)
		return;
	ck_assert_int_eq(kv_books_new_epoch(b), 0);
	memset(is_twin, 0, sizeof(is_twin));
	memset(kept, 0xff, sizeof(kept));
}

static void look_up(int32_t label, const json_t *result)
{
	const json_t *theirs = json_object_get(result, "id");
	int32_t id = json_is_integer(theirs) ? ours[json_integer_value(theirs)] : -1;

	if (keeper_of(label) >= 0)
		id = keeper_of(label);
	if (!is_second[label])
		ck_assert_int_eq(find(label), id);
}

static void play(const json_t *op, const json_t *result)
{
	const char *what = json_string_value(json_array_get(op, 0));
	const json_t *first = json_array_get(op, 1), *second = json_array_get(op, 2);

	if (!strcmp(what, "get")) {
		get((uint32_t)json_integer_value(first), result);
	} else if (!strcmp(what, "free")) {
		release(first);
	} else if (!strcmp(what, "touch")) {
		touch(first);
	} else if (!strcmp(what, "hash")) {
		name((int32_t)json_integer_value(first), json_string_value(second));
	} else if (!strcmp(what, "evict")) {
		take_names(first);
	} else if (!strcmp(what, "reset")) {
		reset(result);
	} else if (!strcmp(what, "move")) {
		move_name((int32_t)json_integer_value(first), (int32_t)json_integer_value(second));
	} else {
		expect(!strcmp(what, "lookup"), "%s: what is '%s'?", id_of_trace, what);
		look_up(label_of(json_string_value(first)), result);
	}
}

static uint32_t holders_of(int32_t id)
{
	uint32_t n = 0;

	for (uint32_t slot = 0; slot < KV_MAX_SESSIONS; slot++)
		n += pages_is_held(&p, id, slot);
	return n;
}

static void compare(const json_t *state)
{
	const json_t *hashed = json_object_get(state, "hashed"), *refs = json_object_get(state, "ref");
	uint32_t n_used = b->n_leased + kv_books_count(b, NULL, NULL), n_named = 0;
	uint32_t n_keepers = 0, n_lost = 0;
	double usage = b->n_total ? (double)n_used / b->n_total : 0;
	char key[16];

	expect(b->n_total - n_used == json_array_size(json_object_get(state, "free")),
	       "%s, step %zu: %u blocks can be had, there %zu", id_of_trace, step, b->n_total - n_used,
	       json_array_size(json_object_get(state, "free")));
	ck_assert_double_lt(fabs(usage - json_number_value(json_object_get(state, "usage"))), 1e-6);
	ck_assert_uint_eq(n_used, json_object_size(refs));
	for (int32_t k = 1; k < MOST_BLOCKS; k++) {
		const char *text;
		uint32_t n;

		snprintf(key, sizeof(key), "%d", k);
		n = (uint32_t)json_integer_value(json_object_get(refs, key));
		text = json_string_value(json_object_get(hashed, key));
		if (n) {
			ck_assert_uint_eq(n_refs[k], n);
			expect(is_hashed(k) ? holders_of(ours[k]) == n :
					      pages_state(&p, ours[k]) == KV_BLOCK_LEASED ||
						      (is_twin[k] && pages_state(&p, ours[k]) == KV_BLOCK_TWIN),
			       "%s, step %zu: who holds %d?", id_of_trace, step, k);
		}
		n_keepers += is_kept(k); /* of ours */
		if (is_twin[k])
			ck_assert(!is_hashed(k));
		if (!text || is_twin[k])
			continue;
		n_named++;
		expect(ours[k] < 0 || !is_kept(ours[k]), "%s, step %zu: %d has a name there as well", id_of_trace,
		       step, k);
		n_lost += ours[k] < 0 || find(label_of(text)) != ours[k];
	}
	/* A block without a name goes before all others there; as it has one here, another may have gone for it. */
	expect(n_lost <= n_keepers, "%s, step %zu: %u names aren't found, %u were kept", id_of_trace, step, n_lost,
	       n_keepers);
	expect(b->n_cached == n_named + n_keepers - n_lost, "%s, step %zu: %u blocks are cached, there %u", id_of_trace,
	       step, b->n_cached, n_named);
	n_gone += n_lost;
	pages_check(&p, NULL, id_of_trace);
}

START_TEST(blocks_are_handed_out_found_and_evicted_as_in_another_engines_pool)
{
	json_error_t error;
	json_t *root = json_load_file(KV_POOL_GOLDEN_DIR "/block_pool.json", 0, &error), *x;
	uint32_t n_steps = 0;
	size_t i;

	expect(root, "%s", error.text);
	json_array_foreach(json_object_get(root, "cases"), i, x) {
		const json_t *in = json_object_get(x, "in"), *out = json_object_get(x, "out"), *op;
		uint32_t n = (uint32_t)json_integer_value(json_object_get(in, "num_blocks"));

		id_of_trace = json_string_value(json_object_get(x, "id"));
		ck_assert_uint_lt(n, MOST_BLOCKS);
		n_labels = 0;
		memset(ours, 0xff, sizeof(ours));
		memset(n_refs, 0, sizeof(n_refs));
		memset(is_twin, 0, sizeof(is_twin));
		memset(kept, 0xff, sizeof(kept));
		pages_init(&p, n - 1, BLOCK_TOKENS);
		compare(json_object_get(json_array_get(out, 0), "state"));
		json_array_foreach(json_object_get(in, "ops"), step, op) {
			const json_t *answer = json_array_get(out, step + 1);

			play(op, json_object_get(answer, "result"));
			n_steps++;
			compare(json_object_get(answer, "state"));
		}
		pages_check(&p, NULL, id_of_trace);
		pages_deinit(&p);
	}
	printf("%zu traces, %u steps; %u second names aren't given, %u twins, %u names kept, %u gone for them\n", i,
	       n_steps, n_second, n_twins, n_kept, n_gone);
	json_decref(root);
	ck_assert_uint_eq(i, 33);
	ck_assert_uint_eq(n_steps, 324);
	ck_assert_uint_eq(n_second, 12);
	ck_assert_uint_eq(n_twins, 4);
	ck_assert_uint_eq(n_kept, 5);
	ck_assert_uint_eq(n_gone, 2);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("pool_golden");
	TCase *tcase = tcase_create("golden");
	SRunner *runner;
	int n_failed;

	tcase_add_test(tcase, blocks_are_handed_out_found_and_evicted_as_in_another_engines_pool);
	suite_add_tcase(s, tcase);
	runner = srunner_create(s);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
