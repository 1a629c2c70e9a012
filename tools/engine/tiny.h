/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The built-in model: a GGUF file made in memory, its weights drawn from a fixed seed, its tokens
 * the 256 bytes. It needs no download and gives the same text everywhere: nonsense in small letters
 * that depends on all of the prompt.
 */
#ifndef KV_ENGINE_TINY_H
#define KV_ENGINE_TINY_H

#include "tools/engine/gguf.h"

/* kv_tiny_new() - Return: 0 or -ENOMEM */
int kv_tiny_new(struct kv_gguf **ret);

#endif
