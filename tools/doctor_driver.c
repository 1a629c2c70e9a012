/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvctl doctor: NVIDIA's driver and its GPUs, without a context on any of them. The two libraries come
 * with the driver; they are opened by name, also in a build without CUDA, and called through
 * prototypes of our own.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "include/internal/cleanup.h"
#include "tools/doctor.h"
#include "tools/emit.h"

#define OLDEST_CUDA 11040

/* Numbers of cuda.h and nvml.h. */
enum {
	COMPUTE_MODE = 20,
	HAS_VMM = 102,
	HAS_POSIX_FD = 103,
	MPS_ENABLED = 133,
	MODE_DEFAULT = 0,
	MODE_PROHIBITED = 2,
	NO_DEVICE = 100,
};

struct driver {
	int (*cuInit)(unsigned int flags);
	int (*cuDriverGetVersion)(int *version);
	int (*cuDeviceGetCount)(int *n);
	int (*cuDeviceGet)(int *device, int ordinal);
	int (*cuDeviceGetName)(char *name, int size, int device);
	int (*cuDeviceGetUuid_v2)(uint8_t uuid[KV_UUID_BYTES], int device);
	int (*cuDeviceTotalMem_v2)(size_t *bytes, int device);
	int (*cuDeviceGetAttribute)(int *value, int attribute, int device);
	int (*cuGetErrorName)(int error, const char **name);
};

/* [n] names and where their addresses go. Return: the name that is missing, or NULL. */
static const char *look_up(void *library, const char *const *names, void **to, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		to[i] = dlsym(library, names[i]);
		if (!to[i])
			return names[i];
	}
	return NULL;
}

/* The kernel module's version; "": it isn't loaded, or not shown here. */
static void module_version(char text[32])
{
	char line[256] = "";
	FILE *f = fopen("/proc/driver/nvidia/version", "re");
	const char *at = NULL;

	text[0] = 0;
	if (!f)
		return;
	if (fgets(line, sizeof(line), f)) {
		/* "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release ..." */
		for (at = line; *at; at++)
			if (*at >= '1' && *at <= '9' && at > line && at[-1] == ' ' &&
			    strspn(at, "0123456789.") > 4 && strchr(at, '.'))
				break;
		snprintf(text, 32, "%.*s", (int)strspn(at, "0123456789."), at);
	}
	fclose(f);
}

static const struct {
	int error;
	const char *change;
} start_errors[] = {
	{NO_DEVICE, "give this container the GPU's device nodes (docker run --gpus all), or look at "
		    "CUDA_VISIBLE_DEVICES"},
	{304, "mount this PID namespace's own /proc (unshare --mount-proc)"},
	{802, "start nvidia-fabricmanager: GPUs behind NVSwitch wait for it"},
	{803, "the container's libcuda is of another version than the kernel module: take out its "
	      "cuda-compat, or install the driver of the module's version"},
	{804, "take cuda-compat out of this container: this GPU can't be driven by another version"},
	{999, "modprobe nvidia-uvm; /dev/nvidia-uvm must be there and readable"},
};

static void seen_start(struct kv_probing *p, const struct driver *d, int error)
{
	const char *name = "unnamed", *change = "look for NVRM and Xid lines in dmesg";

	d->cuGetErrorName(error, &name);
	for (size_t i = 0; i < sizeof(start_errors) / sizeof(start_errors[0]); i++)
		if (start_errors[i].error == error)
			change = start_errors[i].change;
	kv_seen(p, KV_FAIL, "the driver does not start: CUDA error %d, %s", error, name ? name : "unnamed");
	kv_change(p, "%s", change);
}

static void seen_nodes(struct kv_probing *p)
{
	static const char *const nodes[] = {"/dev/nvidiactl", "/dev/nvidia-uvm"};

	for (size_t i = 0; i < sizeof(nodes) / sizeof(nodes[0]); i++) {
		if (!access(nodes[i], R_OK | W_OK))
			continue;
		kv_seen(p, KV_FAIL, "%s: %s", nodes[i], strerror(errno));
		if (errno == ENOENT)
			kv_change(p, "modprobe nvidia-uvm, or give the container %s (--gpus all)", nodes[i]);
		else
			kv_change(p, "chmod 0666 %s, or DeviceAllow=%s rw in the unit", nodes[i], nodes[i]);
	}
}

