/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fields of the daemon's stats as metrics. Names follow from a field's name and unit:
 *
 *	pool.hit_tokens_total	tokens	kvcached_pool_hit_tokens_total{pool="..."}	counter
 *	gpu.bytes_free		bytes	kvcached_gpu_free_bytes{gpu="0"}		gauge
 *	daemon.uptime_ns	ns	kvcached_uptime_seconds				gauge
 *	pool.n_sessions			kvcached_pool_sessions{pool="..."}		gauge
 *
 * What says which thing it is (texts, ids) is a label of kvcached_..._info. Where that makes no good
 * name, special[] has the right one: there stand the states of blocks, which add up. A field that is
 * new is a metric without a line here.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/daemon.h"
#include "daemon/metrics.h"
#include "include/internal/cleanup.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
#define NAME_MAX_BYTES 96

static const struct kind {
	const char *prefix, *field_prefix;
	const char *labels[4]; /* fields that tell its items apart; ends with NULL */
} kinds[] = {
	[KV_STAT_DAEMON] = { "kvcached_", "daemon", { NULL } },
	[KV_STAT_GPU] = { "kvcached_gpu_", "gpu", { "index" } },
	[KV_STAT_POOL] = { "kvcached_pool_", "pool", { "name" } },
	[KV_STAT_SESSION] = { "kvcached_session_", "session", { "pool", "client", "id" } },
};

/*
 * A field with a name of its own: "" is none; a label and another help may come with it. Rows of one
 * name stand together, and are printed where the first of them is among the fields.
 */
static const struct special {
	uint8_t kind;
	const char *field, *name, *label, *help;
} special[] = {
	{ KV_STAT_DAEMON, "worker_restarts", "worker_restarts_total", NULL, NULL },
	{ KV_STAT_POOL, "blocks_total", "", NULL, NULL }, /* the sum of the states */
	{ KV_STAT_POOL, "blocks_free", "blocks", "state=\"free\"", "blocks by state" },
	{ KV_STAT_POOL, "blocks_leased", "blocks", "state=\"leased\"", NULL },
	{ KV_STAT_POOL, "blocks_cached", "blocks", "state=\"cached\"", NULL },
	{ KV_STAT_POOL, "blocks_quarantined", "blocks", "state=\"quarantined\"", NULL },
	{ KV_STAT_POOL, "evictions_total", "", NULL, NULL }, /* the sum of the reasons */
	{ KV_STAT_POOL, "evictions_own_total", "evictions_total", "reason=\"own\"",
	  "cached blocks given up, by who needed them" },
	{ KV_STAT_POOL, "evictions_others_total", "evictions_total", "reason=\"others\"", NULL },
	{ KV_STAT_POOL, "evictions_drop_total", "evictions_total", "reason=\"drop\"", NULL },
	{ KV_STAT_POOL, "waiting", "waiting_requests", NULL, NULL },
	{ KV_STAT_POOL, "no_room_total", "refused_requests_total", NULL, NULL },
	{ KV_STAT_SESSION, "since_ns", "age_seconds", NULL, NULL },
};

/* Numbers that are names: labels of the info metric. */
static const char *const identities[] = { "index", "id", "pool_id", "gpu_mask", "boot_nonce", "pid",
					  "mover_pid", "worker_pid", "uid", "slot", "tp_ranks", NULL };

static bool is_one_of(const char *name, const char *const *names)
{
	for (; *names; names++) {
		if (!strcmp(name, *names))
			return true;
	}
	return false;
}

static const struct special *special_of(uint32_t kind, const char *field)
{
	for (size_t i = 0; i < ARRAY_SIZE(special); i++) {
		if (special[i].kind == kind && !strcmp(special[i].field, field))
			return &special[i];
	}
	return NULL;
}

static bool ends_with(const char *text, const char *end)
{
	size_t n = strlen(text), m = strlen(end);

	return n >= m && !strcmp(text + n - m, end);
}

