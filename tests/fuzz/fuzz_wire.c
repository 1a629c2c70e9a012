/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whatever four clients may send, post, write and leave undone, in any order: the daemon answers or
 * drops them, its books balance, nothing stays open. wire_input.h has the form of the input,
 * wire_mutator.c makes new ones. Under libFuzzer (clang):
 *
 *	meson setup build-fuzz -Dfuzz=true -Db_sanitize=address,undefined -Db_lundef=false \
 *		-Djemalloc=disabled -Dcuda=disabled
 *	build-fuzz/tests/fuzz/fuzz_wire -max_len=16384 -dict=tests/fuzz/wire.dict new
 *tests/fuzz/corpus_wire build-fuzz/tests/fuzz/fuzz_pages -max_len=1280 new tests/fuzz/corpus_pages
 *
 * Without it, a program that replays the files and folders it is given.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/daemon.h"
#include "include/internal/cleanup.h"
#include "include/internal/ring.h"
#include "include/internal/socket.h"
#include "tests/fuzz/inside.h"
#include "tests/fuzz/wire_input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
void fuzz_reached(FILE *f);

static struct connection {
	int fd; /* -1: not connected */
	uint64_t peer;
	uint32_t tag;
	void *blocks;	  /* mapped when POOL_OPENED has been read */
	uint64_t pool_id; /* whose they are; it may have opened another pool since, or none */
	struct kv_shm_session *session;
	uint64_t blocks_bytes, session_bytes;
	struct kv_msg_resume resume; /* what takes its session up again */
	uint16_t asked[256];	     /* type of the request, by its tag */
} connections[N_CONNECTIONS];

/* By their type: answers to the input before, and requests that were done as asked. */
static uint64_t answers[KV_MSG_TRACED + 1], done[KV_MSG_TRACED + 1];
static bool ended_moving; /* blocks were being copied */

static char scribbled[KV_NAME_MAX]; /* the pool whose pages somebody wrote; "" none, "*" several */

static void unmap(struct connection *c)
{
	if (c->blocks)
		munmap(c->blocks, c->blocks_bytes);
	if (c->session)
		munmap(c->session, c->session_bytes);
	c->blocks = c->session = NULL;
}

static void disconnect(struct connection *c)
{
	c->fd = kv_close(c->fd);
	unmap(c);
	inside_step();
}

static void *map(int fd, uint64_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	inside_must(p != MAP_FAILED, "mmap of %llu bytes: %m", (unsigned long long)bytes);
	return p;
}

/*
 * The pages a client gets, and that it can neither shrink, grow nor seal anew; nor write the index,
 * nor the blocks if it only reads.
 */
static void take_pages(struct connection *c, const struct kv_msg_pool_opened *msg, const int *fds)
{
	unmap(c);
	for (int i = 0; i < 3; i++)
		inside_must(ftruncate(fds[i], 0) < 0 && ftruncate(fds[i], (off_t)1 << 30) < 0,
			    "pages %d can be made smaller or larger", i);
	inside_must(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0) == MAP_FAILED,
		    "the index can be written");
	c->blocks_bytes = msg->blocks_bytes;
	c->session_bytes = msg->session_bytes;
	c->pool_id = msg->pool_id;
	c->resume = (struct kv_msg_resume){.boot_nonce = 1,
					   .pool_id = msg->pool_id,
					   .session_id = msg->session_id,
					   .token = msg->token,
					   .slot = msg->slot};
	if ((fcntl(fds[1], F_GETFL) & O_ACCMODE) == O_RDONLY)
		inside_must(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fds[1], 0) ==
				    MAP_FAILED,
			    "who only reads can write the blocks");
	else
		c->blocks = map(fds[1], c->blocks_bytes);
	c->session = map(fds[2], c->session_bytes);
}

/* Was what is answered done? */
static bool is_done(const uint64_t *answer)
{
	const struct kv_wire_head *head = (const void *)answer;

	if (head->type == KV_MSG_LEASED)
		return !((const struct kv_msg_leased *)answer)->answer;
	if (head->type == KV_MSG_TRACE_PART)
		return ((const struct kv_msg_trace_part *)answer)->n;
	if (head->type == KV_MSG_GRANULES_PART)
		return ((const struct kv_msg_granules_part *)answer)->n;
	return head->type != KV_MSG_ERROR;
}

