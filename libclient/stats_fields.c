/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fields of the structs in stats.h, one row each, in the order of the struct: name, unit, and
 * what the number means. kvctl's tables, its JSON and its `show` commands are made from these rows.
 *
 * A row's type is checked when it compiles: a number is a uint64_t, a text is an array of char.
 * Help texts are short enough (46 bytes) for `kvctl pool show` to stay within 80 columns.
 */
#include <stddef.h>

#include <kvcached/stats.h>

#include "include/internal/public.h"

#define IS_NUMBER(type, field) _Generic(((type *)0)->field, uint64_t : 1, default : 0)
#define IS_TEXT(type, field) _Generic(((type *)0)->field, char * : 1, default : 0)

/* The array of size 1 or -1 turns a wrong type into a compile error and adds 0 to the offset. */
#define NUMBER(type, field, unit, help)                                                            \
	{                                                                                          \
		#field, unit, help, KV_STAT_NUMBER,                                                \
			offsetof(type, field) + 0 * sizeof(char[IS_NUMBER(type, field) ? 1 : -1])  \
	}
#define TEXT(type, field, help)                                                                    \
	{                                                                                          \
		#field, "", help, KV_STAT_TEXT,                                                    \
			offsetof(type, field) + 0 * sizeof(char[IS_TEXT(type, field) ? 1 : -1])    \
	}

/* clang-format off */
#define D(...) NUMBER(struct kv_daemon_stats, __VA_ARGS__)
#define DT(...) TEXT(struct kv_daemon_stats, __VA_ARGS__)
static const struct kv_stat_field daemon_fields[] = {
	DT(version, "version of the daemon"),
	DT(event_loop, "io_uring or epoll"),
	DT(event_loop_why, "why that one"),
	DT(heap, "jemalloc or libc"),
	D(boot_nonce, "", "random number of this start of the daemon"),
	D(pid, "", "process id of the daemon: of its keeper"),
	D(worker_pid, "", "process id of its worker"),
	D(worker_restarts, "", "workers before this one that had served"),
	D(programs_given_up, "", "programs that ended before they served"),
	D(uptime_ns, "ns", "time since the daemon started"),
	D(n_gpus, "", "devices it owns memory of"),
	D(n_pools, "", "pools"),
	D(n_clients, "", "connections, this one included"),
	D(n_sessions, "", "attachments of clients to pools"),
	D(heap_bytes, "bytes", "the daemon's own heap in use"),
	D(heap_active_bytes, "bytes", "heap: pages that hold something"),
	D(heap_resident_bytes, "bytes", "heap: in memory, the allocator's own included"),
	D(heap_mapped_bytes, "bytes", "heap: mapped by the allocator"),
	D(heap_retained_bytes, "bytes", "heap: address space it keeps for later"),
	D(event_batches_total, "", "messages with KV events"),
	D(event_restarts_total, "", "streams of events that began anew"),
	D(moved_bytes_total, "bytes", "that pools gave up for others"),
	D(moving_ns_total, "ns", "CPU time of the worker for making room"),
	{ NULL },
};

#define G(...) NUMBER(struct kv_gpu_stats, __VA_ARGS__)
#define GT(...) TEXT(struct kv_gpu_stats, __VA_ARGS__)
static const struct kv_stat_field gpu_fields[] = {
	G(index, "", "number of the device in gpu_mask"),
	GT(name, "what it is"),
	GT(uuid, "UUID of the GPU; empty for host memory"),
	GT(export_kind, "how clients map it: vmm, ipc or host"),
	GT(export_why, "how that was chosen"),
	GT(export_limits, "promises that don't hold with it"),
	G(bytes_arena, "bytes", "memory reserved on the device"),
	G(bytes_pools, "bytes", "of this, in extents of pools"),
	G(bytes_scrubbing, "bytes", "given back by a pool, not zeroed yet"),
	G(bytes_free, "bytes", "in no pool, ready to be granted"),
	G(bytes_extent, "bytes", "size of an extent"),
	G(mover_pid, "", "process that zeroes memory; 0: the daemon"),
	G(scrubbed_bytes_total, "bytes", "zeroed since the start"),
	GT(mover_error, "why its mover failed last; empty: all is well"),
	G(bytes_granule, "bytes", "mapped by one pool's clients; 0: no isolation"),
	G(bytes_held, "bytes", "missing: an earlier pool's clients keep it"),
	G(renewed_bytes_total, "bytes", "made anew after clients had had it"),
	{ NULL },
};

