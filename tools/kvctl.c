/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvctl [-s SOCKET] [--json] OBJECT COMMAND [ARG...]: ask a running kvcached, or tell it something.
 *
 * This file has the table of commands, from which help and checks of usage come, the options, and
 * what commands share. Every answer of the daemon has one deadline, that of the whole command.
 */
#include <assert.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <kvcached/client.h>

#include "include/internal/nearest.h"
#include "include/internal/paths.h"
#include "tools/kvctl.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
#define MAX_TIMEOUT_S 3600

static const struct kv_command commands[] = {
	{"stats", NULL, "", "the daemon, its devices, pools and sessions on one screen",
	 kv_cmd_stats},
	{"top", NULL, "[COUNT]", "what goes on, again and again; keys: ? in it says which", kv_cmd_top},
	{"pool", "list", "", "all pools: what they are, hold and hit", kv_cmd_pool_list},
	{"pool", "show", "NAME", "everything about one pool, and who is attached",
	 kv_cmd_pool_show},
	{"pool", "set", "NAME ...", "change its limits: --min SIZE, --max SIZE, --weight N",
	 kv_cmd_pool_set, kv_limit_options},
	{"pool", "compact", "NAME ...", "move what is cached together: [RATE] bytes a second, [--wait] until it is over",
	 kv_cmd_pool_compact, kv_compact_options},
	{"pool", "drop", "NAME", "evict what nobody holds; without sessions, remove the pool",
	 kv_cmd_pool_drop},
	{"pool", "epoch", "NAME", "the weights have changed: nothing cached so far is found any more",
	 kv_cmd_pool_epoch},
	{"session", "list", "", "all sessions: who they are and what they hold",
	 kv_cmd_session_list},
	{"session", "show", "ID", "everything about one session", kv_cmd_session_show},
	{"block", "show", "ID ...", "what a block is, who has it, whose tokens are in it: [--pool NAME]",
	 kv_cmd_block_show, kv_block_options},
	{"prefix", "show", "...", "what of some tokens, or of a text, is cached, and who holds it",
	 kv_cmd_prefix_show, kv_prefix_options},
	{"trace", "record", "FILE ...", "requests of live clients, until interrupted: [--pool NAME] [--for SECONDS] [--count N]",
	 kv_cmd_trace_record, kv_trace_options},
	{"trace", "replay", "FILE ...", "share of a trace that caches of some sizes find: --capacity LIST",
	 kv_cmd_trace_replay, kv_replay_options},
	{"plan", NULL, "...", "what a model's cache costs and how much fits; asks no daemon",
	 kv_cmd_plan, kv_plan_long_options},
	{"check", NULL, "", "let the daemon prove its books; exit status 1 if they don't balance",
	 kv_cmd_check},
	{"doctor", NULL, "[PROBE...]", "what this machine lacks, and what to change; needs no daemon; 'doctor help': its probes",
	 kv_cmd_doctor},
	{"restart-worker", NULL, "...", "another worker takes over: [--binary PATH], a newer program",
	 kv_cmd_restart, kv_restart_options},
	{"report", NULL, "FILE", "an HTML page with plots of the last hours", kv_cmd_report},
	{"bench", NULL, "...", "kvbench on this daemon: BENCHMARK [OPTION...]", kv_cmd_bench},
	{"completion", NULL, "...", "what makes a shell complete kvctl: bash, zsh or fish",
	 kv_cmd_completion},
	{"ping", NULL, "[COUNT]", "time round trips to the daemon", kv_cmd_ping},
};

static const struct option options[] = {
	{"socket", required_argument, NULL, 's'},  {"json", no_argument, NULL, 'j'},
	{"timeout", required_argument, NULL, 't'}, {"help", no_argument, NULL, 'h'},
	{"watch", required_argument, NULL, 'w'},
	{"version", no_argument, NULL, 'V'},	   {NULL},
};