static void read_answers(struct connection *c)
{
	static uint64_t buffer[KV_WIRE_MAX / sizeof(uint64_t)];
	const struct kv_wire_head *head = (const void *)buffer;
	const struct kv_msg_error *error = (const void *)buffer;
	int fds[KV_WIRE_MAX_FDS];
	uint32_t n_fds;
	int64_t n;

	while (c->fd >= 0 && (n = kv_socket_receive(c->fd, buffer, sizeof(buffer), fds,
						    KV_WIRE_MAX_FDS, &n_fds, 1)) > 0) {
		inside_must((uint64_t)n >= sizeof(*head) && head->magic == KV_WIRE_MAGIC &&
				    head->version == KV_WIRE_VERSION && head->size == n,
			    "an answer of %lld bytes makes no sense", (long long)n);
		inside_must(head->type < sizeof(answers) / sizeof(answers[0]), "answer of type %u", head->type);
		answers[head->type]++;
		done[c->asked[head->tag % 256]] += is_done(buffer);
		/* It was told of by a message that has no answer. */
		done[KV_MSG_TRACED] += head->type == KV_MSG_TRACE_PART && is_done(buffer);
		if (head->type == KV_MSG_POOL_OPENED && n_fds == 3)
			take_pages(c, (const void *)buffer, fds);
		if (head->type == KV_MSG_ERROR)
			inside_must(error->error < 0 && memchr(error->text, 0, KV_WIRE_TEXT),
				    "an error without a number or an end");
		while (n_fds)
			kv_close(fds[--n_fds]);
	}
}

/* Descriptors for a message: files, sockets, and a memfd that is too short for anything. */
static uint32_t make_fds(int *fds, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		fds[i] = i % 2 ? memfd_create("fuzz", MFD_CLOEXEC)
			       : open("/dev/null", O_RDWR | O_CLOEXEC);
		inside_must(fds[i] >= 0, "descriptor: %m");
	}
	return n;
}

/* What the daemon does without an answer. */
struct rings {
	uint32_t ops, grants;
};

static struct rings state_of(const struct connection *c)
{
	if (!c->session)
		return (struct rings){0};
	return (struct rings){c->session->ops.tail, c->session->grants.head};
}

static void send_message(struct connection *c, const uint8_t *payload, size_t bytes)
{
	static const char nowhere[] = "/nowhere/kvcached";
	static uint8_t packet[KV_WIRE_MAX * 2];
	struct kv_wire_head *head = (void *)packet;
	struct step_message how;
	struct rings before;
	size_t size;
	int fds[8];
	uint32_t n;

	if (bytes < sizeof(how) || c->fd < 0)
		return;
	memcpy(&how, payload, sizeof(how));
	payload += sizeof(how);
	bytes -= sizeof(how);
	if (how.flags & STEP_RAW) {
		memcpy(packet, payload, bytes);
		size = bytes;
	} else {
		size = sizeof(*head) + bytes;
		kv_wire_init(head, how.type, (uint32_t)size, ++c->tag);
		c->asked[c->tag % 256] = how.type <= KV_MSG_TRACED ? how.type : 0;
		memcpy(packet + sizeof(*head), payload, bytes);
		head->version += (how.flags & STEP_VERSION) != 0;
		head->size += (how.flags & STEP_SIZE) != 0;
	}
	/* It would run what the input names; root may ask for that. */
	if (size > sizeof(*head) + sizeof(nowhere) && head->type == KV_MSG_RESTART &&
	    packet[sizeof(*head)] == '/')
		memcpy(packet + sizeof(*head), nowhere, sizeof(nowhere));
	before = state_of(c);
	n = make_fds(fds, how.n_fds % 8);
	if (size)
		kv_socket_send(c->fd, packet, size, fds, n, 1);
	while (n)
		kv_close(fds[--n]);
	if (how.flags & STEP_QUIET)
		return;
	inside_step();
	done[KV_MSG_KICK] += how.type == KV_MSG_KICK && state_of(c).ops != before.ops;
	done[KV_MSG_WANT] += how.type == KV_MSG_WANT && state_of(c).grants != before.grants;
}

