/* SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "tools/emit.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

void kv_emit_init(struct kv_emit *e, FILE *out, bool json)
{
	*e = (struct kv_emit){.out = out, .json = json};
}

int kv_emit_end(struct kv_emit *e)
{
	assert(!e->depth && !e->n_columns);
	if (fflush(e->out) || ferror(e->out))
		return -EIO;
	return e->broken ? -ENOMEM : 0;
}

/*
 * Length in bytes of the UTF-8 character at @s, 0 if there is none: overlong forms, surrogates and
 * numbers above U+10FFFF are none. The closing NUL ends a sequence like any wrong byte.
 */
static unsigned utf8_length(const unsigned char *s)
{
	uint32_t code;
	unsigned n;

	if (s[0] < 0x80)
		return 1;
	n = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
	if (s[0] < 0xc2 || s[0] > 0xf4)
		return 0;
	code = s[0] & (0x7f >> n);
	for (unsigned i = 1; i < n; i++) {
		if ((s[i] & 0xc0) != 0x80)
			return 0;
		code = code << 6 | (s[i] & 0x3f);
	}
	if ((n == 3 && code < 0x800) || (n == 4 && (code < 0x10000 || code > 0x10ffff)) ||
	    (code >= 0xd800 && code <= 0xdfff))
		return 0;
	return n;
}

/* C0, DEL, and C1: the last are two bytes, 0xc2 0x80..0x9f. */
static bool is_control(const unsigned char *s, unsigned length)
{
	return (length == 1 && (s[0] < 0x20 || s[0] == 0x7f)) ||
	       (length == 2 && s[0] == 0xc2 && s[1] < 0xa0);
}

static void json_string(FILE *out, const char *text)
{
	fputc('"', out);
	for (const unsigned char *s = (const unsigned char *)text; *s;) {
		unsigned length = utf8_length(s);

		if (!length)
			fputs("\\ufffd", out);
		else if (*s == '"' || *s == '\\')
			fprintf(out, "\\%c", *s);
		else if (is_control(s, length))
			fprintf(out, "\\u%04x", length == 1 ? s[0] : s[1]);
		else
			fwrite(s, 1, length, out);
		s += length ? length : 1;
	}
	fputc('"', out);
}

/* In place; never longer than before. Return: how many columns of a terminal it takes. */
static size_t printable(char *text)
{
	char *to = text;
	size_t width = 0;

	for (const unsigned char *s = (const unsigned char *)text; *s; width++) {
		unsigned length = utf8_length(s);

		if (!length || is_control(s, length)) {
			*to++ = '?';
			s += length ? length : 1;
			continue;
		}
		while (length--)
			*to++ = *s++;
	}
	*to = '\0';
	return width;
}

static void indent(struct kv_emit *e)
{
	if (e->one_line)
		return;
	fprintf(e->out, "\n%*s", (int)(2 * e->depth), "");
}

/* What stands before a value: a comma, a new line, its name. */
static void begin_value(struct kv_emit *e, const char *key)
{
	if (e->depth) {
		assert(!key == (e->closing[e->depth - 1] == ']'));
		if (e->n_values[e->depth - 1]++)
			fputs(e->one_line ? ", " : ",", e->out);
		indent(e);
	}
	if (key) {
		json_string(e->out, key);
		fputs(": ", e->out);
	}
}

static void end_value(struct kv_emit *e)
{
	if (!e->depth)
		fputc('\n', e->out);
}

void kv_emit_open(struct kv_emit *e, const char *key, char bracket)
{
	if (!e->json)
		return;
	assert(e->depth < KV_EMIT_MAX_DEPTH);
	begin_value(e, key);
	fputc(bracket, e->out);
	e->closing[e->depth] = bracket == '{' ? '}' : ']';
	e->n_values[e->depth++] = 0;
}

void kv_emit_close(struct kv_emit *e)
{
	if (!e->json)
		return;
	assert(e->depth);
	e->depth--;
	if (e->n_values[e->depth])
		indent(e);
	fputc(e->closing[e->depth], e->out);
	end_value(e);
}

void kv_emit_text(struct kv_emit *e, const char *key, const char *text)
{
	if (!e->json)
		return;
	begin_value(e, key);
	json_string(e->out, text);
	end_value(e);
}

