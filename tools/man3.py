#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Man pages of the library's calls, from the comments of the public headers.

usage: man3.py INCLUDE_FOLDER VERSION OUTPUT_FOLDER
       man3.py INCLUDE_FOLDER                          names what has no comment of its own, if anything

A call's comment begins with its name: `kv_x() - what it does`, or `kv_x(), kv_y() - what they do`. Rows
`@name: text` are its arguments; what begins with `Return:` is what it returns.
"""
import os
import re
import sys


class Call:
    def __init__(self, name, header, prototype):
        self.name, self.header, self.prototype = name, header, prototype
        self.comment = None  # lines


def blank(text):
    return re.sub(r"[^\n]", " ", text)


def lines_of(comment):
    """The text of a comment, without its stars."""
    text = re.sub(r"^/\*\*?|\*/$", "", comment)
    return [re.sub(r"^\s*\*? ?", "", line) if i else line.strip()
            for i, line in enumerate(text.rstrip().split("\n"))]


def read_headers(folder):
    """All calls by name, and all structs with fields by name."""
    calls, structs = {}, {}
    for header in sorted(os.listdir(os.path.join(folder, "kvcached"))):
        with open(os.path.join(folder, "kvcached", header), encoding="ascii") as file:
            text = file.read()
        comments = re.findall(r"/\*.*?\*/", text, re.S)
        code = re.sub(r"/\*.*?\*/", lambda m: blank(m.group()), text, flags=re.S)
        code = re.sub(r"^#(?:.*\\\n)*.*$", lambda m: blank(m.group()), code, flags=re.M)
        for m in re.finditer(r"^struct (kv_\w+) \{.*?^\};", code, re.M | re.S):
            structs[m[1]] = text[m.start():m.end()]
        for m in re.finditer(r"^(?!static|typedef|struct \w+ \{)[a-z][\w *]*?\b(kv_\w+)\([^;{]*\);", code, re.M):
            calls[m[1]] = Call(m[1], header, re.sub(r"\s+", " ", m[0]))
        for comment in comments:
            lines = lines_of(comment)
            head = re.match(r"((?:kv_\w+\(\)(?:, )?)+) - ", " ".join(lines).strip())
            for name in re.findall(r"kv_\w+", head[1]) if head else ():
                if name in calls:
                    calls[name].comment = lines if lines[0].strip() else lines[1:]
    return calls, structs


def escape(text):
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("~", "\\(ti").replace("^", "\\(ha")
    return "\\&" + text if text[:1] in (".", "'") else text


def words(text):
    """Calls in bold, arguments in italics."""
    text = escape(text)
    text = re.sub(r"\b(kv_\w+)\(\)", r"\\fB\1\\fR()", text)
    return re.sub(r"@(\w+)", r"\\fI\1\\fR", text)


def preformatted(lines):
    return [".PP", ".nf", *(escape(line.expandtabs(8)) for line in lines), ".fi"]


def body(lines):
    """Paragraphs, arguments, and what a call returns: three lists of roff."""
    text, arguments, returned = [], [], []
    where = text
    for line in lines:
        row = re.match(r"@([\w*., @]+):\s*(.*)", line)
        if row:
            where = arguments
            where += [".TP", "\\fI" + escape(row[1].replace("@", "")) + "\\fR", words(row[2])]
        elif line.startswith("Return:"):
            where = returned
            where.append(words(line[len("Return:"):].strip()))
        elif not line.strip():
            where = text if where is arguments else where
            where.append(".PP")
        elif where is text and re.match(r"\t| {4}", line):
            text += [".nf", escape(line.expandtabs(8)), ".fi"]
        elif "Return:" in line:
            before, _, after = line.partition("Return:")
            where.append(words(before.strip()))
            where = returned
            where.append(words(after.strip()))
        else:
            where.append(words(line.strip()))
    for part in (text, returned):
        while part and part[-1] == ".PP":
            part.pop()
        while part and part[0] == ".PP":
            part.pop(0)
    return text, arguments, returned


def wrap(prototype, width=72):
    """A prototype in lines, broken behind commas."""
    out, indent = [""], " " * (prototype.index("(") + 1 if prototype.index("(") < 40 else 8)
    for part in re.split(r"(?<=, )", prototype):
        if len(out[-1]) + len(part.rstrip()) > width and out[-1]:
            out[-1] = out[-1].rstrip()
            out.append(indent)
        out[-1] += part
    return out


def page(call, group, structs, version):
    summary = re.sub(r"^(?:kv_\w+\(\)(?:, )?)+ - ", "", call.comment[0].strip())
    rest = call.comment[1:]
    one, dot, after = summary.partition(". ")
    if dot:
        summary, rest = one, ["", after, *rest]
    elif rest and rest[0].strip() and not rest[0].startswith(("@", "Return:")):
        # The sentence goes on in the next lines.
        while rest and rest[0].strip() and not rest[0].startswith(("@", "Return:")):
            summary += " " + rest.pop(0).strip()
        one, dot, after = summary.partition(". ")
        if dot:
            summary, rest = one, ["", *re.split(r"(?=Return:)", after), *rest]
    text, arguments, returned = body(rest)
    used = [name for name in dict.fromkeys(re.findall(r"struct (kv_\w+)", " ".join(c.prototype for c in group)))
            if name in structs]
    out = [f'.TH {call.name} 3 "" "kvcached {version}" "kvclient"', ".SH NAME",
           ", ".join(c.name for c in group) + " \\- " + escape(summary.rstrip(".").replace("@", "")), ".SH SYNOPSIS", ".nf",
           f"\\fB#include <kvcached/{call.header}>\\fR", ".PP"]
    for c in group:
        out += [escape(line) for line in wrap(c.prototype)]
    out += [".fi"]
    if text:
        out += [".SH DESCRIPTION", *text]
    if arguments:
        out += [".SH ARGUMENTS", *arguments]
    if returned:
        out += [".SH RETURN VALUE", *returned]
    if used:
        out += [".SH STRUCTURES"]
        for name in used:
            out += preformatted(structs[name].split("\n"))
    out += [".SH SEE ALSO", "\\fBkvclient\\fR(3), \\fI" + escape(f"kvcached/{call.header}") + "\\fR", ""]
    return "\n".join(out)


def main():
    calls, structs = read_headers(sys.argv[1])
    # A build goes on; tests/install/symbols.py fails.
    for call in calls.values():
        if not call.comment:
            print(f"{call.name}: {call.header} has no comment that begins with its name", file=sys.stderr)
            call.comment = [f"{call.name}() - see {call.header}"]
    if len(sys.argv) < 4:
        return
    for call in calls.values():
        group = [c for c in calls.values() if c.comment == call.comment]
        with open(os.path.join(sys.argv[3], call.name + ".3"), "w", encoding="ascii") as file:
            file.write(page(call, group, structs, sys.argv[2]))


if __name__ == "__main__":
    main()