/* The name of the pool whose pages a connection has; NULL: it has ended. */
static const char *pool_of(const struct kv_daemon *d, const struct connection *c)
{
	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);

		if (pool->id == c->pool_id)
			return pool->name;
	}
	return NULL;
}

static void scribble(const struct kv_daemon *d, struct connection *c, const uint8_t *payload,
		     size_t bytes)
{
	const char *name = pool_of(d, c);
	struct step_scribble s;
	uint64_t size;
	char *at;

	if (bytes < sizeof(s))
		return;
	memcpy(&s, payload, sizeof(s));
	s.bytes %= 9;
	at = s.where % 2 ? c->blocks : (void *)c->session;
	if (!at)
		return;
	size = s.where % 2 ? c->blocks_bytes : c->session_bytes;
	memcpy(at + s.offset % (size - 8), &s.value, s.bytes);
	if (s.where % 2 && name)
		strcpy(scribbled, !scribbled[0] || !strcmp(scribbled, name) ? name : "*");
}

static void post_op(struct connection *c, const uint8_t *payload, size_t bytes)
{
	struct kv_shm_session *s = c->session;
	struct kv_op op = {0};
	uint64_t at;

	if (!s)
		return;
	memcpy(&op, payload, bytes < sizeof(op) ? bytes : sizeof(op));
	at = s->ops_offset + (uint64_t)(s->ops.head & 4095) * sizeof(op);
	if (at % sizeof(op) || at > c->session_bytes - sizeof(op))
		return;
	memcpy((char *)s + at, &op, sizeof(op));
	kv_ring_post(&s->ops, s->ops.head + 1);
}

static void restart(void)
{
	uint64_t peers[N_CONNECTIONS];

	for (int i = 0; i < N_CONNECTIONS; i++) {
		peers[i] = connections[i].peer;
		connections[i].fd = kv_close(connections[i].fd);
	}
	inside_restart(peers, N_CONNECTIONS);
	for (int i = 0; i < N_CONNECTIONS; i++)
		connections[i].peer = peers[i];
}

/* The pages stay mapped, whatever becomes of the session. */
static void resume(struct connection *c, const uint8_t *payload, size_t bytes)
{
	struct kv_msg_hello hello = {.name = "fuzz"};
	struct kv_msg_resume msg = c->resume;
	uint8_t *words = (uint8_t *)&msg + sizeof(msg.head);

	c->fd = kv_close(c->fd);
	inside_step();
	c->fd = inside_connect(&c->peer);
	for (size_t i = 0; i < bytes && i < sizeof(msg) - sizeof(msg.head); i++)
		words[i] ^= payload[i];
	kv_wire_init(&hello.head, KV_MSG_HELLO, sizeof(hello), ++c->tag);
	kv_wire_init(&msg.head, KV_MSG_RESUME, sizeof(msg), ++c->tag);
	c->asked[(c->tag - 1) % 256] = KV_MSG_HELLO;
	c->asked[c->tag % 256] = KV_MSG_RESUME;
	kv_socket_send(c->fd, &hello, sizeof(hello), NULL, 0, 1);
	kv_socket_send(c->fd, &msg, sizeof(msg), NULL, 0, 1);
	inside_step();
}

static void do_step(struct kv_daemon *d, const struct step *step, const uint8_t *payload)
{
	struct connection *c = &connections[step->connection % N_CONNECTIONS];
	uint16_t ms = 0;

	switch (step->kind % N_STEP_KINDS) {
	case STEP_MESSAGE:
		send_message(c, payload, step->bytes);
		break;
	case STEP_CONNECT:
		disconnect(c);
		c->fd = inside_connect(&c->peer);
		break;
	case STEP_CLOSE:
		disconnect(c);
		break;
	case STEP_END:
		disconnect(c);
		inside_ended(c->peer);
		break;
	case STEP_READ:
		read_answers(c);
		break;
	case STEP_SCRIBBLE:
		scribble(d, c, payload, step->bytes);
		break;
	case STEP_OP:
		post_op(c, payload, step->bytes);
		break;
	case STEP_TIME:
		memcpy(&ms, payload, step->bytes < 2 ? step->bytes : 2);
		inside_advance(ms * KV_MSEC);
		break;
	case STEP_ZERO:
		inside_zero(step->bytes && payload[0]);
		break;
	case STEP_RESTART:
		restart();
		break;
	case STEP_RESUME:
		resume(c, payload, step->bytes);
		break;
	}
}

