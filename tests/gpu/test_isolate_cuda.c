/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvcached --isolate on a GPU, with real clients: what is mapped, what a kernel can reach, what becomes of
 * memory that a client had, and what it costs. All that uses CUDA runs in processes of its own.
 */
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/client.h"
#include "tests/support/process.h"

#define MIB	  ((uint64_t)1 << 20)
#define GRANULE	  (64 * MIB)
#define BLOCK	  ((uint64_t)1 << 20)
#define PER_GRANULE (GRANULE / BLOCK)
#define N_GRANULES  32u
#define MOST	    ((N_GRANULES - 4) * (uint32_t)PER_GRANULE)

/* The driver, by name: this program has no CUDA until a process of it needs that. */
static int (*cuda_memset)(void *p, int value, size_t n);
static int (*copy_out)(void *to, const void *from, size_t n);
static int (*cuda_sync)(void);
static int (*cuda_malloc)(void **p, size_t n);
static int (*cuda_info)(size_t *free_bytes, size_t *total);

static struct kv_client *client;
static kv_block_id ids[N_GRANULES * PER_GRANULE];

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

/* The driver's calls, in the primary context that the library has made current nowhere. */
static void begin_cuda(void)
{
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), *context;
	int (*init)(unsigned) = (int (*)(unsigned))dlsym(lib, "cuInit");
	int (*retain)(void **, int) = (int (*)(void **, int))dlsym(lib, "cuDevicePrimaryCtxRetain");
	int (*set)(void *) = (int (*)(void *))dlsym(lib, "cuCtxSetCurrent");

	expect(!init(0) && !retain(&context, 0) && !set(context), "no CUDA in this process");
	cuda_memset = (int (*)(void *, int, size_t))dlsym(lib, "cuMemsetD8_v2");
	cuda_sync = (int (*)(void))dlsym(lib, "cuCtxSynchronize");
	cuda_malloc = (int (*)(void **, size_t))dlsym(lib, "cuMemAlloc_v2");
	cuda_info = (int (*)(size_t *, size_t *))dlsym(lib, "cuMemGetInfo_v2");
	copy_out = (int (*)(void *, const void *, size_t))dlsym(lib, "cuMemcpyDtoH_v2");
}

static struct kv_pool *open_pool(struct kv_client *own, const char *name, int read_only)
{
	static const struct kv_component components[] = {{0, KV_ROLE_K, KV_BF16, 8, 128, 1},
							 {0, KV_ROLE_V, KV_BF16, 8, 128, 1}};
	static const struct kv_layout layout = {KV_LAYOUT_FLAT, 0, BLOCK / (2 * 8 * 128 * 2), 2, components};
	KV_OPTIONS(kv_pool_options, what, .name = name, .model = "small", .layout = &layout, .mapped = 1,
		   .read_only = read_only, .timeout = TIMEOUT);
	struct kv_pool_info info;
	struct kv_pool *pool;

	must(kv_pool_open(own, &what, &pool));
	kv_pool_info(pool, &info);
	ck_assert_uint_eq(info.block_bytes, BLOCK);
	return pool;
}

static char *at(struct kv_pool *pool, kv_block_id id)
{
	struct kv_view view;

	must(kv_pool_view(pool, 0, 0, &view));
	return (char *)view.base + (int64_t)id * view.block_stride;
}

static void fill(struct kv_pool *pool, const kv_block_id *list, uint32_t n, int byte)
{
	for (uint32_t i = 0; i < n; i++)
		expect(!cuda_memset(at(pool, list[i]), byte, BLOCK), "memset of block %d", list[i]);
	expect(!cuda_sync(), "sync");
}

static void all_are(struct kv_pool *pool, const kv_block_id *list, uint32_t n, int byte)
{
	static char have[BLOCK], want[BLOCK];

	memset(want, byte, BLOCK);
	for (uint32_t i = 0; i < n; i++) {
		expect(!copy_out(have, at(pool, list[i]), BLOCK), "reading block %d", list[i]);
		expect(!memcmp(have, want, BLOCK), "block %d isn't all %#x", list[i], byte & 0xff);
	}
}

static void setup(void)
{
	daemon_start("--gpus", "0", "--reserve", "2G", "--isolate", "--log-level", "error");
	client = client_new();
	ck_assert_uint_eq(gpu_stats(client).bytes_granule, GRANULE);
}

