#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the table of field cases, cases.md, against the tests: every case has its tests, they are there, they run, their
file says the case's number, and no test says a number that the table doesn't give it.

usage: cases.py
"""
import pathlib
import re
import sys

TESTS = pathlib.Path(__file__).resolve().parent
N_CASES = 40


def read_table(text):
    """{case: [(file, test)]}, and what is wrong with the table."""
    found, wrong = {}, []
    for line in text.splitlines():
        row = re.match(r"\| (D\d\d) \| (.+) \| (.+) \|$", line)
        if not row:
            if line.startswith("| D"):
                wrong.append(f"'{line[:40]}...' has no number, no text or no tests")
            continue
        if row[1] in found:
            wrong.append(f"{row[1]} stands in two rows")
        found[row[1]] = re.findall(r"`(\S+): (\w+)`", row[3])
        if not found[row[1]]:
            wrong.append(f"{row[1]} names no test")
    for number in range(1, N_CASES + 1):
        if f"D{number:02}" not in found:
            wrong.append(f"D{number:02} has no row")
    return found, wrong


def said(text):
    """Cases that a test's file says."""
    return {f"D{n}" for n in re.findall(r"\bD(\d\d)\b|\bd(\d\d)_", text) for n in n if n}


def check(table, sources):
    """What is wrong. sources: {file: text}"""
    wrong = []
    for case, tests in table.items():
        for file, test in tests:
            text = sources.get(file)
            if text is None:
                wrong.append(f"{case}: there is no {file}")
            elif not re.search(rf"^START_TEST\({test}\)$", text, re.M):
                wrong.append(f"{case}: {file} has no test '{test}'")
            elif not re.search(rf"tcase_add_(loop_)?test\(\s*\w+,\s*{test}\b", text):
                wrong.append(f"{case}: {file} doesn't run '{test}'")
            elif case not in said(text):
                wrong.append(f"{case}: {file} doesn't say so")
    for file, text in sources.items():
        for case in sorted(said(text)):
            if file not in [f for f, _ in table.get(case, [])]:
                wrong.append(f"{file} says {case}, and the table doesn't name it there")
    return wrong


def checks_itself():
    """What the check is for is found."""
    test = "/* D01. */\nSTART_TEST(a)\ntcase_add_test(t, a);\n"
    assert not check({"D01": [("f.c", "a")]}, {"f.c": test})
    for table, text in (({"D01": [("g.c", "a")]}, test), ({"D01": [("f.c", "b")]}, test), ({"D02": [("f.c", "a")]}, test),
                        ({"D01": [("f.c", "a")]}, test.replace("tcase", "")), ({}, test)):
        assert check(table, {"f.c": text}), (table, text)
    rows = "".join(f"| D{i:02} | asked | `f.c: a` |\n" for i in range(1, N_CASES + 1))
    assert not read_table(rows)[1]
    for text in (rows.replace("D07", "D08"), rows.replace("`f.c: a`", "-"), rows.replace(" asked ", "")):
        assert read_table(text)[1], text


def main():
    checks_itself()
    sources = {str(p.relative_to(TESTS)): p.read_text() for p in sorted(TESTS.glob("*/*.c"))}
    table, wrong = read_table((TESTS / "cases.md").read_text())
    wrong += check(table, sources)
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"{len(table)} cases, {sum(len(t) for t in table.values())} tests named")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
