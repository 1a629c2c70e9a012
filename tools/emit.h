/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Output of the tools in two forms from one `show` function: tables for people, JSON for programs.
 *
 *	kv_emit_open(e, NULL, '{');                          JSON: {
 *	kv_emit_list(e, "pools", fields, pools, ...);        JSON: "pools": [{every field}, ...]
 *	kv_emit_head(e, "<POOL", ">CACHED", NULL);           people: the columns of a table
 *	for (...) {
 *		kv_emit_cell(e, "%s", pool->name);
 *		kv_emit_cell(e, "%s", kv_words_bytes(n).text);
 *	}
 *	kv_emit_table(e);                                    people: the table, aligned
 *	kv_emit_close(e);                                    JSON: }
 *
 * In the form that a call is not for it does nothing, so no caller asks which form it is.
 * JSON carries exact numbers under the names of stats.h; people get sizes and times in words.
 *
 * Texts come from other processes: JSON strings are escaped, what isn't UTF-8 becomes U+FFFD, and
 * people's terminals see '?' in place of control characters.
 */
#ifndef KV_TOOLS_EMIT_H
#define KV_TOOLS_EMIT_H

#include <stdbool.h>
#include <stdio.h>

#include <kvcached/stats.h>

#define KV_EMIT_MAX_COLUMNS 16
#define KV_EMIT_MAX_DEPTH   8

struct kv_emit {
	FILE *out;
	bool json;
	bool one_line; /* JSON without line breaks; false after kv_emit_init() */
	/* JSON: the brackets that are open, innermost last, and how many values each has. */
	unsigned depth;
	char closing[KV_EMIT_MAX_DEPTH];
	size_t n_values[KV_EMIT_MAX_DEPTH];
	/* People: the table under construction, cells in order, rows of n_columns. */
	unsigned n_columns;
	bool right[KV_EMIT_MAX_COLUMNS];
	char **cells;
	size_t n_cells;
	bool broken; /* no memory for a text: kv_emit_end() says so */
};

void kv_emit_init(struct kv_emit *e, FILE *out, bool json);

/* kv_emit_end() - flush. Return: 0; -EIO or -ENOMEM if anything so far was not written. */
int kv_emit_end(struct kv_emit *e);

/* JSON. @key: name in the open object; NULL in an array and for the outermost value. */
void kv_emit_open(struct kv_emit *e, const char *key, char bracket); /* '{' or '[' */
void kv_emit_close(struct kv_emit *e);
void kv_emit_text(struct kv_emit *e, const char *key, const char *text);
void kv_emit_number(struct kv_emit *e, const char *key, uint64_t number);
void kv_emit_real(struct kv_emit *e, const char *key, double number); /* null if not finite */
void kv_emit_bool(struct kv_emit *e, const char *key, bool value);
/* every field of the struct at @item as members of the open object */
void kv_emit_fields(struct kv_emit *e, const struct kv_stat_field *fields, const void *item);
/* an array of objects; @items: [n] structs of @item_bytes */
void kv_emit_list(struct kv_emit *e, const char *key, const struct kv_stat_field *fields,
		  const void *items, size_t item_bytes, size_t n);

/* People. */
void kv_emit_line(struct kv_emit *e, const char *format, ...) __attribute__((format(printf, 2, 3)));
void kv_emit_gap(struct kv_emit *e); /* an empty line */
/* headings, each behind '<' (left) or '>' (right), then NULL */
void kv_emit_head(struct kv_emit *e, const char *heading, ...) __attribute__((sentinel));
void kv_emit_cell(struct kv_emit *e, const char *format, ...) __attribute__((format(printf, 2, 3)));
void kv_emit_table(struct kv_emit *e);
/* a table of one struct: field, value in words, meaning */
void kv_emit_describe(struct kv_emit *e, const struct kv_stat_field *fields, const void *item);

/* Numbers in words. By value: `.text` lives until the end of the full expression. */
struct kv_words {
	char text[64];
};

struct kv_words kv_words_bytes(uint64_t bytes);			/* "80.0 GiB" */
struct kv_words kv_words_time(uint64_t ns);			/* "3 h 12 min", "4.1 us" */
struct kv_words kv_words_share(uint64_t part, uint64_t whole);	/* "61.8%", "-" of nothing */
struct kv_words kv_words_cut(const char *text, unsigned width); /* "engine+", names in columns */
struct kv_words kv_words_value(const struct kv_stat_field *field, uint64_t number);

#endif
