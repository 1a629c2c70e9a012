/* SPDX-License-Identifier: Apache-2.0 */
#include <stdarg.h>
#include <stdio.h>

#include "tools/engine/error.h"

static _Thread_local char text[512];

int kv_engine_error(int r, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	return r;
}

const char *kv_engine_error_text(void)
{
	return text;
}
