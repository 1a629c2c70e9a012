/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model of three groups: full attention, a window, a state. It is small and exact: what it says
 * after a token depends on all that its groups keep, through tables and rows alone.
 */
#ifndef KV_TESTS_CLIENT_HYBRID_H
#define KV_TESTS_CLIENT_HYBRID_H

#include "tests/support/client.h"

#define SIZE	 4 /* tokens of a block */
#define WINDOW	 6
#define INTERVAL 8
#define FULL_G	 0
#define WINDOW_G 1
#define STATE_G	 2
#define N_DRAFTS 3

struct model {
	struct kv_client *client;
	struct kv_pool *pools[3];
	struct kv_groups *groups;
	struct kv_view views[3];
};

extern const char *const model_names[3]; /* of its pools */
extern uint32_t model_row_floats; /* of a token, of a state: 64, unless it is set before pools are opened */

/* open_pool() - a pool of f32 rows of 64, mapped; @n_blocks 0: as many as there is memory for */
struct kv_pool *open_pool(struct kv_client *client, const char *name, uint32_t block_tokens,
			  uint32_t n_blocks);
void model_open(struct model *model, uint32_t n_blocks, uint32_t n_rows, uint32_t n_drafts);
void model_close(struct model *model);

/* expected_output() - what it says after @n tokens, by definition */
uint64_t expected_output(const int32_t *tokens, size_t n);

/* model_run() - a step over the last @n tokens. Return: what it says after the last of them. */
uint64_t model_run(const struct model *model, struct kv_gseq *seq, const int32_t *tokens, size_t n);

/* model_copy() - what reservations have noted: before a step that writes */
void model_copy(const struct model *model, struct kv_gseq *seq);

#endif
