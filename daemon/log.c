/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/log.h"
#include "include/internal/error.h"

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

void kv_log(int level, const char *format, ...)
{
	char text[1024];
	va_list args;

	if (level > max_level)
		return;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	if (getenv("JOURNAL_STREAM"))
		fprintf(stderr, "<%d>%s\n", level, text);
	else
		fprintf(stderr, "kvcached: %s%s\n", level <= KV_LOG_WARN ? "warning: " : "", text);
}
