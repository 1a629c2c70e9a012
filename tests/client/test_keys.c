/* SPDX-License-Identifier: Apache-2.0 */
/* kvcached/keys.h: what golden vectors don't ask, and what it refuses. */
#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/client.h>
#include <kvcached/keys.h>

#include "alloc/sha256.h"

#define TOKENS 200

static const struct kv_keys_item items[] = {{"cat", 3, 40}, {"dog", 3, 0}, {"owl", 100, 1}};
static uint32_t tokens[TOKENS];

static struct kv_keys_options options_new(int hash)
{
	for (uint32_t i = 0; i < TOKENS; i++)
		tokens[i] = i * 2654435761u;
	return (struct kv_keys_options){.size = sizeof(struct kv_keys_options),
					.hash = hash,
					.block_tokens = 7,
					.lora_name = "adapter",
					.salt = "tenant",
					.items = items,
					.n_items = 3};
}

START_TEST(keys_are_the_same_in_any_number_of_calls)
{
	struct kv_keys_options o = options_new(1 + _i);
	size_t bytes = kv_keys_bytes(o.hash);
	uint8_t whole[TOKENS / 7][KV_KEYS_BYTES], parts[TOKENS / 7][KV_KEYS_BYTES];
	int64_t n = kv_keys_of_blocks(&o, 0, NULL, tokens, TOKENS, whole[0], TOKENS / 7);

	ck_assert_int_eq(n, TOKENS / 7);
	for (int seed = 0; seed < 50; seed++) {
		uint8_t *at = parts[0], *parent = NULL;
		int64_t done = 0;

		srand((unsigned)seed);
		while (done < n) {
			size_t m = (size_t)(rand() % 30), left = TOKENS - (size_t)done * 7;
			int64_t more = kv_keys_of_blocks(&o, done, parent, tokens + done * 7,
							 m < left ? m : left, at, n - done);

			ck_assert_int_ge(more, 0);
			done += more;
			at += (size_t)more * bytes;
			parent = done ? at - bytes : NULL;
		}
		ck_assert_mem_eq(parts, whole, (size_t)n * bytes);
	}
}
END_TEST

START_TEST(what_is_in_a_block_is_in_its_key_and_all_after)
{
	struct kv_keys_options o = options_new(KV_KEYS_SHA256), other = o;
	struct kv_keys_item moved[3] = {items[0], items[1], items[2]};
	uint8_t keys[TOKENS / 7][32], changed[TOKENS / 7][32];

	moved[2].hash = "elk"; /* at token 100: in block 14 */
	other.items = moved;
	ck_assert_int_eq(kv_keys_of_blocks(&o, 0, NULL, tokens, TOKENS, keys[0], 28), 28);
	ck_assert_int_eq(kv_keys_of_blocks(&other, 0, NULL, tokens, TOKENS, changed[0], 28), 28);
	for (int i = 0; i < 28; i++)
		ck_assert_int_eq(!memcmp(keys[i], changed[i], 32), i < 14);
	other = o;
	other.salt = "other";
	ck_assert_int_eq(kv_keys_of_blocks(&other, 0, NULL, tokens, 7, changed[0], 1), 1);
	ck_assert(memcmp(keys[0], changed[0], 32) != 0);
	/* An item of no tokens is in no block. */
	other = o;
	moved[2] = items[2];
	moved[1].hash = "elk";
	other.items = moved;
	ck_assert_int_eq(kv_keys_of_blocks(&other, 0, NULL, tokens, 70, changed[0], 10), 10);
	ck_assert_mem_eq(changed, keys, 320);
}
END_TEST

