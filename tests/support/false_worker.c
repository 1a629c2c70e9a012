/* SPDX-License-Identifier: Apache-2.0 */
/* A program that says that it knows the daemon's shared memory, and then doesn't serve. */
#include <stdio.h>
#include <string.h>

#include "include/internal/shm.h"

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "--shm-version")) {
		puts(KV_SHM_VERSION);
		return 0;
	}
	return 3;
}
