#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints golden_weights.h: rows of every format as the Python package gguf widens them.

usage: golden_weights.py > golden_weights.h     (made with gguf 0.19.0)

Bytes are random, but every f16 is finite and its exponent one of a real file's.
"""
import gguf
import numpy

# Format, bytes of a block, offsets of its f16s
FORMATS = [
    ("BF16", 2, []), ("Q4_0", 18, [0]), ("Q4_1", 20, [0, 2]), ("Q5_0", 22, [0]), ("Q5_1", 24, [0, 2]),
    ("Q8_0", 34, [0]), ("Q4_K", 144, [0, 2]), ("Q5_K", 176, [0, 2]), ("Q6_K", 210, [208]),
]
N = 256


def lines(values, form, n):
    for i in range(0, len(values), n):
        print("\t\t " + ", ".join(form % v for v in values[i:i + n]) + ",")


def main():
    random = numpy.random.default_rng(6)
    print("/* SPDX-License-Identifier: Apache-2.0 */")
    print("/* Made by golden_weights.py: bytes of a row of 256, and the bits of the floats it stands for. */")
    print("#include \"tools/engine/weight.h\"\n")
    print("static const struct golden_weights {\n\tuint32_t type;\n\tuint8_t row[512];\n\tuint32_t bits[256];")
    print("} golden_weights[] = {")
    for name, size, halves in FORMATS:
        kind = gguf.GGMLQuantizationType[name]
        n_blocks = N // gguf.GGML_QUANT_SIZES[kind][0]
        row = random.integers(0, 256, (n_blocks, size), dtype=numpy.uint8)
        for at in halves:
            row[:, at:at + 2] = random.normal(0, 0.02, (n_blocks, 1)).astype(numpy.float16).view(numpy.uint8)
        if name == "BF16":
            row[:, :] = (random.normal(0, 0.02, n_blocks).astype(numpy.float32).view(numpy.uint32) >> 16) \
                .astype(numpy.uint16).view(numpy.uint8).reshape(n_blocks, 2)
        row = row.reshape(1, -1)
        floats = gguf.quants.dequantize(row, kind).astype(numpy.float32).reshape(-1)
        assert len(floats) == N
        print(f"\t{{KV_WEIGHT_{name},\n\t {{")
        lines(row[0].tolist(), "%d", 20)
        print("\t },\n\t {")
        lines(floats.view(numpy.uint32).tolist(), "0x%08x", 8)
        print("\t }},")
    print("};")


main()
