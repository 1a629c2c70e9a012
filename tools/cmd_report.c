/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvctl report: one HTML file with what is wrong now and what the daemon remembers of the last hours, drawn as inline
 * SVG: no script, nothing that is fetched. With --json the samples themselves.
 *
 * A plot is 720 x 160 with time to the right. Rates are differences of totals over the time between two samples.
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "include/internal/cleanup.h"
#include "tools/kvctl.h"
#include "tools/progress.h"
#include "tools/snapshot.h"
#include "tools/trouble.h"

#define WIDTH	 720
#define HEIGHT	 160
#define MAX_LINES 3

typedef double value_fn(const struct kv_history_stats *now, const struct kv_history_stats *before,
			const struct kv_pool_stats *pool);

static double rate(uint64_t now, uint64_t before, const struct kv_history_stats *a,
		   const struct kv_history_stats *b)
{
	double seconds = ((double)b->ago_ns - (double)a->ago_ns) / KV_SEC;

	return now > before && seconds > 0 ? (double)(now - before) / seconds : 0;
}

#define RATE(name, field)                                                                               \
	static double name(const struct kv_history_stats *now, const struct kv_history_stats *before,   \
			   const struct kv_pool_stats *pool)                                             \
	{                                                                                               \
		return rate(now->field, before->field, now, before);                                    \
	}
RATE(looked_up, lookup_tokens_total)
RATE(hits, hit_tokens_total)
RATE(published, published_total)
RATE(evicted, evictions_total)
RATE(refused, no_room_total)

#define BYTES(name, sum)                                                                                \
	static double name(const struct kv_history_stats *now, const struct kv_history_stats *before,   \
			   const struct kv_pool_stats *pool)                                             \
	{                                                                                               \
		return (double)(sum) * (double)pool->block_bytes;                                       \
	}
BYTES(all_bytes, now->blocks_leased + now->blocks_cached + now->blocks_free)
BYTES(used_bytes, now->blocks_leased + now->blocks_cached)
BYTES(leased_bytes, now->blocks_leased)

static double refill_ms(const struct kv_history_stats *now, const struct kv_history_stats *before,
			const struct kv_pool_stats *pool)
{
	uint64_t n = now->refills_total - before->refills_total;

	return n ? (double)(now->refill_ns_total - before->refill_ns_total) / (double)n / 1e6 : 0;
}

/* Lines of a plot lie over each other, the first one farthest behind. */
static const struct plot {
	const char *title, *unit; /* unit: "bytes", or what stands behind a number */
	bool filled;
	struct {
		const char *name, *color;
		value_fn *value;
	} lines[MAX_LINES];
} plots[] = {
	{"Memory", "bytes", true,
	 {{"free", "#d5dbe3", all_bytes}, {"cached", "#7fb3d5", used_bytes},
	  {"leased", "#1f618d", leased_bytes}}},
	{"Tokens of prompts a second", "", true,
	 {{"looked up", "#d5dbe3", looked_up}, {"found cached", "#52a675", hits}}},
	{"Blocks a second", "", false,
	 {{"published", "#52a675", published}, {"evicted", "#c0392b", evicted}}},
	{"Requests for blocks", "", false,
	 {{"refused a second", "#c0392b", refused}, {"mean time to answer, ms", "#8e6bbf", refill_ms}}},
};

static void print_text(FILE *out, const char *text)
{
	for (; *text; text++) {
		if (*text == '&')
			fputs("&amp;", out);
		else if (*text == '<')
			fputs("&lt;", out);
		else if ((unsigned char)*text >= ' ')
			fputc(*text, out);
	}
}

static struct kv_words words_of(const struct plot *plot, double value)
{
	struct kv_words words;

	if (!strcmp(plot->unit, "bytes"))
		return kv_words_bytes((uint64_t)value);
	snprintf(words.text, sizeof(words.text), value && value < 10 ? "%.2g" : "%.0f", value);
	return words;
}

/* One, two or five times a power of ten, at least @value; of bytes a power of two. */
static double round_up(const struct plot *plot, double value)
{
	double step = 1, ten;

	if (!strcmp(plot->unit, "bytes")) {
		for (step = 1024; step < value; step *= 2)
			;
		return step * 3 / 4 >= value ? step * 3 / 4 : step;
	}
	if (!(value > 0))
		return 1;
	ten = pow(10, floor(log10(value)));
	for (int i = 0; i < 3 && (step = ten * (double[]){1, 2, 5}[i]) < value; i++)
		;
	return step >= value ? step : 10 * ten;
}

static void print_line(FILE *out, const struct plot *plot, unsigned i, const struct kv_history_stats *const *s,
		       size_t n, const struct kv_pool_stats *pool, double top, double span)
{
	double x = 0;

	fprintf(out, "<path class=\"line\" fill=\"%s\" stroke=\"%s\" d=\"", plot->filled ? plot->lines[i].color : "none",
		plot->lines[i].color);
	for (size_t k = 1; k < n; k++) {
		double y = HEIGHT - plot->lines[i].value(s[k], s[k - 1], pool) / top * HEIGHT;

		x = WIDTH - (double)s[k]->ago_ns / span * WIDTH;
		if (k == 1 && plot->filled)
			fprintf(out, "M%.1f %d", x, HEIGHT);
		fprintf(out, "%c%.1f %.1f", k == 1 && !plot->filled ? 'M' : 'L', x, y);
	}
	if (plot->filled)
		fprintf(out, "L%.1f %dZ", x, HEIGHT);
	fputs("\"/>\n", out);
}

