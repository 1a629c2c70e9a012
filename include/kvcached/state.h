/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Work on state rows: causal convolution, gated delta net (Qwen3-Next, Qwen3.5), Mamba-2 (SSD).
 *
 * A state row holds what a recurrent layer knows of the tokens so far, in constant size. Rows are
 * blocks of a pool (a pool of rows, or the constant part of a flat block): a row's address is
 * base + row * stride, so the same calls serve both. As in attention.h, each operation takes a
 * struct of pointers, sizes and strides; on KV_DEVICE_CUDA all pointers are device pointers, work
 * is queued on `stream`, nothing is allocated or awaited and a call can be captured in a graph: the
 * launch depends on sizes alone, and rows, lengths and counts are read from device memory at each
 * replay. On KV_DEVICE_HOST the work is finished on return.
 *
 * One call serves decode (a token a lane), speculative verification (a few), chunked prefill, and
 * batches of all of them.
 *
 * Mathematics (kernels/gdn_ref.c, mamba_ref.c and conv_ref.c are the definition of right)
 *   convolution, channel c, W taps:  y_t = bias_c + sum_j weight[c][j] x[t - W + 1 + j][c]; then
 *      silu(y) = y / (1 + e^-y), rounded once. Its state: the last W - 1 inputs, oldest first.
 *   delta net, head h, state S [dim_v][dim_k], key head h / (n_heads_v / n_heads_k):
 *      g = -e^(A_log) softplus(a + dt_bias);  beta = 1 / (1 + e^-b)
 *      q^ = q / sqrt(q.q + 1e-6) * scale;     k^ = k / sqrt(k.k + 1e-6)
 *      S = e^g S;  S = S + beta (v - S k^) k^T;  out = S q^
 *   Mamba-2, head h, state S [head_dim][state_dim], group h / (n_heads / n_groups):
 *      dt = clamp(softplus(dt + dt_bias));    S = e^(-e^(A_log) dt) S + dt x B^T;  out = S C + D x
 *   softplus(x) = ln(1 + e^x), and x above 20. Sums and states are at least f32 inside; a state is
 *   rounded to the type of its row when it is stored, and not in between.
 * Sources: gated delta net arXiv:2412.06464; its chunked form arXiv:2406.06484; SSD
 * arXiv:2405.21060.
 *
 * Threads: every function may be called from any thread at any time.
 */
#ifndef KVCACHED_STATE_H
#define KVCACHED_STATE_H

#include <kvcached/layout.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KV_STATE_RUNNING  1 /* kv_state_column(): the row changes with the next token */
#define KV_MAX_CONV_WIDTH 8
#define KV_MAX_STATE_DIM  256 /* dim_k and dim_v, head_dim and state_dim */

/*
 * Which tokens belong to which lane, and which rows a lane reads and writes. All arrays are of the
 * device.
 *
 * Rows are read and written by index, apart ("dual-index paging"): a lane may continue from the row
 * of a shared checkpoint and store to its own, so nothing is copied when a prefix is hit.
 *
 * A row is null if it is negative or `null_row`: it is never read nor written, NaN in it included.
 *
 * The lane's first state is
 *   zero, whatever lies in the row, if n_computed[b] is 0: its first chunk; else the state in
 *   step_rows[b][n_accepted[b] - 1], if both are given;
 *   read_rows[b], if given; else table[b][(n_computed[b] - 1) / interval].
 * Its states go to
 *   write_rows[b], else table[b][(end - 1) / interval], else (no table, no step_rows) read_rows[b]:
 *   the state after its last token, with end = n_computed[b] + its tokens;
 *   table[b][n / interval - 1], if there is a table: that after each token n of the sequence that
 *   is a multiple of `interval`: the checkpoints;
 *   step_rows[b][i], if given: that after its token i, for i < step_width. What a verification
 *   didn't accept is rolled back by naming an earlier one in n_accepted of the next call.
 *
 * A lane is padding if its first state is in a null row, or its first chunk goes nowhere (no row
 * but null ones for the last state and those of steps). The same goes for columns outside the table
 * and counts outside 1..step_width, which on the host are errors (-EINVAL). Padding stores no
 * state; its rows of `out` are 0 whatever its inputs are. A lane without tokens does nothing.
 *
 * Rows written by one lane must be read or written by no other lane of the call (-EINVAL on the
 * host); several may read one row.
 */
