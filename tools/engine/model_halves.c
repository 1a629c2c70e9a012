/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weights of models whose RoPE turns elements i and i + n_rot / 2 of a head. Their rows are put into
 * the order in which those two are neighbours, as dense.h turns them: Q and K alike, so that no product of
 * the two changes.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tools/engine/error.h"
#include "tools/engine/model_parts.h"

int kv_model_turn_rows(const struct kv_model *model, const struct kv_tensor *from,
		       struct kv_turned *ret)
{
	uint32_t head_dim = model->shape.head_dim, n_rot = model->shape.n_rot;
	const char *data = from->data;
	size_t bytes = from->row_bytes;
	char *to = malloc(from->n_rows * bytes);

	if (!to)
		return kv_engine_error(-ENOMEM, "no memory for weights in another order");

	/* to[head][i] = data[head][of(i)] */
	for (uint64_t row = 0; row < from->n_rows; row++) {
		uint32_t i = row % head_dim, of = i < n_rot ? i / 2 + i % 2 * (n_rot / 2) : i;

		memcpy(to + row * bytes, data + (row - i + of) * bytes, bytes);
	}
	ret->tensor = *from;
	ret->tensor.data = ret->data = to;
	return 0;
}

int kv_model_turn_norm(const struct kv_model *model, const struct kv_tensor *from,
		       struct kv_turned *ret)
{
	struct kv_tensor column = *from;
	int r;

	/* Its elements as rows of one */
	column.row_bytes = kv_weight_row_bytes(from->type, 1);
	column.n_rows = from->n_cols;
	column.n_cols = 1;
	if (!column.row_bytes)
		return kv_engine_error(-ENOTSUP, "model: tensor %.*s is quantised, which norms aren't",
				       (int)from->name.len, from->name.at);
	r = kv_model_turn_rows(model, &column, ret);
	if (r < 0)
		return r;

	ret->tensor = *from;
	ret->tensor.data = ret->data;
	return 0;
}
