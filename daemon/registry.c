/* SPDX-License-Identifier: Apache-2.0 */
/* Pools by name: their identity, their shared pages, their birth and end. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "alloc/layout.h"
#include "daemon/daemon.h"
#include "daemon/log.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/killpoint.h"
#include "include/internal/socket.h"

#define POOL_FDS 5 /* of a deposit: keeper.h */

struct kv_pool *kv_pool_find(struct kv_daemon *d, const char *name)
{
	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);

		if (!strcmp(pool->name, name))
			return pool;
	}
	return NULL;
}

/*
 * What clients get of the index, and readers of the blocks: a descriptor that was opened for reading, of a file that nobody
 * else can open. (A seal against writing would hold for the next worker as well.)
 */
static int open_for_reading(int fd, int *ret)
{
	char path[32];
	int r;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	r = open(path, O_RDONLY | O_CLOEXEC);
	if (r < 0)
		return -errno;
	*ret = r;
	return fchmod(fd, 0) < 0 ? -errno : 0;
}

static uint64_t page_up(uint64_t bytes)
{
	return (bytes + 4095) / 4096 * 4096;
}

static uint32_t id_limit_of(const struct kv_pool *pool)
{
	uint64_t arena = UINT64_MAX;

	if (pool->layout.kind == KV_LAYOUT_PAGED)
		return (uint32_t)pool->slab_blocks;
	for (uint32_t g = 0; g < pool->daemon->n_gpus; g++) {
		uint64_t bytes = (uint64_t)pool->daemon->extents.n[g] * pool->daemon->extents.bytes;

		if (pool->gpu_mask >> g & 1 && bytes < arena)
			arena = bytes;
	}
	return (uint32_t)(arena / pool->block_bytes);
}

/* $KVCACHED_TEST_KEY_BITS: tests make keys of few bits, which collide. */
static uint64_t test_key_mask(void)
{
	const char *text = getenv("KVCACHED_TEST_KEY_BITS");
	int bits = text ? atoi(text) : 64;

	return bits < 0 || bits >= 64 ? UINT64_MAX : ((uint64_t)1 << bits) - 1;
}

static int init_books(struct kv_pool *pool)
{
	int r = kv_books_init_in(&pool->books, pool->head,
				 (uint64_t *)((char *)pool->head + pool->head->buckets_offset),
				 pool->blocks, (char *)pool->record + KV_RECORD_BYTES);

	pool->books.policy = pool->daemon->config.policy;
	pool->books.clock = &pool->daemon->clock;
	kv_trace_pool(pool);
	return r;
}

static int make_record(struct kv_pool *pool, const struct kv_msg_pool_open *msg, uint64_t bytes)
{
	int r = kv_shared_pages("kvcached-books", bytes, &pool->books_fd, (void **)&pool->record);
	struct kv_pool_record *record = pool->record;

	if (r < 0)
		return r;
	record->id = pool->id;
	record->bytes = bytes;
	record->slab_offset = pool->slab_offset;
	record->slab_blocks = pool->slab_blocks;
	record->first_extent = pool->first_extent;
	memcpy(&record->opened, msg, msg->head.size);
	kv_store_release(&record->state, KV_RECORD_MAKING);
	return 0;
}

static int make_pages(struct kv_pool *pool, const struct kv_msg_pool_open *msg)
{
	uint32_t id_limit = id_limit_of(pool);
	uint32_t n_buckets = kv_prefix_buckets(id_limit);
	struct kv_shm_pool head = {
		.magic = KV_SHM_MAGIC,
		.abi = KV_SHM_ABI,
		.boot_nonce = pool->daemon->boot_nonce,
		.pool_id = pool->id,
		.key_mask = test_key_mask(),
		.block_bytes = pool->block_bytes,
		.block_tokens = pool->layout.block_tokens,
		.id_limit = id_limit,
		.n_buckets = n_buckets,
		.n_stem_buckets = kv_stem_buckets(id_limit, pool->layout.block_tokens),
		.buckets_offset = page_up(sizeof(head)),
		.descriptors_offset = page_up(sizeof(struct kv_shm_blocks)),
	};
	int r;

	if (getrandom(&head.seed, sizeof(head.seed), 0) != sizeof(head.seed))
		return -EIO;
	head.granules_offset = page_up(head.buckets_offset + (n_buckets + head.n_stem_buckets) *
							     KV_BUCKET_WORDS * sizeof(uint64_t));
	head.n_granules = kv_isolate_granules(pool);
	head.index_bytes = page_up(head.granules_offset + head.n_granules * sizeof(uint64_t));
	head.tokens_offset = page_up(head.descriptors_offset +
				     (uint64_t)id_limit * sizeof(struct kv_shm_block));
	head.rows_offset = page_up(head.tokens_offset +
				   (uint64_t)id_limit * head.block_tokens * sizeof(int32_t));
	head.promises_offset =
		page_up(head.rows_offset + (uint64_t)id_limit * sizeof(struct kv_shm_row));
	head.blocks_bytes = page_up(head.promises_offset + KV_PROMISES * sizeof(uint64_t));

	r = kv_shared_pages("kvcached-index", head.index_bytes, &pool->index_fd,
			    (void **)&pool->head);
	if (!r)
		r = open_for_reading(pool->index_fd, &pool->index_read_fd);
	if (!r)
		r = kv_shared_pages("kvcached-blocks", head.blocks_bytes, &pool->blocks_fd,
				    &pool->blocks);
	if (!r)
		r = open_for_reading(pool->blocks_fd, &pool->blocks_read_fd);
	if (!r)
		r = make_record(pool, msg, KV_RECORD_BYTES + kv_books_saved_bytes(id_limit));
	if (r < 0)
		return r;

	*pool->head = head;
	kv_limits_adopt(pool, &(struct kv_limits){ pool->min_bytes, pool->max_bytes, pool->weight });
	*(struct kv_shm_blocks *)pool->blocks =
		(struct kv_shm_blocks){ .magic = KV_SHM_MAGIC, .abi = KV_SHM_ABI, .clock = 1 };
	return init_books(pool);
}

