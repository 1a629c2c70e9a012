/* SPDX-License-Identifier: Apache-2.0 */
/* kvctl check, kvctl ping: is the daemon right, and is it there. */
#include <inttypes.h>
#include <stdlib.h>

#include "include/internal/cleanup.h"
#include "tools/kvctl.h"

#define MAX_PINGS 100000

static const char *plural(uint64_t n)
{
	return n == 1 ? "" : "s";
}

static void show_check(struct kv_emit *e, const struct kv_check_result *result)
{
	kv_emit_open(e, NULL, '{');
	kv_emit_number(e, "n_pools", result->n_pools);
	kv_emit_number(e, "n_blocks", result->n_blocks);
	kv_emit_number(e, "n_errors", result->n_errors);
	kv_emit_text(e, "first_error", result->first_error);
	kv_emit_close(e);
	if (!result->n_errors)
		kv_emit_line(e, "checked %" PRIu64 " block%s in %" PRIu64 " pool%s: books balance",
			     result->n_blocks, plural(result->n_blocks), result->n_pools,
			     plural(result->n_pools));
	else
		kv_emit_line(e,
			     "checked %" PRIu64 " block%s in %" PRIu64 " pool%s: %" PRIu64
			     " error%s, the first: %s",
			     result->n_blocks, plural(result->n_blocks), result->n_pools,
			     plural(result->n_pools), result->n_errors, plural(result->n_errors),
			     result->first_error);
}

int kv_cmd_check(struct kv_ctl *ctl, int argc, char **argv)
{
	struct kv_check_result result;
	int status = kv_ctl_connect(ctl);
	int r;

	if (status)
		return status;
	r = kv_check(ctl->client, &result, kv_ctl_left(ctl));
	if (r < 0)
		return kv_ctl_broken(ctl, r);
	show_check(&ctl->emit, &result);
	return result.n_errors ? KV_EXIT_FAILED : KV_EXIT_DONE;
}

static int compare_times(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return (x > y) - (x < y);
}

/* @times: [n], ns, sorted */
static void show_ping(struct kv_emit *e, const char *socket, const int64_t *times, uint64_t n)
{
	kv_emit_open(e, NULL, '{');
	kv_emit_text(e, "socket", socket);
	kv_emit_number(e, "count", n);
	kv_emit_number(e, "min_ns", times[0]);
	kv_emit_number(e, "median_ns", times[n / 2]);
	kv_emit_number(e, "max_ns", times[n - 1]);
	kv_emit_close(e);
	if (n == 1)
		kv_emit_line(e, "%s: round trip %s", socket, kv_words_time(times[0]).text);
	else
		kv_emit_line(e, "%s: %" PRIu64 " round trips, min %s, median %s, max %s", socket, n,
			     kv_words_time(times[0]).text, kv_words_time(times[n / 2]).text,
			     kv_words_time(times[n - 1]).text);
}

int kv_cmd_ping(struct kv_ctl *ctl, int argc, char **argv)
{
	kv_cleanup(kv_freep) int64_t *times = NULL;
	uint64_t n = 1;
	int status, r;

	if (argc > 1 && (kv_ctl_u64(argv[1], &n) < 0 || n < 1 || n > MAX_PINGS))
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "ping: COUNT '%s' given, 1..%d expected",
				     argv[1], MAX_PINGS);
	times = calloc(n, sizeof(*times));
	if (!times)
		return kv_ctl_refuse(ctl, KV_EXIT_FAILED, "ping: no memory for %" PRIu64 " times",
				     n);
	status = kv_ctl_connect(ctl);
	if (status)
		return status;
	for (uint64_t i = 0; i < n; i++) {
		int64_t start = kv_ctl_now();

		r = kv_ping(ctl->client, kv_ctl_left(ctl));
		if (r < 0)
			return kv_ctl_broken(ctl, r);
		times[i] = kv_ctl_now() - start;
	}
	qsort(times, n, sizeof(*times), compare_times);
	show_ping(&ctl->emit, ctl->socket, times, n);
	return KV_EXIT_DONE;
}
