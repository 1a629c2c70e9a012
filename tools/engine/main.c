/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvengine: generates text with a model whose K and V lie in kvcached.
 *
 * What it shows of libkvclient: a pool named by what the weights are (so that engines share exactly
 * when they run the same model), sequences that begin with what is cached, batches, kernels on
 * views.
 */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "include/internal/cleanup.h"
#include "tools/engine/error.h"
#include "tools/engine/options.h"
#include "tools/engine/pools.h"
#include "tools/engine/scheduler.h"
#include "tools/engine/tiny.h"

struct engine {
	struct kv_engine_options options;
	struct kv_client *client;
	const struct kv_gpu *gpu; /* lives as long as the client */
	struct kv_gguf *file;
	struct kv_tokenizer *tokenizer;
	struct kv_model_shape shape;
	struct kv_dense *dense;
	struct kv_engine_pools pools;
	char pool_name[KV_NAME_MAX];
	struct kv_model *model;
	struct kv_scheduler *scheduler;
	struct kv_request *requests; /* one for each prompt */
	uint32_t max_blocks;	     /* of the longest sequence */
	float *logits;		     /* [n_prompts, n_vocab], or NULL */
	size_t i_shown;		     /* the prompt whose text is being written */
	size_t n_shown;		     /* of its tokens, those that are written */
};

static int load_file(struct engine *e)
{
	int r;

	r = kv_tiny_is(e->options.model) ? kv_tiny_new(e->options.model, &e->file)
					 : kv_gguf_open(e->options.model, &e->file);
	if (r < 0)
		return r;
	r = kv_model_shape_read(e->file, &e->shape);
	if (r < 0)
		return r;
	return kv_tokenizer_new(e->file, &e->tokenizer);
}

/* The daemon's device --gpu, which must be of the kind asked for. */
static int choose_device(struct engine *e)
{
	const struct kv_gpu *gpus;
	int n = kv_client_gpus(e->client, &gpus);

	for (int i = 0; i < n; i++) {
		if (gpus[i].index != (int32_t)e->options.gpu)
			continue;
		if (e->options.device && gpus[i].device != e->options.device)
			return kv_engine_error(-EINVAL,
					       "--device: the daemon's device %u is %s, on which "
					       "%s can't compute",
					       e->options.gpu, gpus[i].name,
					       e->options.device == KV_DEVICE_HOST ? "host"
										   : "cuda");
		e->gpu = &gpus[i];
		return 0;
	}
	return kv_engine_error(-EINVAL, "--gpu %u: the daemon has %d devices", e->options.gpu, n);
}

static int make_requests(struct engine *e)
{
	const struct kv_engine_options *o = &e->options;
	size_t longest = 0, len;
	int r;

	e->requests = calloc(o->n_prompts, sizeof(*e->requests));
	if (o->logits)
		e->logits = calloc(o->n_prompts * e->shape.n_vocab, sizeof(*e->logits));
	if (!e->requests || (o->logits && !e->logits))
		return kv_engine_error(-ENOMEM, "no memory for %zu prompts", o->n_prompts);

	for (size_t i = 0; i < o->n_prompts; i++) {
		struct kv_request *request = &e->requests[i];

		r = kv_tokenizer_prompt(e->tokenizer, o->prompts[i].text, o->prompts[i].len,
					o->chat, &request->tokens);
		if (r < 0)
			return r;

		request->n_prompt = request->tokens.n;
		if (!request->n_prompt || request->n_prompt > e->shape.n_ctx)
			return kv_engine_error(-EINVAL,
					       "prompt %zu has %zu tokens, the model takes 1..%u",
					       i, request->n_prompt, e->shape.n_ctx);
		for (size_t t = 0; t < request->n_prompt; t++)
			if ((uint32_t)request->tokens.at[t] >= e->shape.n_vocab)
				return kv_engine_error(
					-EINVAL, "the tokenizer gives token %d, the model has %u",
					request->tokens.at[t], e->shape.n_vocab);
		request->max_new = o->n_tokens;
		request->sampler = (struct kv_sampler){.temperature = o->temperature,
						       .top_k = o->top_k,
						       .top_p = o->top_p,
						       .state = o->seed + i};
		request->logits = e->logits ? e->logits + i * e->shape.n_vocab : NULL;
		len = request->n_prompt + o->n_tokens;
		longest = len > longest ? len : longest;
	}
	longest = longest < e->shape.n_ctx ? longest : e->shape.n_ctx;
	e->max_blocks = (longest + o->block_tokens - 1) / o->block_tokens;
	return 0;
}

static const char *dtype_name(int dtype)
{
	return dtype == KV_F32 ? "f32" : dtype == KV_F16 ? "f16" : "bf16";
}

