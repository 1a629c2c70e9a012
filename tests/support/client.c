/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "tests/support/client.h"

#define MAX_TOKENS (1 << 18)

struct kv_client *client_new(void)
{
	KV_OPTIONS(kv_connect_options, how, .socket = daemon_socket(), .name = "test",
		   .timeout = TIMEOUT);
	struct kv_client *client;

	must(kv_connect(&how, &client));
	return client;
}

const struct kv_layout *small_layout(void)
{
	static const struct kv_component components[] = {{0, KV_ROLE_K, KV_F32, 1, 16, 1},
							 {0, KV_ROLE_V, KV_F32, 1, 16, 1}};
	static const struct kv_layout layout = {KV_LAYOUT_FLAT, 0, BLOCK_TOKENS, 2, components};

	return &layout;
}

static struct kv_pool *open_small(struct kv_client *client, const char *name, uint32_t n_blocks,
				  int mapped)
{
	KV_OPTIONS(kv_pool_options, what, .name = name, .model = "small", .layout = small_layout(),
		   .max_bytes = n_blocks ? (n_blocks + 1) * (uint64_t)BLOCK_BYTES : 0,
		   .mapped = mapped, .timeout = TIMEOUT);
	struct kv_pool *pool;

	must(kv_pool_open(client, &what, &pool));
	return pool;
}

struct kv_pool *pool_new(struct kv_client *client, const char *name, uint32_t n_blocks)
{
	return open_small(client, name, n_blocks, 0);
}

struct kv_pool *pool_new_mapped(struct kv_client *client, const char *name, uint32_t n_blocks)
{
	return open_small(client, name, n_blocks, 1);
}

const int32_t *tokens_of(int32_t prompt, size_t n)
{
	static int32_t tokens[MAX_TOKENS];

	expect(n <= MAX_TOKENS, "%zu tokens, at most %d", n, MAX_TOKENS);
	for (size_t i = 0; i < n; i++)
		tokens[i] = (int32_t)(((uint32_t)prompt * 100003 + (uint32_t)i * 7) & INT32_MAX);
	return tokens;
}

struct kv_seq *seq_new(struct kv_pool *pool, int32_t prompt, size_t n, size_t *ret_hit)
{
	const int32_t *tokens = tokens_of(prompt, n);
	struct kv_seq *seq;
	size_t hit = 0;

	must(kv_seq_new(pool, &seq));
	must(kv_seq_lookup(seq, tokens, n, &hit));
	must(kv_seq_reserve(seq, n, TIMEOUT));
	must(kv_seq_append(seq, tokens + hit, n - hit));
	if (ret_hit)
		*ret_hit = hit;
	return seq;
}

struct kv_seq *seq_published(struct kv_client *client, struct kv_pool *pool, int32_t prompt,
			     size_t n)
{
	struct kv_seq *seq = seq_new(pool, prompt, n, NULL);

	must(kv_seq_publish(seq, NULL));
	must(kv_ping(client, TIMEOUT));
	return seq;
}

size_t hit_of(struct kv_pool *pool, int32_t prompt, size_t n)
{
	struct kv_seq *seq;
	size_t hit;

	must(kv_seq_new(pool, &seq));
	must(kv_seq_lookup(seq, tokens_of(prompt, n), n, &hit));
	kv_seq_free(seq, NULL);
	return hit;
}

unsigned char *block_at(struct kv_pool *pool, kv_block_id id)
{
	struct kv_view view;

	must(kv_pool_view(pool, 0, 0, &view));
	return (unsigned char *)view.base + (int64_t)id * view.block_stride;
}

static size_t block_bytes(struct kv_pool *pool)
{
	struct kv_pool_info info;

	kv_pool_info(pool, &info);
	return info.block_bytes;
}

void block_fill(struct kv_pool *pool, kv_block_id id, int byte)
{
	memset(block_at(pool, id), byte, block_bytes(pool));
}

bool block_is(struct kv_pool *pool, kv_block_id id, int byte)
{
	const unsigned char *at = block_at(pool, id);
	size_t n = block_bytes(pool), i = 0;

	while (i < n && at[i] == byte)
		i++;
	return i == n;
}