struct kv_state_batch {
	int32_t n_seqs;	  /* B: lanes */
	int32_t n_tokens; /* T: rows of the inputs and of out; those in no lane stay untouched */
	int32_t max_query_len; /* at least the tokens of the longest lane */
	int32_t null_row;      /* null_block of the pool; -1: only negative rows are null */
	const int32_t *query_start_loc; /* [B + 1]; NULL: one token a lane, T == B */
	const int32_t *n_computed;	/* [B] tokens before this call; NULL: no lane is new */
	const int32_t *read_rows;	/* [B], or NULL */
	const int32_t *write_rows;	/* [B], or NULL */
	const int32_t *table;		/* [B, table_width] rows by interval, or NULL */
	int32_t table_width; /* more than (end - 1) / interval of each lane, also where write_rows has its last state */
	int32_t interval;	   /* tokens from checkpoint to checkpoint; with a table */
	const int32_t *step_rows;  /* [B, step_width], or NULL */
	const int32_t *n_accepted; /* [B] 1..step_width, with step_rows; NULL: read_rows are read */
	int32_t step_width;
	int32_t reserved;
};

/*
 * The inputs that a convolution keeps: element (row, tap, channel) at
 * base + row * row_stride + tap * tap_stride + channel * channel_stride, in bytes, tap 0 the
 * oldest. [W - 1][C] (channel_stride one element) is the faster order; [C][W - 1] takes the same
 * bytes.
 */
struct kv_conv_rows {
	void *base;
	int64_t row_stride;
	int64_t tap_stride;
	int64_t channel_stride;
	int32_t dtype; /* f32, f16 or bf16 */
	int32_t reserved;
};

enum kv_activation {
	KV_ACTIVATION_NONE = 0,
	KV_ACTIVATION_SILU = 1,
};

struct kv_conv1d_args {
	size_t size;
	int32_t device; /* enum kv_device */
	int32_t dtype;	/* of x, weight, bias and out: f32, f16, bf16 */
	struct kv_state_batch batch;
	int32_t n_channels; /* C */
	int32_t width;	    /* W: 2..KV_MAX_CONV_WIDTH */
	int32_t activation; /* enum kv_activation */
	const void *x;	    /* [T, C] */
	int64_t x_stride;   /* elements from token to token; 0: dense */
	const void *weight; /* [C, W]; the last meets the newest input */
	const void *bias;   /* [C], or NULL */
	void *out;	    /* [T, C]; apart from x */
	int64_t out_stride;
	struct kv_conv_rows state;
	void *stream;
};

/**
 * kv_conv1d() - causal convolution of each channel over its lane's tokens, with history in rows
 *
 * Return: 0; -EINVAL if a field is out of range; -ENOTSUP if no backend can do it; -EIO on a CUDA
 * error. kv_error_text() names the field.
 */
int kv_conv1d(const struct kv_conv1d_args *args);

