/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The public calls on state rows: check the arguments, choose a backend, run it.
 *
 * KVCACHED_STATE_BACKEND is read once, at the first call. A backend it names is used or the call
 * fails: a run never mixes backends in silence.
 */
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/error.h"
#include "include/internal/public.h"
#include "kernels/gdn.h"

#define MAX_BACKENDS 8 /* of one device */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char forced[KV_NAME_MAX]; /* KVCACHED_STATE_BACKEND; "": the first that can run */
static const char *names_host[MAX_BACKENDS + 1];
static const char *names_cuda[MAX_BACKENDS + 1];

static void list_names(int device, const char **names)
{
	int n = 0;

	for (int i = 0; kv_state_backends[i] && n < MAX_BACKENDS; i++)
		if (kv_state_backends[i]->device == device)
			names[n++] = kv_state_backends[i]->name;
}

static void init(void)
{
	const char *name = getenv("KVCACHED_STATE_BACKEND");

	if (name)
		snprintf(forced, sizeof(forced), "%s", name);
	list_names(KV_DEVICE_HOST, names_host);
	list_names(KV_DEVICE_CUDA, names_cuda);
}

KV_PUBLIC const char *const *kv_state_backend_names(enum kv_device device)
{
	pthread_once(&once, init);
	return device == KV_DEVICE_CUDA ? names_cuda : names_host;
}

const struct kv_state_backend *kv_state_find(const char *name, int device)
{
	for (int i = 0; kv_state_backends[i]; i++)
		if (kv_state_backends[i]->device == device &&
		    strcmp(kv_state_backends[i]->name, name) == 0)
			return kv_state_backends[i];
	return NULL;
}

void kv_state_because(struct kv_state_reasons *why, uint64_t bit, const char *format, ...)
{
	const size_t room = sizeof(why->text);
	va_list args;
	int n;

	if (why->len && why->len < room)
		why->len += (size_t)snprintf(why->text + why->len, room - why->len, "; ");
	if (why->len < room) {
		va_start(args, format);
		n = vsnprintf(why->text + why->len, room - why->len, format, args);
		va_end(args);
		why->len += n > 0 ? (size_t)n : 0;
	}
	why->bits |= bit;
}

int kv_state_can_run(const struct kv_state_backend *backend, const struct kv_recur *args,
		     struct kv_state_reasons *why)
{
	struct kv_state_reasons all = {0};

	if (backend->compare)
		backend->compare(args, &all);
	if (why)
		*why = all;
	return all.bits ? kv_error(-ENOTSUP, "%s", all.text) : 0;
}

/* The first backend of @device (and of the environment's choice) that can run @args, if not NULL. */
static int choose(int device, const struct kv_recur *args, const struct kv_state_backend **ret)
{
	int r;

	pthread_once(&once, init);
	if (forced[0] && !kv_state_find(forced, device))
		r = kv_error(-ENOTSUP,
			     "KVCACHED_STATE_BACKEND=%s: the device has no such backend; its first "
			     "is %s",
			     forced, kv_state_backend_names((enum kv_device)device)[0] ?: "none");
	else
		r = kv_error(-ENOTSUP, "device: this build has no CUDA");
	for (int i = 0; kv_state_backends[i]; i++) {
		const struct kv_state_backend *backend = kv_state_backends[i];

		if (backend->device != device || (forced[0] && strcmp(forced, backend->name) != 0))
			continue;
		r = args ? kv_state_can_run(backend, args, NULL) : 0;
		if (r == 0) {
			*ret = backend;
			return 0;
		}
	}
	return r;
}

static int run(const struct kv_state_backend *backend, const struct kv_recur *args)
{
	int r = backend ? kv_state_can_run(backend, args, NULL)
			: choose(args->device, args, &backend);

	if (r < 0)
		return r;
	return args->batch.n_seqs && args->batch.n_tokens ? backend->run(args) : 0;
}

int kv_gdn_on(const struct kv_state_backend *backend, const struct kv_gdn_args *args)
{
	struct kv_recur resolved;
	int r = kv_gdn_resolve(args, false, &resolved);

	return r < 0 ? r : run(backend, &resolved);
}

int kv_ssd_on(const struct kv_state_backend *backend, const struct kv_ssd_args *args)
{
	struct kv_recur resolved;
	int r = kv_ssd_resolve(args, false, &resolved);

	return r < 0 ? r : run(backend, &resolved);
}

int kv_conv1d_on(const struct kv_state_backend *backend, const struct kv_conv1d_args *args)
{
	struct kv_conv1d_args resolved;
	int r = kv_conv1d_resolve(args, &resolved);

	if (r < 0)
		return r;
	r = backend ? 0 : choose(resolved.device, NULL, &backend);
	if (r < 0)
		return r;
	return resolved.batch.n_seqs && resolved.batch.n_tokens ? backend->convolve(&resolved) : 0;
}

