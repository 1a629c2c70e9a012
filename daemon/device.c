/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>

#include "daemon/device.h"

#define SPARE_FILES 64u /* descriptors that this process needs beside granules */

int kv_device_fits_files(uint64_t n, uint64_t granule_bytes)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && n + SPARE_FILES > limit.rlim_cur)
		return kv_error(-EMFILE,
				"an arena of %" PRIu64 " granules of %" PRIu64 " bytes needs %" PRIu64
				" open files, %u of them beside granules; this process may have %" PRIu64
				": use larger granules, or raise RLIMIT_NOFILE",
				n, granule_bytes, n + SPARE_FILES, SPARE_FILES, (uint64_t)limit.rlim_cur);
	return 0;
}

int kv_arena_epoch(uint64_t *ret)
{
	uint64_t epoch = 0;

	while (!epoch)
		if (getrandom(&epoch, sizeof(epoch), 0) != sizeof(epoch))
			return kv_error(-EIO, "no random number for an arena's epoch: %s",
					strerror(errno));
	*ret = epoch;
	return 0;
}
