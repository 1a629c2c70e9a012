/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench attention, write, merge: options, the product of their lists, ceilings, the table.
 *
 * A case is held against arithmetic in double before it is timed: one that is wrong has no time, and
 * the benchmark fails. Calls rotate over tables of disjoint blocks in random order, so that at least
 * KV_BENCH_ROTATED bytes are touched and nothing is warm in a cache. The ceiling is measured before and
 * after each case: a card has moods, and only ratios of one minute mean something.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dtype.h"
#include "tools/bench/paged.h"

#define NOISE_TAIL 4096 /* bytes of the start again, so that a row is in one piece */
#define COPIED	   ((size_t)128 << 20)
#define READ	   ((int64_t)4 << 30) /* of the pool, for the ceiling */

static const struct {
	const char *name;
	int dtype;
	double tolerance; /* |out - answer| / |answer| */
} types[] = {{"f32", KV_F32, 1e-5},	{"f16", KV_F16, 6e-4},	   {"bf16", KV_BF16, 4e-3},
	     {"e4m3", KV_F8_E4M3, 5e-3}, {"e5m2", KV_F8_E5M2, 5e-3}};
#define N_TYPES (sizeof(types) / sizeof(types[0]))

static const char *const layouts[] = {"nhd", "hnd", "nhd-flat", "hnd-flat"};

int kv_bench_wide_type(int dtype)
{
	return kv_dtype_bytes(dtype) == 1 ? KV_BF16 : dtype;
}

double kv_bench_tolerance(int dtype)
{
	for (size_t i = 0; i < N_TYPES; i++)
		if (types[i].dtype == dtype)
			return types[i].tolerance;
	return 0;
}

static const char *type_name(int dtype)
{
	for (size_t i = 0; i < N_TYPES; i++)
		if (types[i].dtype == dtype)
			return types[i].name;
	return "?";
}

static const char *layout_name(const struct kv_bench_case *c)
{
	return layouts[2 * c->flat + c->hnd];
}

struct kv_bench_name kv_bench_case_name(const struct kv_bench_case *c)
{
	struct kv_bench_name name;

	snprintf(name.text, sizeof(name.text), "%d/%d/%d %dx%dx%d %s page %d %s", c->heads_q, c->heads_kv,
		 c->dim, c->batch, c->query, c->context, type_name(c->dtype), c->page, layout_name(c));
	return name;
}

struct kv_view kv_bench_view(const struct kv_bench_case *c, int layers)
{
	int64_t row = (int64_t)c->dim * (int64_t)kv_dtype_bytes(c->dtype);
	int64_t half = row * c->heads_kv * c->page;

	return (struct kv_view){.block_stride = c->flat ? 2 * half * layers : half,
				.token_stride = c->hnd ? row : row * c->heads_kv,
				.head_stride = c->hnd ? row * c->page : row,
				.block_tokens = c->page,
				.n_heads = c->heads_kv,
				.head_dim = c->dim,
				.dtype = c->dtype,
				.scale = 1};
}

/* ---- noise ---- */

uint32_t kv_bench_random(void)
{
	static uint64_t state = 1;

	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (uint32_t)(state >> 32);
}

const char *kv_bench_noise_at(int dtype, int64_t offset)
{
	static char *all[N_TYPES];
	size_t t = 0;

	while (t + 1 < N_TYPES && types[t].dtype != dtype)
		t++;
	if (!all[t]) {
		char *noise = all[t] = malloc(KV_BENCH_NOISE + NOISE_TAIL);

		if (!noise)
			abort();
		for (int64_t i = 0; i < KV_BENCH_NOISE / (int64_t)kv_dtype_bytes(dtype); i++)
			kv_element_store(noise, i, dtype, (float)(int32_t)kv_bench_random() * 0x1p-30f);
		memcpy(noise + KV_BENCH_NOISE, noise, NOISE_TAIL);
	}
	return all[t] + offset % KV_BENCH_NOISE;
}

