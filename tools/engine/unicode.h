/* SPDX-License-Identifier: Apache-2.0 */
/* UTF-8, and the character classes that tokenizers split text by (Unicode 14). */
#ifndef KV_ENGINE_UNICODE_H
#define KV_ENGINE_UNICODE_H

#include <stddef.h>
#include <stdint.h>

enum kv_char_class {
	KV_CHAR_OTHER,
	KV_CHAR_SPACE,	/* White_Space */
	KV_CHAR_LETTER, /* L*: \p{L} */
	KV_CHAR_NUMBER, /* N*: \p{N} */
};

enum kv_char_class kv_unicode_class(uint32_t point);

/*
 * kv_unicode_decode() - the code point at @s, [n > 0]
 *
 * A byte that begins no valid sequence stands for itself, as a point above all real ones.
 * Return: bytes used, 1..4.
 */
size_t kv_unicode_decode(const char *s, size_t n, uint32_t *ret);

#endif
