/* SPDX-License-Identifier: Apache-2.0 */
/*
 * D16 on a GPU: blocks that a launched step may still write are nobody else's until the step has ended, or
 * its process. All that uses CUDA runs in processes of its own.
 */
#include <check.h>
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/client.h"
#include "tests/support/process.h"

#define N_BLOCKS 12
#define MINE	 4 /* blocks of the one whose step takes its time */
#define BLOCK	 ((size_t)1 << 20)

/* The driver, by name: this program has no CUDA until a process of it needs that. */
static int (*stream_new)(void **stream, unsigned flags);
static int (*host_call)(void *stream, void (*run)(void *arg), void *arg);
static int (*fill_later)(void *p, unsigned char value, size_t n, void *stream);
static int (*stream_sync)(void *stream);
static int (*fill_now)(void *p, unsigned char value, size_t n);
static int (*copy_out)(void *to, const void *from, size_t n);
static int (*cuda_sync)(void);

static struct kv_client *client;

static bool load(void)
{
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
	int (*init)(unsigned), (*count)(int *), n = 0;

	if (!lib)
		return false;
	init = (int (*)(unsigned))dlsym(lib, "cuInit");
	count = (int (*)(int *))dlsym(lib, "cuDeviceGetCount");
	return init && count && !init(0) && !count(&n) && n > 0;
}

static void *symbol(const char *name)
{
	void *found = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), name);

	expect(found, "the driver has no %s", name);
	return found;
}

static void begin_cuda(void)
{
	int (*init)(unsigned) = (int (*)(unsigned))symbol("cuInit");
	int (*retain)(void **, int) = (int (*)(void **, int))symbol("cuDevicePrimaryCtxRetain");
	int (*set)(void *) = (int (*)(void *))symbol("cuCtxSetCurrent");
	void *context;

	expect(!init(0) && !retain(&context, 0) && !set(context), "no CUDA in this process");
	stream_new = (int (*)(void **, unsigned))symbol("cuStreamCreate");
	host_call = (int (*)(void *, void (*)(void *), void *))symbol("cuLaunchHostFunc");
	fill_later = (int (*)(void *, unsigned char, size_t, void *))symbol("cuMemsetD8Async");
	stream_sync = (int (*)(void *))symbol("cuStreamSynchronize");
	fill_now = (int (*)(void *, unsigned char, size_t))symbol("cuMemsetD8_v2");
	copy_out = (int (*)(void *, const void *, size_t))symbol("cuMemcpyDtoH_v2");
	cuda_sync = (int (*)(void))symbol("cuCtxSynchronize");
}

static struct kv_pool *open_pool(struct kv_client *own)
{
	static const struct kv_component components[] = {{0, KV_ROLE_K, KV_BF16, 8, 128, 1},
							 {0, KV_ROLE_V, KV_BF16, 8, 128, 1}};
	static const struct kv_layout layout = {KV_LAYOUT_FLAT, 0, BLOCK / (2 * 8 * 128 * 2), 2, components};
	KV_OPTIONS(kv_pool_options, what, .name = "pool", .layout = &layout, .mapped = 1,
		   .max_bytes = (N_BLOCKS + 1) * BLOCK, .timeout = TIMEOUT);
	struct kv_pool *pool;

	must(kv_pool_open(own, &what, &pool));
	return pool;
}

static char *at(struct kv_pool *pool, kv_block_id id)
{
	struct kv_view view;

	must(kv_pool_view(pool, 0, 0, &view));
	return (char *)view.base + (int64_t)id * view.block_stride;
}

/* A step that isn't over until it is told so; the deadline is for a test that has failed. */
static volatile int may_end;

static void takes_its_time(void *arg)
{
	(void)arg;
	for (int i = 0; i < 6000 && !may_end; i++)
		usleep(10000);
}

/* As an engine's loop does: what has ended goes back, and idle leases too if others want them. */
static void loop_for(struct kv_client *own, struct kv_pool *pool, int rounds)
{
	struct kv_pressure pressure;

	for (int i = 0; i < rounds; i++) {
		kv_pool_pressure(pool, &pressure);
		must(kv_pool_map(pool, TIMEOUT));
		must(kv_ping(own, TIMEOUT));
		sleep_ms(10);
	}
}

