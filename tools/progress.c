/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "tools/progress.h"

#define WIDTH 30
#define AGAIN 100000000 /* ns */

static int64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

void kv_progress_init(struct kv_progress *p, bool quiet)
{
	*p = (struct kv_progress){.off = quiet || !isatty(STDERR_FILENO)};
}

void kv_progress_show(struct kv_progress *p, uint64_t done, uint64_t total, const char *what)
{
	char bar[WIDTH + 1] = "";
	int64_t t;

	if (p->off)
		return;
	t = now();
	if (p->shown && t - p->drawn_ns < AGAIN)
		return;
	done = total && done > total ? total : done;
	for (int i = 0; i < WIDTH; i++)
		bar[i] = total && (double)i < (double)done / (double)total * WIDTH ? '#' : '.';
	if (total)
		fprintf(stderr, "\r[%s] %3.0f %%, %" PRIu64 " of %" PRIu64 " %s\033[K", bar,
			100.0 * (double)done / (double)total, done, total, what);
	else
		fprintf(stderr, "\r%" PRIu64 " %s\033[K", done, what);
	fflush(stderr);
	p->shown = true;
	p->drawn_ns = t;
}

void kv_progress_end(struct kv_progress *p)
{
	if (!p->shown)
		return;
	fputs("\r\033[K", stderr);
	fflush(stderr);
	p->shown = false;
}
