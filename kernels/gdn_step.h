/* SPDX-License-Identifier: Apache-2.0 */
/* Between the files of the step kernels, gdn_step*.cu, and the chunks, which leave short lanes to
 * them. */
#ifndef KV_KERNELS_GDN_STEP_H
#define KV_KERNELS_GDN_STEP_H

#include "kernels/gdn.h"

#define STEP_CONV	 4 /* width of a convolution in front */
#define STEP_ROWS	 4 /* sizes: 16, 32, 64 and 128 rows of S a thread block */
#define STEP_MAX_CLUSTER 8 /* what every GPU with clusters grants */

#ifndef STEP_W64
#define STEP_W64 4 /* warps of a thread block with 64 rows */
#endif
#ifndef STEP_MIN_BLOCKS
#define STEP_MIN_BLOCKS(warps, r) ((r) == 1 ? 5 : 16 / (warps))
#endif

enum step_kind {
	STEP_DELTA,
	STEP_DELTA_CONV,
	STEP_SSD,
	STEP_KINDS,
};

struct step_params {
	struct kv_recur a;
	int32_t group;	 /* heads of a key head */
	int32_t units;	 /* (head, rows) pairs of it */
	int32_t blocks;	 /* thread blocks that share them */
	int32_t min_len; /* lanes of fewer tokens, and of more, are others' */
	int32_t max_len;
	bool wide; /* channels lie side by side, aligned to four of them, in inputs and rows */
};

struct step_function {
	void (*kernel)(struct step_params); /* NULL: none */
	int32_t shared_bytes;
	int32_t threads;
};

struct step_table {
	struct step_function kernels[STEP_KINDS][3][STEP_ROWS]; /* dim_k 64, 128, 256 */
};

#ifdef __cplusplus
extern "C" {
#endif

/* Lanes of up to @max_len tokens; others are left alone. */
int kv_recur_step_lanes(const struct kv_recur *args, int max_len);

/*
 * gdn_stream.cu: many lanes of few tokens. kv_recur_stream_tokens() is how many tokens a lane may
 * have, @max_len at most, so that it takes them; 0: it takes none of these lanes.
 */
int kv_recur_stream_tokens(const struct kv_recur *args, int max_len);
int kv_recur_stream(const struct kv_recur *args, int max_len);

#ifdef __cplusplus
}
#endif
#endif