/* What decides whether K and V can be shared is in the name; the daemon compares the rest. */
static int name_pool(struct engine *e, const char *model, const char *digest)
{
	const struct kv_engine_options *o = &e->options;
	uint64_t number;

	if (o->no_share) {
		if (getrandom(&number, sizeof(number), 0) != sizeof(number))
			return kv_engine_error(-errno, "getrandom: %m");
		snprintf(e->pool_name, sizeof(e->pool_name), "private-%016llx",
			 (unsigned long long)number);
	} else if (o->pool) {
		snprintf(e->pool_name, sizeof(e->pool_name), "%s", o->pool);
	} else {
		snprintf(e->pool_name, sizeof(e->pool_name), "%.20s-%.12s-%s-b%u-g%u", model,
			 digest, dtype_name(o->kv_dtype), o->block_tokens, o->gpu);
		for (char *c = e->pool_name; *c; c++) /* easy to type */
			*c = isalnum((unsigned char)*c) || *c == '.' ? *c : '-';
	}
	return 0;
}

static int open_pools(struct engine *e)
{
	const struct kv_engine_options *o = &e->options;
	char digest[KV_GGUF_DIGEST_BYTES], model[KV_NAME_MAX];
	struct kv_text name = {"model", 5};
	int r;

	kv_gguf_text(e->file, "general.name", &name); /* "model" stays where there is none */
	snprintf(model, sizeof(model), "%.*s", (int)(name.len < 63 ? name.len : 63), name.at);
	kv_gguf_digest(e->file, digest);
	r = name_pool(e, model, digest);
	if (r < 0)
		return r;
	return kv_engine_pools_open(
		&(struct kv_engine_pools_options){
			.client = e->client,
			.gpu = e->gpu,
			.file = e->file,
			.path = o->model,
			.shape = &e->shape,
			.name = e->pool_name,
			.model = model,
			.revision = digest,
			.name_space = o->no_share ? e->pool_name : NULL,
			.kv_dtype = o->kv_dtype,
			.block_tokens = o->block_tokens,
			.chunk = o->chunk,
		},
		&e->pools);
}

static int load_model(struct engine *e)
{
	const struct kv_engine_options *o = &e->options;
	kv_block_id null_blocks[KV_MODEL_MAX_GROUPS];
	struct kv_pool_info info;
	int r;

	r = kv_model_new(e->file, e->dense, o->chunk + o->max_batch, o->max_batch, e->max_blocks,
			 &e->model);
	if (!r)
		r = kv_model_use_groups(e->model, e->pools.of_layer, e->pools.n_groups);
	if (!r && !o->eager)
		r = kv_model_use_graphs(e->model);
	if (r < 0 || e->gpu->device == KV_DEVICE_HOST)
		return r;

	for (uint32_t g = 0; g < e->pools.n_groups; g++) {
		kv_pool_info(e->pools.group_pools[g], &info);
		null_blocks[g] = info.null_block;
	}
	return kv_model_warm_up(e->model, e->pools.views, null_blocks);
}

/* Texts come in the order of their prompts: that of the first unfinished one as it is generated. */
static void show_text(void *context, struct kv_request *request, int32_t token)
{
	struct engine *e = context;

	while (e->i_shown < e->options.n_prompts) {
		const struct kv_request *shown = &e->requests[e->i_shown];

		if (e->options.n_prompts > 1 && !e->n_shown && !shown->done &&
		    shown->tokens.n == shown->n_prompt)
			return;
		if (e->options.n_prompts > 1 && !e->n_shown)
			printf("== %zu ==\n", e->i_shown);
		for (; shown->n_prompt + e->n_shown < shown->tokens.n; e->n_shown++) {
			struct kv_text piece = kv_tokenizer_piece(
				e->tokenizer, shown->tokens.at[shown->n_prompt + e->n_shown]);

			fwrite(piece.at, 1, piece.len, stdout);
		}
		if (!shown->done)
			break;
		putchar('\n');
		e->i_shown++;
		e->n_shown = 0;
	}
	fflush(stdout);
}

static int generate(struct engine *e)
{
	const struct kv_engine_options *o = &e->options;
	struct kv_scheduler_options options = {
		.pools = &e->pools,
		.model = e->model,
		.tokenizer = e->tokenizer,
		.stream = e->dense->stream,
		.max_batch = o->max_batch,
		.chunk = o->chunk,
		.max_blocks = e->max_blocks,
		.share = !o->no_share,
		.ignore_end = o->ignore_eos,
		.wait_ns = o->wait_s * KV_SEC,
		.on_token = show_text,
		.context = e,
	};
	int r;

	r = kv_scheduler_new(&options, &e->scheduler);
	if (r < 0)
		return r;
	for (size_t i = 0; i < o->n_prompts; i++)
		kv_scheduler_add(e->scheduler, &e->requests[i]);
	return kv_scheduler_run(e->scheduler);
}

