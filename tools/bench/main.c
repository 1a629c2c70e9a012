/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench BENCHMARK [OPTION...]: measure a kvcached. This file has the table of benchmarks, from
 * which help and checks of usage come, and the options.
 */
#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/nearest.h"
#include "tools/bench/bench.h"
#include "tools/bench/device.h"
#include "tools/bench/replay.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
#define MAX_CAPACITY  (1u << 22)

static const struct benchmark {
	const char *name;
	const char *args;
	bool replays; /* takes FILE, --engines and --capacity */
	const char *help;
	int (*run)(struct kv_bench *b);
} benchmarks[] = {
	{"lease", "", false, "take and give blocks, beside an array stack, a mutex, a round trip",
	 kv_bench_lease},
	{"attach", "", false, "from connecting to a mapped pool, step by step", kv_bench_attach},
	{"prefix", "", false, "look up, verify and pin chains of 1 to 4096 blocks",
	 kv_bench_prefix},
	{"elastic", "", false, "a GiB from one model to another, beside the driver's mapping",
	 kv_bench_elastic},
	{"compact", "", false, "a pool half full moves together under clients, beside a copy",
	 kv_bench_compact},
	{"crowd", "--engines N", false, "N clients take, refill and idle together", kv_bench_crowd},
	{"replay", "FILE --engines N --capacity BLOCKS", true,
	 "N clients replay a trace of requests as fast as they can", kv_bench_replay},
	{"colocate", "FILE --capacity BLOCKS", true,
	 "two models with opposite bursts in one memory, beside a split of it in halves",
	 kv_bench_colocate},
	{"attention", "", false, "decode and prefill over blocks, checked, beside a plain read",
	 kv_bench_attention},
	{"write", "", false, "K and V at their slots, checked, beside a copy", kv_bench_write},
	{"merge", "", false, "four parts of attention into one, checked, beside a copy",
	 kv_bench_merge},
	{"metadata", "", false, "what a step's kernels read, of 1 to 1024 decoding sequences",
	 kv_bench_metadata},
	{"gdn", "", false, "gated delta net on state rows: steps and prompts, beside a copy",
	 kv_bench_gdn},
	{"mla", "", false, "decode over latents and their write, checked, beside a copy", kv_bench_mla},
	{"dsa", "", false, "sparse attention: indexer, top-k, decode, write, checked, beside a copy",
	 kv_bench_dsa},
	{"mamba", "", false, "Mamba-2 on state rows, beside a copy", kv_bench_mamba},
	{"conv", "", false, "causal convolution on state rows, beside a copy", kv_bench_conv},
};

static const struct option options[] = {
	{"socket", required_argument, NULL, 's'},
	{"json", no_argument, NULL, 'j'},
	{"engines", required_argument, NULL, 'e'},
	{"capacity", required_argument, NULL, 'c'},
	{"shape", required_argument, NULL, 'k'},
	{"dtype", required_argument, NULL, 'k'},
	{"layout", required_argument, NULL, 'k'},
	{"ragged", required_argument, NULL, 'k'},
	{"point", required_argument, NULL, 'k'},
	{"query", required_argument, NULL, 'k'},
	{"window", required_argument, NULL, 'k'},
	{"softcap", required_argument, NULL, 'k'},
	{"pool", required_argument, NULL, 'k'},
	{"layers", required_argument, NULL, 'k'},
	{"invariant", no_argument, NULL, 'k'},
	{"peers", required_argument, NULL, 'k'},
	{"backend", required_argument, NULL, 'k'},
	{"device", required_argument, NULL, 'd'},
	{"batch", required_argument, NULL, 'k'},
	{"context", required_argument, NULL, 'k'},
	{"page", required_argument, NULL, 'k'},
	{"help", no_argument, NULL, 'h'},
	{"version", no_argument, NULL, 'V'},
	{NULL},
};

