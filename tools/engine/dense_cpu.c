/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dense layers on the host. Weights stay as the file has them, in the mapped file: a thread widens
 * PANEL rows to floats in its own scratch, which stays in its cache, and multiplies all rows of x
 * by them. For one row of x that is one pass over the quantised bytes; for a prompt, widening is
 * paid once for all tokens.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/types.h>

#include "tools/engine/dense.h"
#include "tools/engine/error.h"
#include "tools/engine/rows.h"
#include "tools/engine/threads.h"

#define PANEL	   16
#define ROW_GROUP  8	 /* rows of an item where rows are independent */
#define MAX_WIDTH  65536 /* of a matrix row: bounds the scratch */
#define CACHE_LINE 64

struct kv_matrix {
	const struct kv_tensor *tensor;
};

struct dense_cpu {
	struct kv_dense dense; /* first: what callers hold */
	const struct kv_rows *rows;
	struct kv_threads *threads;
	float *scratch; /* [n threads][PANEL][widest] */
	size_t widest;	/* of all matrices, in elements */
};

static struct dense_cpu *from_dense(struct kv_dense *dense)
{
	return (struct dense_cpu *)dense;
}

static void cpu_close(struct kv_dense *dense)
{
	struct dense_cpu *cpu = from_dense(dense);

	kv_threads_free(cpu->threads);
	free(cpu->scratch);
	free(cpu);
}

static void *aligned_zeros(size_t bytes)
{
	size_t size = (bytes + CACHE_LINE - 1) & ~(size_t)(CACHE_LINE - 1);
	void *p = aligned_alloc(CACHE_LINE, size ? size : CACHE_LINE);

	if (!p) {
		kv_engine_error(-ENOMEM, "no memory for %zu bytes", bytes);
		return NULL;
	}
	return memset(p, 0, size);
}

static void *cpu_alloc(struct kv_dense *dense, size_t bytes)
{
	return aligned_zeros(bytes);
}

static void cpu_release(struct kv_dense *dense, void *p)
{
	free(p);
}

static const void *cpu_show(struct kv_dense *dense, void *room, const void *from, size_t bytes)
{
	return from;
}

static void cpu_download(struct kv_dense *dense, void *to, const void *from, size_t bytes)
{
	memcpy(to, from, bytes);
}

static int cpu_matrix_new(struct kv_dense *dense, const struct kv_tensor *tensor,
			  struct kv_matrix **ret)
{
	struct dense_cpu *cpu = from_dense(dense);
	struct kv_matrix *matrix;

	if (tensor->n_cols % KV_ROWS_MULTIPLE || tensor->n_cols > MAX_WIDTH)
		return kv_engine_error(-ENOTSUP,
				       "tensor %.*s has rows of %llu elements, a multiple of %d up "
				       "to %d is needed",
				       (int)tensor->name.len, tensor->name.at,
				       (unsigned long long)tensor->n_cols, KV_ROWS_MULTIPLE,
				       MAX_WIDTH);

	if (tensor->n_cols > cpu->widest) {
		size_t n = (size_t)kv_threads_n(cpu->threads) * PANEL * tensor->n_cols;
		float *scratch = aligned_zeros(n * sizeof(*scratch));

		if (!scratch)
			return -ENOMEM;
		free(cpu->scratch);
		cpu->scratch = scratch;
		cpu->widest = tensor->n_cols;
	}

	matrix = calloc(1, sizeof(*matrix));
	if (!matrix)
		return kv_engine_error(-ENOMEM, "no memory for a matrix");
	matrix->tensor = tensor;
	*ret = matrix;
	return 0;
}

static void cpu_matrix_free(struct kv_dense *dense, struct kv_matrix *matrix)
{
	free(matrix);
}

static const void *matrix_row(const struct kv_matrix *matrix, uint64_t i)
{
	return (const char *)matrix->tensor->data + i * matrix->tensor->row_bytes;
}

static void cpu_embed(struct kv_dense *dense, const struct kv_matrix *matrix, const int32_t *tokens,
		      size_t n, float *out)
{
	const struct kv_tensor *t = matrix->tensor;

	for (size_t i = 0; i < n; i++)
		from_dense(dense)->rows->widen(t->type, matrix_row(matrix, tokens[i]),
					       out + i * t->n_cols, t->n_cols);
}

static void cpu_pick(struct kv_dense *dense, const float *x, size_t width, const int32_t *rows,
		     size_t n, float *out)
{
	for (size_t i = 0; i < n; i++)
		memcpy(out + i * width, x + rows[i] * width, width * sizeof(*out));
}

/* A parallel loop over panels of the jobs, or over groups of rows */
struct loop {
	struct dense_cpu *cpu;
	const struct kv_matmul *jobs;
	const float *x;
	const float *weight;
	const float *angles;
	float *out;
	size_t n;
	size_t width;
	uint32_t n_heads;
	uint32_t n_rot;
	float eps;
};

static void run_rows(struct loop *loop, void (*run)(void *context, size_t item, unsigned thread))
{
	kv_threads_run(loop->cpu->threads, (loop->n + ROW_GROUP - 1) / ROW_GROUP, run, loop);
}

static size_t group_end(const struct loop *loop, size_t item)
{
	size_t end = (item + 1) * ROW_GROUP;

	return end < loop->n ? end : loop->n;
}

static void norm_group(void *context, size_t item, unsigned thread)
{
	const struct loop *l = context;

	for (size_t t = item * ROW_GROUP; t < group_end(l, item); t++)
		l->cpu->rows->rms_norm(l->x + t * l->width, l->weight, l->out + t * l->width,
				       l->width, l->eps);
}

