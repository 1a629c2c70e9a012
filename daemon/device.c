/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>
#include <sys/random.h>

#include "daemon/device.h"

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
