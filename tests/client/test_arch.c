/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libclient/arch*.c: configs of each family, read and planned, against figures made by hand.
 * What configs have in them is in tests/models; only what the cache depends on is kept there.
 */
#include <check.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/client.h>
#include <kvcached/plan.h>

#define GIB ((uint64_t)1 << 30)

static const struct {
	const char *file;
	uint32_t tp;
	uint64_t token_bytes; /* in layers that keep all tokens */
	uint64_t state_bytes;
	uint32_t n_full, n_window, n_state; /* layers of each kind */
} families[] = {
	/* K and V of 32 heads of 128, 2 B: 16,384 B a layer, 32 layers */
	{"llama-2-7b", 1, 32 * 16384, 0, 32, 0, 0},
	/* 8 heads: 4,096 B; on 2 ranks 4 heads each */
	{"llama-3-8b", 1, 32 * 4096, 0, 32, 0, 0},
	{"llama-3-8b", 2, 32 * 2048, 0, 32, 0, 0},
	/* 80 layers; on 16 ranks each head is held twice: 1 head a rank, 512 B */
	{"llama-3-70b", 1, 80 * 4096, 0, 80, 0, 0},
	{"llama-3-70b", 16, 80 * 512, 0, 80, 0, 0},
	/* each fourth of 48 layers attends to all, 36 to chunks of 8192 */
	{"llama-4-scout", 1, 12 * 4096, 0, 12, 36, 0},
	/* 4 heads of 128: 2,048 B */
	{"qwen2-7b", 1, 28 * 2048, 0, 28, 0, 0},
	{"qwen2.5-72b", 1, 80 * 4096, 0, 80, 0, 0},
	{"qwen3-32b", 1, 64 * 4096, 0, 64, 0, 0},
	{"qwen3-235b-a22b", 4, 94 * 512, 0, 94, 0, 0},
	/* 2 heads of 256: 2,048 B in 12 layers; 36 states: convolution (2*16*128 + 32*128) * 3 * 2
	 * = 49,152 and 32 matrices of 128*128 floats = 2,097,152 */
	{"qwen3-next-80b-a3b", 1, 12 * 2048, 36 * (49152 + 2097152), 12, 0, 36},
	{"qwen3-next-80b-a3b", 2, 12 * 1024, 36 * (24576 + 1048576), 12, 0, 36},
	{"qwen3.5-35b-a3b", 1, 10 * 2048, 30 * (49152 + 2097152), 10, 0, 30},
	/* all 32 layers slide: nothing keeps all tokens */
	{"mistral-7b-v0.1", 1, 0, 0, 0, 32, 0},
	{"mistral-7b-v0.3", 1, 32 * 4096, 0, 32, 0, 0},
	{"mixtral-8x7b", 1, 32 * 4096, 0, 32, 0, 0},
	/* 8 heads of 256 in 4 B: 16,384 B; layers 1, 3, ... of 42 keep all */
	{"gemma-2-9b", 1, 21 * 16384, 0, 21, 21, 0},
	/* 16 heads of 128: 8,192 B; layers 5, 11, ..., 59 of 62 keep all */
	{"gemma-3-27b", 1, 10 * 8192, 0, 10, 52, 0},
	/* 2 heads of 256: 2,048 B; of the first 20 layers 4 keep all; the last 15 have no bytes */
	{"gemma-3n-e4b", 1, 4 * 2048, 0, 4, 16, 0},
	/* 8 heads of 64: 2,048 B, each second of 24 and of 36 */
	{"gpt-oss-20b", 1, 12 * 2048, 0, 12, 12, 0},
	{"gpt-oss-120b", 8, 18 * 256, 0, 18, 18, 0},
	/* 32 heads of 96, a window of 2,047 in a context of 4,096 */
	{"phi-3-mini-4k", 1, 0, 0, 0, 32, 0},
	/* 10 heads of 128: 5,120 B */
	{"phi-4", 1, 40 * 5120, 0, 40, 0, 0},
	/* 2 groups of 128: 1,024 B */
	{"glm-4-9b-chat", 1, 40 * 1024, 0, 40, 0, 0},
	{"glm-4.5", 8, 92 * 512, 0, 92, 0, 0},
	/* latent 512 + 64, 2 B: 1,152; index 128 + 4: 132. No rank has less. */
	{"glm-5", 8, 78 * (1152 + 132), 0, 78, 0, 0},
	{"deepseek-v2-lite", 1, 27 * 1152, 0, 27, 0, 0},
	{"deepseek-v3", 8, 61 * 1152, 0, 61, 0, 0},
	{"deepseek-r1", 1, 61 * 1152, 0, 61, 0, 0},
	{"deepseek-v3.2", 1, 61 * (1152 + 132), 0, 61, 0, 0},
	{"kimi-k2", 16, 61 * 1152, 0, 61, 0, 0},
	/* 8 heads of 128 in 10 of 80 layers; 70 states of 64 heads of 128*128 floats */
	{"minimax-text-01", 1, 10 * 4096, 70 * (uint64_t)64 * 128 * 128 * 4, 10, 0, 70},
	{"minimax-m2", 1, 62 * 4096, 0, 62, 0, 0},
	/* pattern: 4 attention, 24 Mamba-2, 24 MLP. Convolution (128*64 + 2*8*128) * 3 * 2 =
	 * 61,440, 128 heads of 64*128 floats = 4,194,304 */
	{"nemotron-h-8b", 1, 4 * 4096, 24 * (61440 + 4194304), 4, 0, 24},
	/* on 16 ranks the 8 groups are held twice: (512 + 2*1*128) * 3 * 2 = 4,608; 8 heads */
	{"nemotron-h-8b", 16, 4 * 512, 24 * (4608 + 262144), 4, 0, 24},
	/* 4 heads of 128: 2,048 B in 4 layers; (48*64 + 2*128) * 3 * 2 = 19,968; 48 of 64*128
	   floats */
	{"granite-4.0-h-tiny", 1, 4 * 2048, 36 * (19968 + 1572864), 4, 0, 36},
	/* layers 4, 12, 20, 28; Mamba-1: 8192 channels * 3 * 2 = 49,152, 8192 * 16 floats = 524,288
	 */
	{"jamba-v0.1", 1, 4 * 4096, 28 * (49152 + 524288), 4, 0, 28},
	/* each of 44 layers has both: 2 heads of 128: 1,024 B; (24*128 + 2*256) * 3 * 2 = 21,504
	 * and 24 heads of 128*256 floats = 3,145,728 */
	{"falcon-h1-7b", 1, 44 * 1024, 44 * (21504 + 3145728), 44, 0, 44},
	/* the decoder's 4 layers, 20 heads of 1280 / 20 = 64: 5,120 B */
	{"whisper-large-v3-turbo", 1, 4 * 5120, 0, 4, 0, 0},
};