static void fill(void *to, int64_t bytes, int dtype)
{
	int64_t some = bytes < KV_BENCH_NOISE ? bytes : KV_BENCH_NOISE;

	kv_bench_device_tile(to, (size_t)bytes, kv_bench_noise_at(dtype, 0), (size_t)some);
}

void *kv_bench_noise_new(int64_t n, int dtype)
{
	int64_t bytes = n * (int64_t)kv_dtype_bytes(dtype);
	void *p = kv_bench_device_alloc((size_t)bytes);

	fill(p, bytes, dtype);
	return p;
}

static struct {
	void *base;
	int64_t bytes;
	int dtype;
} pool;

void *kv_bench_pool(int64_t bytes, int dtype)
{
	if (pool.bytes < bytes) {
		if (pool.base)
			kv_bench_device_free(pool.base);
		pool.base = kv_bench_device_alloc((size_t)bytes);
		pool.bytes = bytes;
		pool.dtype = 0;
	}
	if (pool.dtype != dtype)
		fill(pool.base, pool.bytes, dtype);
	pool.dtype = dtype;
	return pool.base;
}

void *kv_bench_upload(const void *from, size_t bytes)
{
	void *p = kv_bench_device_alloc(bytes);

	kv_bench_device_put(p, from, bytes);
	return p;
}

/* ---- ceilings ---- */

static double ceiling(bool copies)
{
	static void *from, *to;

	if (!copies && pool.base)
		return kv_bench_device_read(pool.base,
					    (size_t)(pool.bytes < READ ? pool.bytes : READ));
	if (!from) { /* kept: no content, as long as the process */
		from = kv_bench_device_alloc(COPIED);
		to = kv_bench_device_alloc(COPIED);
	}
	return copies ? kv_bench_device_copy(to, from, COPIED) : kv_bench_device_read(from, COPIED);
}

int kv_bench_time_case(const struct kv_bench *b, const char *what,
		       int (*call)(void *context, int i, void *stream), void *context, int n, bool copies,
		       struct kv_bench_result *ret)
{
	double before = ceiling(copies);

	if (kv_bench_device_time(call, context, n, &ret->seconds))
		return kv_bench_broken(b, what, -1);
	ret->ceiling = (before + ceiling(copies)) / 2;
	return KV_BENCH_DONE;
}

/* ---- cases ---- */

/* Where nothing is said: few and many heads, short and long. */
static const struct kv_bench_case some_cases[] = {
	{32, 8, 128, 1, 1, 1024, 0, 0, false, false, false},
	{32, 8, 128, 8, 1, 4096, 0, 0, false, false, false},
	{32, 8, 128, 32, 1, 4096, 0, 0, false, false, false},
	{32, 8, 128, 8, 1, 65536, 0, 0, false, false, false},
	{8, 1, 128, 8, 1, 4096, 0, 0, false, false, false},
	{8, 1, 128, 32, 1, 16384, 0, 0, false, false, false},
	{64, 8, 64, 1, 1, 1024, 0, 0, false, false, false},
	{64, 8, 64, 32, 1, 4096, 0, 0, false, false, false},
};

#define MAX_CASES 4096

struct cases {
	struct kv_bench_case *c;
	size_t n;
};

static void add_case(struct cases *all, struct kv_bench_case c)
{
	if (!all->c)
		all->c = calloc(MAX_CASES, sizeof(*all->c));
	if (!all->c)
		abort();
	if (all->n < MAX_CASES)
		all->c[all->n++] = c;
}

/* @c at each page size, type and layout. */
static void add_forms(const struct kv_bench_kernel *k, struct cases *all, struct kv_bench_case c)
{
	for (uint32_t t = 0; t < (k->dtype.n ?: 1); t++)
		for (uint32_t p = 0; p < (k->page.n ?: 1); p++)
			for (uint32_t l = 0; l < (k->layout.n ?: 1); l++) {
				uint32_t layout = k->layout.n ? k->layout.v[l] : 0;

				c.dtype = k->dtype.n ? (int)k->dtype.v[t] : KV_BF16;
				c.page = k->page.n ? (int)k->page.v[p] : 16;
				c.hnd = layout & 1;
				c.flat = layout >> 1;
				add_case(all, c);
			}
}

