/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The answer in double precision, by the rules of include/kvcached/attention.h read word by word: one
 * query, one key at a time, with nothing of kernels/ in it.
 */
#include <math.h>
#include <stdlib.h>

#include "tests/kernels/number.h"
#include "tests/kernels/problem_answer.h"

int problem_parent(const struct problem_spec *spec, int b, int i)
{
	double x = number_random(77, (uint64_t)spec->names[b], (uint64_t)i, 0);

	if (i == 0)
		return -1;
	return spec->tree == 2 ? i - 1 : (int)((x + 1) / 2 * (i + 1)) - 1; /* -1: a root */
}

bool problem_tree_sees(const struct problem_spec *spec, int b, int i, int k)
{
	if (spec->tree == 3 && i % 3 == 1)
		return false;
	for (; i >= 0; i = problem_parent(spec, b, i))
		if (i == k)
			return true;
	return false;
}

int problem_depth(const struct problem_spec *spec, int b, int i)
{
	int n = 0;

	for (int k = 0; k < spec->q_lens[b]; k++)
		n += problem_tree_sees(spec, b, i, k);
	return n ? n - 1 : 0;
}

void problem_doc_range(const struct problem_spec *spec, int b, int i, int32_t range[2])
{
	int64_t p = spec->lens[b] - spec->q_lens[b] + i, doc = p / spec->docs;

	range[0] = range[1] = -1;
	if (doc % 3 == 1) /* every third stretch is a document, one in three of them of one token */
		range[0] = (int32_t)(doc * spec->docs);
	if (doc % 3 == 1)
		range[1] = (int32_t)(doc * spec->docs + (doc % 9 == 4 ? 0 : spec->docs - 1));
}

bool problem_is_local(const struct problem_spec *spec, int64_t j)
{
	return spec->cp_size < 2 || j / spec->cp_interleave % spec->cp_size == spec->cp_rank;
}

double problem_slope(const struct problem_spec *spec, int64_t h)
{
	return spec->alibi ? ldexp(1, -(int)(h % 8) - 1) : 0;
}

double problem_sink(int64_t h)
{
	static const double sinks[] = {20, -20, -INFINITY, 0.5, 3};

	return sinks[h % 5];
}

/* Position of key @j of sequence @b: a new token of a tree stands where its depth says. */
static int64_t key_position(const struct problem_spec *spec, int b, int64_t j)
{
	int64_t context = spec->lens[b] - spec->q_lens[b];

	return spec->tree && j >= context ? context + problem_depth(spec, b, (int)(j - context)) : j;
}

static bool sees(const struct problem_spec *spec, int b, int i, int64_t p, int64_t j)
{
	int64_t context = spec->lens[b] - spec->q_lens[b];
	bool causal = spec->seq_causal ? b % 2 == 0 : spec->causal;
	bool near = spec->window_left < 0 || p - key_position(spec, b, j) <= spec->window_left;
	bool visible;

	if (!problem_is_local(spec, j) || j < spec->key_begin || (spec->key_end && j >= spec->key_end))
		return false;
	if (spec->tree && j >= context)
		visible = problem_tree_sees(spec, b, i, (int)(j - context)) && near;
	else if (spec->tree)
		visible = near;
	else if (causal)
		visible = j <= p && (near || (spec->prefix && j < spec->prefix + 3 * b));
	else
		visible = (!spec->window_right || j <= p + spec->window_right) &&
			  (near || (spec->prefix && j < spec->prefix + 3 * b));
	if (spec->docs) {
		int32_t range[2];

		problem_doc_range(spec, b, i, range);
		if (range[0] < range[1] && j >= range[0] && j <= range[1])
			visible = visible || !spec->doc_clamped || near;
	}
	return visible;
}

/* What query @i sees, and how far each of those keys stands from it. */
struct sight {
	bool *sees;
	double *away;
	double *x; /* room for scores */
};

static void look(const struct problem *p, const struct problem_sequence *seq, int i,
		 struct sight *sight)
{
	int64_t context = seq->len - seq->q_len, pos = context + i;

	if (p->spec.tree)
		pos = context + problem_depth(&p->spec, seq->b, i);
	for (int64_t j = 0; j < seq->len; j++) {
		sight->sees[j] = sees(&p->spec, seq->b, i, pos, j);
		if (sight->sees[j])
			sight->away[j] = (double)(key_position(&p->spec, seq->b, j) - pos);
	}
}

/* Softmax over the keys that query @i sees, in head @h. */
static void answer_row(const struct problem *p, const struct problem_sequence *seq, int i, int64_t h,
		       const struct sight *sight)
{
	const struct problem_spec *spec = &p->spec;
	int64_t n = spec->n_heads_kv, h_kv = h / spec->group;
	const double *q = seq->q + (i * p->n_heads_q + h) * spec->dk;
	const double *k = seq->k + h_kv * spec->dk, *v = seq->v + h_kv * spec->dv;
	int64_t at = (seq->first_row + i) * p->n_heads_q + h;
	double *out = p->out + at * spec->dv, *x = sight->x;
	double scale = spec->sm_scale != 0 ? spec->sm_scale : 1 / sqrt(spec->dk);
	double m = -INFINITY, l = 0, sink = problem_sink(h);

	for (int64_t j = 0; j < seq->len; j++) {
		if (!sight->sees[j])
			continue;
		x[j] = 0;
		for (int d = 0; d < spec->dk; d++)
			x[j] += q[d] * k[j * n * spec->dk + d];
		x[j] *= scale;
		if (spec->softcap > 0)
			x[j] = spec->softcap * tanh(x[j] / spec->softcap);
		x[j] += problem_slope(spec, h) * sight->away[j];
		m = fmax(m, x[j]);
	}
	for (int64_t j = 0; j < seq->len; j++) {
		double e;

		if (!sight->sees[j])
			continue;
		e = exp(x[j] - m);
		l += e;
		for (int d = 0; d < spec->dv; d++)
			out[d] += e * v[j * n * spec->dv + d];
	}
	p->lse[at] = l > 0 ? m + log(l) : -INFINITY;
	if (spec->sinks && l > 0)
		l += exp(sink - m);
	for (int d = 0; d < spec->dv && l > 0; d++)
		out[d] /= l;
	if (spec->sinks && spec->lse_with_sink)
		p->lse[at] = l > 0 ? m + log(l) : sink;
}

void problem_answer(struct problem *p, const struct problem_sequence *seq)
{
	size_t room = (size_t)seq->len + 1;
	struct sight sight = {calloc(room, sizeof(bool)), calloc(room, sizeof(double)),
			      calloc(room, sizeof(double))};

	for (int i = 0; i < seq->q_len; i++) {
		look(p, seq, i, &sight);
		for (int64_t h = 0; h < p->n_heads_q; h++)
			answer_row(p, seq, i, h, &sight);
	}
	free(sight.sees);
	free(sight.away);
	free(sight.x);
}
