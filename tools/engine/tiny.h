/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The built-in models: GGUF files made in memory, their weights drawn from a fixed seed, their
 * tokens the 256 bytes. "tiny" is made in a moment; "small" is wide enough to keep a GPU busy. They
 * need no download and give the same text everywhere: nonsense in small letters that depends on all
 * of the prompt.
 */
#ifndef KV_ENGINE_TINY_H
#define KV_ENGINE_TINY_H

#include <stdbool.h>

#include "tools/engine/gguf.h"

/* kv_tiny_is() - is this the name of a built-in model? */
bool kv_tiny_is(const char *name);

/* kv_tiny_new() - @name is one of theirs. Return: 0 or -ENOMEM */
int kv_tiny_new(const char *name, struct kv_gguf **ret);

#endif