int kv_recur_workspace(const struct kv_state_backend *backend, const struct kv_recur *args,
		       size_t *ret_bytes)
{
	struct kv_recur a = *args;
	int r;

	a.workspace_bytes = backend->workspace_bytes ? backend->workspace_bytes(&a) : 0;
	a.workspace = a.workspace_bytes ? ret_bytes : NULL; /* some memory: its size is looked at */
	r = kv_state_can_run(backend, &a, NULL);
	if (r < 0)
		return r;
	*ret_bytes = a.workspace_bytes;
	return 0;
}

static int workspace(const struct kv_recur *args, size_t *ret_bytes)
{
	pthread_once(&once, init);
	for (int i = 0; kv_state_backends[i]; i++) {
		const struct kv_state_backend *backend = kv_state_backends[i];

		if (backend->device == args->device &&
		    (!forced[0] || strcmp(forced, backend->name) == 0) &&
		    kv_recur_workspace(backend, args, ret_bytes) == 0)
			return 0;
	}
	*ret_bytes = 0;
	return 0;
}

KV_PUBLIC int kv_gdn_workspace_bytes(const struct kv_gdn_args *args, size_t *ret_bytes)
{
	struct kv_recur resolved;
	int r = kv_gdn_resolve(args, true, &resolved);

	return r < 0 ? r : workspace(&resolved, ret_bytes);
}

KV_PUBLIC int kv_ssd_workspace_bytes(const struct kv_ssd_args *args, size_t *ret_bytes)
{
	struct kv_recur resolved;
	int r = kv_ssd_resolve(args, true, &resolved);

	return r < 0 ? r : workspace(&resolved, ret_bytes);
}

/* @r: what the check said; then @name's reasons against @args, if not NULL. */
static int validate(int r, const char *name, int device, const struct kv_recur *args,
		    uint64_t *ret_reasons, char *text, size_t text_bytes)
{
	const struct kv_state_backend *backend = kv_state_find(name, device);
	struct kv_state_reasons why = {0};

	if (!r && !backend)
		r = kv_error(-ENOENT, "backend: the device has none called %s", name);
	if (!r && args)
		r = kv_state_can_run(backend, args, &why);
	if (ret_reasons)
		*ret_reasons = why.bits;
	if (text && text_bytes)
		snprintf(text, text_bytes, "%s", r ? kv_error_text() : "");
	return r;
}

KV_PUBLIC int kv_gdn_validate(const char *backend, const struct kv_gdn_args *args,
			      uint64_t *ret_reasons, char *text, size_t text_bytes)
{
	struct kv_recur resolved;

	return validate(kv_gdn_resolve(args, false, &resolved), backend, args->device, &resolved,
			ret_reasons, text, text_bytes);
}

KV_PUBLIC int kv_ssd_validate(const char *backend, const struct kv_ssd_args *args,
			      uint64_t *ret_reasons, char *text, size_t text_bytes)
{
	struct kv_recur resolved;

	return validate(kv_ssd_resolve(args, false, &resolved), backend, args->device, &resolved,
			ret_reasons, text, text_bytes);
}

KV_PUBLIC int kv_conv1d_validate(const char *backend, const struct kv_conv1d_args *args,
				 uint64_t *ret_reasons, char *text, size_t text_bytes)
{
	struct kv_conv1d_args resolved;

	return validate(kv_conv1d_resolve(args, &resolved), backend, args->device, NULL,
			ret_reasons, text, text_bytes);
}

KV_PUBLIC int kv_gdn(const struct kv_gdn_args *args)
{
	return kv_gdn_on(NULL, args);
}

KV_PUBLIC int kv_ssd(const struct kv_ssd_args *args)
{
	return kv_ssd_on(NULL, args);
}

KV_PUBLIC int kv_conv1d(const struct kv_conv1d_args *args)
{
	return kv_conv1d_on(NULL, args);
}

KV_PUBLIC int kv_state_column(int64_t n_tokens, int64_t interval, int64_t width,
			      int64_t *ret_column)
{
	int64_t column;

	if (n_tokens < 1)
		return kv_error(-EINVAL, "n_tokens: %lld given, 1 or more have a state",
				(long long)n_tokens);
	if (interval < 1)
		return kv_error(-EINVAL, "interval: %lld given, 1 or more expected",
				(long long)interval);
	column = (n_tokens - 1) / interval;
	if (column >= width)
		return kv_error(
			-ERANGE,
			"n_tokens: the state after %lld tokens is in column %lld of intervals "
			"of %lld, the table has %lld",
			(long long)n_tokens, (long long)column, (long long)interval,
			(long long)width);
	*ret_column = column;
	return n_tokens % interval ? KV_STATE_RUNNING : 0;
}
