/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvctl top [COUNT]: what goes on, again and again. On a terminal it fills the screen and takes keys;
 * elsewhere, or with a count, it prints one screen after the other.
 *
 * Rates are differences of two snapshots. A daemon that goes away is waited for.
 */
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include "include/internal/cleanup.h"
#include "tools/kvctl.h"
#include "tools/snapshot.h"
#include "tools/trouble.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
#define MIN_INTERVAL (KV_SEC / 10)
#define MAX_INTERVAL (60 * KV_SEC)

/* A pool now, and how it changed since the snapshot before. */
struct row {
	const struct kv_pool_stats *pool;
	double tokens, hits, published, evicted, refused; /* a second */
	double share;					  /* of the tokens asked for, found; < 0: none asked */
};

struct top {
	struct kv_ctl *ctl;
	struct kv_snapshot now, before;
	int64_t now_ns, before_ns, interval;
	bool has_before, paused, help;
	unsigned sort; /* in sorts[] */
};

static int by_double(double x, double y)
{
	return (x < y) - (x > y);
}

static int by_u64(uint64_t x, uint64_t y)
{
	return (x < y) - (x > y);
}

#define COMPARE(name, expression)                            \
	static int name(const void *a, const void *b)        \
	{                                                    \
		const struct row *x = a, *y = b;             \
                                                             \
		return expression;                           \
	}
COMPARE(by_name, strcmp(x->pool->name, y->pool->name))
COMPARE(by_leased, by_u64(x->pool->blocks_leased * x->pool->block_bytes,
			  y->pool->blocks_leased * y->pool->block_bytes))
COMPARE(by_cached, by_u64(x->pool->blocks_cached * x->pool->block_bytes,
			  y->pool->blocks_cached * y->pool->block_bytes))
COMPARE(by_hit, by_double(x->share, y->share))
COMPARE(by_tokens, by_double(x->tokens, y->tokens))
COMPARE(by_evicted, by_double(x->evicted, y->evicted))
COMPARE(by_waiting, by_u64(x->pool->waiting, y->pool->waiting))

static const struct {
	char key;
	const char *name;
	int (*compare)(const void *a, const void *b);
} sorts[] = {
	{'t', "tokens/s", by_tokens},	{'n', "name", by_name},	  {'l', "leased", by_leased},
	{'c', "cached", by_cached},	{'h', "hits", by_hit},	  {'e', "evictions/s", by_evicted},
	{'w', "waiting", by_waiting},
};

static volatile sig_atomic_t ended;

static void on_signal(int number)
{
	(void)number;
	ended = 1;
}

static const struct kv_pool_stats *pool_before(const struct top *t, uint64_t id)
{
	for (size_t i = 0; t->has_before && i < t->before.n_pools; i++) {
		if (t->before.pools[i].id == id)
			return &t->before.pools[i];
	}
	return NULL;
}

static double rate(const struct top *t, uint64_t now, uint64_t before)
{
	double seconds = (double)(t->now_ns - t->before_ns) / KV_SEC;

	return now > before && seconds > 0 ? (double)(now - before) / seconds : 0;
}

static struct row row_of(const struct top *t, const struct kv_pool_stats *now)
{
	const struct kv_pool_stats *b = pool_before(t, now->id);
	struct row row = {.pool = now, .share = -1};

	if (!b)
		return row;
	row.tokens = rate(t, now->lookup_tokens_total, b->lookup_tokens_total);
	row.hits = rate(t, now->hit_tokens_total, b->hit_tokens_total);
	row.published = rate(t, now->published_total, b->published_total);
	row.evicted = rate(t, now->evictions_total, b->evictions_total);
	row.refused = rate(t, now->no_room_total, b->no_room_total);
	if (row.tokens > 0)
		row.share = row.hits / row.tokens;
	return row;
}

static struct kv_words words_rate(double value)
{
	struct kv_words words;