static const char options_help[] =
	"Options:\n"
	"  -s, --socket PATH      the daemon's socket; default: $KVCACHED_SOCKET, else\n"
	"                         " KV_SOCKET_ROOT " for root, else\n"
	"                         $XDG_RUNTIME_DIR/" KV_SOCKET_NAME "\n"
	"  -j, --json             answers and errors as JSON, with exact numbers\n"
	"  -t, --timeout SECONDS  give up after that long (default 5)\n"
	"  -w, --watch SECONDS    again and again, so long apart, until interrupted\n"
	"  -h, --help             this text; behind an object, its commands\n"
	"  -V, --version          version of kvctl\n"
	"\n"
	"Exit status: 0 done, 1 refused or failed, 2 wrong usage, 3 no daemon, 4 warnings of doctor.\n";

const struct kv_command *kv_ctl_commands(size_t *ret_n)
{
	*ret_n = ARRAY_SIZE(commands);
	return commands;
}

const struct option *kv_ctl_options(void)
{
	return options;
}

int64_t kv_ctl_now(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * KV_SEC + now.tv_nsec;
}

int64_t kv_ctl_left(const struct kv_ctl *ctl)
{
	int64_t left = ctl->deadline - kv_ctl_now();

	return left > 1 ? left : 1;
}

int kv_ctl_refuse(struct kv_ctl *ctl, enum kv_exit status, const char *format, ...)
{
	struct kv_emit words;
	char text[512];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	kv_emit_init(&words, stderr, ctl->emit.json);
	kv_emit_open(&words, NULL, '{');
	kv_emit_text(&words, "error", text);
	kv_emit_number(&words, "exit", status);
	kv_emit_close(&words);
	kv_emit_line(&words, "kvctl: %s", text);
	return status;
}

int kv_ctl_unknown(struct kv_ctl *ctl, const char *word, const struct option *own)
{
	const char *nearest = kv_nearest_option(word, own);

	if (!nearest)
		nearest = kv_nearest_option(word, options);
	if (nearest)
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "option '%s' isn't known; the nearest is '--%s' (see kvctl --help)",
				     word, nearest);
	return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "option '%s' isn't known (see kvctl --help)", word);
}

/* What to do about a daemon that isn't reached: doctor tries it step by step. */
static int not_reached(struct kv_ctl *ctl, enum kv_exit status)
{
	bool given = ctl->socket && ctl->socket != ctl->default_socket;

	return kv_ctl_refuse(ctl, status, "%s; what to do: kvctl%s%s doctor socket daemon", kv_error_text(),
			     given ? " -s " : "", given ? ctl->socket : "");
}

int kv_ctl_broken(struct kv_ctl *ctl, int r)
{
	assert(r < 0);
	if (r == -ETIMEDOUT)
		return not_reached(ctl, KV_EXIT_FAILED);
	return kv_ctl_refuse(ctl, r == -ECONNRESET ? KV_EXIT_NO_DAEMON : KV_EXIT_FAILED, "%s",
			     kv_error_text());
}

int kv_ctl_connect(struct kv_ctl *ctl)
{
	KV_OPTIONS(kv_connect_options, how, .name = "kvctl", .timeout = kv_ctl_left(ctl));
	int r;

	if (ctl->client)
		return KV_EXIT_DONE;
	if (!ctl->socket) {
		/* The library looks at the same places; here it is for the answer to say which. */
		if (kv_find_socket(ctl->default_socket) < 0)
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
					     "no socket is known: $" KV_SOCKET_ENV
					     " and $XDG_RUNTIME_DIR aren't set; give -s SOCKET");
		ctl->socket = ctl->default_socket;
	}
	how.socket = ctl->socket;
	r = kv_connect(&how, &ctl->client);
	if (r == -ENOENT || r == -ECONNREFUSED)
		return not_reached(ctl, KV_EXIT_NO_DAEMON);
	if (r == -EACCES || r == -EPROTOTYPE || r == -EPROTO)
		return not_reached(ctl, KV_EXIT_FAILED);
	return r < 0 ? kv_ctl_broken(ctl, r) : KV_EXIT_DONE;
}

