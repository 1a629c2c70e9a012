/* SPDX-License-Identifier: Apache-2.0 */
/* Builds without CUDA; merge.cu, metadata.cu, mla_write.cu, read.cu and write_rope.cu are the others of the pair. */
#include <errno.h>

#include "include/internal/error.h"
#include "kernels/cascade.h"
#include "kernels/merge.h"
#include "kernels/metadata.h"
#include "kernels/mla.h"
#include "kernels/read.h"
#include "kernels/write_rope.h"

int kv_merge_cuda(const struct kv_merge_args *args)
{
	return kv_error(-ENOTSUP, "device: this build has no CUDA");
}

int kv_cascade_prepare_cuda(const struct kv_attention_args *args, int32_t *offsets)
{
	return kv_error(-ENOTSUP, "device: this build has no CUDA");
}

int kv_metadata_cuda(const struct kv_metadata_args *args)
{
	return kv_error(-ENOTSUP, "device: this build has no CUDA");
}

int kv_mla_write_cuda(const struct kv_mla_write_args *args)
{
	return kv_error(-ENOTSUP, "device: this build has no CUDA");
}

int kv_mla_read_cuda(const struct kv_mla_read_args *args)
{
	return kv_error(-ENOTSUP, "device: this build has no CUDA");
}

int kv_read_cuda(const struct kv_read_args *args)
{
	return kv_error(-ENOTSUP, "device: this build has no CUDA");
}

int kv_write_rope_cuda(const struct kv_rope_args *args)
{
	return kv_error(-ENOTSUP, "device: this build has no CUDA");
}
