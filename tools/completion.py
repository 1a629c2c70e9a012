#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""completion.py bash|zsh|fish PROGRAM: what makes a shell complete its words, from what it says with --help.

Of the help's lines these are read:

    "  -m, --model FILE|tiny|small  a GGUF file, ..."      an option, its value and what it is
    "  --user-clients N, --user-pools N"                   several; the words stand on the lines below
    "  lease"  and  "      take and give blocks, ..."      under Benchmarks: a first word that is no option

A value is one of some words if they stand in its name (FILE|tiny|small) or begin its text ("auto, vmm or ipc: how ...");
a file if its name has FILE or PATH; else the shell offers nothing for it.
"""
import os
import re
import subprocess
import sys
from typing import NamedTuple

OPTION = re.compile(r"(?:-(?P<short>\w), )?--(?P<name>[a-z][a-z0-9-]*)(?: (?P<value>[A-Z]\S*?|[a-z0-9]+(?:\|\w+)+))?"
                    r"(?: \*)?(?P<more>, (?=-)|(?= |$))")
REMARK = r"(?: \([^)]*\))?"  # "nhd (default)"
CHOICES = re.compile(rf"((?:[a-z][\w-]*{REMARK}, )*[a-z][\w-]*{REMARK},? or [a-z][\w-]*{REMARK})(?=[:;]|$)")


class Option(NamedTuple):
    short: str
    name: str
    value: str  # its name in the help; "": it takes none
    about: str
    choices: list
    files: bool


def options_of(help_):
    """A text goes on in the lines below that are indented more than the option."""
    found, lines = [], help_.splitlines()
    for i, line in enumerate(lines):
        rest, heads = line.strip(), []
        if not re.match(r" {2,6}-", line):
            continue
        while head := OPTION.match(rest):
            heads.append(head)
            rest = rest[head.end():]
            if not head["more"]:
                break
        if not heads:
            sys.exit(f"{line!r} isn't understood")
        indent = len(line) - len(line.lstrip())
        words = [rest.strip()] if rest.strip() else []
        for below in lines[i + 1:]:
            if len(below) - len(below.lstrip()) <= max(indent, 6) or below.lstrip().startswith("--"):
                break
            words.append(below.strip())
        text = " ".join(words)
        for head in heads:
            value = head["value"] or ""
            alternatives = value.split("|") if re.fullmatch(r"\w+(\|\w+)+", value) else []
            choices = [word for word in alternatives if not word.isupper()]
            if value and not choices and (listed := CHOICES.match(text)):
                choices = re.split(r",? or |, ", re.sub(REMARK, "", listed[1]))
            about = re.sub(r" \([^)]*$", "", text.split(";")[0])
            found.append(Option(head["short"] or "", head["name"], value, about, choices,
                                bool({"FILE", "PATH"} & {value, *alternatives})))
    return found


def words_of(help_):
    """[(word, what it is)] that may stand first; and whether files may come then."""
    part = help_.partition("Benchmarks:\n")[2].partition("\n\n")[0]
    return re.findall(r"^  ([a-z]+).*\n      (.*)$", part, re.M), "FILE" in part


def bash(program, options, words, files):
    lines = [f"_{program}()", "{", "\tlocal word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}",
             "\tCOMPREPLY=()", "\t# --option=value comes as three words", "\t[[ $word == = ]] && word=",
             "\t[[ $before == = ]] && before=${COMP_WORDS[COMP_CWORD - 2]}", "\tcase $before in"]
    unknown = []  # nothing is offered for their values
    for option in filter(lambda o: o.value, options):
        names = [f"-{option.short}"] * bool(option.short) + [f"--{option.name}"]
        if not option.choices and not option.files:
            unknown += names
            continue
        offer = [f'mapfile -t COMPREPLY < <(compgen -W "{" ".join(option.choices)}" -- "$word")'] * bool(option.choices)
        offer += ["compopt -o default 2> /dev/null"] * option.files
        lines += [f"\t{' | '.join(names)})"] + [f"\t\t{line}" for line in offer + ["return"]] + ["\t\t;;"]
    names = " ".join(f"--{option.name}" for option in options)
    lines += [f"\t{' | '.join(unknown)})", "\t\treturn", "\t\t;;"] if unknown else []
    lines += ["\tesac", "\tif [[ $word == -* ]]; then", f'\t\tmapfile -t COMPREPLY < <(compgen -W "{names}" -- "$word")']
    if words:
        firsts = " ".join(word for word, _ in words)
        lines += ["\telif ((COMP_CWORD == 1)); then", f'\t\tmapfile -t COMPREPLY < <(compgen -W "{firsts}" -- "$word")']
    if files:
        lines += ["\telse", "\t\tcompopt -o default 2> /dev/null"]
    return lines + ["\tfi", "}", f"complete -F _{program} {program}"]


def zsh(program, options, words, files):
    def quoted(text, special=r"[\[\]\\]"):
        return re.sub(f"({special})", r"\\\1", text).replace("'", "'\\''")

    lines = [f"#compdef {program}", f"_{program}()", "{", "\t_arguments -S \\"]
    for option in options:
        tail = ""
        if option.value:
            action = " "
            if option.choices and option.files:
                words_ = " ".join(option.choices)
                action = rf' _alternative "words\:word\:({words_})" "files\:file\:_files"'
            elif option.choices:
                action = f"({' '.join(option.choices)})"
            elif option.files:
                action = "_files"
            tail = f":{option.name}:{action}"
        sign = "=" if option.value else ""
        about = f"[{quoted(option.about)}]{tail}'"
        if option.short:
            lines.append(f"\t\t'*-{option.short}{'+' if option.value else ''}{about} \\")
        lines.append(f"\t\t'*--{option.name}{sign}{about} \\")
    if words:
        pairs = " ".join(word + r'\:"' + quoted(about, r'["$`\\]') + '"' for word, about in words)
        lines.append(f"\t\t'1:benchmark:(({pairs}))' \\")
    lines.append(f"\t\t'*:file:{'_files' if files else ' '}'")
    return lines + ["}", f'if [[ $funcstack[1] == _{program} ]]; then _{program} "$@"; else compdef _{program} {program}; fi']


def fish(program, options, words, files):
    def quoted(text):
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = [] if files else [f"complete -c {program} -f"]
    for option in options:
        words_ = f"complete -c {program}" + (f" -s {option.short}" if option.short else "") + f" -l {option.name}"
        if option.value:
            words_ += (" -r -F" if option.files else " -x")
            words_ += f" -a {quoted(' '.join(option.choices))}" if option.choices else ""
        lines.append(f"{words_} -d {quoted(option.about)}")
    for word, about in words:
        lines.append(f"complete -c {program} -n __fish_is_first_arg -f -a {word} -d {quoted(about)}")
    return lines


def main():
    shell, path = sys.argv[1:]
    help_ = subprocess.run([path, "--help"], check=True, capture_output=True, text=True, timeout=60).stdout
    options, (words, files) = options_of(help_), words_of(help_)
    lines = {"bash": bash, "zsh": zsh, "fish": fish}[shell](os.path.basename(path), options, words, files)
    print("\n".join(lines))


main()
