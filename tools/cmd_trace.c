/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvctl trace record FILE: requests of live clients, for capacity studies. While it runs, libkvclient tells the
 * daemon of each request that ends (libclient/trace.c), and this fetches them. kvctl trace replay FILE: kvbench replays
 * such a file against caches of given sizes.
 */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "include/internal/cleanup.h"
#include "libclient/internal.h"
#include "tools/kvctl.h"
#include "tools/progress.h"
#include "tools/trace_file.h"

#define LOOK_AGAIN (100 * KV_MSEC)
#define ANSWER	   (5 * KV_SEC)
#define MOST_SIZES 64

const struct option kv_trace_options[] = {{"pool", required_argument, NULL, 'p'},
					  {"for", required_argument, NULL, 'f'},
					  {"count", required_argument, NULL, 'n'},
					  {"json", no_argument, NULL, 'j'},
					  {NULL}};
const struct option kv_replay_options[] = {{"capacity", required_argument, NULL, 'c'},
					   {"pool", required_argument, NULL, 'p'},
					   {"engines", required_argument, NULL, 'e'},
					   {"json", no_argument, NULL, 'j'},
					   {NULL}};

static volatile sig_atomic_t interrupted;

static void on_signal(int number)
{
	(void)number;
	interrupted = 1;
}

struct words {
	const char *file, *pool, *capacity, *engines;
	double seconds;
	uint64_t count;
};

static int parse(struct kv_ctl *ctl, const char *command, const struct option *own, int argc, char **argv,
		 struct words *w)
{
	char *end;
	int c;

	optind = 0;
	opterr = 0;
	while ((c = getopt_long(argc, argv, "-:j", own, NULL)) != -1) {
		if (c == ':')
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "option '%s' needs a value", argv[optind - 1]);
		if (c == '?' || (c == 1 && w->file))
			return kv_ctl_unknown(ctl, argv[optind - 1], own);
		if (c == 1)
			w->file = optarg;
		else if (c == 'p')
			w->pool = optarg;
		else if (c == 'c')
			w->capacity = optarg;
		else if (c == 'e')
			w->engines = optarg;
		else if (c == 'f') {
			w->seconds = strtod(optarg, &end);
			if (end == optarg || *end || !(w->seconds > 0 && w->seconds <= 1e6))
				return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
						     "--for: '%s' given, seconds above 0 up to 1000000 expected", optarg);
		} else if (c == 'n' && (kv_ctl_u64(optarg, &w->count) < 0 || !w->count)) {
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "--count: '%s' given, a number from 1 expected", optarg);
		}
	}
	return w->file ? KV_EXIT_DONE : kv_ctl_refuse(ctl, KV_EXIT_USAGE, "usage: kvctl trace %s FILE ...", command);
}

/* ---- record ---- */

struct recorder {
	struct kv_ctl *ctl;
	const struct words *words;
	struct kv_recording recording;
	uint64_t salt, n_lost, n_restarts;
	struct kv_msg_trace_part *part; /* [KV_WIRE_MAX] */
};

static int fetch(struct recorder *r)
{
	const char *pool = r->words->pool ? r->words->pool : "";
	int e;

	do {
		e = kv_trace_next(r->ctl->client, r->part, ANSWER);
		/* Another worker, which doesn't know of it. */
		if (e == -ENOENT) {
			r->n_restarts++;
			r->n_lost = 0;
			e = kv_trace_start(r->ctl->client, pool, r->salt, ANSWER);
			return e;
		}
		if (e < 0)
			return e;
		r->recording.n_lost += r->part->n_lost - r->n_lost;
		r->n_lost = r->part->n_lost;
		e = kv_recording_add(&r->recording, r->part);
		if (e < 0)
			return kv_error(e, "daemon: recorded requests that make no sense: %s", strerror(-e));
	} while (r->part->more);
	return 0;
}

static int record(struct recorder *r, int64_t start)
{
	const struct words *w = r->words;
	struct timespec pause = {.tv_nsec = LOOK_AGAIN};
	int64_t end = w->seconds > 0 ? start + (int64_t)(w->seconds * KV_SEC) : INT64_MAX;
	struct kv_progress progress;
	bool last = false;
	int e = 0;

	kv_progress_init(&progress, r->ctl->emit.json);

	/* Once more when it is over: what ended just before. */
	while (!e && !last) {
		last = interrupted || kv_ctl_now() >= end || (w->count && r->recording.n >= w->count);
		e = fetch(r);
		kv_progress_show(&progress, r->recording.n, w->count, "requests recorded");
		if (!e && !last)
			nanosleep(&pause, NULL);
	}
	kv_progress_end(&progress);
	return e;
}

