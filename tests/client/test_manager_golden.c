/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests that come, grow, are preempted and end, against another engine's cache manager
 * (tests/golden/README.md has where its answers are from): what is found, who gets room, how many blocks each has
 * in each group, how many there are in use, and what all have in common.
 *
 * All groups of a trace have their blocks in one pool, as there. Which block serves next is each one's own. Where our
 * answer is another, `differences` has it, with both answers and why; each of them must come. After that the trace
 * goes on as theirs did. Rows of states are not counted: what is found and who gets room tells of them.
 */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/client.h"

#define MOST_REQUESTS 16
#define MOST_TOKENS   512
#define MOST_GROUPS   4

enum what { HIT, ROOM, IN_USE, TABLE, N_WHAT };

static const char *const what_names[N_WHAT] = {
	[HIT] = "tokens found", [ROOM] = "room", [IN_USE] = "blocks in use", [TABLE] = "blocks in a table"};

struct difference {
	const char *id; /* of the trace, without its suite */
	uint32_t first, last; /* ops */
	enum what what;
	int64_t theirs, ours;
	const char *why;
};

#define RETENTION "of a window all blocks stay cached until others need the room, not those at boundaries alone"
#define GAP	  "what lies between the prompt and the window of an answer stays: all of it is full attention"
#define SAME_STEP "found is what its writer's stream has done: there is no step to wait for"
#define INTERVAL  "a state is kept at multiples of its interval, where no copy of it is needed"

static const struct difference differences[] = {
	{"g013", 6, 7, HIT, 0, 20, RETENTION},
	{"g013", 7, 7, IN_USE, 14, 11, RETENTION},
	{"g013", 7, 7, TABLE, 7, 4, RETENTION}, /* of the window: two found, two new */
	{"g015", 16, 17, IN_USE, 6, 7, GAP},
	{"g015", 16, 17, TABLE, 6, 7, GAP},
	{"g017", 4, 4, ROOM, false, true, SAME_STEP},
	{"g019", 11, 12, HIT, 12, 8, INTERVAL},
};

static bool came[sizeof(differences) / sizeof(*differences)];

struct request {
	const char *name, *salt;
	int32_t tokens[MOST_TOKENS];
	size_t n;
	struct kv_gseq *seq;
};

struct trace {
	const char *id;
	struct kv_client *client;
	struct kv_pool *pool;
	struct kv_group list[MOST_GROUPS];
	uint32_t n_groups;
	bool has_state;
	struct kv_groups *groups;
	bool caches; /* otherwise nothing is published, so that nothing is found */
	struct request requests[MOST_REQUESTS];
	uint32_t n_requests;
	uint32_t n_op;
};

static uint32_t n_compared[N_WHAT];

static void compare(const struct trace *t, enum what what, int64_t ours, int64_t theirs)
{
	const char *id = strrchr(t->id, '-') + 1;

	n_compared[what]++;
	if (ours == theirs)
		return;
	for (size_t i = 0; i < sizeof(differences) / sizeof(*differences); i++) {
		const struct difference *d = &differences[i];

		if (strcmp(d->id, id) || d->what != what || t->n_op < d->first || t->n_op > d->last ||
		    d->ours != ours || d->theirs != theirs)
			continue;
		came[i] = true;
		return;
	}
	ck_abort_msg("%s, op %u: %s: %lld, there %lld", t->id, t->n_op, what_names[what], (long long)ours,
		     (long long)theirs);
}

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
	size_t hit;

	must(kv_gseq_new(t->groups, &q->seq));
	if (q->salt)
		must(kv_gseq_field(q->seq, KV_TAG_SALT, q->salt, strlen(q->salt)));
	must(kv_gseq_lookup(q->seq, q->tokens, q->n, &hit));
	compare(t, HIT, (int64_t)hit, (int64_t)number(result, "hit_tokens"));
	return hit;
}

static void end(struct trace *t, struct request *q)
{
	q->seq = kv_gseq_free(q->seq, NULL);
	must(kv_ping(t->client, TIMEOUT));
}

/* What a kernel does is as if done: states of the append are in the rows that it was told to write. */
static void step(struct trace *t, struct request *q)
{
	int32_t read[1], write[1], steps[1 + 2], rows[MOST_TOKENS];
	const struct kv_state_lanes lanes = {.read_rows = read, .write_rows = write, .step_rows = steps,
					     .table = rows, .table_width = MOST_TOKENS};

	for (uint32_t g = 0; g < t->n_groups; g++) {
		if (t->list[g].kind == KV_GROUP_STATE)
			must(kv_state_lanes(&q->seq, 1, 1, g, &lanes));
	}
}