/* What the input before was answered, and what was done: for replay.c. */
void fuzz_reached(FILE *f)
{
	static const struct {
		uint16_t type;
		const char *name;
	} names[] = {{KV_MSG_ERROR, "error"},
		     {KV_MSG_OK, "ok"},
		     {KV_MSG_WELCOME, "welcome"},
		     {KV_MSG_POOL_OPENED, "opened"},
		     {KV_MSG_LAYOUT, "layout"},
		     {KV_MSG_ARENA_PART, "arena"},
		     {KV_MSG_GRANULES_PART, "granules"},
		     {KV_MSG_LEASED, "leased"},
		     {KV_MSG_STATS_PART, "stats"},
		     {KV_MSG_CHECKED, "checked"},
		     {KV_MSG_POOL_LIMITS, "limits"},
		     {KV_MSG_EPOCH, "epoch"},
		     {KV_MSG_BLOCK_SHOWN, "block"},
		     {KV_MSG_TRACE_PART, "trace"}},
	  requests[] = {{KV_MSG_HELLO, "HELLO"},
			{KV_MSG_PING, "PING"},
			{KV_MSG_POOL_OPEN, "POOL_OPEN"},
			{KV_MSG_POOL_OPEN_READ, "POOL_OPEN_READ"},
			{KV_MSG_POOL_CLOSE, "POOL_CLOSE"},
			{KV_MSG_POOL_LAYOUT, "POOL_LAYOUT"},
			{KV_MSG_ARENA, "ARENA"},
			{KV_MSG_GRANULES, "GRANULES"},
			{KV_MSG_LEASE, "LEASE"},
			{KV_MSG_WANT, "WANT"},
			{KV_MSG_KICK, "KICK"},
			{KV_MSG_STATS, "STATS"},
			{KV_MSG_CHECK, "CHECK"},
			{KV_MSG_POOL_DROP, "POOL_DROP"},
			{KV_MSG_POOL_EPOCH, "POOL_EPOCH"},
			{KV_MSG_POOL_SET, "POOL_SET"},
			{KV_MSG_POOL_COMPACT, "POOL_COMPACT"},
			{KV_MSG_RESUME, "RESUME"},
			{KV_MSG_RESTART, "RESTART"},
			{KV_MSG_BLOCK, "BLOCK"},
			{KV_MSG_TRACE, "TRACE"},
			{KV_MSG_TRACE_NEXT, "TRACE_NEXT"},
			{KV_MSG_TRACED, "TRACED"}};

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		if (answers[names[i].type])
			fprintf(f, " %s", names[i].name);
	}
	for (size_t i = 0; i < sizeof(requests) / sizeof(requests[0]); i++) {
		if (done[requests[i].type])
			fprintf(f, " %s", requests[i].name);
	}
	if (ended_moving)
		fprintf(f, " moving");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct kv_daemon *d = inside_start(size && data[0] == STEP_ISOLATE);
	const uint8_t *payload;
	struct step step;
	size_t at = 0;
	int n = 0;

	scribbled[0] = 0;
	memset(answers, 0, sizeof(answers));
	memset(done, 0, sizeof(done));
	for (int i = 0; i < N_CONNECTIONS; i++)
		connections[i] = (struct connection){.fd = -1};
	while (n++ < MAX_STEPS && step_next(data, size, &at, &step, &payload)) {
		do_step(d, &step, payload);
		if (d->stopping) {
			done[KV_MSG_RESTART]++;
			restart();
		}
		if (n % 16 == 0)
			inside_check(scribbled);
	}
	for (int i = 0; i < N_CONNECTIONS; i++)
		read_answers(&connections[i]);
	ended_moving = kv_compact_runs(d);
	inside_check(scribbled);
	for (int i = 0; i < N_CONNECTIONS; i++)
		disconnect(&connections[i]);
	inside_ended(INSIDE_ALL);
	inside_check(scribbled);
	inside_is_quiet();
	inside_stop();
	return 0;
}
