/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arbitrary bytes as a config, as our own JSON and as GGUF metadata; what is read is planned in
 *each layout, printed and read again. Under libFuzzer:
 *
 *	meson setup build-fuzz -Dfuzz=true -Db_sanitize=address,undefined ... (CC=clang)
 *	build-fuzz/tests/fuzz/fuzz_arch -max_total_time=600 tests/fuzz/corpus_arch tests/models
 *
 * Without it, a program that replays the files and folders it is given.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/plan.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(int ok)
{
	if (!ok)
		abort();
}

static void plan(const struct kv_arch *model)
{
	for (uint32_t layout = 0; layout <= KV_PLAN_SLAB; layout++) {
		KV_OPTIONS(kv_plan_options, o, .budget_bytes = (uint64_t)1 << 36, .layout = layout,
			   .tp = 1 + layout % 2);
		struct kv_plan *p;

		if (kv_plan_arch(model, NULL, &o, &p))
			continue;
		check(!kv_plan_check(p));
		kv_plan_free(p);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct kv_arch *model = NULL, *again = NULL;
	char *text;
	int r;

	if (size >= 4 && !memcmp(data, "GGUF", 4))
		r = kv_arch_parse_gguf(data, size, "fuzz", &model);
	else
		r = kv_arch_parse((const char *)data, size, "fuzz", &model);
	if (r) {
		check(r < 0 && !model);
		return 0;
	}
	plan(model);
	text = kv_arch_print(model);
	if (text) { /* names that are no UTF-8 can't be printed as JSON */
		check(!kv_arch_parse(text, strlen(text), "printed", &again));
		check(again->n_layers == model->n_layers);
		free(text);
	}
	kv_arch_free(again);
	kv_arch_free(model);
	return 0;
}
