/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tools/bench/bench.h"

/* More ids than this make the shared pages of a pool large, whatever its capacity. */
#define MAX_IDS ((uint64_t)1 << 22)

int64_t kv_bench_now(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * KV_SEC + now.tv_nsec;
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

double kv_bench_median(double *values, size_t n)
{
	qsort(values, n, sizeof(*values), compare);
	return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

int kv_bench_refuse(const struct kv_bench *b, enum kv_bench_exit status, const char *format, ...)
{
	struct kv_emit words;
	char text[512];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	kv_progress_end(b->progress);
	kv_emit_init(&words, stderr, b->emit.json);
	words.one_line = true;
	kv_emit_open(&words, NULL, '{');
	kv_emit_text(&words, "error", text);
	kv_emit_number(&words, "exit", status);
	kv_emit_close(&words);
	kv_emit_line(&words, "kvbench: %s", text);
	kv_emit_end(&words);
	return status;
}

int kv_bench_broken(const struct kv_bench *b, const char *what, int r)
{
	if (r == KV_NO_ROOM || r == KV_TOO_LARGE)
		return kv_bench_refuse(b, KV_BENCH_FAILED, "%s: no room in the pool", what);
	return kv_bench_refuse(b, r == -ECONNRESET ? KV_BENCH_NO_DAEMON : KV_BENCH_FAILED, "%s: %s",
			       what, r == -ENOMEM ? strerror(ENOMEM) : kv_error_text());
}

void kv_bench_progress(const struct kv_bench *b, uint64_t done, uint64_t total, const char *what)
{
	if (done < total)
		kv_progress_show(b->progress, done, total, what);
	else
		kv_progress_end(b->progress);
}

int kv_bench_connect(const struct kv_bench *b, struct kv_client **ret)
{
	KV_OPTIONS(kv_connect_options, how, .socket = b->socket, .name = "kvbench",
		   .timeout = KV_BENCH_TIMEOUT);
	int r = kv_connect(&how, ret);

	if (r == -ENOENT || r == -ECONNREFUSED)
		return kv_bench_refuse(b, KV_BENCH_NO_DAEMON, "%s", kv_error_text());
	return r < 0 ? kv_bench_broken(b, "connect", r) : KV_BENCH_DONE;
}

void kv_bench_pool_name(char ret[KV_NAME_MAX], const char *benchmark)
{
	snprintf(ret, KV_NAME_MAX, "kvbench-%s-%d", benchmark, (int)getpid());
}

/* Bytes of a token: a power of two, so that blocks fill extents without a rest. */
static uint32_t token_bytes(uint64_t arena_bytes, uint32_t block_tokens)
{
	uint32_t bytes = 1;

	while ((uint64_t)bytes * block_tokens < KV_BLOCK_ALIGN ||
	       arena_bytes / ((uint64_t)bytes * block_tokens) > MAX_IDS)
		bytes *= 2;
	return bytes;
}

int kv_bench_open(const struct kv_bench *b, struct kv_client *client,
		  const struct kv_bench_pool *what, struct kv_pool **ret)
{
	struct kv_component component = {
		.role = KV_ROLE_K, .dtype = KV_F8_E4M3, .n_heads = 1, .scale = 1};
	struct kv_layout layout = {.kind = KV_LAYOUT_FLAT,
				   .block_tokens = what->block_tokens,
				   .n_components = 1,
				   .components = &component};
	KV_OPTIONS(kv_pool_options, options, .name = what->name, .model = "kvbench",
		   .layout = &layout, .mapped = what->mapped, .timeout = KV_BENCH_TIMEOUT);
	const struct kv_gpu *gpus;
	struct kv_pool_info info;
	int r;

	if (kv_client_gpus(client, &gpus) < 1)
		return kv_bench_refuse(b, KV_BENCH_FAILED, "the daemon owns no memory");
	component.head_dim = token_bytes(gpus[0].arena_bytes, what->block_tokens);
	options.max_bytes =
		((uint64_t)what->n_blocks + 1) * what->block_tokens * component.head_dim;
	if (options.max_bytes > gpus[0].arena_bytes)
		return kv_bench_refuse(
			b, KV_BENCH_FAILED,
			"%u blocks of %u tokens need %llu bytes; the daemon has %llu",
			what->n_blocks, what->block_tokens, (unsigned long long)options.max_bytes,
			(unsigned long long)gpus[0].arena_bytes);
	r = kv_pool_open(client, &options, ret);
	if (r < 0)
		return kv_bench_broken(b, "opening a pool", r);
	kv_pool_info(*ret, &info);
	if (info.max_blocks != what->n_blocks) {
		kv_pool_close(*ret);
		return kv_bench_refuse(b, KV_BENCH_FAILED, "pool '%s' has %llu blocks, not %u",
				       what->name, (unsigned long long)info.max_blocks,
				       what->n_blocks);
	}
	return KV_BENCH_DONE;
}
