/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <math.h>

#include "include/internal/error.h"
#include "include/internal/public.h"
#include "kernels/attention.h"
#include "kernels/check.h"
#include "kernels/write_rope.h"

static int run(const struct kv_rope_args *args)
{
	if (args->write.k.head_dim > KV_ROPE_MAX_DIM || args->write.v.head_dim > KV_ROPE_MAX_DIM)
		return kv_error(-ENOTSUP, "k.head_dim, v.head_dim: %d, %d given, up to %d are done",
				args->write.k.head_dim, args->write.v.head_dim, KV_ROPE_MAX_DIM);
	return args->write.device == KV_DEVICE_CUDA ? kv_write_rope_cuda(args)
						     : kv_write_rope_host(args);
}

int kv_write_scaled(const struct kv_write_args *args)
{
	struct kv_rope_args a = {.size = sizeof(a), .write = *args};

	return run(&a);
}

static int check_pointers(const struct kv_rope_args *a)
{
	size_t element = kv_dtype_bytes(a->write.dtype);
	const struct {
		const char *name;
		const void *p;
		size_t align;
		bool wanted;
	} pointers[] = {
		{"q", a->q, element, a->n_heads_q > 0},
		{"positions", a->positions, 8, a->rot > 0},
		{"cos_sin", a->cos_sin, 4, a->rot > 0},
		{"q_norm", a->q_norm, element, a->q_norm != NULL},
		{"k_norm", a->k_norm, element, a->k_norm != NULL},
	};

	for (size_t i = 0; i < sizeof(pointers) / sizeof(pointers[0]); i++) {
		int r = pointers[i].wanted ? kv_check_pointer(pointers[i].name, pointers[i].p,
							      pointers[i].align)
					   : 0;

		if (r < 0)
			return r;
	}
	return 0;
}

KV_PUBLIC int kv_write_rope(const struct kv_rope_args *args)
{
	struct kv_rope_args a;
	int64_t dense;
	int r;

	r = kv_check_size("kv_rope_args", args->size, sizeof(*args));
	if (r < 0)
		return r;
	a = *args;
	r = kv_write_resolve(&args->write, &a.write);
	if (r < 0)
		return r;
	r = kv_check_range("n_heads_q", a.n_heads_q, 0, KV_MAX_HEADS);
	if (r < 0)
		return r;
	r = kv_check_range("pairs", a.pairs, 0, 1);
	if (r < 0)
		return r;
	if (a.rot < 0 || a.rot % 2 || a.rot > a.write.k.head_dim)
		return kv_error(-EINVAL, "rot: %d given, an even number up to k.head_dim (%d) expected",
				a.rot, a.write.k.head_dim);
	r = kv_check_range("n_positions", a.n_positions, a.rot ? 1 : 0, INT32_MAX);
	if (r < 0)
		return r;
	if ((a.q_norm || a.k_norm) && !(a.eps >= 0 && isfinite(a.eps)))
		return kv_error(-EINVAL, "eps: %g given, a finite number of 0 or more expected",
				(double)a.eps);
	dense = (int64_t)a.n_heads_q * a.write.k.head_dim;
	if (a.q_stride && a.q_stride < dense)
		return kv_error(-EINVAL, "q_stride: %lld elements given, 0 (dense) or at least %lld "
				"allowed", (long long)a.q_stride, (long long)dense);
	a.q_stride = a.q_stride ?: dense;
	if (!a.write.n_tokens)
		return 0;
	r = check_pointers(&a);
	return r < 0 ? r : run(&a);
}
