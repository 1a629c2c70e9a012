/* SPDX-License-Identifier: Apache-2.0 */
/* Holds and DLPack tensors: memory that outlives the pool or batch it came from. */
#include <errno.h>
#include <string.h>

#include "tests/support/client.h"

/* The struct of DLPack's specification, version 0. */
struct managed {
	unsigned char *data;
	int32_t device_type, device_id, n_dims;
	uint8_t code, bits;
	uint16_t lanes;
	int64_t *shape, *strides;
	uint64_t byte_offset;
	void *context;
	void (*deleter)(struct managed *);
};

static struct kv_client *client;

static void setup(void)
{
	daemon_start("--host", "32M");
	client = client_new();
}

static void teardown(void)
{
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

START_TEST(a_tensor_shows_the_component_and_outlives_its_pool)
{
	struct kv_pool *pool = pool_new_mapped(client, "pool", 0);
	struct kv_pool_info info;
	struct kv_view view;
	struct managed *tensor;
	kv_block_id id;
	void *p;

	kv_pool_info(pool, &info);
	must(kv_pool_view(pool, 0, 1, &view));
	must(kv_pool_dlpack(pool, 0, 1, &p));
	tensor = p;
	expect(tensor->data == view.base && tensor->device_type == 1 && !tensor->device_id, "where");
	expect(tensor->n_dims == 4 && tensor->code == 2 && tensor->bits == 32 && tensor->lanes == 1,
	       "type");
	expect(tensor->shape[0] == info.id_limit && tensor->shape[1] == BLOCK_TOKENS &&
	       tensor->shape[2] == 1 && tensor->shape[3] == 16, "shape");
	expect(tensor->strides[0] * 4 == view.block_stride && tensor->strides[1] * 4 == view.token_stride,
	       "strides");
	must(kv_blocks_take(pool, 1, &id, TIMEOUT));
	block_fill(pool, id, 0x5a);
	expect(tensor->data[id * view.block_stride] == 0x5a, "the same bytes");
	kv_pool_close(pool);
	/* The mapping is there until the tensor goes; without the hold this is a fault. */
	expect(*(volatile unsigned char *)&tensor->data[id * view.block_stride] == 0x5a, "mapped");
	tensor->deleter(tensor);
}
END_TEST

START_TEST(a_batch_s_arrays_stay_while_they_are_held)
{
	KV_OPTIONS(kv_batch_options, limits, .max_seqs = 2, .max_tokens = 32, .max_blocks_per_seq = 4);
	struct kv_pool *pool = pool_new(client, "pool", 0);
	struct kv_batch *batch;
	struct kv_hold *hold;
	const int64_t *slots;
	struct kv_seq *seq;
	size_t hit;

	must(kv_batch_new(pool, &limits, &batch));
	must(kv_batch_hold(batch, &hold));
	seq = seq_new(pool, 1, 20, &hit);
	must(kv_batch_build(batch, &(struct kv_batch_item){ seq, 20 }, 1, 0, 0));
	slots = kv_batch_data(batch)->slots;
	kv_seq_free(seq, NULL);
	kv_batch_free(batch);
	kv_pool_close(pool);
	expect(slots[1] == slots[0] + 1, "the arrays are gone"); /* or the sanitizer says so */
	expect(!kv_hold_free(hold) && !kv_hold_free(NULL), "freed");
}
END_TEST

START_TEST(what_is_not_mapped_can_not_be_held)
{
	struct kv_pool *pool = pool_new(client, "pool", 0);
	struct kv_hold *hold;
	void *p;

	refused(kv_pool_hold(pool, 0, &hold), -ENXIO, "not mapped");
	refused(kv_pool_dlpack(pool, 0, 0, &p), -ENXIO, "not mapped");
	refused(kv_pool_ordinal(pool, 0), -ENXIO, "not mapped");
	refused(kv_pool_ordinal(pool, 99), -EINVAL, "99 given");
	kv_pool_close(pool);
	pool = pool_new_mapped(client, "pool", 0);
	refused(kv_pool_dlpack(pool, 0, 77, &p), -EINVAL, "77 given");
	expect(kv_pool_ordinal(pool, 0) == 0, "host memory is device 0");
	kv_pool_close(pool);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/tensor");
	TCase *tcase = tcase_create("tensor");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, a_tensor_shows_the_component_and_outlives_its_pool);
	tcase_add_test(tcase, a_batch_s_arrays_stay_while_they_are_held);
	tcase_add_test(tcase, what_is_not_mapped_can_not_be_held);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