/* The product of shapes and points, or of shapes, contexts, new tokens and batches. */
static void add_points(const struct kv_bench_kernel *k, struct cases *all, struct kv_bench_case c)
{
	for (uint32_t i = 0; i < k->n_points; i++) {
		c.batch = (int)k->points[i].batch;
		c.query = (int)k->points[i].query;
		c.context = (int)k->points[i].context;
		add_forms(k, all, c);
	}
	for (uint32_t x = 0; x < (k->context.n ?: 1) && !k->n_points; x++)
		for (uint32_t q = 0; q < (k->query.n ?: 1); q++)
			for (uint32_t s = 0; s < (k->batch.n ?: 1); s++) {
				c.context = k->context.n ? (int)k->context.v[x] : 4096;
				c.query = k->query.n ? (int)k->query.v[q] : 1;
				c.batch = k->batch.n ? (int)k->batch.v[s] : 8;
				add_forms(k, all, c);
			}
}

static void all_cases(const struct kv_bench_kernel *k, struct cases *all)
{
	struct kv_bench_case c = {.heads_q = 32, .heads_kv = 8, .dim = 128};

	if (!k->n_shapes && !k->n_points && !k->context.n && !k->query.n && !k->batch.n) {
		for (size_t i = 0; i < sizeof(some_cases) / sizeof(some_cases[0]); i++)
			add_forms(k, all, some_cases[i]);
		return;
	}
	if (!k->n_shapes)
		add_points(k, all, c);
	for (uint32_t i = 0; i < k->n_shapes; i++) {
		c.heads_q = (int)k->shapes[i].heads_q;
		c.heads_kv = (int)k->shapes[i].heads_kv;
		c.dim = (int)k->shapes[i].dim;
		add_points(k, all, c);
	}
}

/* ---- the table ---- */

/* The best other kernel's time in us, of lines "shape context batch type us name"; 0: none is known. */
static double peer_of(const struct kv_bench *b, const struct kv_bench_case *c)
{
	const char *kind = kv_dtype_bytes(c->dtype) == 1 ? "fp8" : type_name(c->dtype);
	char line[256], shape[32], dtype[16];
	FILE *f = b->kernel.peers ? fopen(b->kernel.peers, "re") : NULL;
	int q, kv, dim, context, batch;
	double us, found = 0;

	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "%31s %d %d %15s %lf", shape, &context, &batch, dtype, &us) == 5 &&
		    sscanf(shape, "%d/%d/%d", &q, &kv, &dim) == 3 && q == c->heads_q &&
		    kv == c->heads_kv && dim == c->dim && context == c->context && batch == c->batch &&
		    c->query == 1 && !c->ragged && !strcmp(dtype, kind))
			found = us;
	if (f)
		fclose(f);
	return found;
}