static struct kv_arch *read_model(const char *name)
{
	struct kv_arch *model = NULL;
	char path[512];
	int r;

	snprintf(path, sizeof(path), KV_MODELS_DIR "/%s.json", name);
	r = kv_arch_read(path, &model);
	ck_assert_msg(r == 0, "%s: %s", name, kv_error_text());
	return model;
}

START_TEST(a_family_costs_what_its_config_says)
{
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = 2048 * GIB, .layout = KV_PLAN_GROUPED,
		   .tp = families[_i].tp, .context = 4096);
	struct kv_arch *model = read_model(families[_i].file);
	uint32_t n_full = 0, n_window = 0, n_state = 0;
	struct kv_plan *plan;

	ck_assert_msg(kv_plan_arch(model, NULL, &o, &plan) == 0, "%s", kv_error_text());
	ck_assert_int_eq(kv_plan_check(plan), 0);
	for (uint32_t i = 0; i < plan->n_components; i++) {
		const struct kv_plan_component *c = &plan->components[i];
		uint8_t kind = plan->groups[c->group].kind;

		/* the first part of each layer and group counts the layer */
		if (strcmp(c->name, "k") && strcmp(c->name, "latent") &&
		    strcmp(c->name, "recurrent"))
			continue;
		n_full += kind == KV_GROUP_FULL;
		n_window += kind == KV_GROUP_WINDOW || kind == KV_GROUP_CHUNKED;
		n_state += kind == KV_GROUP_STATE;
	}
	ck_assert_msg(plan->token_bytes == families[_i].token_bytes, "%s: a token has %llu bytes",
		      families[_i].file, (unsigned long long)plan->token_bytes);
	ck_assert_msg(plan->state_bytes == families[_i].state_bytes, "%s: a state has %llu bytes",
		      families[_i].file, (unsigned long long)plan->state_bytes);
	ck_assert_uint_eq(n_full, families[_i].n_full);
	ck_assert_uint_eq(n_window, families[_i].n_window);
	ck_assert_uint_eq(n_state, families[_i].n_state);
	kv_plan_free(plan);
	kv_arch_free(model);
}
END_TEST

