/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The public calls on blocks: check the arguments, choose a backend, run it.
 *
 * KVCACHED_BACKEND is read once, at the first call. A backend it names is used or the call fails:
 * a run never mixes backends in silence.
 */
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/error.h"
#include "include/internal/public.h"
#include "kernels/attention.h"
#include "kernels/cascade.h"
#include "kernels/write_rope.h"

#define MAX_BACKENDS 16 /* of one device */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char forced[KV_NAME_MAX]; /* KVCACHED_BACKEND; "": the first that can run */
static const char *names_host[MAX_BACKENDS + 1];
static const char *names_cuda[MAX_BACKENDS + 1];

static void list_names(int device, const char **names)
{
	int n = 0;

	for (int i = 0; kv_attn_backends[i] && n < MAX_BACKENDS; i++)
		if (kv_attn_backends[i]->device == device)
			names[n++] = kv_attn_backends[i]->name;
}

static void init(void)
{
	const char *name = getenv("KVCACHED_BACKEND");

	if (name)
		snprintf(forced, sizeof(forced), "%s", name);
	list_names(KV_DEVICE_HOST, names_host);
	list_names(KV_DEVICE_CUDA, names_cuda);
}

KV_PUBLIC const char *const *kv_backend_names(enum kv_device device)
{
	pthread_once(&once, init);
	return device == KV_DEVICE_CUDA ? names_cuda : names_host;
}

const struct kv_attn_backend *kv_attn_find(const char *name, int device)
{
	for (int i = 0; kv_attn_backends[i]; i++)
		if (kv_attn_backends[i]->device == device &&
		    strcmp(kv_attn_backends[i]->name, name) == 0)
			return kv_attn_backends[i];
	return NULL;
}

/* In one pass over all keys. */
static void refuse_pass(const struct kv_attn_backend *backend, const struct kv_attention_args *args,
			struct kv_refusals *refusals)
{
	struct kv_attention_query query;

	kv_attention_describe(args, &query);
	kv_attention_refuse(&backend->caps, &query, refusals);
	if (backend->refuse)
		backend->refuse(args, refusals);
}

void kv_attn_refuse(const struct kv_attn_backend *backend, const struct kv_attention_args *args,
		    struct kv_refusals *refusals)
{
	struct kv_attention_args passes[2], resolved;

	if (!kv_cascade_wanted(args)) {
		refuse_pass(backend, args, refusals);
		return;
	}
	kv_cascade_passes(args, &passes[0], &passes[1]);
	for (int i = 0; i < 2; i++)
		if (kv_attention_resolve_sizes(&passes[i], &resolved) == 0)
			refuse_pass(backend, &resolved, refusals);
}

/* Whether the environment leaves @backend in. */
static bool allowed(const struct kv_attn_backend *backend, int device)
{
	return backend->device == device &&
	       (!forced[0] || strcmp(forced, backend->name) == 0);
}

/* Says why none can: each backend's reasons. */
static int refuse_all(int device, const struct kv_attention_args *args)
{
	char text[KV_ERROR_BYTES];
	size_t n = 0;

	text[0] = 0;
	for (int i = 0; kv_attn_backends[i] && n + 1 < sizeof(text); i++) {
		const struct kv_attn_backend *backend = kv_attn_backends[i];
		struct kv_refusals refusals = {0};

		if (!allowed(backend, device))
			continue;
		n += (size_t)snprintf(text + n, sizeof(text) - n, "%s%s: ", n ? "\n" : "",
				      backend->name);
		if (n + 1 >= sizeof(text))
			break;
		refusals.text = text + n;
		refusals.room = sizeof(text) - n;
		kv_attn_refuse(backend, args, &refusals);
		n = strlen(text);
	}
	return kv_error(-ENOTSUP, "%s", text);
}

/* The first backend of @device (and of the environment's choice) that can run @args, if given. */
static int choose(int device, const struct kv_attention_args *args,
		  const struct kv_attn_backend **ret)
{
	bool any = false;

	pthread_once(&once, init);
	for (int i = 0; kv_attn_backends[i]; i++) {
		struct kv_refusals refusals = {0};

		if (!allowed(kv_attn_backends[i], device))
			continue;
		any = true;
		if (args)
			kv_attn_refuse(kv_attn_backends[i], args, &refusals);
		if (!refusals.bits) {
			*ret = kv_attn_backends[i];
			return 0;
		}
	}
	if (any)
		return refuse_all(device, args);
	if (forced[0])
		return kv_error(-ENOTSUP,
				"KVCACHED_BACKEND=%s: the device has no such backend; its first is "
				"%s",
				forced, kv_backend_names((enum kv_device)device)[0] ?: "none");
	return kv_error(-ENOTSUP, "device: this build has no CUDA");
}

KV_PUBLIC int kv_attention_caps(enum kv_device device, const char *name,
				struct kv_attention_caps *ret)
{
	const struct kv_attn_backend *backend = kv_attn_find(name, device);

	if (!backend)
		return kv_error(-ENOENT, "backend: the device has none called %s", name);
	*ret = backend->caps;
	ret->size = sizeof(*ret);
	return 0;
}

