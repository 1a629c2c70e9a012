/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests that come, grow, are preempted and end, against another engine's cache manager
 * (tests/golden/README.md has where its answers are from): what is found, and who gets room.
 *
 * Of its traces those of one group with full attention, in which nothing is said of room reserved for others. Which block serves next is each one's own; here blocks that hold nothing
 * go before cached ones, so at times more is found.
 */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/client.h"

#define MOST_REQUESTS 16
#define MOST_TOKENS   512

struct request {
	const char *name, *salt;
	int32_t tokens[MOST_TOKENS];
	size_t n;
	struct kv_seq *seq;
};

struct trace {
	const char *id;
	struct kv_client *client;
	struct kv_pool *pool;
	bool caches; /* otherwise nothing is published, so that nothing is found */
	struct request requests[MOST_REQUESTS];
	uint32_t n_requests;
	uint32_t n_more; /* lookups that found more */
	uint32_t n_ops;
};

static struct request *request_of(struct trace *t, const json_t *op)
{
	const char *name = json_string_value(json_array_get(op, 1));

	for (uint32_t i = 0; i < t->n_requests; i++) {
		if (!strcmp(t->requests[i].name, name))
			return &t->requests[i];
	}
	expect(t->n_requests < MOST_REQUESTS, "%s: too many requests", t->id);
	t->requests[t->n_requests] = (struct request){.name = name};
	return &t->requests[t->n_requests++];
}

static size_t number(const json_t *object, const char *name)
{
	const json_t *x = json_object_get(object, name);

	return json_is_integer(x) ? (size_t)json_integer_value(x) : 0;
}

static void add_tokens(struct request *q, const json_t *list)
{
	const json_t *x;
	size_t i;

	json_array_foreach(list, i, x) {
		expect(q->n < MOST_TOKENS, "too many tokens");
		q->tokens[q->n++] = (int32_t)json_integer_value(x);
	}
}

/* Return: tokens found; the sequence holds them. */
static size_t find(struct trace *t, struct request *q, const json_t *result)
{
	size_t hit, expected = number(result, "hit_tokens");

	must(kv_seq_new(t->pool, &q->seq));
	if (q->salt)
		must(kv_seq_field(q->seq, KV_TAG_SALT, q->salt, strlen(q->salt)));
	must(kv_seq_lookup(q->seq, q->tokens, q->n, &hit));
	expect(hit >= expected, "%s: op %u: %zu tokens of %s are found, there %zu", t->id, t->n_ops, hit,
	       q->name, expected);
	t->n_more += hit > expected;
	return hit;
}

static void end(struct trace *t, struct request *q)
{
	q->seq = kv_seq_free(q->seq, NULL);
	must(kv_ping(t->client, TIMEOUT));
}

/* Room for @n tokens more and @extra besides. Return: whether there is. */
static bool grow(struct trace *t, struct request *q, size_t n, size_t extra, const json_t *result)
{
	size_t len = kv_seq_len(q->seq);
	bool expected = !json_is_null(json_object_get(result, "allocated"));
	int r = kv_seq_reserve(q->seq, len + n + extra, 0);

	/* Who found more needs less. */
	expect(r == 0 || r == KV_NO_ROOM || r == KV_TOO_LARGE, "%s: %s", t->id, kv_error_text());
	expect(!r == expected || (!r && t->n_more), "%s: op %u: room for %s: %d, there %s", t->id, t->n_ops,
	       q->name, r, expected ? "yes" : "no");
	if (r || !expected)
		return false;
	must(kv_seq_append(q->seq, q->tokens + len, n));
	if (t->caches)
		must(kv_seq_publish(q->seq, NULL));
	must(kv_ping(t->client, TIMEOUT));
	return true;
}

static void admit(struct trace *t, struct request *q, const json_t *how, const json_t *result)
{
	const json_t *chunk = json_object_get(how, "chunk");
	size_t hit = find(t, q, result), n = q->n - hit;

	if (json_is_integer(chunk) && n > (size_t)json_integer_value(chunk))
		n = (size_t)json_integer_value(chunk);
	if (!grow(t, q, n, number(how, "lookahead"), result))
		end(t, q);
}

static void go_on(struct trace *t, struct request *q, const json_t *how, const json_t *result)
{
	add_tokens(q, json_object_get(how, "append"));
	grow(t, q, number(how, "n"), number(how, "draft") + number(how, "lookahead"), result);
}

