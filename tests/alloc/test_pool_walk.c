/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A seeded random walk over the books of a pool beside a model that is too plain to be wrong: one
 * record a block, every question answered by looking at all of them. After each step every block
 * and every count must agree. Keys are whole, or cut to a few bits so that they collide.
 */
#include <check.h>
#include <errno.h>
#include <string.h>

#include "tests/alloc/pages.h"
#include "tests/alloc/random.h"
#include "tests/support/expect.h"

#define N_IDS	     41 /* the null block among them */
#define BLOCK_TOKENS 2
#define N_TOKENS     3 /* so few that the same content comes again and again */
#define N_SLOTS	     5
#define N_STEPS	     35000
#define N_CLOSELY    3000 /* steps at first that are each followed by a check */

static const uint32_t slots[N_SLOTS] = {0, 1, 63, 64, 127};
static const uint64_t key_masks[] = {UINT64_MAX, 7, 0};

struct plain {
	uint8_t state;
	uint32_t owner, generation;
	bool held[N_SLOTS];
	int32_t parent; /* CACHED: id or -1. TWIN: whose content it has */
	uint64_t serial, parent_serial;
	struct kv_key key;
	int32_t tokens[BLOCK_TOKENS];
};

static struct pages p;
static struct plain plain[N_IDS];
static bool is_quarantined[N_SLOTS];
static uint64_t last_serial, n_published, n_duplicates, n_evicted, n_granted, n_proofs;
static struct random r;
static int step;

static uint32_t below(uint32_t n)
{
	return random_below(&r, n);
}

static uint64_t clock_next(void)
{
	return ++((struct kv_shm_blocks *)p.shared)->clock;
}

static uint32_t count(uint8_t state)
{
	uint32_t n = 0;

	for (int32_t id = 0; id < N_IDS; id++)
		n += plain[id].state == state;
	return n;
}

static bool is_leased(const struct plain *b, uint32_t i_slot)
{
	return (b->state == KV_BLOCK_LEASED || b->state == KV_BLOCK_TWIN) && b->owner == i_slot;
}

static bool is_held(const struct plain *b)
{
	bool held = false;

	for (int i = 0; i < N_SLOTS; i++)
		held |= b->held[i];
	return held;
}

static void becomes_free(struct plain *b)
{
	b->state = KV_BLOCK_FREE;
	b->generation++;
}

/* An id that is in @state, by chance; else any. */
static int32_t pick(uint8_t state)
{
	int32_t first = (int32_t)below(N_IDS);

	for (int32_t i = 0; i < N_IDS; i++) {
		if (plain[(first + i) % N_IDS].state == state)
			return (first + i) % N_IDS;
	}
	return first;
}

/* A session that still acts. */
static uint32_t pick_slot(void)
{
	uint32_t i = below(N_SLOTS);

	while (is_quarantined[i])
		i = (i + 1) % N_SLOTS;
	return i;
}

static void walk_grant(void)
{
	uint32_t n_free = count(KV_BLOCK_FREE), i_slot = pick_slot();
	uint32_t n = n_free ? below(n_free < 4 ? n_free + 1 : 5) : 0;
	int32_t ids[4];

	kv_books_grant(&p.books, slots[i_slot], n, ids);
	for (uint32_t i = 0; i < n; i++) {
		expect(ids[i] > 0 && plain[ids[i]].state == KV_BLOCK_FREE,
		       "step %d: block %d was not free", step, ids[i]);
		plain[ids[i]].state = KV_BLOCK_LEASED;
		plain[ids[i]].owner = i_slot;
	}
	n_granted += n;
}

static void walk_give(void)
{
	uint32_t i_slot = pick_slot();
	int32_t id = below(3) ? pick(KV_BLOCK_LEASED) : (int32_t)below(N_IDS);
	struct plain *b = &plain[id];
	int want = -EINVAL;

	if (is_leased(b, i_slot)) {
		becomes_free(b);
		want = 0;
	} else if (b->state == KV_BLOCK_CACHED && b->held[i_slot]) {
		b->held[i_slot] = false;
		want = 0;
	}
	expect(kv_books_give(&p.books, slots[i_slot], id) == want, "step %d: give of %d", step, id);
}