/* The metric's name by its field's; "" if the field is none. */
static void name_of(uint32_t kind, const struct kv_stat_field *f, char name[NAME_MAX_BYTES])
{
	const char *prefix = kinds[kind].prefix, *text = f->name;

	name[0] = 0;
	if (f->type != KV_STAT_NUMBER || is_one_of(f->name, identities))
		return;
	if (!strncmp(text, "n_", 2))
		text += 2;
	if (!strncmp(text, "bytes_", 6))
		snprintf(name, NAME_MAX_BYTES, "%s%s_bytes", prefix, text + 6);
	else if (ends_with(text, "_ns_total"))
		snprintf(name, NAME_MAX_BYTES, "%s%.*s_seconds_total", prefix, (int)strlen(text) - 9, text);
	else if (ends_with(text, "_ns"))
		snprintf(name, NAME_MAX_BYTES, "%s%.*s_seconds", prefix, (int)strlen(text) - 3, text);
	else
		snprintf(name, NAME_MAX_BYTES, "%s%s", prefix, text);
}

static void print_escaped(FILE *out, const char *text)
{
	for (; *text; text++) {
		if (*text == '"' || *text == '\\')
			fprintf(out, "\\%c", *text);
		else if (*text == '\n')
			fputs("\\n", out);
		else
			fputc(*text, out);
	}
}

static void print_value(FILE *out, const struct kv_stat_field *f, const char *item)
{
	const char *at = item + f->offset;

	if (f->type == KV_STAT_TEXT)
		print_escaped(out, at);
	else
		fprintf(out, "%llu", (unsigned long long)*(const uint64_t *)at);
}

static const char *label_name(uint32_t kind, const char *field)
{
	if (!strcmp(field, "name") || !strcmp(field, "index"))
		return kinds[kind].field_prefix;
	return !strcmp(field, "id") ? "id" : field;
}

/* {pool="a",state="free"}; with @info all names of the item as well */
static void print_labels(FILE *out, uint32_t kind, const char *item, const char *more, bool info)
{
	const struct kv_stat_field *f;
	const char *comma = "";

	if (!kinds[kind].labels[0] && !more && !info)
		return;
	fputc('{', out);
	for (int i = 0; kinds[kind].labels[i]; i++) {
		for (f = kv_stat_fields(kind); strcmp(f->name, kinds[kind].labels[i]); f++)
			;
		fprintf(out, "%s%s=\"", comma, label_name(kind, f->name));
		print_value(out, f, item);
		fputc('"', out);
		comma = ",";
	}
	for (f = kv_stat_fields(kind); info && f->name; f++) {
		if ((f->type != KV_STAT_TEXT && !is_one_of(f->name, identities)) ||
		    is_one_of(f->name, kinds[kind].labels))
			continue;
		fprintf(out, "%s%s=\"", comma, f->name);
		print_value(out, f, item);
		fputc('"', out);
		comma = ",";
	}
	if (more)
		fprintf(out, "%s%s", comma, more);
	fputc('}', out);
}

/* HELP and TYPE; of a counter, OpenMetrics names the family without _total. */
static void print_family(FILE *out, const char *name, const char *type, const char *help, bool open)
{
	int n = (int)strlen(name);

	if (open && (ends_with(name, "_total") || ends_with(name, "_info")))
		n -= ends_with(name, "_total") ? 6 : 5;
	fprintf(out, "# HELP %.*s ", n, name);
	print_escaped(out, help);
	fprintf(out, "\n# TYPE %.*s %s\n", n, name, type);
}

/* The samples of one field, in seconds where it counts nanoseconds. */
static void print_samples(FILE *out, uint32_t kind, const char *name, const struct kv_stat_field *f,
			  const char *label, const char *items, size_t n, size_t size)
{
	for (const char *item = items; item < items + n * size; item += size) {
		uint64_t value = *(const uint64_t *)(item + f->offset);

		fputs(name, out);
		print_labels(out, kind, item, label, false);
		if (!strcmp(f->unit, "ns"))
			fprintf(out, " %.9f\n", (double)value * 1e-9);
		else
			fprintf(out, " %llu\n", (unsigned long long)value);
	}
}

static const char *type_of(const char *name)
{
	return ends_with(name, "_total") ? "counter" : "gauge";
}

