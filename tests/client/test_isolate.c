/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvcached --isolate, in processes of one user: memory comes and goes by granules, and who has it mapped
 * notices. Everything else of the library is tested under it with KV_TEST_ISOLATE=1 in the environment.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/client.h"
#include "tests/support/process.h"
#include "tests/support/raw.h"

#define MIB	     ((uint64_t)1 << 20)
#define N_GRANULES   32u /* of 2 MiB */
#define IN_A_GRANULE (2 * MIB / BLOCK_BYTES)
#define MANY	     (8 * IN_A_GRANULE)
/* Nearly all: the other pool keeps a granule for its null block. */
#define MOST ((N_GRANULES - 4) * IN_A_GRANULE)

static struct kv_client *client;
static kv_block_id ids[N_GRANULES * IN_A_GRANULE];

static void setup(void)
{
	daemon_start("--host", "64M", "--isolate");
	client = client_new();
}

static void teardown(void)
{
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

static void fill(struct kv_pool *pool, const kv_block_id *list, uint32_t n, int byte)
{
	for (uint32_t i = 0; i < n; i++)
		block_fill(pool, list[i], byte);
}

static const kv_block_id *blocks_of(const struct kv_seq *seq)
{
	const kv_block_id *blocks;

	ck_assert_uint_ge(kv_seq_blocks(seq, &blocks), 4);
	return blocks;
}

static void all_are(struct kv_pool *pool, const kv_block_id *list, uint32_t n, int byte)
{
	for (uint32_t i = 0; i < n; i++)
		expect(block_is(pool, list[i], byte), "block %d isn't all %#x", list[i], byte);
}

START_TEST(a_block_is_mapped_when_it_comes_however_often_the_pool_grows)
{
	struct kv_pool *pool = pool_new_mapped(client, "pool", 0);
	uint32_t n = 0;

	ck_assert_uint_eq(gpu_stats(client).bytes_granule, 2 * MIB);
	for (; n < MOST; n += 1000) {
		must(kv_blocks_take(pool, 1000, ids + n, TIMEOUT));
		all_are(pool, ids + n, 1000, 0);
		fill(pool, ids + n, 1000, 1 + (int)(n / 1000 % 100));
	}
	for (uint32_t i = 0; i < n; i += 1000)
		all_are(pool, ids + i, 1000, 1 + (int)(i / 1000 % 100));
	must(kv_blocks_give(pool, n, ids));
	kv_pool_close(pool);
}
END_TEST

/* Publishes what lies in granules that the test hasn't mapped. */
static void publishes(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool = pool_new_mapped(own, "pool", 0);
	struct kv_seq *seq;

	(void)arg;
	must(kv_blocks_take(pool, MANY, ids, TIMEOUT));
	seq = seq_published(own, pool, 1, 4 * BLOCK_TOKENS);
	for (uint32_t i = 0; i < 4; i++)
		block_fill(pool, blocks_of(seq)[i], 0x41);
	process_say(self, 0);
	process_wait(self);
	must(kv_blocks_give(pool, MANY, ids));
	kv_seq_free(seq, NULL);
	kv_pool_close(pool);
	kv_disconnect(own);
}

START_TEST(what_a_lookup_finds_is_mapped_also_where_another_process_made_the_pool_grow)
{
	struct kv_pool *pool = pool_new_mapped(client, "pool", 0);
	struct process *other = process_start(publishes, NULL);
	struct kv_seq *seq;
	size_t hit;

	process_hear(other);
	seq = seq_new(pool, 1, 4 * BLOCK_TOKENS + 1, &hit);
	ck_assert_uint_eq(hit, 4 * BLOCK_TOKENS);
	all_are(pool, blocks_of(seq), 4, 0x41);
	kv_seq_free(seq, NULL);
	process_go(other);
	process_end(other);
	kv_pool_close(pool);
}
END_TEST

static void maps_what_it_is_told(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool = pool_new_mapped(own, "pool", 0);

	(void)arg;
	process_say(self, 0);
	for (int i = 0; i < 2; i++) {
		kv_block_id id = (kv_block_id)process_hear(self);

		must(kv_pool_map(pool, TIMEOUT));
		ck_assert(block_is(pool, id, 0x42));
		process_say(self, 0);
	}
	kv_pool_close(pool);
	kv_disconnect(own);
}

START_TEST(a_worker_maps_what_its_scheduler_tells_it_of)
{
	struct process *worker = process_start(maps_what_it_is_told, NULL);
	struct kv_pool *pool;

	process_hear(worker);
	pool = pool_new_mapped(client, "pool", 0);
	for (int i = 0; i < 2; i++) {
		must(kv_blocks_take(pool, MANY, ids + i * MANY, TIMEOUT));
		block_fill(pool, ids[i * MANY + MANY / 2], 0x42);
		process_say(worker, ids[i * MANY + MANY / 2]);
		process_hear(worker);
	}
	process_end(worker);
	must(kv_blocks_give(pool, 2 * MANY, ids));
	kv_pool_close(pool);
}
END_TEST

/* Reads where it has nothing mapped, as a stale id would make it. */
static void reads_past_its_memory(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool = pool_new_mapped(own, "small", 100);
	struct kv_pool_info info;

	(void)arg;
	kv_pool_info(pool, &info);
	signal(SIGSEGV, SIG_DFL);
	process_say(self, 0);
	block_is(pool, info.id_limit - 1, 0);
	process_say(self, 1);
}

START_TEST(what_is_not_the_pools_is_not_mapped)
{
	struct process *other = process_start(reads_past_its_memory, NULL);
	int status;

	process_hear(other);
	ck_assert_int_eq(waitpid(other->pid, &status, 0), other->pid);
	/* A sanitizer turns the signal into an exit. */
	expect(WIFSIGNALED(status) || (WIFEXITED(status) && WEXITSTATUS(status)),
	       "it has read where it has no memory");
	close(other->fd);
	free(other);
	wait_until(daemon_stats(client).n_sessions == 0);
}
END_TEST

/* Granules that this process has mapped. */
static uint32_t n_mapped(void)
{
	FILE *f = fopen("/proc/self/maps", "r");
	char line[400];
	uint32_t n = 0;

	while (fgets(line, sizeof(line), f))
		n += strstr(line, "kvcached-arena") != NULL;
	fclose(f);
	return n;
}

static void has_had_it_and_waits(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool = pool_new_mapped(own, "first", 0);
	struct kv_pressure pressure;
	bool calls = *(bool *)arg;

	must(kv_blocks_take(pool, MOST, ids, TIMEOUT));
	fill(pool, ids, MOST, 0x43);
	must(kv_blocks_give(pool, MOST, ids));
	must(kv_ping(own, TIMEOUT));
	process_say(self, 0);
	ck_assert_uint_ge(n_mapped(), N_GRANULES / 2);
	if (!calls)
		process_wait(self);
	/* A look at its shared memory is enough to let go of it. */
	if (calls) {
		wait_until((kv_pool_pressure(pool, &pressure), n_mapped() < 5));
		process_wait(self);
	}
	/* It can have memory again, and none of it is what it had. */
	must(kv_blocks_take(pool, 100, ids, TIMEOUT));
	kv_pool_close(pool);
	kv_disconnect(own);
}

START_TEST(memory_goes_to_another_pool_also_from_a_client_that_sleeps)
{
	bool calls = _i;
	struct process *first = process_start(has_had_it_and_waits, &calls);
	struct kv_pool *second;

	process_hear(first);
	second = pool_new_mapped(client, "second", 0);
	must(kv_blocks_take(second, MOST, ids, TIMEOUT));
	all_are(second, ids, MOST, 0);
	ck_assert_uint_ge(gpu_stats(client).renewed_bytes_total, 20 * MIB);
	must(kv_blocks_give(second, MOST, ids));
	process_go(first);
	process_end(first);
	kv_pool_close(second);
}
END_TEST

/* Asks for granules [first, first + 3). Return: how many came; ret_fds[3], ret_index[3]. */
static uint32_t ask(int fd, uint32_t first, int *ret_fds, uint32_t *ret_index)
{
	struct kv_msg_granules msg = {.n = 3, .index = {first, first + 1, first + 2}};
	const struct kv_msg_granules_part *part;

	raw_send(fd, KV_MSG_GRANULES, (char *)&msg + sizeof(msg.head), sizeof(msg) - sizeof(msg.head));
	part = (const void *)raw_receive(fd, ret_fds);
	expect(part && part->head.type == KV_MSG_GRANULES_PART, "no granules came");
	for (uint32_t i = 0; i < part->n; i++)
		ret_index[i] = part->items[i].index;
	return part->n;
}

START_TEST(granules_of_others_and_what_is_no_granule_are_not_handed_out)
{
	static const struct kv_msg_granules wrong[] = {{.gpu = 1, .n = 1}, {.n = 251}};
	static const char *const words[] = {"gpu", "at most 250"};
	struct kv_pool *pool = pool_new_mapped(client, "pool", 0);
	int fd = raw_hello(), fds[3];
	uint32_t index[3], n = 0;

	must(kv_blocks_take(pool, MOST / 2, ids, TIMEOUT));
	ck_assert_uint_eq(raw_open(fd, "other", 0, fds)->type, KV_MSG_POOL_OPENED);
	for (int i = 0; i < 3; i++)
		close(fds[i]);
	for (uint32_t i = 0; i < N_GRANULES; i += 3) {
		uint32_t got = ask(fd, i, fds, index);

		for (uint32_t k = 0; k < got; k++) {
			for (uint32_t j = 0; j < MOST / 2; j++)
				expect((uint64_t)ids[j] * BLOCK_BYTES / (2 * MIB) != index[k],
				       "granule %u is the other pool's", index[k]);
			close(fds[k]);
		}
		n += got;
	}
	/* The null block's, and perhaps one more for the block behind it. */
	ck_assert_uint_ge(n, 1);
	ck_assert_uint_le(n, 2);
	ck_assert_uint_eq(ask(fd, UINT32_MAX - 2, fds, index), 0);
	for (int i = 0; i < 2; i++) {
		raw_send(fd, KV_MSG_GRANULES, (const char *)&wrong[i] + sizeof(wrong[i].head),
			 sizeof(wrong[i]) - sizeof(wrong[i].head));
		ck_assert(raw_is_error(raw_receive(fd, fds), -EINVAL, words[i]));
	}
	close(fd);
	must(kv_blocks_give(pool, MOST / 2, ids));
	kv_pool_close(pool);
}
END_TEST

START_TEST(the_whole_arena_is_not_handed_out)
{
	struct kv_msg_arena msg = {.gpu = 0};
	const struct kv_msg_arena_part *part;
	int fd = raw_hello(), fds[3];

	raw_send(fd, KV_MSG_ARENA, (char *)&msg + sizeof(msg.head), sizeof(msg) - sizeof(msg.head));
	part = (const void *)raw_receive(fd, fds);
	ck_assert_uint_eq(part->head.type, KV_MSG_ARENA_PART);
	ck_assert_uint_eq(part->n_fds, 0);
	ck_assert_int_eq(fds[0], -1);
	ck_assert_uint_eq(part->export.sparse, 1);
	close(fd);
}
END_TEST

START_TEST(after_a_worker_died_memory_comes_and_goes_as_before)
{
	bool calls = false;
	struct process *first = process_start(has_had_it_and_waits, &calls);
	struct kv_pool *second;

	process_hear(first);
	daemon_kill_worker();
	must(kv_ping(client, TIMEOUT));
	second = pool_new_mapped(client, "second", 0);
	must(kv_blocks_take(second, MOST, ids, TIMEOUT));
	all_are(second, ids, MOST, 0);
	fill(second, ids, MOST, 0x44);
	daemon_kill_worker();
	must(kv_ping(client, TIMEOUT));
	all_are(second, ids, MOST, 0x44);
	must(kv_blocks_give(second, MOST, ids));
	process_go(first);
	process_end(first);
	kv_pool_close(second);
}
END_TEST

static void refused_at_the_start(const char *option, const char *value, const char *words)
{
	char text[600];

	ck_assert_int_eq(daemon_refused(text, sizeof(text), "--isolate", option, value), 2);
	expect(strstr(text, words), "'%s' says nothing of '%s'", text, words);
}

START_TEST(what_isolation_can_not_hold_with_is_refused_with_the_reason)
{
	char text[600];

	refused_at_the_start("--export", "ipc", "handle of the whole arena");
	refused_at_the_start("--granule", "6M", "power of two");
	ck_assert_int_eq(daemon_refused(text, sizeof(text), "--host", "8M", "--isolate", "--granule",
					"16M"), 1);
	expect(strstr(text, "less to reserve than one granule"), "%s", text);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("client/isolate");
	TCase *tcase = tcase_create("isolate"), *alone = tcase_create("options");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, a_block_is_mapped_when_it_comes_however_often_the_pool_grows);
	tcase_add_test(tcase,
		       what_a_lookup_finds_is_mapped_also_where_another_process_made_the_pool_grow);
	tcase_add_test(tcase, a_worker_maps_what_its_scheduler_tells_it_of);
	tcase_add_test(tcase, what_is_not_the_pools_is_not_mapped);
	tcase_add_loop_test(tcase, memory_goes_to_another_pool_also_from_a_client_that_sleeps, 0, 2);
	tcase_add_test(tcase, granules_of_others_and_what_is_no_granule_are_not_handed_out);
	tcase_add_test(tcase, the_whole_arena_is_not_handed_out);
	tcase_add_test(tcase, after_a_worker_died_memory_comes_and_goes_as_before);
	suite_add_tcase(s, tcase);
	tcase_add_test(alone, what_isolation_can_not_hold_with_is_refused_with_the_reason);
	suite_add_tcase(s, alone);
	return daemon_run_tests(s);
}
