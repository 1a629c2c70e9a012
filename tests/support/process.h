/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Another process of a test: it runs a function, and both sides wait for each other at points.
 *
 *	static void client(struct process *self, void *arg)
 *	{
 *		... connect, take ...
 *		process_say(self, ids[0]);		"I am here", with a number
 *		process_wait(self);			until the test goes on
 *	}
 *	struct process *other = process_start(client, &arg);
 *	id = process_hear(other);
 *	process_go(other);
 *	process_end(other);				it must end well; or process_kill()
 *
 * It dies with the process that started it.
 */
#ifndef KV_TESTS_SUPPORT_PROCESS_H
#define KV_TESTS_SUPPORT_PROCESS_H

#include <stdint.h>
#include <sys/types.h>

struct process {
	pid_t pid;
	int fd; /* of a socket pair */
};

struct process *process_start(void (*run)(struct process *self, void *arg), void *arg);

/* In the other process. */
void process_say(struct process *self, int64_t number);
void process_wait(struct process *self);

/* process_become() - another user and group of the machine, with no other groups: for good */
void process_become(uid_t uid, gid_t gid);

/* In the test. */
int64_t process_hear(struct process *p);
void process_go(struct process *p);
void process_end(struct process *p);  /* waits for its end; frees it */
void process_kill(struct process *p); /* SIGKILL, and waits; frees it */
void process_died(struct process *p); /* it kills itself with SIGKILL: waits; frees it */

#endif