struct kv_gdn_args {
	size_t size;
	int32_t device; /* enum kv_device */
	int32_t dtype;	/* of q, k, v, a, b, out and the convolution's weights */
	struct kv_state_batch batch;
	int32_t n_heads_k;
	int32_t n_heads_v; /* a multiple of n_heads_k */
	int32_t dim_k;
	int32_t dim_v;
	const void *q;	  /* [T, n_heads_k, dim_k] */
	const void *k;	  /* [T, n_heads_k, dim_k] */
	const void *v;	  /* [T, n_heads_v, dim_v] */
	const void *a;	  /* [T, n_heads_v] */
	const void *b;	  /* [T, n_heads_v] */
	int64_t q_stride; /* elements from token to token; 0: dense. So of all five */
	int64_t k_stride;
	int64_t v_stride;
	int64_t a_stride;
	int64_t b_stride;
	const float *a_log;   /* [n_heads_v] */
	const float *dt_bias; /* [n_heads_v], or NULL */
	float scale;	      /* of q; 0: 1 / sqrt(dim_k) */
	int32_t normalize;    /* 1: q and k are normalised here; 0: they come so */
	void *out;	      /* [T, n_heads_v, dim_v]; apart from the inputs */
	int64_t out_stride;
	struct kv_view state; /* n_heads_v heads of dim_v * dim_k, dim_k innermost; f32 or bf16;
				 a row is a block, its tokens are not looked at */

	/*
	 * The convolution in front, in the same launch. Then q is the tensor of its inputs,
	 * [T, C] with the channels q | k | v (C = 2 n_heads_k dim_k + n_heads_v dim_v), at
	 * q_stride; k, v and their strides are not looked at. What it puts out is rounded to
	 * `dtype`, as by two calls. Its state lies in rows of the same numbers.
	 */
	const void *conv_weight; /* [C, conv_width]; NULL: q, k and v come convolved */
	const void *conv_bias;	 /* [C], or NULL */
	int32_t conv_width;
	int32_t conv_activation; /* enum kv_activation */
	struct kv_conv_rows conv;

	size_t workspace_bytes;
	void *workspace; /* see kv_gdn_workspace_bytes(); NULL: token by token */
	void *stream;
};

/**
 * kv_gdn() - gated delta net over the tokens of each lane
 *
 * Lanes of few tokens are done in steps, which read and write each state once. Longer ones are,
 * given a workspace and bf16, done in chunks of 64 tokens on the tensor cores, with states in f32
 * and products of bf16: within 1e-2 of the steps. Chunks are cut at multiples of 64 of the sequence
 * and of `interval`, so that a prompt cut there into calls has the same bits as one call.
 *
 * Return: as kv_conv1d().
 */
int kv_gdn(const struct kv_gdn_args *args);

/**
 * kv_gdn_workspace_bytes() - the workspace with which the fastest backend can run @args
 *
 * Goes by sizes, types and strides; pointers are not followed. It grows with n_tokens and n_seqs.
 * Its content is of no meaning between calls; calls that may run at the same time need one each.
 *
 * Return: as kv_conv1d().
 */
int kv_gdn_workspace_bytes(const struct kv_gdn_args *args, size_t *ret_bytes);

struct kv_ssd_args {
	size_t size;
	int32_t device; /* enum kv_device */
	int32_t dtype;	/* of x, b, c, dt, out */
	struct kv_state_batch batch;
	int32_t n_groups;
	int32_t n_heads; /* a multiple of n_groups */
	int32_t head_dim;
	int32_t state_dim;
	const void *x;	  /* [T, n_heads, head_dim] */
	const void *b;	  /* [T, n_groups, state_dim] */
	const void *c;	  /* [T, n_groups, state_dim] */
	const void *dt;	  /* [T, n_heads] */
	int64_t x_stride; /* elements from token to token; 0: dense. So of all four */
	int64_t b_stride;
	int64_t c_stride;
	int64_t dt_stride;
	const float *a_log;   /* [n_heads] */
	const float *dt_bias; /* [n_heads], or NULL */
	const float *d;	      /* [n_heads], or NULL: nothing is added */
	float dt_min;	      /* bounds of dt after softplus; 0, 0: none */
	float dt_max;
	void *out; /* [T, n_heads, head_dim]; apart from the inputs */
	int64_t out_stride;
	struct kv_view state; /* n_heads heads of head_dim * state_dim, state_dim innermost */
	size_t workspace_bytes;
	void *workspace; /* see kv_ssd_workspace_bytes(); NULL: token by token */
	void *stream;
};

