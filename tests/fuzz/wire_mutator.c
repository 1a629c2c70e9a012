/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes new inputs of fuzz_wire that keep their form: whole steps are made, dropped, copied and
 * moved, messages begin as ones that a client might send, and fields get the values that hurt.
 */
#include <stdlib.h>

#include "include/internal/shm.h"
#include "include/internal/wire.h"
#include "tests/fuzz/wire_input.h"

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed);
size_t LLVMFuzzerCustomCrossOver(const uint8_t *data1, size_t size1, const uint8_t *data2,
				 size_t size2, uint8_t *out, size_t max_size, unsigned int seed);

#define ROOM 65536

/* Steps in the order in which they stand in the input. */
struct script {
	struct {
		struct step step;
		uint8_t *payload;
	} steps[MAX_STEPS];
	uint32_t n;
	uint8_t bytes[ROOM]; /* payloads */
	size_t used;
};

static unsigned random_state;

static uint32_t below(uint32_t n)
{
	return (uint32_t)rand_r(&random_state) % n;
}

static uint64_t value_that_hurts(void)
{
	static const uint64_t values[] = {0,	      1,
					  2,	      7,
					  8,	      15,
					  16,	      63,
					  64,	      127,
					  128,	      255,
					  256,	      1023,
					  1024,	      4095,
					  4096,	      65535,
					  65536,      1 << 20,
					  1 << 21,    8 << 20,
					  INT32_MAX,  (uint64_t)INT32_MAX + 1,
					  UINT32_MAX, (uint64_t)1 << 32,
					  INT64_MAX,  (uint64_t)1 << 63,
					  UINT64_MAX};
	uint64_t v = values[below(sizeof(values) / sizeof(values[0]))];

	return below(4) ? v : below(2) ? v - 1 : -v;
}

static uint8_t *room_for(struct script *s, size_t bytes)
{
	uint8_t *p = s->bytes + s->used;

	if (s->used + bytes > ROOM)
		return NULL;
	s->used += bytes;
	return p;
}

static void insert(struct script *s, uint32_t at, struct step step, const void *payload)
{
	uint8_t *p = s->n < MAX_STEPS ? room_for(s, step.bytes) : NULL;

	if (!p)
		return;
	memcpy(p, payload, step.bytes);
	memmove(&s->steps[at + 1], &s->steps[at], (s->n - at) * sizeof(s->steps[0]));
	s->steps[at].step = step;
	s->steps[at].payload = p;
	s->n++;
}

static void drop(struct script *s, uint32_t at)
{
	s->n--;
	memmove(&s->steps[at], &s->steps[at + 1], (s->n - at) * sizeof(s->steps[0]));
}

static void parse(struct script *s, const uint8_t *data, size_t size)
{
	const uint8_t *payload;
	struct step step;
	size_t at = 0;

	s->n = 0;
	s->used = 0;
	while (s->n < MAX_STEPS && step_next(data, size, &at, &step, &payload))
		insert(s, s->n, step, payload);
}

static size_t print(const struct script *s, uint8_t *out, size_t max_size)
{
	size_t at = 0;

	for (uint32_t i = 0; i < s->n; i++) {
		const struct step *step = &s->steps[i].step;

		if (at + sizeof(*step) + step->bytes > max_size)
			break;
		memcpy(out + at, step, sizeof(*step));
		memcpy(out + at + sizeof(*step), s->steps[i].payload, step->bytes);
		at += sizeof(*step) + step->bytes;
	}
	return at;
}

/* ---- steps as a client might make them ---- */

/* Bodies, without the head, of messages as a client might send them. Each returns its bytes. */
typedef size_t make_fn(uint8_t *body);

#define MOST_BODY (sizeof(struct kv_msg_restart) + 64)

static size_t body_of(uint8_t *body, const void *msg, size_t size)
{
	const size_t head = sizeof(struct kv_wire_head);

	memcpy(body, (const char *)msg + head, size - head);
	return size - head;
}

static char pool_name(void)
{
	return (char)('a' + below(3));
}

static uint64_t some_mib(void)
{
	return (uint64_t)below(9) << 20;
}

static size_t make_plain(uint8_t *body)
{
	(void)body;
	return 0;
}

static size_t make_hello(uint8_t *body)
{
	struct kv_msg_hello m = {.name = "fuzz", .version = "0.1.0"};

	return body_of(body, &m, sizeof(m));
}