int kv_ctl_ask(struct kv_ctl *ctl, enum kv_stat_kind kind, void *ret_items, size_t *ret_n)
{
	int status = kv_ctl_connect(ctl);
	int r;

	if (status)
		return status;
	r = kv_stats(ctl->client, kind, ret_items, ret_n, kv_ctl_left(ctl));
	return r < 0 ? kv_ctl_broken(ctl, r) : KV_EXIT_DONE;
}

int kv_ctl_u64(const char *text, uint64_t *ret)
{
	unsigned long long number;
	char *end;

	/* strtoull() would take blanks and signs. */
	if (*text < '0' || *text > '9')
		return -EINVAL;
	errno = 0;
	number = strtoull(text, &end, 10);
	if (errno || *end)
		return -EINVAL;
	*ret = number;
	return 0;
}

int kv_ctl_size(const char *text, uint64_t *ret)
{
	static const char units[] = "KMGT";
	char *end;
	uint64_t n;

	errno = 0;
	n = strtoull(text, &end, 10);
	if (end == text || errno || *text == '-')
		return -EINVAL;
	if (*end) {
		const char *unit = strchr(units, *end & ~0x20);

		if (!unit || (end[1] && strcmp(end + 1, "iB") && strcmp(end + 1, "B")))
			return -EINVAL;
		for (const char *u = units; u <= unit; u++)
			if (__builtin_mul_overflow(n, (uint64_t)1024, &n))
				return -EINVAL;
	}
	*ret = n;
	return 0;
}

static bool takes_all(const struct kv_command *c)
{
	const char *dots = strstr(c->args, "...");

	return dots && dots[3] != ']';
}

static bool takes_its_own(const char *object, const char *command)
{
	for (const struct kv_command *c = commands; c < commands + ARRAY_SIZE(commands); c++) {
		if (!strcmp(object, c->object) && c->command && !strcmp(command, c->command))
			return takes_all(c);
	}
	return false;
}

static void count_args(const struct kv_command *c, int *ret_min, int *ret_max)
{
	*ret_min = *ret_max = 0;
	for (const char *word = c->args; *word; word += strspn(word, " ")) {
		size_t n = strcspn(word, " ");

		*ret_min += *word != '[';
		*ret_max = n > 4 && !strncmp(word + n - 4, "...]", 4) ? INT_MAX : *ret_max + 1;
		word += n;
	}
}

static int usage_of(char *ret, size_t size, const struct kv_command *c)
{
	return snprintf(ret, size, "%s%s%s%s%s", c->object, c->command ? " " : "",
			c->command ? c->command : "", *c->args ? " " : "", c->args);
}

/* @object: NULL for all */
static void print_help(struct kv_ctl *ctl, const char *object)
{
	char usage[64];

	fprintf(ctl->emit.out, "Usage: kvctl [OPTION...] OBJECT COMMAND [ARG...]\n\nCommands:\n");
	for (const struct kv_command *c = commands; c < commands + ARRAY_SIZE(commands); c++) {
		if (object && strcmp(object, c->object))
			continue;
		usage_of(usage, sizeof(usage), c);
		fprintf(ctl->emit.out, "  %-17s  %s\n", usage, c->help);
		for (const struct option *o = object ? c->own : NULL; o && o->name; o++) {
			if (strcmp(o->name, "json"))
				fprintf(ctl->emit.out, "      --%s%s\n", o->name, o->has_arg ? " ..." : "");
		}
	}
	fprintf(ctl->emit.out, "\n%s", options_help);
}

/* How far the typed words are from a command, also if they were exchanged. @second may be "". */
static unsigned words_distance(const char *first, const char *second, const struct kv_command *c)
{
	const char *command = c->command && *second ? c->command : "";
	unsigned straight = kv_word_distance(first, c->object) + (*command ? kv_word_distance(second, command) : 0);
	unsigned swapped =
		*command ? kv_word_distance(second, c->object) + kv_word_distance(first, command) + 1 : straight;

	return straight < swapped ? straight : swapped;
}