void kv_emit_number(struct kv_emit *e, const char *key, uint64_t number)
{
	if (!e->json)
		return;
	begin_value(e, key);
	fprintf(e->out, "%" PRIu64, number);
	end_value(e);
}

void kv_emit_real(struct kv_emit *e, const char *key, double number)
{
	if (!e->json)
		return;
	begin_value(e, key);
	if (isfinite(number))
		fprintf(e->out, "%.9g", number);
	else
		fputs("null", e->out);
	end_value(e);
}

void kv_emit_bool(struct kv_emit *e, const char *key, bool value)
{
	if (!e->json)
		return;
	begin_value(e, key);
	fputs(value ? "true" : "false", e->out);
	end_value(e);
}

static const char *text_of(const struct kv_stat_field *field, const void *item)
{
	return (const char *)item + field->offset;
}

static uint64_t number_of(const struct kv_stat_field *field, const void *item)
{
	return *(const uint64_t *)((const char *)item + field->offset);
}

void kv_emit_fields(struct kv_emit *e, const struct kv_stat_field *fields, const void *item)
{
	for (const struct kv_stat_field *f = fields; f->name; f++) {
		if (f->type == KV_STAT_TEXT)
			kv_emit_text(e, f->name, text_of(f, item));
		else
			kv_emit_number(e, f->name, number_of(f, item));
	}
}

void kv_emit_list(struct kv_emit *e, const char *key, const struct kv_stat_field *fields,
		  const void *items, size_t item_bytes, size_t n)
{
	kv_emit_open(e, key, '[');
	for (size_t i = 0; i < n; i++) {
		kv_emit_open(e, NULL, '{');
		kv_emit_fields(e, fields, (const char *)items + i * item_bytes);
		kv_emit_close(e);
	}
	kv_emit_close(e);
}

static char *format_printable(const char *format, va_list args)
{
	char *text;

	if (vasprintf(&text, format, args) < 0)
		return NULL;
	printable(text);
	return text;
}

void kv_emit_line(struct kv_emit *e, const char *format, ...)
{
	va_list args;
	char *text;

	if (e->json)
		return;
	va_start(args, format);
	text = format_printable(format, args);
	va_end(args);
	if (text)
		fprintf(e->out, "%s\n", text);
	else
		e->broken = true;
	free(text);
}

void kv_emit_gap(struct kv_emit *e)
{
	if (!e->json)
		fputc('\n', e->out);
}

static void add_cell(struct kv_emit *e, const char *format, va_list args)
{
	char **cells = reallocarray(e->cells, e->n_cells + 1, sizeof(*cells));

	if (!cells) {
		e->broken = true;
		return;
	}
	e->cells = cells;
	cells[e->n_cells] = format_printable(format, args);
	if (cells[e->n_cells])
		e->n_cells++;
	else
		e->broken = true;
}

void kv_emit_cell(struct kv_emit *e, const char *format, ...)
{
	va_list args;

	if (e->json)
		return;
	assert(e->n_columns);
	va_start(args, format);
	add_cell(e, format, args);
	va_end(args);
}

void kv_emit_head(struct kv_emit *e, const char *heading, ...)
{
	va_list args;

	if (e->json)
		return;
	assert(!e->n_columns);
	va_start(args, heading);
	for (; heading; heading = va_arg(args, const char *)) {
		assert(e->n_columns < KV_EMIT_MAX_COLUMNS);
		e->right[e->n_columns++] = heading[0] == '>';
		kv_emit_cell(e, "%s", heading + 1);
	}
	va_end(args);
}

static void print_row(const struct kv_emit *e, char *const *cells, const size_t *widths)
{
	for (unsigned i = 0; i < e->n_columns; i++) {
		bool last = i + 1 == e->n_columns;
		int pad = (int)(widths[i] - printable(cells[i]));

		/* Nothing trails: the last column is not filled up. */
		if (e->right[i])
			fprintf(e->out, "%*s%s", pad, "", cells[i]);
		else
			fprintf(e->out, "%s%*s", cells[i], last ? 0 : pad, "");
		fputs(last ? "\n" : "  ", e->out);
	}
}

