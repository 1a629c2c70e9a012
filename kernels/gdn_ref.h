/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of the reference: gdn_ref.c, mamba_ref.c, conv_ref.c. */
#ifndef KV_KERNELS_GDN_REF_H
#define KV_KERNELS_GDN_REF_H

#include "kernels/gdn.h"

/* ln(1 + e^x); x above 20 */
double kv_softplus(double x);

/* S of (row, head) to and from s[dim_v * dim_k]; what goes to a null row goes nowhere. */
void kv_state_load(const struct kv_view *state, int64_t row, int64_t head, double *s);
void kv_state_store(const struct kv_state_batch *batch, const struct kv_view *state, int32_t row,
		    int64_t head, const double *s);

/* One token of Mamba-2: s[head_dim][state_dim], out[head_dim] */
void kv_ssd_step_ref(const struct kv_recur *p, int64_t t, int64_t h, double *s, double *out);

int kv_conv1d_ref(const struct kv_conv1d_args *args);

#endif
