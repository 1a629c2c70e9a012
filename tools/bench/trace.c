/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "tools/bench/trace.h"

#define MAX_DEPTH 64 /* of what is skipped */

/* One line under examination. `at` never passes the closing NUL. */
struct reader {
	const char *path;
	size_t line;
	const char *at;
	char *text;
	size_t size;
};

static int wrong(struct reader *r, const char *format, ...) __attribute__((format(printf, 2, 3)));

static int wrong(struct reader *r, const char *format, ...)
{
	int n = snprintf(r->text, r->size, "%s:%zu: ", r->path, r->line);
	va_list args;

	va_start(args, format);
	if (n >= 0 && (size_t)n < r->size)
		vsnprintf(r->text + n, r->size - (size_t)n, format, args);
	va_end(args);
	return -EINVAL;
}

static void skip_blanks(struct reader *r)
{
	r->at += strspn(r->at, " \t\r\n");
}

static bool accept(struct reader *r, char c)
{
	skip_blanks(r);
	if (*r->at != c)
		return false;
	r->at++;
	return true;
}

static int expect(struct reader *r, char c)
{
	return accept(r, c) ? 0 : wrong(r, "'%c' expected, '%.16s' found", c, r->at);
}

/* A string, not decoded: [*ret, *ret + *ret_n). Names that are looked for have no escapes. */
static int read_string(struct reader *r, const char **ret, size_t *ret_n)
{
	if (expect(r, '"') < 0)
		return -EINVAL;
	*ret = r->at;
	while (*r->at != '"') {
		r->at += *r->at == '\\' && r->at[1];
		if (!*r->at)
			return wrong(r, "a string doesn't end");
		r->at++;
	}
	*ret_n = (size_t)(r->at++ - *ret);
	return 0;
}

/* JSON has fewer forms of a number than strtod(). */
static int read_number(struct reader *r, const char *name, double *ret)
{
	char *end;

	skip_blanks(r);
	*ret = 0;
	end = (char *)r->at;
	if (*r->at == '-' || (*r->at >= '0' && *r->at <= '9'))
		*ret = strtod(r->at, &end);
	if (end == r->at || !isfinite(*ret))
		return wrong(r, "%s: a number expected, '%.16s' found", name, r->at);
	r->at = end;
	return 0;
}

static int read_count(struct reader *r, const char *name, uint64_t max, uint64_t *ret)
{
	char *end;

	skip_blanks(r);
	errno = 0;
	end = (char *)r->at;
	*ret = 0;
	if (*r->at >= '0' && *r->at <= '9')
		*ret = strtoull(r->at, &end, 10);
	if (end == r->at || errno || *ret > max || strchr(".eE", *end ? *end : ' '))
		return wrong(r, "%s: a whole number from 0 to %llu expected, '%.24s' found", name,
			     (unsigned long long)max, r->at);
	r->at = end;
	return 0;
}

/* Steps over any value: brackets must match, what is between them is not looked at closely. */
static int skip_value(struct reader *r)
{
	char open[MAX_DEPTH];
	const char *string;
	size_t n, depth = 0;

	do {
		skip_blanks(r);
		if (*r->at == '"') {
			if (read_string(r, &string, &n) < 0)
				return -EINVAL;
		} else if (*r->at == '{' || *r->at == '[') {
			if (depth == MAX_DEPTH)
				return wrong(r, "brackets more than %d deep", MAX_DEPTH);
			open[depth++] = *r->at++ == '{' ? '}' : ']';
		} else if (*r->at == '}' || *r->at == ']') {
			if (!depth || open[--depth] != *r->at)
				return wrong(r, "a value expected, '%.16s' found", r->at);
			r->at++;
		} else if (depth && (*r->at == ',' || *r->at == ':')) {
			r->at++;
		} else {
			n = strcspn(r->at, " \t\r\n,:{}[]\"");
			if (!n)
				return wrong(r, "a value expected, '%.16s' found", r->at);
			r->at += n;
		}
	} while (depth);
	return 0;
}

static int grow(void **array, size_t *room, size_t n, size_t item)
{
	size_t more = *room ? *room * 2 : 1024;
	void *p;

	if (n < *room)
		return 0;
	p = realloc(*array, more * item);
	if (!p)
		return -ENOMEM;
	*array = p;
	*room = more;
	return 0;
}

static int read_ids(struct reader *r, struct kv_trace *trace, struct kv_trace_request *q)
{
	if (expect(r, '[') < 0)
		return -EINVAL;
	if (accept(r, ']'))
		return 0;
	do {
		int e = grow((void **)&trace->ids, &trace->ids_room, trace->n_ids,
			     sizeof(*trace->ids));

		if (e < 0)
			return e;
		e = read_count(r, "hash_ids", INT64_MAX, &trace->ids[trace->n_ids]);
		if (e < 0)
			return e;
		trace->n_ids++;
		q->n_ids++;
	} while (accept(r, ','));
	return expect(r, ']');
}

enum field { TIMESTAMP, INPUT_LENGTH, OUTPUT_LENGTH, HASH_IDS, FIELDS };

static const char *const names[FIELDS] = {"timestamp", "input_length", "output_length", "hash_ids"};

static int read_field(struct reader *r, enum field field, struct kv_trace *trace,
		      struct kv_trace_request *q)
{
	uint64_t count = 0;
	int e;

