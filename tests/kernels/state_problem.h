/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A call on state rows: a batch over rows in the memory of the device under test, and what has to
 * stand in `out` and in every row afterwards, in double precision.
 *
 * The answer is not made token by token as the reference is: the recurrence is solved as one
 * triangular system a lane, with explicit powers of the decay. Rows that no lane reads are NaN.
 */
#ifndef KV_TESTS_KERNELS_STATE_PROBLEM_H
#define KV_TESTS_KERNELS_STATE_PROBLEM_H

#include "kernels/gdn.h"

#define LANES	512
#define COLUMNS 8 /* of a table, and of steps */

#define OUT_POISON 0x7e /* bytes of out that no call writes */

enum problem_kind {
	PROBLEM_DELTA = KV_RULE_DELTA,
	PROBLEM_SSD = KV_RULE_SSD,
	PROBLEM_CONV, /* the convolution alone */
};

struct state_spec {
	int kind;
	int seed;
	int n_lanes;
	int q_lens[LANES];
	int computed[LANES];
	int read[LANES];
	int write[LANES];
	int heads_k; /* CONV: channels */
	int group;
	int dim_k;
	int dim_v;
	int dtype;
	int state_dtype;
	int conv_width; /* 0: none */
	int conv_dtype;
	bool channel_major; /* rows of the convolution are [C][W - 1] */
	int activation;
	bool normalize;
	int gap;      /* elements between tokens, and bytes * 16 between rows */
	int n_rows;   /* of the pool */
	int null_row; /* -1: none */
	bool no_computed;
	bool no_write; /* in place by write_rows NULL */
	int interval;  /* > 0: with a table */
	int table[LANES][COLUMNS];
	int step_width; /* > 0: with steps */
	int steps[LANES][COLUMNS];
	bool accepts; /* n_accepted is given */
	int accepted[LANES];
	int spare_tokens;
	bool nan_inputs; /* of padding */
	bool workspace;
	double tolerance; /* of a GPU, whose chunks multiply in 16 bits; 0: by the types */
};

struct state_problem {
	struct state_spec spec;
	struct kv_gdn_args gdn; /* pointers are the device's; of the kind */
	struct kv_ssd_args ssd;
	struct kv_conv1d_args conv;
	int n_tokens;
	int heads;
	int channels;
	int64_t row_bytes;
	int64_t conv_row_bytes;
	int64_t in_stride; /* elements */
	int64_t out_width;
	int64_t out_stride;
	void *rows;	 /* device */
	void *conv_rows; /* device */
	void *out;	 /* device */
	void *arrays[16];
	int n_arrays;
	/* The host's copies of what the device has. */
	char *x; /* [T, in_stride] q|k|v, x|b|c or the channels */
	char *a;
	char *b;
	float *a_log;
	float *dt_bias;
	float *d;
	char *weight;
	char *bias;
	void *workspace;
};

/* GDN as Qwen3-Next has it, small: 2 key heads, 4 heads of 128, bf16, f32 states, width 4. */
struct state_spec state_spec_default(int kind);

/* Adds a lane of @q_len tokens after @computed ones; returns its number. */
int state_spec_add(struct state_spec *spec, int q_len, int computed, int read, int write);

struct state_problem *state_problem_new(const struct state_spec *spec);
struct state_problem *state_problem_free(struct state_problem *problem);

/* Gives row @row random content, or @value in all elements. */
void state_problem_fill(struct state_problem *problem, int row, uint64_t seed);
void state_problem_set(struct state_problem *problem, int row, double value);

/* Row @row's state and convolution, on the host: free() it. */
void *state_problem_row(struct state_problem *problem, int row);
int64_t state_problem_row_bytes(const struct state_problem *problem);

/* New inputs by a new seed. */
void state_problem_inputs(struct state_problem *problem, int seed);

/* Arrays of the batch as spec has them now: lanes and their tokens stay as many. */
void state_problem_batch(struct state_problem *problem);

int state_problem_call(struct state_problem *problem, const struct kv_state_backend *backend,
		       void *stream);
bool state_problem_can_run(struct state_problem *problem, const struct kv_state_backend *backend);

/* Runs @backend; out on the host: free() it. */
void *state_problem_run(struct state_problem *problem, const struct kv_state_backend *backend);

/* Runs @backend and holds out and every row against the answer. Returns out: free() it. */
void *state_problem_check(struct state_problem *problem, const struct kv_state_backend *backend);

/* Elements of a head's state; of a row's convolution, and where one of them lies in it. */
int64_t state_elements(const struct state_spec *spec);
int64_t conv_elements(const struct state_problem *problem);
int64_t conv_at(const struct state_problem *problem, int64_t tap, int64_t channel);

/* Backends of the device under test; ends with NULL. */
const struct kv_state_backend *const *state_problem_backends(void);

/* state_problem_check() by every backend that can run it, each on fresh rows; twice, to the same bits. */
void state_spec_check(const struct state_spec *spec);

/* The same for @n_rounds of drafts on the same rows, another number accepted in each. */
void state_spec_check_drafts(const struct state_spec *spec, int n_rounds);

#endif
