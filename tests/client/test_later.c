/* SPDX-License-Identifier: Apache-2.0 */
/*
 * D16 without a GPU (tests/cases.md): what waits for a launched step, with events that pass when
 * the test says so. All that the library does when it is over is noted down in the order in which
 * it happens.
 */
#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/memory.h"
#include "libclient/internal.h"

/* A step: its stream points to one. */
struct step {
	int passed; /* 1; 0; -EIO */
};

struct kv_event {
	struct step *step;
};

static struct kv_pool pool;
static char happened[200]; /* "p7": published; "r7": let go of */
static int n_events, n_kicks;

int kv_event_new(int device, struct kv_event **ret)
{
	ck_assert_int_eq(device, KV_DEVICE_CUDA);
	*ret = calloc(1, sizeof(**ret));
	n_events++;
	return 0;
}

struct kv_event *kv_event_free(struct kv_event *event)
{
	n_events -= event != NULL;
	free(event);
	return NULL;
}

int kv_event_record(struct kv_event *event, void *stream)
{
	event->step = stream;
	return event->step->passed == -EBUSY ? -EBUSY : 0;
}

int kv_event_query(struct kv_event *event)
{
	return event->step->passed;
}

static void note(char what, kv_block_id id)
{
	size_t n = strlen(happened);

	snprintf(happened + n, sizeof(happened) - n, "%c%d ", what, id);
}

int kv_ops_post(struct kv_pool *p, const struct kv_op *op)
{
	ck_assert_ptr_eq(p, &pool);
	note('p', op->id);
	return 0;
}

void kv_again_posted(struct kv_pool *p, kv_block_id id)
{
	(void)p;
	(void)id;
}

void kv_block_release(struct kv_pool *p, kv_block_id id)
{
	ck_assert_ptr_eq(p, &pool);
	note('r', id);
}

void kv_ops_kick(struct kv_pool *p)
{
	(void)p;
	n_kicks++;
}

static void setup(void)
{
	memset(&pool, 0, sizeof(pool));
	pool.device = KV_DEVICE_CUDA;
	kv_link_init(&pool.later);
	happened[0] = 0;
	n_events = n_kicks = 0;
}

static void teardown(void)
{
	ck_assert(kv_link_is_alone(&pool.later));
	ck_assert_int_eq(n_events, 0);
}

START_TEST(blocks_of_a_launched_step_are_let_go_when_it_has_ended_and_not_before)
{
	const kv_block_id ids[] = {1, 2, 3, 4};
	struct step step = {0};

	ck_assert_int_eq(kv_later_release(&pool, &step, ids, 4), 0);
	for (int i = 0; i < 1000; i++)
		kv_later_poll(&pool);
	ck_assert_str_eq(happened, "");
	ck_assert_int_eq(kv_later_finish(&pool, 0), -ETIMEDOUT);
	ck_assert_str_eq(happened, "");
	step.passed = 1;
	kv_later_poll(&pool);
	ck_assert_str_eq(happened, "r1 r2 r3 r4 ");
	kv_later_poll(&pool);
	ck_assert_str_eq(happened, "r1 r2 r3 r4 ");
	ck_assert_int_eq(n_kicks, 1);
}
END_TEST

START_TEST(what_is_published_is_shown_before_it_is_let_go_of_whichever_stream_ends_first)
{
	const struct kv_op op = {.kind = KV_OP_PUBLISH, .id = 7};
	struct step slow = {0}, fast = {1};
	const kv_block_id id = 7;

	ck_assert_int_eq(kv_later_publish(&pool, &slow, &op, 1), 0);
	ck_assert_int_eq(kv_later_release(&pool, &fast, &id, 1), 0);
	kv_later_drop(&pool, 8); /* needs no step, and keeps its place */
	kv_later_poll(&pool);
	ck_assert_str_eq(happened, "");
	slow.passed = 1;
	ck_assert_int_eq(kv_later_finish(&pool, 0), 0);
	ck_assert_str_eq(happened, "p7 r7 r8 ");
}
END_TEST

START_TEST(where_nothing_is_launched_all_happens_at_once)
{
	const struct kv_op op = {.kind = KV_OP_PUBLISH, .id = 7};
	struct step done = {1};
	const kv_block_id id = 7;

	kv_later_drop(&pool, 9);
	ck_assert_int_eq(kv_later_release(&pool, &done, &id, 1), 0);
	pool.device = KV_DEVICE_HOST;
	ck_assert_int_eq(kv_later_publish(&pool, NULL, &op, 1), 0);
	ck_assert_int_eq(kv_later_release(&pool, NULL, &id, 1), 0);
	ck_assert_str_eq(happened, "r9 r7 p7 r7 ");
}
END_TEST

/* Nobody will ever know whether it still writes: its blocks wait for the end of the process. */
START_TEST(blocks_of_a_step_that_broke_are_never_let_go)
{
	const kv_block_id id = 7;
	struct step broken = {0};

	ck_assert_int_eq(kv_later_release(&pool, &broken, &id, 1), 0);
	broken.passed = -EIO;
	ck_assert_int_eq(kv_later_finish(&pool, INT64_MAX), -EIO);
	ck_assert(pool.lost);
	ck_assert_str_eq(happened, "");
	broken.passed = 1; /* for the teardown */
	kv_later_poll(&pool);
}
END_TEST

START_TEST(a_stream_that_takes_no_event_keeps_the_blocks_and_says_so)
{
	const kv_block_id id = 7;
	struct step captured = {-EBUSY};

	ck_assert_int_eq(kv_later_release(&pool, &captured, &id, 1), -EBUSY);
	ck_assert_str_eq(happened, "");
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("client/later");
	SRunner *runner = srunner_create(suite);
	TCase *tcase = tcase_create("later");
	int n_failed;

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase,
		       blocks_of_a_launched_step_are_let_go_when_it_has_ended_and_not_before);
	tcase_add_test(
		tcase,
		what_is_published_is_shown_before_it_is_let_go_of_whichever_stream_ends_first);
	tcase_add_test(tcase, where_nothing_is_launched_all_happens_at_once);
	tcase_add_test(tcase, blocks_of_a_step_that_broke_are_never_let_go);
	tcase_add_test(tcase, a_stream_that_takes_no_event_keeps_the_blocks_and_says_so);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
