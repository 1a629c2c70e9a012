/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a pool: its pages, its memory; what it is; closing it. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <linux/membarrier.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "include/internal/killpoint.h"
#include "libclient/internal.h"
#include "libclient/pool_source.h"

#define OPEN_TRIES 3

int kv_read_only_error(void)
{
	return kv_error(-EACCES, "this pool was opened with read_only: kv_pool_peek() looks, nothing is leased, "
			"held or written");
}

/*
 * Maps what the daemon sent, after a look at its size and its seals: where a file is short, or becomes so
 * later, reading the mapping ends in a SIGBUS.
 */
static int map_pages(int fd, uint64_t bytes, uint64_t least, int protection, const char *what, void **ret)
{
	const int needed = F_SEAL_SHRINK | F_SEAL_GROW;
	struct stat st;
	int seals;
	void *p;

	if (fstat(fd, &st) < 0 || (uint64_t)st.st_size != bytes || bytes < least)
		return kv_error(-EPROTO,
				"daemon: the %s pages have %lld bytes, %llu were announced, at least %llu are needed",
				what, (long long)st.st_size, (unsigned long long)bytes, (unsigned long long)least);
	seals = fcntl(fd, F_GET_SEALS);
	if (seals < 0 || (seals & needed) != needed)
		return kv_error(-EPROTO, "daemon: the %s pages are not sealed against truncation (seals 0x%x)", what,
				seals < 0 ? 0 : seals);
	p = mmap(NULL, bytes, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
	if (p == MAP_FAILED)
		return kv_error(-errno, "mapping the %s pages (%llu bytes): %s", what,
				(unsigned long long)bytes, strerror(errno));
	madvise(p, bytes, MADV_DONTFORK);
	KV_KILLPOINT(client_pages_mapped);
	*ret = p;
	return 0;
}

struct part {
	const char *what;
	uint64_t offset, n, each; /* @n of @each bytes from @offset on */
	uint64_t bytes;		  /* of the pages that they are in */
};

static bool is_power_of_2(uint64_t n)
{
	return n && !(n & (n - 1));
}

/* All that is read or written by offsets that the pages tell lies inside them. */
static int check_parts(const struct kv_pool *pool)
{
	const struct kv_shm_pool *head = &pool->head;
	const struct kv_shm_session *s = pool->session;
	const uint64_t n = head->id_limit, index = pool->index_bytes, blocks = pool->blocks_bytes,
		       session = pool->session_bytes, bucket = KV_BUCKET_WORDS * sizeof(uint64_t);
	const struct part parts[] = {
		{"buckets", head->buckets_offset, head->n_buckets, bucket, index},
		{"stems", head->buckets_offset + head->n_buckets * bucket, head->n_stem_buckets, bucket, index},
		{"granules", head->granules_offset, head->n_granules, sizeof(uint64_t), index},
		{"descriptors", head->descriptors_offset, n, sizeof(struct kv_shm_block), blocks},
		{"tokens", head->tokens_offset, n * head->block_tokens, sizeof(int32_t), blocks},
		{"rows", head->rows_offset, n, sizeof(struct kv_shm_row), blocks},
		{"promises", head->promises_offset, KV_PROMISES, sizeof(uint64_t), blocks},
		{"grants", s->grants_offset, s->grant_capacity, sizeof(int32_t), session},
		{"ops", s->ops_offset, s->op_capacity, sizeof(struct kv_op), session},
		{"stack", s->stack_offset, s->grant_capacity, sizeof(int32_t), session},
	};

	for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
		const struct part *p = &parts[i];

		if (p->offset > p->bytes || p->n > (p->bytes - p->offset) / p->each)
			return kv_error(-EPROTO, "daemon: %llu %s from byte %llu on are not within %llu bytes",
					(unsigned long long)p->n, p->what, (unsigned long long)p->offset,
					(unsigned long long)p->bytes);
	}
	/* What is masked with one less. */
	if (!is_power_of_2(head->n_buckets) || !is_power_of_2(s->grant_capacity) ||
	    !is_power_of_2(s->op_capacity) || (head->n_stem_buckets && !is_power_of_2(head->n_stem_buckets)))
		return kv_error(-EPROTO, "daemon: %u buckets, %llu of stems, rings of %u and %u places: powers of "
				"2 are needed", head->n_buckets, (unsigned long long)head->n_stem_buckets,
				s->grant_capacity, s->op_capacity);
	return 0;
}

