/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/log.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"
#include "include/kvcached/types.h"

#define LINES_A_SECOND 100
#define LINE_BYTES     1024

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

/* Standing still for whoever reads this would be the whole service's standing still: then lines are lost. */
static bool is_read(void)
{
	struct pollfd p = { .fd = STDERR_FILENO, .events = POLLOUT };

	return poll(&p, 1, 0) == 1 && p.revents == POLLOUT;
}

/* One write, of less than the PIPE_BUF bytes that a pipe which is ready takes without waiting. */
static void write_line(int level, const char *text)
{
	char line[LINE_BYTES + 64];
	int n;

	if (getenv("JOURNAL_STREAM"))
		n = snprintf(line, sizeof(line), "<%d>%s\n", level, text);
	else
		n = snprintf(line, sizeof(line), "kvcached: %s%s\n", level <= KV_LOG_WARN ? "warning: " : "", text);
	if (write(STDERR_FILENO, line, (size_t)n) < 0)
		return; /* its reader has gone */
}

/* Clients can cause lines; they must not be able to fill a disk with them. */
static bool is_too_much(void)
{
	static int64_t second_ns;
	static uint32_t n_lines;
	int64_t now = kv_now();

	if (now - second_ns < KV_SEC && max_level < KV_LOG_DEBUG)
		return ++n_lines > LINES_A_SECOND;
	second_ns = now;
	n_lines = 1;
	return false;
}

void kv_log(int level, const char *format, ...)
{
	static uint32_t n_left_out;
	char text[LINE_BYTES];
	va_list args;

	if (level > max_level)
		return;
	if (is_too_much() || !is_read()) {
		n_left_out++;
		return;
	}
	if (n_left_out) {
		snprintf(text, sizeof(text), "%u lines were left out", n_left_out);
		n_left_out = 0;
		write_line(KV_LOG_WARN, text);
	}
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	write_line(level, text);
}