/* By hand: [seed's key, [0, 0], [digest]], hashed; then that key, no rows, the digest of nothing. */
START_TEST(a_prompt_of_embeddings_is_known_by_its_rows)
{
	static const uint8_t rows[3][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 10, 11, 12}};
	static const uint32_t zeros[6] = {0};
	struct kv_keys_options o = {.size = sizeof(o), .hash = KV_KEYS_SHA256, .block_tokens = 2};
	uint8_t with[3][32], without[3][32], digest[32], message[128], right[32];
	struct kv_sha256 s;

	ck_assert_int_eq(kv_keys_of_blocks(&o, 0, NULL, zeros, 6, without[0], 3), 3);
	o.embeds = rows;
	o.n_embeds = 3;
	o.embed_bytes = 4;
	ck_assert_int_eq(kv_keys_of_blocks(&o, 0, NULL, zeros, 6, with[0], 3), 3);
	kv_keys_seed(&o, right);
	for (int i = 0; i < 3; i++) { /* two rows, one, none */
		kv_sha256_start(&s);
		kv_sha256_add(&s, rows[i == 0 ? 0 : 2], i == 0 ? 8 : i == 1 ? 4 : 0);
		kv_sha256_end(&s, digest);
		memcpy(message, "\x83\x58\x20", 3);
		memcpy(message + 3, right, 32);
		memcpy(message + 35, "\x82\x00\x00\x81\x58\x20", 6);
		memcpy(message + 41, digest, 32);
		kv_sha256_start(&s);
		kv_sha256_add(&s, message, 73);
		kv_sha256_end(&s, right);
		ck_assert_mem_eq(with[i], right, 32);
		ck_assert(memcmp(with[i], without[i], 32) != 0);
	}
	/* From the second block on, the rows still counted from the sequence's start. */
	ck_assert_int_eq(kv_keys_of_blocks(&o, 1, with[0], zeros, 4, without[0], 2), 2);
	ck_assert_mem_eq(without, with[1], 64);
	o.embed_bytes = 0;
	ck_assert_int_eq(kv_keys_of_blocks(&o, 0, NULL, zeros, 6, with[0], 3), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "embed_bytes"));
}
END_TEST

START_TEST(a_wrong_field_is_named)
{
	static const char *const fields[] = {
		"size",		 "hash",	  "block_tokens", "items: NULL",  "items[1]",
		"first, parent", "first, parent", "room",	  "block_tokens", "group"};
	static const struct kv_keys_item falling[] = {{"a", 9, 1}, {"b", 8, 1}};
	struct kv_keys_options o = options_new(KV_KEYS_XXH3);
	uint8_t key[KV_KEYS_BYTES + KV_KEYS_GROUP_BYTES] = {0};
	int64_t index[4], r;

	o.size -= _i == 0;
	o.hash = _i == 1 ? 3 : o.hash;
	o.block_tokens = _i == 2 ? 0 : 7;
	o.items = _i == 3 ? NULL : _i == 4 ? falling : items;
	o.n_items = _i == 4 ? 2 : 3;
	if (_i == 8)
		r = kv_keys_view(4, 16, 24, 0, index);
	else if (_i == 9)
		r = kv_keys_pack(key, 16, (uint64_t)1 << 32, key);
	else
		r = kv_keys_of_blocks(&o, _i == 5, _i == 6 ? key : NULL, tokens, 14, key,
				      _i == 7 ? 1 : 2);
	ck_assert_int_eq(r, _i == 7 ? -E2BIG : _i == 9 ? -ERANGE : -EINVAL);
	ck_assert_msg(strstr(kv_error_text(), fields[_i]), "\"%s\" has no %s", kv_error_text(),
		      fields[_i]);
	ck_assert_int_eq(key[0], 0);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("client/keys");
	TCase *tcase = tcase_create("keys");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	suite_add_tcase(suite, tcase);
	tcase_add_loop_test(tcase, keys_are_the_same_in_any_number_of_calls, 0, 2);
	tcase_add_test(tcase, what_is_in_a_block_is_in_its_key_and_all_after);
	tcase_add_test(tcase, a_prompt_of_embeddings_is_known_by_its_rows);
	tcase_add_loop_test(tcase, a_wrong_field_is_named, 0, 10);
	srunner_run_all(runner, CK_NORMAL);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