START_TEST(deepseek_v4_has_six_groups)
{
	/* 43 layers: 3 without compression (0, 1 and none of the pattern), 21 of 4 tokens a row, 20
	 * of 128. A window page: 64 rows of 584 to a multiple of 576: 37,440; 43 of them 1,609,920.
	 * c4: 64 rows 37,440 and an index of 64 * 68 = 4,352; 21: 877,632. States: 4 rows of 2048
	 * floats: 32,768, 21: 688,128. c128: 2 rows: 1,728, 20: 34,560; 8 rows of 1024: 655,360.
	 * Indexer states: 4 rows of 512 floats: 8,192, 21: 172,032. */
	static const struct {
		const char *name;
		uint32_t block_tokens;
		uint64_t bytes;
	} groups[] = {{"window", 64, 1609920},	 {"c4.state", 4, 688128},
		      {"c4.kv", 256, 877632},	 {"c4.index_state", 4, 172032},
		      {"c128.state", 8, 655360}, {"c128.kv", 256, 34560}};
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = 100 * GIB, .fp4_indexer = 1);
	struct kv_arch *model = read_model("deepseek-v4-flash");
	struct kv_plan *plan;

	ck_assert_msg(kv_plan_arch(model, NULL, &o, &plan) == 0, "%s", kv_error_text());
	ck_assert_int_eq(kv_plan_check(plan), 0);
	ck_assert_uint_eq(plan->layout, KV_PLAN_GROUPED);
	ck_assert_uint_eq(plan->n_groups, 6);
	for (uint32_t g = 0; g < 6; g++) {
		ck_assert_str_eq(plan->groups[g].name, groups[g].name);
		ck_assert_uint_eq(plan->groups[g].block_tokens, groups[g].block_tokens);
		ck_assert_uint_eq(plan->groups[g].payload_bytes, groups[g].bytes);
	}
	kv_plan_free(plan);
	kv_arch_free(model);
}
END_TEST

START_TEST(cross_attention_is_a_constant_of_the_sequence)
{
	/* 4 tiles of (560/14)^2 + 1 = 1,601 patches: 6,404 tokens; 8 layers of 4,096 B a token */
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = 40 * GIB, .layout = KV_PLAN_FLAT);
	struct kv_arch *model = read_model("llama-3.2-11b-vision");
	struct kv_plan *plan;

	ck_assert_uint_eq(model->encoder_tokens, 6404);
	ck_assert_int_eq(kv_plan_arch(model, NULL, &o, &plan), 0);
	ck_assert_uint_eq(plan->token_bytes, 32 * 4096);
	ck_assert_uint_eq(plan->n_pools, 2);
	ck_assert_uint_eq(plan->pools[1].block_bytes, 8 * 6404 * 4096);
	ck_assert_uint_eq(plan->pools[1].blocks_per_seq, 1);
	kv_plan_free(plan);
	kv_arch_free(model);
}
END_TEST

START_TEST(a_decoder_keeps_its_own_tokens_and_its_encoders)
{
	/* 4 layers of 20 heads of 64 in 2 B, K and V: 5,120 B a token; 1,500 tokens of sound */
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = GIB, .tp = 2);
	struct kv_arch *model = read_model("whisper-large-v3-turbo");
	struct kv_plan *plan;

	ck_assert_uint_eq(model->n_layers, 4);
	ck_assert_uint_eq(model->context, 448);
	ck_assert_uint_eq(model->encoder_tokens, 1500);
	ck_assert_int_eq(kv_plan_arch(model, NULL, &o, &plan), 0);
	ck_assert_uint_eq(plan->token_bytes, 4 * 2560);
	ck_assert_uint_eq(plan->n_pools, 2);
	for (uint32_t p = 0; p < 2; p++) {
		bool cross = !strcmp(plan->pools[p].name, "cross");

		ck_assert_uint_eq(plan->pools[p].block_bytes, 4 * 2560 * (cross ? 1500 : 64));
		ck_assert_uint_eq(plan->pools[p].blocks_per_seq, cross ? 1 : 7);
	}
	kv_plan_free(plan);
	kv_arch_free(model);
}
END_TEST

