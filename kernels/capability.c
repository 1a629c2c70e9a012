/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Problems against the tables of backends. A feature is a row of reasons[]: what is wanted and not
 * in the table is a reason; sizes and types have a function each.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

#include "include/internal/error.h"
#include "include/internal/public.h"
#include "kernels/attention.h"
#include "kernels/mla.h"
#include "kernels/view.h"

static const struct {
	const char *name;
	const char *text; /* NULL: it has values, and a function that says them */
} reasons[KV_ATTN_REASONS] = {
	[KV_ATTN_HEAD_DIM] = {"head_dim", NULL},
	[KV_ATTN_DTYPE] = {"dtype", NULL},
	[KV_ATTN_KV_DTYPE] = {"kv_dtype", NULL},
	[KV_ATTN_BLOCK_TOKENS] = {"block_tokens", NULL},
	[KV_ATTN_BIDIRECTIONAL] = {"bidirectional", "doc_ranges: not done"},
	[KV_ATTN_MLA] = {"mla", "latent attention wanted: it does K and V"},
	[KV_ATTN_NON_MLA] = {"non_mla", "K and V given: it does latent attention only"},
	[KV_ATTN_SINKS] = {"sinks", "sinks: not done"},
	[KV_ATTN_SPARSE] = {"sparse", "chosen keys wanted: it reads all"},
	[KV_ATTN_NON_SPARSE] = {"non_sparse", "all keys wanted: it reads chosen ones only"},
	[KV_ATTN_HEAD_SCALES] = {"head_scales", "k_scales, v_scales: not done; a scale a view is"},
	[KV_ATTN_CAPABILITY] = {"capability", NULL},
	[KV_ATTN_KIND] = {"kind", NULL},
	[KV_ATTN_WINDOW] = {"window", "window_left: not done, -1 is"},
	[KV_ATTN_NON_CAUSAL] = {"non_causal", "causal: 0 given, it does 1"},
	[KV_ATTN_NON_CAUSAL_CP] = {"non_causal_cp",
				   "causal: 0 given, not done for latent attention over several "
				   "ranks"},
	[KV_ATTN_INVARIANT] = {"invariant", "invariant: 1 given, its sums depend on the batch"},
	[KV_ATTN_CONNECTOR] = {"connector", "blocks that come from elsewhere: not done"},
	[KV_ATTN_PREFILL_CP] = {"prefill_cp", "queries spread over ranks: not done"},
	[KV_ATTN_DEVICE_LENGTHS] = {"device_lengths",
				    "lengths that only the device knows: it plans from the host's"},
	[KV_ATTN_SOFTCAP] = {"softcap", "softcap: not done, 0 is"},
	[KV_ATTN_ALIBI] = {"alibi", "alibi_slopes: not done"},
	[KV_ATTN_TREE] = {"tree", "tree_mask: not done"},
	[KV_ATTN_SEQ_CAUSAL] = {"seq_causal", "seq_causal: not done, one for all sequences is"},
	[KV_ATTN_WINDOW_PREFIX] = {"window_prefix", "window_prefix_lens: not done"},
	[KV_ATTN_WINDOW_RIGHT] = {"window_right", "window_right: not done, 0 is"},
	[KV_ATTN_ROW_SCALES] = {"row_scales", "k_row_scales, v_row_scales: not done"},
	[KV_ATTN_DECODE_CP] = {"decode_cp", "cp_size: above 1 given, not done"},
	[KV_ATTN_KEY_RANGE] = {"key_range", "key_begin, key_end: not done"},
	[KV_ATTN_SHARED_PREFIX] = {"shared_prefix", "shared_prefix: not done"},
	[KV_ATTN_LSE] = {"lse", "lse: not done"},
	[KV_ATTN_LSE_WITH_SINK] = {"lse_with_sink", "lse_with_sink: not done, 0 is"},
	[KV_ATTN_STRIDES] = {"strides", "q_token_stride, out_token_stride, lse strides: not done, "
					"dense rows are"},
	[KV_ATTN_OUT_DTYPE] = {"out_dtype", "out_dtype: not done, dtype is"},
	[KV_ATTN_LAYOUT] = {"layout", NULL},
	[KV_ATTN_QUANTIZE] = {"quantize", "quantize: not done"},
	[KV_ATTN_QUERY_ROWS] = {"query_rows", NULL},
	[KV_ATTN_ALIGNMENT] = {"alignment", NULL},
	[KV_ATTN_WORKSPACE] = {"workspace", NULL},
	[KV_ATTN_SIZE] = {"size", NULL},
	[KV_ATTN_DEVICE] = {"device", NULL},
	[KV_ATTN_COMBINATION] = {"combination", NULL},
};