static int deposit(struct kv_pool *pool)
{
	int fds[] = { pool->index_fd, pool->index_read_fd, pool->blocks_fd, pool->blocks_read_fd,
		      pool->books_fd };

	return kv_keeping_put(&pool->daemon->keeping, KV_DEPOSIT_POOL, pool->id, fds, POOL_FDS);
}

static int adopt_layout(struct kv_pool *pool, const struct kv_msg_pool_open *msg)
{
	int r;

	pool->components = calloc(msg->n_components ? msg->n_components : 1,
				  sizeof(*pool->components));
	if (!pool->components)
		return kv_error(-ENOMEM, "no memory for the layout of pool '%s'", pool->name);
	memcpy(pool->components, msg->components, msg->n_components * sizeof(*pool->components));
	pool->layout = (struct kv_layout){ .kind = msg->layout_kind,
					   .flags = msg->layout_flags,
					   .block_tokens = msg->block_tokens,
					   .n_components = msg->n_components,
					   .components = pool->components };
	r = kv_layout_block_bytes(&pool->layout, NULL, &pool->block_bytes);
	return r;
}

static int check_capacity(struct kv_pool *pool)
{
	struct kv_limits limits = { pool->min_bytes, pool->max_bytes, pool->weight };
	uint64_t arena = kv_limits_arena(pool->daemon, pool->gpu_mask);
	int r = kv_limits_check(pool, &limits);

	if (r < 0)
		return r;
	if (arena / pool->block_bytes >= INT32_MAX)
		return kv_error(-EINVAL, "block of %llu bytes: the arena of %llu bytes would hold more "
				"than 2^31 blocks",
				(unsigned long long)pool->block_bytes, (unsigned long long)arena);
	if (pool->layout.kind == KV_LAYOUT_PAGED)
		pool->slab_blocks = limits.max_bytes / pool->block_bytes;
	kv_limits_adopt(pool, &limits);
	return 0;
}

static void pool_freep(struct kv_pool **pool)
{
	if (*pool)
		kv_pool_free(*pool);
}

/* What its first client says of it. */
static int pool_new(struct kv_daemon *d, const struct kv_msg_pool_open *msg, struct kv_pool **ret)
{
	kv_cleanup(pool_freep) struct kv_pool *pool = calloc(1, sizeof(*pool));
	int r;

	if (!pool)
		return kv_error(-ENOMEM, "no memory for pool '%.*s'", KV_NAME_MAX, msg->name);
	kv_link_init(&pool->link);
	pool->daemon = d;
	pool->index_fd = pool->index_read_fd = pool->blocks_fd = pool->blocks_read_fd = -1;
	pool->books_fd = -1;
	memcpy(pool->name, msg->name, KV_NAME_MAX);
	memcpy(pool->model, msg->model, KV_NAME_MAX);
	memcpy(pool->revision, msg->revision, KV_NAME_MAX);
	memcpy(pool->name_space, msg->name_space, KV_NAME_MAX);
	pool->tp_ranks = msg->tp_ranks;
	pool->gpu_mask = msg->gpu_mask;
	pool->min_bytes = msg->min_bytes;
	pool->max_bytes = msg->max_bytes;
	pool->weight = msg->weight ? msg->weight : 1;
	r = adopt_layout(pool, msg);
	if (r < 0)
		return r;
	*ret = kv_steal(pool);
	return 0;
}