/* What a chain that goes on from @parent is the child of. */
static bool resolve(uint32_t i_slot, int32_t *parent, uint64_t *serial, struct kv_key *key)
{
	const struct plain *b = &plain[*parent < 0 ? 0 : *parent];

	*serial = 0;
	*key = (struct kv_key){0, 0};
	if (*parent < 0)
		return *parent == -1;
	if (b->state == KV_BLOCK_TWIN && b->owner == i_slot) {
		uint64_t of_twin = b->serial;

		*parent = b->parent;
		b = &plain[*parent];
		if (b->state != KV_BLOCK_CACHED || b->serial != of_twin)
			return false;
	}
	*serial = b->serial;
	*key = b->key;
	return b->state == KV_BLOCK_CACHED;
}

static int32_t find(struct kv_key key, uint64_t parent_serial, const int32_t *tokens)
{
	int32_t found = -1;

	for (int32_t id = 0; id < N_IDS; id++) {
		const struct plain *b = &plain[id];

		if (b->state != KV_BLOCK_CACHED || b->key.lo != key.lo || b->key.hi != key.hi ||
		    b->parent_serial != parent_serial ||
		    memcmp(b->tokens, tokens, sizeof(b->tokens)))
			continue;
		expect(found < 0, "step %d: the same content is cached twice", step);
		found = id;
	}
	return found;
}

static bool index_is_full(struct kv_key key)
{
	uint32_t n = 0;

	for (int i = 0; i < 2; i++) {
		uint32_t bucket = kv_prefix_bucket(&p.books.prefix, key, i);

		for (uint32_t k = 0; k < KV_BUCKET_WORDS; k++)
			n += !p.books.prefix.words[bucket * KV_BUCKET_WORDS + k];
	}
	return !n;
}

static void random_tokens(int32_t *tokens)
{
	for (int i = 0; i < BLOCK_TOKENS; i++)
		tokens[i] = (int32_t)below(N_TOKENS);
}

static void walk_publish(void)
{
	uint32_t i_slot = pick_slot();
	int32_t id = below(8) ? pick(below(8) ? KV_BLOCK_LEASED : KV_BLOCK_TWIN) : (int32_t)below(N_IDS);
	int32_t parent = below(3) ? pick(below(4) ? KV_BLOCK_CACHED : KV_BLOCK_TWIN)
				  : (int32_t)below(N_IDS + 4) - 2;
	int32_t resolved, tokens[BLOCK_TOKENS], twin;
	struct plain *b = &plain[id];
	struct kv_op op = {.kind = KV_OP_PUBLISH, .id = id, .flags = below(2) ? KV_OP_AGAIN : 0};
	struct kv_key key;
	uint64_t serial = 0;
	bool leads, again;
	int want;

	if (below(4))
		i_slot = b->state == KV_BLOCK_LEASED && !is_quarantined[b->owner] ? b->owner
										  : i_slot;
	parent = parent > N_IDS ? -1 : below(3) ? parent : -1;
	resolved = parent;
	leads = parent < N_IDS && resolve(i_slot, &resolved, &serial, &key);
	/* The client may have seen the parent cached, or not yet; or seen what was there before. */
	op.parent = parent;
	if (parent >= 0 && parent < N_IDS && plain[parent].state == KV_BLOCK_CACHED) {
		uint32_t seen = below(8);

		op.parent_serial = seen == 0  ? plain[parent].serial + 1
				   : seen < 4 ? plain[parent].serial
					      : 0;
		leads = leads && seen;
	}
	random_tokens(tokens);
	if (!leads)
		key = (struct kv_key){0, 0};
	key = pages_key(&p, key, tokens);
	op.key_lo = key.lo;
	op.key_hi = key.hi;
	op.stamp = clock_next();

	twin = leads ? find(key, serial, tokens) : -1;
	again = op.flags && b->state == KV_BLOCK_TWIN;
	if (op.flags && b->state == KV_BLOCK_CACHED && b->held[i_slot]) {
		expect(kv_books_publish(&p.books, slots[i_slot], &op) == KV_PUBLISH_TWIN,
		       "step %d: %d is cached already", step, id);
		return;
	}
	if ((b->state != KV_BLOCK_LEASED && !again) || b->owner != i_slot || parent == id)
		want = -EINVAL;
	else if (!leads)
		want = KV_PUBLISH_REFUSED;
	else if (twin >= 0)
		want = KV_PUBLISH_TWIN;
	else
		want = index_is_full(key) ? KV_PUBLISH_REFUSED : KV_PUBLISHED;

	/* Nobody writes the tokens of a block that others may read. */
	if (is_leased(b, i_slot))
		memcpy(kv_shm_tokens(p.shared, &p.head, id), tokens, sizeof(tokens));
	expect(kv_books_publish(&p.books, slots[i_slot], &op) == want,
	       "step %d: publishing %d after %d, %d expected", step, id, parent, want);
	if (again && want >= 0)
		b->state = KV_BLOCK_LEASED;
	if (want == KV_PUBLISH_TWIN) {
		b->state = KV_BLOCK_TWIN;
		b->parent = twin;
		b->serial = plain[twin].serial;
		n_duplicates += !again;
	} else if (want == KV_PUBLISHED) {
		uint64_t given = p.books.descriptors[id].serial;

		expect(given > last_serial, "step %d: serial %llu is not new", step,
		       (unsigned long long)given);
		last_serial = given;
		memset(b->held, 0, sizeof(b->held));
		b->held[i_slot] = true;
		b->state = KV_BLOCK_CACHED;
		b->parent = resolved;
		b->parent_serial = serial;
		b->serial = given;
		b->key = key;
		memcpy(b->tokens, tokens, sizeof(tokens));
		n_published++;
	}
}

