/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvcached: the command line, for each of its processes: the keeper (keeper.h), which people start,
 * the worker (daemon.h) and movers (mover.h).
 */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "daemon/daemon.h"
#include "daemon/keeper.h"
#include "daemon/log.h"
#include "daemon/service.h"
#include "include/internal/error.h"
#include "include/internal/nearest.h"
#include "include/internal/paths.h"

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

static const char help[] =
	"usage: kvcached [--gpus 0,1 | --host SIZE] [OPTION...]\n"
	"Owns the KV cache memory of this machine and leases it to inference processes.\n"
	"\n"
	"  --gpus LIST          GPUs to own memory on, by the driver's numbers; default 0\n"
	"  --host SIZE          host memory instead of GPUs\n"
	"  --reserve SHARE|SIZE of each GPU: 0.9 of its free memory (the default), or 80G\n"
	"  --export KIND        auto, vmm or ipc: how clients map GPU memory; default auto\n"
	"  --pool NAME=CONFIG[,KEY=VALUE...]\n"
	"                       make a pool of a model before clients come; CONFIG is a\n"
	"                       config.json or a .gguf file; KEY is min, max (sizes), gpus\n"
	"                       (0+1), model, revision, or an option of kvctl plan: tp,\n"
	"                       block-size, kv-dtype, layout, ...; may be repeated\n"
	"  --granule SIZE       vmm: size of one handle; default: one for the whole arena\n"
	"  --isolate            clients can map memory of their own pool only, in granules\n"
	"                       of --granule (a power of two; default 64M to 256M)\n"
	"  --socket PATH        where to listen; default $KVCACHED_SOCKET, else\n"
	"                       /run/kvcached/kvcached.sock for root, else\n"
	"                       $XDG_RUNTIME_DIR/kvcached.sock\n"
	"  --socket-mode MODE   permissions of the socket, octal; default 0660\n"
	"  --socket-group GROUP group of the socket, a name or number; default: kvcached's\n"
	"  --access FILE        which users and groups may open, read or administer which\n"
	"                       pools; default: all may open, who made a pool may change it\n"
	"  --event-loop KIND    auto, io_uring or epoll; default auto\n"
	"  --policy NAME        worth (learns it) or lru: which cached blocks go first;\n"
	"                       default worth\n"
	"  --events ENDPOINT[,replay=ENDPOINT][,encoding=current|legacy]\n"
	"                       tell routers over ZMQ what engines can find, as on\n"
	"                       tcp://*:5557; default: nobody\n"
	"  --metrics ADDRESS    serve metrics over HTTP there, as on 127.0.0.1:9400;\n"
	"                       default: nowhere\n"
	"  --max-clients N      connections at a time; default 1024\n"
	"  --user-clients N, --user-sessions N, --user-pools N, --user-blocks N\n"
	"                       what one user may have at a time; default 768, 512, 128, 0;\n"
	"                       0 is no limit\n"
	"  --user-messages N    of one user that are read in a second; default 100000\n"
	"  --log-level LEVEL    debug, info, warn or error; default info\n"
	"  --help, --version\n"
	"\n"
	"Sizes are bytes, or take K, M, G (powers of 1024).\n";

int kv_size_parse(const char *what, const char *text, uint64_t *ret)
{
	char *end;
	unsigned long long n;
	int shift = 0;

	errno = 0;
	n = strtoull(text, &end, 10);
	if (*end == 'K' || *end == 'k')
		shift = 10;
	else if (*end == 'M' || *end == 'm')
		shift = 20;
	else if (*end == 'G' || *end == 'g')
		shift = 30;
	else if (*end == 'T' || *end == 't')
		shift = 40;
	end += shift != 0;
	if (errno || end == text || *end || text[0] == '-' || !n || n > UINT64_MAX >> shift)
		return kv_error(-EINVAL, "%s: '%s' is not a size; like 4G, 512M or 1048576", what,
				text);
	*ret = (uint64_t)n << shift;
	return 0;
}

static int parse_number(const char *option, const char *text, int base, unsigned long max,
			unsigned long *ret)
{
	char *end;

	errno = 0;
	*ret = strtoul(text, &end, base);
	if (errno || end == text || *end || text[0] == '-' || *ret > max)
		return kv_error(-EINVAL, "%s: '%s' given; a number up to %lu is needed", option, text,
				max);
	return 0;
}

