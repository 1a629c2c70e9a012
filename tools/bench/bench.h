/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench: what its benchmarks share. A benchmark is a function `int kv_bench_x(bench)` in a file
 * of its own and a row in the table of main.c. It returns the exit status.
 *
 * Numbers mean something beside others of the same run, so a benchmark measures its subject and its
 * yardsticks in turns, several rounds, and reports the median of each.
 */
#ifndef KV_TOOLS_BENCH_BENCH_H
#define KV_TOOLS_BENCH_BENCH_H

#include <kvcached/kvcached.h>

#include "tools/emit.h"
#include "tools/progress.h"

#define KV_BENCH_TIMEOUT (30 * KV_SEC)

enum kv_bench_exit {
	KV_BENCH_DONE = 0,
	KV_BENCH_FAILED = 1,
	KV_BENCH_USAGE = 2,
	KV_BENCH_NO_DAEMON = 3,
};

#define KV_BENCH_LIST 32

struct kv_bench_list {
	uint32_t n, v[KV_BENCH_LIST];
};

struct kv_bench_shape {
	uint32_t heads_q, heads_kv, dim;
};

struct kv_bench_point {
	uint32_t batch, query, context;
};

/* Sizes of attention, write and merge: the product of lists; empty, 0, NULL: as the benchmark chooses. */
struct kv_bench_kernel {
	struct kv_bench_shape shapes[KV_BENCH_LIST];
	struct kv_bench_point points[KV_BENCH_LIST]; /* in place of batch, query, context */
	uint32_t n_shapes, n_points;
	struct kv_bench_list batch, query, context, page, dtype, layout;
	uint32_t window;     /* keys that a query sees, its own one among them */
	uint32_t pool_gib;   /* the blocks lie all over so much memory */
	uint32_t layers;     /* of that pool, which calls go over in turns */
	double softcap;
	bool invariant;
	const char *ragged;  /* "random", or a file of lengths, or a trace */
	const char *peers;   /* file of times of others */
	const char *backend;
};

struct kv_bench {
	struct kv_emit emit;
	struct kv_progress *progress;
	const char *socket; /* --socket; else that of the daemon which kv_bench_serve() started */
	const char *file;   /* replay: the trace */
	uint32_t engines;
	uint32_t capacity; /* blocks */
	const char *capacities; /* replay: "1000,5000", several of them; NULL: the one */
	struct kv_bench_kernel kernel;
};

/* A pool of a benchmark: blocks without real content, as small as the daemon's memory allows. */
struct kv_bench_pool {
	const char *name;
	uint32_t block_tokens;
	uint32_t n_blocks; /* exactly */
	bool mapped;
};

int64_t kv_bench_now(void);			  /* CLOCK_MONOTONIC, ns */
double kv_bench_median(double *values, size_t n); /* sorts them */

/* kv_bench_progress() - on a terminal: so far it is; wiped away at @done == @total, and by errors' words */
void kv_bench_progress(const struct kv_bench *b, uint64_t done, uint64_t total, const char *what);

/* kv_bench_refuse() - words (or JSON) to stderr. Return: @status. */
int kv_bench_refuse(const struct kv_bench *b, enum kv_bench_exit status, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

/* kv_bench_broken() - that @what ended with @r: an error of the library, or an answer */
int kv_bench_broken(const struct kv_bench *b, const char *what, int r);

/**
 * kv_bench_serve() - make sure that there is a daemon
 * @host_bytes: memory of the private one, which is started where --socket wasn't given
 *
 * Ended by kv_bench_end(), or by a signal that ends kvbench. Return: exit status.
 */
int kv_bench_serve(struct kv_bench *b, uint64_t host_bytes);
void kv_bench_end(struct kv_bench *b);

/* kv_bench_connect() - Return: exit status. */
int kv_bench_connect(const struct kv_bench *b, struct kv_client **ret);

/* kv_bench_open() - open a pool, which the first one makes. Return: exit status. */
int kv_bench_open(const struct kv_bench *b, struct kv_client *client,
		  const struct kv_bench_pool *what, struct kv_pool **ret);

/* kv_bench_pool_name() - one that no other kvbench uses now */
void kv_bench_pool_name(char ret[KV_NAME_MAX], const char *benchmark);

/**
 * kv_bench_count_syscalls() - of a child process, counted by tracing it
 * @work: runs in the child, and calls kv_bench_mark() before and after what is to be counted;
 *        0 if all went well
 *
 * Return: system calls between the marks; -EPERM where tracing isn't allowed; -ECHILD if @work
 * failed; other errors of fork() and ptrace().
 */
int64_t kv_bench_count_syscalls(int (*work)(void *arg), void *arg);
void kv_bench_mark(void);

int kv_bench_lease(struct kv_bench *b);
int kv_bench_attach(struct kv_bench *b);
int kv_bench_prefix(struct kv_bench *b);
int kv_bench_replay(struct kv_bench *b);
int kv_bench_attention(struct kv_bench *b);
int kv_bench_write(struct kv_bench *b);
int kv_bench_merge(struct kv_bench *b);

/* kv_bench_kernel_option() - an option of attention, write and merge. Return: exit status. */
int kv_bench_kernel_option(struct kv_bench *b, const char *option, const char *text);
int kv_bench_elastic(struct kv_bench *b);
int kv_bench_compact(struct kv_bench *b);
int kv_bench_colocate(struct kv_bench *b);
int kv_bench_crowd(struct kv_bench *b);
int kv_bench_gdn(struct kv_bench *b);
int kv_bench_mla(struct kv_bench *b);
int kv_bench_dsa(struct kv_bench *b);
int kv_bench_mamba(struct kv_bench *b);
int kv_bench_conv(struct kv_bench *b);
int kv_bench_metadata(struct kv_bench *b);

#endif