static void walk_pin(void)
{
	uint32_t i_slot = pick_slot();
	int32_t id = below(4) ? pick(KV_BLOCK_CACHED) : (int32_t)below(N_IDS);
	bool cached = plain[id].state == KV_BLOCK_CACHED;

	expect(client_pin(&p, id, slots[i_slot]) == cached, "step %d: pin of %d", step, id);
	if (!cached)
		return;
	plain[id].held[i_slot] = true;
	p.books.descriptors[id].stamp = clock_next();
}

static void walk_unpin(void)
{
	int32_t id = pick(KV_BLOCK_CACHED);

	for (uint32_t i = 0; i < N_SLOTS; i++) {
		if (!plain[id].held[i] || is_quarantined[i])
			continue;
		client_unpin(&p, id, slots[i]);
		plain[id].held[i] = false;
	}
}

/* Random tokens, block after block, as far as they are cached. */
static void walk_lookup(void)
{
	uint32_t i_slot = pick_slot();
	struct kv_key key = {0, 0};
	uint64_t serial = 0;

	for (;;) {
		int32_t tokens[BLOCK_TOKENS], want, found;

		random_tokens(tokens);
		key = pages_key(&p, key, tokens);
		want = find(key, serial, tokens);
		found = client_find(&p, slots[i_slot], key, serial, tokens);
		expect(found == want, "step %d: found %d, not %d", step, found, want);
		if (found < 0)
			return;
		plain[found].held[i_slot] = true;
		p.books.descriptors[found].stamp = clock_next();
		serial = plain[found].serial;
	}
}

/* How many cached blocks neither are held nor lead to one that is. */
static uint32_t evictable(void)
{
	bool stays[N_IDS] = {0};
	uint32_t n = 0;

	for (int32_t id = 0; id < N_IDS; id++) {
		if (plain[id].state != KV_BLOCK_CACHED || !is_held(&plain[id]))
			continue;
		for (int32_t i = id; i >= 0; i = plain[i].parent)
			stays[i] = true;
	}
	for (int32_t id = 0; id < N_IDS; id++)
		n += plain[id].state == KV_BLOCK_CACHED && !stays[id];
	return n;
}