static void teardown(void)
{
	wait_until(daemon_stats(client).n_sessions == 0);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

static void has_had_it(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool;
	struct kv_pressure pressure;
	static char have[BLOCK];
	char *old;

	(void)arg;
	begin_cuda();
	pool = open_pool(own, "first", 0);
	must(kv_blocks_take(pool, MOST, ids, TIMEOUT));
	fill(pool, ids, MOST, 0x71);
	all_are(pool, ids, MOST, 0x71);
	old = at(pool, ids[MOST / 2]);
	must(kv_blocks_give(pool, MOST, ids));
	must(kv_ping(own, TIMEOUT));
	process_say(self, 0);
	process_wait(self);
	/* It has made no call: what it had is still there, and nothing of what others write. */
	expect(!copy_out(have, old, BLOCK), "its old mapping is gone");
	expect(!memchr(have, 0x72, BLOCK), "another pool's bytes can be read");
	kv_pool_pressure(pool, &pressure);
	expect(copy_out(have, old, BLOCK), "what it was to let go of is still mapped");
	process_say(self, 0);
	kv_pool_close(pool);
	kv_disconnect(own);
}

static void gets_other_memory(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool;
	int64_t start;

	(void)arg;
	begin_cuda();
	pool = open_pool(own, "second", 0);
	start = now_ns();
	must(kv_blocks_take(pool, MOST, ids, TIMEOUT));
	fprintf(stderr, "%u MiB, also of a pool whose client sleeps: %lld ms\n", MOST,
		(long long)((now_ns() - start) / KV_MSEC));
	all_are(pool, ids, MOST, 0);
	fill(pool, ids, MOST, 0x72);
	process_say(self, 0);
	process_wait(self);
	all_are(pool, ids, MOST, 0x72);
	must(kv_blocks_give(pool, MOST, ids));
	kv_pool_close(pool);
	kv_disconnect(own);
}

START_TEST(memory_that_a_client_had_goes_to_nobody_and_other_memory_takes_its_place)
{
	struct process *first = process_start(has_had_it, NULL), *second;

	process_hear(first);
	second = process_start(gets_other_memory, NULL);
	process_hear(second);
	process_go(first);
	process_hear(first);
	process_go(second);
	process_end(second);
	process_end(first);
	ck_assert_uint_ge(gpu_stats(client).renewed_bytes_total, 20 * GRANULE);
	wait_until(gpu_stats(client).bytes_held == 0);
}
END_TEST

static void fills_the_gpu(struct process *self, void *arg)
{
	size_t n, total;
	void *p;

	(void)arg;
	begin_cuda();
	expect(!cuda_info(&n, &total), "no memory info");
	for (n = n / GRANULE * GRANULE; n >= 2 * MIB; n = n > 2 * MIB ? n / 2 / (2 * MIB) * (2 * MIB) : 0)
		while (!cuda_malloc(&p, n))
			;
	process_say(self, 0);
	process_wait(self);
	_exit(0);
}

static void wants_more_than_there_is(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool;
	int r;

	(void)arg;
	begin_cuda();
	pool = open_pool(own, "second", 0);
	process_say(self, 0);
	process_wait(self);
	r = kv_blocks_take(pool, MOST, ids, 3 * KV_SEC);
	process_say(self, r);
	process_wait(self);
	must(kv_blocks_take(pool, MOST, ids, TIMEOUT));
	all_are(pool, ids, MOST, 0);
	must(kv_blocks_give(pool, MOST, ids));
	process_say(self, 0);
	kv_pool_close(pool);
	kv_disconnect(own);
}

START_TEST(what_a_process_keeps_is_missing_until_it_ends_where_a_gpu_is_full)
{
	struct process *first = process_start(has_had_it, NULL), *second, *full;

	process_hear(first);
	second = process_start(wants_more_than_there_is, NULL);
	process_hear(second);
	full = process_start(fills_the_gpu, NULL);
	process_hear(full);
	process_go(second);
	ck_assert_int_eq(process_hear(second), KV_NO_ROOM);
	ck_assert_uint_gt(gpu_stats(client).bytes_held, 0);
	books_balance(client);
	process_kill(first);
	wait_until(gpu_stats(client).bytes_held == 0);
	process_go(second);
	process_hear(second);
	process_end(second);
	process_go(full);
	process_end(full);
}
END_TEST

/* @arg: whether it writes through a read-only mapping, or where it has none. */
static void faults(struct process *self, void *arg)
{
	bool read_only = *(bool *)arg;
	struct kv_client *own = client_new();
	kv_block_id pair[2] = {-1, -1};
	struct kv_view view;
	struct kv_pool_info info;
	struct kv_pool *pool;
	int r;

	begin_cuda();
	pool = open_pool(own, "other", read_only);
	kv_pool_info(pool, &info);
	must(kv_pool_view(pool, 0, 0, &view));
	pair[0] = info.null_block;
	pair[1] = read_only ? info.null_block + 1 : info.id_limit - 1;
	{
		struct kv_copy_args copy = {.size = sizeof(copy),
					    .device = KV_DEVICE_CUDA,
					    .n_pairs = 1,
					    .pairs = pair,
					    .n_views = 1,
					    .views = &view};

		must(kv_copy_blocks(&copy)); /* a kernel, queued */
	}
	r = cuda_sync();
	fprintf(stderr, "a kernel that writes %s: CUDA error %d\n",
		read_only ? "through a read-only mapping" : "to what is another pool's", r);
	process_say(self, r);
	_exit(0);
}

START_TEST(a_kernel_that_writes_where_it_may_not_faults_and_nobody_else_notices)
{
	bool read_only = _i;
	struct process *holder, *other;

	holder = process_start(gets_other_memory, NULL);
	process_hear(holder);
	if (read_only) {
		/* The pool must exist. */
		bool writes = false;
		struct process *maker = process_start(faults, &writes);

		process_hear(maker);
		process_end(maker);
	}
	other = process_start(faults, &read_only);
	ck_assert_int_ne(process_hear(other), 0);
	process_end(other);
	must(kv_ping(client, TIMEOUT));
	process_go(holder);
	process_end(holder);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("gpu/isolate");
	TCase *tcase = tcase_create("isolate");
	char path[PATH_MAX] = "";
	pid_t probe;
	ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 40);
	char *slash = n > 0 ? strrchr(path, '/') : NULL;
	int status = 1;

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
	tcase_set_timeout(tcase, 120);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, memory_that_a_client_had_goes_to_nobody_and_other_memory_takes_its_place);
	tcase_add_test(tcase, what_a_process_keeps_is_missing_until_it_ends_where_a_gpu_is_full);
	tcase_add_loop_test(tcase, a_kernel_that_writes_where_it_may_not_faults_and_nobody_else_notices, 0,
			    2);
	suite_add_tcase(s, tcase);
	return daemon_run_tests(s);
}
