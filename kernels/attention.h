/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backends: who does the work of include/kvcached/attention.h.
 *
 * A call goes: check.c (every field, defaults filled in) -> attention.c (first backend of the
 * device that can run it, or the one KVCACHED_BACKEND names) -> the backend. A backend is a row of
 * kv_attn_backends[], in backends_cuda.c or its twin for builds without CUDA, backends_host.c.
 *
 * Arguments that reach a backend are resolved: in range, n_seqs, n_tokens and n_pairs > 0,
 * strides and sm_scale filled in; on the host also lengths and tables.
 */
#ifndef KV_KERNELS_ATTENTION_H
#define KV_KERNELS_ATTENTION_H

#include <kvcached/attention.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kv_attn_backend {
	const char *name;
	int device; /* enum kv_device */

	/* Return: 0, or -ENOTSUP with the reason in kv_error_text(). NULL: runs everything. */
	int (*can_run)(const struct kv_attention_args *args);

	/* Bytes of args->workspace that it needs; NULL: none. */
	size_t (*workspace_bytes)(const struct kv_attention_args *args);

	/* Return: 0, -ENOMEM, -EIO. */
	int (*attention)(const struct kv_attention_args *args);
	int (*write)(const struct kv_write_args *args);
	int (*copy)(const struct kv_copy_args *args);
};

extern const struct kv_attn_backend kv_attn_ref;   /* host: plain loops, the definition of right */
extern const struct kv_attn_backend kv_attn_cpu;   /* host: vectors and threads */
extern const struct kv_attn_backend kv_attn_cuda;  /* any head size up to 256 */
extern const struct kv_attn_backend kv_attn_split; /* few queries, long contexts: decode */

extern const struct kv_attn_backend *const kv_attn_backends[]; /* most preferred first, NULL last */

/* kv_attn_find() - the backend called @name on @device, or NULL */
const struct kv_attn_backend *kv_attn_find(const char *name, int device);

/* As the public calls, on one backend. */
int kv_attention_on(const struct kv_attn_backend *backend, const struct kv_attention_args *args);
int kv_write_on(const struct kv_attn_backend *backend, const struct kv_write_args *args);
int kv_copy_blocks_on(const struct kv_attn_backend *backend, const struct kv_copy_args *args);

/*
 * check.c: every field of @args, then a copy with defaults filled in.
 * Return: 0; -EINVAL, the text names the field.
 * kv_attention_resolve_sizes() looks at no pointer but those of the views.
 */
int kv_attention_resolve_sizes(const struct kv_attention_args *args, struct kv_attention_args *ret);
int kv_attention_resolve(const struct kv_attention_args *args, struct kv_attention_args *ret);
int kv_write_resolve(const struct kv_write_args *args, struct kv_write_args *ret);
int kv_copy_check(const struct kv_copy_args *args);

/* Parts that more than one row of the table uses. */
int kv_write_ref(const struct kv_write_args *args);
int kv_copy_ref(const struct kv_copy_args *args);

/* Launchers, in .cu files; their row stands in backends_cuda.c. */
int kv_attention_cuda_can_run(const struct kv_attention_args *args);
int kv_attention_cuda(const struct kv_attention_args *args);
int kv_attention_split_can_run(const struct kv_attention_args *args);
size_t kv_attention_split_workspace(const struct kv_attention_args *args);
int kv_attention_split(const struct kv_attention_args *args);
int kv_write_cuda(const struct kv_write_args *args);
int kv_copy_cuda(const struct kv_copy_args *args);

#ifdef __cplusplus
}
#endif
#endif
