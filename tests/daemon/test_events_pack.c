/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batches of events, byte for byte. The bytes were made from the same values by another MessagePack
 * encoder (the Python package msgpack 1.1), with the fields in the order of vLLM's classes.
 */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/events_pack.h"

static const char current[] =
	"\x93\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\x93\x8c\xa4\x74\x79\x70\x65\xab\x42\x6c"
	"\x6f\x63\x6b\x53\x74\x6f\x72\x65\x64\xac\x62\x6c\x6f\x63\x6b\x5f\x68\x61\x73\x68"
	"\x65\x73\x92\xcf\x11\x22\x33\x44\x55\x66\x77\x88\xcc\xc8\xb1\x70\x61\x72\x65\x6e"
	"\x74\x5f\x62\x6c\x6f\x63\x6b\x5f\x68\x61\x73\x68\xc0\xa9\x74\x6f\x6b\x65\x6e\x5f"
	"\x69\x64\x73\x98\x01\xff\xce\x00\x01\x11\x70\x7f\xcc\x80\x05\x06\x07\xaa\x62\x6c"
	"\x6f\x63\x6b\x5f\x73\x69\x7a\x65\x04\xa7\x6c\x6f\x72\x61\x5f\x69\x64\xc0\xa6\x6d"
	"\x65\x64\x69\x75\x6d\xa3\x47\x50\x55\xa9\x6c\x6f\x72\x61\x5f\x6e\x61\x6d\x65\xc0"
	"\xaa\x65\x78\x74\x72\x61\x5f\x6b\x65\x79\x73\x92\xc0\x91\xb9\x6b\x76\x63\x61\x63"
	"\x68\x65\x64\x3a\x30\x30\x30\x30\x30\x30\x30\x30\x30\x30\x30\x30\x30\x30\x61\x62"
	"\xa9\x67\x72\x6f\x75\x70\x5f\x69\x64\x78\x00\xb2\x6b\x76\x5f\x63\x61\x63\x68\x65"
	"\x5f\x73\x70\x65\x63\x5f\x6b\x69\x6e\x64\xae\x66\x75\x6c\x6c\x5f\x61\x74\x74\x65"
	"\x6e\x74\x69\x6f\x6e\xbc\x6b\x76\x5f\x63\x61\x63\x68\x65\x5f\x73\x70\x65\x63\x5f"
	"\x73\x6c\x69\x64\x69\x6e\x67\x5f\x77\x69\x6e\x64\x6f\x77\xc0\x84\xa4\x74\x79\x70"
	"\x65\xac\x42\x6c\x6f\x63\x6b\x52\x65\x6d\x6f\x76\x65\x64\xac\x62\x6c\x6f\x63\x6b"
	"\x5f\x68\x61\x73\x68\x65\x73\x91\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xa6\x6d\x65"
	"\x64\x69\x75\x6d\xa3\x47\x50\x55\xa9\x67\x72\x6f\x75\x70\x5f\x69\x64\x78\x00\x81"
	"\xa4\x74\x79\x70\x65\xb0\x41\x6c\x6c\x42\x6c\x6f\x63\x6b\x73\x43\x6c\x65\x61\x72"
	"\x65\x64\x03";

static const char legacy[] =
	"\x93\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\x93\x9c\xab\x42\x6c\x6f\x63\x6b\x53\x74"
	"\x6f\x72\x65\x64\x92\xcf\x11\x22\x33\x44\x55\x66\x77\x88\xcc\xc8\xc0\x98\x01\xff"
	"\xce\x00\x01\x11\x70\x7f\xcc\x80\x05\x06\x07\x04\xc0\xa3\x47\x50\x55\xc0\x92\xc0"
	"\x91\xb9\x6b\x76\x63\x61\x63\x68\x65\x64\x3a\x30\x30\x30\x30\x30\x30\x30\x30\x30"
	"\x30\x30\x30\x30\x30\x61\x62\x00\xae\x66\x75\x6c\x6c\x5f\x61\x74\x74\x65\x6e\x74"
	"\x69\x6f\x6e\xc0\x94\xac\x42\x6c\x6f\x63\x6b\x52\x65\x6d\x6f\x76\x65\x64\x91\xcf"
	"\xff\xff\xff\xff\xff\xff\xff\xff\xa3\x47\x50\x55\x00\x91\xb0\x41\x6c\x6c\x42\x6c"
	"\x6f\x63\x6b\x73\x43\x6c\x65\x61\x72\x65\x64\x03";

