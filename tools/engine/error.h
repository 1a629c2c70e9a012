/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The text that goes with a negative return code inside kvengine: one buffer a thread. Where the
 * library failed, its text (kv_error_text()) becomes part of ours.
 */
#ifndef KV_ENGINE_ERROR_H
#define KV_ENGINE_ERROR_H

#ifdef __cplusplus
extern "C" {
#endif

/* Stores the text and returns @r, which is negative. */
int kv_engine_error(int r, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* kv_engine_error_text() - text of this thread's last failure; "" if none */
const char *kv_engine_error_text(void);

#ifdef __cplusplus
}
#endif
#endif