static const char options_help[] =
	"Options:\n"
	"  -s, --socket PATH      the daemon's socket; default: a daemon of its own in host\n"
	"                         memory, for the time of the run\n"
	"  -j, --json             one object on one line, with exact numbers\n"
	"      --engines N        replay, crowd: client processes (default 1)\n"
	"      --capacity BLOCKS  replay, colocate: size of the memory, in blocks of 512 tokens;\n"
	"                         replay: several with commas, one after the other\n"
	"Of attention, write, merge; of those marked * several, with commas between: all of them.\n"
	"      --shape Q/K/D *    heads, KV heads, head size\n"
	"      --batch N *        sequences (write: tokens)\n"
	"      --query N *        new tokens of each (default 1)\n"
	"      --context N *      tokens of each, the new ones included\n"
	"      --point BxQxN *    the three at once, in place of them\n"
	"      --page N *         tokens of a block (default 16)\n"
	"      --dtype TYPE *     f32, f16, bf16 (default), e4m3 or e5m2: of the cache\n"
	"      --layout NAME *    nhd (default), hnd, nhd-flat or hnd-flat\n"
	"      --ragged FILE      lengths, one a line or of a trace, or random; beside equal ones\n"
	"      --window N         keys that a query sees\n"
	"      --softcap C        of scores\n"
	"      --invariant        rows whose bits don't depend on the batch\n"
	"      --pool GIB         the blocks lie all over so much memory,\n"
	"      --layers N         of so many layers\n"
	"      --backend NAME     this one or none\n"
	"      --peers FILE       lines 'Q/K/D CONTEXT BATCH TYPE US NAME' of other kernels\n"
	"Of all kernels:\n"
	"      --device NAME      cuda (where the build has it) or host: of kernels\n"
	"  -h, --help             this text\n"
	"  -V, --version          version of kvbench\n"
	"\n"
	"Exit status: 0 done, 1 failed, 2 wrong usage, 3 no daemon.\n";

static void print_help(FILE *out)
{
	fprintf(out, "Usage: kvbench BENCHMARK [OPTION...]\n\nBenchmarks:\n");
	for (const struct benchmark *m = benchmarks; m < benchmarks + ARRAY_SIZE(benchmarks); m++)
		fprintf(out, "  %s%s%s\n      %s\n", m->name, *m->args ? " " : "", m->args,
			m->help);
	fprintf(out, "\n%s", options_help);
}

static int parse_count(const struct kv_bench *b, const char *option, const char *text, uint32_t max,
		       uint32_t *ret)
{
	char *end;
	unsigned long long n;

	errno = 0;
	n = strtoull(text, &end, 10);
	if (errno || *text < '0' || *text > '9' || *end || n < 1 || n > max)
		return kv_bench_refuse(b, KV_BENCH_USAGE, "%s: '%s' given, 1..%u expected", option,
				       text, max);
	*ret = (uint32_t)n;
	return KV_BENCH_DONE;
}

/* A number, or several with commas: all are looked at before the first run. */
static int parse_capacities(struct kv_bench *b, const char *text)
{
	char word[16];
	int status = KV_BENCH_DONE;

	for (const char *at = text; !status && at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
		size_t n = strcspn(at, ",");

		snprintf(word, sizeof(word), "%.*s", (int)(n < sizeof(word) ? n : sizeof(word)), at);
		status = parse_count(b, "--capacity", word, MAX_CAPACITY, &b->capacity);
	}
	b->capacities = strchr(text, ',') ? text : NULL;
	return status;
}

static const char *device_names(void)
{
	return kv_bench_devices[1] ? "cuda or host" : "host (this build has no CUDA)";
}

/* @ret_letter: 'h' or 'V' if that was asked for. Words are moved behind the options. */
static int parse_options(struct kv_bench *b, int argc, char **argv, int *ret_letter)
{
	int letter, which = 0, status = KV_BENCH_DONE;
	const char *nearest;

	opterr = 0;
	while (!status && (letter = getopt_long(argc, argv, ":s:jhV", options, &which)) != -1) {
		switch (letter) {
		case 'k':
			status = kv_bench_kernel_option(b, options[which].name, optarg);
			break;
		case 'd':
			if (!kv_bench_device_choose(optarg))
				status = kv_bench_refuse(b, KV_BENCH_USAGE,
							 "--device: '%s' given, %s expected",
							 optarg, device_names());
			break;
		case 's':
			b->socket = optarg;
			break;
		case 'j':
			b->emit.json = true;
			break;
		case 'e':
			status = parse_count(b, "--engines", optarg, KV_REPLAY_MAX_ENGINES,
					     &b->engines);
			break;
		case 'c':
			status = parse_capacities(b, optarg);
			break;
		case 'h':
		case 'V':
			*ret_letter = letter;
			break;
		case ':':
			return kv_bench_refuse(b, KV_BENCH_USAGE, "option '%s' needs a value",
					       argv[optind - 1]);
		default:
			nearest = kv_nearest_option(argv[optind - 1], options);
			return kv_bench_refuse(b, KV_BENCH_USAGE,
					       "option '%s' isn't known, or takes no value%s%s (see kvbench --help)",
					       argv[optind - 1], nearest ? "; the nearest is --" : "",
					       nearest ? nearest : "");
		}
	}
	return status;
}

