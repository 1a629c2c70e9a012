/* SPDX-License-Identifier: Apache-2.0 */
/* The driver's description of tensors to the copy engine, found at run time: builds need no driver. */
#ifndef KV_KERNELS_DEVICE_TENSOR_MAP_CUH
#define KV_KERNELS_DEVICE_TENSOR_MAP_CUH

#include <cuda.h>
#include <dlfcn.h>

typedef CUresult kv_encode_tiled(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
				 const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
				 const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
				 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static inline kv_encode_tiled *kv_find_encode(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);

	return library ? (kv_encode_tiled *)dlsym(library, "cuTensorMapEncodeTiled") : NULL;
}

/* cuTensorMapEncodeTiled() of the driver that the runtime has loaded; NULL before 12.0. */
static inline kv_encode_tiled *kv_tensor_encode(void)
{
	static kv_encode_tiled *const found = kv_find_encode();

	return found;
}

#endif
