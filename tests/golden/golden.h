/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The golden runner: one function a kind of vector, from the vector's input to its output.
 *
 * A function returns 0 with *ret_out the whole output, or an enum kv_fault with *ret_out NULL or
 * the further fields of the error (its stage). Every field that a vector has must be equal.
 */
#ifndef KV_TESTS_GOLDEN_H
#define KV_TESTS_GOLDEN_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "alloc/compat.h"

/* Of a vector about something that this project leaves out: it counts as skipped, not as passed. */
#define GOLDEN_SKIP (-1)

typedef int golden_fn(const json_t *in, json_t **ret_out);

/* The public call says something else than the vector's engine (golden_own.h): no vector has such an error. */
#define GOLDEN_OWN_DIFFERS (-117)

struct golden_kind {
	const char *fn;
	golden_fn *run;
	const char *optional; /* a field of the output that a vector may leave null */
	/* What a vector asks for in its output only is added to @out. */
	void (*ask)(const json_t *expected, json_t *out);
};

extern const struct golden_kind golden_sizes[];
extern const struct golden_kind golden_v4[];
extern const struct golden_kind golden_pools[];
extern const struct golden_kind golden_slots[];
extern const struct golden_kind golden_traces[];
extern const struct golden_kind golden_vllm[];
extern const struct golden_kind golden_attention[];
extern const struct golden_kind golden_batch[];
extern const struct golden_kind golden_recurrent[];
extern const struct golden_kind golden_write[];
extern const struct golden_kind golden_keys[];

/* Zeroed memory that lives until the vector is done. */
void *golden_alloc(size_t n, size_t size);

int64_t in_int(const json_t *in, const char *key, int64_t otherwise);
double in_real(const json_t *in, const char *key, double otherwise);
bool in_bool(const json_t *in, const char *key, bool otherwise);
const char *in_text(const json_t *in, const char *key, const char *otherwise);
/* Missing or null: NULL and *ret_n 0. */
int64_t *in_ints(const json_t *in, const char *key, size_t *ret_n);
int32_t *in_ints32(const json_t *in, const char *key, size_t *ret_n);
int64_t *ints_of(const json_t *list, size_t *ret_n);
/* Rows of equal width: [n_rows][*ret_width]. */
int32_t *in_table(const json_t *in, const char *key, size_t *ret_rows, size_t *ret_width);
int32_t *table_of(const json_t *rows, size_t *ret_rows, size_t *ret_width);

void in_window(const json_t *in, const char *key, struct kv_compat_window *ret_window);
void group_of(const json_t *in, struct kv_compat_group *ret_group);

json_t *out_ints(const int64_t *values, size_t n);
json_t *out_ints32(const int32_t *values, size_t n);
json_t *out_group(const struct kv_compat_group *group);
/* Appends value to a run-length list [[value, n], ...]; takes the reference. */
void out_run(json_t *runs, json_t *value);

#endif
