/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Options stand in one table: name, argument, where the value goes, help. getopt_long()'s table and
 * the help text are made from it.
 */
#include <errno.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/kvcached.h>

#include "include/internal/cleanup.h"
#include "include/internal/nearest.h"
#include "tools/engine/options.h"

enum kind {
	FLAG,
	TEXT,
	NUMBER,
	SEED,
	REAL,
	DEVICE,
	DTYPE,
	PROMPT,
	PROMPT_FILE,
	HELP,
	VERSION,
};

struct option_row {
	const char *name;
	char letter; /* or 0 */
	enum kind kind;
	const char *argument; /* NULL: none */
	size_t offset;	      /* in struct kv_engine_options */
	double least;
	double most;
	const char *help;
};

#define AT(field) offsetof(struct kv_engine_options, field)

static const struct option_row rows[] = {
	{"model", 'm', TEXT, "FILE|tiny|small", AT(model), 0, 0,
	 "a GGUF file, or a built-in model"},
	{"prompt", 'p', PROMPT, "TEXT", 0, 0, 0, "what to continue; may be repeated: one batch"},
	{"prompt-file", 'f', PROMPT_FILE, "FILE", 0, 0, 0,
	 "the same from a file, - is stdin; may be repeated"},
	{"tokens", 'n', NUMBER, "N", AT(n_tokens), 0, 1 << 20, "tokens to generate at most [64]"},
	{"chat", 0, FLAG, NULL, AT(chat), 0, 0, "put each prompt into the model's chat template"},
	{"temperature", 't', REAL, "X", AT(temperature), 0, 100,
	 "0 takes the likeliest token each time [0]"},
	{"top-k", 0, NUMBER, "N", AT(top_k), 0, 1 << 20,
	 "choose among the N likeliest, 0: all [0]"},
	{"top-p", 0, REAL, "X", AT(top_p), 0, 1,
	 "choose among the likeliest that have probability X [1]"},
	{"seed", 0, SEED, "N", AT(seed), 0, 0, "of the choice, plus the prompt's number [1]"},
	{"ignore-eos", 0, FLAG, NULL, AT(ignore_eos), 0, 0,
	 "go on where the model says that it is done"},
	{"socket", 's', TEXT, "PATH", AT(socket), 0, 0, "the daemon's socket"},
	{"pool", 0, TEXT, "NAME", AT(pool), 0, 0, "the pool [named after model and options]"},
	{"device", 0, DEVICE, "host|cuda", AT(device), 0, 0,
	 "where to compute [where the daemon's memory is]"},
	{"gpu", 0, NUMBER, "I", AT(gpu), 0, KV_MAX_GPUS - 1, "which of the daemon's devices [0]"},
	{"kv-dtype", 0, DTYPE, "f32|f16|bf16", AT(kv_dtype), 0, 0, "type of K and V [f16]"},
	{"block-tokens", 0, NUMBER, "N", AT(block_tokens), 1, KV_MAX_BLOCK_TOKENS,
	 "tokens of a block [16]"},
	{"max-batch", 0, NUMBER, "N", AT(max_batch), 1, 1024, "sequences that run together [8]"},
	{"chunk", 0, NUMBER, "N", AT(chunk), 1, 65536, "prompt tokens of a step [128]"},
	{"threads", 0, NUMBER, "N", AT(n_threads), 0, 256, "on the host, 0: one for each CPU [0]"},
	{"wait", 0, NUMBER, "SECONDS", AT(wait_s), 0, 86400,
	 "how long to wait for room in the pool [60]"},
	{"no-share", 0, FLAG, NULL, AT(no_share), 0, 0,
	 "a private pool: look nothing up, publish nothing"},
	{"eager", 0, FLAG, NULL, AT(eager), 0, 0,
	 "launch decode steps piece by piece, not as graphs (on a GPU)"},
	{"stats", 0, FLAG, NULL, AT(stats), 0, 0, "afterwards, on stderr: hits and times"},
	{"logits", 0, TEXT, "FILE", AT(logits), 0, 0,
	 "write the logits after each prompt, [prompts, vocabulary] float32"},
	{"tokens-out", 0, TEXT, "FILE", AT(tokens_out), 0, 0,
	 "write the generated ids, one a line, an empty line between prompts"},
	{"help", 'h', HELP, NULL, 0, 0, 0, "show this"},
	{"version", 0, VERSION, NULL, 0, 0, 0, "show the version"},
};

