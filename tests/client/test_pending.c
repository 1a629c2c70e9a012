/* SPDX-License-Identifier: Apache-2.0 */
/*
 * D16 where there is no GPU: blocks that a launched step may still write are nobody else's until
 * the step has ended, or its process. The library's own code, with streams that end when the test
 * says so. On a GPU: tests/gpu/test_pending_cuda.c.
 */
#include <errno.h>
#include <stdlib.h>

#include "libclient/internal.h"
#include "tests/support/client.h"
#include "tests/support/process.h"

#define N_BLOCKS 16
#define MINE	 4
#define LEN	 (MINE * BLOCK_TOKENS)
#define PROMPT	 1

/* Steps are launched one after the other, and end in this order; broken: the GPU has faulted. */
struct stream {
	int launched, ended;
	bool broken;
};

struct kv_event {
	const struct stream *stream;
	int step;
};

int __wrap_kv_event_new(int device, struct kv_event **ret);
struct kv_event *__wrap_kv_event_free(struct kv_event *event);
int __wrap_kv_event_record(struct kv_event *event, void *stream);
int __wrap_kv_event_query(struct kv_event *event);

int __wrap_kv_event_new(int device, struct kv_event **ret)
{
	ck_assert_int_eq(device, KV_DEVICE_CUDA);
	*ret = calloc(1, sizeof(**ret));
	return *ret ? 0 : -ENOMEM;
}

struct kv_event *__wrap_kv_event_free(struct kv_event *event)
{
	free(event);
	return NULL;
}

int __wrap_kv_event_record(struct kv_event *event, void *stream)
{
	event->stream = stream;
	event->step = event->stream->launched;
	return 0;
}

int __wrap_kv_event_query(struct kv_event *event)
{
	return event->stream->broken ? -EIO : event->stream->ended >= event->step;
}

static struct kv_client *client;
static struct kv_pool *pool, *other;
static struct stream stream;

/* A session whose work is done by streams. */
static struct kv_pool *with_streams(struct kv_client *own)
{
	struct kv_pool *p = pool_new_mapped(own, "pending", N_BLOCKS);

	p->device = KV_DEVICE_CUDA;
	return p;
}

static void setup(void)
{
	daemon_start("--host", "8M");
	client = client_new();
	stream = (struct stream){0};
	pool = with_streams(client);
	other = pool_new(client, "pending", N_BLOCKS);
}

static void teardown(void)
{
	kv_pool_close(pool);
	kv_pool_close(other);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

static bool is_of(const kv_block_id *ids, uint32_t n, kv_block_id id)
{
	for (uint32_t i = 0; i < n; i++) {
		if (ids[i] == id)
			return true;
	}
	return false;
}

/* All that another session gets now; @not: ids that it must not. */
static void others_get(uint32_t n, const kv_block_id * not )
{
	kv_block_id ids[N_BLOCKS];

	ck_assert_int_eq(kv_blocks_take(other, n + 1, ids, 50 * KV_MSEC), KV_NO_ROOM);
	must(kv_blocks_take(other, n, ids, TIMEOUT));
	for (uint32_t i = 0; i < n; i++)
		expect(!not || !is_of(not, MINE, ids[i]), "block %d may still be written", ids[i]);
	must(kv_blocks_give(other, n, ids));
}

/* A step over a sequence of its own is launched, and the sequence ends right behind it. */
static void launch_and_end(struct kv_pool *p, kv_block_id *ret_ids)
{
	struct kv_seq *seq = seq_new(p, PROMPT, LEN, NULL);
	const kv_block_id *ids;

	ck_assert_uint_eq(kv_seq_blocks(seq, &ids), MINE);
	memcpy(ret_ids, ids, MINE * sizeof(*ids));
	stream.launched++;
	kv_seq_free(seq, &stream);
}

START_TEST(d16_released_blocks_are_nobody_elses_while_a_launched_step_can_still_write_them)
{
	kv_block_id mine[MINE], again[MINE], all[N_BLOCKS];

	launch_and_end(pool, mine);
	others_get(N_BLOCKS - MINE, mine);
	/* Nor does their own session get them anew. */
	must(kv_blocks_take(pool, MINE, again, TIMEOUT));
	for (int i = 0; i < MINE; i++)
		expect(!is_of(mine, MINE, again[i]), "block %d may still be written", again[i]);
	must(kv_blocks_give(pool, MINE, again));
	ck_assert_uint_ge(pool_stats(client, "pending").blocks_leased, MINE);
	stream.ended++;
	kv_later_poll(pool);
	must(kv_blocks_take(other, N_BLOCKS, all, TIMEOUT));
	must(kv_blocks_give(other, N_BLOCKS, all));
}
END_TEST

START_TEST(d16_what_is_published_behind_a_step_is_found_when_it_has_ended)
{
	struct kv_seq *seq = seq_new(pool, PROMPT, LEN, NULL);

	stream.launched++;
	must(kv_seq_publish(seq, &stream));
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_eq(hit_of(other, PROMPT, LEN + 1), 0);
	stream.ended++;
	must(kv_seq_publish(seq, &stream));
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_eq(hit_of(other, PROMPT, LEN + 1), LEN);
	kv_seq_free(seq, &stream);
}
END_TEST

/* A step that hasn't ended holds up what was asked for behind it, on whichever stream. */
START_TEST(what_was_asked_for_first_happens_first)
{
	struct stream quick = {0};
	struct kv_seq *seq = seq_new(pool, PROMPT, LEN, NULL);

	stream.launched++;
	must(kv_seq_publish(seq, &stream));
	kv_seq_free(seq, &quick);
	kv_later_poll(pool);
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_eq(pool_stats(client, "pending").blocks_leased, MINE);
	stream.ended++;
	kv_later_poll(pool);
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_eq(hit_of(other, PROMPT, LEN + 1), LEN);
	ck_assert_uint_eq(pool_stats(client, "pending").blocks_cached, MINE);
}
END_TEST

static void launches_and_waits(struct process *self, void *arg)
{
	struct kv_pool *p = with_streams(client_new());
	kv_block_id mine[MINE];

	stream.broken = arg;
	launch_and_end(p, mine);
	kv_later_poll(p);
	/* Nobody can say that the step has ended: closing doesn't either. */
	if (arg)
		kv_pool_close(p);
	for (int i = 0; i < MINE; i++)
		process_say(self, mine[i]);
	process_wait(self);
}

START_TEST(d16_blocks_of_a_step_that_never_ends_are_free_when_its_process_is_dead)
{
	struct process *p = process_start(launches_and_waits, _i ? &stream : NULL);
	kv_block_id mine[MINE], all[N_BLOCKS];

	for (int i = 0; i < MINE; i++)
		mine[i] = (kv_block_id)process_hear(p);
	others_get(N_BLOCKS - MINE, mine);
	process_kill(p);
	must(kv_blocks_take(other, N_BLOCKS, all, TIMEOUT));
	must(kv_blocks_give(other, N_BLOCKS, all));
}
END_TEST

int main(void)
{
	Suite *s = suite_create("client/pending");
	TCase *tcase = tcase_create("pending");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(
		tcase,
		d16_released_blocks_are_nobody_elses_while_a_launched_step_can_still_write_them);
	tcase_add_test(tcase, d16_what_is_published_behind_a_step_is_found_when_it_has_ended);
	tcase_add_test(tcase, what_was_asked_for_first_happens_first);
	tcase_add_loop_test(tcase,
			    d16_blocks_of_a_step_that_never_ends_are_free_when_its_process_is_dead,
			    0, 2);
	suite_add_tcase(s, tcase);
	return daemon_run_tests(s);
}