/**
 * kv_ssd() - Mamba-2's selective state space over the tokens of each lane
 *
 * x, b and c come convolved (kv_conv1d() over x | B | C, whose state lies in rows of the same
 * numbers). Otherwise as kv_gdn().
 */
int kv_ssd(const struct kv_ssd_args *args);

/* kv_ssd_workspace_bytes() - as kv_gdn_workspace_bytes() */
int kv_ssd_workspace_bytes(const struct kv_ssd_args *args, size_t *ret_bytes);

/**
 * kv_state_column() - the column of a table in which the state after @n_tokens is
 * @interval: tokens from checkpoint to checkpoint: the unit of this table, not of attention's
 * @width:    columns of the table
 *
 * Return: 0: the state is a checkpoint, there to be continued from; KV_STATE_RUNNING: a state
 * inside an interval, which the next token changes (its column is given, nothing can be rolled back
 * to it); -EINVAL if @n_tokens is 0 or less (an empty sequence has no state) or @interval below 1;
 * -ERANGE if the column lies outside the table.
 */
int kv_state_column(int64_t n_tokens, int64_t interval, int64_t width, int64_t *ret_column);

/* What a backend cannot do about a call; bits. */
enum kv_state_reason {
	KV_STATE_REASON_DTYPE = 1 << 0,	       /* type of the inputs */
	KV_STATE_REASON_DIM_K = 1 << 1,	       /* dim_k, state_dim */
	KV_STATE_REASON_DIM_V = 1 << 2,	       /* dim_v, head_dim */
	KV_STATE_REASON_GROUP = 1 << 3,	       /* heads that share a key head */
	KV_STATE_REASON_SHORT = 1 << 4,	       /* no lane is long enough */
	KV_STATE_REASON_STEPS = 1 << 5,	       /* step_rows: states between tokens */
	KV_STATE_REASON_ALIGNMENT = 1 << 6,    /* of states, inputs or out */
	KV_STATE_REASON_WORKSPACE = 1 << 7,    /* too small */
	KV_STATE_REASON_N_SEQS = 1 << 8,       /* too many lanes for one launch */
	KV_STATE_REASON_CONV_WIDTH = 1 << 9,   /* of a convolution in front */
	KV_STATE_REASON_CONV_DTYPE = 1 << 10,  /* of its rows */
	KV_STATE_REASON_CONV_WEIGHT = 1 << 11, /* where its weights lie */
	KV_STATE_REASON_CAPABILITY = 1 << 12,  /* of the device at hand */
};

/**
 * kv_gdn_validate() - whether @backend can run @args, and every reason why not
 * @backend: one of kv_state_backend_names() for args->device
 * @text:    receives a sentence for each reason, joined by "; ", cut to @text_bytes; or NULL
 *
 * On KV_DEVICE_HOST rows and lengths are looked at; on a GPU no pointer is followed. Return: 0: it
 * can; -ENOTSUP: @ret_reasons (if not NULL) has the bits of all reasons, @text says them; -EINVAL:
 * fields are wrong, @text says them; -ENOENT: no such backend.
 */
int kv_gdn_validate(const char *backend, const struct kv_gdn_args *args, uint64_t *ret_reasons,
		    char *text, size_t text_bytes);

/* kv_ssd_validate(), kv_conv1d_validate() - likewise */
int kv_ssd_validate(const char *backend, const struct kv_ssd_args *args, uint64_t *ret_reasons,
		    char *text, size_t text_bytes);
int kv_conv1d_validate(const char *backend, const struct kv_conv1d_args *args,
		       uint64_t *ret_reasons, char *text, size_t text_bytes);

/**
 * kv_state_backend_names() - the backends of this build for @device, most preferred first
 *
 * KVCACHED_STATE_BACKEND=name in the environment picks one for a whole run.
 * Return: a static list that ends with NULL.
 */
const char *const *kv_state_backend_names(enum kv_device device);

#ifdef __cplusplus
}
#endif
#endif