static int parse_gpus(const char *text, struct kv_config *c)
{
	const char *p = text;

	c->n_gpus = 0;
	do {
		char *end;
		unsigned long n = strtoul(p, &end, 10);

		if (end == p || (*end && *end != ',') || n > 1024 || c->n_gpus == KV_MAX_GPUS)
			return kv_error(-EINVAL, "--gpus: '%s' given; numbers like 0,1 are needed, at "
					"most %d", text, KV_MAX_GPUS);
		for (uint32_t i = 0; i < c->n_gpus; i++) {
			if (c->gpus[i] == (int)n)
				return kv_error(-EINVAL, "--gpus: %lu is named twice", n);
		}
		c->gpus[c->n_gpus++] = (int)n;
		p = end + (*end == ',');
		if (*end == ',' && !*p)
			return kv_error(-EINVAL, "--gpus: '%s' ends with a comma", text);
	} while (*p);
	return 0;
}

static int parse_reserve(const char *text, struct kv_config *c)
{
	char *end;
	double share = strtod(text, &end);

	if (end != text && !*end && share > 0 && share < 1) {
		c->reserve_share = share;
		c->reserve_bytes = 0;
		return 0;
	}
	if (kv_size_parse("--reserve", text, &c->reserve_bytes) < 0)
		return kv_error(-EINVAL, "--reserve: '%s' given; a share below 1 like 0.9, or a size "
				"like 80G, is needed", text);
	return 0;
}

static int parse_export(const char *text, struct kv_config *c)
{
	c->export_kind = !strcmp(text, "vmm") ? KV_EXPORT_VMM :
			 !strcmp(text, "ipc") ? KV_EXPORT_IPC : 0;
	if (!c->export_kind && strcmp(text, "auto"))
		return kv_error(-EINVAL, "--export: '%s' given; auto, vmm or ipc is needed", text);
	return 0;
}

static int parse_policy(const char *text, struct kv_config *c)
{
	for (const struct kv_policy *const *p = kv_policies; *p; p++) {
		if (!strcmp((*p)->name, text)) {
			c->policy = *p;
			return 0;
		}
	}
	return kv_error(-EINVAL, "--policy: '%s' given; worth or lru is needed", text);
}

enum option_id { GPUS = 256, HOST, RESERVE, POOL, EXPORT, GRANULE, ISOLATE, ACCESS, SOCKET, SOCKET_MODE, SOCKET_GROUP, EVENT_LOOP,
		 POLICY, MAX_CLIENTS, EVENTS, METRICS, LOG_LEVEL, HELP, VERSION, SHM_VERSION, MOVER, WORKER,
		 USER /* + enum kv_user_limit */ };

static const struct option options[] = {
	{ "gpus", required_argument, NULL, GPUS },
	{ "host", required_argument, NULL, HOST },
	{ "reserve", required_argument, NULL, RESERVE },
	{ "pool", required_argument, NULL, POOL },
	{ "export", required_argument, NULL, EXPORT },
	{ "granule", required_argument, NULL, GRANULE },
	{ "isolate", no_argument, NULL, ISOLATE },
	{ "socket", required_argument, NULL, SOCKET },
	{ "socket-mode", required_argument, NULL, SOCKET_MODE },
	{ "socket-group", required_argument, NULL, SOCKET_GROUP },
	{ "access", required_argument, NULL, ACCESS },
	{ "event-loop", required_argument, NULL, EVENT_LOOP },
	{ "policy", required_argument, NULL, POLICY },
	{ "max-clients", required_argument, NULL, MAX_CLIENTS },
	{ "user-clients", required_argument, NULL, USER + KV_USER_CLIENTS },
	{ "user-sessions", required_argument, NULL, USER + KV_USER_SESSIONS },
	{ "user-pools", required_argument, NULL, USER + KV_USER_POOLS },
	{ "user-blocks", required_argument, NULL, USER + KV_USER_BLOCKS },
	{ "user-messages", required_argument, NULL, USER + KV_USER_MESSAGES },
	{ "events", required_argument, NULL, EVENTS },
	{ "metrics", required_argument, NULL, METRICS },
	{ "log-level", required_argument, NULL, LOG_LEVEL },
	{ "help", no_argument, NULL, HELP },
	{ "version", no_argument, NULL, VERSION },
	/* Not for people: what a worker asks another program, and how these processes start. */
	{ "shm-version", no_argument, NULL, SHM_VERSION },
	{ "mover", required_argument, NULL, MOVER },
	{ "worker", required_argument, NULL, WORKER },
	{ 0 },
};

