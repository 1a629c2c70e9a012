/* SPDX-License-Identifier: Apache-2.0 */
/* AF_UNIX SEQPACKET: one packet with its file descriptors, both ways. */
#ifndef KV_INTERNAL_SOCKET_H
#define KV_INTERNAL_SOCKET_H

#include <stddef.h>
#include <stdint.h>

/* kv_socket_send() - one packet, without waiting if @dont_wait. 0 or negative errno. */
int kv_socket_send(int fd, const void *data, size_t size, const int *fds, uint32_t n_fds,
		   int dont_wait);

/**
 * kv_socket_receive() - one packet
 * @fds:   [max_fds] filled with descriptors that came along, close-on-exec; NULL: none comes into this
 *	    process, the kernel drops them
 * @ret_n_fds: how many, or NULL
 *
 * Return: bytes; 0 if the peer closed; -EMSGSIZE if packet or fds were cut (what came is closed);
 *         -EAGAIN with @dont_wait; other negative errno.
 */
int64_t kv_socket_receive(int fd, void *data, size_t size, int *fds, uint32_t max_fds,
			  uint32_t *ret_n_fds, int dont_wait);

/* kv_socket_wait() - until @events (poll) or @deadline_ns of CLOCK_MONOTONIC. 0, -ETIMEDOUT, errno */
int kv_socket_wait(int fd, short events, int64_t deadline_ns);

/* kv_now() - CLOCK_MONOTONIC in ns */
int64_t kv_now(void);

#endif