static void walk_evict(void)
{
	uint32_t most = evictable(), n = below(6) ? below(5) : below(N_IDS), got, gone = 0;
	bool all = below(2);

	got = kv_books_evict(&p.books, n, all);
	expect(got == (n <= most ? n
		       : all	 ? 0
				 : most),
	       "step %d: %u of %u evicted, %u can be", step, got, n, most);
	for (int32_t id = 0; id < N_IDS; id++) {
		struct plain *b = &plain[id];

		if (b->state != KV_BLOCK_CACHED || !kv_books_is_free(&p.books, id))
			continue;
		expect(!is_held(b), "step %d: %d was evicted but is held", step, id);
		becomes_free(b);
		gone++;
	}
	expect(gone == got, "step %d: %u evicted, %u said", step, gone, got);
	for (int32_t id = 0; id < N_IDS; id++) {
		const struct plain *b = &plain[id];

		expect(b->state != KV_BLOCK_CACHED || b->parent < 0 ||
			       plain[b->parent].state == KV_BLOCK_CACHED,
		       "step %d: %d is cached, its parent %d was evicted", step, id, b->parent);
	}
	n_evicted += got;
}

/* What clients say of use: true, or anything else. It may change an order and nothing more. */
static void walk_say(void)
{
	int32_t id = (int32_t)below(N_IDS + 4) - 2;
	uint32_t n = below(4) ? below(5) : (uint32_t)random_next(&r);

	if (below(2)) {
		int seen = kv_books_touch(&p.books, id, n);

		expect(id < 0 || id >= N_IDS ? seen == -EINVAL : seen >= 0 && (uint32_t)seen <= n,
		       "step %d: touch of %d", step, id);
	} else if (id >= 0 && id < N_IDS) {
		p.books.descriptors[id].stamp = below(2) ? random_next(&r) : below(100);
	}
}

static void walk_end(void)
{
	uint32_t i = below(N_SLOTS), n = 0;

	for (uint32_t k = 0; k < N_SLOTS; k++)
		n += is_quarantined[k];
	/* The socket goes first, and later the process is known to be dead; or both at once. */
	if (!is_quarantined[i] && n < N_SLOTS - 1 && below(2)) {
		kv_books_quarantine(&p.books, slots[i]);
		is_quarantined[i] = true;
		for (int32_t id = 0; id < N_IDS; id++) {
			if (is_leased(&plain[id], i))
				plain[id].state = KV_BLOCK_QUARANTINED;
		}
		return;
	}
	kv_books_forget(&p.books, slots[i]);
	is_quarantined[i] = false;
	for (int32_t id = 0; id < N_IDS; id++) {
		struct plain *b = &plain[id];

		if (is_leased(b, i) || (b->state == KV_BLOCK_QUARANTINED && b->owner == i))
			becomes_free(b);
		b->held[i] = false;
	}
}

static void walk_move(void)
{
	int32_t first = (int32_t)below(N_IDS), n = (int32_t)below(5);

	if (below(2)) {
		int32_t id = pick(KV_BLOCK_ABSENT);

		if (plain[id].state != KV_BLOCK_ABSENT)
			return;
		expect(!kv_books_add(&p.books, id), "step %d: add %d", step, id);
		becomes_free(&plain[id]);
		return;
	}
	kv_books_remove(&p.books, first, n);
	for (int32_t id = first; id < first + n && id < N_IDS; id++) {
		if (plain[id].state == KV_BLOCK_FREE)
			plain[id].state = KV_BLOCK_ABSENT;
	}
}

static void compare_block(int32_t id)
{
	const struct plain *b = &plain[id];
	const struct kv_shm_block *d = &p.books.descriptors[id];
	uint32_t owner = b->state == KV_BLOCK_LEASED || b->state == KV_BLOCK_TWIN ||
					 b->state == KV_BLOCK_QUARANTINED
				 ? slots[b->owner]
				 : 0;

	expect(d->word == kv_block_word(b->generation, owner, b->state),
	       "step %d: block %d: %#llx, expected %#llx", step, id, (unsigned long long)d->word,
	       (unsigned long long)kv_block_word(b->generation, owner, b->state));
	for (uint32_t i = 0; i < N_SLOTS; i++)
		expect(pages_is_held(&p, id, slots[i]) == b->held[i], "step %d: holder %u of %d",
		       step, i, id);
	if (b->state == KV_BLOCK_CACHED)
		expect(d->serial == b->serial && d->parent_serial == b->parent_serial &&
			       d->key_lo == b->key.lo && d->key_hi == b->key.hi,
		       "step %d: descriptor of %d", step, id);
	if (b->state == KV_BLOCK_TWIN)
		expect((int32_t)d->key_lo == b->parent && d->serial == b->serial,
		       "step %d: twin of %d", step, id);
}

