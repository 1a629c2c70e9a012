#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which folder includes which, held against the picture in README.md; and which file sees a library's headers.

	include  <-  alloc  <-  daemon, libclient  <-  tools        tests may use everything
	include  <-  kernels  <-  daemon, libclient                 kernels know neither alloc nor daemon

usage: includes.py
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAY = {
    "include": {"include"},
    "alloc": {"include", "alloc"},
    "kernels": {"include", "kernels"},
    "daemon": {"include", "alloc", "kernels", "daemon"},
    "libclient": {"include", "alloc", "kernels", "libclient"},
    "tools": {"include", "alloc", "kernels", "daemon", "libclient", "tools"},
}
# Configs to pools are a library of their own (kvarch), which kvcached --pool needs too.
ALSO = {("daemon/wish.c", "libclient/arch_pools.h")}
# Headers of what may be absent: the files that see them. All others do without.
ONLY = {
    r"jemalloc/": r"daemon/heap_jemalloc\.c$",
    r"liburing": r"daemon/loop_uring\.c$",
    r"zmq": r"daemon/events_zmq\.c$",
    r"cuda|nv|mma\b": r"\.cuh?$|cuda|kernels/attention_prefill\.h$",
    r"systemd/": r"daemon/service\.c$",
}


def includes(text):
    """[(as a path of the tree, header)]"""
    return [(quote == '"', name) for quote, name in re.findall(r'^\s*#\s*include\s+(["<])([^">]+)[">]', text, re.M)]


def check(file, text):
    """What is wrong in one file."""
    folder, wrong = file.split("/")[0], []
    for own, name in includes(text):
        if own:
            to = name.split("/")[0]
            if to not in MAY:
                wrong.append(f"{file} includes \"{name}\", which is no path from the root")
            elif to not in MAY[folder] and (file, name) not in ALSO:
                wrong.append(f"{file} includes \"{name}\"; {folder} may use {', '.join(sorted(MAY[folder]))}")
            continue
        if name.startswith("kvcached/") and not (ROOT / "include" / name).exists():
            wrong.append(f"{file} includes <{name}>, which is not there")
        wrong += [f"{file} includes <{name}>: only {where} may" for header, where in ONLY.items()
                  if re.match(header, name) and not re.search(where, file)]
    return wrong


def checks_itself():
    """What the check is for is found."""
    for file, text in (("alloc/a.c", '#include "daemon/log.h"'), ("kernels/a.cu", '#include "alloc/pool.h"'),
                       ("include/kvcached/a.h", '#include "alloc/pool.h"'), ("libclient/a.c", '#include "daemon/log.h"'),
                       ("daemon/a.c", '#  include "libclient/internal.h"'), ("daemon/a.c", '#include "log.h"'),
                       ("daemon/loop.c", "#include <liburing.h>"), ("daemon/a.c", "#include <cuda.h>"),
                       ("tools/a.c", '#include "tests/support/client.h"'), ("alloc/a.c", "#include <kvcached/none.h>")):
        assert check(file, text), (file, text)
    for file, text in (("daemon/a.c", '#include "alloc/pool.h"\n#include <kvcached/types.h>\n#include <stdio.h>'),
                       ("daemon/heap_jemalloc.c", "#include <jemalloc/jemalloc.h>"),
                       ("kernels/memory_cuda.c", "#include <cuda.h>"), ("daemon/wish.c", '#include "libclient/arch_pools.h"')):
        assert not check(file, text), (file, text)


def main():
    checks_itself()
    files = [p for folder in MAY for p in (ROOT / folder).rglob("*") if p.suffix in (".c", ".h", ".cu", ".cuh")]
    # Examples are compiled against what is installed, each by itself.
    files = [p for p in files if "examples" not in p.parts]
    wrong = [line for p in sorted(files) for line in check(str(p.relative_to(ROOT)), p.read_text())]
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"{len(files)} files")
    return bool(wrong or len(files) < 300)


if __name__ == "__main__":
    sys.exit(main())
