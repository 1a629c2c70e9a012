# SPDX-License-Identifier: Apache-2.0
"""The public headers as declarations for cffi: kvclient/_abi.py is made from them when the package is
built, so structs, functions and constants are those of this very version.

usage: build_abi.py INCLUDE_FOLDER OUTPUT.py
"""
import os
import re
import sys

from cffi import FFI

# What a DLPack tensor looks like, to hand one to Python as a capsule.
DLPACK = """
struct dl_managed {
	void *data;
	int32_t device_type, device_id, n_dims;
	uint8_t type_code, type_bits;
	uint16_t type_lanes;
	int64_t *shape, *strides;
	uint64_t byte_offset;
	void *context;
	void (*deleter)(struct dl_managed *);
};
void free(void *);
"""


def read(folder, name):
    with open(os.path.join(folder, "kvcached", name), encoding="ascii") as file:
        return file.read()


def declarations(folder):
    """What cffi's parser takes: no comments, no preprocessor, no inline functions."""
    texts, constants = [], []
    for name in re.findall(r"#include <kvcached/(\w+\.h)>", read(folder, "kvcached.h")):
        text = re.sub(r"/\*.*?\*/", "", read(folder, name), flags=re.S).replace("\\\n", " ")
        for macro, value in re.findall(r"^#define (KV_\w+)[ \t]+\(?(?:\(int64_t\))?(-?\w+?)u?\)?\s*$", text, re.M):
            if re.fullmatch(r"-?(0x)?[0-9a-fA-F]+", value):
                constants.append(f"#define {macro} {value}")
        text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.S)
        text = re.sub(r"^#.*$", "", text, flags=re.M)
        text = re.sub(r"static inline [^{]*\{.*?^\}", "", text, flags=re.S | re.M)
        texts.append(text)
    text = "\n".join(texts)
    # The lengths of arrays in structs are macros.
    for line in constants:
        _, macro, value = line.split()
        text = re.sub(rf"\[{macro}\]", f"[{value}]", text)
    return DLPACK + "\n".join(constants) + text


def generate(folder, output):
    ffi = FFI()
    ffi.cdef(declarations(folder))
    ffi.set_source("kvclient._abi", None)
    ffi.emit_python_code(output)


if __name__ == "__main__":
    generate(sys.argv[1], sys.argv[2])