static void print_plot(FILE *out, const struct plot *plot, const struct kv_history_stats *const *s, size_t n,
		       const struct kv_pool_stats *pool)
{
	double most = 0, top, span = (double)s[1]->ago_ns + 1;
	bool bytes = !strcmp(plot->unit, "bytes");

	for (unsigned i = 0; i < MAX_LINES && plot->lines[i].name; i++) {
		for (size_t k = 1; k < n; k++)
			most = fmax(most, plot->lines[i].value(s[k], s[k - 1], pool));
	}
	top = round_up(plot, most);
	fprintf(out, "<figure><figcaption>%s", plot->title);
	for (unsigned i = 0; i < MAX_LINES && plot->lines[i].name; i++) {
		double last = plot->lines[i].value(s[n - 1], s[n - 2], pool);
		double below = bytes && i + 1 < MAX_LINES && plot->lines[i + 1].name ?
				       plot->lines[i + 1].value(s[n - 1], s[n - 2], pool) : 0;

		fprintf(out, " <span><i style=\"background:%s\"></i>%s <b>%s</b></span>", plot->lines[i].color,
			plot->lines[i].name, words_of(plot, last - below).text);
	}
	fprintf(out, "</figcaption>\n<svg viewBox=\"-90 -8 %d %d\" role=\"img\">\n", WIDTH + 100, HEIGHT + 32);
	for (int g = 0; g <= 2; g++)
		fprintf(out, "<line x1=\"0\" x2=\"%d\" y1=\"%d\" y2=\"%d\"/><text x=\"-8\" y=\"%d\" class=\"y\">%s</text>\n",
			WIDTH, HEIGHT * g / 2, HEIGHT * g / 2, HEIGHT * g / 2 + 4,
			words_of(plot, top * (2 - g) / 2).text);
	for (unsigned i = 0; i < MAX_LINES && plot->lines[i].name; i++)
		print_line(out, plot, i, s, n, pool, top, span);
	for (int g = 0; g <= 4; g++)
		fprintf(out, "<text x=\"%d\" y=\"%d\" class=\"x\">%s%s</text>\n", WIDTH * g / 4, HEIGHT + 18,
			g < 4 ? "-" : "now", g < 4 ? kv_words_time((uint64_t)(span * (4 - g) / 4)).text : "");
	fputs("</svg></figure>\n", out);
}

static void print_pool(FILE *out, const struct kv_pool_stats *pool, const struct kv_history_stats *history,
		       size_t n_history)
{
	kv_cleanup(kv_freep) const struct kv_history_stats **s = calloc(n_history + 1, sizeof(*s));
	size_t n = 0;

	for (size_t i = 0; s && i < n_history; i++) {
		/* An answer in parts may bring a sample twice. */
		if (history[i].pool_id == pool->id && (!n || history[i].ago_ns < s[n - 1]->ago_ns))
			s[n++] = &history[i];
	}
	fputs("<section><h2>", out);
	print_text(out, pool->name);
	fprintf(out, "</h2><p>blocks of %s, %" PRIu64 " tokens; %" PRIu64 " session%s; ",
		kv_words_bytes(pool->block_bytes).text, pool->block_tokens, pool->n_sessions,
		pool->n_sessions == 1 ? "" : "s");
	fprintf(out, "%s of all prompts' tokens were found cached</p>\n",
		kv_words_share(pool->hit_tokens_total, pool->lookup_tokens_total).text);
	if (n < 3)
		fputs("<p>It is too young for a plot: look again in some seconds.</p>\n", out);
	for (size_t i = 0; n >= 3 && i < sizeof(plots) / sizeof(*plots); i++)
		print_plot(out, &plots[i], s, n, pool);
	fputs("</section>\n", out);
}

static void print_troubles(FILE *out, const struct kv_snapshot *now)
{
	struct kv_trouble troubles[KV_MOST_TROUBLES];
	size_t n = kv_trouble_find(now, troubles, KV_MOST_TROUBLES);

	for (size_t i = 0; i < n; i++) {
		fputs("<p class=\"trouble\"><b>", out);
		print_text(out, troubles[i].seen);
		fputs("</b><br>-> ", out);
		print_text(out, troubles[i].change);
		fputs("</p>\n", out);
	}
}

static void print_page(FILE *out, const struct kv_snapshot *now, const struct kv_history_stats *history, size_t n,
		       struct kv_progress *progress)
{
	const struct kv_daemon_stats *d = now->daemon;
	time_t seconds = time(NULL);
	char date[64] = "";
	struct tm local;

