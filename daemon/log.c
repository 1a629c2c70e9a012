/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/log.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"
#include "include/kvcached/types.h"

#define LINES_A_SECOND 100

static int max_level = KV_LOG_INFO;

void kv_log_set_level(int level)
{
	max_level = level;
}

int kv_log_level_parse(const char *text)
{
	static const struct {
		const char *name;
		int level;
	} names[] = { { "error", KV_LOG_ERROR },
		      { "warn", KV_LOG_WARN },
		      { "info", KV_LOG_INFO },
		      { "debug", KV_LOG_DEBUG } };

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		if (!strcmp(text, names[i].name))
			return names[i].level;
	}
	return kv_error(-EINVAL, "--log-level: '%s' given; debug, info, warn or error is needed",
			text);
}

static void write_line(int level, const char *text)
{
	if (getenv("JOURNAL_STREAM"))
		fprintf(stderr, "<%d>%s\n", level, text);
	else
		fprintf(stderr, "kvcached: %s%s\n", level <= KV_LOG_WARN ? "warning: " : "", text);
}

/* Clients can cause lines; they must not be able to fill a disk with them. */
static bool is_too_much(void)
{
	static int64_t second_ns;
	static uint32_t n_lines;
	int64_t now = kv_now();
	char text[80];

	if (now - second_ns < KV_SEC && max_level < KV_LOG_DEBUG)
		return ++n_lines > LINES_A_SECOND;
	if (n_lines > LINES_A_SECOND) {
		snprintf(text, sizeof(text), "%u lines were left out", n_lines - LINES_A_SECOND);
		write_line(KV_LOG_WARN, text);
	}
	second_ns = now;
	n_lines = 1;
	return false;
}

void kv_log(int level, const char *format, ...)
{
	char text[1024];
	va_list args;

	if (level > max_level || is_too_much())
		return;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	write_line(level, text);
}