static void seen_gpu(struct kv_probing *p, const struct driver *d, int ordinal)
{
	char name[128] = "", uuid[KV_UUID_TEXT_BYTES];
	uint8_t bytes[KV_UUID_BYTES] = {0};
	int device, vmm = 0, fd = 0, mode = 0;
	size_t memory = 0;

	if (d->cuDeviceGet(&device, ordinal) || d->cuDeviceGetName(name, sizeof(name), device) ||
	    d->cuDeviceGetUuid_v2(bytes, device) || d->cuDeviceTotalMem_v2(&memory, device)) {
		kv_seen(p, KV_FAIL, "GPU %d does not say what it is", ordinal);
		kv_change(p, "look for Xid lines in dmesg; reset it (nvidia-smi -r -i %d)", ordinal);
		return;
	}
	kv_uuid_format(bytes, uuid);
	d->cuDeviceGetAttribute(&vmm, HAS_VMM, device);
	d->cuDeviceGetAttribute(&fd, HAS_POSIX_FD, device);
	d->cuDeviceGetAttribute(&mode, COMPUTE_MODE, device);
	if (mode != MODE_DEFAULT) {
		kv_seen(p, KV_FAIL, "GPU %d: %s, %s: compute mode %s", ordinal, name, uuid,
			mode == MODE_PROHIBITED ? "prohibited: nobody can use it" :
						  "exclusive: the mover's context leaves none to clients");
		kv_change(p, "nvidia-smi -i %s -c DEFAULT", uuid);
		return;
	}
	kv_seen(p, KV_FINE, "GPU %d: %s, %s, %s; vmm: %s", ordinal, name, uuid,
		kv_words_bytes(memory).text, vmm && fd ? "yes" : vmm ? "without descriptors" : "no");
}

static const char *const driver_names[] = {
	"cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName",
	"cuDeviceGetUuid_v2", "cuDeviceTotalMem_v2", "cuDeviceGetAttribute", "cuGetErrorName"};
#define N_DRIVER (sizeof(driver_names) / sizeof(driver_names[0]))

_Static_assert(sizeof(struct driver) == sizeof(driver_names), "one address for each name");

static int load(struct kv_probing *p, struct driver *d)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	const char *missing;
	char module[32];

	module_version(module);
	if (!library && (module[0] || !access("/dev/nvidiactl", F_OK))) {
		kv_seen(p, KV_FAIL, "the kernel has a driver (%s), this root has no libcuda.so.1",
			module[0] ? module : "version unknown");
		kv_change(p, "docker run --gpus all with the NVIDIA container toolkit, or install libcuda1 "
			  "of the same version");
		return -ENODEV;
	}
	if (!library) {
		kv_seen(p, KV_WARN, "no NVIDIA driver here: %s", dlerror());
		kv_change(p, "not needed by kvcached --host; for GPUs install NVIDIA's driver 470 or newer");
		return -ENODEV;
	}
	missing = look_up(library, driver_names, (void **)d, N_DRIVER);
	if (missing) {
		kv_seen(p, KV_FAIL, "libcuda.so.1 has no %s", missing);
		kv_change(p, "driver 470 (CUDA 11.4) or newer");
		return -ENOTSUP;
	}
	return 0;
}

void kv_probe_driver(struct kv_probing *p)
{
	struct driver d;
	char module[32];
	int version = 0, n = 0, error;

	if (load(p, &d) < 0)
		return;
	error = d.cuInit(0);
	if (error)
		seen_start(p, &d, error);
	d.cuDriverGetVersion(&version);
	module_version(module);
	kv_seen(p, version < OLDEST_CUDA ? KV_FAIL : KV_FINE, "driver %s, CUDA %d.%d",
		module[0] ? module : "of unknown version", version / 1000, version % 1000 / 10);
	if (version < OLDEST_CUDA)
		kv_change(p, "driver 470 (CUDA 11.4) or newer");
	seen_nodes(p);
	if (error || d.cuDeviceGetCount(&n))
		return;
	for (int i = 0; i < n; i++)
		seen_gpu(p, &d, i);
}

int kv_driver_uuids(char (*uuids)[KV_UUID_TEXT_BYTES], int max)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	uint8_t bytes[KV_UUID_BYTES] = {0};
	struct driver d;
	int n = 0, device;

	if (!library || look_up(library, driver_names, (void **)&d, N_DRIVER) || d.cuInit(0) ||
	    d.cuDeviceGetCount(&n))
		return -ENODEV;
	for (int i = 0; i < n && i < max; i++) {
		uuids[i][0] = 0;
		if (!d.cuDeviceGet(&device, i) && !d.cuDeviceGetUuid_v2(bytes, device))
			kv_uuid_format(bytes, uuids[i]);
	}
	return n;
}

/*
 * NVML: what the driver says of a GPU's use by others.
 */

