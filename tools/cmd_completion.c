/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvctl completion SHELL prints a few lines for a shell, which ask kvctl itself what may come next:
 *
 *	kvctl completion words WORD...		the words so far, the last one unfinished or ""
 *
 * Each line of the answer is a candidate, a tab, and what it is. A line ":files" says that a file's name
 * may stand there. It all comes from the table of commands, and names from the daemon, so there is
 * nothing that goes stale with the next command.
 */
#include <ctype.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "include/internal/cleanup.h"
#include "tools/kvctl.h"

#define ASK_TIMEOUT (KV_SEC / 2) /* somebody waits at a prompt */
#define MAX_WORDS   8		 /* that are no options */

struct line {
	struct kv_ctl *ctl;
	const char *last;	       /* what is to be completed */
	const char *before;	       /* an option whose value that is; NULL: none */
	const char *plain[MAX_WORDS]; /* the words before it */
	unsigned n_plain;
	const struct kv_command *command; /* that they name; NULL: none yet */
};

static const char bash_script[] =
	"_kvctl()\n"
	"{\n"
	"\tlocal line word\n"
	"\tCOMPREPLY=()\n"
	"\twhile IFS= read -r line; do\n"
	"\t\tif [[ $line == :files ]]; then\n"
	"\t\t\tcompopt -o default 2> /dev/null\n"
	"\t\t\tcontinue\n"
	"\t\tfi\n"
	"\t\tprintf -v word %q \"${line%%$'\\t'*}\"\n"
	"\t\tCOMPREPLY+=(\"$word\")\n"
	"\tdone < <(\"${COMP_WORDS[0]}\" completion words \"${COMP_WORDS[@]:1:COMP_CWORD}\" 2> /dev/null)\n"
	"}\n"
	"complete -F _kvctl kvctl\n";

static const char zsh_script[] =
	"#compdef kvctl\n"
	"_kvctl()\n"
	"{\n"
	"\tlocal -a lines candidates\n"
	"\tlocal line\n"
	"\tlines=(\"${(@f)$(\"${words[1]}\" completion words \"${(@)words[2,CURRENT]}\" 2> /dev/null)}\")\n"
	"\tfor line in $lines; do\n"
	"\t\tif [[ $line == :files ]]; then\n"
	"\t\t\t_files\n"
	"\t\telse\n"
	"\t\t\tcandidates+=(\"${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}\")\n"
	"\t\tfi\n"
	"\tdone\n"
	"\t(( $#candidates )) && _describe kvctl candidates\n"
	"}\n"
	"if [[ $funcstack[1] == _kvctl ]]; then _kvctl \"$@\"; else compdef _kvctl kvctl; fi\n";

static const char fish_script[] =
	"function __kvctl_words\n"
	"\tset -l words (commandline -opc)\n"
	"\tset -l current (commandline -ct)\n"
	"\tfor line in ($words[1] completion words $words[2..-1] \"$current\" 2> /dev/null)\n"
	"\t\tif test \"$line\" = :files\n"
	"\t\t\t__fish_complete_path \"$current\"\n"
	"\t\telse\n"
	"\t\t\techo $line\n"
	"\t\tend\n"
	"\tend\n"
	"end\n"
	"complete -c kvctl -f -a '(__kvctl_words)'\n";

static const struct shell {
	const char *name, *script, *help;
} shells[] = {
	{"bash", bash_script, "kvctl completion bash > /usr/share/bash-completion/completions/kvctl"},
	{"zsh", zsh_script, "kvctl completion zsh > _kvctl, in a folder of $fpath"},
	{"fish", fish_script, "kvctl completion fish > ~/.config/fish/completions/kvctl.fish"},
	{NULL},
};

static void offer(const struct line *l, const char *word, const char *help)
{
	/* What a shell can't read back as one line is no help. */
	if (strncmp(word, l->last, strlen(l->last)))
		return;
	for (const char *c = word; *c; c++) {
		if (iscntrl((unsigned char)*c))
			return;
	}
	printf("%s\t%s\n", word, help);
}