static void *stats(struct kv_client *client, enum kv_stat_kind kind, size_t *ret_n)
{
	void *items;

	must(kv_stats(client, kind, &items, ret_n, TIMEOUT));
	return items;
}

struct kv_pool_stats pool_stats(struct kv_client *client, const char *name)
{
	struct kv_pool_stats found = {0};
	size_t n;
	struct kv_pool_stats *all = stats(client, KV_STAT_POOL, &n);

	for (size_t i = 0; i < n; i++) {
		if (!strcmp(all[i].name, name))
			found = all[i];
	}
	free(all);
	expect(found.id, "there is no pool '%s'", name);
	return found;
}

struct kv_gpu_stats gpu_stats(struct kv_client *client)
{
	size_t n;
	struct kv_gpu_stats *all = stats(client, KV_STAT_GPU, &n), first = all[0];

	free(all);
	return first;
}

struct kv_daemon_stats daemon_stats(struct kv_client *client)
{
	size_t n;
	struct kv_daemon_stats *one = stats(client, KV_STAT_DAEMON, &n), copy = *one;

	free(one);
	return copy;
}

bool session_stats(struct kv_client *client, pid_t pid, struct kv_session_stats *ret)
{
	size_t n;
	struct kv_session_stats *all = stats(client, KV_STAT_SESSION, &n);
	bool found = false;

	for (size_t i = 0; i < n && !found; i++) {
		found = all[i].pid == (uint64_t)pid;
		if (found)
			*ret = all[i];
	}
	free(all);
	return found;
}

bool session_is_gone(struct kv_client *client, pid_t pid)
{
	struct kv_session_stats s;

	return !session_stats(client, pid, &s);
}

void expect_gone_soon(struct kv_client *client, pid_t pid)
{
	int64_t start = now_ns();

	wait_until(session_is_gone(client, pid));
	ck_assert_int_lt(now_ns() - start, 5 * KV_SEC);
}

void numbers_add_up(struct kv_client *client)
{
	struct kv_pool_stats *pools;
	struct kv_gpu_stats *gpus;
	size_t n;

	pools = stats(client, KV_STAT_POOL, &n);
	for (size_t i = 0; i < n; i++) {
		const struct kv_pool_stats *s = &pools[i];

		expect(s->blocks_free + s->blocks_leased + s->blocks_cached +
				       s->blocks_quarantined + s->blocks_moving ==
			       s->blocks_total,
		       "pool '%s': %llu free, %llu leased, %llu cached, %llu quarantined of %llu",
		       s->name, (unsigned long long)s->blocks_free,
		       (unsigned long long)s->blocks_leased, (unsigned long long)s->blocks_cached,
		       (unsigned long long)s->blocks_quarantined,
		       (unsigned long long)s->blocks_total);
		expect(s->blocks_cached_held <= s->blocks_cached,
		       "pool '%s': more held than cached", s->name);
	}
	free(pools);
	gpus = stats(client, KV_STAT_GPU, &n);
	for (size_t i = 0; i < n; i++)
		expect(gpus[i].bytes_free + gpus[i].bytes_scrubbing + gpus[i].bytes_pools ==
			       gpus[i].bytes_arena,
		       "device %zu: its bytes don't add up", i);
	free(gpus);
}

void books_balance(struct kv_client *client)
{
	struct kv_check_result result;

	must(kv_check(client, &result, TIMEOUT));
	expect(!result.n_errors, "%llu errors in the books, the first: %s",
	       (unsigned long long)result.n_errors, result.first_error);
	numbers_add_up(client);
}

void cut_connections(void)
{
	for (int fd = 3; fd < 200; fd++) {
		struct sockaddr_un address = {0};
		socklen_t size = sizeof(address);

		if (!getpeername(fd, (struct sockaddr *)&address, &size) &&
		    !strcmp(address.sun_path, daemon_socket()))
			shutdown(fd, SHUT_RDWR);
	}
}