	snprintf(words.text, sizeof(words.text), value >= 1e6 ? "%.1fM" : value >= 1e4 ? "%.0fk" :
		 value >= 10 || value == 0 ? "%.0f" : "%.1f",
		 value >= 1e6 ? value / 1e6 : value >= 1e4 ? value / 1e3 : value);
	return words;
}

static struct kv_words words_percent(double share)
{
	struct kv_words words = {"-"};

	if (share >= 0)
		snprintf(words.text, sizeof(words.text), "%.1f%%", 100 * share);
	return words;
}

static void show_devices(struct kv_emit *e, const struct top *t)
{
	kv_emit_head(e, "<GPU", "<DEVICE", ">ARENA", ">#LEASED", ">+CACHED", ">.FREE", ">ZEROING", "<USE",
		     NULL);
	for (const struct kv_gpu_stats *g = t->now.gpus; g < t->now.gpus + t->now.n_gpus; g++) {
		struct kv_use use = kv_snapshot_use(&t->now, g);

		kv_emit_cell(e, "%" PRIu64, g->index);
		kv_emit_cell(e, "%s", kv_words_cut(g->name, 16).text);
		kv_emit_cell(e, "%s", kv_words_bytes(g->bytes_arena).text);
		kv_emit_cell(e, "%s", kv_words_bytes(use.leased).text);
		kv_emit_cell(e, "%s", kv_words_bytes(use.cached).text);
		kv_emit_cell(e, "%s", kv_words_bytes(use.free).text);
		kv_emit_cell(e, "%s", kv_words_bytes(g->bytes_scrubbing).text);
		kv_emit_cell(e, "%s", kv_words_bar(&use).text);
	}
	kv_emit_table(e);
}

static void show_pools(struct kv_emit *e, const struct top *t)
{
	kv_cleanup(kv_freep) struct row *rows = calloc(t->now.n_pools + 1, sizeof(*rows));

	if (!rows)
		return;
	for (size_t i = 0; i < t->now.n_pools; i++)
		rows[i] = row_of(t, &t->now.pools[i]);
	qsort(rows, t->now.n_pools, sizeof(*rows), sorts[t->sort].compare);
	kv_emit_head(e, "<POOL", ">LEASED", ">CACHED", ">FREE", ">TOK/S", ">HIT", ">PUB/S", ">EVICT/S",
		     ">WAIT", ">REF/S", ">SESS", NULL);
	for (const struct row *r = rows; r < rows + t->now.n_pools; r++) {
		const struct kv_pool_stats *p = r->pool;

		kv_emit_cell(e, "%s", kv_words_cut(p->name, 12).text);
		kv_emit_cell(e, "%s", kv_words_blocks(p, p->blocks_leased).text);
		kv_emit_cell(e, "%s", kv_words_blocks(p, p->blocks_cached).text);
		kv_emit_cell(e, "%s", kv_words_blocks(p, p->blocks_free).text);
		kv_emit_cell(e, "%s", words_rate(r->tokens).text);
		kv_emit_cell(e, "%s", words_percent(r->share).text);
		kv_emit_cell(e, "%s", words_rate(r->published).text);
		kv_emit_cell(e, "%s", words_rate(r->evicted).text);
		kv_emit_cell(e, "%" PRIu64, p->waiting);
		kv_emit_cell(e, "%s", words_rate(r->refused).text);
		kv_emit_cell(e, "%" PRIu64, p->n_sessions);
	}
	kv_emit_table(e);
}

static int by_blocks(const void *a, const void *b)
{
	const struct kv_session_stats *x = a, *y = b;

	return by_u64(x->blocks_leased + x->blocks_held, y->blocks_leased + y->blocks_held);
}

