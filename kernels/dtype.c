/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/dtype.h"

/* (8 + m) 2^(e - 10), and steps of 2^-9 for e = 0 */
#define CODE(e, m) ((e) ? (8.0f + (m)) * (float)(1u << (e)) / 1024 : (m) / 512.0f)
#define EIGHT(s, e)                                                                         \
	s CODE(e, 0), s CODE(e, 1), s CODE(e, 2), s CODE(e, 3), s CODE(e, 4), s CODE(e, 5), \
		s CODE(e, 6)
#define ROW(s, e) EIGHT(s, e), s CODE(e, 7)
#define ROWS(s)                                                                                   \
	ROW(s, 0), ROW(s, 1), ROW(s, 2), ROW(s, 3), ROW(s, 4), ROW(s, 5), ROW(s, 6), ROW(s, 7),   \
		ROW(s, 8), ROW(s, 9), ROW(s, 10), ROW(s, 11), ROW(s, 12), ROW(s, 13), ROW(s, 14), \
		EIGHT(s, 15), s __builtin_nanf("")

const float kv_e4m3_values[256] = {ROWS(+), ROWS(-)};
