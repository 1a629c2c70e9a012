/* SPDX-License-Identifier: Apache-2.0 */
/* What an operator is to see at a glance: why somebody waits, or what doesn't come back, and what to do. */
#ifndef KV_TOOLS_TROUBLE_H
#define KV_TOOLS_TROUBLE_H

#include <stdbool.h>

#include "tools/snapshot.h"

#define KV_MOST_TROUBLES 8 /* on a screen or a page: who reads it begins with the first */

struct kv_trouble {
	char seen[192];
	char change[192];
};

/* kv_trouble_find() - of all in @s. Return: how many were stored, @max at most. */
size_t kv_trouble_find(const struct kv_snapshot *s, struct kv_trouble *ret, size_t max);

/* kv_trouble_emit() - two lines for each, for people alone. Return: how many lines */
unsigned kv_trouble_emit(struct kv_emit *e, const struct kv_snapshot *s);

/* kv_process_stopped() - by SIGSTOP or a debugger; false as well where the process can't be seen from here */
bool kv_process_stopped(uint64_t pid);

#endif
