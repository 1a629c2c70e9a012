/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Vectors of block keys. The messages that were hashed are given, too: equal keys are of equal
 * messages, so only keys are held against each other.
 */
#include <stdio.h>
#include <string.h>

#include <kvcached/keys.h>

#include "tests/golden/golden.h"

static int refused(const char *class, json_t **ret_out)
{
	*ret_out = json_pack("{s:s}", "error", class);
	return 0;
}

static json_t *out_hex(const uint8_t *bytes, size_t n)
{
	char text[2 * (KV_KEYS_BYTES + KV_KEYS_GROUP_BYTES) + 1];

	for (size_t i = 0; i < n; i++)
		snprintf(text + 2 * i, 3, "%02x", bytes[i]);
	return json_stringn(text, 2 * n);
}

static size_t in_hex(const json_t *in, const char *key, uint8_t *ret)
{
	const char *text = in_text(in, key, "");
	size_t n = strlen(text) / 2;

	for (size_t i = 0; i < n; i++)
		sscanf(text + 2 * i, "%2hhx", &ret[i]);
	return n;
}

static uint32_t *all_tokens(const json_t *in, size_t *ret_prompt, size_t *ret_n)
{
	size_t n_more;
	int64_t *prompt = in_ints(in, "prompt", ret_prompt),
		*more = in_ints(in, "appended", &n_more);
	uint32_t *tokens = golden_alloc(*ret_prompt + n_more, sizeof(*tokens));

	*ret_n = *ret_prompt + n_more;
	for (size_t i = 0; i < *ret_n; i++)
		tokens[i] = (uint32_t)(i < *ret_prompt ? prompt[i] : more[i - *ret_prompt]);
	return tokens;
}

static void options_of(const json_t *in, struct kv_keys_options *o)
{
	json_t *list = json_object_get(in, "mm"), *row;
	struct kv_keys_item *items = golden_alloc(json_array_size(list), sizeof(*items));
	size_t i;

	json_array_foreach(list, i, row) items[i] =
		(struct kv_keys_item){json_string_value(json_array_get(row, 0)),
				      json_integer_value(json_array_get(row, 1)),
				      json_integer_value(json_array_get(row, 2))};
	*o = (struct kv_keys_options){
		.size = sizeof(*o),
		.hash = strcmp(in_text(in, "algo", ""), "sha256_cbor") ? KV_KEYS_XXH3
								       : KV_KEYS_SHA256,
		.block_tokens = (int32_t)in_int(in, "block_size", 1),
		.seed = in_text(in, "seed", NULL),
		.lora_name = in_text(in, "lora_name", NULL),
		.salt = in_text(in, "cache_salt", NULL),
		.items = items,
		.n_items = (uint32_t)json_array_size(list),
	};
}

static int block_hash(const json_t *in, json_t **ret_out)
{
	struct kv_keys_options o;
	size_t n_prompt, n_tokens, bytes;
	uint32_t *tokens = all_tokens(in, &n_prompt, &n_tokens);
	uint8_t none[KV_KEYS_BYTES], *keys, *again;
	json_t *blocks = json_array(), *list = json_array();
	int64_t n, first;

	options_of(in, &o);
	bytes = kv_keys_bytes(o.hash);
	keys = golden_alloc(n_tokens, bytes);
	again = golden_alloc(n_tokens, bytes);
	n = kv_keys_of_blocks(&o, 0, NULL, tokens, n_tokens, keys, (int64_t)n_tokens);
	/* The prompt's, then those that its continuation completes. */
	first = kv_keys_of_blocks(&o, 0, NULL, tokens, n_prompt, again, (int64_t)n_prompt);
	if (kv_keys_seed(&o, none) < 0 || n < 0 || first < 0 ||
	    kv_keys_of_blocks(&o, first, first ? again + (size_t)(first - 1) * bytes : NULL,
			      tokens + first * o.block_tokens,
			      n_tokens - (size_t)(first * o.block_tokens),
			      again + (size_t)first * bytes, n - first) != n - first) {
		json_decref(blocks);
		json_decref(list);
		return KV_FAULT_BAD_CONFIG;
	}
	for (int64_t i = 0; i < n; i++) {
		const uint8_t *key = keys + (size_t)i * bytes;

		json_array_append_new(list, out_hex(key, bytes));
		json_array_append_new(blocks,
				      json_pack("{s:o, s:b}", "hash_hex", out_hex(key, bytes),
						"matches_incremental",
						!memcmp(key, again + (size_t)i * bytes, bytes)));
	}
	*ret_out = json_pack("{s:o, s:o, s:o}", "none_hash_hex", out_hex(none, bytes), "blocks",
			     blocks, "block_hashes", list);
	return 0;
}

/* What is hashed isn't shown by the calls. */
static void ask_messages(const json_t *expected, json_t *out)
{
	json_t *list = json_object_get(expected, "blocks"), *block;
	size_t i;

	json_object_set(out, "none_hash_message_hex",
			json_object_get(expected, "none_hash_message_hex"));
	json_array_foreach(list, i, block)
	{
		json_t *got = json_array_get(json_object_get(out, "blocks"), i);

		json_object_set(got, "message_hex", json_object_get(block, "message_hex"));
		json_object_set(got, "extra_keys", json_object_get(block, "extra_keys"));
	}
}

static int packed(const json_t *in, json_t **ret_out)
{
	uint8_t key[KV_KEYS_BYTES], both[KV_KEYS_BYTES + KV_KEYS_GROUP_BYTES];
	size_t n = in_hex(in, "hash_hex", key);
	uint64_t group = (uint64_t)in_int(in, "group_id", 0);

	if (kv_keys_pack(key, n, group, both) < 0)
		return refused("OverflowError", ret_out);
	*ret_out = json_pack("{s:o, s:I, s:o}", "key_hex", out_hex(both, n + KV_KEYS_GROUP_BYTES),
			     "group_id", (json_int_t)group, "hash_hex", out_hex(both, n));
	return 0;
}

static int block_hash_views(const json_t *in, json_t **ret_out)
{
	int64_t n_keys = in_int(in, "num_hashes", 0), n;
	int64_t *index = golden_alloc((size_t)n_keys, sizeof(*index));
	int32_t align = in_bool(in, "fine", false) ? (int32_t)in_int(in, "alignment_tokens", 0) : 0;

	if (json_object_get(in, "hash_hex"))
		return packed(in, ret_out);
	n = kv_keys_view(n_keys, (int32_t)in_int(in, "hash_block_size", 0),
			 (int32_t)in_int(in, "target_block_size", 0), align, index);
	if (n < 0)
		return refused("AssertionError", ret_out);
	*ret_out = json_pack("{s:I, s:b, s:o}", "len", (json_int_t)n, "fine_grained",
			     align && n == n_keys && index[0] == 0, "hash_index",
			     out_ints(index, (size_t)n));
	return 0;
}

const struct golden_kind golden_keys[] = {
	{"block_hash", block_hash, NULL, ask_messages},
	{"block_hash_views", block_hash_views},
	{NULL, NULL},
};