static void show(struct kv_emit *e, const struct kv_bench_case *c, const struct kv_bench_result *r,
		 const char *of, double of_uniform, double peer)
{
	double rate = r->bytes / r->seconds;

	kv_emit_open(e, NULL, '{');
	kv_emit_number(e, "heads_q", (uint64_t)c->heads_q);
	kv_emit_number(e, "heads_kv", (uint64_t)c->heads_kv);
	kv_emit_number(e, "head_dim", (uint64_t)c->dim);
	kv_emit_number(e, "batch", (uint64_t)c->batch);
	kv_emit_number(e, "query", (uint64_t)c->query);
	kv_emit_number(e, "context", (uint64_t)c->context);
	kv_emit_number(e, "page", (uint64_t)c->page);
	kv_emit_text(e, "dtype", type_name(c->dtype));
	kv_emit_text(e, "layout", layout_name(c));
	kv_emit_bool(e, "ragged", c->ragged);
	kv_emit_text(e, "backend", r->backend);
	kv_emit_real(e, "microseconds", r->seconds * 1e6);
	kv_emit_real(e, "bytes", r->bytes);
	kv_emit_real(e, "flops", r->flops);
	kv_emit_real(e, "ceiling_bytes_per_second", r->ceiling);
	kv_emit_real(e, of, rate / r->ceiling);
	kv_emit_real(e, "of_uniform", of_uniform > 0 ? of_uniform : NAN);
	kv_emit_real(e, "peer_microseconds", peer > 0 ? peer : NAN);
	kv_emit_real(e, "error", r->error);
	kv_emit_close(e);
	kv_emit_cell(e, "%d/%d/%d", c->heads_q, c->heads_kv, c->dim);
	kv_emit_cell(e, c->query > 1 ? "%dx%d" : "%d", c->batch, c->query);
	kv_emit_cell(e, "%d%s", c->context, c->ragged ? "*" : "");
	kv_emit_cell(e, "%s %d %s", type_name(c->dtype), c->page, layout_name(c));
	kv_emit_cell(e, "%s", r->backend);
	kv_emit_cell(e, "%.2f", r->seconds * 1e6);
	kv_emit_cell(e, "%.1f", rate / 1e9);
	kv_emit_cell(e, "%.3f", rate / r->ceiling);
	kv_emit_cell(e, r->flops > 0 ? "%.1f" : "-", r->flops / r->seconds / 1e12);
	kv_emit_cell(e, of_uniform > 0 ? "%.3f" : "-", of_uniform);
	kv_emit_cell(e, peer > 0 ? "%.3f" : "-", peer / (r->seconds * 1e6));
	kv_emit_cell(e, "%.1e", r->error);
}

static void show_ceilings(struct kv_emit *e)
{
	struct kv_bench_ceilings c = {0};

	kv_bench_device_ceilings(&c);
	kv_emit_open(e, "ceilings", '{');
	kv_emit_real(e, "read_bytes_per_second", c.read);
	kv_emit_real(e, "write_bytes_per_second", c.write);
	kv_emit_real(e, "copy_bytes_per_second", c.copy);
	kv_emit_real(e, "gather_bytes_per_second", c.gather);
	kv_emit_real(e, "empty_kernel_seconds", c.empty);
	kv_emit_real(e, "matmul_flops_per_second", c.matmul > 0 ? c.matmul : NAN);
	kv_emit_close(e);
	if (!c.write)
		return;
	kv_emit_line(e, "Ceilings, TB/s: read %.3f, write %.3f, copy %.3f (read and written), gather of "
		     "16 KiB %.3f; empty kernel in a graph %.2f us; bf16 matmul of 8192 %.0f TFLOP/s",
		     c.read / 1e12, c.write / 1e12, c.copy / 1e12, c.gather / 1e12, c.empty * 1e6,
		     c.matmul / 1e12);
}

static int run_case(struct kv_bench *b, kv_bench_run *run, const char *of, struct kv_bench_case *c,
		    double *log_sum, int *n_peers)
{
	struct kv_bench_result result = {.backend = "-"}, ragged = {.backend = "-"};
	double peer = peer_of(b, c), uniform;
	int status = run(b, c, &result);

	if (status)
		return status;
	if (peer > 0) {
		*log_sum += log(peer / (result.seconds * 1e6));
		++*n_peers;
	}
	show(&b->emit, c, &result, of, 0, peer);
	if (!b->kernel.ragged)
		return status;
	uniform = result.bytes / result.seconds / result.ceiling;
	c->ragged = true;
	status = run(b, c, &ragged);
	if (!status)
		show(&b->emit, c, &ragged, of,
		     ragged.bytes / ragged.seconds / ragged.ceiling / uniform, 0);
	return status;
}

