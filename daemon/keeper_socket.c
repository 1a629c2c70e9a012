/* SPDX-License-Identifier: Apache-2.0 */
/* The socket that clients connect to: made once, by the keeper, for all workers. */
#include <errno.h>
#include <stdlib.h>
#include <grp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/keeper.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"

#define IN_USE_TRIES 3
#define IN_USE_MS    1000

/*
 * Makes room for our socket: one that nobody listens on goes, one in use is refused. A daemon that was
 * killed may seem to listen for a moment: the kernel winds up an io_uring after its process, and
 * what the ring waited for takes connections until then.
 */
static int clear_socket(const struct sockaddr_un *address)
{
	const char *path = address->sun_path;

	for (int i = 0; i < IN_USE_TRIES; i++) {
		kv_cleanup(kv_closep) int fd =
			socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
		struct pollfd hangup = { .fd = fd };
		struct stat st;

		if (fd < 0)
			return -errno;
		if (connect(fd, (const struct sockaddr *)address, sizeof(*address)) < 0) {
			/* A file that is no socket answers in the same way; it is somebody's. */
			if (errno == EAGAIN) /* its queue is full */
				break;
			if (errno == ECONNREFUSED && !lstat(path, &st) && S_ISSOCK(st.st_mode))
				unlink(path);
			return 0;
		}
		if (!poll(&hangup, 1, IN_USE_MS))
			break;
	}
	return kv_error(-EADDRINUSE, "--socket: another daemon listens on '%s'", path);
}

static int find_group(const char *text, gid_t *ret)
{
	const struct group *group = getgrnam(text);
	unsigned long n;
	char *end;

	errno = 0;
	n = strtoul(text, &end, 10);
	if (!group && (errno || end == text || *end || text[0] == '-' || n >= UINT32_MAX))
		return kv_error(-EINVAL, "--socket-group: '%s' given; the name of a group of this "
				"machine, or a number, is needed", text);
	*ret = group ? group->gr_gid : (gid_t)n;
	return 0;
}

int kv_keeper_listen(const char *path, uint32_t mode, const char *group, int *ret)
{
	kv_cleanup(kv_closep) int fd = -1;
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	gid_t gid = (gid_t)-1;
	mode_t mask;
	int r;

	if (strlen(path) >= sizeof(address.sun_path))
		return kv_error(-ENAMETOOLONG, "--socket: '%s' has %zu bytes, at most %zu are allowed",
				path, strlen(path), sizeof(address.sun_path) - 1);
	strcpy(address.sun_path, path);
	r = group ? find_group(group, &gid) : 0;
	if (!r)
		r = clear_socket(&address);
	if (r < 0)
		return r;
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -errno;

	/* It has its mode from the first moment on; others' part of it when it has its group. */
	mask = umask(0777 & ~(mode_t)(group ? mode & 0700 : mode));
	r = bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0 ? -errno : 0;
	umask(mask);
	if (r < 0)
		return kv_error(r, "--socket: '%s': %s", path, strerror(-r));
	if (group && (chown(path, (uid_t)-1, gid) < 0 || chmod(path, (mode_t)mode) < 0)) {
		r = -errno;
		unlink(path);
		return kv_error(r, "--socket-group: '%s': %s", group, strerror(-r));
	}
	if (listen(fd, 256) < 0)
		return -errno;
	*ret = kv_steal_fd(&fd);
	return 0;
}
