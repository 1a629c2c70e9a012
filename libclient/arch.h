/* SPDX-License-Identifier: Apache-2.0 */
/* Reading models: what arch.c and the readers of each form share. See <kvcached/arch.h>. */
#ifndef KV_LIBCLIENT_ARCH_H
#define KV_LIBCLIENT_ARCH_H

#include <jansson.h>
#include <stdbool.h>

#include <kvcached/arch.h>

/* A model with @n_layers zeroed layers that own what they keep. */
int kv_arch_new(uint32_t n_layers, const char *what, struct kv_arch **ret_model);

/* @r, with @what in front of an error's text if it isn't there. */
int kv_arch_named(int r, const char *what);

/* A field of @object; errors name it. Missing or null: @otherwise, or -EINVAL if @otherwise < 0. */
int kv_json_u32(const json_t *object, const char *key, int64_t otherwise, uint32_t *ret);
/* The first of two names that is there. */
int kv_json_u32_of(const json_t *object, const char *key, const char *or_key, int64_t otherwise,
		   uint32_t *ret);
const char *kv_json_text(const json_t *object, const char *key, const char *otherwise);
bool kv_json_has(const json_t *object, const char *key);
/* "bfloat16", "bf16", "float32", ... ; 0: no such type */
uint8_t kv_json_dtype(const char *name);

/* arch_hf.c: Hugging Face */
int kv_arch_from_hf(const json_t *config, const char *what, struct kv_arch **ret_model);
/* arch_layers.c: what each model_type means; -ENOTSUP if it isn't known */
int kv_arch_fill_layers(const json_t *config, const char *type, struct kv_arch *model);
/* arch_json.c: our own form */
int kv_arch_from_json(const json_t *object, const char *what, struct kv_arch **ret_model);

#endif
