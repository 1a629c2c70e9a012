/* SPDX-License-Identifier: Apache-2.0 */
/* One token of Mamba-2, in double: the definition of right. */
#include "kernels/gdn_ref.h"

/* S = e^(-e^(a_log) dt) S + dt x B^T;  out = S C + D x */
void kv_ssd_step_ref(const struct kv_recur *p, int64_t t, int64_t h, double *s, double *out)
{
	int64_t g = h / (p->heads / p->heads_k), n = p->dim_k;
	double dt = (double)kv_element_load(p->a, t * p->a_stride + h, p->dtype);
	double decay;

	dt = kv_softplus(dt + (p->dt_bias ? (double)p->dt_bias[h] : 0));
	dt = fmin(fmax(dt, (double)p->dt_min), (double)p->dt_max);
	decay = exp(-exp((double)p->a_log[h]) * dt);
	for (int64_t i = 0; i < p->dim_v; i++) {
		double x =
			(double)kv_element_load(p->v, t * p->v_stride + h * p->dim_v + i, p->dtype);

		out[i] = p->d ? (double)p->d[h] * x : 0;
		for (int64_t j = 0; j < n; j++) {
			double b = (double)kv_element_load(p->k, t * p->k_stride + g * n + j,
							   p->dtype);
			double c = (double)kv_element_load(p->q, t * p->q_stride + g * n + j,
							   p->dtype);

			s[i * n + j] = decay * s[i * n + j] + dt * x * b;
			out[i] += s[i * n + j] * c;
		}
	}
}