/* All rows of special[] with the name of @first, if it is the first of them. */
static void print_group(FILE *out, uint32_t kind, const struct special *first, const char *items, size_t n,
			size_t size, bool open)
{
	const struct kv_stat_field *fields = kv_stat_fields(kind), *f;
	char name[NAME_MAX_BYTES];

	if (!*first->name || (first > special && first[-1].kind == kind &&
			      !strcmp(first[-1].name, first->name)))
		return;
	snprintf(name, sizeof(name), "%s%s", kinds[kind].prefix, first->name);
	for (const struct special *s = first; s < special + ARRAY_SIZE(special) && s->kind == kind &&
					      !strcmp(s->name, first->name); s++) {
		for (f = fields; f->name && strcmp(f->name, s->field); f++)
			;
		if (!f->name)
			continue;
		if (s == first)
			print_family(out, name, type_of(name), s->help ? s->help : f->help, open);
		print_samples(out, kind, name, f, s->label, items, n, size);
	}
}

static void print_kind(FILE *out, uint32_t kind, const char *items, size_t n, size_t size, bool open)
{
	char name[NAME_MAX_BYTES];

	snprintf(name, sizeof(name), "%sinfo", kinds[kind].prefix);
	print_family(out, name, open ? "info" : "gauge", "names and kinds, as labels", open);
	for (size_t i = 0; i < n; i++) {
		fputs(name, out);
		print_labels(out, kind, items + i * size, NULL, true);
		fputs(" 1\n", out);
	}
	for (const struct kv_stat_field *f = kv_stat_fields(kind); f->name; f++) {
		const struct special *s = special_of(kind, f->name);

		if (s) {
			print_group(out, kind, s, items, n, size, open);
			continue;
		}
		name_of(kind, f, name);
		if (!*name)
			continue;
		print_family(out, name, type_of(name), f->help, open);
		print_samples(out, kind, name, f, NULL, items, n, size);
	}
}

/* One histogram of all pools. */
static void print_histogram(FILE *out, struct kv_daemon *d, const char *name, const char *help,
			    struct kv_latency (*of)(const struct kv_pool *pool), bool open)
{
	print_family(out, name, "histogram", help, open);
	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		const struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);
		struct kv_latency h = of(pool);
		uint64_t n = 0;

		for (unsigned i = 0; i < KV_LATENCY_BUCKETS; i++) {
			n += h.n[i];
			fprintf(out, "%s_bucket{pool=\"", name);
			print_escaped(out, pool->name);
			if (i < KV_LATENCY_BUCKETS - 1)
				fprintf(out, "\",le=\"%.9g\"} %llu\n", (double)kv_latency_bound(i) * 1e-9,
					(unsigned long long)n);
			else
				fprintf(out, "\",le=\"+Inf\"} %llu\n", (unsigned long long)n);
		}
		fprintf(out, "%s_sum{pool=\"", name);
		print_escaped(out, pool->name);
		fprintf(out, "\"} %.9f\n%s_count{pool=\"", (double)h.sum_ns * 1e-9, name);
		print_escaped(out, pool->name);
		fprintf(out, "\"} %llu\n", (unsigned long long)n);
	}
}

static struct kv_latency refills(const struct kv_pool *pool)
{
	return pool->record->refills;
}

static struct kv_latency lookups(const struct kv_pool *pool)
{
	struct kv_latency h = pool->record->lookups;

	for (uint32_t i = 0; i < KV_MAX_SESSIONS; i++) {
		if (pool->slots[i])
			kv_latency_sum(&h, &pool->slots[i]->shm->lookups);
	}
	return h;
}

char *kv_metrics_text(struct kv_daemon *d, bool open, size_t *ret_len)
{
	char *text = NULL;
	FILE *out = open_memstream(&text, ret_len);
	bool failed;

	if (!out)
		return NULL;
	for (uint32_t kind = 0; kind < ARRAY_SIZE(kinds); kind++) {
		kv_cleanup(kv_freep) void *items = NULL;
		size_t n = 0, size = 0;

		if (kv_control_items(d, kind, &items, &n, &size) < 0)
			continue;
		if (n)
			print_kind(out, kind, items, n, size, open);
	}
	print_histogram(out, d, "kvcached_pool_refill_seconds",
			"from a client's request for blocks to the answer", refills, open);
	print_histogram(out, d, "kvcached_pool_lookup_seconds",
			"prefix lookups in clients, one in eight of them", lookups, open);
	if (open)
		fputs("# EOF\n", out);
	failed = ferror(out);
	if (fclose(out) || failed) {
		free(text);
		return NULL;
	}
	return text;
}
