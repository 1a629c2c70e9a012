/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/service.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"

#define FIRST_FD 3

/* A variable that is a number; -1: it isn't there, or isn't one. */
static long long number_of(const char *name)
{
	const char *text = getenv(name);
	char *end;
	long long n;

	if (!text || !*text)
		return -1;
	errno = 0;
	n = strtoll(text, &end, 10);
	return errno || *end || n < 0 ? -1 : n;
}

static int option_of(int fd, int option)
{
	int value = -1;
	socklen_t size = sizeof(value);

	return getsockopt(fd, SOL_SOCKET, option, &value, &size) < 0 ? -1 : value;
}

static int check_socket(int fd, char ret_path[KV_SOCKET_PATH_MAX])
{
	struct sockaddr_un address = {0};
	socklen_t size = sizeof(address);

	if (option_of(fd, SO_DOMAIN) != AF_UNIX || option_of(fd, SO_TYPE) != SOCK_SEQPACKET)
		return kv_error(-EINVAL, "socket activation: descriptor %d is no AF_UNIX socket of "
				"SOCK_SEQPACKET (ListenSequentialPacket= in the socket unit)", fd);
	if (option_of(fd, SO_ACCEPTCONN) != 1)
		return kv_error(-EINVAL, "socket activation: descriptor %d does not listen (Accept=no is "
				"needed in the socket unit)", fd);
	if (getsockname(fd, (struct sockaddr *)&address, &size) < 0 ||
	    size <= offsetof(struct sockaddr_un, sun_path) || !address.sun_path[0])
		return kv_error(-EINVAL, "socket activation: descriptor %d has no path that clients could "
				"connect to", fd);
	snprintf(ret_path, KV_SOCKET_PATH_MAX, "%.*s",
		 (int)(size - offsetof(struct sockaddr_un, sun_path)), address.sun_path);
	return 0;
}

int kv_service_socket(int *ret_fd, char ret_path[KV_SOCKET_PATH_MAX])
{
	long long pid = number_of("LISTEN_PID"), n = number_of("LISTEN_FDS");
	int r;

	unsetenv("LISTEN_PID");
	unsetenv("LISTEN_FDS");
	unsetenv("LISTEN_FDNAMES");
	if (pid != getpid() || n < 1)
		return 0;
	if (n != 1)
		return kv_error(-EINVAL, "socket activation: LISTEN_FDS is %lld, one socket is expected", n);
	r = check_socket(FIRST_FD, ret_path);
	if (r < 0)
		return r;
	if (fcntl(FIRST_FD, F_SETFD, FD_CLOEXEC) < 0 ||
	    fcntl(FIRST_FD, F_SETFL, fcntl(FIRST_FD, F_GETFL) | O_NONBLOCK) < 0)
		return kv_error(-errno, "socket activation: descriptor %d: %s", FIRST_FD, strerror(errno));
	*ret_fd = FIRST_FD;
	return 1;
}

int64_t kv_service_watchdog(pid_t pid)
{
	long long usec = number_of("WATCHDOG_USEC"), whose = number_of("WATCHDOG_PID");

	return usec > 0 && usec <= INT64_MAX / 1000 && whose == pid ? usec * 1000 : 0;
}

void kv_service_init(struct kv_service *s)
{
	const char *path = getenv("NOTIFY_SOCKET");
	char pid[16];

	*s = (struct kv_service){.fd = -1, .address = {.sun_family = AF_UNIX}};
	/* A manager that names no process means the one that it started. */
	if (!getenv("WATCHDOG_PID")) {
		snprintf(pid, sizeof(pid), "%d", getpid());
		setenv("WATCHDOG_PID", pid, 1);
	}
	s->watchdog_ns = kv_service_watchdog(getpid());
	if (path && (*path == '/' || *path == '@') && path[1] &&
	    strlen(path) < sizeof(s->address.sun_path)) {
		strcpy(s->address.sun_path, path);
		if (*path == '@')
			s->address.sun_path[0] = 0;
		s->address_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path));
		s->fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	}
	unsetenv("NOTIFY_SOCKET");
}

void kv_service_deinit(struct kv_service *s)
{
	s->fd = kv_close(s->fd);
}

void kv_service_tell(const struct kv_service *s, const char *format, ...)
{
	char text[512];
	va_list args;
	int n;

	if (s->fd < 0)
		return;
	va_start(args, format);
	n = vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	if (n > 0 && (size_t)n < sizeof(text))
		sendto(s->fd, text, (size_t)n, MSG_NOSIGNAL, (const struct sockaddr *)&s->address,
		       s->address_bytes);
}