/* 0: go on. Positive: the process is done, exit status + 1. Negative: errno. */
static int take_option(int id, const char *arg, struct kv_config *c, bool *gpus_given)
{
	unsigned long n;
	int r;

	if (id >= USER && id < USER + KV_USER_LIMITS) {
		r = parse_number(kv_user_options[id - USER], arg, 10, 1000000000, &n);
		c->user_limits[id - USER] = n;
		return r;
	}
	switch (id) {
	case GPUS:
		*gpus_given = true;
		return parse_gpus(arg, c);
	case HOST:
		c->host = true;
		return kv_size_parse("--host", arg, &c->host_bytes);
	case RESERVE:
		return parse_reserve(arg, c);
	case POOL:
		return kv_wish_add(c->wishes, arg);
	case EXPORT:
		return parse_export(arg, c);
	case GRANULE:
		r = kv_size_parse("--granule", arg, &c->granule_bytes);
		if (!r && c->granule_bytes % KV_ARENA_UNIT)
			r = kv_error(-EINVAL, "--granule: '%s' is not a multiple of 2M", arg);
		return r;
	case ISOLATE:
		c->isolate = true;
		return 0;
	case SOCKET:
		c->socket = arg;
		return 0;
	case ACCESS:
		c->access = arg;
		return 0;
	case SOCKET_GROUP:
		c->socket_group = arg;
		return 0;
	case SOCKET_MODE:
		r = parse_number("--socket-mode", arg, 8, 0777, &n);
		c->socket_mode = (uint32_t)n;
		return r;
	case EVENT_LOOP:
		r = kv_loop_kind_parse(arg);
		c->loop_kind = r;
		return r < 0 ? r : 0;
	case POLICY:
		return parse_policy(arg, c);
	case MAX_CLIENTS:
		r = parse_number("--max-clients", arg, 10, 1000000, &n);
		c->max_clients = (uint32_t)n;
		return r;
	case EVENTS:
		c->events = arg;
		return 0;
	case METRICS:
		c->metrics = arg;
		return 0;
	case LOG_LEVEL:
		r = kv_log_level_parse(arg);
		if (r < 0)
			return r;
		kv_log_set_level(r);
		return 0;
	case MOVER:
		r = parse_number("--mover", arg, 10, 1 << 20, &n);
		return r < 0 ? r : kv_mover_main((int)n) + 1;
	case WORKER:
		r = parse_number("--worker", arg, 10, 1 << 20, &n);
		c->keeper_fd = (int)n;
		return r;
	case SHM_VERSION:
		printf("%s\n", KV_SHM_VERSION);
		return EXIT_DONE + 1;
	case HELP:
		fputs(help, stdout);
		return EXIT_DONE + 1;
	case VERSION:
		printf("kvcached %s\n", kv_version());
		return EXIT_DONE + 1;
	default:
		return kv_error(-EINVAL, "see kvcached --help");
	}
}

static int check_isolation(const struct kv_config *c)
{
	if (c->isolate && c->export_kind == KV_EXPORT_IPC)
		return kv_error(-EINVAL, "--isolate with --export ipc: an ipc handle is the handle of the "
				"whole arena, and everybody who has it can write all of it; vmm is needed");
	if (c->isolate && c->granule_bytes & (c->granule_bytes - 1))
		return kv_error(-EINVAL, "--granule: %llu bytes given; with --isolate a power of two is "
				"needed, like 64M", (unsigned long long)c->granule_bytes);
	if (c->host && c->granule_bytes && !c->isolate)
		return kv_error(-EINVAL, "--granule with --host: host memory is one piece without --isolate");
	return 0;
}

