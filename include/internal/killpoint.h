/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Numbered places at which a test can make a process die as by SIGKILL: before and after every step
 * of a protocol between processes that another one may see half done. Only in builds with
 * -Dkill_points=true; elsewhere a point compiles to nothing.
 *
 *	KV_KILLPOINT(client_op_written);
 *
 * What happens is said by the environment, read once by each process, and again by a
 * forked child:
 *
 *   KVCACHED_KILL_POINT=NAME[:N]  die when the point NAME is passed for the N-th time (1)
 *   KVCACHED_KILL_ONCE=PATH       but only who unlinks the file PATH: of several processes, and of
 *                                 the successors of one that died, one dies
 *   KVCACHED_KILL_SEEN=PATH       a file of KV_N_KILLPOINTS bytes: byte i is set to 1 by whoever
 *                                 passes point i
 *
 * A new point is a line of the list below.
 */
#ifndef KV_INTERNAL_KILLPOINT_H
#define KV_INTERNAL_KILLPOINT_H

#define KV_KILLPOINTS(X)           \
	X(client_connected)         \
	X(client_greeted)           \
	X(client_request_sent)      \
	X(client_answered)          \
	X(client_posted)            \
	X(client_pages_mapped)      \
	X(client_attached)          \
	X(client_busy_set)          \
	X(client_grants_read)       \
	X(client_grants_taken)      \
	X(client_taken)             \
	X(client_given)             \
	X(client_flushing)          \
	X(client_op_written)        \
	X(client_op_posted)         \
	X(client_kick_set)          \
	X(client_tokens_written)    \
	X(client_prepared)          \
	X(client_pin_bit_set)       \
	X(client_pinned)            \
	X(client_unpinned)          \
	X(client_twin_pinned)       \
	X(client_twin_exchanged)    \
	X(client_partial_held)      \
	X(client_copied)            \
	X(client_promised)          \
	X(client_following)         \
	X(client_promise_shortened) \
	X(client_promise_ended)     \
	X(client_preempted)         \
	X(client_resuming)          \
	X(client_group_published)   \
	X(client_mark_written)      \
	X(client_released)          \
	X(client_forked)            \
	X(client_copy_noted)        \
	X(client_rolled_back)       \
	X(client_closed)           \
	X(client_granule_mapped)   \
	X(client_granules_let_go)  \
	X(worker_book_written)     \
	X(worker_book_mirrored)    \
	X(worker_index_in_doubt)   \
	X(worker_index_inserted)   \
	X(worker_stem_put)         \
	X(worker_index_removed)    \
	X(worker_extent_written)   \
	X(worker_pool_claimed)     \
	X(worker_pool_deposited)   \
	X(worker_pool_live)        \
	X(worker_pool_ending)      \
	X(worker_pool_released)    \
	X(worker_session_deposited) \
	X(worker_session_opening)  \
	X(worker_session_live)     \
	X(worker_session_dropped)  \
	X(worker_session_ending)   \
	X(worker_session_forgotten) \
	X(worker_op_done)          \
	X(worker_op_counted)       \
	X(worker_move_begun)       \
	X(worker_move_evicting)    \
	X(worker_move_described)   \
	X(worker_block_moved)      \
	X(worker_recall_asked)     \
	X(worker_idle_taken)       \
	X(worker_idle_freed)       \
	X(worker_grant_taken)      \
	X(worker_grant_uncounted)  \
	X(worker_pressure_told)    \
	X(worker_promises_cleared) \
	X(worker_epoch_evicted)    \
	X(worker_epoch_shown)      \
	X(worker_limits_saved)     \
	X(worker_limits_shown)     \
	X(worker_granted)          \
	X(worker_grants_counted)   \
	X(worker_grants_posted)    \
	X(worker_pools_taken)      \
	X(worker_session_taken)    \
	X(worker_pool_rebuilt)     \
	X(worker_rebuilt)          \
	X(worker_granules_written) \
	X(worker_granule_given_up) \
	X(worker_granule_deposited)

enum kv_killpoint {
#define KV_KILLPOINT_NUMBER(name) KV_KILLPOINT_##name,
	KV_KILLPOINTS(KV_KILLPOINT_NUMBER)
#undef KV_KILLPOINT_NUMBER
		KV_N_KILLPOINTS
};

#ifdef KV_KILL_POINTS

#ifdef __cplusplus
extern "C" {
#endif

/* kv_killpoint_name() - of a number below KV_N_KILLPOINTS */
const char *kv_killpoint_name(enum kv_killpoint point);

/* kv_killpoint_pass() - returns, or doesn't */
void kv_killpoint_pass(enum kv_killpoint point);

#ifdef __cplusplus
}
#endif

#define KV_KILLPOINT(name) kv_killpoint_pass(KV_KILLPOINT_##name)
#else
#define KV_KILLPOINT(name) ((void)KV_KILLPOINT_##name)
#endif

#endif