static const struct option *option_of(const struct option *options, const char *word)
{
	for (const struct option *o = options; o && o->name; o++) {
		if (!strncmp(word, "--", 2) ? !strcmp(word + 2, o->name) :
					      word[1] == o->val && !word[2])
			return o;
	}
	return NULL;
}

static void find_command(struct line *l)
{
	size_t n;
	const struct kv_command *c = kv_ctl_commands(&n);

	for (const struct kv_command *end = c + n; c < end && !l->command && l->n_plain; c++) {
		if (!strcmp(c->object, l->plain[0]) &&
		    (!c->command || (l->n_plain > 1 && !strcmp(c->command, l->plain[1]))))
			l->command = c;
	}
}

/* What stands before the last word. bash gives "--socket=x" as three words. */
static void read_line(struct line *l, int n, char **words)
{
	l->last = n ? words[n - 1] : "";
	for (int i = 0; i < n - 1; i++) {
		const struct option *o = NULL;

		if (*words[i] != '-' || !words[i][1]) {
			if (l->n_plain < MAX_WORDS)
				l->plain[l->n_plain++] = words[i];
			find_command(l);
			continue;
		}
		o = option_of(kv_ctl_options(), words[i]);
		if (!o && l->command)
			o = option_of(l->command->own, words[i]);
		if (!o || !o->has_arg)
			continue;
		if (i + 1 < n - 1 && !strcmp(words[i + 1], "="))
			i++;
		if (i + 1 >= n - 1) {
			l->before = o->name;
			l->last = strcmp(l->last, "=") ? l->last : "";
			continue;
		}
		i++;
		if (!strcmp(o->name, "socket"))
			l->ctl->socket = words[i];
	}
}

static void offer_options(const struct line *l, const struct option *options, const char *help)
{
	char word[64];

	for (const struct option *o = options; o && o->name; o++) {
		snprintf(word, sizeof(word), "--%s", o->name);
		offer(l, word, help);
	}
}

static void offer_objects(const struct line *l)
{
	size_t n;
	const struct kv_command *all = kv_ctl_commands(&n);

	for (const struct kv_command *c = all; c < all + n; c++) {
		char help[128] = "";
		bool seen = false;

		for (const struct kv_command *d = all; d < all + n; d++) {
			size_t used = strlen(help);

			if (strcmp(c->object, d->object))
				continue;
			seen |= d < c;
			if (d->command)
				snprintf(help + used, sizeof(help) - used, "%s%s", used ? ", " : "",
					 d->command);
		}
		if (!seen)
			offer(l, c->object, c->command ? help : c->help);
	}
}

/* Pools and sessions that there are; without a daemon there are none. */
static void offer_pools(const struct line *l)
{
	kv_cleanup(kv_freep) struct kv_pool_stats *pools = NULL;
	size_t n = 0;

	if (kv_stats(l->ctl->client, KV_STAT_POOL, (void **)&pools, &n, ASK_TIMEOUT) < 0)
		return;
	for (size_t i = 0; i < n; i++)
		offer(l, pools[i].name, *pools[i].model ? pools[i].model : "a pool");
}

static void offer_sessions(const struct line *l)
{
	kv_cleanup(kv_freep) struct kv_session_stats *sessions = NULL;
	size_t n = 0;

	if (kv_stats(l->ctl->client, KV_STAT_SESSION, (void **)&sessions, &n, ASK_TIMEOUT) < 0)
		return;
	for (size_t i = 0; i < n; i++) {
		char id[32], help[2 * KV_NAME_MAX + 8];

		snprintf(id, sizeof(id), "%" PRIu64, sessions[i].id);
		snprintf(help, sizeof(help), "%s in %s", sessions[i].client, sessions[i].pool);
		offer(l, id, help);
	}
}

/*
 * kvbench's benchmarks, each a line "  NAME ..." of its help with a line of words below it, or its options, lines
 * "  ... --NAME ...". Without a kvbench there are none.
 */
