/* SPDX-License-Identifier: Apache-2.0 */
/* kvengine's command line. */
#ifndef KV_ENGINE_OPTIONS_H
#define KV_ENGINE_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Exit statuses, as all programs of the project have them. */
enum {
	KV_EXIT_DONE = 0,
	KV_EXIT_FAILED = 1,
	KV_EXIT_USAGE = 2,
	KV_EXIT_NO_DAEMON = 3,
};

struct kv_engine_prompt {
	char *text; /* malloc()ed */
	size_t len;
};

struct kv_engine_options {
	const char *model; /* a path, or a built-in one */
	struct kv_engine_prompt *prompts;
	size_t n_prompts;
	uint32_t n_tokens;
	const char *socket; /* NULL: the library's default */
	const char *pool;   /* NULL: named after the model */
	int device;	    /* enum kv_device; 0: whatever the daemon's device is */
	uint32_t gpu;
	int kv_dtype; /* enum kv_dtype */
	uint32_t block_tokens;
	uint32_t max_batch;
	uint32_t chunk;
	uint32_t n_threads; /* 0: one for each CPU */
	uint32_t wait_s;
	float temperature;
	uint32_t top_k;
	float top_p;
	uint64_t seed;
	bool chat;
	bool no_share;
	bool eager;
	bool ignore_eos;
	bool stats;
	const char *logits;	/* file, or NULL */
	const char *tokens_out; /* file, or NULL */
};

/*
 * kv_engine_options_parse() - read the arguments and the prompts' files
 *
 * Words about wrong usage go to stderr, help and version to stdout.
 * Return: -1: go on; else the exit status to end with.
 */
int kv_engine_options_parse(int argc, char **argv, struct kv_engine_options *ret);

void kv_engine_options_deinit(struct kv_engine_options *options);

#endif