#define N_ROWS (sizeof(rows) / sizeof(rows[0]))

static void show_help(FILE *f)
{
	fputs("usage: kvengine --model FILE|tiny|small --prompt TEXT [OPTION...]\n\n"
	      "Generates text with a language model whose KV cache lies in kvcached.\n\n",
	      f);
	for (size_t i = 0; i < N_ROWS; i++) {
		char left[64], letter[] = {'-', rows[i].letter, ',', ' ', 0};

		snprintf(left, sizeof(left), "%s--%s %s", rows[i].letter ? letter : "    ",
			 rows[i].name, rows[i].argument ? rows[i].argument : "");
		fprintf(f, "  %-28s %s\n", left, rows[i].help);
	}
	fputs("\nExit status: 0 done, 1 failed, 2 wrong usage, 3 no daemon.\n", f);
}

static int usage(const char *format, ...) __attribute__((format(printf, 1, 2)));

static int usage(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	fputs("kvengine: ", stderr);
	vfprintf(stderr, format, args);
	fputs("; kvengine --help explains\n", stderr);
	va_end(args);
	return KV_EXIT_USAGE;
}

static int add_prompt(struct kv_engine_options *options, char *text, size_t len)
{
	struct kv_engine_prompt *prompts =
		text ? realloc(options->prompts, (options->n_prompts + 1) * sizeof(*prompts))
		     : NULL;

	if (!prompts) {
		free(text);
		fputs("kvengine: no memory for a prompt\n", stderr);
		return KV_EXIT_FAILED;
	}
	prompts[options->n_prompts++] = (struct kv_engine_prompt){text, len};
	options->prompts = prompts;
	return -1;
}

static int read_file(struct kv_engine_options *options, const char *path)
{
	FILE *f = strcmp(path, "-") ? fopen(path, "re") : stdin;
	kv_cleanup(kv_freep) char *text = NULL;
	size_t len = 0, room = 0, got;
	bool failed;

	if (!f) {
		fprintf(stderr, "kvengine: %s: %m\n", path);
		return KV_EXIT_FAILED;
	}
	do {
		if (len == room) {
			char *more = realloc(text, room += 65536);

			if (!more)
				break;
			text = more;
		}
		got = fread(text + len, 1, room - len, f);
		len += got;
	} while (got);

	failed = ferror(f) || len == room;
	if (failed)
		fprintf(stderr, "kvengine: %s: %m\n", path);
	if (f != stdin)
		fclose(f);
	return failed ? KV_EXIT_FAILED : add_prompt(options, kv_steal(text), len);
}

static int set_number(const struct option_row *row, const char *text, void *to)
{
	char *end;
	double value;

	errno = 0;
	value = row->kind == REAL ? strtod(text, &end) : (double)strtoll(text, &end, 10);
	if (end == text || *end || errno || !(value >= row->least && value <= row->most))
		return usage("--%s %s: %g..%g expected", row->name, text, row->least, row->most);

	if (row->kind == REAL)
		*(float *)to = value;
	else
		*(uint32_t *)to = value;
	return -1;
}

static int set_seed(const struct option_row *row, const char *text, void *to)
{
	char *end;

	errno = 0;
	*(uint64_t *)to = strtoull(text, &end, 0);
	if (end == text || *end || errno)
		return usage("--%s %s: an integer expected", row->name, text);
	return -1;
}

struct word {
	const char *name;
	int value;
};

