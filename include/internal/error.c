/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

#include "include/internal/error.h"
#include "include/internal/public.h"

static _Thread_local char text[KV_ERROR_BYTES];

int kv_error(int r, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	return r;
}

int kv_no_memory(void)
{
	return kv_error(-ENOMEM, "no memory");
}

KV_PUBLIC const char *kv_error_text(void)
{
	return text;
}
