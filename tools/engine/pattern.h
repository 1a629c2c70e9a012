/* SPDX-License-Identifier: Apache-2.0 */
/* How tokenizers cut a text into pieces before they merge bytes: regular expressions, written out.
 */
#ifndef KV_ENGINE_PATTERN_H
#define KV_ENGINE_PATTERN_H

#include <stddef.h>

/*
 * kv_pattern_gpt2_piece() - bytes of the first match of GPT-2's pattern in @s, [n > 0]:
 *	's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 */
size_t kv_pattern_gpt2_piece(const char *s, size_t n);

/* kv_pattern_digit_part() - bytes up to the first \p{N} in @s, or of that one where @s begins with
 * it */
size_t kv_pattern_digit_part(const char *s, size_t n);

#endif