static int set_word(const struct option_row *row, const struct word *words, const char *text,
		    void *to)
{
	for (; words->name; words++) {
		if (strcmp(words->name, text))
			continue;
		*(int *)to = words->value;
		return -1;
	}
	return usage("--%s %s: %s expected", row->name, text, row->argument);
}

static int set(const struct option_row *row, const char *text, struct kv_engine_options *options)
{
	static const struct word devices[] = {
		{"host", KV_DEVICE_HOST}, {"cuda", KV_DEVICE_CUDA}, {NULL, 0}};
	static const struct word dtypes[] = {
		{"f32", KV_F32}, {"f16", KV_F16}, {"bf16", KV_BF16}, {NULL, 0}};
	void *to = (char *)options + row->offset;
	char *copy;

	switch (row->kind) {
	case FLAG:
		*(bool *)to = true;
		return -1;
	case TEXT:
		*(const char **)to = text;
		return -1;
	case NUMBER:
	case REAL:
		return set_number(row, text, to);
	case SEED:
		return set_seed(row, text, to);
	case DEVICE:
		return set_word(row, devices, text, to);
	case DTYPE:
		return set_word(row, dtypes, text, to);
	case PROMPT:
		copy = strdup(text);
		return add_prompt(options, copy, strlen(text));
	case PROMPT_FILE:
		return read_file(options, text);
	case HELP:
		show_help(stdout);
		return KV_EXIT_DONE;
	case VERSION:
		printf("kvengine %s\n", kv_version());
		return KV_EXIT_DONE;
	}
	return -1;
}

static int unknown(const char *word, const struct option *longs)
{
	const char *nearest = kv_nearest_option(word, longs);

	return nearest ? usage("'%s' isn't known; the nearest is --%s", word, nearest) : usage("'%s' isn't known", word);
}

static int parse(int argc, char **argv, struct kv_engine_options *options)
{
	struct option longs[N_ROWS + 1] = {0};
	char letters[2 * N_ROWS + 2] = ":";
	int c, i, r;

	for (size_t n = 0; n < N_ROWS; n++) {
		longs[n] = (struct option){rows[n].name,
					   rows[n].argument ? required_argument : no_argument, NULL,
					   256 + (int)n};
		if (rows[n].letter)
			snprintf(letters + strlen(letters), 3, "%c%s", rows[n].letter,
				 rows[n].argument ? ":" : "");
	}

	while ((c = getopt_long(argc, argv, letters, longs, NULL)) != -1) {
		if (c == ':')
			return usage("'%s' needs a value", argv[optind - 1]);
		if (c == '?')
			return unknown(argv[optind - 1], longs);

		for (i = 0; i < (int)N_ROWS && c != 256 + i && c != rows[i].letter; i++)
			;
		r = set(&rows[i], optarg, options);
		if (r >= 0)
			return r;
	}
	if (optind < argc)
		return usage("'%s' is no option", argv[optind]);
	if (!options->model)
		return usage("--model is missing");
	if (!options->n_prompts)
		return usage("--prompt or --prompt-file is missing");
	if (options->pool && strlen(options->pool) >= KV_NAME_MAX)
		return usage("--pool: a name has at most %d bytes", KV_NAME_MAX - 1);
	if (options->pool && options->no_share)
		return usage("--pool and --no-share exclude each other");
	return -1;
}

int kv_engine_options_parse(int argc, char **argv, struct kv_engine_options *ret)
{
	*ret = (struct kv_engine_options){
		.n_tokens = 64,
		.kv_dtype = KV_F16,
		.block_tokens = 16,
		.max_batch = 8,
		.chunk = 128,
		.wait_s = 60,
		.top_p = 1,
		.seed = 1,
	};
	return parse(argc, argv, ret);
}

void kv_engine_options_deinit(struct kv_engine_options *options)
{
	for (size_t i = 0; i < options->n_prompts; i++)
		free(options->prompts[i].text);
	free(options->prompts);
}