	switch (field) {
	case TIMESTAMP:
		return read_number(r, names[field], &q->timestamp);
	case INPUT_LENGTH:
		e = read_count(r, names[field], KV_TRACE_MAX_TOKENS, &count);
		q->input_length = (uint32_t)count;
		return e;
	case OUTPUT_LENGTH:
		e = read_count(r, names[field], KV_TRACE_MAX_TOKENS, &count);
		q->output_length = (uint32_t)count;
		return e;
	case HASH_IDS:
		return read_ids(r, trace, q);
	default:
		return skip_value(r);
	}
}

static int read_members(struct reader *r, struct kv_trace *trace, struct kv_trace_request *q)
{
	bool seen[FIELDS + 1] = {false};

	if (expect(r, '{') < 0)
		return -EINVAL;
	if (!accept(r, '}')) {
		do {
			const char *name;
			enum field field = 0;
			size_t n;
			int e;

			if (read_string(r, &name, &n) < 0 || expect(r, ':') < 0)
				return -EINVAL;
			while (field < FIELDS &&
			       (strlen(names[field]) != n || memcmp(names[field], name, n)))
				field++;
			if (field < FIELDS && seen[field])
				return wrong(r, "%s is there twice", names[field]);
			seen[field] = true;
			e = read_field(r, field, trace, q);
			if (e < 0)
				return e;
		} while (accept(r, ','));
		if (expect(r, '}') < 0)
			return -EINVAL;
	}
	skip_blanks(r);
	if (*r->at)
		return wrong(r, "nothing expected behind the object, '%.16s' found", r->at);
	for (enum field field = 0; field < FIELDS; field++) {
		if (!seen[field])
			return wrong(r, "%s is missing", names[field]);
	}
	return 0;
}

static int read_line(struct reader *r, struct kv_trace *trace)
{
	struct kv_trace_request q = {.first_id = trace->n_ids};
	uint32_t n_ids;
	int e = grow((void **)&trace->requests, &trace->requests_room, trace->n_requests,
		     sizeof(*trace->requests));

	if (!e)
		e = read_members(r, trace, &q);
	if (e < 0)
		return e;
	/* Another size of blocks would be replayed as something else without a word. */
	n_ids = (q.input_length + KV_TRACE_BLOCK - 1) / KV_TRACE_BLOCK;
	if (q.n_ids != n_ids)
		return wrong(r,
			     "hash_ids: %u expected for input_length %u (blocks of %u), %u found",
			     n_ids, q.input_length, KV_TRACE_BLOCK, q.n_ids);
	if (q.n_ids * KV_TRACE_BLOCK > trace->longest_input)
		trace->longest_input = q.n_ids * KV_TRACE_BLOCK;
	if (q.output_length > trace->longest_output)
		trace->longest_output = q.output_length;
	trace->requests[trace->n_requests++] = q;
	return 0;
}

static void fclosep(FILE **f)
{
	if (*f)
		fclose(*f);
}

static int read_file(struct reader *r, struct kv_trace *trace)
{
	kv_cleanup(fclosep) FILE *f = fopen(r->path, "re");
	kv_cleanup(kv_freep) char *line = NULL;
	size_t room = 0;
	ssize_t n;

	errno = f ? 0 : errno;
	while (f && (n = getline(&line, &room, f)) >= 0) {
		int e = 0;

		r->line++;
		r->at = line;
		if (strlen(line) != (size_t)n)
			return wrong(r, "a NUL byte");
		skip_blanks(r);
		if (*r->at)
			e = read_line(r, trace);
		if (e == -EINVAL)
			return e;
		if (e < 0) {
			snprintf(r->text, r->size, "%s: %s", r->path, strerror(-e));
			return e;
		}
		errno = 0;
	}
	if (errno) {
		int e = -errno;

		snprintf(r->text, r->size, "%s: %s", r->path, strerror(-e));
		return e;
	}
	if (!trace->n_requests) {
		snprintf(r->text, r->size, "%s: there is no request in it", r->path);
		return -EINVAL;
	}
	return 0;
}

int kv_trace_read(const char *path, struct kv_trace *ret, char *text, size_t size)
{
	struct reader reader = {.path = path, .text = text, .size = size};
	struct kv_trace trace = {0};
	int r = read_file(&reader, &trace);

	if (r < 0)
		kv_trace_deinit(&trace);
	else
		*ret = trace;
	return r;
}

void kv_trace_deinit(struct kv_trace *trace)
{
	free(trace->requests);
	free(trace->ids);
	*trace = (struct kv_trace){0};
}

void kv_trace_expand(uint64_t id, int32_t tokens[KV_TRACE_BLOCK])
{
	uint32_t x = (uint32_t)(id ^ id >> 32) * 0x9e3779b1u;

	for (uint32_t i = 0; i < KV_TRACE_BLOCK; i++)
		tokens[i] = (int32_t)((x + i * 0x85ebca6bu) >> 1);
	/* The id itself: ids below 2^63 can't give equal tokens. */
	tokens[0] = (int32_t)(id & 0x7fffffff);
	tokens[1] = (int32_t)(id >> 31 & 0x7fffffff);
	tokens[2] = (int32_t)(id >> 62);
}
