/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Metrics over HTTP: GET /metrics, as OpenMetrics where the scraper says it reads that, else in the
 * text format that came before it. The numbers are those of kv_stat_fields(), so that kvctl, its JSON and
 * metrics never differ, and histograms beside them.
 *
 * On the daemon's loop. An answer is made at once and sent as its reader takes it: a slow one costs
 * memory for its text, is cut off after METRICS_DEADLINE, and is one of METRICS_MAX at most.
 */
#ifndef KV_DAEMON_METRICS_H
#define KV_DAEMON_METRICS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "include/internal/latency.h"

struct kv_daemon;
struct kv_metrics;

/**
 * kv_metrics_start() - listen on @address, "127.0.0.1:9400", "[::1]:9400" or ":9400" for all
 *
 * Return: 0; -EINVAL if that is no address; -EADDRINUSE and the like; the text names it.
 */
int kv_metrics_start(struct kv_daemon *d, const char *address, struct kv_metrics **ret);
struct kv_metrics *kv_metrics_stop(struct kv_metrics *metrics); /* NULL is allowed; returns NULL */

/* kv_metrics_text() - all metrics, for free(); NULL: no memory */
char *kv_metrics_text(struct kv_daemon *d, bool openmetrics, size_t *ret_len);

#endif