/* What extents and deposits of a pool go by is the low half of its id: never twice at a time, and not 0. */
static bool is_known(const struct kv_daemon *d, uint32_t low)
{
	bool known = !low;

	for (const struct kv_link *l = d->pools.next; !known && l != &d->pools; l = l->next)
		known = (uint32_t)kv_container_of(l, struct kv_pool, link)->id == low;
	/* What is dirty still says whose it was, who may have it back as it is. */
	for (uint32_t g = 0; g < d->n_gpus; g++) {
		for (uint32_t i = 0; !known && i < d->extents.n[g]; i++)
			known = d->extents.map[g][i].state != KV_EXTENT_CLEAN &&
				d->extents.map[g][i].owner == low;
	}
	return known;
}

void kv_pool_take_id(struct kv_pool *pool)
{
	struct kv_daemon *d = pool->daemon;

	while (is_known(d, (uint32_t)d->next_pool_id))
		d->next_pool_id++;
	/* Whatever becomes of this worker. */
	if (d->journal)
		kv_store_release(&d->journal->next_pool_id, d->next_pool_id + 1);
	pool->id = d->next_pool_id++;
}

int kv_pool_create(struct kv_daemon *d, const struct kv_msg_pool_open *msg, struct kv_pool **ret)
{
	kv_cleanup(pool_freep) struct kv_pool *pool = NULL;
	int r = pool_new(d, msg, &pool);

	if (r < 0)
		return r;
	r = check_capacity(pool);
	if (r < 0)
		return r;
	r = kv_capacity_claim(pool);
	if (r < 0)
		return r;
	KV_KILLPOINT(worker_pool_claimed);
	r = make_pages(pool, msg);
	if (!r)
		r = kv_capacity_begin(pool);
	if (r < 0)
		return kv_error(r, "shared pages for pool '%s': %s", pool->name, strerror(-r));
	r = deposit(pool);
	if (r < 0)
		return r;
	KV_KILLPOINT(worker_pool_deposited);
	kv_store_release(&pool->record->state, KV_RECORD_LIVE);
	KV_KILLPOINT(worker_pool_live);

	d->n_pools++;
	kv_list_append(&d->pools, &pool->link);
	kv_log(KV_LOG_INFO, "pool '%s' made: %s, blocks of %u tokens and %llu bytes, at most %llu of them",
	       pool->name, pool->layout.kind == KV_LAYOUT_FLAT ? "flat" : "paged",
	       pool->layout.block_tokens, (unsigned long long)pool->block_bytes,
	       (unsigned long long)pool->max_blocks);
	*ret = kv_steal(pool);
	return 0;
}

static void differ(char *text, size_t size, const char *field, const char *have, const char *asked)
{
	size_t used = strlen(text);

	if (strncmp(have, asked, KV_NAME_MAX))
		snprintf(text + used, size - used, "%s%s: '%s' here, '%.*s' asked", used ? "; " : "",
			 field, have, KV_NAME_MAX, asked);
}

static void differ_number(char *text, size_t size, const char *field, unsigned have, unsigned asked)
{
	size_t used = strlen(text);

	if (have != asked)
		snprintf(text + used, size - used, "%s%s: %u here, %u asked", used ? "; " : "", field,
			 have, asked);
}

int kv_pool_differs(const struct kv_pool *pool, const struct kv_msg_pool_open *msg)
{
	struct kv_layout asked = { .kind = msg->layout_kind,
				   .flags = msg->layout_flags,
				   .block_tokens = msg->block_tokens,
				   .n_components = msg->n_components,
				   .components = msg->components };
	char text[KV_ERROR_BYTES - 40] = "";

	differ(text, sizeof(text), "model", pool->model, msg->model);
	differ(text, sizeof(text), "revision", pool->revision, msg->revision);
	differ(text, sizeof(text), "name_space", pool->name_space, msg->name_space);
	differ_number(text, sizeof(text), "tp_ranks", pool->tp_ranks, msg->tp_ranks);
	differ_number(text, sizeof(text), "gpu_mask", pool->gpu_mask, msg->gpu_mask);
	if (msg->layout_kind)
		kv_layout_difference(&pool->layout, &asked, text, sizeof(text));
	return text[0] ? kv_error(-EEXIST, "pool '%.40s' differs: %s", pool->name, text) : 0;
}

