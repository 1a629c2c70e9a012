/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The text that goes with a negative return code: one buffer a thread, read by kv_error_text().
 *
 *	return kv_error(-EINVAL, "block_tokens: %u given, 1..%u allowed", n, KV_MAX_BLOCK_TOKENS);
 */
#ifndef KV_INTERNAL_ERROR_H
#define KV_INTERNAL_ERROR_H

#define KV_ERROR_BYTES 1024 /* as much as the wire carries */

#ifdef __cplusplus
extern "C" {
#endif

/* Stores the text and returns @r, which is negative. */
int kv_error(int r, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* -ENOMEM, with a text: that of an earlier failure would stand there otherwise. */
int kv_no_memory(void);

/* kv_error_text() - text of this thread's last failure; "" if none. Public, in client.h. */
const char *kv_error_text(void);

#ifdef __cplusplus
}
#endif
#endif
