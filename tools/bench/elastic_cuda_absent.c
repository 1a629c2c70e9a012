/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "tools/bench/elastic.h"

double kv_elastic_driver_ms(uint64_t bytes, char *why, size_t size)
{
	(void)bytes;
	snprintf(why, size, "this build knows no CUDA");
	return 0;
}

double kv_elastic_copy_rate(uint64_t bytes, uint64_t total)
{
	(void)bytes;
	(void)total;
	return 0;
}
