/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Access to words that another process reads or writes, by meaning. Plain fields, so that one struct
 * serves C and C++; every access to such a field goes through here.
 */
#ifndef KV_INTERNAL_ATOMIC_H
#define KV_INTERNAL_ATOMIC_H

#define kv_load_relaxed(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define kv_load_acquire(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define kv_load_seq(p) __atomic_load_n((p), __ATOMIC_SEQ_CST)
#define kv_store_relaxed(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define kv_store_release(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define kv_store_seq(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)
#define kv_or_seq(p, v) __atomic_fetch_or((p), (v), __ATOMIC_SEQ_CST)
#define kv_and_release(p, v) __atomic_fetch_and((p), (v), __ATOMIC_RELEASE)
#define kv_and_seq(p, v) __atomic_fetch_and((p), (v), __ATOMIC_SEQ_CST)
#define kv_fence_compiler() __atomic_signal_fence(__ATOMIC_SEQ_CST)
/* Loads before it are done before those after it. */
#define kv_fence_acquire() __atomic_thread_fence(__ATOMIC_ACQUIRE)
#define kv_add_relaxed(p, v) __atomic_fetch_add((p), (v), __ATOMIC_RELAXED)
#define kv_exchange_seq(p, v) __atomic_exchange_n((p), (v), __ATOMIC_SEQ_CST)
#define kv_compare_exchange(p, old, v) \
	__atomic_compare_exchange_n((p), (old), (v), 0, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)

#endif