static void play(struct trace *t, const json_t *op, const json_t *result)
{
	const char *what = json_string_value(json_array_get(op, 0));
	struct request *q;

	if (!strcmp(what, "reset")) {
		must(kv_pool_drop(t->client, t->id, TIMEOUT));
		return;
	}
	if (!strcmp(what, "new_step"))
		return;
	q = request_of(t, op);
	if (!strcmp(what, "new")) {
		*q = (struct request){.name = q->name,
				      .salt = json_string_value(json_array_get(op, 3))};
		add_tokens(q, json_array_get(op, 2));
	} else if (!strcmp(what, "lookup")) {
		find(t, q, result);
		end(t, q);
	} else if (!strcmp(what, "admit")) {
		admit(t, q, json_array_get(op, 2), result);
	} else if (!strcmp(what, "continue")) {
		go_on(t, q, json_array_get(op, 2), result);
	} else if (!strcmp(what, "free") || !strcmp(what, "preempt")) {
		end(t, q);
	}
}

/* Can it be said here? */
static bool applies(const json_t *in, const json_t *out)
{
	const json_t *config = json_object_get(in, "config"), *groups = json_object_get(config, "groups");
	const char *kind =
		json_string_value(json_object_get(json_array_get(groups, 0), "kind"));
	const json_t *x;
	size_t i;

	json_array_foreach(json_object_get(in, "ops"), i, x) {
		const json_t *how = json_array_get(x, 2);

		if (json_is_true(json_object_get(how, "full_fit")) || number(how, "reserved"))
			return false;
		if (json_object_get(json_array_get(out, i), "error") ||
		    json_object_get(json_object_get(json_array_get(out, i), "result"), "error"))
			return false;
	}
	return json_array_size(groups) == 1 && !strcmp(kind, "full_attention") &&
	       json_real_value(json_object_get(config, "watermark")) == 0 &&
	       !json_array_size(json_object_get(config, "eagle_groups"));
}

static void open_trace(struct trace *t, const json_t *config)
{
	static const struct kv_component k = {
		.role = KV_ROLE_K, .dtype = KV_F32, .n_heads = 1, .head_dim = 64, .scale = 1};
	/* A sequence that is split over ranks has so many tokens in the block of an id, on all of them together. */
	uint32_t size = (uint32_t)(number(json_array_get(json_object_get(config, "groups"), 0), "block_size") *
				   number(config, "dcp"));
	struct kv_layout layout = {.kind = KV_LAYOUT_FLAT, .block_tokens = size, .n_components = 1,
				   .components = &k};
	/* The null block is one of them there, too. */
	KV_OPTIONS(kv_pool_options, what, .name = t->id, .layout = &layout,
		   .max_bytes = number(config, "num_blocks") * size * 256);

	t->caches = json_is_true(json_object_get(config, "caching"));
	must(kv_pool_open(t->client, &what, &t->pool));
}

START_TEST(requests_find_and_get_what_another_engines_cache_manager_gives_them)
{
	json_error_t error;
	json_t *root = json_load_file(KV_GROUP_GOLDEN_DIR "/kv_manager_trace.json", 0, &error), *x;
	uint32_t n_traces = 0, n_more = 0;
	struct kv_client *client;
	size_t i, k;

	expect(root, "%s", error.text);
	daemon_start("--host", "32M", "--policy", "lru");
	client = client_new();
	json_array_foreach(json_object_get(root, "cases"), i, x) {
		const json_t *in = json_object_get(x, "in"), *out = json_object_get(x, "out"), *op;
		static struct trace t;

		if (!applies(in, out))
			continue;
		t = (struct trace){.id = json_string_value(json_object_get(x, "id")), .client = client};
		open_trace(&t, json_object_get(in, "config"));
		json_array_foreach(json_object_get(in, "ops"), k, op) {
			t.n_ops = (uint32_t)k;
			play(&t, op, json_object_get(json_array_get(out, k), "result"));
		}
		for (uint32_t q = 0; q < t.n_requests; q++)
			kv_seq_free(t.requests[q].seq, NULL);
		kv_pool_close(t.pool);
		n_more += t.n_more;
		n_traces++;
	}
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
	json_decref(root);
	printf("%u traces, %u lookups found more than there\n", n_traces, n_more);
	ck_assert_uint_eq(n_traces, 17);
	ck_assert_uint_le(n_more, 4);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("manager_golden");
	TCase *tcase = tcase_create("golden");

	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, requests_find_and_get_what_another_engines_cache_manager_gives_them);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
