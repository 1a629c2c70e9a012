/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvctl: what its commands share. A command is a function `int kv_cmd_x(ctl, argc, argv)` in a file
 * cmd_<object>.c and a row in the table of kvctl.c. It returns the exit status; it shows its answer
 * through ctl->emit, and what it refuses through kv_ctl_refuse() or kv_ctl_broken().
 *
 * argv[0] is the command's last word, so a command with options of its own can call getopt_long().
 */
#ifndef KV_TOOLS_KVCTL_H
#define KV_TOOLS_KVCTL_H

#include <getopt.h>
#include <limits.h>
#include <stdbool.h>

#include <kvcached/stats.h>

#include "include/internal/paths.h"
#include "tools/emit.h"

enum kv_exit {
	KV_EXIT_DONE = 0,
	KV_EXIT_FAILED = 1, /* refused, or failed */
	KV_EXIT_USAGE = 2,
	KV_EXIT_NO_DAEMON = 3,
	KV_EXIT_WARNED = 4, /* doctor: nothing fails, something is to be looked at */
};

struct kv_ctl {
	struct kv_emit emit;
	const char *socket; /* as given, or the default; set by kv_ctl_connect() */
	char default_socket[KV_SOCKET_PATH_MAX];
	int64_t deadline;	  /* of the whole command, CLOCK_MONOTONIC, ns */
	int64_t limit_ns;	  /* --timeout; 0: not given */
	int64_t watch_ns;	  /* --watch: the command is run again after so long; 0: once */
	struct kv_client *client; /* NULL until kv_ctl_connect() */
};

/* A row of the table of commands, from which help, checks of usage and completion come. */
struct kv_command {
	const char *object;
	const char *command; /* NULL: the object alone is the command */
	const char
		*args; /* "NAME" must be there, "[NAME]" may, "[NAME...]" any number of times;
			* "..." takes all, options included */
	const char *help;
	int (*run)(struct kv_ctl *ctl, int argc, char **argv);
	const struct option *own; /* its own options, besides those of all; NULL: none */
};

const struct kv_command *kv_ctl_commands(size_t *ret_n);
const struct option *kv_ctl_options(void); /* those of all commands */

int64_t kv_ctl_now(void);

/* kv_ctl_left() - time until the command's deadline, at least 1 ns (0 would be the default) */
int64_t kv_ctl_left(const struct kv_ctl *ctl);

