/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the tests of daemon/loop.c share: one loop of the kind that this run is about, and
 * descriptors that note what they heard. Each program runs as NAME [epoll|io_uring].
 */
#ifndef KV_TESTS_LOOP_CASE_H
#define KV_TESTS_LOOP_CASE_H

#include <check.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/loop.h"
#include "include/internal/error.h"
#include "include/kvcached/types.h"

extern enum kv_loop_kind kind; /* of this run */
extern bool have_uring;	       /* this machine has it */
extern struct kv_loop *loop;

/* Makes and frees the loop: the checked fixture of every case. */
void setup(void);
void teardown(void);
/* One iteration that doesn't wait. */
void step(void);
int64_t clock_ns(void);

/* A watched descriptor and what was heard of it. */
struct ear {
	struct kv_watch *watch;
	int fd;
	int n_calls;
	uint32_t events;   /* of the last call */
	bool read_one;	   /* each call takes one message */
	struct ear *frees; /* freed and closed by the call; may be the ear itself */
};

/* The call of a watched ear: notes the events, reads one message, frees, as the ear says. */
void hear(uint32_t events, void *arg);
void ear_watch(struct ear *ear, uint32_t events);
void ear_close(struct ear *ear);
int make_eventfd(unsigned value);
/* Two connected sockets that keep messages apart and never block. */
void make_pair(int fds[2]);
/* Reads @fd empty. */
void drain(int fd);

/* Runs @tcase with the fixture on the kind named by argv[1]; 77 where it isn't to be had. */
int loop_main(int argc, char **argv, TCase *tcase);

#endif