/* One of three names, with one of a few layouts, or none. */
static size_t make_open(uint8_t *body)
{
	struct kv_component components[2] = {{.role = KV_ROLE_K}, {.role = KV_ROLE_V}};
	struct kv_msg_pool_open m = {.model = "m", .tp_ranks = 1, .gpu_mask = 1};
	size_t list = below(4) ? sizeof(components) : 0, size;

	m.name[0] = pool_name();
	m.min_bytes = below(3) ? 0 : (uint64_t)below(8) << 20;
	m.max_bytes = below(3) ? 0 : (uint64_t)(1 + below(8)) << 20;
	if (list) {
		m.layout_kind = 1 + below(2);
		m.block_tokens = 16;
		m.n_components = 2;
	}
	for (int i = 0; i < 2; i++) {
		components[i].dtype = KV_F32;
		components[i].n_heads = 1;
		components[i].head_dim = below(4) ? 16 : 8u << below(10);
		components[i].scale = 1;
	}
	if (below(16) == 0)
		memset(m.revision, below(2) ? 'x' : 0, KV_NAME_MAX);
	size = body_of(body, &m, sizeof(m));
	memcpy(body + size, components, list);
	return size + list;
}

static size_t make_lease(uint8_t *body)
{
	struct kv_msg_lease m = {.n = below(3) ? below(600) : below(5000),
				 .extra = below(300),
				 .timeout_ns = below(2) ? 0 : (int64_t)below(100) * KV_MSEC};

	return body_of(body, &m, sizeof(m));
}

static size_t make_arena(uint8_t *body)
{
	struct kv_msg_arena m = {.gpu = below(8) == 0, .first_fd = below(3)};

	return body_of(body, &m, sizeof(m));
}

static size_t make_stats(uint8_t *body)
{
	struct kv_msg_stats m = {.kind = below(KV_STAT_HISTORY + 2), .first = below(3)};

	return body_of(body, &m, sizeof(m));
}

/* Those that there are, and others. */
static size_t make_granules(uint8_t *body)
{
	struct kv_msg_granules m = {.gpu = below(8) == 0, .n = below(8) ? below(9) : below(300)};

	for (uint32_t i = 0; i < m.n && i < KV_WIRE_MAX_FDS; i++)
		m.index[i] = below(8) ? below(4) : (uint32_t)value_that_hurts();
	return body_of(body, &m, sizeof(m));
}

static size_t make_set(uint8_t *body)
{
	struct kv_msg_pool_set m = {.change = below(16),
				    .weight = below(1000),
				    .min_bytes = some_mib(),
				    .max_bytes = some_mib(),
				    .revision = below(4) ? 0 : below(5)};

	m.name[0] = pool_name();
	return body_of(body, &m, sizeof(m));
}

static size_t make_compact(uint8_t *body)
{
	struct kv_msg_compact m = {.rate = below(3) ? 0 : some_mib()};

	m.name[0] = pool_name();
	return body_of(body, &m, sizeof(m));
}

static size_t make_name(uint8_t *body)
{
	struct kv_msg_drop m;

	memset(m.name, below(8) ? 0 : 'x', sizeof(m.name));
	m.name[0] = pool_name();
	return body_of(body, &m, sizeof(m));
}

static size_t make_block(uint8_t *body)
{
	struct kv_msg_block m = {.id = below(8) ? below(600) : (uint32_t)value_that_hurts()};

	m.pool[0] = pool_name();
	return body_of(body, &m, sizeof(m));
}

static size_t make_trace(uint8_t *body)
{
	struct kv_msg_trace m = {.salt = below(8) ? 77 : 0};

	m.pool[0] = below(2) ? pool_name() : 0;
	return body_of(body, &m, sizeof(m));
}

static size_t make_traced(uint8_t *body)
{
	struct kv_msg_traced m = {.start_ns = 1, .number = below(4)};

	m.n_input = below(8) ? 2 * below(2) : (uint64_t)value_that_hurts();
	m.n_keys = below(8) ? 0 : (uint32_t)value_that_hurts();
	return body_of(body, &m, sizeof(m));
}

/* STEP_RESUME makes those that succeed. */
static size_t make_resume(uint8_t *body)
{
	struct kv_msg_resume m = {.boot_nonce = 1,
				  .pool_id = 1 + below(3),
				  .session_id = 1 + below(4),
				  .token = value_that_hurts(),
				  .slot = below(5)};

	return body_of(body, &m, sizeof(m));
}