static void compare(void)
{
	const struct kv_books *b = &p.books;
	uint32_t n_leased = count(KV_BLOCK_LEASED) + count(KV_BLOCK_TWIN);

	for (int32_t id = 0; id < N_IDS; id++)
		compare_block(id);
	expect(b->n_free == count(KV_BLOCK_FREE) && b->n_leased == n_leased &&
		       b->n_cached == count(KV_BLOCK_CACHED) &&
		       b->n_quarantined == count(KV_BLOCK_QUARANTINED) &&
		       b->n_total == N_IDS - 1 - count(KV_BLOCK_ABSENT),
	       "step %d: counts", step);
	expect(b->n_published == n_published && b->n_duplicates == n_duplicates &&
		       b->n_evicted == n_evicted && b->n_granted == n_granted,
	       "step %d: totals", step);
}

static void begin(uint64_t seed, uint64_t key_mask, const struct kv_policy *policy)
{
	pages_init(&p, N_IDS - 1, BLOCK_TOKENS);
	p.key_mask = key_mask;
	p.books.policy = policy;
	r.state = seed;
	plain[0].state = KV_BLOCK_NULL;
	for (int32_t id = 1; id < N_IDS; id++)
		becomes_free(&plain[id]);
	compare();
}

/* Each happened often enough to have been tried in all its forms. */
static void expect_variety(void)
{
	expect(n_published > 700 && n_evicted > 700 && n_granted > 2500 && n_duplicates > 500,
	       "published %llu, evicted %llu, granted %llu, duplicates %llu",
	       (unsigned long long)n_published, (unsigned long long)n_evicted,
	       (unsigned long long)n_granted, (unsigned long long)n_duplicates);
}

/* A check in slices of a few blocks each, between which all may change, is about what never does. */
static void prove_a_slice(struct kv_books_proof *proof)
{
	if (kv_books_prove(&p.books, proof, NULL, NULL, NULL))
		return;
	expect(!proof->n_wrong, "step %d: a check in slices finds %llu errors", step,
	       (unsigned long long)proof->n_wrong);
	for (int i = 0; i < KV_BLOCK_STATES; i++)
		ck_assert_int_eq(proof->shown[i], 0);
	*proof = (struct kv_books_proof){.part = 40};
	n_proofs++;
}

START_TEST(a_random_walk_agrees_with_a_plain_model)
{
	static void (*const walks[])(void) = {
		walk_grant,   walk_grant,   walk_grant, walk_publish, walk_publish,
		walk_publish, walk_publish, walk_give,	walk_pin,     walk_lookup,
		walk_lookup,  walk_unpin,   walk_unpin, walk_evict,   walk_evict};
	struct kv_books_proof proof = {.part = 40};

	begin((uint64_t)_i, key_masks[_i % 3], kv_policies[_i / 3 % 2]);
	n_proofs = 0;
	for (step = 0; step < N_STEPS; step++) {
		uint32_t kind = below(200);

		if (kind < 2)
			walk_end();
		else if (kind < 6)
			walk_move();
		else if (kind < 16)
			walk_say();
		else
			walks[kind % (sizeof(walks) / sizeof(walks[0]))]();
		compare();
		prove_a_slice(&proof);
		if (step < N_CLOSELY || step % 100 == 0)
			pages_check(&p, NULL, "walk");
	}
	expect_variety();
	ck_assert_uint_gt(n_proofs, 20);
	pages_deinit(&p);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("alloc/pool_walk");
	TCase *tcase = tcase_create("pool_walk");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(tcase, a_random_walk_agrees_with_a_plain_model, 0, 12);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
