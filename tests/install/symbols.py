#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The library's ABI: what libkvclient.so exports is what libkvclient.map lists, each under the version that
brought it; what is listed is declared in a public header and explained there, and the other way round; every
header is in the umbrella and on the library's page; the library needs nothing that a host program wouldn't want.

usage: symbols.py LIBRARY MAP INCLUDE_FOLDER MAN3 PAGE
"""
import importlib.util
import pathlib
import re
import subprocess
import sys

# Nothing that replaces malloc, brings threads of its own, or talks to anybody.
MAY_NEED = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libjansson.so.4",
            "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libgcc_s.so.1", "libstdc++.so.6"}
SANITIZERS = re.compile(r"lib(a|ub|t|l)san\.so")


def run(*args):
    return subprocess.run(args, check=True, stdout=subprocess.PIPE, text=True).stdout


def listed(path):
    """Names by version, as the map has them; the versions are symbols as well."""
    with open(path, encoding="ascii") as file:
        text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)
    names = {}
    for version, body in re.findall(r"(\w+\.\w+)\s*\{(.*?)\}", text, re.S):
        for name in re.findall(r"^\s*(\w+);", body.replace("local:", "").replace("global:", ""), re.M):
            assert name not in names, f"{name} is listed twice"
            names[name] = version
    assert re.search(r"local:\s*\*;", text), "the map doesn't hide the rest"
    return names


def main():
    library, map_path, include, man3_path, page = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("man3", man3_path)
    man3 = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode = True
    spec.loader.exec_module(man3)
    want, errors = listed(map_path), []

    exported = {}
    for line in run("nm", "-D", "--defined-only", "--with-symbol-versions", library).splitlines():
        _, kind, name = line.split(None, 2)
        name, _, version = name.replace("@@", "@").partition("@")
        if kind != "A":
            exported[name] = version
    for name in sorted(exported.keys() - want.keys()):
        errors.append(f"{name} is exported, and not in the map")
    for name in sorted(want.keys() - exported.keys()):
        errors.append(f"{name} is in the map, and the library has no such symbol")
    for name in sorted(want.keys() & exported.keys()):
        if want[name] != exported[name]:
            errors.append(f"{name} is exported as of {exported[name]}, listed under {want[name]}")
        if not name.startswith("kv_"):
            errors.append(f"{name}: public names begin with kv_")

    calls, _ = man3.read_headers(include)
    for name in sorted(want.keys() - calls.keys()):
        errors.append(f"{name} is exported, and no public header declares it")
    for name in sorted(calls.keys() - want.keys()):
        errors.append(f"{name} is declared in {calls[name].header}, and not exported")
    for call in calls.values():
        if not call.comment:
            errors.append(f"{call.name}: {call.header} has no comment that begins with its name")
        # Who can fail or answers says how, or names the call whose answers it has.
        elif re.match(r"(int|int64_t|ssize_t) ", call.prototype) and not re.search(
                r"Return:|\bas kv_\w+\(\)|[Ll]ikewise|\b0 or -E|\bhow many\b|-1: ", " ".join(call.comment)):
            errors.append(f"{call.name}: {call.header} doesn't say what it returns")

    with open(page, encoding="utf-8") as file:
        shown = set(re.findall(r"^\|  (\w+\.h)$", file.read(), re.M))
    with open(f"{include}/kvcached/kvcached.h", encoding="ascii") as file:
        included = set(re.findall(r"#include <kvcached/(\w+\.h)>", file.read()))
    headers = {path.name for path in pathlib.Path(include, "kvcached").glob("*.h")} - {"kvcached.h"}
    for name in sorted(headers - included):
        errors.append(f"{name} is not included by kvcached.h")
    for name in sorted(headers ^ shown):
        errors.append(f"{name} is a header that {page} doesn't show, or shows and isn't there")

    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", library))
    for name in needed:
        if name not in MAY_NEED and not SANITIZERS.match(name):
            errors.append(f"the library needs {name}")
    soname = re.findall(r"\(SONAME\).*\[(.*)\]", run("readelf", "-d", library))
    if soname != ["libkvclient.so.0"]:
        errors.append(f"its soname is {soname}")

    print(*errors, sep="\n")
    print(f"{len(exported)} symbols, {len(calls)} calls declared, needs {' '.join(needed)}")
    assert len(want) > 100 and len(calls) > 100, "the search is broken"
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
