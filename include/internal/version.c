/* SPDX-License-Identifier: Apache-2.0 */
#include "include/internal/public.h"
#include "include/kvcached/client.h"

KV_PUBLIC const char *kv_version(void)
{
	return "0.1.0";
}