/* kv_ctl_refuse() - words (or JSON) to stderr. Return: @status. */
int kv_ctl_refuse(struct kv_ctl *ctl, enum kv_exit status, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

/* kv_ctl_unknown() - an option that is none, nor of @own (may be NULL); names the nearest. Return: KV_EXIT_USAGE. */
int kv_ctl_unknown(struct kv_ctl *ctl, const char *word, const struct option *own);

/* kv_ctl_broken() - the library's text for its error @r. Return: the exit status for it. */
int kv_ctl_broken(struct kv_ctl *ctl, int r);

/* kv_ctl_connect() - once; later calls do nothing. Return: KV_EXIT_DONE, or as it was refused. */
int kv_ctl_connect(struct kv_ctl *ctl);

/* kv_ctl_ask() - kv_stats(), connecting first. Return: as kv_ctl_connect(). */
int kv_ctl_ask(struct kv_ctl *ctl, enum kv_stat_kind kind, void *ret_items, size_t *ret_n);

/* kv_ctl_size() - "100G": bytes, in steps of 1024. Return: 0 or -EINVAL. */
int kv_ctl_size(const char *text, uint64_t *ret);

/* kv_ctl_u64() - a decimal number that is all of @text. Return: 0 or -EINVAL. */
int kv_ctl_u64(const char *text, uint64_t *ret);

/* cmd_top.c */
int kv_cmd_top(struct kv_ctl *ctl, int argc, char **argv);

/* cmd_stats.c */
int kv_cmd_stats(struct kv_ctl *ctl, int argc, char **argv);

/* cmd_restart.c */
extern const struct option kv_restart_options[];
int kv_cmd_restart(struct kv_ctl *ctl, int argc, char **argv);

/* cmd_bench.c */
/* kv_ctl_find_kvbench() - beside kvctl, as installed or as built; else as the shell finds it */
void kv_ctl_find_kvbench(char ret_path[PATH_MAX]);
/* kv_ctl_kvbench() - run it in this process's place; returns only if that fails */
int kv_ctl_kvbench(struct kv_ctl *ctl, int argc, char **argv);
/* kv_ctl_kvbench_alone() - likewise, with a daemon of its own */
int kv_ctl_kvbench_alone(struct kv_ctl *ctl, int argc, char **argv);
int kv_cmd_bench(struct kv_ctl *ctl, int argc, char **argv);

/* cmd_report.c */
int kv_cmd_report(struct kv_ctl *ctl, int argc, char **argv);

/* cmd_completion.c */
int kv_cmd_completion(struct kv_ctl *ctl, int argc, char **argv);

/* cmd_plan.c */
extern const struct option kv_plan_long_options[];
int kv_cmd_plan(struct kv_ctl *ctl, int argc, char **argv);

/* cmd_backends.c */
struct kv_arch;
struct kv_plan_options;
/* kv_ctl_backends() - which attention backends serve @model; what @name of another engine's means (NULL: its default) */
int kv_ctl_backends(struct kv_ctl *ctl, const struct kv_arch *model, const struct kv_plan_options *options,
		    const char *name);

/* cmd_pool.c */
extern const struct option kv_limit_options[], kv_compact_options[];
int kv_cmd_pool_list(struct kv_ctl *ctl, int argc, char **argv);
int kv_cmd_pool_show(struct kv_ctl *ctl, int argc, char **argv);
int kv_cmd_pool_set(struct kv_ctl *ctl, int argc, char **argv);
int kv_cmd_pool_compact(struct kv_ctl *ctl, int argc, char **argv);
int kv_cmd_pool_drop(struct kv_ctl *ctl, int argc, char **argv);
int kv_cmd_pool_epoch(struct kv_ctl *ctl, int argc, char **argv);
struct kv_words kv_words_gpus(uint64_t gpu_mask); /* "0-3,5" */
/* NULL if the session's pool came after the pools were asked for */
const struct kv_pool_stats *kv_pool_of(const struct kv_pool_stats *pools, size_t n,
				       const struct kv_session_stats *session);
/* kv_ctl_no_pool() - that none of @pools is called @name, and which name is near. Return: KV_EXIT_FAILED */
int kv_ctl_no_pool(struct kv_ctl *ctl, const char *option, const char *name, const struct kv_pool_stats *pools,
		   size_t n);
/* size of @n blocks; "?" if @pool is NULL */
struct kv_words kv_words_blocks(const struct kv_pool_stats *pool, uint64_t n);

/* cmd_session.c */
int kv_cmd_session_list(struct kv_ctl *ctl, int argc, char **argv);
int kv_cmd_session_show(struct kv_ctl *ctl, int argc, char **argv);
struct kv_words kv_words_since(const struct kv_session_stats *session); /* or its state */

/* cmd_block.c */
extern const struct option kv_block_options[];
struct kv_words kv_words_comm(uint64_t pid); /* name of a process; "?" if it can't be seen from here */
void kv_show_holders(struct kv_emit *e, const struct kv_session_stats *sessions, size_t n);
int kv_cmd_block_show(struct kv_ctl *ctl, int argc, char **argv);

/* cmd_prefix.c */
extern const struct option kv_prefix_options[];
int kv_cmd_prefix_show(struct kv_ctl *ctl, int argc, char **argv);

/* cmd_trace.c */
extern const struct option kv_trace_options[], kv_replay_options[];
int kv_cmd_trace_record(struct kv_ctl *ctl, int argc, char **argv);
int kv_cmd_trace_replay(struct kv_ctl *ctl, int argc, char **argv);

/* doctor.c */
/* kv_doctor_probe() - name of probe @i, and what it looks at; NULL: there are no more */
const char *kv_doctor_probe(size_t i, const char **ret_about);
int kv_cmd_doctor(struct kv_ctl *ctl, int argc, char **argv);

/* cmd_check.c */
int kv_cmd_check(struct kv_ctl *ctl, int argc, char **argv);
int kv_cmd_ping(struct kv_ctl *ctl, int argc, char **argv);

#endif
