/* SPDX-License-Identifier: Apache-2.0 */
/* Makes new inputs of fuzz_pages: whole actions come, go, move and repeat, numbers change. */
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/pages_input.h"

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed);
size_t LLVMFuzzerCustomCrossOver(const uint8_t *data1, size_t size1, const uint8_t *data2,
				 size_t size2, uint8_t *out, size_t max_size, unsigned int seed);

static unsigned random_state;

static uint32_t below(uint32_t n)
{
	return (uint32_t)rand_r(&random_state) % n;
}

static struct action make(void)
{
	return (struct action){.kind = (uint8_t)below(N_ACTIONS),
			       .user = (uint8_t)below(N_CLIENTS),
			       .a = (uint16_t)below(below(2) ? 64 : 65536),
			       .b = (uint32_t)rand_r(&random_state) ^ below(65536) << 16};
}

/* @n actions become one more, if there is room. */
static uint32_t insert(struct action *list, uint32_t n, uint32_t room, uint32_t at, struct action a)
{
	if (n == room)
		return n;
	memmove(list + at + 1, list + at, (n - at) * sizeof(*list));
	list[at] = a;
	return n + 1;
}

static uint32_t drop(struct action *list, uint32_t n, uint32_t at)
{
	memmove(list + at, list + at + 1, (n - at - 1) * sizeof(*list));
	return n - 1;
}

static uint32_t mutate(struct action *list, uint32_t n, uint32_t room)
{
	uint32_t i = n ? below(n) : 0;

	if (!n || below(3) == 0)
		return insert(list, n, room, below(n + 1), make());
	switch (below(7)) {
	case 0:
		return drop(list, n, i);
	case 1:
		return insert(list, n, room, below(n + 1), list[i]);
	case 2:
		list[i].user = (uint8_t)below(N_CLIENTS);
		break;
	case 3:
		list[i].a = (uint16_t)(below(2) ? list[i].a ^ 1u << below(16) : make().a);
		break;
	case 4:
		list[i].kind = (uint8_t)below(N_ACTIONS);
		break;
	default:
		list[i].b = below(2) ? list[i].b ^ 1u << below(32) : make().b;
	}
	return n;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
	struct action list[MAX_ACTIONS];
	uint32_t room =
		max_size / sizeof(*list) < MAX_ACTIONS ? max_size / sizeof(*list) : MAX_ACTIONS;
	uint32_t n = size / sizeof(*list) < room ? size / sizeof(*list) : room;

	random_state = seed;
	memcpy(list, data, n * sizeof(*list));
	for (uint32_t times = 1 + below(4); times; times--)
		n = mutate(list, n, room);
	if (n && below(20) == 0)
		list[0].user ^= PAGES_ISOLATE;
	memcpy(data, list, n * sizeof(*list));
	return n * sizeof(*list);
}

size_t LLVMFuzzerCustomCrossOver(const uint8_t *data1, size_t size1, const uint8_t *data2,
				 size_t size2, uint8_t *out, size_t max_size, unsigned int seed)
{
	const size_t one = sizeof(struct action);
	size_t n1, n2;

	random_state = seed;
	n1 = below((uint32_t)(size1 / one) + 1) * one;
	n2 = below((uint32_t)(size2 / one) + 1) * one;
	n1 = n1 < max_size ? n1 : max_size / one * one;
	n2 = n2 < max_size - n1 ? n2 : (max_size - n1) / one * one;
	memcpy(out, data1, n1);
	memcpy(out + n1, data2 + size2 / one * one - n2, n2);
	return n1 + n2;
}