/* Room for @n tokens more and @extra besides. Return: whether there is, there. */
static bool grow(struct trace *t, struct request *q, size_t n, size_t extra, const json_t *result)
{
	size_t len = kv_gseq_len(q->seq);
	bool expected = !json_is_null(json_object_get(result, "allocated"));
	int r;

	must(kv_gseq_done(q->seq, len, NULL));
	r = kv_gseq_reserve(q->seq, len + n + extra, 0);
	expect(r == 0 || r == KV_NO_ROOM || r == KV_TOO_LARGE, "%s: %s", t->id, kv_error_text());
	compare(t, ROOM, !r, expected);
	if (r || !expected)
		return false;
	must(kv_gseq_append(q->seq, q->tokens + len, n));
	step(t, q);
	if (t->caches)
		must(kv_gseq_publish(q->seq, NULL));
	must(kv_ping(t->client, TIMEOUT));
	return true;
}

static void admit(struct trace *t, struct request *q, const json_t *how, const json_t *result)
{
	const json_t *chunk = json_object_get(how, "chunk");
	size_t hit, n;

	/* Who is admitted already can't be looked up once more. */
	if (q->seq) {
		ck_assert(json_object_get(result, "error"));
		refused(kv_gseq_lookup(q->seq, q->tokens, q->n, &hit), -EINVAL, "lookup");
		return;
	}
	ck_assert(!json_object_get(result, "error"));
	hit = find(t, q, result);
	n = q->n - hit;
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

static const kv_block_id *table(const struct request *q, uint32_t group, size_t *ret_n)
{
	const kv_block_id *ids;

	*ret_n = kv_seq_blocks(kv_gseq_seq(q->seq, group), &ids);
	return ids;
}

/* Blocks from the first on that all that are admitted have, of full attention. */
static int64_t in_common(const struct trace *t, const struct request *q)
{
	size_t n = 0, n_own, n_other;
	const kv_block_id *own = table(q, 0, &n_own);

	for (;; n++) {
		for (uint32_t i = 0; i < t->n_requests; i++) {
			const kv_block_id *other;

			if (!t->requests[i].seq)
				continue;
			other = table(&t->requests[i], 0, &n_other);
			if (n >= n_own || n >= n_other || other[n] != own[n])
				return (int64_t)n;
		}
	}
}

static void play(struct trace *t, const json_t *op, const json_t *result)
{
	const char *what = json_string_value(json_array_get(op, 0));
	struct request *q;

	if (!strcmp(what, "reset")) {
		must(kv_pool_drop(t->client, t->id, TIMEOUT));
		return;
	}
	/* States are read where they are and written elsewhere: nothing is copied. */
	if (!strcmp(what, "new_step") || !strcmp(what, "take_copies") || !strcmp(what, "release_copies"))
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
	} else if (!strcmp(what, "common_prefix")) {
		ck_assert_int_eq(in_common(t, q),
				 json_integer_value(json_array_get(json_object_get(result, "blocks_per_group"), 0)));
	} else {
		expect(!strcmp(what, "free") || !strcmp(what, "preempt"), "%s: what is '%s'?", t->id, what);
		end(t, q);
	}
}

/* What is leased or held in the whole, and what each request has in each group. */
static void compare_state(struct trace *t, const json_t *state)
{
	const json_t *tables = json_object_get(state, "tables");
	struct kv_session_stats s;
	struct kv_pool_info info;

	kv_pool_info(t->pool, &info);
	ck_assert(session_stats(t->client, getpid(), &s));
	if (!t->has_state)
		compare(t, IN_USE, (int64_t)(s.blocks_leased + s.blocks_held - s.blocks_idle),
			(int64_t)json_object_size(json_object_get(state, "ref")));
	for (uint32_t i = 0; i < t->n_requests; i++) {
		const struct request *q = &t->requests[i];

		for (uint32_t g = 0; q->seq && g < t->n_groups; g++) {
			const json_t *theirs = json_array_get(json_object_get(tables, q->name), g), *x;
			int64_t n_ours = 0, n_theirs = 0;
			const kv_block_id *ids;
			size_t n, k;

			if (t->list[g].kind == KV_GROUP_STATE)
				continue;
			ids = table(q, g, &n);
			for (k = 0; k < n; k++)
				n_ours += ids[k] != info.null_block;
			json_array_foreach(theirs, k, x)
				n_theirs += json_integer_value(x) != 0;
			compare(t, TABLE, n_ours, n_theirs);
		}
	}
}