START_TEST(what_is_printed_reads_as_the_same_model)
{
	for (size_t i = 0; i < sizeof(families) / sizeof(families[0]); i++) {
		struct kv_arch *model = read_model(families[i].file), *again;
		char *text = kv_arch_print(model), *second;

		ck_assert_ptr_nonnull(text);
		ck_assert_msg(kv_arch_parse(text, strlen(text), "printed", &again) == 0, "%s",
			      kv_error_text());
		ck_assert_uint_eq(model->n_layers, again->n_layers);
		ck_assert_mem_eq(model->layers, again->layers,
				 model->n_layers * sizeof(*model->layers));
		second = kv_arch_print(again);
		ck_assert_str_eq(text, second);
		free(text);
		free(second);
		kv_arch_free(model);
		kv_arch_free(again);
	}
}
END_TEST

START_TEST(a_model_described_by_hand_is_planned)
{
	/* 3 windows of 4 heads of 64 in 2 B: 1,024 B; one layer of 4 * (128 + 64) * 2 = 1,536 B */
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = GIB, .layout = KV_PLAN_GROUPED);
	struct kv_arch *model = read_model("by-hand");
	struct kv_plan *plan;

	ck_assert_uint_eq(model->n_layers, 4);
	ck_assert_int_eq(kv_plan_arch(model, NULL, &o, &plan), 0);
	ck_assert_uint_eq(plan->token_bytes, 1536);
	ck_assert_uint_eq(plan->groups[0].payload_bytes, 64 * 3 * 1024);
	kv_plan_free(plan);
	kv_arch_free(model);
}
END_TEST

static const struct {
	const char *text;
	int code;
	const char *word; /* that the error names */
} refused[] = {
	{"", -EINVAL, "line"},
	{"[]", -EINVAL, "object"},
	{"{}", -EINVAL, "num_hidden_layers"},
	{"{\"num_hidden_layers\": 2, \"model_type\": \"mystery\"}", -ENOTSUP, "mystery"},
	{"{\"num_hidden_layers\": 0, \"model_type\": \"llama\"}", -EINVAL, "layers"},
	{"{\"num_hidden_layers\": 4096, \"model_type\": \"llama\"}", -EINVAL, "layers"},
	{"{\"num_hidden_layers\": 2, \"model_type\": \"llama\"}", -EINVAL, "num_attention_heads"},
	{"{\"num_hidden_layers\": 2, \"model_type\": \"llama\", \"num_attention_heads\": 0}",
	 -EINVAL, "num_attention_heads"},
	{"{\"num_hidden_layers\": 2.5, \"model_type\": \"llama\"}", -EINVAL, "num_hidden_layers"},
	{"{\"num_hidden_layers\": 2, \"model_type\": \"llama\", \"num_attention_heads\": 4, "
	 "\"hidden_size\": 512, \"layer_types\": [\"full_attention\"]}",
	 -EINVAL, "layer_types"},
	{"{\"num_hidden_layers\": 1, \"model_type\": \"llama\", \"num_attention_heads\": 4, "
	 "\"hidden_size\": 512, \"layer_types\": [\"quantum_attention\"]}",
	 -ENOTSUP, "quantum_attention"},
	{"{\"num_hidden_layers\": 1, \"model_type\": \"gpt_oss\", \"num_attention_heads\": 4, "
	 "\"hidden_size\": 512, \"layer_types\": [\"sliding_attention\"]}",
	 -EINVAL, "window"},
	{"{\"num_hidden_layers\": 1, \"model_type\": \"deepseek_v4\", \"head_dim\": 512, "
	 "\"qk_rope_head_dim\": 64, \"sliding_window\": 128, \"compress_ratios\": [8]}",
	 -EINVAL, "compress_ratios"},
	{"{\"num_hidden_layers\": 4, \"model_type\": \"qwen3_next\", \"num_attention_heads\": 4, "
	 "\"hidden_size\": 512}",
	 -EINVAL, "linear_num_key_heads"},
	{"{\"kvcached_model\": 2, \"layers\": []}", -EINVAL, "kvcached_model"},
	{"{\"kvcached_model\": 1, \"layers\": []}", -EINVAL, "layers"},
	{"{\"kvcached_model\": 1, \"layers\": [{\"kind\": \"odd\"}]}", -EINVAL, "odd"},
	{"{\"kvcached_model\": 1, \"layers\": [{\"kind\": \"full\"}]}", -EINVAL, "kv_heads"},
	{"{\"kvcached_model\": 1, \"layers\": [{\"repeat\": 999999}]}", -EINVAL, "layers"},
	{"{\"kvcached_model\": 1, \"layers\": [{\"shares\": 0}]}", -EINVAL, "shares"},
	{"{\"kvcached_model\": 1, \"layers\": [{\"kind\": \"cross\", \"kv_heads\": 1, "
	 "\"head_dim\": 64, \"cross_heads\": 1}]}",
	 -EINVAL, "cross_heads"},
	{"{\"model_type\": \"whisper\", \"decoder_layers\": 4}", -EINVAL, "max_source_positions"},
};