static const int32_t tokens[] = { 1, -1, 70000, 127, 128, 5, 6, 7 };

static void pack_all(struct kv_pack *p)
{
	const uint64_t hashes[] = { 0x1122334455667788, 200 }, extras[] = { 0, 0xab };
	const int32_t *const lists[] = { tokens, tokens + 4 };
	struct kv_stored stored = { .n_blocks = 2,
				    .block_tokens = 4,
				    .hashes = hashes,
				    .tokens = lists,
				    .extras = extras,
				    .medium = "GPU",
				    .kind = "full_attention" };

	kv_pack_stored(p, &stored);
	kv_pack_removed(p, &(uint64_t){ UINT64_MAX }, 1, "GPU", 0);
	kv_pack_cleared(p);
}

START_TEST(a_batch_has_the_bytes_that_consumers_read)
{
	static const struct {
		bool legacy;
		const char *bytes;
		size_t n;
	} cases[] = { { false, current, sizeof(current) - 1 }, { true, legacy, sizeof(legacy) - 1 } };
	struct kv_pack p = { .legacy = cases[_i].legacy };
	size_t n = 0;

	/* Twice: what was taken leaves nothing behind. */
	for (int i = 0; i < 2; i++) {
		void *bytes;

		pack_all(&p);
		bytes = kv_pack_take(&p, 1.5, 3, &n);
		ck_assert_ptr_nonnull(bytes);
		ck_assert_uint_eq(n, cases[_i].n);
		ck_assert_int_eq(memcmp(bytes, cases[_i].bytes, n), 0);
		free(bytes);
	}
}
END_TEST

START_TEST(without_events_there_is_no_batch)
{
	struct kv_pack p = { 0 };
	size_t n = 7;

	ck_assert_ptr_null(kv_pack_take(&p, 1.5, 0, &n));
}
END_TEST

START_TEST(a_chain_longer_than_a_short_array_keeps_its_lengths)
{
	uint64_t hashes[64], extras[64] = { 0 };
	const int32_t *lists[64];
	struct kv_stored stored = { .n_blocks = 64, .block_tokens = 4, .hashes = hashes,
				    .tokens = lists, .extras = extras, .has_parent = true, .parent = 1,
				    .medium = "CPU", .kind = "mamba" };
	struct kv_pack p = { 0 };
	uint8_t *bytes;
	size_t n;

	for (unsigned i = 0; i < 64; i++) {
		hashes[i] = i;
		lists[i] = tokens;
	}
	for (unsigned i = 0; i < 20; i++)
		kv_pack_stored(&p, &stored);
	bytes = kv_pack_take(&p, 0, -1, &n);
	ck_assert_ptr_nonnull(bytes);
	/* [float, 20 events: array 16, a map of 12 ... rank -1] */
	ck_assert_int_eq(memcmp(bytes, "\x93\xcb\0\0\0\0\0\0\0\0\xdc\0\x14\x8c", 14), 0);
	ck_assert_uint_eq(bytes[n - 1], 0xff);
	/* 64 hashes of a byte each, behind "type", "BlockStored", "block_hashes". */
	ck_assert_int_eq(memcmp(bytes + 14 + 5 + 12 + 13, "\xdc\0\x40\0\1\2", 6), 0);
	free(bytes);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("daemon/events_pack");
	TCase *tcase = tcase_create("events_pack");
	SRunner *runner;
	int n_failed;

	tcase_add_loop_test(tcase, a_batch_has_the_bytes_that_consumers_read, 0, 2);
	tcase_add_test(tcase, without_events_there_is_no_batch);
	tcase_add_test(tcase, a_chain_longer_than_a_short_array_keeps_its_lengths);
	suite_add_tcase(suite, tcase);
	runner = srunner_create(suite);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