static void cpu_rms_norm(struct kv_dense *dense, const float *x, const float *weight, size_t n,
			 size_t width, float eps, float *out)
{
	struct loop loop = {.cpu = from_dense(dense),
			    .x = x,
			    .weight = weight,
			    .n = n,
			    .width = width,
			    .eps = eps,
			    .out = out};

	run_rows(&loop, norm_group);
}

static size_t panels_of(const struct kv_matmul *job)
{
	return (job->w->tensor->n_rows + PANEL - 1) / PANEL;
}

static void multiply_panel(void *context, size_t item, unsigned thread)
{
	const struct loop *l = context;
	const struct kv_matmul *job = l->jobs;
	float *w = l->cpu->scratch + (size_t)thread * PANEL * l->cpu->widest;
	const struct kv_tensor *t;
	size_t first, n;

	while (item >= panels_of(job))
		item -= panels_of(job++);

	t = job->w->tensor;
	first = item * PANEL;
	n = t->n_rows - first < PANEL ? t->n_rows - first : PANEL;
	for (size_t i = 0; i < n; i++)
		l->cpu->rows->widen(t->type, matrix_row(job->w, first + i), w + i * t->n_cols,
				    t->n_cols);
	l->cpu->rows->multiply(w, n, l->x, t->n_cols, l->n, t->n_cols, job->out + first, t->n_rows,
			       job->add);
}

static void cpu_matmul(struct kv_dense *dense, const float *x, size_t n,
		       const struct kv_matmul *jobs, size_t n_jobs)
{
	struct loop loop = {.cpu = from_dense(dense), .x = x, .n = n, .jobs = jobs};
	size_t n_panels = 0;

	for (size_t i = 0; i < n_jobs; i++)
		n_panels += panels_of(&jobs[i]);
	kv_threads_run(loop.cpu->threads, n_panels, multiply_panel, &loop);
}

static void rope_group(void *context, size_t item, unsigned thread)
{
	const struct loop *l = context;

	for (size_t t = item * ROW_GROUP; t < group_end(l, item); t++) {
		const float *angles = l->angles + t * l->n_rot;

		for (uint32_t head = 0; head < l->n_heads; head++) {
			float *x = l->out + (t * l->n_heads + head) * l->width;

			for (uint32_t i = 0; i < l->n_rot; i += 2) {
				float cosine = angles[i], sine = angles[i + 1];
				float a = x[i], b = x[i + 1];

				x[i] = a * cosine - b * sine;
				x[i + 1] = a * sine + b * cosine;
			}
		}
	}
}

static void cpu_rope(struct kv_dense *dense, float *x, const float *angles, size_t n,
		     uint32_t n_heads, uint32_t head_dim, uint32_t n_rot)
{
	struct loop loop = {.cpu = from_dense(dense),
			    .out = x,
			    .angles = angles,
			    .n = n,
			    .n_heads = n_heads,
			    .width = head_dim,
			    .n_rot = n_rot};

	run_rows(&loop, rope_group);
}

static void silu_group(void *context, size_t item, unsigned thread)
{
	const struct loop *l = context;

	for (size_t t = item * ROW_GROUP; t < group_end(l, item); t++)
		l->cpu->rows->silu_multiply(l->out + t * l->width, l->x + t * l->width, l->width);
}

static void cpu_silu_multiply(struct kv_dense *dense, float *gate, const float *up, size_t n,
			      size_t width)
{
	struct loop loop = {.cpu = from_dense(dense), .out = gate, .x = up, .n = n, .width = width};

	run_rows(&loop, silu_group);
}

static void gelu_group(void *context, size_t item, unsigned thread)
{
	const struct loop *l = context;

	for (size_t t = item * ROW_GROUP; t < group_end(l, item); t++)
		l->cpu->rows->gelu_multiply(l->out + t * l->width, l->x + t * l->width, l->width);
}

static void cpu_gelu_multiply(struct kv_dense *dense, float *gate, const float *up, size_t n,
			      size_t width)
{
	struct loop loop = {.cpu = from_dense(dense), .out = gate, .x = up, .n = n, .width = width};

	run_rows(&loop, gelu_group);
}

static void cpu_add(struct kv_dense *dense, const float *x, size_t n, size_t width, float *out)
{
	for (size_t i = 0; i < n * width; i++)
		out[i] += x[i];
}

static void cpu_scale(struct kv_dense *dense, float *x, size_t n, size_t width, float factor)
{
	for (size_t i = 0; i < n * width; i++)
		x[i] *= factor;
}

static int cpu_finish(struct kv_dense *dense)
{
	return 0;
}

static const struct kv_dense_ops ops = {
	.close = cpu_close,
	.alloc = cpu_alloc,
	.release = cpu_release,
	.show = cpu_show,
	.download = cpu_download,
	.matrix_new = cpu_matrix_new,
	.matrix_free = cpu_matrix_free,
	.embed = cpu_embed,
	.pick = cpu_pick,
	.rms_norm = cpu_rms_norm,
	.matmul = cpu_matmul,
	.rope = cpu_rope,
	.silu_multiply = cpu_silu_multiply,
	.finish = cpu_finish,
	.gelu_multiply = cpu_gelu_multiply,
	.add = cpu_add,
	.scale = cpu_scale,
};

int kv_dense_cpu(unsigned n_threads, struct kv_dense **ret)
{
	struct dense_cpu *cpu = calloc(1, sizeof(*cpu));
	int r;

	if (!cpu)
		return kv_engine_error(-ENOMEM, "no memory for the dense layers");

	r = kv_threads_new(n_threads, &cpu->threads);
	if (r < 0) {
		free(cpu);
		return r;
	}
	cpu->dense = (struct kv_dense){.ops = &ops, .device = KV_DEVICE_HOST};
	cpu->rows = kv_rows_all()[0];
	*ret = &cpu->dense;
	return 0;
}