static int map_shared(struct kv_pool *pool, const struct kv_msg_pool_opened *opened, const int *fds)
{
	void *index, *session;
	int r = map_pages(fds[0], opened->index_bytes, sizeof(pool->head), PROT_READ, "index", &index);

	if (r < 0)
		return r;
	pool->index = index;
	pool->index_bytes = opened->index_bytes;
	r = map_pages(fds[1], opened->blocks_bytes, sizeof(struct kv_shm_blocks),
		      PROT_READ | (pool->read_only ? 0 : PROT_WRITE), "block", &pool->blocks);
	if (r < 0)
		return r;
	pool->blocks_bytes = opened->blocks_bytes;
	r = map_pages(fds[2], opened->session_bytes, sizeof(*pool->session), PROT_READ | PROT_WRITE, "session",
		      &session);
	if (r < 0)
		return r;
	pool->session = session;
	pool->session_bytes = opened->session_bytes;
	pool->head = *(const struct kv_shm_pool *)index;
	if (pool->head.magic != KV_SHM_MAGIC || pool->head.abi != KV_SHM_ABI ||
	    pool->session->magic != KV_SHM_MAGIC || pool->session->abi != KV_SHM_ABI)
		return kv_error(-EPROTO, "daemon: shared pages of version %llu, %d is known here",
				(unsigned long long)pool->head.abi, KV_SHM_ABI);
	r = check_parts(pool);
	if (r < 0)
		return r;

	pool->descriptors = kv_shm_descriptors(pool->blocks, &pool->head);
	pool->prefix = (struct kv_prefix){
		.words = (uint64_t *)((char *)index + pool->head.buckets_offset),
		.n_buckets = pool->head.n_buckets,
		.id_limit = pool->head.id_limit,
	};
	pool->stems = (struct kv_stems){
		.words = pool->prefix.words + (uint64_t)pool->head.n_buckets * KV_BUCKET_WORDS,
		.n_buckets = (uint32_t)pool->head.n_stem_buckets,
		.id_limit = pool->head.id_limit,
	};
	pool->grants = (const int32_t *)((char *)session + pool->session->grants_offset);
	pool->ops = (struct kv_op *)((char *)session + pool->session->ops_offset);
	pool->stack = (int32_t *)((char *)session + pool->session->stack_offset);
	/* Without it the daemon can't order its look at `busy` after ours at `recall`: we do. */
	pool->session->fenced =
		syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) < 0;
	pool->grant_capacity = pool->session->grant_capacity;
	pool->op_capacity = pool->session->op_capacity;
	pool->slot = opened->slot;
	pool->session_number = (uint32_t)opened->session_id;
	pool->slab_offset = opened->slab_offset;
	pool->slab_blocks = opened->slab_blocks;
	pool->max_blocks = opened->max_blocks;
	pool->gpu_mask = opened->gpu_mask;
	return 0;
}

/* refs and gives: one mapping, of which only what is used takes memory. */
static size_t arrays_bytes(const struct kv_pool *pool)
{
	return (size_t)pool->head.id_limit * (sizeof(*pool->refs) + sizeof(*pool->gives));
}