static void show_sessions(struct kv_emit *e, const struct top *t)
{
	qsort(t->now.sessions, t->now.n_sessions, sizeof(*t->now.sessions), by_blocks);
	kv_emit_head(e, ">SESSION", "<POOL", "<CLIENT", ">PID", ">LEASED", ">HELD", ">HIT", ">SINCE", NULL);
	for (size_t i = 0; i < t->now.n_sessions; i++) {
		const struct kv_session_stats *s = &t->now.sessions[i];
		const struct kv_pool_stats *pool = kv_pool_of(t->now.pools, t->now.n_pools, s);

		kv_emit_cell(e, "%" PRIu64, s->id);
		kv_emit_cell(e, "%s", kv_words_cut(s->pool, 16).text);
		kv_emit_cell(e, "%s", kv_words_cut(s->client, 16).text);
		kv_emit_cell(e, "%" PRIu64, s->pid);
		kv_emit_cell(e, "%s", kv_words_blocks(pool, s->blocks_leased).text);
		kv_emit_cell(e, "%s", kv_words_blocks(pool, s->blocks_held).text);
		kv_emit_cell(e, "%s", kv_words_share(s->hit_tokens_total, s->lookup_tokens_total).text);
		kv_emit_cell(e, "%s", kv_words_since(s).text);
	}
	kv_emit_table(e);
}

static void show(struct kv_emit *e, const struct top *t)
{
	const struct kv_daemon_stats *d = t->now.daemon;

	kv_emit_line(e, "kvcached %s%s, up %s; %" PRIu64 " sessions; by %s, every %s", d->version,
		     t->paused ? " (paused)" : "", kv_words_time(d->uptime_ns).text, d->n_sessions,
		     sorts[t->sort].name, kv_words_time((uint64_t)t->interval).text);
	if (t->help) {
		kv_emit_line(e, "order: t tokens/s  n name  l leased  c cached  h hits  e evictions/s  w waiting");
		kv_emit_line(e, "space pause  + slower  - faster  ? this help  q quit; columns: man kvctl");
	}
	kv_emit_gap(e);
	show_devices(e, t);
	kv_emit_gap(e);
	show_pools(e, t);
	kv_trouble_emit(e, &t->now);
	if (!t->now.n_sessions)
		return;
	kv_emit_gap(e);
	show_sessions(e, t);
}

/* The screen as text, for free(); NULL: no memory */
static char *render(const struct top *t)
{
	struct kv_emit e;
	char *text = NULL;
	size_t n;
	FILE *out = open_memstream(&text, &n);

	if (!out)
		return NULL;
	kv_emit_init(&e, out, false);
	show(&e, t);
	if (kv_emit_end(&e) < 0 || fclose(out)) {
		free(text);
		return NULL;
	}
	return text;
}

/* Lines as far as the screen goes; each ends by clearing what was there. */
static void paint(const char *text, FILE *out)
{
	struct winsize size = {0};
	int rows = 24, columns = 80;

	if (!ioctl(fileno(out), TIOCGWINSZ, &size) && size.ws_row && size.ws_col) {
		rows = size.ws_row;
		columns = size.ws_col;
	}
	fputs("\033[H", out);
	for (int i = 0; i < rows && *text; i++) {
		int n = (int)strcspn(text, "\n");

		fprintf(out, "%s%.*s\033[K", i ? "\r\n" : "", n < columns ? n : columns, text);
		text += n + (text[n] == '\n');
	}
	fputs("\033[J", out);
	fflush(out);
}

/* A new snapshot. False: there is no daemon at the moment. */
static bool look(struct top *t)
{
	KV_OPTIONS(kv_connect_options, how, .socket = t->ctl->socket, .name = "kvctl", .timeout = KV_SEC);
	struct kv_snapshot fresh;

	if (!t->ctl->client && kv_connect(&how, &t->ctl->client) < 0)
		return false;
	if (kv_snapshot_take(t->ctl->client, &fresh, KV_SEC) < 0) {
		t->ctl->client = kv_disconnect(t->ctl->client);
		t->has_before = false;
		return false;
	}
	kv_snapshot_deinit(&t->before);
	t->before = t->now;
	t->before_ns = t->now_ns;
	t->has_before = t->before.daemon && t->before.daemon->boot_nonce == fresh.daemon->boot_nonce;
	t->now = fresh;
	t->now_ns = kv_ctl_now();
	return true;
}