	if (localtime_r(&seconds, &local))
		strftime(date, sizeof(date), "%Y-%m-%d %H:%M:%S %Z", &local);
	fputs("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
	      "<link rel=\"icon\" href=\"data:,\"><title>kvcached report</title>\n<style>\n"
	      "body{font:15px/1.5 system-ui,sans-serif;color:#1c2833;background:#f4f6f8;margin:2em auto;"
	      "max-width:60em;padding:0 1em}\n"
	      "section{background:#fff;border:1px solid #dde3ea;border-radius:8px;padding:1em 1.5em;margin:1.5em 0}\n"
	      "h1{margin:0}h2{margin:0;word-break:break-all}p{margin:.2em 0 1em;color:#566573}\n"
	      "figure{margin:1.2em 0}figcaption{font-weight:600}figcaption span{font-weight:400;margin-left:1.2em}\n"
	      "figcaption i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}\n"
	      "svg{width:100%;height:auto;display:block}svg line{stroke:#dde3ea}svg text{font-size:11px;fill:#566573}\n"
	      ".line{stroke-width:1.5}.x{text-anchor:middle}.y{text-anchor:end}\n"
	      "table{border-collapse:collapse;width:100%}td,th{text-align:right;padding:.25em .6em;"
	      "border-bottom:1px solid #dde3ea}td:first-child,th:first-child{text-align:left}\n"
	      ".trouble{background:#fdf1ef;border-left:4px solid #c0392b;padding:.5em 1em;color:#1c2833;word-break:break-word}\n"
	      "</style></head><body>\n<h1>kvcached</h1>\n", out);
	print_troubles(out, now);
	fprintf(out, "<p>version %s, up %s, %" PRIu64 " clients, %" PRIu64 " worker restarts; %s</p>\n", d->version,
		kv_words_time(d->uptime_ns).text, d->n_clients, d->worker_restarts, date);
	fputs("<section><h2>Devices</h2>\n<table><tr><th>device<th>arena<th>leased<th>cached<th>free</tr>\n", out);
	for (const struct kv_gpu_stats *g = now->gpus; g < now->gpus + now->n_gpus; g++) {
		struct kv_use use = kv_snapshot_use(now, g);

		fprintf(out, "<tr><td>%" PRIu64 " ", g->index);
		print_text(out, g->name);
		fprintf(out, "<td>%s", kv_words_bytes(g->bytes_arena).text);
		fprintf(out, "<td>%s", kv_words_bytes(use.leased).text);
		fprintf(out, "<td>%s", kv_words_bytes(use.cached).text);
		fprintf(out, "<td>%s</tr>\n", kv_words_bytes(use.free).text);
	}
	fputs("</table></section>\n", out);
	for (size_t i = 0; i < now->n_pools; i++) {
		kv_progress_show(progress, i, now->n_pools, "pools drawn");
		print_pool(out, &now->pools[i], history, n);
	}
	if (!now->n_pools)
		fputs("<section><p>There is no pool.</p></section>\n", out);
	fputs("</body></html>\n", out);
}

static int write_page(struct kv_ctl *ctl, const char *path, const struct kv_snapshot *now,
		      const struct kv_history_stats *history, size_t n, struct kv_progress *progress)
{
	FILE *out = fopen(path, "we");
	bool failed;

	if (!out)
		return kv_ctl_refuse(ctl, KV_EXIT_FAILED, "%s: %s", path, strerror(errno));
	print_page(out, now, history, n, progress);
	failed = ferror(out);
	if (fclose(out) || failed)
		return kv_ctl_refuse(ctl, KV_EXIT_FAILED, "%s: it can't be written", path);
	return KV_EXIT_DONE;
}

int kv_cmd_report(struct kv_ctl *ctl, int argc, char **argv)
{
	kv_cleanup(kv_freep) struct kv_history_stats *history = NULL;
	struct kv_snapshot now = {0};
	struct kv_progress progress;
	size_t n = 0;
	int status, r;

	(void)argc;
	status = kv_ctl_connect(ctl);
	if (status)
		return status;
	kv_progress_init(&progress, ctl->emit.json);
	kv_progress_show(&progress, 0, 0, "samples read");
	status = kv_ctl_ask(ctl, KV_STAT_HISTORY, &history, &n);
	kv_progress_end(&progress);
	if (status)
		return status;
	r = kv_snapshot_take(ctl->client, &now, kv_ctl_left(ctl));
	if (r < 0)
		return kv_ctl_broken(ctl, r);
	status = write_page(ctl, argv[1], &now, history, n, &progress);
	kv_progress_end(&progress);
	if (!status) {
		kv_emit_open(&ctl->emit, NULL, '{');
		kv_emit_text(&ctl->emit, "file", argv[1]);
		kv_emit_list(&ctl->emit, "samples", kv_stat_fields(KV_STAT_HISTORY), history, sizeof(*history), n);
		kv_emit_close(&ctl->emit);
		kv_emit_line(&ctl->emit, "%s: %zu pool%s, %zu samples", argv[1], now.n_pools,
			     now.n_pools == 1 ? "" : "s", n);
	}
	kv_snapshot_deinit(&now);
	return status;
}
