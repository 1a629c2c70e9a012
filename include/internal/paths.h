/* SPDX-License-Identifier: Apache-2.0 */
/* Where the daemon of this machine listens, and clients look for it, when nobody names a socket. */
#ifndef KV_INTERNAL_PATHS_H
#define KV_INTERNAL_PATHS_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/un.h>
#include <unistd.h>

#include "include/internal/error.h"

#define KV_SOCKET_ENV "KVCACHED_SOCKET"
#define KV_SOCKET_NAME "kvcached.sock"
#define KV_SOCKET_ROOT "/run/kvcached/" KV_SOCKET_NAME
#define KV_SOCKET_PATH_MAX sizeof(((struct sockaddr_un *)0)->sun_path) /* the closing NUL included */

/* kv_find_socket() - as kv_default_socket(), without a text. Return: the path's length; -ENOENT. */
static inline int kv_find_socket(char ret[KV_SOCKET_PATH_MAX])
{
	const char *path = getenv(KV_SOCKET_ENV);
	const char *folder = getenv("XDG_RUNTIME_DIR");

	if (path && *path)
		return snprintf(ret, KV_SOCKET_PATH_MAX, "%s", path);
	if (geteuid() == 0)
		return snprintf(ret, KV_SOCKET_PATH_MAX, "%s", KV_SOCKET_ROOT);
	if (folder && *folder)
		return snprintf(ret, KV_SOCKET_PATH_MAX, "%s/" KV_SOCKET_NAME, folder);
	return -ENOENT;
}

/**
 * kv_default_socket() - $KVCACHED_SOCKET, else root's path, else the one in $XDG_RUNTIME_DIR
 * @ret: filled with the path
 *
 * Return: 0; -ENOENT if nothing says where; -ENAMETOOLONG if no socket address can hold the path.
 */
static inline int kv_default_socket(char ret[KV_SOCKET_PATH_MAX])
{
	int n = kv_find_socket(ret);

	if (n < 0)
		return kv_error(n, "socket: no path given, and neither $" KV_SOCKET_ENV
				   " nor $XDG_RUNTIME_DIR is set");
	if ((size_t)n >= KV_SOCKET_PATH_MAX)
		return kv_error(-ENAMETOOLONG, "socket: the path has %d bytes, at most %zu allowed",
				n, KV_SOCKET_PATH_MAX - 1);
	return 0;
}

#endif
