/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program that says that it knows the daemon's shared memory, and then doesn't serve; with KV_OLDER: one of an
 * older release, which knows other pages.
 */
#include <stdio.h>
#include <string.h>

#include "include/internal/shm.h"

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "--shm-version")) {
#ifdef KV_OLDER
		puts("shm-1");
#else
		puts(KV_SHM_VERSION);
#endif
		return 0;
	}
	return 3;
}