void kv_pool_unload(struct kv_pool *pool)
{
	if (!kv_link_is_alone(&pool->link)) {
		kv_link_unlink(&pool->link);
		pool->daemon->n_pools--;
	}
	kv_gradual_forget(pool);
	kv_books_deinit(&pool->books);
	if (pool->record)
		munmap(pool->record, pool->record->bytes);
	if (pool->blocks)
		munmap(pool->blocks, pool->head->blocks_bytes);
	if (pool->head)
		munmap(pool->head, pool->head->index_bytes);
	kv_close(pool->index_fd);
	kv_close(pool->index_read_fd);
	kv_close(pool->blocks_fd);
	kv_close(pool->blocks_read_fd);
	kv_close(pool->books_fd);
	kv_user_take(pool->user, KV_USER_POOLS);
	kv_user_put(pool->user);
	free(pool->components);
	free(pool);
}

struct kv_pool *kv_pool_free(struct kv_pool *pool)
{
	struct kv_daemon *d = pool->daemon;
	uint64_t id = pool->id;

	if (!kv_link_is_alone(&pool->link))
		kv_log(KV_LOG_INFO, "pool '%s' ended", pool->name);
	kv_compact_forget(pool);
	/* From here on its extents are dirty, also for another worker. */
	if (pool->record)
		kv_store_release(&pool->record->state, KV_RECORD_ENDING);
	KV_KILLPOINT(worker_pool_ending);
	kv_capacity_release(pool);
	KV_KILLPOINT(worker_pool_released);
	kv_pool_unload(pool);
	if (id)
		kv_keeping_drop(&d->keeping, KV_DEPOSIT_POOL, id);
	return NULL;
}

/* The pages of a deposit, which becomes empty. The sizes are those that the pages themselves say. */
static int map_pages(struct kv_pool *pool, struct kv_deposit *deposit)
{
	const struct kv_shm_pool *head;
	struct stat st;
	void *p;
	int r;

	if (deposit->n_fds != POOL_FDS)
		return -EPROTO;
	pool->index_fd = kv_steal_fd(&deposit->fds[0]);
	pool->index_read_fd = kv_steal_fd(&deposit->fds[1]);
	pool->blocks_fd = kv_steal_fd(&deposit->fds[2]);
	pool->blocks_read_fd = kv_steal_fd(&deposit->fds[3]);
	r = fstat(pool->index_fd, &st) < 0 ? -errno :
					       kv_shared_map(pool->index_fd, (uint64_t)st.st_size, &p);
	if (r < 0)
		return r;
	pool->head = p;
	head = pool->head;
	if (head->magic != KV_SHM_MAGIC || head->abi != KV_SHM_ABI ||
	    head->index_bytes != (uint64_t)st.st_size ||
	    pool->record->bytes != KV_RECORD_BYTES + kv_books_saved_bytes(head->id_limit))
		return -EPROTO;
	return kv_shared_map(pool->blocks_fd, head->blocks_bytes, &pool->blocks);
}

int kv_pool_adopt(struct kv_daemon *d, struct kv_deposit *deposit, struct kv_pool **ret)
{
	kv_cleanup(kv_closep) int books_fd =
		deposit->n_fds == POOL_FDS ? kv_steal_fd(&deposit->fds[POOL_FDS - 1]) : -1;
	struct kv_pool_record *record;
	struct kv_pool *pool;
	struct stat st;
	int r;

	if (books_fd < 0 || fstat(books_fd, &st) < 0 || st.st_size < KV_RECORD_BYTES)
		return -EPROTO;
	r = kv_shared_map(books_fd, (uint64_t)st.st_size, (void **)&record);
	if (r < 0)
		return r;
	r = record->state != KV_RECORD_LIVE || record->bytes != (uint64_t)st.st_size ? -ENOENT : 0;
	if (!r)
		r = pool_new(d, &record->opened, &pool);
	if (r < 0) {
		munmap(record, (size_t)st.st_size);
		return r;
	}
	pool->record = record;
	pool->books_fd = kv_steal_fd(&books_fd);
	pool->id = record->id;
	kv_limits_load(pool);
	pool->slab_offset = record->slab_offset;
	pool->slab_blocks = record->slab_blocks;
	pool->first_extent = (uint32_t)record->first_extent;
	pool->lookup_tokens = record->lookup_tokens;
	pool->hit_tokens = record->hit_tokens;
	pool->n_no_room = record->n_no_room;
	r = map_pages(pool, deposit);
	if (!r)
		r = init_books(pool);
	if (r < 0) {
		kv_pool_unload(pool);
		return r;
	}
	/* They may have been written down and not shown yet. */
	kv_limits_show(pool);
	pool->user = record->made_by ? kv_user_get(d, (uid_t)(record->made_by - 1)) : NULL;
	if (pool->user)
		pool->user->n[KV_USER_POOLS]++;
	d->n_pools++;
	kv_list_append(&d->pools, &pool->link);
	*ret = pool;
	return 0;
}