static void offer_of_kvbench(const struct line *l)
{
	char path[PATH_MAX], command[PATH_MAX + 32], text[256], word[64] = "";
	FILE *help;

	kv_ctl_find_kvbench(path);
	if (strchr(path, '\'') || access(path, X_OK))
		return;
	snprintf(command, sizeof(command), "'%s' --help 2> /dev/null", path);
	help = popen(command, "re");
	while (help && fgets(text, sizeof(text), help)) {
		const char *option = strstr(text, "--");

		text[strcspn(text, "\n")] = 0;
		if (*l->last == '-' && option && text[0] == ' ') {
			snprintf(word, sizeof(word), "%.*s", (int)strcspn(option, " "), option);
			offer(l, word, "of kvbench");
		} else if (*l->last != '-' && *word && !strncmp(text, "      ", 6)) {
			offer(l, word, text + 6);
			*word = 0;
		} else {
			*word = 0;
			if (!strncmp(text, "  ", 2) && text[2] != ' ' && text[2] != '-')
				snprintf(word, sizeof(word), "%.*s", (int)strcspn(text + 2, " "), text + 2);
		}
	}
	if (help)
		pclose(help);
}

static void offer_probes(const struct line *l)
{
	const char *about, *name;

	for (size_t i = 0; (name = kv_doctor_probe(i, &about)); i++)
		offer(l, name, about);
}

static void offer_names(const struct line *l, void (*offer_all)(const struct line *l))
{
	KV_OPTIONS(kv_connect_options, how, .name = "kvctl", .timeout = ASK_TIMEOUT);

	if (l->ctl->socket)
		how.socket = l->ctl->socket;
	if (!kv_connect(&how, &l->ctl->client))
		offer_all(l);
}

static void offer_arguments(const struct line *l)
{
	const struct kv_command *c = l->command;
	unsigned at = l->n_plain - (c->command ? 2 : 1);
	bool names = !strcmp(c->object, "pool") && !strncmp(c->args, "NAME", 4);
	bool ids = !strcmp(c->object, "session") && !strncmp(c->args, "ID", 2);

	if (c->run == kv_cmd_completion) {
		for (const struct shell *s = shells; s->name && !at; s++)
			offer(l, s->name, s->help);
		return;
	}
	if (c->run == kv_cmd_doctor) {
		offer_probes(l);
		return;
	}
	if (c->run == kv_cmd_bench && !at) {
		offer_of_kvbench(l);
		return;
	}
	if (!names && !ids) {
		if (!strcmp(c->args, "...") || strstr(c->args, "FILE"))
			puts(":files");
		return;
	}
	if (!at)
		offer_names(l, names ? offer_pools : offer_sessions);
}

static int complete(struct kv_ctl *ctl, int n, char **words)
{
	struct line l = {.ctl = ctl};
	size_t n_commands;
	const struct kv_command *all = kv_ctl_commands(&n_commands);

	ctl->socket = NULL; /* as typed, or as found */
	read_line(&l, n, words);
	if (l.before) {
		static const char *const files[] = {"socket", "binary", "model", "file"};

		for (size_t i = 0; i < sizeof(files) / sizeof(*files); i++) {
			if (!strcmp(l.before, files[i]))
				puts(":files");
		}
		if (!strcmp(l.before, "pool"))
			offer_names(&l, offer_pools);
	} else if (*l.last == '-') {
		if (l.command)
			offer_options(&l, l.command->own, "of this command");
		if (l.command && l.command->run == kv_cmd_bench)
			offer_of_kvbench(&l);
		offer_options(&l, kv_ctl_options(), "of all commands");
	} else if (!l.n_plain) {
		offer_objects(&l);
	} else if (l.command) {
		offer_arguments(&l);
	} else if (l.n_plain == 1) {
		for (const struct kv_command *c = all; c < all + n_commands; c++) {
			if (c->command && !strcmp(c->object, l.plain[0]))
				offer(&l, c->command, c->help);
		}
	}
	return KV_EXIT_DONE;
}

int kv_cmd_completion(struct kv_ctl *ctl, int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "words"))
		return complete(ctl, argc - 2, argv + 2);
	for (const struct shell *s = shells; s->name && argc == 2; s++) {
		if (!strcmp(argv[1], s->name)) {
			fputs(s->script, ctl->emit.out);
			return KV_EXIT_DONE;
		}
	}
	return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "usage: kvctl completion bash|zsh|fish");
}