KV_PUBLIC const char *kv_attention_reason_name(int reason)
{
	return reason >= 0 && reason < KV_ATTN_REASONS ? reasons[reason].name : NULL;
}

void kv_refuse(struct kv_refusals *r, int reason, const char *format, ...)
{
	va_list ap;
	int n;

	if (r->text && r->room > 1) {
		n = snprintf(r->text, r->room, "%s", r->bits ? "; " : "");
		n = n < (int)r->room ? n : (int)r->room - 1;
		r->text += n;
		r->room -= (size_t)n;
		va_start(ap, format);
		n = vsnprintf(r->text, r->room, format, ap);
		va_end(ap);
		n = n < (int)r->room ? n : (int)r->room - 1;
		r->text += n;
		r->room -= (size_t)n;
	}
	r->bits |= UINT64_C(1) << reason;
}

static bool fits_head_dim(const struct kv_attention_caps *caps, int32_t dim)
{
	if ((caps->head_dim_max && dim > caps->head_dim_max) ||
	    (caps->head_dim_multiple && dim % caps->head_dim_multiple))
		return false;
	for (int i = 0; i < KV_ATTN_SIZES && caps->head_dims[i]; i++)
		if (caps->head_dims[i] == dim)
			return true;
	return !caps->head_dims[0];
}

static bool fits_block(const struct kv_attention_caps *caps, int32_t tokens)
{
	for (int i = 0; i < KV_ATTN_SIZES && caps->block_tokens[i]; i++)
		if (tokens % caps->block_tokens[i] == 0)
			return true;
	return !caps->block_tokens[0];
}

static bool fits_kv_dtype(const struct kv_attention_caps *caps, int32_t given, int32_t dtype)
{
	if (!given || !caps->kv_dtypes || (caps->kv_dtypes & 1 && given == dtype))
		return true;
	return caps->kv_dtypes >> given & 1;
}

/* "64, 128" */
static const char *list(const int32_t *sizes, char *text, size_t bytes)
{
	size_t n = 0;

	text[0] = 0;
	for (int i = 0; i < KV_ATTN_SIZES && sizes[i] && n < bytes; i++)
		n += (size_t)snprintf(text + n, bytes - n, "%s%d", i ? ", " : "", sizes[i]);
	return text;
}

static const char *dtypes(uint32_t bits, char *text, size_t bytes)
{
	static const char *const names[] = {"q's own", "f32",	"f16",	"bf16",
					    "e4m3",    "bytes", "e5m2"};
	size_t n = 0;

	text[0] = 0;
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]) && n < bytes; i++)
		if (bits >> i & 1)
			n += (size_t)snprintf(text + n, bytes - n, "%s%s", n ? ", " : "",
					      names[i]);
	return text;
}

static void check_sizes(const struct kv_attention_caps *c, const struct kv_attention_query *q,
			struct kv_refusals *r)
{
	char text[96];
	int32_t k = q->head_dim_k, v = q->head_dim_v ?: q->head_dim_k;

	if (k && (!fits_head_dim(c, k) || !fits_head_dim(c, v) || (c->same_head_dims && k != v)))
		kv_refuse(r, KV_ATTN_HEAD_DIM,
			  "k.head_dim, v.head_dim: %d, %d given, it does %s%s%s, up to %d, "
			  "multiples of %d",
			  k, v, c->same_head_dims ? "equal ones: " : "",
			  c->head_dims[0] ? list(c->head_dims, text, sizeof(text)) : "any", "",
			  c->head_dim_max ?: INT32_MAX, c->head_dim_multiple ?: 1);
	if (q->dtype && !(c->dtypes >> q->dtype & 1))
		kv_refuse(r, KV_ATTN_DTYPE, "dtype: %d given, it does %s", q->dtype,
			  dtypes(c->dtypes, text, sizeof(text)));
	if (!fits_kv_dtype(c, q->k_dtype, q->dtype) || !fits_kv_dtype(c, q->v_dtype, q->dtype) ||
	    (c->same_kv_dtypes && q->v_dtype && q->k_dtype != q->v_dtype))
		kv_refuse(r, KV_ATTN_KV_DTYPE, "k.dtype, v.dtype: %d, %d given, it does %s%s",
			  q->k_dtype, q->v_dtype, c->same_kv_dtypes ? "equal ones: " : "",
			  dtypes(c->kv_dtypes, text, sizeof(text)));
	if (q->block_tokens && !fits_block(c, q->block_tokens))
		kv_refuse(r, KV_ATTN_BLOCK_TOKENS,
			  "k.block_tokens: %d given, it does multiples of %s", q->block_tokens,
			  list(c->block_tokens, text, sizeof(text)));
}

