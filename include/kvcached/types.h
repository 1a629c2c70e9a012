/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Words, numbers and codes that every other header uses.
 *
 * Arena     One contiguous range of memory of a device (a GPU, or host memory), owned by kvcached.
 * Extent    A range of an arena that belongs to one pool.
 * Pool      The blocks of one model identity, on one device or at equal offsets on several.
 * Block     `block_tokens` tokens of all layers' K and V (and other components): the unit of
 *           leasing, sharing and eviction. A block is named by its id, the same on every device.
 * Slot      One token's place: id * block_tokens + offset. -1 is padding: it is never written.
 * Null      A block of each pool that is never handed out; padded table entries name it.
 * Lease     A session's right to a block that nobody else uses.
 * Sequence  Tokens of one request, and the blocks that hold their K and V, in order.
 * Prefix    A chain of complete blocks, found by the tokens in them and shared by all sessions.
 * Session   One client's attachment to one pool, and all that it holds there.
 * Layout    Where (block, component, token, head, element) lies in memory.
 *
 * Every function that can fail returns int. Negative: an errno, something is wrong (the text is in
 * kv_error_text()). Zero: done. Positive: an answer that the caller must handle, listed here.
 */
#ifndef KVCACHED_TYPES_H
#define KVCACHED_TYPES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KV_VERSION_MAJOR 0
#define KV_VERSION_MINOR 1

/* Answers (positive return values). */
#define KV_NO_ROOM 1  /* not now: the pool is full of blocks in use; nothing was taken */
#define KV_TOO_LARGE 2 /* never: the request exceeds the pool itself, or its bound; nothing was taken */
#define KV_PROMISED 3  /* another session is computing it, and the time to wait is over */

#define KV_SLOT_PAD ((int64_t)-1)
#define KV_MAX_GPUS 16
#define KV_MAX_SESSIONS 128 /* per pool */
#define KV_NAME_MAX 64	    /* bytes of a name, the closing NUL included */

/* Waits: a time in nanoseconds from now. There is no infinite wait. */
#define KV_MSEC ((int64_t)1000000)
#define KV_SEC ((int64_t)1000000000)

typedef int32_t kv_block_id;

enum kv_dtype {
	KV_F32 = 1,
	KV_F16 = 2,
	KV_BF16 = 3,
	KV_F8_E4M3 = 4, /* 1 sign, 4 exponent, 3 mantissa bits; largest 448; no infinity */
	KV_BYTES = 5,	/* rows that only their kernel can read: packed values and scales */
	KV_F8_E5M2 = 6, /* 1 sign, 5 exponent, 2 mantissa bits; largest 57344; written without infinity */
};

enum kv_device {
	KV_DEVICE_HOST = 1,
	KV_DEVICE_CUDA = 2,
};

/* kv_dtype_bytes() - bytes of one element; 0 for a number that names no type */
static inline size_t kv_dtype_bytes(int dtype)
{
	switch (dtype) {
	case KV_F32:
		return 4;
	case KV_F16:
	case KV_BF16:
		return 2;
	case KV_F8_E4M3:
	case KV_BYTES:
	case KV_F8_E5M2:
		return 1;
	default:
		return 0;
	}
}

/*
 * Options travel in a struct whose first field is its size, so that it can grow:
 *	KV_OPTIONS(kv_connect_options, opts, .socket = path);
 */
#define KV_OPTIONS(type, name, ...) struct type name = { .size = sizeof(struct type), __VA_ARGS__ }

#ifdef __cplusplus
}
#endif
#endif