static void take_key(struct top *t, char key)
{
	for (unsigned i = 0; i < ARRAY_SIZE(sorts); i++)
		t->sort = sorts[i].key == key ? i : t->sort;
	if (key == 'q' || key == 3)
		ended = 1;
	else if (key == ' ')
		t->paused = !t->paused;
	else if (key == '?')
		t->help = !t->help;
	else if (key == '+' && t->interval < MAX_INTERVAL)
		t->interval *= 2;
	else if (key == '-' && t->interval > MIN_INTERVAL)
		t->interval /= 2;
}

/* Until it is time for the next snapshot, or a key was pressed. */
static void wait_for_key(struct top *t, int64_t until)
{
	struct pollfd keyboard = {.fd = STDIN_FILENO, .events = POLLIN};
	int64_t left = until - kv_ctl_now();
	char key;

	if (poll(&keyboard, 1, left > 0 ? (int)(left / KV_MSEC) + 1 : 0) <= 0)
		return;
	if (read(STDIN_FILENO, &key, 1) == 1)
		take_key(t, key);
	else
		ended = 1;
}

static int run_screen(struct top *t)
{
	struct termios before, raw;
	int64_t next;

	if (tcgetattr(STDIN_FILENO, &before) < 0)
		return kv_ctl_refuse(t->ctl, KV_EXIT_FAILED, "top: standard input is no terminal; give a COUNT");
	raw = before;
	raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
	tcsetattr(STDIN_FILENO, TCSANOW, &raw);
	fputs("\033[?1049h\033[?25l\033[2J", t->ctl->emit.out);
	for (next = kv_ctl_now(); !ended;) {
		bool there = true;
		char *text;

		if (!t->paused && kv_ctl_now() >= next) {
			there = look(t);
			next = kv_ctl_now() + t->interval;
		}
		text = there ? render(t) : NULL;
		paint(text ? text : "no daemon; waiting for it (q quits)\n", t->ctl->emit.out);
		free(text);
		wait_for_key(t, t->paused ? kv_ctl_now() + KV_SEC : next);
	}
	fputs("\033[?25h\033[?1049l", t->ctl->emit.out);
	fflush(t->ctl->emit.out);
	tcsetattr(STDIN_FILENO, TCSANOW, &before);
	return KV_EXIT_DONE;
}

static int run_lines(struct top *t, uint64_t count)
{
	for (uint64_t i = 0; i < count && !ended; i++) {
		struct timespec pause = {.tv_sec = t->interval / KV_SEC, .tv_nsec = t->interval % KV_SEC};
		char *text;

		if (i)
			nanosleep(&pause, NULL);
		if (!look(t))
			return kv_ctl_refuse(t->ctl, KV_EXIT_NO_DAEMON, "%s", kv_error_text());
		text = render(t);
		fprintf(t->ctl->emit.out, "%s%s", i ? "\n" : "", text ? text : "");
		fflush(t->ctl->emit.out);
		free(text);
	}
	return KV_EXIT_DONE;
}

int kv_cmd_top(struct kv_ctl *ctl, int argc, char **argv)
{
	struct top t = {.ctl = ctl, .interval = ctl->watch_ns ? ctl->watch_ns : KV_SEC};
	bool screen = argc < 2 && isatty(fileno(ctl->emit.out));
	uint64_t count = UINT64_MAX;
	int status = kv_ctl_connect(ctl);

	if (status)
		return status;
	if (ctl->emit.json)
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
				     "top is for people; kvctl --json --watch SECONDS stats is for programs");
	if (argc > 1 && (kv_ctl_u64(argv[1], &count) < 0 || !count))
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "COUNT: '%s' given, a number from 1 is needed",
				     argv[1]);
	signal(SIGINT, on_signal);
	signal(SIGTERM, on_signal);
	status = screen ? run_screen(&t) : run_lines(&t, count);
	kv_snapshot_deinit(&t.now);
	kv_snapshot_deinit(&t.before);
	return status;
}