static size_t make_restart(uint8_t *body)
{
	struct kv_msg_restart m;

	memset(m.binary, below(8) ? 0 : 'x', sizeof(m.binary));
	m.binary[0] = below(2) ? 0 : '/';
	return body_of(body, &m, sizeof(m));
}

/*
 * All that daemon/peer.c answers to (tests/fuzz/complete.sh sees to it), how often each is made, and
 * one that nobody knows.
 */
static const struct {
	uint16_t type;
	uint16_t weight;
	make_fn *make;
} messages[] = {
	{KV_MSG_HELLO, 2, make_hello},	     {KV_MSG_PING, 2, make_plain},
	{KV_MSG_POOL_OPEN, 4, make_open},    {KV_MSG_POOL_OPEN_READ, 2, make_open},
	{KV_MSG_POOL_CLOSE, 2, make_plain},  {KV_MSG_POOL_LAYOUT, 2, make_plain},
	{KV_MSG_ARENA, 2, make_arena},	     {KV_MSG_GRANULES, 3, make_granules},
	{KV_MSG_LEASE, 6, make_lease},	     {KV_MSG_WANT, 2, make_lease},
	{KV_MSG_KICK, 2, make_plain},	     {KV_MSG_STATS, 2, make_stats},
	{KV_MSG_CHECK, 2, make_plain},	     {KV_MSG_POOL_DROP, 2, make_name},
	{KV_MSG_POOL_EPOCH, 2, make_name},   {KV_MSG_POOL_SET, 4, make_set},
	{KV_MSG_POOL_COMPACT, 2, make_compact}, {KV_MSG_RESUME, 2, make_resume},
	{KV_MSG_RESTART, 1, make_restart},   {KV_MSG_BLOCK, 2, make_block},
	{KV_MSG_TRACE, 2, make_trace},
	{KV_MSG_TRACED, 2, make_traced},
	{KV_MSG_TRACE_NEXT, 1, make_plain},
	{0, 1, make_plain},
};

#define N_MESSAGES (sizeof(messages) / sizeof(messages[0]))

static uint16_t some_type(void)
{
	uint32_t sum = 0, at;

	for (size_t i = 0; i < N_MESSAGES; i++)
		sum += messages[i].weight;
	at = below(sum);
	for (size_t i = 0; i < N_MESSAGES; i++) {
		if (at < messages[i].weight)
			return messages[i].type;
		at -= messages[i].weight;
	}
	return 0;
}

static size_t make_body(uint16_t type, uint8_t *body)
{
	for (size_t i = 0; i < N_MESSAGES; i++) {
		if (messages[i].type == type)
			return messages[i].make(body);
	}
	return 0;
}

static void make_message(struct script *s, uint32_t at, uint8_t connection, uint16_t type)
{
	uint8_t payload[sizeof(struct step_message) + MOST_BODY];
	struct step_message how = {.type = type};
	struct step step = {.kind = STEP_MESSAGE, .connection = connection};

	if (below(20) == 0)
		how.flags = (uint8_t)(1 << below(4));
	if (below(20) == 0)
		how.n_fds = (uint8_t)below(8);
	memcpy(payload, &how, sizeof(how));
	step.bytes = (uint16_t)(sizeof(how) + make_body(type, payload + sizeof(how)));
	insert(s, at, step, payload);
}

static void make_op(struct script *s, uint32_t at, uint8_t connection)
{
	static uint32_t last_id;
	struct kv_op op = {.kind = 1 + below(4),
			   .id = (int32_t)below(4100),
			   .parent = (int32_t)(below(2) ? last_id : below(4100)) - 1,
			   .flags = below(3) ? 0 : below(4),
			   .parent_serial = below(4)   ? 0
					    : below(2) ? kv_serial_root(1)
						       : value_that_hurts(),
			   .key_lo = below(8),
			   .key_hi = below(2),
			   .stamp = below(100)};
	struct step step = {.kind = STEP_OP, .connection = connection, .bytes = sizeof(op)};

	last_id = (uint32_t)op.id;
	insert(s, at, step, &op);
}

