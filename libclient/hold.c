/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Holds: counted references to an arena's mapping or a batch's arrays, and DLPack tensors made of
 * them. A tensor's deleter is here, in a library that is never unloaded (-z nodelete), and touches
 * nothing of a language's runtime: it may run when that is gone.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "include/kvcached/tensor.h"
#include "libclient/internal.h"

struct kv_hold {
	atomic_uint refs;
	uint32_t fork_generation;
	struct kv_memory *memory; /* an arena, or */
	int device;		  /* pinned memory of this kind */
	void *pinned;
};

int kv_hold_pinned(int device, void *pinned, struct kv_hold **ret)
{
	struct kv_hold *hold = calloc(1, sizeof(*hold));

	if (!hold)
		return kv_error(-ENOMEM, "no memory");
	atomic_init(&hold->refs, 1);
	hold->fork_generation = kv_fork_generation;
	hold->device = device;
	hold->pinned = pinned;
	*ret = hold;
	return 0;
}

struct kv_hold *kv_hold_ref(struct kv_hold *hold)
{
	atomic_fetch_add_explicit(&hold->refs, 1, memory_order_relaxed);
	return hold;
}

static int check_mapped(const struct kv_pool *pool, uint32_t gpu)
{
	int r = kv_forked(pool->fork_generation);

	if (r < 0)
		return r;
	if (gpu >= KV_MAX_GPUS)
		return kv_error(-EINVAL, "gpu: %u given, at most %d devices", gpu, KV_MAX_GPUS);
	if (!pool->memory[gpu])
		return kv_error(-ENXIO, "gpu: this pool is not mapped on device %u here (mask %#x)", gpu,
				pool->mapped_mask);
	return 0;
}

KV_PUBLIC int kv_pool_hold(const struct kv_pool *pool, uint32_t gpu, struct kv_hold **ret)
{
	int r = check_mapped(pool, gpu);

	if (!r)
		r = kv_hold_pinned(KV_DEVICE_HOST, NULL, ret);
	if (!r)
		(*ret)->memory = kv_memory_ref(pool->memory[gpu]);
	return r;
}

KV_PUBLIC struct kv_hold *kv_hold_free(struct kv_hold *hold)
{
	/* The others' writes to the memory come before its end: acquire and release. */
	if (!hold || atomic_fetch_sub_explicit(&hold->refs, 1, memory_order_acq_rel) > 1)
		return NULL;
	kv_memory_detach(hold->memory);
	if (!kv_forked(hold->fork_generation))
		kv_pinned_free(hold->device, hold->pinned);
	free(hold);
	return NULL;
}

KV_PUBLIC int kv_pool_ordinal(const struct kv_pool *pool, uint32_t gpu)
{
	int r = check_mapped(pool, gpu);

	return r < 0 ? r : kv_memory_ordinal(pool->memory[gpu]);
}

/* DLPack's structs, as its specification lays them out. */
struct dl_tensor {
	void *data;
	int32_t device_type, device_id;
	int32_t n_dims;
	uint8_t type_code, type_bits;
	uint16_t type_lanes;
	int64_t *shape, *strides; /* strides in elements */
	uint64_t byte_offset;
};

struct dl_managed {
	struct dl_tensor tensor;
	void *context;
	void (*deleter)(struct dl_managed *self);
};

struct tensor {
	struct dl_managed managed; /* the first member: the receiver has its address */
	int64_t shape[4], strides[4];
	struct kv_hold *hold;
};

enum { DL_CPU = 1, DL_CUDA = 2, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_F8_E4M3FN = 10 };

static void tensor_free(struct dl_managed *managed)
{
	struct tensor *t = (struct tensor *)managed;

	kv_hold_free(t->hold);
	free(t);
}

static uint8_t type_code(int dtype)
{
	switch (dtype) {
	case KV_BF16:
		return DL_BFLOAT;
	case KV_F8_E4M3:
		return DL_F8_E4M3FN;
	case KV_BYTES:
		return DL_UINT;
	default:
		return DL_FLOAT;
	}
}

KV_PUBLIC int kv_pool_dlpack(const struct kv_pool *pool, uint32_t gpu, uint32_t component, void **ret)
{
	struct kv_view view;
	struct tensor *t;
	int64_t size;
	int r = kv_pool_view(pool, gpu, component, &view), n = 0;

	if (r < 0)
		return r;
	t = calloc(1, sizeof(*t));
	if (!t)
		return kv_error(-ENOMEM, "no memory");
	r = kv_pool_hold(pool, gpu, &t->hold);
	if (r < 0) {
		free(t);
		return r;
	}
	size = (int64_t)kv_dtype_bytes(view.dtype);
	t->shape[n] = pool->head.id_limit;
	t->strides[n++] = view.block_stride / size;
	if (pool->layout.components[component].role != KV_ROLE_STATE) {
		t->shape[n] = view.block_tokens;
		t->strides[n++] = view.token_stride / size;
	}
	t->shape[n] = view.n_heads;
	t->strides[n++] = view.head_stride / size;
	t->shape[n] = view.head_dim;
	t->strides[n++] = 1;
	t->managed.tensor = (struct dl_tensor){
		.data = view.base,
		.device_type = kv_memory_device(pool->memory[gpu]) == KV_DEVICE_CUDA ? DL_CUDA : DL_CPU,
		.device_id = kv_memory_ordinal(pool->memory[gpu]),
		.n_dims = n,
		.type_code = type_code(view.dtype),
		.type_bits = (uint8_t)(8 * size),
		.type_lanes = 1,
		.shape = t->shape,
		.strides = t->strides,
	};
	t->managed.deleter = tensor_free;
	*ret = t;
	return 0;
}
