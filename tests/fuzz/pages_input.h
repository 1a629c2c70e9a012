/* SPDX-License-Identifier: Apache-2.0 */
/* The input of fuzz_pages: actions, one after the other. What their numbers mean, each says itself.
 */
#ifndef KV_TESTS_FUZZ_PAGES_INPUT_H
#define KV_TESTS_FUZZ_PAGES_INPUT_H

#include <stdint.h>

#define MAX_ACTIONS 160
#define N_CLIENTS   4

enum action_kind {
	ACT_TAKE,
	ACT_GIVE,
	ACT_BEGIN,
	ACT_PUBLISH,
	ACT_GROW,
	ACT_FORK,
	ACT_ROLLBACK,
	ACT_END,
	ACT_PING,
	ACT_LEAVE,
	ACT_DIE,
	ACT_STEP,
	ACT_SCRIBBLE, /* and the numbers above, but one */
	ACT_RESTART = 15,
	N_ACTIONS = 16
};

#define PAGES_ISOLATE 0x80 /* in the first action's user: the daemon hands out granules */

/* In a BEGIN's `a`. */
#define BEGIN_SALT    0x8000 /* one of four, see bits 8 and 9 */
#define BEGIN_PROMISE 0x4000
#define BEGIN_PARTIAL 0x2000 /* looks into the block behind its hit, too */

#define ROLLBACK_ANY 0x8000 /* in a ROLLBACK's `a`: also into the midst of a block */
#define END_PREEMPT  0x8000 /* in an END's: it is preempted; GROW takes it up again */
/* In a PING's. */
#define PING_COMPACT 0x8000
#define PING_EPOCH   0x4000
#define PING_LIMITS  0x2000

struct action {
	uint8_t kind; /* mod N_ACTIONS */
	uint8_t user; /* mod PAGES_ISOLATE, mod N_CLIENTS */
	uint16_t a;
	uint32_t b;
};

#endif