static void make_scribble(struct script *s, uint32_t at, uint8_t connection)
{
	struct step_scribble scribble = {.where = below(2),
					 .bytes = 1u << below(4),
					 .offset = below(3) ? below(640) : below(1 << 20),
					 .value = value_that_hurts()};
	struct step step = {
		.kind = STEP_SCRIBBLE, .connection = connection, .bytes = sizeof(scribble)};

	insert(s, at, step, &scribble);
}

static void make_step(struct script *s)
{
	uint32_t at = below(s->n + 1);
	uint8_t connection = (uint8_t)below(N_CONNECTIONS);
	struct step step = {.kind = (uint8_t)below(N_STEP_KINDS), .connection = connection};
	uint16_t ms = (uint16_t)(below(4) ? below(10) : below(65536)); /* or how poor */

	if (below(40) == 0) {
		insert(s, 0, (struct step){STEP_ISOLATE, 0, 0}, "");
		return;
	}
	switch (below(9)) {
	case 0: /* a client that has a pool */
		insert(s, at, (struct step){STEP_READ, connection, 0}, "");
		make_message(s, at, connection, KV_MSG_LEASE);
		make_message(s, at, connection,
			     below(5) ? KV_MSG_POOL_OPEN : KV_MSG_POOL_OPEN_READ);
		make_message(s, at, connection, KV_MSG_HELLO);
		insert(s, at, (struct step){STEP_CONNECT, connection, 0}, "");
		break;
	case 1:
		make_op(s, at, connection);
		break;
	case 2:
		make_scribble(s, at, connection);
		break;
	case 3:
		if (step.kind == STEP_TIME || step.kind == STEP_ZERO ||
		    (step.kind == STEP_RESUME && below(4) == 0))
			step.bytes = sizeof(ms);
		insert(s, at, step, &ms);
		break;
	case 4: /* what should be nothing to a client */
		insert(s, at, (struct step){STEP_RESUME, connection, 0}, "");
		insert(s, at, (struct step){STEP_RESTART, connection, 0}, "");
		break;
	default:
		make_message(s, at, connection, some_type());
	}
}

/* ---- changes of steps that are there ---- */

static void change_payload(struct script *s, uint32_t i)
{
	size_t most = s->steps[i].step.bytes + 64u;
	uint8_t *p = room_for(s, most);

	if (!p)
		return;
	memcpy(p, s->steps[i].payload, s->steps[i].step.bytes);
	s->steps[i].payload = p;
	s->steps[i].step.bytes =
		(uint16_t)LLVMFuzzerMutate(p, s->steps[i].step.bytes, most < 65535 ? most : 65535);
}

static void change_field(struct script *s, uint32_t i)
{
	uint32_t width = 1u << below(4), bytes = s->steps[i].step.bytes;
	uint64_t value = value_that_hurts();

	if (bytes >= width)
		memcpy(s->steps[i].payload + below(bytes / width) * width, &value, width);
}

static void change(struct script *s)
{
	uint32_t i = below(s->n), k = below(s->n);
	const uint8_t *payload;
	struct step moved;

	switch (below(8)) {
	case 0:
		drop(s, i);
		break;
	case 1:
		insert(s, k, s->steps[i].step, s->steps[i].payload);
		break;
	case 2:
		moved = s->steps[i].step;
		payload = s->steps[i].payload;
		drop(s, i);
		insert(s, k < s->n ? k : s->n, moved, payload);
		break;
	case 3:
		s->steps[i].step.connection = (uint8_t)below(N_CONNECTIONS);
		break;
	case 4:
		change_payload(s, i);
		break;
	default:
		change_field(s, i);
	}
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
	static struct script s;

	random_state = seed;
	parse(&s, data, size);
	for (uint32_t n = 1 + below(3); n; n--) {
		if (!s.n || below(3) == 0)
			make_step(&s);
		else
			change(&s);
	}
	return print(&s, data, max_size);
}

size_t LLVMFuzzerCustomCrossOver(const uint8_t *data1, size_t size1, const uint8_t *data2,
				 size_t size2, uint8_t *out, size_t max_size, unsigned int seed)
{
	static struct script a, b;
	uint32_t n;

	random_state = seed;
	parse(&a, data1, size1);
	parse(&b, data2, size2);
	a.n = below(a.n + 1);
	n = b.n - below(b.n + 1);
	for (uint32_t i = b.n - n; i < b.n; i++)
		insert(&a, a.n, b.steps[i].step, b.steps[i].payload);
	return print(&a, out, max_size);
}