#define P(...) NUMBER(struct kv_pool_stats, __VA_ARGS__)
#define PT(...) TEXT(struct kv_pool_stats, __VA_ARGS__)
static const struct kv_stat_field pool_fields[] = {
	P(id, "", "number of the pool"),
	PT(name, "clients that give the same name share it"),
	PT(model, "identity: model"),
	PT(revision, "identity: revision of the model"),
	PT(name_space, "identity: what else decides about sharing"),
	PT(layout, "flat or paged"),
	P(gpu_mask, "", "bit i: it lies on device i"),
	P(tp_ranks, "", "identity: ranks that share its ids"),
	P(block_tokens, "tokens", "tokens of a block"),
	P(block_bytes, "bytes", "size of a block on each device"),
	P(n_sessions, "", "clients attached"),
	P(min_bytes, "bytes", "guaranteed"),
	P(max_bytes, "bytes", "limit; 0: as much as there is"),
	P(extent_bytes, "bytes", "memory it has on each device"),
	P(blocks_total, "blocks", "free, leased, cached and quarantined"),
	P(blocks_free, "blocks", "free"),
	P(blocks_leased, "blocks", "leased to sessions, magazines included"),
	P(blocks_cached, "blocks", "in the prefix index, held or not"),
	P(blocks_cached_held, "blocks", "of these, held by a session"),
	P(blocks_quarantined, "blocks", "of a lost client that lives; free when it ends"),
	P(lookup_tokens_total, "tokens", "asked for in prefix lookups"),
	P(hit_tokens_total, "tokens", "of these, found"),
	P(published_total, "blocks", "made visible to all sessions"),
	P(duplicates_total, "blocks", "published, but cached already"),
	P(evictions_total, "blocks", "cached ones given up for room"),
	P(evictions_own_total, "blocks", "of these: for its own sessions"),
	P(evictions_others_total, "blocks", "of these: for other pools"),
	P(evictions_drop_total, "blocks", "of these: on an operator's request"),
	P(grants_total, "blocks", "leased out since the pool exists"),
	P(no_room_total, "", "requests that were told there's no room"),
	P(waiting, "", "requests that wait for room now"),
	P(weight, "", "of its share above all minimums"),
	P(share_bytes, "bytes", "its due when memory is short"),
	P(blocks_moving, "blocks", "reserved for what is being copied"),
	P(spare_bytes, "bytes", "others can have it now"),
	P(fragmented_bytes, "bytes", "free; for others after compaction"),
	P(compacting, "", "1 while kvctl pool compact is at work"),
	P(compacted_bytes_total, "bytes", "moved by compaction"),
	P(recalled_total, "blocks", "idle leases called back"),
	P(limits_revision, "", "counts changes of min, max and weight"),
	P(compacting_ns_total, "ns", "that kvctl pool compact was at work"),
	{ NULL },
};

#define S(...) NUMBER(struct kv_session_stats, __VA_ARGS__)
#define ST(...) TEXT(struct kv_session_stats, __VA_ARGS__)
static const struct kv_stat_field session_fields[] = {
	S(id, "", "number of the session"),
	S(pool_id, "", "number of its pool"),
	ST(pool, "name of its pool"),
	ST(client, "label the client gave itself"),
	ST(state, "live, or dying: its process is ending"),
	S(pid, "", "process id of the client"),
	S(uid, "", "user id of the client"),
	S(slot, "", "its bit in the holders of a block"),
	S(since_ns, "ns", "time since it attached"),
	S(blocks_leased, "blocks", "leased to it"),
	S(blocks_idle, "blocks", "of these, not in use (it says so at times)"),
	S(blocks_held, "blocks", "cached blocks it holds"),
	S(lookup_tokens_total, "tokens", "asked for in prefix lookups"),
	S(hit_tokens_total, "tokens", "of these, found"),
	S(published_total, "blocks", "made visible to all sessions"),
	{ NULL },
};