/* The folder that holds a default socket is ours to make. */
static int default_socket(struct kv_config *c, char path[KV_SOCKET_PATH_MAX])
{
	char folder[KV_SOCKET_PATH_MAX];
	int r = kv_default_socket(path);
	char *slash;

	if (r < 0)
		return r;
	c->socket = path;
	strcpy(folder, path);
	slash = strrchr(folder, '/');
	if (slash && slash != folder) {
		*slash = 0;
		mkdir(folder, 0755);
	}
	return 0;
}

/*
 * A socket that a service manager has made. Nobody named one: workers find it where it is said by the
 * environment. 0, and *ret_fd is it or stays; negative with text
 */
static int take_socket(struct kv_config *c, char path[KV_SOCKET_PATH_MAX], int *ret_fd)
{
	char passed[KV_SOCKET_PATH_MAX];
	int fd = -1, r = kv_service_socket(&fd, passed);

	if (r <= 0)
		return r;
	if (c->socket && strcmp(c->socket, passed))
		return kv_error(-EINVAL, "--socket: '%s' given, and a socket that listens at '%s' was passed",
				c->socket, passed);
	if (!c->socket && setenv(KV_SOCKET_ENV, passed, 1) < 0)
		return kv_error(-errno, "$" KV_SOCKET_ENV ": %s", strerror(errno));
	strcpy(path, passed);
	c->socket = path;
	*ret_fd = fd;
	return 0;
}

static int said(int r)
{
	if (r < 0)
		fprintf(stderr, "kvcached: %s\n", kv_error_text()[0] ? kv_error_text() : strerror(-r));
	return r;
}

static int serve(const struct kv_config *config)
{
	static struct kv_daemon daemon;
	int r = kv_daemon_start(&daemon, config);

	if (r >= 0)
		r = kv_loop_run(daemon.loop);
	said(r);
	kv_daemon_stop(&daemon);
	return r;
}

/* @id: of getopt_long(). Return: EXIT_USAGE */
static int refuse_option(int id, const char *word)
{
	const char *nearest = kv_nearest_option(word, options);

	if (id == ':')
		fprintf(stderr, "kvcached: option '%s' needs a value; see kvcached --help\n", word);
	else if (nearest)
		fprintf(stderr, "kvcached: option '%s' isn't known, or takes no value; the nearest is --%s (see kvcached --help)\n", word,
			nearest);
	else
		fprintf(stderr, "kvcached: option '%s' isn't known; see kvcached --help\n", word);
	return EXIT_USAGE;
}

int main(int argc, char **argv)
{
	static struct kv_link wishes = { &wishes, &wishes };
	struct kv_config config = { .keeper_fd = -1, .socket_mode = 0660, .max_clients = 1024, .n_gpus = 1,
				    .reserve_share = 0.9, .policy = kv_policies[0],
				    .wishes = &wishes };
	char path[KV_SOCKET_PATH_MAX];
	bool gpus_given = false;
	int listen_fd = -1, id, r;

	memcpy(config.user_limits, kv_user_defaults, sizeof(config.user_limits));
	opterr = 0;
	while ((id = getopt_long(argc, argv, ":", options, NULL)) >= 0) {
		if (id == ':' || id == '?')
			return refuse_option(id, argv[optind - 1]);
		r = take_option(id, optarg, &config, &gpus_given);
		if (r > 0)
			return r - 1;
		if (r < 0) {
			fprintf(stderr, "kvcached: %s\n", kv_error_text());
			return EXIT_USAGE;
		}
	}
	if (check_isolation(&config) < 0) {
		fprintf(stderr, "kvcached: %s\n", kv_error_text());
		return EXIT_USAGE;
	}
	if (optind < argc || (config.host && gpus_given)) {
		fprintf(stderr, optind < argc ? "kvcached: '%s': kvcached takes options only; see --help\n" :
						"kvcached: --gpus and --host exclude each other%.0s\n",
			optind < argc ? argv[optind] : "");
		return EXIT_USAGE;
	}
	r = config.keeper_fd < 0 ? take_socket(&config, path, &listen_fd) : 0;
	if (!r)
		r = config.socket ? 0 : default_socket(&config, path);
	if (r < 0)
		r = said(r);
	else if (config.keeper_fd < 0)
		r = kv_keeper_run(config.socket, config.socket_mode, config.socket_group, listen_fd, argc,
				  argv);
	else
		r = serve(&config);
	kv_wishes_free(&wishes);
	return r < 0 ? EXIT_FAILED : r;
}
