/* SPDX-License-Identifier: Apache-2.0 */
/* alloc/identity.c and blake2b.c: no two different things may look the same. */
#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/identity.h"
#include "tests/support/expect.h"

/* ---- the digest ---- */

/* Of n bytes (7 * i + n) & 255; from another implementation. */
static const struct {
	size_t n;
	const char *hex;
} digests[] = {
	{0, "0e5751c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8"},
	{1, "ee155ace9c40292074cb6aff8c9ccdd273c81648ff1149ef36bcea6ebb8a3e25"},
	{3, "9facd640130c81e7f318a8d5c660bc1b0f5d03861ffbd4cc1358e0e904593c28"},
	{127, "f609ab2904b340cd075920018e0e3c6f6a90a3dae3edf03d3cccc0634a81ffe3"},
	{128, "0702c64922fb7635a1b799668a7e89ba9c5fe55ed7bd2fdecb001544073afad9"},
	{129, "490091b32bad7b3380c9e593d341bce9b73ff9d4ebcf0091ff932bdff7279897"},
	{255, "b579b3e762db9a4a9def50ea22419ca669a4875f015a167f52baa86547df7554"},
	{256, "3d0cb2693dfbac42af5a6cc960953fea8714aa39c4bcd054ef61d6b5e98ade4a"},
	{257, "080f7f2ee61cc8ffcf2ad907f7a9824a8445c5e4b194a0106c65f9b9c1ea6787"},
	{1000, "a2ae1ecc90361e0bb07dab9789a4b0a724ee3cf05623ac6cefa1e6af3da4aae8"},
};

START_TEST(the_digest_is_blake2b_however_its_input_comes)
{
	uint8_t data[1000], digest[KV_DIGEST_BYTES];
	size_t n = digests[_i].n;

	for (size_t i = 0; i < n; i++)
		data[i] = (uint8_t)(7 * i + n);
	for (size_t part = 1; part <= n + 1; part = part * 3 + 1) {
		struct kv_blake2b b;
		char hex[2 * KV_DIGEST_BYTES + 1];

		kv_blake2b_init(&b);
		for (size_t at = 0; at < n; at += part)
			kv_blake2b_add(&b, data + at, n - at < part ? n - at : part);
		kv_blake2b_end(&b, digest);
		for (int i = 0; i < KV_DIGEST_BYTES; i++)
			snprintf(hex + 2 * i, 3, "%02x", digest[i]);
		ck_assert_str_eq(hex, digests[_i].hex);
	}
}
END_TEST

/* ---- rows ---- */

#define SIZE 4 /* tokens of a block */

static void add(struct kv_identity *identity, uint32_t tag, uint64_t position, uint64_t n_tokens,
		uint64_t first, const char *bytes, size_t n)
{
	struct kv_item item = {.tag = tag,
			       .position = position,
			       .n_tokens = n_tokens,
			       .first = first,
			       .bytes = (uint8_t *)bytes,
			       .n_bytes = n};

	expect(kv_identity_add(identity, &item) == 0, "add");
}