static int check_words(struct kv_bench *b, const struct benchmark *m, int n_words, char **words)
{
	if (n_words != (m->replays ? 1 : 0) || (m->replays && !b->capacity))
		return kv_bench_refuse(b, KV_BENCH_USAGE, "usage: kvbench %s%s%s [OPTION...]",
				       m->name, *m->args ? " " : "", m->args);
	if (b->capacities && m->run != kv_bench_replay)
		return kv_bench_refuse(b, KV_BENCH_USAGE, "--capacity: '%s' given; several are for 'kvbench replay'",
				       b->capacities);
	if (!m->replays && (b->capacity || (b->engines && m->run != kv_bench_crowd)))
		return kv_bench_refuse(b, KV_BENCH_USAGE,
				       "--engines is for 'kvbench replay' and 'crowd', --capacity for "
				       "'replay'");
	b->file = m->replays ? words[0] : NULL;
	if (!b->engines)
		b->engines = 1;
	return KV_BENCH_DONE;
}

static int refuse_name(const struct kv_bench *b, const char *word)
{
	const struct benchmark *nearest = NULL;

	for (const struct benchmark *m = benchmarks; m < benchmarks + ARRAY_SIZE(benchmarks); m++) {
		if (kv_word_is_near(word, m->name) &&
		    (!nearest || kv_word_distance(word, m->name) < kv_word_distance(word, nearest->name)))
			nearest = m;
	}
	return kv_bench_refuse(b, KV_BENCH_USAGE, "no benchmark is called '%.64s'%s%s (see kvbench --help)", word,
			       nearest ? "; the nearest is " : "", nearest ? nearest->name : "");
}

static int run(struct kv_bench *b, int n_words, char **words)
{
	const struct benchmark *m = benchmarks;
	int status;

	if (!n_words)
		return kv_bench_refuse(
			b, KV_BENCH_USAGE,
			"which benchmark? kvbench BENCHMARK [OPTION...] (see kvbench "
			"--help)");
	while (m < benchmarks + ARRAY_SIZE(benchmarks) && strcmp(m->name, words[0]))
		m++;
	if (m == benchmarks + ARRAY_SIZE(benchmarks))
		return refuse_name(b, words[0]);
	status = check_words(b, m, n_words - 1, words + 1);
	if (!status)
		status = m->run(b);
	kv_bench_end(b);
	return status;
}

int main(int argc, char **argv)
{
	struct kv_progress progress = {.off = true};
	struct kv_bench b = {.progress = &progress};
	bool json = false;
	int letter = 0, status;

	/* Looked for first, so that a wrong option before it is refused in JSON as well. */
	for (int i = 1; i < argc && strcmp(argv[i], "--"); i++)
		json |= !strcmp(argv[i], "--json") || !strcmp(argv[i], "-j");
	kv_emit_init(&b.emit, stdout, json);
	b.emit.one_line = true;
	status = parse_options(&b, argc, argv, &letter);
	kv_progress_init(&progress, b.emit.json);
	if (status)
		return status;
	if (letter == 'h')
		print_help(stdout);
	else if (letter == 'V')
		printf("kvbench %s\n", kv_version());
	else
		status = run(&b, argc - optind, argv + optind);
	if (kv_emit_end(&b.emit) < 0)
		return kv_bench_refuse(&b, KV_BENCH_FAILED, "stdout: the answer can't be written");
	return status;
}