static int run_all(struct kv_bench *b, kv_bench_run *run, const char *of)
{
	struct kv_emit *e = &b->emit;
	struct cases all = {0};
	int status = KV_BENCH_DONE, n_peers = 0;
	double log_sum = 0;
	char device[128];

	if (!kv_bench_device_present(device, sizeof(device)))
		return kv_bench_refuse(b, KV_BENCH_FAILED, "no GPU; --device host measures this machine");
	if (b->kernel.backend)
		setenv("KVCACHED_BACKEND", b->kernel.backend, 1);
	all_cases(&b->kernel, &all);
	kv_emit_open(e, NULL, '{');
	kv_emit_text(e, "device", device);
	kv_emit_line(e, "%s; OF: share of the rate of a %s, measured before and after the case", device,
		     strcmp(of, "of_read") ? "copy" : "plain read");
	show_ceilings(e);
	kv_emit_open(e, "cases", '[');
	kv_emit_head(e, "<HEADS", ">BATCH", ">CONTEXT", "<CACHE", "<BACKEND", ">US", ">GB/S", ">OF",
		     ">TFLOP/S", ">OF_UNIFORM", ">PEER/OURS", ">ERROR", NULL);
	for (size_t i = 0; i < all.n && !status; i++) {
		kv_bench_progress(b, i, all.n, "cases");
		status = run_case(b, run, of, &all.c[i], &log_sum, &n_peers);
	}
	kv_bench_progress(b, all.n, all.n, "cases");
	kv_emit_table(e);
	kv_emit_close(e);
	kv_emit_real(e, "peers_over_ours", n_peers ? exp(log_sum / n_peers) : NAN);
	if (n_peers)
		kv_emit_line(e, "Geometric mean of PEER/OURS over %d cases: %.3f", n_peers,
			     exp(log_sum / n_peers));
	kv_emit_close(e);
	free(all.c);
	return status;
}

int kv_bench_attention(struct kv_bench *b)
{
	return run_all(b, kv_bench_run_attention, "of_read");
}

int kv_bench_write(struct kv_bench *b)
{
	return run_all(b, kv_bench_run_write, "of_copy");
}

int kv_bench_merge(struct kv_bench *b)
{
	return run_all(b, kv_bench_run_merge, "of_copy");
}

/* ---- options ---- */

static int parse_list(const struct kv_bench *b, const char *option, const char *text, uint32_t max,
		      struct kv_bench_list *ret)
{
	const char *at = text;
	char *end;

	for (ret->n = 0;; at = end + 1) {
		unsigned long n = strtoul(at, &end, 10);

		if (*at < '0' || *at > '9' || n < 1 || n > max || ret->n == KV_BENCH_LIST ||
		    (*end && *end != ','))
			return kv_bench_refuse(b, KV_BENCH_USAGE, "--%s: '%s' given; up to %d numbers "
					       "of 1..%u expected, with commas between", option, text,
					       KV_BENCH_LIST, max);
		ret->v[ret->n++] = (uint32_t)n;
		if (!*end)
			return KV_BENCH_DONE;
	}
}

/* Names of a table: @find has a name's number, or -1. */
static int parse_names(const struct kv_bench *b, const char *option, const char *text,
		       int (*find)(const char *name), const char *wanted, struct kv_bench_list *ret)
{
	char words[128], *rest = words, *word;

	snprintf(words, sizeof(words), "%s", text);
	for (ret->n = 0; (word = strsep(&rest, ","));) {
		int number = find(word);

		if (number < 0 || ret->n == KV_BENCH_LIST)
			return kv_bench_refuse(b, KV_BENCH_USAGE, "--%s: '%s' given; %s expected, or "
					       "several with commas between", option, text, wanted);
		ret->v[ret->n++] = (uint32_t)number;
	}
	return KV_BENCH_DONE;
}

static int find_type(const char *name)
{
	for (size_t i = 0; i < N_TYPES; i++)
		if (!strcmp(types[i].name, name))
			return types[i].dtype;
	return -1;
}

static int find_layout(const char *name)
{
	for (int i = 0; i < 4; i++)
		if (!strcmp(layouts[i], name))
			return i;
	return -1;
}