#define B(...) NUMBER(struct kv_balance_stats, __VA_ARGS__)
static const struct kv_stat_field balance_fields[] = {
	B(id, "", "number of the pool"),
	TEXT(struct kv_balance_stats, name, "name of the pool"),
	B(blocks_total, "blocks", "in its extents"),
	B(blocks_free, "blocks", "free, by the worker's books"),
	B(blocks_leased, "blocks", "leased, likewise"),
	B(blocks_cached, "blocks", "cached, likewise"),
	B(blocks_quarantined, "blocks", "quarantined, likewise"),
	B(blocks_moving, "blocks", "being copied, likewise"),
	B(pages_free, "blocks", "free, by the shared pages"),
	B(pages_leased, "blocks", "leased, likewise"),
	B(pages_cached, "blocks", "cached, likewise"),
	B(pages_quarantined, "blocks", "quarantined, likewise"),
	B(pages_moving, "blocks", "being copied, likewise"),
	B(n_errors, "", "what is wrong in it"),
	{ NULL },
};

#define E(...) NUMBER(struct kv_error_stats, __VA_ARGS__)
#define ET(...) TEXT(struct kv_error_stats, __VA_ARGS__)
static const struct kv_stat_field error_fields[] = {
	E(pool_id, "", "number of the pool"),
	ET(pool, "name of the pool; empty: a device"),
	E(is_block, "", "1: it is about the block named"),
	E(block, "", "number of the block"),
	ET(pages_state, "what the shared pages say it is"),
	E(pages_slot, "", "and whose"),
	E(pages_generation, "", "and of which generation"),
	ET(books_state, "what the worker's books say it is"),
	E(books_slot, "", "and whose"),
	E(books_generation, "", "and of which generation"),
	ET(text, "what is wrong"),
	{ NULL },
};

#define H(...) NUMBER(struct kv_history_stats, __VA_ARGS__)
static const struct kv_stat_field history_fields[] = {
	H(ago_ns, "ns", "how long ago that was"),
	H(pool_id, "", "number of the pool"),
	H(blocks_leased, "blocks", "leased to sessions, magazines included"),
	H(blocks_cached, "blocks", "in the prefix index, held or not"),
	H(blocks_free, "blocks", "free"),
	H(lookup_tokens_total, "tokens", "asked for in prefix lookups"),
	H(hit_tokens_total, "tokens", "of these, found"),
	H(published_total, "blocks", "made visible to all sessions"),
	H(evictions_total, "blocks", "cached ones given up for room"),
	H(no_room_total, "", "requests that were told there's no room"),
	H(refills_total, "", "requests for blocks that were answered"),
	H(refill_ns_total, "ns", "how long these took"),
	{ NULL },
};

#define K(...) NUMBER(struct kv_block_stats, __VA_ARGS__)
#define KT(...) TEXT(struct kv_block_stats, __VA_ARGS__)
static const struct kv_stat_field block_fields[] = {
	K(pool_id, "", "number of its pool"),
	KT(pool, "name of its pool"),
	K(id, "", "number of the block"),
	KT(state, "leased, cached, free, ...: section COMMANDS"),
	K(since_ns, "ns", "so long it has been that; 0: not known"),
	K(n_sessions, "", "that lease it, or hold what is cached"),
	K(generation, "", "one more with each owner"),
	K(offset_bytes, "bytes", "where in the arena, if the layout is flat"),
	K(n_tokens, "tokens", "in it; 0: only its client knows"),
	K(n_listed, "tokens", "of these, in the answer"),
	K(epoch, "", "of the weights that computed it"),
	K(is_stale, "", "1: that epoch is over, nobody finds it"),
	K(is_loose, "", "1: a window's or state's, found by itself"),
	K(position, "tokens", "before it in its prefix"),
	K(parent, "", "the block before it; of a twin: the other"),
	K(n_children, "blocks", "cached behind it"),
	K(uses_total, "", "lookups that found it"),
	K(idle_uses, "blocks", "found in the pool since it was used last"),
	KT(identity, "computed from, besides tokens; empty: nothing"),
	{ NULL },
};
/* clang-format on */

KV_PUBLIC const struct kv_stat_field *kv_stat_fields(enum kv_stat_kind kind)
{
	static const struct kv_stat_field none[] = { { NULL } };

	switch (kind) {
	case KV_STAT_DAEMON:
		return daemon_fields;
	case KV_STAT_GPU:
		return gpu_fields;
	case KV_STAT_POOL:
		return pool_fields;
	case KV_STAT_SESSION:
		return session_fields;
	case KV_STAT_BALANCE:
		return balance_fields;
	case KV_STAT_ERROR:
		return error_fields;
	case KV_STAT_HISTORY:
		return history_fields;
	case KV_STAT_BLOCK:
		return block_fields;
	}
	return none;
}