START_TEST(a_config_that_is_wrong_is_refused_by_name)
{
	struct kv_arch *model = NULL;
	const char *text = refused[_i].text;

	ck_assert_int_eq(kv_arch_parse(text, strlen(text), "config", &model), refused[_i].code);
	ck_assert_ptr_null(model);
	ck_assert_msg(strstr(kv_error_text(), refused[_i].word), "'%s' does not name %s",
		      kv_error_text(), refused[_i].word);
}
END_TEST

START_TEST(a_file_that_is_not_there_is_named)
{
	struct kv_arch *model = NULL;

	ck_assert_int_eq(kv_arch_read("/nonexistent/config.json", &model), -ENOENT);
	ck_assert_msg(strstr(kv_error_text(), "/nonexistent"), "%s", kv_error_text());
	ck_assert_int_eq(kv_arch_read("/dev/null", &model), -EINVAL);
}
END_TEST

static uint8_t gguf[4096];
static size_t gguf_len;

static void put(const void *data, size_t n)
{
	memcpy(gguf + gguf_len, data, n);
	gguf_len += n;
}

static void put_text(const char *text)
{
	uint64_t len = strlen(text);

	put(&len, 8);
	put(text, len);
}

static void put_u32(const char *key, uint32_t value)
{
	uint32_t type = 4;

	put_text(key);
	put(&type, 4);
	put(&value, 4);
}

static void put_list(const char *key, uint32_t type, uint64_t n, const void *items, size_t bytes)
{
	uint32_t array = 9;

	put_text(key);
	put(&array, 4);
	put(&type, 4);
	put(&n, 8);
	put(items, bytes);
}

static void start_gguf(uint64_t n_pairs, const char *architecture)
{
	uint32_t version = 3, string = 8;
	uint64_t none = 0;

	gguf_len = 0;
	put("GGUF", 4);
	put(&version, 4);
	put(&none, 8);
	put(&n_pairs, 8);
	put_text("general.architecture");
	put(&string, 4);
	put_text(architecture);
}

START_TEST(gguf_metadata_says_the_same_as_a_config)
{
	/* Llama 3 8B: 8 heads of 4096 / 32 = 128 */
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = GIB);
	struct kv_arch *model;
	struct kv_plan *plan;

	start_gguf(6, "llama");
	put_u32("llama.block_count", 32);
	put_u32("llama.context_length", 8192);
	put_u32("llama.embedding_length", 4096);
	put_u32("llama.attention.head_count", 32);
	put_u32("llama.attention.head_count_kv", 8);
	ck_assert_msg(kv_arch_parse_gguf(gguf, gguf_len, "x.gguf", &model) == 0, "%s",
		      kv_error_text());
	ck_assert_uint_eq(model->context, 8192);
	ck_assert_int_eq(kv_plan_arch(model, NULL, &o, &plan), 0);
	ck_assert_uint_eq(plan->token_bytes, 32 * 4096);
	kv_plan_free(plan);
	kv_arch_free(model);

	/* cut anywhere, it is refused and nothing past its end is read */
	for (size_t n = 0; n < gguf_len; n++) {
		uint8_t *cut = malloc(n ? n : 1);

		model = NULL;
		memcpy(cut, gguf, n);
		ck_assert_int_lt(kv_arch_parse_gguf(cut, n, "x.gguf", &model), 0);
		ck_assert_ptr_null(model);
		free(cut);
	}
	start_gguf(1, "unheard-of");
	ck_assert_int_eq(kv_arch_parse_gguf(gguf, gguf_len, "x.gguf", &model), -ENOTSUP);
}
END_TEST