static int suggest(struct kv_ctl *ctl, const char *what, const char *first, const char *second)
{
	const struct kv_command *nearest = commands;
	char usage[64];

	for (const struct kv_command *c = commands; c < commands + ARRAY_SIZE(commands); c++) {
		if (words_distance(first, second, c) < words_distance(first, second, nearest))
			nearest = c;
	}
	usage_of(usage, sizeof(usage), nearest);
	return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
			     "%s; the nearest command is 'kvctl %s' (see kvctl --help)", what,
			     usage);
}

/* No row fits: say what is wrong, and what comes nearest. */
static int refuse_words(struct kv_ctl *ctl, const char *object, const char *command)
{
	char what[256];
	size_t n = 0;

	for (const struct kv_command *c = commands; c < commands + ARRAY_SIZE(commands); c++) {
		if (c->command && !strcmp(object, c->object) && n < sizeof(what))
			n += snprintf(what + n, sizeof(what) - n, "%s%s", n ? ", " : "",
				      c->command);
	}
	if (n && !command)
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "'%s' needs a command: %s", object, what);
	if (n)
		snprintf(what, sizeof(what), "'%s' has no command '%.64s'", object, command);
	else
		snprintf(what, sizeof(what), "no object is called '%.64s'", object);
	return suggest(ctl, what, object, command ? command : "");
}

static int parse_timeout(struct kv_ctl *ctl, const char *text)
{
	char *end;
	double seconds = strtod(text, &end);

	if (end == text || *end || !(seconds > 0 && seconds <= MAX_TIMEOUT_S))
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
				     "--timeout: '%s' given, seconds above 0 up to %d expected",
				     text, MAX_TIMEOUT_S);
	ctl->limit_ns = (int64_t)(seconds * KV_SEC);
	ctl->deadline = kv_ctl_now() + ctl->limit_ns;
	return KV_EXIT_DONE;
}

static int parse_watch(struct kv_ctl *ctl, const char *text)
{
	char *end;
	double seconds = strtod(text, &end);

	if (end == text || *end || !(seconds >= 0.1 && seconds <= MAX_TIMEOUT_S))
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
				     "--watch: '%s' given, seconds from 0.1 to %d expected", text,
				     MAX_TIMEOUT_S);
	ctl->watch_ns = (int64_t)(seconds * KV_SEC);
	return KV_EXIT_DONE;
}

/*
 * Options from argv[1] on; optind is then the first word that is none.
 * @mode: "+": stop at the first word; "": go through all and move the words behind the options
 * @ret_letter: 'h' or 'V' if that was asked for
 */
static int parse_options(struct kv_ctl *ctl, int argc, char **argv, const char *mode,
			 int *ret_letter)
{
	char letters[16];
	int letter, status;

	snprintf(letters, sizeof(letters), "%s:s:jt:w:hV", mode);
	optind = 0; /* starts anew, with another mode */
	opterr = 0;
	while ((letter = getopt_long(argc, argv, letters, options, NULL)) != -1) {
		switch (letter) {
		case 's':
			ctl->socket = optarg;
			break;
		case 'j':
			ctl->emit.json = true;
			break;
		case 't':
			status = parse_timeout(ctl, optarg);
			if (status)
				return status;
			break;
		case 'w':
			status = parse_watch(ctl, optarg);
			if (status)
				return status;
			break;
		case 'h':
		case 'V':
			*ret_letter = letter;
			break;
		case ':':
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "option '%s' needs a value",
					     argv[optind - 1]);
		default:
			/* A letter may stand inside a word: optopt knows it, argv[optind - 1] not.
			 */
			if (optopt && strchr(letters, optopt))
				return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
						     "option '%s' takes no value",
						     argv[optind - 1]);
			if (optopt)
				return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
						     "option '-%c' isn't known (see kvctl --help)",
						     optopt);
			return kv_ctl_unknown(ctl, argv[optind - 1], options);
		}
	}
	return KV_EXIT_DONE;
}