static struct kv_group group_of(const json_t *spec, struct kv_pool *pool)
{
	const char *kind = json_string_value(json_object_get(spec, "kind"));
	struct kv_group g = {.kind = KV_GROUP_FULL, .pool = pool};

	if (!strcmp(kind, "sliding_window")) {
		g.kind = KV_GROUP_WINDOW;
		g.window = (uint32_t)number(spec, "sliding_window");
	} else if (!strcmp(kind, "chunked_local_attention")) {
		g.kind = KV_GROUP_CHUNKED;
		g.window = (uint32_t)number(spec, "attention_chunk_size");
	} else if (!strcmp(kind, "mamba")) {
		g.kind = KV_GROUP_STATE;
		g.interval = (uint32_t)number(spec, "block_size");
		g.n_drafts = (uint32_t)number(spec, "num_speculative_blocks");
	} else {
		/* Of prompt and window alone a prompt may be read as a whole: all of it is kept. */
		expect(!strcmp(kind, "full_attention") || !strcmp(kind, "rswa"), "what is '%s'?", kind);
	}
	return g;
}

static void open_trace(struct trace *t, const json_t *config)
{
	static const struct kv_component k = {
		.role = KV_ROLE_K, .dtype = KV_F32, .n_heads = 1, .head_dim = 64, .scale = 1};
	const json_t *specs = json_object_get(config, "groups"), *spec;
	/* A sequence that is split over ranks has so many tokens in the block of an id, on all of them together. */
	uint32_t size = (uint32_t)(number(json_array_get(specs, 0), "block_size") * number(config, "dcp"));
	struct kv_layout layout = {.kind = KV_LAYOUT_FLAT, .block_tokens = size, .n_components = 1,
				   .components = &k};
	/* The null block is one of them there, too. */
	KV_OPTIONS(kv_pool_options, what, .name = t->id, .layout = &layout,
		   .max_bytes = number(config, "num_blocks") * size * 256);
	KV_OPTIONS(kv_groups_options, groups, .groups = t->list);
	size_t i;

	t->caches = json_is_true(json_object_get(config, "caching"));
	must(kv_pool_open(t->client, &what, &t->pool));
	json_array_foreach(specs, i, spec) {
		t->list[i] = group_of(spec, t->pool);
		t->has_state |= t->list[i].kind == KV_GROUP_STATE;
	}
	groups.n_groups = t->n_groups = (uint32_t)i;
	must(kv_groups_new(&groups, &t->groups));
}

static void play_trace(struct kv_client *client, const json_t *x)
{
	const json_t *in = json_object_get(x, "in"), *out = json_object_get(x, "out"), *op;
	static struct trace t;
	size_t k;

	t = (struct trace){.id = json_string_value(json_object_get(x, "id")), .client = client};
	open_trace(&t, json_object_get(in, "config"));
	json_array_foreach(json_object_get(in, "ops"), k, op) {
		const json_t *answer = json_array_get(out, k);

		t.n_op = (uint32_t)k;
		play(&t, op, json_object_get(answer, "result"));
		compare_state(&t, json_object_get(answer, "state"));
	}
	for (uint32_t q = 0; q < t.n_requests; q++)
		kv_gseq_free(t.requests[q].seq, NULL);
	kv_groups_free(t.groups);
	kv_pool_close(t.pool);
}

START_TEST(requests_find_and_get_what_another_engines_cache_manager_gives_them)
{
	json_error_t error;
	json_t *root = json_load_file(KV_GROUP_GOLDEN_DIR "/kv_manager_trace.json", 0, &error), *x;
	struct kv_client *client;
	size_t i;

	expect(root, "%s", error.text);
	daemon_start("--host", "32M", "--policy", "lru");
	client = client_new();
	json_array_foreach(json_object_get(root, "cases"), i, x)
		play_trace(client, x);
	ck_assert_uint_eq(i, 42);
	for (size_t k = 0; k < sizeof(differences) / sizeof(*differences); k++)
		expect(came[k], "%s, op %u: %s as there, though %s", differences[k].id, differences[k].first,
		       what_names[differences[k].what], differences[k].why);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
	json_decref(root);
	for (int k = 0; k < N_WHAT; k++)
		printf("%u times %s\n", n_compared[k], what_names[k]);
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
