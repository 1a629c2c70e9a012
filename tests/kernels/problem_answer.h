/* SPDX-License-Identifier: Apache-2.0 */
/* Between problem.c, which makes the arrays, and problem_answer.c, which says what is right. */
#ifndef KV_TESTS_KERNELS_PROBLEM_ANSWER_H
#define KV_TESTS_KERNELS_PROBLEM_ANSWER_H

#include <stdbool.h>

#include "tests/kernels/problem.h"

/* A sequence's part of the answer: values that are stored, and where its queries begin. */
struct problem_sequence {
	int b;
	int len;
	int q_len;
	int first_row;
	double *q; /* [q_len, n_heads_q, dk] */
	double *k; /* [len, n_heads_kv, dk] */
	double *v; /* [len, n_heads_kv, dv] */
};

/* Fills the rows of out and lse of @seq. */
void problem_answer(struct problem *p, const struct problem_sequence *seq);

/* The tree of new tokens of sequence @b: the parent of token @i, -1 for a root; whether @i descends
 * from @k (or is it); how many ancestors it has. */
int problem_parent(const struct problem_spec *spec, int b, int i);
bool problem_tree_sees(const struct problem_spec *spec, int b, int i, int k);
int problem_depth(const struct problem_spec *spec, int b, int i);

void problem_doc_range(const struct problem_spec *spec, int b, int i, int32_t range[2]);
bool problem_is_local(const struct problem_spec *spec, int64_t j);
double problem_slope(const struct problem_spec *spec, int64_t h);
double problem_sink(int64_t h);

#endif
