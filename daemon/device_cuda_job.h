/* SPDX-License-Identifier: Apache-2.0 */
/* What is done with the CUDA driver, each in a helper process of its own (daemon/helper.h). */
#ifndef KV_DAEMON_DEVICE_CUDA_JOB_H
#define KV_DAEMON_DEVICE_CUDA_JOB_H

#include "daemon/helper.h"

struct kv_cuda_job {
	int ordinal; /* the driver's number */
	uint64_t bytes;
	uint64_t granule_bytes;
	const struct kv_arena *arena; /* to check */
};

/* @arg of all: struct kv_cuda_job */

/* reply->info */
kv_helper_job kv_cuda_job_info;

/*
 * Makes granules, without a context, and sends a descriptor of each; needs a context only to say
 * how much is free when there is too little. reply->export but its epoch.
 */
kv_helper_job kv_cuda_job_vmm;

/* Makes one allocation, and holds it and a context until stopped. reply->export but its epoch. */
kv_helper_job kv_cuda_job_ipc;

/* Attaches the arena as a client does, and checks that it keeps what is written. */
kv_helper_job kv_cuda_job_check;

#endif
