/* SPDX-License-Identifier: Apache-2.0 */
/* What somebody meant who mistyped a word: the nearest of some, by the edits between them. */
#ifndef KV_INTERNAL_NEAREST_H
#define KV_INTERNAL_NEAREST_H

#include <getopt.h>
#include <stdio.h>
#include <string.h>

#define KV_NEAREST_CHARS 24 /* of longer words only their start counts */

/* Edits that turn @a into @b: insert, delete, replace, exchange neighbours. */
static inline unsigned kv_word_distance(const char *a, const char *b)
{
	unsigned d[KV_NEAREST_CHARS + 1][KV_NEAREST_CHARS + 1];
	unsigned n = (unsigned)strnlen(a, KV_NEAREST_CHARS), m = (unsigned)strnlen(b, KV_NEAREST_CHARS);

	for (unsigned i = 0; i <= n; i++) {
		for (unsigned j = 0; j <= m; j++) {
			unsigned best = i + j; /* the first row and column */

			if (i && j) {
				best = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
				best = d[i - 1][j] + 1 < best ? d[i - 1][j] + 1 : best;
				best = d[i][j - 1] + 1 < best ? d[i][j - 1] + 1 : best;
			}
			if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
				best = d[i - 2][j - 2] + 1 < best ? d[i - 2][j - 2] + 1 : best;
			d[i][j] = best;
		}
	}
	return d[n][m];
}

/* Is @word near enough to @meant for a hint? A third of it may be wrong, one edit always. */
static inline int kv_word_is_near(const char *word, const char *meant)
{
	unsigned n = (unsigned)strnlen(meant, KV_NEAREST_CHARS);

	return kv_word_distance(word, meant) <= (n < 6 ? 1 + n / 4 : n / 3);
}

/* kv_nearest_option() - that was meant by @word, "--sockt" or "--sockt=x"; NULL: none is near, or no long one is meant */
static inline const char *kv_nearest_option(const char *word, const struct option *options)
{
	const char *found = NULL;
	char name[KV_NEAREST_CHARS + 1];

	if (strncmp(word, "--", 2))
		return NULL;
	snprintf(name, sizeof(name), "%.*s", (int)strcspn(word + 2, "="), word + 2);
	for (const struct option *o = options; o && o->name; o++) {
		if (kv_word_is_near(name, o->name) &&
		    (!found || kv_word_distance(name, o->name) < kv_word_distance(name, found)))
			found = o->name;
	}
	return found;
}

#endif
