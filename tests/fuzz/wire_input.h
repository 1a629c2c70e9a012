/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The input of fuzz_wire: steps, one after the other, each with a head of four bytes.
 *
 *   kind u8, connection u8 (mod N_CONNECTIONS), bytes u16, payload[bytes]
 *
 * What is cut off at the end of the input doesn't happen. Numbers are little-endian.
 */
#ifndef KV_TESTS_FUZZ_WIRE_INPUT_H
#define KV_TESTS_FUZZ_WIRE_INPUT_H

#include <stdint.h>
#include <string.h>

#define N_CONNECTIONS 4
#define MAX_STEPS     200

enum step_kind {
	STEP_MESSAGE,  /* struct step_message, body */
	STEP_CONNECT,  /* anew, if it was open */
	STEP_CLOSE,    /* the socket; the process lives */
	STEP_END,      /* the process has ended */
	STEP_READ,     /* all answers that are there */
	STEP_SCRIBBLE, /* struct step_scribble */
	STEP_OP,       /* struct kv_op, or its first bytes: posted in the ring of ops */
	STEP_TIME,     /* milliseconds u16 */
	STEP_ZERO,     /* the mover does its work; first byte not 0: there's no new memory for granules */
	STEP_RESTART,  /* the worker dies, another takes over */
	STEP_RESUME, /* connects anew, says hello, and takes its session up; payload is xored in */
	STEP_ISOLATE, /* the first one: the daemon hands out granules; else nothing */
	N_STEP_KINDS
};

struct step {
	uint8_t kind;
	uint8_t connection;
	uint16_t bytes;
};

enum step_message_flags {
	STEP_RAW = 1,	  /* the body is the packet, head included */
	STEP_VERSION = 2, /* a wrong one */
	STEP_SIZE = 4,	  /* the head's size is wrong */
	STEP_QUIET = 8,	  /* the daemon isn't run yet: several messages at once */
};

struct step_message {
	uint16_t type;
	uint8_t flags;
	uint8_t n_fds; /* descriptors that come along, mod 8 */
};

struct step_scribble {
	uint32_t where; /* 0: session pages, 1: blocks pages; the pages of the connection */
	uint32_t bytes; /* mod 9 */
	uint64_t offset;
	uint64_t value;
};

/* step_next() - the step at *@at, its payload behind it; moves *@at on. 0: that was the last. */
static inline int step_next(const uint8_t *data, size_t size, size_t *at, struct step *ret_step,
			    const uint8_t **ret_payload)
{
	if (size - *at < sizeof(*ret_step))
		return 0;
	memcpy(ret_step, data + *at, sizeof(*ret_step));
	*at += sizeof(*ret_step);
	if (ret_step->bytes > size - *at)
		return 0;
	*ret_payload = data + *at;
	*at += ret_step->bytes;
	return 1;
}

#endif