START_TEST(gguf_lists_of_heads_tell_recurrent_layers)
{
	/* Jamba-like: 4 layers, the third attends; 64 channels of 2 * 32, 16 states each */
	uint32_t heads[] = {0, 0, 8, 0};
	struct kv_arch *model;

	start_gguf(8, "jamba");
	put_u32("jamba.block_count", 4);
	put_u32("jamba.embedding_length", 32);
	put_u32("jamba.attention.head_count", 8);
	put_list("jamba.attention.head_count_kv", 5, 4, heads, sizeof(heads));
	put_u32("jamba.ssm.conv_kernel", 4);
	put_u32("jamba.ssm.inner_size", 64);
	put_u32("jamba.ssm.state_size", 16);
	ck_assert_msg(kv_arch_parse_gguf(gguf, gguf_len, "x.gguf", &model) == 0, "%s",
		      kv_error_text());
	ck_assert_uint_eq(model->layers[2].kind, KV_LAYER_FULL);
	ck_assert_uint_eq(model->layers[2].n_kv_heads, 8);
	ck_assert_uint_eq(model->layers[0].kind, KV_LAYER_STATE);
	ck_assert_uint_eq(model->layers[0].state_heads, 64);
	ck_assert_uint_eq(model->layers[0].state_cols, 16);
	kv_arch_free(model);
}
END_TEST

static void put_gemma(const uint32_t *heads, const uint8_t *slides, uint64_t n_slides)
{
	start_gguf(9, "gemma3");
	put_u32("gemma3.block_count", 4);
	put_u32("gemma3.context_length", 8192);
	put_u32("gemma3.embedding_length", 512);
	put_u32("gemma3.attention.head_count", 8);
	put_u32("gemma3.attention.key_length", 64);
	put_u32("gemma3.attention.sliding_window", 512);
	put_list("gemma3.attention.head_count_kv", 5, 4, heads, 16);
	put_list("gemma3.attention.sliding_window_pattern", 7, n_slides, slides, n_slides);
}

START_TEST(gguf_lists_tell_sliding_layers_and_heads_of_each)
{
	/* 4 layers, the third keeps all: 4, 4, 8, 4 KV heads of 64 */
	KV_OPTIONS(kv_plan_options, o, .budget_bytes = GIB, .layout = KV_PLAN_GROUPED);
	uint32_t heads[] = {4, 4, 8, 4};
	uint8_t slides[] = {1, 1, 0, 1};
	struct kv_arch *model;
	struct kv_plan *plan;

	put_gemma(heads, slides, 3);
	ck_assert_int_eq(kv_arch_parse_gguf(gguf, gguf_len, "x.gguf", &model), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "sliding_window_pattern"));
	put_gemma(heads, slides, 4);
	ck_assert_msg(kv_arch_parse_gguf(gguf, gguf_len, "x.gguf", &model) == 0, "%s",
		      kv_error_text());
	for (uint32_t i = 0; i < 4; i++) {
		ck_assert_uint_eq(model->layers[i].kind,
				  slides[i] ? KV_LAYER_WINDOW : KV_LAYER_FULL);
		ck_assert_uint_eq(model->layers[i].n_kv_heads, heads[i]);
	}
	/* 8 * 64 * 2 * 2 B a token; a window's layers 4 * 64 * 2 * 2 B */
	ck_assert_int_eq(kv_plan_arch(model, NULL, &o, &plan), 0);
	ck_assert_uint_eq(plan->token_bytes, 2048);
	ck_assert_uint_eq(plan->groups[0].payload_bytes, 64 * 3 * 1024);
	kv_plan_free(plan);
	kv_arch_free(model);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("client/arch");
	TCase *t = tcase_create("model");
	SRunner *runner;
	int failed;

	tcase_add_loop_test(t, a_family_costs_what_its_config_says, 0,
			    sizeof(families) / sizeof(families[0]));
	tcase_add_test(t, deepseek_v4_has_six_groups);
	tcase_add_test(t, cross_attention_is_a_constant_of_the_sequence);
	tcase_add_test(t, a_decoder_keeps_its_own_tokens_and_its_encoders);
	tcase_add_test(t, what_is_printed_reads_as_the_same_model);
	tcase_add_test(t, a_model_described_by_hand_is_planned);
	tcase_add_loop_test(t, a_config_that_is_wrong_is_refused_by_name, 0,
			    sizeof(refused) / sizeof(refused[0]));
	tcase_add_test(t, a_file_that_is_not_there_is_named);
	tcase_add_test(t, gguf_metadata_says_the_same_as_a_config);
	tcase_add_test(t, gguf_lists_of_heads_tell_recurrent_layers);
	tcase_add_test(t, gguf_lists_tell_sliding_layers_and_heads_of_each);
	suite_add_tcase(s, t);
	runner = srunner_create(s);
	srunner_run_all(runner, CK_ENV);
	failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