/* Once, or with --watch until it fails or is interrupted; top does that by itself. */
static int run_again(struct kv_ctl *ctl, const struct kv_command *c, int argc, char **argv)
{
	bool screen = ctl->watch_ns && !ctl->emit.json && isatty(fileno(ctl->emit.out));
	struct timespec pause = {.tv_sec = ctl->watch_ns / KV_SEC, .tv_nsec = ctl->watch_ns % KV_SEC};
	int64_t limit = ctl->deadline - kv_ctl_now();
	int status;

	if (!ctl->watch_ns || c->run == kv_cmd_top)
		return c->run(ctl, argc, argv);
	ctl->emit.one_line = true;
	for (;;) {
		if (screen)
			fputs("\033[H\033[J", ctl->emit.out);
		ctl->deadline = kv_ctl_now() + limit;
		status = c->run(ctl, argc, argv);
		if (status || kv_emit_end(&ctl->emit) < 0)
			return status;
		nanosleep(&pause, NULL);
		if (!screen)
			kv_emit_gap(&ctl->emit);
	}
}

/* @argv: from the object on; options have been taken out unless the command takes all */
static int run_command(struct kv_ctl *ctl, int argc, char **argv)
{
	char usage[64];
	int min, max, n_args;

	for (const struct kv_command *c = commands; c < commands + ARRAY_SIZE(commands); c++) {
		int n_words = c->command ? 2 : 1;

		if (strcmp(argv[0], c->object) ||
		    (c->command && (argc < 2 || strcmp(argv[1], c->command))))
			continue;
		count_args(c, &min, &max);
		n_args = argc - n_words;
		usage_of(usage, sizeof(usage), c);
		if (!takes_all(c) && (n_args < min || n_args > max))
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "usage: kvctl %s", usage);
		return run_again(ctl, c, n_args + 1, argv + n_words - 1);
	}
	return refuse_words(ctl, argv[0], argc > 1 ? argv[1] : NULL);
}

static int run(struct kv_ctl *ctl, int argc, char **argv)
{
	const char *object;
	int letter = 0, status;

	status = parse_options(ctl, argc, argv, "+", &letter);
	if (status)
		return status;
	argc -= optind;
	argv += optind;
	object = argc > 0 ? argv[0] : NULL;

	/* Help is help wherever it is asked for, also where a command takes all words. */
	for (int i = 1; object && i < argc && strcmp(argv[i], "--"); i++) {
		if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h"))
			letter = 'h';
	}

	/* Options may also stand behind the words, except where a command has its own. */
	for (const struct kv_command *c = commands;
	     object && letter != 'h' && c < commands + ARRAY_SIZE(commands); c++) {
		if (strcmp(object, c->object) || takes_all(c))
			continue;
		if (argc > 1 && takes_its_own(object, argv[1]))
			break;
		status = parse_options(ctl, argc, argv, "", &letter);
		if (status)
			return status;
		/* The words now stand at the end: put the object right before them. */
		argc -= optind - 1;
		argv += optind - 1;
		argv[0] = (char *)object;
		break;
	}
	if (letter == 'V') {
		fprintf(ctl->emit.out, "kvctl %s\n", kv_version());
		return KV_EXIT_DONE;
	}
	if (letter == 'h') {
		print_help(ctl, object);
		return KV_EXIT_DONE;
	}
	if (!object) {
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
				     "nothing to do: kvctl [OPTION...] OBJECT COMMAND [ARG...]"
				     " (see kvctl --help)");
	}
	return run_command(ctl, argc, argv);
}

int main(int argc, char **argv)
{
	struct kv_ctl ctl = {.deadline = kv_ctl_now() + 5 * KV_SEC};
	bool json = false;
	int status;

	/* Looked for first, so that a wrong option before it is refused in JSON as well. */
	for (int i = 1; i < argc && strcmp(argv[i], "--"); i++)
		json |= !strcmp(argv[i], "--json") || !strcmp(argv[i], "-j");
	kv_emit_init(&ctl.emit, stdout, json);
	status = run(&ctl, argc, argv);
	kv_disconnect(ctl.client);
	if (kv_emit_end(&ctl.emit) < 0)
		return kv_ctl_refuse(&ctl, KV_EXIT_FAILED, "stdout: the answer can't be written");
	return status;
}