static void show(struct kv_emit *e, const struct recorder *r, double seconds)
{
	const struct kv_recording *x = &r->recording;

	kv_emit_open(e, NULL, '{');
	kv_emit_text(e, "file", r->words->file);
	kv_emit_real(e, "seconds", seconds);
	kv_emit_number(e, "requests", x->n);
	kv_emit_number(e, "lost", x->n_lost);
	kv_emit_number(e, "worker_restarts", r->n_restarts);
	kv_emit_number(e, "input_tokens", x->n_input);
	kv_emit_number(e, "hit_tokens", x->n_hit);
	kv_emit_number(e, "output_tokens", x->n_output);
	kv_emit_close(e);
	kv_emit_line(e, "%zu requests in %s: %" PRIu64 " tokens looked up, %s found; %" PRIu64 " generated", x->n,
		     kv_words_time((uint64_t)(seconds * KV_SEC)).text, x->n_input,
		     kv_words_share(x->n_hit, x->n_input).text, x->n_output);
	if (x->n_lost)
		kv_emit_line(e, "%" PRIu64 " more were lost: too long, or too many at a time", x->n_lost);
	if (r->n_restarts)
		kv_emit_line(e, "%" PRIu64 " times a worker ended: what it had not handed on is lost", r->n_restarts);
}

int kv_cmd_trace_record(struct kv_ctl *ctl, int argc, char **argv)
{
	struct sigaction action = {.sa_handler = on_signal};
	kv_cleanup(kv_freep) struct kv_msg_trace_part *part = malloc(KV_WIRE_MAX);
	struct words w = {0};
	struct recorder r = {.ctl = ctl, .words = &w, .part = part};
	int64_t start;
	int e, status = parse(ctl, "record", kv_trace_options, argc, argv, &w);

	if (status)
		return status;
	if (!part)
		return kv_ctl_refuse(ctl, KV_EXIT_FAILED, "no memory");
	status = kv_ctl_connect(ctl);
	if (status)
		return status;
	if (getrandom(&r.salt, sizeof(r.salt), 0) != sizeof(r.salt))
		return kv_ctl_refuse(ctl, KV_EXIT_FAILED, "getrandom: %s", strerror(errno));
	r.salt |= 1;
	e = kv_trace_start(ctl->client, w.pool ? w.pool : "", r.salt, kv_ctl_left(ctl));
	if (e < 0)
		return kv_ctl_broken(ctl, e);
	sigaction(SIGINT, &action, NULL);
	sigaction(SIGTERM, &action, NULL);
	if (!ctl->emit.json && !w.seconds && !w.count)
		fprintf(stderr, "recording requests; interrupt (^C) to write %s\n", w.file);
	start = kv_ctl_now();
	e = record(&r, start);
	if (e < 0)
		status = kv_ctl_broken(ctl, e); /* and what there is, is written */
	e = kv_recording_write(&r.recording, w.file, start);
	if (e < 0)
		status = kv_ctl_refuse(ctl, KV_EXIT_FAILED, "%s: %s", w.file, strerror(-e));
	else if (strcmp(w.file, "-"))
		show(&ctl->emit, &r, (double)(kv_ctl_now() - start) / KV_SEC);
	kv_recording_deinit(&r.recording);
	return status;
}

/* ---- replay ---- */

/* "10G,20G" of a pool's bytes to blocks of a trace. */
static int to_blocks(struct kv_ctl *ctl, const struct words *w, char *ret, size_t size)
{
	kv_cleanup(kv_freep) struct kv_pool_stats *pools = NULL;
	size_t n = 0, used = 0, i = 0;
	int status = kv_ctl_ask(ctl, KV_STAT_POOL, &pools, &n);

	while (!status && i < n && strcmp(pools[i].name, w->pool))
		i++;
	if (!status && i == n)
		return kv_ctl_no_pool(ctl, "--pool: ", w->pool, pools, n);
	for (const char *at = w->capacity; !status && at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
		uint64_t bytes, blocks;
		char word[32];

		snprintf(word, sizeof(word), "%.*s", (int)strcspn(at, ","), at);
		if (kv_ctl_size(word, &bytes) < 0)
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "--capacity: '%s' given, a size like 20G expected", word);
		blocks = bytes / pools[i].block_bytes * pools[i].block_tokens / KV_TRACE_TOKENS;
		if (!blocks || used + 16 > size)
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "--capacity: '%s' given; one block of %u tokens takes %s in '%s'",
					     word, KV_TRACE_TOKENS,
					     kv_words_bytes(pools[i].block_bytes * KV_TRACE_TOKENS / pools[i].block_tokens).text,
					     w->pool);
		used += (size_t)snprintf(ret + used, size - used, "%s%" PRIu64, used ? "," : "", blocks);
	}
	return status;
}

int kv_cmd_trace_replay(struct kv_ctl *ctl, int argc, char **argv)
{
	char blocks[16 * MOST_SIZES];
	struct words w = {0};
	int status = parse(ctl, "replay", kv_replay_options, argc, argv, &w);
	char *args[7];

	if (status)
		return status;
	if (!w.capacity)
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
				     "usage: kvctl trace replay FILE --capacity N[,N...] (blocks of %u tokens; with "
				     "--pool NAME sizes like 20G) [--engines N]", KV_TRACE_TOKENS);
	if (w.pool) {
		status = to_blocks(ctl, &w, blocks, sizeof(blocks));
		if (status)
			return status;
	}
	args[0] = "replay";
	args[1] = (char *)w.file;
	args[2] = "--capacity";
	args[3] = w.pool ? blocks : (char *)w.capacity;
	args[4] = "--engines";
	args[5] = w.engines ? (char *)w.engines : "1";
	return kv_ctl_kvbench_alone(ctl, 6, args);
}