static void check_device(const struct kv_attention_caps *c, const struct kv_attention_query *q,
			 struct kv_refusals *r)
{
	int32_t max = c->capability_max ?: INT32_MAX;

	if (q->capability && (q->capability < c->capability_min || q->capability > max))
		kv_refuse(r, KV_ATTN_CAPABILITY,
			  "device: compute capability %d.%d, it needs %d.%d or more%s",
			  q->capability / 10, q->capability % 10, c->capability_min / 10,
			  c->capability_min % 10,
			  c->capability_max ? ", and not as new a device" : "");
}

static void check_kind(const struct kv_attention_caps *c, const struct kv_attention_query *q,
		       struct kv_refusals *r)
{
	static const char *const names[] = {"decoder", "encoder", "encoder-only",
					    "encoder-decoder"};

	if (!(c->kinds >> q->kind & 1))
		kv_refuse(r, KV_ATTN_KIND, "kind: %s attention is not done", names[q->kind & 3]);
}

static void check_rest(const struct kv_attention_caps *c, const struct kv_attention_query *q,
		       struct kv_refusals *r)
{
	if (q->layout && c->layouts && !(c->layouts & q->layout))
		kv_refuse(r, KV_ATTN_LAYOUT,
			  "k, v: strides of [token][head] are not done, or those of [head][token], "
			  "or gaps between rows");
	if (c->max_query_rows && q->max_query_rows > c->max_query_rows &&
	    !(c->features & q->features & KV_ATTN_BIT(INVARIANT)))
		kv_refuse(r, KV_ATTN_QUERY_ROWS,
			  "max_query_len: %d rows given (queries times query heads of a KV head), "
			  "it does up to %d",
			  q->max_query_rows, c->max_query_rows);
}

void kv_attention_refuse(const struct kv_attention_caps *caps,
			 const struct kv_attention_query *query, struct kv_refusals *r)
{
	const uint64_t either = KV_ATTN_BIT(MLA) | KV_ATTN_BIT(SPARSE);
	uint64_t missing = query->features & ~caps->features;
	/* A table that has the reverse of a feature as well does both. */
	uint64_t unwanted = ~query->features & caps->features & ~(caps->features >> 1) & either;
	const uint64_t cp = KV_ATTN_BIT(MLA) | KV_ATTN_BIT(NON_CAUSAL) | KV_ATTN_BIT(DECODE_CP);

	missing &= ~(KV_ATTN_BIT(SHARED_PREFIX) | KV_ATTN_BIT(QUANTIZE) |
		     KV_ATTN_BIT(NON_CAUSAL_CP));
	missing |= unwanted << 1; /* the reverse of a feature is the next bit */
	if ((query->features & cp) == cp && !(caps->features & KV_ATTN_BIT(NON_CAUSAL_CP)))
		missing |= KV_ATTN_BIT(NON_CAUSAL_CP);
	check_sizes(caps, query, r);
	for (int i = KV_ATTN_BIDIRECTIONAL; i < KV_ATTN_REASONS; i++) {
		if (i == KV_ATTN_CAPABILITY)
			check_device(caps, query, r);
		else if (i == KV_ATTN_KIND)
			check_kind(caps, query, r);
		else if (missing >> i & 1)
			kv_refuse(r, i, "%s", reasons[i].text);
	}
	check_rest(caps, query, r);
}

KV_PUBLIC uint64_t kv_attention_compare(const struct kv_attention_caps *caps,
					const struct kv_attention_query *query, char *text,
					size_t text_bytes)
{
	struct kv_refusals r = {.text = text, .room = text_bytes};

	if (text && text_bytes)
		text[0] = 0;
	kv_attention_refuse(caps, query, &r);
	return r.bits;
}

