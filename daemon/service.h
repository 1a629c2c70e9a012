/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What systemd, or another service manager with its protocols, and the keeper say to each other: a
 * socket that is handed over at the start, and datagrams about how it goes. Plain environment, a
 * descriptor and a socket: no library of systemd's.
 *
 *	LISTEN_PID, LISTEN_FDS		descriptor 3 listens already: clients may connect before we run
 *	NOTIFY_SOCKET			READY=1, STATUS=..., STOPPING=1
 *	WATCHDOG_PID, WATCHDOG_USEC	WATCHDOG=1 that often, or the service is killed
 *
 * The watchdog watches the keeper, and the keeper the worker (KV_KEEPER_ALIVE): one that doesn't turn its
 * loop for half the time is killed, and another takes over with all that is cached. Only a keeper that is
 * stuck, or a worker that can't even be killed, costs the service.
 *
 * All but WATCHDOG_* is taken out of the environment: none of it is for the worker, or for movers.
 */
#ifndef KV_DAEMON_SERVICE_H
#define KV_DAEMON_SERVICE_H

#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>

#include "include/internal/paths.h"

struct kv_service {
	int fd; /* -1: nobody wants to know */
	struct sockaddr_un address;
	socklen_t address_bytes;
	int64_t watchdog_ns; /* 0: none */
};

/**
 * kv_service_socket() - the socket that this process was started with
 * @ret_path: filled with where it listens
 *
 * Return: 1: it is in *ret_fd; 0: there is none; -EINVAL with a text: it is not one for kvcached.
 */
int kv_service_socket(int *ret_fd, char ret_path[KV_SOCKET_PATH_MAX]);

void kv_service_init(struct kv_service *service); /* from the environment */
void kv_service_deinit(struct kv_service *service);

/* kv_service_tell() - lines of NAME=VALUE; lost if nobody reads them */
void kv_service_tell(const struct kv_service *service, const char *format, ...)
	__attribute__((format(printf, 2, 3)));

/* kv_service_watchdog() - WATCHDOG_USEC, if it is meant for process @pid: ns; or 0 */
int64_t kv_service_watchdog(pid_t pid);

#endif
