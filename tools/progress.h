/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How far long work is: one line on a terminal's stderr, redrawn ten times a second at most, and wiped away at the end.
 * Elsewhere, and for JSON, nothing at all is written.
 */
#ifndef KV_TOOLS_PROGRESS_H
#define KV_TOOLS_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct kv_progress {
	bool shown; /* there is a line to be wiped away */
	bool off;
	int64_t drawn_ns;
};

/* kv_progress_init() - @quiet: never show anything */
void kv_progress_init(struct kv_progress *p, bool quiet);
/* kv_progress_show() - @total 0: not known, @done is counted; @what: "requests" */
void kv_progress_show(struct kv_progress *p, uint64_t done, uint64_t total, const char *what);
void kv_progress_end(struct kv_progress *p);

#endif
