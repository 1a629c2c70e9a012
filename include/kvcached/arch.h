/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Architectures: a model as far as its cache is concerned. For each layer, what a token and a
 * sequence leave behind. Read from a Hugging Face config.json, from GGUF metadata, or from the JSON
 * that `kvctl plan --model` prints, which is also how to describe an architecture that is not known
 * yet.
 *
 * Dimensions are the whole model's; tensor parallelism is applied when memory is planned (plan.h).
 * Plain data, no locks: a model may be read by several threads once it is made.
 */
#ifndef KVCACHED_ARCH_H
#define KVCACHED_ARCH_H

#include <kvcached/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KV_ARCH_MAX_LAYERS 1024

enum kv_layer_kind {
	KV_LAYER_NONE = 0,    /* leaves nothing (MLP only, or an encoder) */
	KV_LAYER_FULL = 1,    /* attends to all tokens */
	KV_LAYER_WINDOW = 2,  /* attends to the last `window` tokens, itself included */
	KV_LAYER_CHUNKED = 3, /* attends to its chunk of `window` tokens */
	KV_LAYER_STATE = 4,   /* recurrent: a state of constant size */
	KV_LAYER_CROSS = 5,   /* attends to an encoder's output: constant once encoded */
};

/* What a token leaves behind in an attention layer. */
enum kv_layer_form {
	KV_FORM_HEADS = 0,  /* K and V of each KV head */
	KV_FORM_LATENT = 1, /* MLA: one vector, latent and position; index_dim > 0: DSA */
	KV_FORM_V4 = 2,	    /* DeepSeek V4: a window, compressed rows, compressor state */
};

struct kv_arch_layer {
	uint8_t kind;	/* enum kv_layer_kind */
	uint8_t form;	/* enum kv_layer_form */
	int32_t shares; /* the layer whose K and V this one reads and that has the memory; -1: own
			 */
	uint32_t window;
	uint32_t n_kv_heads, head_dim, v_head_dim; /* HEADS */
	uint32_t latent_dim, rope_dim;		   /* LATENT and V4 */
	uint32_t index_dim;			   /* of an indexer; 0: none */
	uint32_t compress;			   /* V4: tokens a compressed row stands for */
	uint32_t cross_heads; /* KV heads of a second attention, to an encoder's output; 0: none */
	/* STATE, and layers that have a state beside their attention. The convolution keeps
	 * `conv_width` steps of conv_inner / tp + 2 * conv_groups * conv_group_dim channels (groups
	 * are split over ranks, and repeated where there are more ranks than groups); the
	 * recurrence keeps state_heads matrices, split over ranks. */
	uint32_t conv_width, conv_inner, conv_groups, conv_group_dim;
	uint32_t state_heads, state_rows, state_cols;
};

struct kv_arch {
	char name[KV_NAME_MAX];
	char architecture[KV_NAME_MAX]; /* class or GGUF name it was read as */
	uint64_t context;		/* tokens it was made for; 0: not said */
	uint32_t encoder_tokens;	/* of CROSS layers */
	uint8_t dtype;			/* enum kv_dtype of weights and activations */
	uint8_t state_dtype;		/* of recurrences */
	uint32_t n_layers;
	struct kv_arch_layer *layers;
};

/**
 * kv_arch_read() - a model from a file
 * @path: a config.json, a .gguf file, or a folder with a config.json
 *
 * Return: 0; -ENOENT and the like if the file can't be read; -EINVAL if it is no JSON or a field is
 *         missing or wrong (kv_error_text() names it); -ENOTSUP for an architecture that is not
 *         known. *ret_model is for kv_arch_free().
 */
int kv_arch_read(const char *path, struct kv_arch **ret_model);

/*
 * kv_arch_parse() - the same from JSON text of @len bytes; @what names it in errors
 *
 * Return: as kv_arch_read(), which fails to read besides.
 */
int kv_arch_parse(const char *text, size_t len, const char *what, struct kv_arch **ret_model);

/*
 * kv_arch_parse_gguf() - the same from the first @len bytes of a GGUF file at @data: header and metadata
 *
 * Return: as kv_arch_read(), which fails to read besides.
 */
int kv_arch_parse_gguf(const void *data, size_t len, const char *what, struct kv_arch **ret_model);

/* kv_arch_print() - the model as JSON that kv_arch_parse() reads; for free(). NULL: no memory. */
char *kv_arch_print(const struct kv_arch *model);

#define KV_ARCH_DIGEST_BYTES 33 /* 128 bits in hex, and NUL */

/**
 * kv_arch_digest() - hash (XXH3, 128 bits) of what kv_arch_print() prints
 *
 * Return: 0; -EINVAL if the model can't be printed, as its name is no UTF-8; -ENOMEM.
 */
int kv_arch_digest(const struct kv_arch *model, char ret_digest[KV_ARCH_DIGEST_BYTES]);

/* kv_arch_free() - NULL is allowed. Return: NULL. */
struct kv_arch *kv_arch_free(struct kv_arch *model);

#ifdef __cplusplus
}
#endif
#endif
