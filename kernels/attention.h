/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backends: who does the work of include/kvcached/attention.h.
 *
 * A call goes: check.c (every field, defaults filled in) -> attention.c (first backend of the
 * device that can run it, or the one KVCACHED_BACKEND names) -> the backend. A backend is a row of
 * kv_attn_backends[], in backends_cuda.c or its twin for builds without CUDA, backends_host.c.
 *
 * Arguments that reach a backend are resolved: in range, n_seqs, n_tokens and n_pairs > 0, strides,
 * sm_scale, out_dtype, cp_size and cp_interleave filled in; on the host also lengths and tables.
 * Fields whose feature is not in its table are unused: 0 or NULL.
 */
#ifndef KV_KERNELS_ATTENTION_H
#define KV_KERNELS_ATTENTION_H

#include <kvcached/backend.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Reasons collected so far; @text, of @room bytes, receives their sentences, if it is not NULL. */
struct kv_refusals {
	uint64_t bits;
	char *text;
	size_t room;
};

/* kv_refuse() - one more: enum kv_attention_reason, and what was given and what would do */
void kv_refuse(struct kv_refusals *refusals, int reason, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

struct kv_attn_backend {
	const char *name;
	int device; /* enum kv_device */
	struct kv_attention_caps caps;

	/* Reasons that are not in the table's reach: alignment, workspace, the device. NULL: none. */
	void (*refuse)(const struct kv_attention_args *args, struct kv_refusals *refusals);

	/* Bytes of args->workspace that it needs; NULL: none. */
	size_t (*workspace_bytes)(const struct kv_attention_args *args);

	/* Return: 0, -ENOMEM, -EIO. */
	int (*attention)(const struct kv_attention_args *args);
	int (*write)(const struct kv_write_args *args);
	int (*copy)(const struct kv_copy_args *args);
};

/* Features of a backend that leaves none out but those of another kind of attention. */
#define KV_ATTN_EVERYTHING                                                                      \
	(KV_ATTN_BIT(BIDIRECTIONAL) | KV_ATTN_BIT(SINKS) | KV_ATTN_BIT(HEAD_SCALES) |           \
	 KV_ATTN_BIT(WINDOW) | KV_ATTN_BIT(NON_CAUSAL) | KV_ATTN_BIT(INVARIANT) |               \
	 KV_ATTN_BIT(CONNECTOR) | KV_ATTN_BIT(DEVICE_LENGTHS) | KV_ATTN_BIT(SOFTCAP) |          \
	 KV_ATTN_BIT(ALIBI) | KV_ATTN_BIT(TREE) | KV_ATTN_BIT(SEQ_CAUSAL) |                     \
	 KV_ATTN_BIT(WINDOW_PREFIX) | KV_ATTN_BIT(WINDOW_RIGHT) | KV_ATTN_BIT(ROW_SCALES) |     \
	 KV_ATTN_BIT(DECODE_CP) | KV_ATTN_BIT(KEY_RANGE) | KV_ATTN_BIT(LSE) |                   \
	 KV_ATTN_BIT(LSE_WITH_SINK) | KV_ATTN_BIT(STRIDES) | KV_ATTN_BIT(OUT_DTYPE))

#define KV_ATTN_ALL_TYPES \
	(1u << KV_F32 | 1u << KV_F16 | 1u << KV_BF16 | 1u << KV_F8_E4M3 | 1u << KV_F8_E5M2)

extern const struct kv_attn_backend kv_attn_ref;   /* host: plain loops, the definition of right */
extern const struct kv_attn_backend kv_attn_cpu;   /* host: vectors and threads */
extern const struct kv_attn_backend kv_attn_cuda;  /* any head size up to 256 */
extern const struct kv_attn_backend kv_attn_split; /* few queries, long contexts: decode */
extern const struct kv_attn_backend kv_attn_wgmma; /* many queries, on sm_90 */

extern const struct kv_attn_backend kv_attn_mla;     /* latents of 512 + 64, on sm_90 */
extern const struct kv_attn_backend kv_attn_mla_any; /* latents of any size and format */

extern const struct kv_attn_backend *const kv_attn_backends[]; /* most preferred first, NULL last */

/* kv_attn_find() - the backend called @name on @device, or NULL */
const struct kv_attn_backend *kv_attn_find(const char *name, int device);

/* As the public calls, on one backend. */
int kv_attention_on(const struct kv_attn_backend *backend, const struct kv_attention_args *args);
int kv_write_on(const struct kv_attn_backend *backend, const struct kv_write_args *args);
int kv_copy_blocks_on(const struct kv_attn_backend *backend, const struct kv_copy_args *args);

/* Every reason why @backend can't run @args, which are resolved. */
void kv_attn_refuse(const struct kv_attn_backend *backend, const struct kv_attention_args *args,
		    struct kv_refusals *refusals);

/* capability.c: a query against a table; the query of resolved arguments. */
void kv_attention_refuse(const struct kv_attention_caps *caps,
			 const struct kv_attention_query *query, struct kv_refusals *refusals);
void kv_attention_describe(const struct kv_attention_args *args, struct kv_attention_query *ret);

/*
 * check.c, check_attention.c: every field of @args, then a copy with defaults filled in.
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
void kv_attention_cuda_refuse(const struct kv_attention_args *args, struct kv_refusals *refusals);
int kv_attention_cuda(const struct kv_attention_args *args);
void kv_attention_split_refuse(const struct kv_attention_args *args, struct kv_refusals *refusals);
size_t kv_attention_split_workspace(const struct kv_attention_args *args);
int kv_attention_split(const struct kv_attention_args *args);
void kv_attention_prefill_refuse(const struct kv_attention_args *args,
				 struct kv_refusals *refusals);
size_t kv_attention_prefill_workspace(const struct kv_attention_args *args);
int kv_attention_prefill(const struct kv_attention_args *args);
void kv_mla_wgmma_refuse(const struct kv_attention_args *args, struct kv_refusals *refusals);
size_t kv_mla_wgmma_workspace(const struct kv_attention_args *args);
int kv_mla_wgmma(const struct kv_attention_args *args);
void kv_mla_any_refuse(const struct kv_attention_args *args, struct kv_refusals *refusals);
size_t kv_mla_any_workspace(const struct kv_attention_args *args);
int kv_mla_any(const struct kv_attention_args *args);
int kv_write_cuda(const struct kv_write_args *args);
int kv_copy_cuda(const struct kv_copy_args *args);

#ifdef __cplusplus
}
#endif
#endif
