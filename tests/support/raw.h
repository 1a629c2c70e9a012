/* SPDX-License-Identifier: Apache-2.0 */
/* A client that speaks the protocol itself, right or wrong, on a socket of its own. */
#ifndef KV_TESTS_SUPPORT_RAW_H
#define KV_TESTS_SUPPORT_RAW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "include/internal/wire.h"

/* raw_connect() - a blocking socket with a deadline for receiving; -1: refused */
int raw_connect(void);

/* raw_send() - head (with the right magic, version and size) and body. 0; negative errno */
int raw_send(int fd, uint16_t type, const void *body, size_t size);

/* raw_send_fds() - likewise, with @n copies of descriptor @what */
int raw_send_fds(int fd, uint16_t type, const void *body, size_t size, int what, uint32_t n);

/**
 * raw_receive() - the next answer
 * @ret_fds: [3] what came with it, or NULL
 *
 * Return: it, valid until the next call; NULL: the daemon has hung up, or says nothing in time.
 */
const struct kv_wire_head *raw_receive(int fd, int *ret_fds);

/* raw_hello() - raw_connect() and HELLO, answered by WELCOME; fails the test otherwise */
int raw_hello(void);

/* raw_open() - POOL_OPEN of the small layout, see client.h; the answer, which may be an error */
const struct kv_wire_head *raw_open(int fd, const char *name, uint64_t max_bytes, int *ret_fds);

/* raw_open_read() - likewise, POOL_OPEN_READ */
const struct kv_wire_head *raw_open_read(int fd, const char *name, int *ret_fds);

/* raw_is_error() - is it an error of this number whose text has these words? */
bool raw_is_error(const struct kv_wire_head *answer, int error, const char *words);

#endif