static void launches_and_releases(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	kv_block_id mine[MINE];
	const kv_block_id *ids;
	struct kv_pool *pool;
	struct kv_seq *seq;
	void *stream;
	size_t size;

	(void)arg;
	begin_cuda();
	pool = open_pool(own);
	size = BLOCK / (2 * 8 * 128 * 2);
	must(kv_seq_new(pool, &seq));
	must(kv_seq_reserve(seq, MINE * size, TIMEOUT));
	ck_assert_uint_eq(kv_seq_blocks(seq, &ids), MINE);
	memcpy(mine, ids, sizeof(mine));
	expect(!stream_new(&stream, 1), "no stream");
	expect(!host_call(stream, takes_its_time, NULL), "no call");
	for (int i = 0; i < MINE; i++)
		expect(!fill_later(at(pool, mine[i]), 0x41, BLOCK, stream), "no memset");
	kv_seq_free(seq, stream);
	for (int i = 0; i < MINE; i++)
		process_say(self, mine[i]);
	loop_for(own, pool, 150);
	process_say(self, 0);
	process_wait(self);
	may_end = 1;
	expect(!stream_sync(stream), "sync");
	process_say(self, 0);
	loop_for(own, pool, 300);
	process_wait(self);
	kv_pool_close(pool);
	kv_disconnect(own);
}

static void takes_all_there_is(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	static unsigned char have[BLOCK], want[BLOCK];
	struct kv_pool *pool;
	kv_block_id ids[N_BLOCKS];
	int n = 0;

	(void)arg;
	begin_cuda();
	pool = open_pool(own);
	while (n < N_BLOCKS && kv_blocks_take(pool, 1, ids + n, 200 * KV_MSEC) == 0)
		process_say(self, ids[n++]);
	for (int i = 0; i < n; i++)
		expect(!fill_now(at(pool, ids[i]), 0x42, BLOCK), "memset");
	expect(!cuda_sync(), "sync");
	process_say(self, -1);
	process_wait(self);
	for (; n < N_BLOCKS; n++) {
		must(kv_blocks_take(pool, 1, ids + n, TIMEOUT));
		process_say(self, ids[n]);
		expect(!fill_now(at(pool, ids[n]), 0x42, BLOCK), "memset");
	}
	expect(!cuda_sync(), "sync");
	sleep_ms(300);
	memset(want, 0x42, BLOCK);
	for (int i = 0; i < N_BLOCKS; i++) {
		expect(!copy_out(have, at(pool, ids[i]), BLOCK), "reading block %d", ids[i]);
		expect(!memcmp(have, want, BLOCK), "block %d was overwritten", ids[i]);
	}
	process_say(self, 0);
	must(kv_blocks_give(pool, N_BLOCKS, ids));
	kv_pool_close(pool);
	kv_disconnect(own);
}

static bool is_of(const int64_t *ids, int64_t id)
{
	for (int i = 0; i < MINE; i++) {
		if (ids[i] == id)
			return true;
	}
	return false;
}

START_TEST(d16_released_blocks_are_nobody_elses_while_a_launched_step_can_still_write_them)
{
	struct process *first, *second;
	int64_t mine[MINE], id;
	int n = 0;

	daemon_start("--gpus", "0", "--reserve", "1G", "--log-level", "error");
	client = client_new();
	first = process_start(launches_and_releases, NULL);
	for (int i = 0; i < MINE; i++)
		mine[i] = process_hear(first);
	second = process_start(takes_all_there_is, NULL);
	for (; (id = process_hear(second)) >= 0; n++)
		expect(!is_of(mine, id), "block %d may still be written", (int)id);
	ck_assert_int_le(n, N_BLOCKS - MINE);
	ck_assert_int_gt(n, 0);
	process_hear(first);
	if (_i) {
		process_kill(first);
		process_go(second);
	} else {
		process_go(first);
		process_hear(first);
		process_go(second);
	}
	/* All of them, each once: those that were written, too. */
	for (int found = 0; n < N_BLOCKS; n++) {
		found += is_of(mine, process_hear(second));
		ck_assert(n < N_BLOCKS - 1 || found == MINE);
	}
	ck_assert_int_eq(process_hear(second), 0);
	process_end(second);
	if (!_i) {
		process_go(first);
		process_end(first);
	}
	wait_until(daemon_stats(client).n_sessions == 0);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("gpu/pending");
	TCase *tcase = tcase_create("pending");

	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, d16_released_blocks_are_nobody_elses_while_a_launched_step_can_still_write_them,
			    0, 2);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	char path[PATH_MAX] = "";
	ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 40);
	char *slash = n > 0 ? strrchr(path, '/') : NULL;
	int status = 1;
	pid_t probe;

	/* A process that has asked the driver can't fork any more: another one asks. */
	if (!(probe = fork()))
		_exit(load() ? 0 : 77);
	if (probe < 0 || waitpid(probe, &status, 0) != probe || status) {
		fprintf(stderr, "skipped: no GPU\n");
		return 77;
	}
	if (slash) {
		strcpy(slash, "/../../daemon/kvcached");
		setenv("KVCACHED_BIN", path, 0);
	}
	return daemon_run_tests(suite());
}