KV_PUBLIC int32_t kv_attention_block_size(const struct kv_attention_caps *caps, int32_t wanted)
{
	int32_t least = caps->block_tokens[0];

	if (fits_block(caps, wanted))
		return wanted;
	for (int i = 1; i < KV_ATTN_SIZES && caps->block_tokens[i]; i++)
		if (caps->block_tokens[i] < least)
			least = caps->block_tokens[i];
	return least;
}

static uint32_t layout_of(const struct kv_view *view)
{
	int64_t row = kv_view_row_bytes(view);

	if (view->head_stride == row && view->token_stride >= row * view->n_heads)
		return KV_ATTN_NHD;
	if (view->token_stride == row && view->head_stride >= row * view->block_tokens)
		return KV_ATTN_HND;
	return KV_ATTN_STRIDED;
}

/* @a is resolved. */
void kv_attention_describe(const struct kv_attention_args *a, struct kv_attention_query *ret)
{
	int64_t rows = (int64_t)a->max_query_len * (a->n_heads_q / a->k.n_heads);
	uint32_t layout = layout_of(&a->k);
	uint64_t f = 0;

	f |= a->doc_ranges ? KV_ATTN_BIT(BIDIRECTIONAL) : 0;
	f |= a->latent_dim ? KV_ATTN_BIT(MLA) : 0;
	f |= a->sinks ? KV_ATTN_BIT(SINKS) : 0;
	f |= a->k_scales || a->v_scales ? KV_ATTN_BIT(HEAD_SCALES) : 0;
	f |= a->window_left >= 0 ? KV_ATTN_BIT(WINDOW) : 0;
	f |= !a->causal ? KV_ATTN_BIT(NON_CAUSAL) : 0;
	f |= a->invariant ? KV_ATTN_BIT(INVARIANT) : 0;
	f |= a->softcap > 0 ? KV_ATTN_BIT(SOFTCAP) : 0;
	f |= a->alibi_slopes ? KV_ATTN_BIT(ALIBI) : 0;
	f |= a->tree_mask ? KV_ATTN_BIT(TREE) : 0;
	f |= a->seq_causal ? KV_ATTN_BIT(SEQ_CAUSAL) : 0;
	f |= a->window_prefix_lens ? KV_ATTN_BIT(WINDOW_PREFIX) : 0;
	f |= a->window_right > 0 ? KV_ATTN_BIT(WINDOW_RIGHT) : 0;
	f |= a->k_row_scales.base ? KV_ATTN_BIT(ROW_SCALES) : 0;
	f |= a->cp_size > 1 ? KV_ATTN_BIT(DECODE_CP) : 0;
	f |= a->key_begin > 0 || a->key_end > 0 ? KV_ATTN_BIT(KEY_RANGE) : 0;
	f |= a->shared_prefix > 0 ? KV_ATTN_BIT(SHARED_PREFIX) : 0;
	f |= a->lse ? KV_ATTN_BIT(LSE) : 0;
	f |= a->lse && a->lse_with_sink ? KV_ATTN_BIT(LSE_WITH_SINK) : 0;
	f |= a->quantize ? KV_ATTN_BIT(QUANTIZE) : 0;
	f |= a->out_dtype != a->dtype ? KV_ATTN_BIT(OUT_DTYPE) : 0;
	if (a->q_token_stride != (int64_t)a->n_heads_q * kv_attention_dim(a) ||
	    a->out_token_stride != (int64_t)a->n_heads_q * a->v.head_dim ||
	    a->lse_token_stride != a->n_heads_q || a->lse_head_stride != 1)
		f |= KV_ATTN_BIT(STRIDES);
	*ret = (struct kv_attention_query){
		.size = sizeof(*ret),
		.features = f,
		.dtype = a->dtype,
		.k_dtype = a->k.dtype,
		.v_dtype = a->v.dtype,
		.head_dim_k = kv_attention_dim(a),
		.head_dim_v = a->v.head_dim,
		.block_tokens = a->k.block_tokens,
		.layout = layout == layout_of(&a->v) ? layout : KV_ATTN_STRIDED,
		.max_query_rows = rows < INT32_MAX ? (int32_t)rows : INT32_MAX,
	};
}

KV_PUBLIC int kv_attention_query_of(const struct kv_attention_args *args,
				    struct kv_attention_query *ret)
{
	struct kv_attention_args a;
	int r = kv_attention_resolve_sizes(args, &a);

	if (r < 0)
		return r;
	kv_attention_describe(&a, ret);
	return 0;
}