struct nvml {
	int (*nvmlInit_v2)(void);
	int (*nvmlDeviceGetCount_v2)(unsigned int *n);
	int (*nvmlDeviceGetHandleByIndex_v2)(unsigned int i, void **device);
	int (*nvmlDeviceGetUUID)(void *device, char *uuid, unsigned int size);
	int (*nvmlDeviceGetMigMode)(void *device, unsigned int *now, unsigned int *later);
	int (*nvmlDeviceGetPersistenceMode)(void *device, int *on);
	int (*nvmlDeviceGetComputeRunningProcesses_v3)(void *device, unsigned int *n, void *infos);
};

struct process_info { /* of v3 */
	unsigned int pid;
	unsigned long long bytes;
	unsigned int gpu_instance, compute_instance;
};

static void seen_use(struct kv_probing *p, const struct nvml *n, unsigned int i)
{
	struct process_info infos[64];
	unsigned int mig = 0, later = 0, n_processes = 64;
	char uuid[96] = "";
	void *device;
	int persistent = 1;

	if (n->nvmlDeviceGetHandleByIndex_v2(i, &device))
		return;
	n->nvmlDeviceGetUUID(device, uuid, sizeof(uuid));
	if (!n->nvmlDeviceGetMigMode(device, &mig, &later) && (mig || later)) {
		kv_seen(p, mig == later ? KV_FINE : KV_WARN,
			"%s: MIG mode is %s%s; memory is shared within one instance, so one kvcached for "
			"each, with CUDA_VISIBLE_DEVICES=MIG-...", uuid, mig ? "on" : "off",
			mig == later ? "" : later ? ", on after a reset" : ", off after a reset");
		if (mig != later)
			kv_change(p, "nvidia-smi -r -i %s, with nothing running there", uuid);
	}
	if (!n->nvmlDeviceGetPersistenceMode(device, &persistent) && !persistent) {
		kv_seen(p, KV_WARN, "%s: persistence mode is off: the first program to come waits for seconds",
			uuid);
		kv_change(p, "start nvidia-persistenced, or nvidia-smi -pm 1");
	}
	if (n->nvmlDeviceGetComputeRunningProcesses_v3(device, &n_processes, infos))
		return;
	kv_seen(p, KV_FINE, "%s: %u processes have contexts%s", uuid, n_processes,
		n_processes > 1 ? "; they take turns (time slices), unless they share an MPS server" : "");
}

static void seen_mps(struct kv_probing *p)
{
	const char *folder = getenv("CUDA_MPS_PIPE_DIRECTORY");
	char path[4096];

	snprintf(path, sizeof(path), "%s/control", folder ? folder : "/tmp/nvidia-mps");
	if (access(path, F_OK)) {
		kv_seen(p, KV_FINE, "no MPS (%s is not there)", path);
		return;
	}
	kv_seen(p, KV_WARN, "an MPS server is in reach (%s): there one client's fault ends all clients of "
		"the server, and would end a mover with them", path);
	kv_change(p, "start kvcached with CUDA_MPS_PIPE_DIRECTORY=/nonexistent in its environment; clients may "
		  "use MPS");
}

void kv_probe_sharing(struct kv_probing *p)
{
	static const char *const names[] = {
		"nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2",
		"nvmlDeviceGetUUID", "nvmlDeviceGetMigMode", "nvmlDeviceGetPersistenceMode",
		"nvmlDeviceGetComputeRunningProcesses_v3"};
	void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
	const char *missing;
	unsigned int n = 0;
	struct nvml nvml;
	int error;

	_Static_assert(sizeof(nvml) == sizeof(names), "one address for each name");
	seen_mps(p);
	if (!library) {
		kv_seen(p, KV_FINE, "no libnvidia-ml.so.1: MIG mode and who else runs there can't be known");
		return;
	}
	missing = look_up(library, names, (void **)&nvml, sizeof(names) / sizeof(names[0]));
	error = missing ? 0 : nvml.nvmlInit_v2();
	if (missing || error) {
		kv_seen(p, KV_WARN, "NVML %s%s%s: MIG mode and who else runs there can't be known",
			missing ? "has no " : "does not start", missing ? missing : "",
			error == 18 ? " (its version is not the kernel module's)" : "");
		kv_change(p, "%s", error == 18 ? "reboot, or reload the kernel module, after a driver update" :
						 "a newer driver");
		return;
	}
	nvml.nvmlDeviceGetCount_v2(&n);
	for (unsigned int i = 0; i < n; i++)
		seen_use(p, &nvml, i);
}