void kv_emit_table(struct kv_emit *e)
{
	size_t widths[KV_EMIT_MAX_COLUMNS] = {0};

	if (e->json)
		return;
	for (size_t i = 0; i < e->n_cells; i++) {
		size_t width = printable(e->cells[i]);
		size_t *most = &widths[i % e->n_columns];

		*most = width > *most ? width : *most;
	}
	/* With a cell missing the others would stand under wrong headings. */
	assert(e->broken || e->n_cells % e->n_columns == 0);
	for (size_t i = 0; i < e->n_cells && !e->broken; i += e->n_columns)
		print_row(e, e->cells + i, widths);
	for (size_t i = 0; i < e->n_cells; i++)
		free(e->cells[i]);
	free(e->cells);
	e->cells = NULL;
	e->n_cells = 0;
	e->n_columns = 0;
}

void kv_emit_describe(struct kv_emit *e, const struct kv_stat_field *fields, const void *item)
{
	kv_emit_head(e, "<FIELD", "<VALUE", "<MEANING", NULL);
	for (const struct kv_stat_field *f = fields; f->name; f++) {
		kv_emit_cell(e, "%s", f->name);
		if (f->type == KV_STAT_TEXT)
			kv_emit_cell(e, "%s", text_of(f, item));
		else
			kv_emit_cell(e, "%s", kv_words_value(f, number_of(f, item)).text);
		kv_emit_cell(e, "%s", f->help);
	}
	kv_emit_table(e);
}

struct kv_words kv_words_bytes(uint64_t bytes)
{
	static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
	struct kv_words words;
	double number = (double)bytes;
	size_t i = 0;

	/* 1023.5 would be rounded to 1024 of its unit. */
	for (; number >= 1023.5 && i + 1 < ARRAY_SIZE(units); i++)
		number /= 1024;
	snprintf(words.text, sizeof(words.text), "%.*f %s", i && number < 99.95 ? 1 : 0, number,
		 units[i]);
	return words;
}

/* The two largest units that count; a fraction below a second. */
struct kv_words kv_words_time(uint64_t ns)
{
	struct kv_words words;
	uint64_t s = ns / 1000000000;

	if (ns < 1000)
		snprintf(words.text, sizeof(words.text), "%" PRIu64 " ns", ns);
	else if (ns < 1000000)
		snprintf(words.text, sizeof(words.text), "%.1f us", (double)ns / 1e3);
	else if (ns < 1000000000)
		snprintf(words.text, sizeof(words.text), "%.1f ms", (double)ns / 1e6);
	else if (s < 60)
		snprintf(words.text, sizeof(words.text), "%" PRIu64 " s", s);
	else if (s < 3600)
		snprintf(words.text, sizeof(words.text), "%" PRIu64 " min %" PRIu64 " s", s / 60,
			 s % 60);
	else if (s < 86400)
		snprintf(words.text, sizeof(words.text), "%" PRIu64 " h %" PRIu64 " min", s / 3600,
			 s / 60 % 60);
	else
		snprintf(words.text, sizeof(words.text), "%" PRIu64 " d %" PRIu64 " h", s / 86400,
			 s / 3600 % 24);
	return words;
}

struct kv_words kv_words_share(uint64_t part, uint64_t whole)
{
	struct kv_words words = {"-"};

	if (whole)
		snprintf(words.text, sizeof(words.text), "%.1f%%",
			 100 * ((double)part / (double)whole));
	return words;
}

/* Bytes of the first @n characters, or of all. A byte that isn't UTF-8 counts as a character. */
static size_t bytes_of(const char *text, unsigned n)
{
	size_t bytes = 0;

	while (n-- && text[bytes]) {
		unsigned length = utf8_length((const unsigned char *)text + bytes);

		bytes += length ? length : 1;
	}
	return bytes;
}

struct kv_words kv_words_cut(const char *text, unsigned width)
{
	struct kv_words words;
	size_t fits = bytes_of(text, width);

	if (text[fits])
		snprintf(words.text, sizeof(words.text), "%.*s+", (int)bytes_of(text, width - 1),
			 text);
	else
		snprintf(words.text, sizeof(words.text), "%.*s", (int)fits, text);
	return words;
}

struct kv_words kv_words_value(const struct kv_stat_field *field, uint64_t number)
{
	struct kv_words words;

	if (!strcmp(field->unit, "bytes"))
		return kv_words_bytes(number);
	if (!strcmp(field->unit, "ns"))
		return kv_words_time(number);
	snprintf(words.text, sizeof(words.text), "%" PRIu64, number);
	return words;
}
