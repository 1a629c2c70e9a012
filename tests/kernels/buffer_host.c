/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <kvcached/types.h>

#include "tests/kernels/buffer.h"

const int buffer_device = KV_DEVICE_HOST;

static void check(bool ok, const char *what)
{
	if (ok)
		return;
	perror(what);
	abort();
}

bool buffer_device_present(void)
{
	return true;
}

size_t buffer_bytes_free(void)
{
	return (size_t)sysconf(_SC_AVPHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
}

void *buffer_new(size_t bytes)
{
	void *p = NULL;

	check(posix_memalign(&p, 256, bytes ? bytes : 1) == 0, "posix_memalign");
	return p;
}

void *buffer_new_sparse(size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	check(p != MAP_FAILED, "mmap");
	return p;
}

void *buffer_free(void *p)
{
	free(p);
	return NULL;
}

void buffer_free_sparse(void *p, size_t bytes)
{
	munmap(p, bytes);
}

void buffer_put(void *to, const void *from, size_t bytes)
{
	if (bytes)
		memcpy(to, from, bytes);
}

void buffer_get(void *to, const void *from, size_t bytes)
{
	if (bytes)
		memcpy(to, from, bytes);
}

void buffer_fill(void *to, int byte, size_t bytes)
{
	if (bytes)
		memset(to, byte, bytes);
}
