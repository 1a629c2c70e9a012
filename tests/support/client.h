/* SPDX-License-Identifier: Apache-2.0 */
/* Short forms of what most tests of the library do; each fails the test where the call fails. */
#ifndef KV_TESTS_SUPPORT_CLIENT_H
#define KV_TESTS_SUPPORT_CLIENT_H

#include <kvcached/kvcached.h>

#include "tests/support/daemon.h"

#define TIMEOUT	     (DEADLINE_MS * KV_MSEC)
#define BLOCK_TOKENS 16
#define BLOCK_BYTES  2048 /* of the small layout: K and V of one head of 16 f32, 16 tokens */

/* must() - the call's text if it failed; also for an answer that is not wanted */
#define must(call)                                                   \
	do {                                                         \
		int result_ = (call);                                \
                                                                     \
		expect(result_ == 0, "%s: %d (%s)", #call, result_,  \
		       result_ < 0 ? kv_error_text() : "an answer"); \
	} while (0)

/* refused() - the call gives @error, and its text names @words */
#define refused(call, error, words)                                                            \
	do {                                                                                   \
		int result_ = (call);                                                          \
                                                                                               \
		expect(result_ == (error), "%s: %d (%s), expected %d", #call, result_,         \
		       result_ < 0 ? kv_error_text() : "", (error));                           \
		expect(strstr(kv_error_text(), words), "%s: '%s' says nothing of '%s'", #call, \
		       kv_error_text(), words);                                                \
	} while (0)

struct kv_client *client_new(void);

/* small_layout() - flat, BLOCK_BYTES a block; valid for ever */
const struct kv_layout *small_layout(void);

/**
 * pool_new() - open a pool of the small layout
 * @n_blocks: the most it may have, the null block not counted; 0: as many as there is memory for
 */
struct kv_pool *pool_new(struct kv_client *client, const char *name, uint32_t n_blocks);
struct kv_pool *pool_new_mapped(struct kv_client *client, const char *name, uint32_t n_blocks);

/* ---- sequences ---- */

/* tokens_of() - the first @n tokens of prompt @prompt, any number; valid until the next call */
const int32_t *tokens_of(int32_t prompt, size_t n);

/* seq_new() - @n tokens of a prompt: found as far as they are cached, the rest reserved, appended
 */
struct kv_seq *seq_new(struct kv_pool *pool, int32_t prompt, size_t n, size_t *ret_hit);

/* seq_published() - likewise, published, and the daemon has answered */
struct kv_seq *seq_published(struct kv_client *client, struct kv_pool *pool, int32_t prompt,
			     size_t n);

/* hit_of() - tokens that a prompt of @n tokens would find now; nothing stays held */
size_t hit_of(struct kv_pool *pool, int32_t prompt, size_t n);

/* ---- bytes of a mapped pool, in host memory ---- */

unsigned char *block_at(struct kv_pool *pool, kv_block_id id);
void block_fill(struct kv_pool *pool, kv_block_id id, int byte);
/* block_is() - is every byte of the block @byte? */
bool block_is(struct kv_pool *pool, kv_block_id id, int byte);

/* ---- what the daemon says ---- */

struct kv_pool_stats pool_stats(struct kv_client *client, const char *name);
struct kv_gpu_stats gpu_stats(struct kv_client *client);
struct kv_daemon_stats daemon_stats(struct kv_client *client);
/* session_stats() - of the first session of a process; false: it has none */
bool session_stats(struct kv_client *client, pid_t pid, struct kv_session_stats *ret);

/* session_is_gone() - it has no session; expect_gone_soon() - within 5 s of its death, which is now */
bool session_is_gone(struct kv_client *client, pid_t pid);
void expect_gone_soon(struct kv_client *client, pid_t pid);

/* numbers_add_up() - the counts of all pools and devices */
void numbers_add_up(struct kv_client *client);

/* cut_connections() - shuts every connection of this process to the daemon, behind the library's back */
void cut_connections(void);

/* books_balance() - and kv_check() finds nothing */
void books_balance(struct kv_client *client);

#endif