static int write_logits(const struct engine *e)
{
	size_t n = e->options.n_prompts * e->shape.n_vocab, written;
	FILE *f = fopen(e->options.logits, "we");

	if (!f)
		return kv_engine_error(-errno, "%s: %m", e->options.logits);

	written = fwrite(e->logits, sizeof(*e->logits), n, f);
	if (fclose(f) || written != n)
		return kv_engine_error(-EIO, "%s: %m", e->options.logits);
	return 0;
}

static int write_tokens(const struct engine *e)
{
	FILE *f = fopen(e->options.tokens_out, "we");

	if (!f)
		return kv_engine_error(-errno, "%s: %m", e->options.tokens_out);

	for (size_t i = 0; i < e->options.n_prompts; i++) {
		const struct kv_request *request = &e->requests[i];

		if (i)
			fputc('\n', f);
		for (size_t t = request->n_prompt; t < request->tokens.n; t++)
			fprintf(f, "%d\n", request->tokens.at[t]);
	}
	if (fclose(f))
		return kv_engine_error(-EIO, "%s: %m", e->options.tokens_out);
	return 0;
}

static void show_stats(const struct engine *e)
{
	for (size_t i = 0; i < e->options.n_prompts; i++) {
		const struct kv_request *request = &e->requests[i];
		size_t n = request->tokens.n - request->n_prompt;
		double decode_s = (request->last_ns - request->first_ns) * 1e-9;

		if (e->options.n_prompts > 1)
			fprintf(stderr, "sequence: %zu\n", i);
		fprintf(stderr, "prompt_tokens: %zu\n", request->n_prompt);
		fprintf(stderr, "hit_tokens: %zu\n", request->n_hit);
		fprintf(stderr, "generated_tokens: %zu\n", n);
		fprintf(stderr, "preemptions: %u\n", request->n_preempted);
		fprintf(stderr, "ttft_ms: %.2f\n",
			n ? (request->first_ns - request->added_ns) * 1e-6 : 0);
		fprintf(stderr, "decode_tokens_per_s: %.1f\n",
			n > 1 && decode_s > 0 ? (n - 1) / decode_s : 0);
	}
}

static int run(struct engine *e)
{
	const struct kv_engine_options *o = &e->options;
	int r;

	r = load_file(e);
	if (r < 0)
		return r;
	r = choose_device(e);
	if (r < 0)
		return r;
	r = make_requests(e);
	if (r < 0)
		return r;
	r = e->gpu->device == KV_DEVICE_HOST ? kv_dense_cpu(o->n_threads, &e->dense)
					     : kv_dense_cuda(e->gpu->uuid, &e->dense);
	if (r < 0)
		return r;
	r = open_pools(e);
	if (r < 0)
		return r;
	r = load_model(e);
	if (r < 0)
		return r;
	r = generate(e);
	if (r < 0)
		return r;

	if (o->stats)
		show_stats(e);
	if (o->logits) {
		r = write_logits(e);
		if (r < 0)
			return r;
	}
	if (o->tokens_out) {
		r = write_tokens(e);
		if (r < 0)
			return r;
	}
	if (fflush(stdout) || ferror(stdout))
		return kv_engine_error(-EIO, "stdout: %m");
	for (size_t i = 0; i < o->n_prompts; i++)
		if (e->requests[i].error)
			return kv_engine_error(e->requests[i].error, "prompt %zu: %s", i,
					       e->requests[i].why);
	return 0;
}

static void close_engine(struct engine *e)
{
	kv_scheduler_free(e->scheduler);
	kv_model_free(e->model);
	kv_engine_pools_close(&e->pools, e->options.no_share);
	kv_dense_close(e->dense);
	kv_tokenizer_free(e->tokenizer);
	kv_gguf_free(e->file);
	kv_disconnect(e->client);
	for (size_t i = 0; e->requests && i < e->options.n_prompts; i++)
		kv_tokens_deinit(&e->requests[i].tokens);
	free(e->requests);
	free(e->logits);
	kv_engine_options_deinit(&e->options);
}

int main(int argc, char **argv)
{
	struct engine e = {0};
	int r, status;

	status = kv_engine_options_parse(argc, argv, &e.options);
	if (status >= 0) {
		kv_engine_options_deinit(&e.options);
		return status;
	}

	KV_OPTIONS(kv_connect_options, how, .socket = e.options.socket, .name = "kvengine");
	r = kv_connect(&how, &e.client);
	if (r < 0) {
		fprintf(stderr, "kvengine: %s\n", kv_error_text());
		status = r == -ENOENT || r == -ECONNREFUSED ? KV_EXIT_NO_DAEMON : KV_EXIT_FAILED;
		close_engine(&e);
		return status;
	}
	r = run(&e);
	if (r < 0)
		fprintf(stderr, "kvengine: %s\n", kv_engine_error_text());
	close_engine(&e);
	return r < 0 ? KV_EXIT_FAILED : KV_EXIT_DONE;
}
