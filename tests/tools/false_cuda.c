/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A libcuda.so.1 with the few calls that kvctl doctor makes of one, for drivers that aren't well.
 * FALSE_CUDA says how: "hangs", "crashes", "well", or the number of cuInit()'s error.
 */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))

int cuInit(unsigned int flags);
int cuDriverGetVersion(int *version);
int cuDeviceGetCount(int *n);
int cuDeviceGet(int *device, int ordinal);
int cuDeviceGetName(char *name, int size, int device);
int cuDeviceGetUuid_v2(uint8_t uuid[16], int device);
int cuDeviceTotalMem_v2(size_t *bytes, int device);
int cuDeviceGetAttribute(int *value, int attribute, int device);
int cuGetErrorName(int error, const char **name);

static const char *how(void)
{
	const char *text = getenv("FALSE_CUDA");

	return text ? text : "well";
}

PUBLIC int cuInit(unsigned int flags)
{
	sigset_t all;

	if (!strcmp(how(), "hangs")) {
		sigfillset(&all);
		sigprocmask(SIG_BLOCK, &all, NULL);
		for (;;)
			pause();
	}
	if (!strcmp(how(), "crashes"))
		raise(SIGSEGV);
	return atoi(how());
}

PUBLIC int cuDriverGetVersion(int *version)
{
	*version = 13000;
	return 0;
}

PUBLIC int cuDeviceGetCount(int *n)
{
	*n = 2;
	return 0;
}

PUBLIC int cuDeviceGet(int *device, int ordinal)
{
	*device = ordinal;
	return 0;
}

PUBLIC int cuDeviceGetName(char *name, int size, int device)
{
	snprintf(name, (size_t)size, "False GPU");
	return 0;
}

PUBLIC int cuDeviceGetUuid_v2(uint8_t uuid[16], int device)
{
	memset(uuid, 0x11 * (device + 1), 16);
	return 0;
}

PUBLIC int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
	*bytes = (size_t)80 << 30;
	return 0;
}

/* The second one is in exclusive mode. */
PUBLIC int cuDeviceGetAttribute(int *value, int attribute, int device)
{
	*value = attribute == 20 ? 3 * device : 1;
	return 0;
}

PUBLIC int cuGetErrorName(int error, const char **name)
{
	*name = "CUDA_ERROR_OF_A_TEST";
	return 0;
}
