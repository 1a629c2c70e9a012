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

static void show_summary(struct kv_emit *e, const struct kv_check_result *result)
{
	kv_emit_number(e, "n_pools", result->n_pools);
	kv_emit_number(e, "n_blocks", result->n_blocks);
	kv_emit_number(e, "n_errors", result->n_errors);
	kv_emit_text(e, "first_error", result->first_error);
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

/* What the daemon says, each part of one moment. */
struct books {
	struct kv_check_result result;
	struct kv_balance_stats *pools;
	struct kv_gpu_stats *gpus;
	struct kv_error_stats *errors;
	size_t n_pools, n_gpus, n_errors;
};

static uint64_t sum_of_books(const struct kv_balance_stats *p)
{
	return p->blocks_free + p->blocks_leased + p->blocks_cached + p->blocks_quarantined +
	       p->blocks_moving;
}

static uint64_t sum_of_pages(const struct kv_balance_stats *p)
{
	return p->pages_free + p->pages_leased + p->pages_cached + p->pages_quarantined + p->pages_moving;
}

static bool pool_balances(const struct kv_balance_stats *p)
{
	return sum_of_books(p) == p->blocks_total && sum_of_pages(p) == p->blocks_total &&
	       p->pages_free == p->blocks_free && p->pages_leased == p->blocks_leased &&
	       p->pages_cached == p->blocks_cached && p->pages_quarantined == p->blocks_quarantined &&
	       p->pages_moving == p->blocks_moving;
}

static bool gpu_balances(const struct kv_gpu_stats *g)
{
	return g->bytes_free + g->bytes_scrubbing + g->bytes_pools == g->bytes_arena;
}

static void row(struct kv_emit *e, const char *name, const char *whose, uint64_t n_free, uint64_t leased,
		uint64_t cached, uint64_t quarantined, uint64_t moving, uint64_t total)
{
	uint64_t sum = n_free + leased + cached + quarantined + moving;

	kv_emit_cell(e, "%s", kv_words_cut(name, 20).text);
	kv_emit_cell(e, "%s", whose);
	kv_emit_cell(e, "%" PRIu64, n_free);
	kv_emit_cell(e, "%" PRIu64, leased);
	kv_emit_cell(e, "%" PRIu64, cached);
	kv_emit_cell(e, "%" PRIu64, quarantined);
	kv_emit_cell(e, "%" PRIu64, moving);
	kv_emit_cell(e, "%s%" PRIu64, sum == total ? "" : "!", total);
}

static void show_pools(struct kv_emit *e, const struct books *b)
{
	kv_emit_list(e, "pools", kv_stat_fields(KV_STAT_BALANCE), b->pools, sizeof(*b->pools), b->n_pools);
	if (!b->n_pools)
		return;
	kv_emit_head(e, "<POOL", "<BY", ">FREE", ">LEASED", ">CACHED", ">QUARANT", ">MOVING", ">TOTAL", NULL);
	for (const struct kv_balance_stats *p = b->pools; p < b->pools + b->n_pools; p++) {
		row(e, p->name, "books", p->blocks_free, p->blocks_leased, p->blocks_cached,
		    p->blocks_quarantined, p->blocks_moving, p->blocks_total);
		row(e, "", "pages", p->pages_free, p->pages_leased, p->pages_cached, p->pages_quarantined,
		    p->pages_moving, p->blocks_total);
	}
	kv_emit_table(e);
	kv_emit_gap(e);
}

static void show_gpus(struct kv_emit *e, const struct books *b)
{
	kv_emit_open(e, "gpus", '[');
	for (const struct kv_gpu_stats *g = b->gpus; g < b->gpus + b->n_gpus; g++) {
		kv_emit_open(e, NULL, '{');
		kv_emit_number(e, "index", g->index);
		kv_emit_number(e, "bytes_free", g->bytes_free);
		kv_emit_number(e, "bytes_scrubbing", g->bytes_scrubbing);
		kv_emit_number(e, "bytes_pools", g->bytes_pools);
		kv_emit_number(e, "bytes_arena", g->bytes_arena);
		kv_emit_bool(e, "balances", gpu_balances(g));
		kv_emit_close(e);
		kv_emit_line(e, "device %" PRIu64 ": free %s + scrubbing %s + pools %s %s %s", g->index,
			     kv_words_bytes(g->bytes_free).text, kv_words_bytes(g->bytes_scrubbing).text,
			     kv_words_bytes(g->bytes_pools).text, gpu_balances(g) ? "=" : "is not",
			     kv_words_bytes(g->bytes_arena).text);
	}
	kv_emit_close(e);
	kv_emit_gap(e);
}

static void show_errors(struct kv_emit *e, const struct books *b)
{
	kv_emit_list(e, "errors", kv_stat_fields(KV_STAT_ERROR), b->errors, sizeof(*b->errors), b->n_errors);
	for (const struct kv_error_stats *x = b->errors; x < b->errors + b->n_errors; x++) {
		kv_emit_line(e, "%s%s%s", x->pool, *x->pool ? ": " : "", x->text);
		if (x->is_block)
			kv_emit_line(e, "  block %" PRIu64 ": pages say %s, slot %" PRIu64 ", generation %" PRIu64
				     "; books say %s, slot %" PRIu64 ", generation %" PRIu64, x->block,
				     x->pages_state, x->pages_slot, x->pages_generation, x->books_state,
				     x->books_slot, x->books_generation);
	}
	if (b->n_errors)
		kv_emit_gap(e);
}

static void books_deinit(struct books *b)
{
	free(b->pools);
	free(b->gpus);
	free(b->errors);
}

int kv_cmd_check(struct kv_ctl *ctl, int argc, char **argv)
{
	kv_cleanup(books_deinit) struct books b = {0};
	bool right;
	int status = kv_ctl_connect(ctl);
	int r;

	if (status)
		return status;
	r = kv_check(ctl->client, &b.result, kv_ctl_left(ctl));
	if (r < 0)
		return kv_ctl_broken(ctl, r);
	status = kv_ctl_ask(ctl, KV_STAT_BALANCE, &b.pools, &b.n_pools);
	if (!status)
		status = kv_ctl_ask(ctl, KV_STAT_GPU, &b.gpus, &b.n_gpus);
	if (!status && b.result.n_errors)
		status = kv_ctl_ask(ctl, KV_STAT_ERROR, &b.errors, &b.n_errors);
	if (status)
		return status;
	right = !b.result.n_errors;
	for (size_t i = 0; i < b.n_pools; i++)
		right &= pool_balances(&b.pools[i]) && !b.pools[i].n_errors;
	for (size_t i = 0; i < b.n_gpus; i++)
		right &= gpu_balances(&b.gpus[i]);
	kv_emit_open(&ctl->emit, NULL, '{');
	show_pools(&ctl->emit, &b);
	show_gpus(&ctl->emit, &b);
	show_errors(&ctl->emit, &b);
	kv_emit_bool(&ctl->emit, "balances", right);
	show_summary(&ctl->emit, &b.result);
	kv_emit_close(&ctl->emit);
	return right ? KV_EXIT_DONE : KV_EXIT_FAILED;
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