static int parse_shapes(struct kv_bench *b, const char *text)
{
	struct kv_bench_kernel *k = &b->kernel;
	char words[256], *rest = words, *word, more;

	snprintf(words, sizeof(words), "%s", text);
	for (k->n_shapes = 0; (word = strsep(&rest, ","));) {
		struct kv_bench_shape s = {0};

		if (k->n_shapes == KV_BENCH_LIST ||
		    sscanf(word, "%u/%u/%u%c", &s.heads_q, &s.heads_kv, &s.dim, &more) != 3 ||
		    !s.heads_kv || !s.heads_q || s.heads_q % s.heads_kv || s.heads_q > 1024 || !s.dim ||
		    s.dim > 1024)
			return kv_bench_refuse(b, KV_BENCH_USAGE, "--shape: '%s' given, query heads/KV "
					       "heads/head size expected, as 32/8/128", text);
		k->shapes[k->n_shapes++] = s;
	}
	return KV_BENCH_DONE;
}

static int parse_points(struct kv_bench *b, const char *text)
{
	struct kv_bench_kernel *k = &b->kernel;
	char words[512], *rest = words, *word, more;

	snprintf(words, sizeof(words), "%s", text);
	for (k->n_points = 0; (word = strsep(&rest, ","));) {
		struct kv_bench_point p = {0};

		if (k->n_points == KV_BENCH_LIST ||
		    sscanf(word, "%ux%ux%u%c", &p.batch, &p.query, &p.context, &more) != 3 || !p.batch ||
		    p.batch > 1 << 20 || !p.query || p.query > p.context || p.context > 1 << 22)
			return kv_bench_refuse(b, KV_BENCH_USAGE, "--point: '%s' given, sequences x new "
					       "tokens x all tokens expected, as 8x512x4096", text);
		k->points[k->n_points++] = p;
	}
	return KV_BENCH_DONE;
}

static int parse_one(const struct kv_bench *b, const char *option, const char *text, uint32_t max,
		     uint32_t *ret)
{
	struct kv_bench_list list;
	int status = parse_list(b, option, text, max, &list);

	*ret = list.v[0];
	return status;
}

int kv_bench_kernel_option(struct kv_bench *b, const char *option, const char *text)
{
	struct kv_bench_kernel *k = &b->kernel;
	char *end;

	if (!strcmp(option, "shape"))
		return parse_shapes(b, text);
	if (!strcmp(option, "point"))
		return parse_points(b, text);
	if (!strcmp(option, "batch"))
		return parse_list(b, option, text, 1 << 20, &k->batch);
	if (!strcmp(option, "query"))
		return parse_list(b, option, text, 1 << 20, &k->query);
	if (!strcmp(option, "context"))
		return parse_list(b, option, text, 1 << 22, &k->context);
	if (!strcmp(option, "page"))
		return parse_list(b, option, text, KV_MAX_BLOCK_TOKENS, &k->page);
	if (!strcmp(option, "pool"))
		return parse_one(b, option, text, 1024, &k->pool_gib);
	if (!strcmp(option, "layers"))
		return parse_one(b, option, text, 1024, &k->layers);
	if (!strcmp(option, "dtype"))
		return parse_names(b, option, text, find_type, "f32, f16, bf16, e4m3 or e5m2", &k->dtype);
	if (!strcmp(option, "layout"))
		return parse_names(b, option, text, find_layout, "nhd, hnd, nhd-flat or hnd-flat",
				   &k->layout);
	if (!strcmp(option, "window"))
		return parse_one(b, option, text, 1 << 22, &k->window);
	if (!strcmp(option, "softcap")) {
		k->softcap = strtod(text, &end);
		return !*end && k->softcap > 0 && k->softcap < 1e6
			       ? KV_BENCH_DONE
			       : kv_bench_refuse(b, KV_BENCH_USAGE, "--softcap: '%s' given, a number "
						 "above 0 expected", text);
	}
	if (!strcmp(option, "invariant"))
		k->invariant = true;
	else if (!strcmp(option, "peers"))
		k->peers = text;
	else if (!strcmp(option, "backend"))
		k->backend = text;
	else
		k->ragged = text;
	return KV_BENCH_DONE;
}
