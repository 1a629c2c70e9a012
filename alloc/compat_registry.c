/* SPDX-License-Identifier: Apache-2.0 */
/* Reference calculators: names of attention backends, and the checks at start-up. */
#include <stdio.h>
#include <string.h>

#include "alloc/compat_pools.h"
#include "include/internal/error.h"

static const struct backend {
	const char *name, *arch, *class;
	bool nvidia_only;
} backends[] = {
	{"mha", "MHA", "MHAAttnBackend", false},
	{"fa3", "MHA", "MHAAttnBackend", false},
	{"fa4", "MHA", "MHAAttnBackend", false},
	{"triton", "MHA", "MHAAttnBackend", false},
	{"flashinfer", "MHA", "MHAAttnBackend", false},
	{"trtllm", "MHA", "TRTLLMMHAAttnBackend", true},
	{"mla", "MLA", "MLAAttnBackend", false},
	{"flashmla", "MLA", "FlashMLABackend", true},
	{"trtllm_mla", "MLA", "TRTLLMMLABackend", true},
	{"tokenspeed_mla", "MLA", "CuteDSLMLABackend", true},
	{"deepseek_v4", "MLA", "DeepseekV4AttentionBackend", true},
	{"dsa", "DSA", "DSABackend", false},
};

#define N_BACKENDS (sizeof(backends) / sizeof(backends[0]))

static const struct {
	const char *arch, *name;
} defaults[] = {{"MHA", "mha"}, {"MLA", "mla"}, {"DSA", "dsa"}};

static int unknown(const char *name, bool nvidia)
{
	char list[160] = "";

	for (size_t i = 0; i < N_BACKENDS; i++)
		if (nvidia || !backends[i].nvidia_only) {
			if (*list)
				strcat(list, ", ");
			strcat(list, backends[i].name);
		}
	return kv_error(KV_FAULT_UNKNOWN_BACKEND, "attention_backend: '%s' given; %s exist", name,
			list);
}

int kv_compat_backend(const char *name, const char *arch, bool nvidia, const char **ret_class)
{
	bool known_arch = false;

	for (size_t i = 0; i < sizeof(defaults) / sizeof(defaults[0]); i++) {
		if (strcmp(defaults[i].arch, arch))
			continue;
		known_arch = true;
		if (!name)
			name = defaults[i].name;
	}
	if (!known_arch)
		return name ? kv_error(KV_FAULT_UNSUPPORTED_ARCH,
				       "architecture: '%s' given; MHA, MLA, DSA exist", arch)
			    : kv_error(KV_FAULT_NO_DEFAULT_BACKEND,
				       "architecture: '%s' has no default backend", arch);
	if (!strcmp(name, "trtllm_mha"))
		name = "trtllm";
	for (size_t i = 0; i < N_BACKENDS; i++) {
		if (strcmp(backends[i].name, name) || (backends[i].nvidia_only && !nvidia))
			continue;
		if (strcmp(backends[i].arch, arch))
			return kv_error(KV_FAULT_BACKEND_ARCH_MISMATCH,
					"attention_backend: '%s' is for %s, the model is %s", name,
					backends[i].arch, arch);
		*ret_class = backends[i].class;
		return 0;
	}
	return unknown(name, nvidia);
}

int kv_compat_check_flat(const struct kv_compat_flat_check *c)
{
	if (!c->flat_ext)
		return 0;
	if (c->uses_paged && !c->uses_flat)
		return kv_error(KV_FAULT_FLAT_EXT_PAGED_BACKEND,
				"backend: reads compact paged groups, the scheduler is flat");
	if (c->speculative && !c->flat_spec_capable)
		return kv_error(KV_FAULT_FLAT_SPEC_UNSUPPORTED,
				"speculative algorithm: %s, and the backend cannot verify on flat "
				"tables",
				c->speculative);
	if (c->speculative && !strcmp(c->speculative, "DFLASH"))
		return kv_error(KV_FAULT_FLAT_DFLASH,
				"speculative algorithm: DFLASH has no flat path");
	if (c->n_groups > 1 && !c->uses_flat)
		return kv_error(KV_FAULT_FLAT_TABLE_BLIND_BACKEND,
				"backend: reads one table, the pool publishes %lld groups",
				(long long)c->n_groups);
	if (!c->n_groups)
		return kv_error(KV_FAULT_FLAT_NO_GROUPS, "pool: publishes no group");
	return 0;
}

int kv_compat_host_pages(int64_t page_bytes, int64_t device_tokens, int64_t page_size, double ratio,
			 double size_gb, int64_t *ret_pages)
{
	int64_t pages;

	if (page_bytes <= 0)
		return kv_error(KV_FAULT_BAD_BYTES_PER_PAGE,
				"bytes per page: %lld given, must be positive",
				(long long)page_bytes);
	if (page_size <= 0)
		return kv_error(KV_FAULT_BAD_PAGE_SIZE, "page_size: %lld given, must be positive",
				(long long)page_size);
	if (size_gb > 0)
		pages = (int64_t)(size_gb * 1e9) / page_bytes;
	else
		pages = (int64_t)((double)device_tokens * ratio) / page_size + 1;
	if (pages <= 0)
		return kv_error(KV_FAULT_HOST_PAGES_ZERO,
				"host size: %g GB is less than a page of %lld bytes", size_gb,
				(long long)page_bytes);
	*ret_pages = pages;
	return 0;
}

double kv_compat_utilization(int64_t world_size)
{
	switch (world_size) {
	case 2:
		return 0.87;
	case 4:
		return 0.95;
	case 8:
		return 0.81;
	case 16:
		return 0.79;
	default:
		return 0.88;
	}
}