/* All sets of up to two of these for blocks 0 and 1: small, and alike in every way that can be. */
static const struct {
	uint32_t tag;
	uint64_t position, n_tokens, first;
	const char *bytes;
	size_t n;
} items[] = {
	{1, 0, 0, 0, "", 0},	  {1, 0, 0, 0, "\0", 1},    {1, 0, 0, 0, "X", 1},
	{1, 0, 0, 0, "ab", 2},	  {1, 0, 0, 0, "a", 1},	    {2, 0, 0, 0, "X", 1},
	{2, 0, 0, 0, "ab", 2},	  {2, 0, 0, 0, "a", 1},	    {3, 0, 0, 0, "c", 1},
	{3, 0, 0, 0, "bc", 2},	  {2, 0, 0, 0, "", 0},	    {1, 0, 1, 0, "X", 1},
	{1, 0, 2, 0, "X", 1},	  {1, 1, 1, 0, "X", 1},	    {1, 0, 4, 0, "X", 1},
	{1, 0, 4, 1, "X", 1},	  {1, 0, 5, 0, "X", 1},	    {1, 1, 4, 0, "X", 1},
	{1, 3, 2, 0, "X", 1},	  {1, 3, 2, 1, "X", 1},	    {1, 4, 1, 0, "X", 1},
	{1, 4, 1, 1, "X", 1},	  {1, 4, 4, 0, "X", 1},	    {2, 4, 4, 0, "X", 1},
	{1, 5, 2, 0, "X", 1},	  {1, 0, 1, 0, "", 0},	    {1, 0, 1, 0, "\1\0\0\0", 4},
	{1, 0, 1, 0, "XX", 2},	  {256, 0, 0, 0, "X", 1},   {1 << 16, 0, 0, 0, "X", 1},
	{1, 0, 0, 0, "\1\0\0\0\2\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 32},
	{1, 0, 1, (uint64_t)1 << 32, "X", 1},
};

#define N_ITEMS (sizeof(items) / sizeof(items[0]))

static bool add_item(struct kv_identity *identity, size_t i)
{
	struct kv_item item = {.tag = items[i].tag,
			       .position = items[i].position,
			       .n_tokens = items[i].n_tokens,
			       .first = items[i].first,
			       .bytes = (uint8_t *)items[i].bytes,
			       .n_bytes = items[i].n};

	return kv_identity_add(identity, &item) == 0;
}

/* What of an item is to be seen in a block. */
static bool same_in_block(size_t a, size_t b, uint64_t begin)
{
	uint64_t end = begin + SIZE;
	uint64_t from_a = items[a].position > begin ? items[a].position : begin;
	uint64_t from_b = items[b].position > begin ? items[b].position : begin;
	uint64_t to_a = items[a].position + items[a].n_tokens;
	uint64_t to_b = items[b].position + items[b].n_tokens;

	to_a = to_a < end ? to_a : end;
	to_b = to_b < end ? to_b : end;
	return items[a].tag == items[b].tag && !items[a].n_tokens == !items[b].n_tokens &&
	       items[a].n == items[b].n && !memcmp(items[a].bytes, items[b].bytes, items[a].n) &&
	       (!items[a].n_tokens ||
		(from_a == from_b && to_a == to_b &&
		 items[a].first + from_a - items[a].position ==
			 items[b].first + from_b - items[b].position));
}

static bool in_block(size_t i, uint64_t begin)
{
	if (!items[i].n_tokens)
		return begin == 0;
	return items[i].position < begin + SIZE && items[i].position + items[i].n_tokens > begin;
}

/* A set of up to two, as it is seen in a block: the items that reach into it. */
struct set {
	size_t n, i[2];
	struct kv_shm_row row;
};

static bool same_set(const struct set *a, const struct set *b, uint64_t begin)
{
	if (a->n != b->n)
		return false;
	if (a->n == 2)
		return (same_in_block(a->i[0], b->i[0], begin) &&
			same_in_block(a->i[1], b->i[1], begin)) ||
		       (same_in_block(a->i[0], b->i[1], begin) &&
			same_in_block(a->i[1], b->i[0], begin));
	return !a->n || same_in_block(a->i[0], b->i[0], begin);
}

START_TEST(all_pairs_of_sets_of_items_have_equal_rows_only_if_they_say_the_same)
{
	const size_t most = 1 + N_ITEMS + N_ITEMS * N_ITEMS;
	uint64_t begin = (uint64_t)_i * SIZE;
	struct set *sets = calloc(most, sizeof(*sets));
	size_t n = 0, n_equal = 0;

	ck_assert_ptr_nonnull(sets);
	for (size_t a = 0; a <= N_ITEMS; a++) {
		for (size_t b = 0; b <= N_ITEMS; b++) {
			struct kv_identity identity = {0};
			struct set *set = &sets[n];

			if ((a < N_ITEMS && !add_item(&identity, a)) ||
			    (b < N_ITEMS && !add_item(&identity, b))) {
				kv_identity_deinit(&identity); /* one tag, said twice */
				continue;
			}
			memset(set, 0, sizeof(*set));
			if (a < N_ITEMS && in_block(a, begin))
				set->i[set->n++] = a;
			if (b < N_ITEMS && in_block(b, begin))
				set->i[set->n++] = b;
			expect(kv_identity_row(&identity, begin, begin + SIZE, &set->row) ==
				       (set->n > 0),
			       "items %zu, %zu: a row or none", a, b);
			kv_identity_deinit(&identity);
			n++;
		}
	}
	for (size_t a = 0; a < n; a++) {
		for (size_t b = 0; b < a; b++) {
			bool equal = !memcmp(&sets[a].row, &sets[b].row, sizeof(sets[a].row));

			expect(!equal || same_set(&sets[a], &sets[b], begin),
			       "sets of %zu (%zu, %zu) and %zu (%zu, %zu) items are equal",
			       sets[a].n, sets[a].i[0], sets[a].i[1], sets[b].n, sets[b].i[0],
			       sets[b].i[1]);
			n_equal += equal;
		}
	}
	ck_assert_uint_gt(n_equal, 500); /* the other order, and what another block sees */
	free(sets);
}
END_TEST

START_TEST(what_is_too_long_for_a_row_is_there_as_a_digest_that_no_short_item_has)
{
	struct kv_shm_row rows[300];
	char bytes[300];

	memset(bytes, 'x', sizeof(bytes));
	for (size_t n = 0; n < 300; n++) {
		struct kv_identity identity = {0};

		add(&identity, 1, 0, 0, 0, bytes, n);
		ck_assert(kv_identity_row(&identity, 0, SIZE, &rows[n]));
		ck_assert_uint_eq(rows[n].form, n <= KV_ROW_BYTES - 32 ? KV_ROW_VERBATIM :
									    KV_ROW_DIGEST);
		kv_identity_deinit(&identity);
		for (size_t k = 0; k < n; k++)
			expect(memcmp(&rows[k], &rows[n], sizeof(rows[n])), "%zu and %zu", k, n);
		/* The row's own bytes said as a value are something else. */
		add(&identity, 1, 0, 0, 0, (const char *)rows[n].bytes, sizeof(rows[n].bytes));
		{
			struct kv_shm_row row;

			ck_assert(kv_identity_row(&identity, 0, SIZE, &row));
			ck_assert(memcmp(&row, &rows[n], sizeof(row)));
		}
		kv_identity_deinit(&identity);
	}
}
END_TEST

START_TEST(a_cut_forgets_what_stands_behind_it_and_shortens_what_reaches_over)
{
	struct kv_identity identity = {0}, expected = {0};
	struct kv_shm_row a, b;

	add(&identity, 9, 0, 0, 0, "field", 5);
	add(&identity, 3, 2, 8, 5, "image", 5);
	add(&identity, 3, 6, 4, 0, "gone", 4);
	kv_identity_cut(&identity, 6);
	add(&expected, 3, 2, 4, 5, "image", 5);
	add(&expected, 9, 0, 0, 0, "field", 5);
	for (uint64_t begin = 0; begin < 12; begin += SIZE) {
		bool has = kv_identity_row(&identity, begin, begin + SIZE, &a);

		ck_assert_int_eq(has, kv_identity_row(&expected, begin, begin + SIZE, &b));
		ck_assert_int_eq(has, begin < 6);
		ck_assert(!has || !memcmp(&a, &b, sizeof(a)));
	}
	kv_identity_cut(&identity, 0);
	ck_assert_uint_eq(identity.n, 1); /* fields stay */
	kv_identity_deinit(&identity);
	kv_identity_deinit(&expected);
}
END_TEST

/* ---- prefix digests ---- */

static struct kv_prefix_digest digest_of(const int32_t *tokens, uint64_t n, size_t part,
					 const struct kv_identity *identity)
{
	struct kv_prefix_digest digest;
	struct kv_blake2b state;

	kv_blake2b_init(&state);
	for (size_t at = 0; at < n; at += part)
		kv_blake2b_add(&state, tokens + at, (n - at < part ? n - at : part) * sizeof(*tokens));
	kv_prefix_digest(&state, n, identity, &digest);
	return digest;
}

START_TEST(prefix_digests_differ_in_tokens_lengths_fields_and_extras_and_rows_also_in_groups)
{
	struct kv_identity sets[5] = {{0}};
	struct kv_prefix_digest d[64];
	int32_t tokens[20], others[20];
	size_t n = 0;

	for (int32_t i = 0; i < 20; i++)
		tokens[i] = others[i] = i % 3;
	others[0] = 7;
	add(&sets[1], 1, 0, 0, 0, "X", 1);
	add(&sets[2], 1, 0, 1, 0, "X", 1);
	add(&sets[3], 1, 1, 1, 0, "X", 1);
	add(&sets[4], 2, 0, 0, 0, "X", 1);
	for (uint64_t len = 4; len <= 20; len += 4) {
		for (int set = 0; set < 5; set++) {
			struct kv_prefix_digest again = digest_of(tokens, len, 1, &sets[set]);

			d[n] = digest_of(tokens, len, 20, &sets[set]);
			ck_assert(!memcmp(&d[n++], &again, sizeof(again)));
		}
		d[n++] = digest_of(others, len, 20, &sets[0]);
	}
	d[n++] = digest_of(tokens, 0, 1, &sets[0]);
	for (size_t a = 0; a < n; a++)
		for (size_t b = 0; b < a; b++)
			expect(memcmp(&d[a], &d[b], sizeof(d[a])), "%zu and %zu", a, b);
	{
		struct kv_shm_row rows[5];

		kv_prefix_digest_row(&d[2], &sets[2], 0, 0, 8, &rows[0]);
		kv_prefix_digest_row(&d[2], &sets[0], 0, 0, 8, &rows[1]);
		kv_prefix_digest_row(&d[2], &sets[0], 1, 0, 8, &rows[2]);
		kv_prefix_digest_row(&d[2], &sets[0], 0, 0, 0, &rows[3]);
		kv_prefix_digest_row(&d[3], &sets[0], 0, 0, 8, &rows[4]);
		for (int a = 0; a < 5; a++)
			for (int b = 0; b < a; b++)
				expect(memcmp(&rows[a], &rows[b], sizeof(rows[a])), "%d and %d", a, b);
	}
	for (int set = 0; set < 5; set++)
		kv_identity_deinit(&sets[set]);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("alloc/identity");
	TCase *tcase = tcase_create("identity");

	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(tcase, the_digest_is_blake2b_however_its_input_comes, 0,
			    sizeof(digests) / sizeof(digests[0]));
	tcase_add_loop_test(tcase,
			    all_pairs_of_sets_of_items_have_equal_rows_only_if_they_say_the_same, 0,
			    2);
	tcase_add_test(tcase,
		       what_is_too_long_for_a_row_is_there_as_a_digest_that_no_short_item_has);
	tcase_add_test(tcase, a_cut_forgets_what_stands_behind_it_and_shortens_what_reaches_over);
	tcase_add_test(tcase, prefix_digests_differ_in_tokens_lengths_fields_and_extras_and_rows_also_in_groups);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	SRunner *runner = srunner_create(suite());
	int n_failed;

	srunner_run_all(runner, CK_NORMAL);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
