/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "tools/engine/pattern.h"
#include "tools/engine/unicode.h"

static size_t contraction(const char *s, size_t n)
{
	static const char *const ends[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};

	for (size_t i = 0; i < sizeof(ends) / sizeof(ends[0]); i++) {
		size_t len = strlen(ends[i]);

		if (n >= len && !memcmp(s, ends[i], len))
			return len;
	}
	return 0;
}

/* End of the run of characters of @class that begins at @i; *@ret_last: where its last one begins
 */
static size_t run_end(const char *s, size_t n, size_t i, enum kv_char_class class, size_t *ret_last)
{
	uint32_t point;
	size_t used;

	for (; i < n; i += used) {
		used = kv_unicode_decode(s + i, n - i, &point);
		if (kv_unicode_class(point) != class)
			break;
		*ret_last = i;
	}
	return i;
}

size_t kv_pattern_gpt2_piece(const char *s, size_t n)
{
	enum kv_char_class class;
	size_t last = 0, len, end;
	uint32_t point;

	len = contraction(s, n);
	if (len)
		return len;

	len = s[0] == ' ' && n > 1;
	kv_unicode_decode(s + len, n - len, &point);
	class = kv_unicode_class(point);
	if (class != KV_CHAR_SPACE)
		return run_end(s, n, len, class, &last);

	/* Spaces before a word leave the last one to it: \s+(?!\S), and \s+ for a single one. */
	end = run_end(s, n, 0, KV_CHAR_SPACE, &last);
	return end == n || last == 0 ? end : last;
}

size_t kv_pattern_digit_part(const char *s, size_t n)
{
	uint32_t point;
	size_t used;

	for (size_t i = 0; i < n; i += used) {
		used = kv_unicode_decode(s + i, n - i, &point);
		if (kv_unicode_class(point) == KV_CHAR_NUMBER)
			return i ? i : used;
	}
	return n;
}