static int private_arrays(struct kv_pool *pool)
{
	void *arrays = mmap(NULL, arrays_bytes(pool), PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (arrays == MAP_FAILED)
		return kv_error(-errno, "what this process keeps of %u blocks: %s", pool->head.id_limit,
				strerror(errno));
	pool->refs = arrays;
	pool->gives = pool->refs + pool->head.id_limit;
	return 0;
}

static int send_open(struct kv_pool *pool, const struct kv_pool_options *o, int64_t deadline,
		     int fds[3])
{
	const struct kv_layout *layout = o->layout;
	uint32_t list = layout ? layout->n_components * (uint32_t)sizeof(struct kv_component) : 0;
	uint32_t size = sizeof(struct kv_msg_pool_open) + list, n_fds = 0;
	kv_cleanup(kv_freep) struct kv_msg_pool_open *msg = calloc(1, size);
	const char *texts[] = { o->name, o->model, o->revision, o->name_space };
	static const char *const names[] = { "name", "model", "revision", "name_space" };
	static const size_t to[] = { offsetof(struct kv_msg_pool_open, name), offsetof(struct kv_msg_pool_open, model),
				     offsetof(struct kv_msg_pool_open, revision),
				     offsetof(struct kv_msg_pool_open, name_space) };
	int r;

	if (!msg)
		return kv_no_memory();
	for (int i = 0; i < 4; i++) {
		if (texts[i] && strlen(texts[i]) >= KV_NAME_MAX)
			return kv_error(-EINVAL, "%s: '%s' has %zu bytes, at most %d are allowed",
					names[i], texts[i], strlen(texts[i]), KV_NAME_MAX - 1);
		if (texts[i])
			strcpy((char *)msg + to[i], texts[i]);
	}
	msg->tp_ranks = o->tp_ranks ? o->tp_ranks : 1;
	msg->gpu_mask = o->gpu_mask ? o->gpu_mask : 1;
	msg->min_bytes = o->min_bytes;
	msg->max_bytes = o->max_bytes;
	msg->weight = o->weight;
	if (layout) {
		msg->layout_kind = layout->kind;
		msg->layout_flags = layout->flags;
		msg->block_tokens = layout->block_tokens;
		msg->n_components = layout->n_components;
		memcpy(msg->components, layout->components, list);
	}
	msg->head.type = pool->read_only ? KV_MSG_POOL_OPEN_READ : KV_MSG_POOL_OPEN;
	msg->head.size = size;
	r = kv_connection_call(&pool->connection, msg, KV_MSG_POOL_OPENED,
			       sizeof(struct kv_msg_pool_opened), fds, 3, &n_fds, deadline);
	if (!r && n_fds != 3) {
		while (n_fds)
			kv_close(fds[--n_fds]);
		r = kv_error(-EPROTO, "daemon: it sent %u descriptors, 3 are needed", n_fds);
	}
	return r;
}

/* Before the first message that depends on it: else the daemon could only hang up. */
static int check_version(const struct kv_connection *c)
{
	const struct kv_msg_welcome *welcome = (const void *)c->buffer;

	if (welcome->shm_abi == KV_SHM_ABI)
		return 0;
	return kv_error(-EPROTO, "daemon: kvcached %.15s shares pages of version %u, this libkvclient (%s) knows %d; "
			"both must be of one release", welcome->version, welcome->shm_abi, kv_version(), KV_SHM_ABI);
}

/* From here on the session outlives workers of the daemon. */
static void note_session(struct kv_pool *pool, const struct kv_msg_pool_opened *opened)
{
	struct kv_connection *c = &pool->connection;

	c->socket = pool->client->socket;
	c->name = pool->client->name;
	c->resume = (struct kv_msg_resume){ .head = { .type = KV_MSG_RESUME, .size = sizeof(c->resume) },
					    .boot_nonce = c->boot_nonce,
					    .pool_id = opened->pool_id,
					    .session_id = opened->session_id,
					    .token = opened->token,
					    .slot = opened->slot };
}

static int fetch_layout(struct kv_pool *pool, int64_t deadline)
{
	struct kv_msg_plain ask = { .head = { .type = KV_MSG_POOL_LAYOUT, .size = sizeof(ask) } };
	const struct kv_msg_layout *msg = (const void *)pool->connection.buffer;
	size_t list;
	int r = kv_connection_call(&pool->connection, &ask, KV_MSG_LAYOUT, sizeof(*msg), NULL, 0, NULL,
				   deadline);

	if (r < 0)
		return r;
	list = (size_t)msg->n_components * sizeof(struct kv_component);
	if (msg->head.size != sizeof(*msg) + list)
		return kv_error(-EPROTO, "daemon: a layout of %u components in %u bytes",
				msg->n_components, msg->head.size);
	pool->components = malloc(list ? list : 1);
	if (!pool->components)
		return kv_no_memory();
	memcpy(pool->components, msg->components, list);
	pool->layout = (struct kv_layout){ .kind = msg->kind,
					   .flags = msg->flags,
					   .block_tokens = msg->block_tokens,
					   .n_components = msg->n_components,
					   .components = pool->components };
	return kv_layout_check(&pool->layout);
}

/* All handles of one arena come in parts of up to KV_WIRE_MAX_FDS. */
static int attach_gpu(struct kv_pool *pool, uint32_t gpu, int64_t deadline)
{
	const struct kv_msg_arena_part *part = (const void *)pool->connection.buffer;
	struct kv_arena_export export = { 0 };
	int *fds = NULL;
	uint32_t have = 0;
	int r;

	do {
		struct kv_msg_arena ask = { .head = { .type = KV_MSG_ARENA, .size = sizeof(ask) },
					    .gpu = gpu,
					    .first_fd = have };
		int *more = realloc(fds, (have + KV_WIRE_MAX_FDS) * sizeof(*fds));
		uint32_t n = 0;

		r = more ? 0 : kv_no_memory();
		if (r < 0)
			break;
		fds = more;
		r = kv_connection_call(&pool->connection, &ask, KV_MSG_ARENA_PART, sizeof(*part),
				       fds + have, KV_WIRE_MAX_FDS, &n, deadline);
		if (r < 0)
			break;
		export = part->export;
		have += n;
		if (export.sparse)
			break;
		if (n != part->n_fds || (!n && export.n_fds)) {
			r = kv_error(-EPROTO, "daemon: %u of %u descriptors of device %u came", have,
				     export.n_fds, gpu);
			break;
		}
	} while (have < export.n_fds);
	if (!r && export.sparse) {
		r = kv_memory_attach_sparse(&export, pool->read_only, &pool->memory[gpu]);
		if (!r)
			r = kv_granules_init(pool, gpu);
	} else if (!r) {
		r = kv_memory_attach(&export, fds, pool->read_only, &pool->memory[gpu]);
	}
	while (have)
		kv_close(fds[--have]);
	free(fds);
	return r;
}

static int attach(struct kv_pool *pool, const struct kv_pool_options *o, int64_t deadline)
{
	uint32_t mask = o->map_mask ? o->map_mask : pool->gpu_mask;

	pool->device = KV_DEVICE_HOST;
	if (!o->mapped)
		return 0;
	if (mask & ~pool->gpu_mask)
		return kv_error(-EINVAL, "map_mask: %#x given, the pool is on devices %#x", mask,
				pool->gpu_mask);
	for (uint32_t gpu = 0; gpu < KV_MAX_GPUS; gpu++) {
		int r = mask >> gpu & 1 ? attach_gpu(pool, gpu, deadline) : 0;

		if (r < 0)
			return r;
		if (mask >> gpu & 1)
			pool->device = kv_memory_device(pool->memory[gpu]);
	}
	pool->mapped_mask = mask;
	return kv_granules_need(pool, deadline);
}

/* In a forked child the shared pages are not mapped: what is there now is something else. */
static void unmap_shared(struct kv_pool *pool)
{
	if (kv_forked(pool->fork_generation))
		return;
	if (pool->session)
		munmap(pool->session, pool->session_bytes);
	if (pool->blocks)
		munmap(pool->blocks, pool->blocks_bytes);
	if (pool->index)
		munmap(pool->index, pool->index_bytes);
}

static void unmap_memory(struct kv_pool *pool)
{
	for (uint32_t gpu = 0; gpu < KV_MAX_GPUS; gpu++) {
		pool->memory[gpu] = kv_memory_detach(pool->memory[gpu]);
		free(pool->granules[gpu]);
		pool->granules[gpu] = NULL;
	}
}

static void discard(struct kv_pool *pool)
{
	unmap_memory(pool);
	if (pool->refs)
		munmap(pool->refs, arrays_bytes(pool));
	unmap_shared(pool);
	kv_connection_close(&pool->connection);
	free(pool->components);
	free(pool->copies);
	kv_ops_deinit(pool);
	kv_seq_discard(pool->spare);
	free(pool);
}

static void say_goodbye(struct kv_pool *pool)
{
	struct kv_msg_plain bye = { .head = { .type = KV_MSG_POOL_CLOSE, .size = sizeof(bye) } };

	kv_connection_call(&pool->connection, &bye, KV_MSG_OK, sizeof(bye), NULL, 0, NULL,
			   kv_deadline(0));
}

static int open_once(struct kv_client *client, const struct kv_pool_options *o, int64_t deadline,
		     struct kv_pool **ret)
{
	struct kv_pool *pool = calloc(1, sizeof(*pool));
	int fds[3] = { -1, -1, -1 };
	bool opened;
	int r;

	if (!pool)
		return kv_no_memory();
	pool->client = client;
	pool->fork_generation = kv_fork_generation;
	pool->keep_epoch = o->keep_epoch;
	pool->read_only = o->read_only;
	pool->max_seq_tokens = o->max_seq_tokens ? o->max_seq_tokens : UINT64_MAX;
	kv_link_init(&pool->later);
	r = kv_connection_open(&pool->connection, client->socket, client->name, deadline, NULL);
	if (!r)
		r = check_version(&pool->connection);
	if (!r)
		r = send_open(pool, o, deadline, fds);
	opened = !r;
	if (!r) {
		note_session(pool, (const void *)pool->connection.buffer);
		r = map_shared(pool, (const void *)pool->connection.buffer, fds);
	}
	for (int i = 0; i < 3; i++)
		kv_close(fds[i]);
	if (!r)
		r = private_arrays(pool);
	if (!r)
		r = fetch_layout(pool, deadline);
	if (!r)
		r = attach(pool, o, deadline);
	KV_KILLPOINT(client_attached);
	if (r < 0) {
		/* Nothing was done with the session: it need not last until this process ends. */
		if (opened)
			say_goodbye(pool);
		discard(pool);
		return r;
	}
	*ret = pool;
	return 0;
}

KV_PUBLIC int kv_pool_open(struct kv_client *client, const struct kv_pool_options *options,
			   struct kv_pool **ret)
{
	kv_cleanup(kv_pool_source_deinit) struct kv_pool_source source = { 0 };
	struct kv_pool_options o = { 0 };
	int64_t deadline;
	int r = kv_forked(client->fork_generation);

	if (r < 0)
		return r;
	r = kv_options_copy(&o, sizeof(o), options);
	if (r < 0)
		return r;
	r = kv_pool_source_init(&source, &o);
	if (r < 0)
		return r;
	if (o.layout) {
		r = kv_layout_check(o.layout);
		if (r < 0)
			return r;
	}
	deadline = kv_deadline(o.timeout);
	/* What a worker had begun when it died is forgotten: all of it is done anew. */
	for (int tries = 0; tries < OPEN_TRIES; tries++) {
		r = open_once(client, &o, deadline, ret);
		if (r != -ECONNRESET || kv_now() >= deadline)
			break;
	}
	return r;
}

KV_PUBLIC struct kv_pool *kv_pool_close(struct kv_pool *pool)
{
	if (!pool)
		return NULL;
	/*
	 * Saying goodbye means "nothing of mine is running". If that can't be said, the socket is
	 * just closed, and the daemon waits for the end of this process.
	 */
	if (!kv_forked(pool->fork_generation) && !pool->lost &&
	    !kv_later_finish(pool, kv_deadline(0))) {
		kv_ops_finish(pool);
		kv_ops_kick(pool);
		/* What is still mapped when the session ends would be memory that is used twice. */
		if (pool->sparse)
			unmap_memory(pool);
		say_goodbye(pool);
	}
	while (!kv_link_is_alone(&pool->later))
		free(kv_list_take_first(&pool->later));
	discard(pool);
	KV_KILLPOINT(client_closed);
	return NULL;
}

KV_PUBLIC void kv_pool_info(const struct kv_pool *pool, struct kv_pool_info *ret)
{
	*ret = (struct kv_pool_info){
		.block_tokens = pool->head.block_tokens,
		.n_components = pool->layout.n_components,
		.block_bytes = pool->head.block_bytes,
		.max_blocks = kv_forked(pool->fork_generation) ? pool->max_blocks :
								 kv_pool_max_blocks(pool),
		.null_block = pool->head.null_block,
		.id_limit = (kv_block_id)pool->head.id_limit,
		.device = pool->device,
		.gpu_mask = pool->gpu_mask,
		.session = pool->session_number,
	};
}

KV_PUBLIC int kv_pool_map(struct kv_pool *pool, int64_t timeout)
{
	int r = kv_forked(pool->fork_generation);

	if (r < 0)
		return r;
	kv_later_poll(pool);
	return kv_granules_need(pool, kv_deadline(timeout));
}

KV_PUBLIC const struct kv_layout *kv_pool_layout(const struct kv_pool *pool)
{
	return &pool->layout;
}

KV_PUBLIC int kv_pool_view(const struct kv_pool *pool, uint32_t gpu, uint32_t component,
			   struct kv_view *ret)
{
	int r = kv_forked(pool->fork_generation);

	if (r < 0)
		return r;
	if (component >= pool->layout.n_components)
		return kv_error(-EINVAL, "component: %u given, the layout has %u", component,
				pool->layout.n_components);
	if (gpu >= KV_MAX_GPUS)
		return kv_error(-EINVAL, "gpu: %u given, at most %d devices", gpu, KV_MAX_GPUS);
	if (!pool->memory[gpu])
		return kv_error(-ENXIO, "gpu: this pool is not mapped on device %u here (mask %#x)", gpu,
				pool->mapped_mask);
	kv_layout_view(&pool->layout, component, kv_memory_base(pool->memory[gpu]), pool->slab_offset,
		       pool->slab_blocks, ret);
	return 0;
}
