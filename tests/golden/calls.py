#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the tables of calls in README.md against the vectors and the library: every kind of vectors has its row, and
only those, and what a row names is exported.

usage: calls.py LIBKVCLIENT_MAP
"""
import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent


def main():
    exported = set(re.findall(r"\b(kv_\w+);", pathlib.Path(sys.argv[1]).read_text()))
    kinds = {v["fn"] for f in (HERE / "tokenspeed").glob("*.json") for v in json.loads(f.read_text())["vectors"]}
    for folder in ("golden/vllm", "client/golden", "alloc/golden"):
        kinds |= {f.stem for f in (HERE.parent / folder).glob("*.json")}
    wrong, named, n_calls = [], [], 0
    for line in (HERE / "README.md").read_text().splitlines():
        cells = line.strip("|").split(" | ")
        if not line.startswith("| `") or len(cells) != 3:
            continue
        named += re.findall(r"`(\w+)`", cells[0])
        calls = re.findall(r"`(kv_\w+)\(\)`|\b(kv_\w+)\(\)", cells[2])
        n_calls += len(calls)
        wrong += [f"{c}() isn't exported" for pair in calls for c in pair if c and c not in exported]
        if not calls and "none:" not in cells[2]:
            wrong.append(f"no call for {cells[0]}")
    wrong += [f"{k} has no row" for k in sorted(kinds - set(named))]
    wrong += [f"{k} is no kind of vector" for k in sorted(set(named) - kinds)]
    wrong += [f"{k} stands in two rows" for k in sorted(set(named)) if named.count(k) > 1]
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"{len(named)} kinds of vectors, {n_calls} calls")
    return bool(wrong or not n_calls)


if __name__ == "__main__":
    sys.exit(main())