KV_PUBLIC int kv_attention_validate(const char *name, const struct kv_attention_args *args,
				    uint64_t *ret_reasons, char *text, size_t text_bytes)
{
	struct kv_refusals refusals = {.text = text, .room = text_bytes};
	const struct kv_attn_backend *backend;
	struct kv_attention_args resolved;
	int r;

	if (text && text_bytes)
		text[0] = 0;
	r = kv_attention_resolve_sizes(args, &resolved);
	if (r < 0)
		return r;
	backend = kv_attn_find(name, resolved.device);
	if (!backend)
		return kv_error(-ENOENT, "backend: the device has none called %s", name);
	kv_attn_refuse(backend, &resolved, &refusals);
	if (ret_reasons)
		*ret_reasons = refusals.bits;
	return refusals.bits ? kv_error(-ENOTSUP, "%s: %s", name, text ? text : "cannot run it") : 0;
}

KV_PUBLIC int kv_attention_select(const struct kv_attention_args *args, const char **ret_name)
{
	const struct kv_attn_backend *backend;
	struct kv_attention_args resolved;
	int r;

	r = kv_attention_resolve_sizes(args, &resolved);
	if (r < 0)
		return r;
	if (kv_cascade_wanted(&resolved)) {
		struct kv_attention_args shared, own;

		kv_cascade_passes(&resolved, &shared, &own);
		r = kv_attention_resolve_sizes(&own, &resolved);
		if (r < 0)
			return r;
	}
	r = choose(resolved.device, &resolved, &backend);
	if (r < 0)
		return r;
	*ret_name = backend->name;
	return 0;
}

int kv_write_on(const struct kv_attn_backend *backend, const struct kv_write_args *args)
{
	struct kv_write_args resolved;
	int r;

	r = kv_write_resolve(args, &resolved);
	if (r < 0)
		return r;
	if (!backend) {
		r = choose(resolved.device, NULL, &backend);
		if (r < 0)
			return r;
	}
	if (!resolved.n_tokens)
		return 0;
	if (resolved.k_scales || resolved.v_scales || resolved.k_row_scales.base)
		return kv_write_scaled(&resolved);
	return backend->write(&resolved);
}

int kv_attention_on(const struct kv_attn_backend *backend, const struct kv_attention_args *args)
{
	struct kv_attention_args resolved;
	char text[KV_ERROR_BYTES];
	struct kv_refusals refusals = {.text = text, .room = sizeof(text)};
	int r;

	r = kv_attention_resolve(args, &resolved);
	if (r < 0)
		return r;
	if (kv_cascade_wanted(&resolved) && resolved.n_tokens)
		return kv_cascade(backend, &resolved);
	if (!backend) {
		r = choose(resolved.device, &resolved, &backend);
		if (r < 0)
			return r;
	} else {
		kv_attn_refuse(backend, &resolved, &refusals);
		if (refusals.bits)
			return kv_error(-ENOTSUP, "%s: %s", backend->name, text);
	}
	return resolved.n_seqs && resolved.n_tokens ? backend->attention(&resolved) : 0;
}

int kv_copy_blocks_on(const struct kv_attn_backend *backend, const struct kv_copy_args *args)
{
	int r;

	r = kv_copy_check(args);
	if (r < 0)
		return r;
	if (!backend) {
		r = choose(args->device, NULL, &backend);
		if (r < 0)
			return r;
	}
	return args->n_pairs && args->n_views ? backend->copy(args) : 0;
}

/* What the first backend that can run @args in one pass would use of a workspace. */
static size_t pass_workspace(const struct kv_attention_args *args)
{
	struct kv_attention_args a = *args;

	for (int i = 0; kv_attn_backends[i]; i++) {
		const struct kv_attn_backend *backend = kv_attn_backends[i];
		struct kv_refusals refusals = {0};

		if (!allowed(backend, a.device))
			continue;
		a.workspace_bytes = backend->workspace_bytes ? backend->workspace_bytes(&a) : 0;
		a.workspace = &a; /* some memory: backends look at its size only */
		refuse_pass(backend, &a, &refusals);
		if (!refusals.bits)
			return a.workspace_bytes;
	}
	return 0;
}

KV_PUBLIC int kv_attention_workspace_bytes(const struct kv_attention_args *args, size_t *ret_bytes)
{
	struct kv_attention_args a;
	size_t bytes, more, cascade;
	int r;

	r = kv_attention_resolve_sizes(args, &a);
	if (r < 0)
		return r;
	pthread_once(&once, init);
	bytes = pass_workspace(&a);
	cascade = kv_cascade_bytes(&a);
	if (cascade) { /* the shared pass has all queries in one sequence */
		a.max_query_len = a.n_tokens;
		more = pass_workspace(&a);
		bytes = bytes > more ? bytes : more;
		bytes = (bytes / KV_WORKSPACE_ALIGN + 2) * KV_WORKSPACE_ALIGN + cascade;
	}
	*ret_bytes = bytes;
	return 0;
}

KV_PUBLIC int kv_write(const struct kv_write_args *args)
{
	return kv_write_on(NULL, args);
}

KV_PUBLIC int kv_attention(const struct kv_attention_args *args)
{
	return kv_attention_on(NULL, args);
}

KV_PUBLIC int kv_copy_blocks(const struct kv_copy_args *args)
{
	return kv_copy_blocks_on(NULL, args);
}
