#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""words.py BUILD SOURCE: the words of kvctl, kvcached, kvbench and kvengine are the same in help, completion and man pages.

Each command, option, benchmark and probe of the one stands in the others, and nothing else does.
"""
import fcntl
import glob
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time

build, source = sys.argv[1:]
programs = {"kvctl": "tools/kvctl", "kvbench": "tools/bench/kvbench", "kvengine": "tools/engine/kvengine",
            "kvcached": "daemon/kvcached"}
# Of others, where a page speaks of them.
FOREIGN = {"kvctl": set(), "kvbench": set(), "kvengine": {"--host"}, "kvcached": {"--budget", "--model", "--json"}}
wrong = []
os.environ["PATH"] = f"{build}/tools:{os.environ['PATH']}"  # shells ask kvctl itself


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def page(name):
    where = "daemon/kvcached.8.scd" if name == "kvcached" else f"tools/{name}.1.scd"
    with open(f"{source}/{where}", encoding="utf-8") as file:
        return file.read()


def options_in(text):
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text))


def same(what, one, other):
    for word in sorted(set(one) - set(other)):
        wrong.append(f"{what[0]} has {word}, {what[1]} hasn't")
    for word in sorted(set(other) - set(one)):
        wrong.append(f"{what[1]} has {word}, {what[0]} hasn't")


def offered(*words):
    lines = output(kvctl, "completion", "words", *words).splitlines()
    return {line.split("\t")[0] for line in lines if not line.startswith(":")}


def completed(shell, program, *words):
    """What a real shell offers for the last of the words, by the script that is installed; zsh also says its text."""
    script = f"{build}/tools/" + (f"_{program}" if shell == "zsh" else f"{program}.{shell}")
    if shell == "bash":
        run = ('. "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); compopt() { echo :files; }; '
               f'_{program}; printf "%s\\n" "${{COMPREPLY[@]}}"')
        text = output("bash", "--norc", "-c", run, "bash", script, program, *words)
    elif shell == "fish":
        text = output("fish", "-N", "-c", 'source $argv[1]; complete -C "$argv[2..]"', script, program, *words)
        text = "\n".join(line.split("\t")[0] for line in text.splitlines())
    else:
        text = typed_in_zsh(script, " ".join([program, *words]))
    return set(filter(None, text.splitlines()))


def typed_in_zsh(script, line):
    """zsh completes at a terminal alone: one of 400 x 200."""
    pid, terminal = pty.fork()
    if not pid:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 200, 400, 0, 0))
        os.environ.update(TERM="dumb")
        os.execvp("zsh", ["zsh", "-f", "-i"])
    seen = ""

    def until(word):
        nonlocal seen
        end = time.monotonic() + 60
        while word not in seen:
            assert select.select([terminal], [], [], max(0, end - time.monotonic()))[0], f"zsh: no {word!r} in {seen!r}"
            seen += os.read(terminal, 65536).decode()
        before, _, seen = seen.partition(word)
        return before

    os.write(terminal, f"unset zle_bracketed_paste; unsetopt prompt_sp; PS1='>''>> ' LISTMAX=10000; autoload -U compinit; compinit -u -D; . '{script}'; "
             "zstyle ':completion:*' list-separator '##'; \n".encode())
    until(">>> ")
    os.write(terminal, line.encode() + b"\x04\x15echo 'o''ver'\n")  # ^D lists, ^U deletes the line
    text = until("over\r\n").rpartition("echo ")[0]
    os.close(terminal)
    os.waitpid(pid, 0)
    listed = [line.split("##")[0] for line in text.splitlines()[1:] if ">>> " not in line]
    return "\n".join(word.split(" ")[0] for line in listed for word in re.split(r"  +", line))


kvctl = f"{build}/{programs['kvctl']}"
help_of = {name: output(f"{build}/{path}", "--help") for name, path in programs.items()}
pages = {name: page(name) for name in programs}

# kvctl's commands: "  pool set NAME ...  words", "  stats  words"
rows = re.findall(r"^  ([a-z][a-z-]*)((?: [a-z][a-z-]*(?= |$))?)", help_of["kvctl"].split("Options:")[0], re.M)
objects = {}
for first, second in rows:
    objects.setdefault(first, set()).add(second.strip())
# A row without a command has its words behind two blanks: "  stats              the daemon, ..."
objects = {o: {c for c in commands if re.search(rf"^  {o} {c}(?: |$)", help_of["kvctl"], re.M)} for o, commands in objects.items()}
objects = {o: commands - {""} for o, commands in objects.items()}
assert len(objects) >= 14 and {"show", "set"} <= objects["pool"] and not objects["stats"], objects
commands = [[o, c] for o in objects for c in objects[o]] + [[o] for o in objects if not objects[o]]
same(("kvctl --help", "completion"), objects, offered(""))
own = {}
everywhere = options_in(help_of["kvctl"].split("Options:")[1])
for words in commands:
    name = " ".join(words)
    if len(words) == 2:
        same((f"kvctl {words[0]} in the help", "completion"), objects[words[0]], offered(words[0], ""))
    shown = output(kvctl, *words, "--help")
    rows = re.findall(r"^  [a-z].*\n((?:      --.*\n)*)", shown.split("Commands:")[1].split("\nOptions:")[0], re.M)
    lines = re.split(r"^(?=  [a-z])", shown.split("Commands:\n")[1].split("\nOptions:")[0], flags=re.M)
    mine = [line for line in lines if re.match(rf"  {name}(?: |$)", line, re.M)]
    assert len(mine) == 1, (name, lines)
    own[name] = options_in("\n".join(mine[0].splitlines()[1:]))
    extra = options_in(help_of["kvbench"]) if name == "bench" else set()
    same((f"kvctl {name} --help", f"completion behind kvctl {name}"), own[name] | everywhere | extra, offered(*words, "--"))

# Its page: SYNOPSIS has a line for each command, COMMANDS a paragraph, and the options of it stand in there.
text = pages["kvctl"]
synopsis, described = text.split("# SYNOPSIS")[1].split("# DESCRIPTION")[0], text.split("# COMMANDS")[1].split("\n# ")[0]
in_synopsis = {m.group(1) for m in re.finditer(r"^\*kvctl\* (?:\[_OPTION_...\] )?\*([a-z -]+)\*", synopsis, re.M)}
same(("kvctl --help", "its SYNOPSIS"), {" ".join(words) for words in commands}, in_synopsis)
parts = re.split(r"^(?=\*)", described, flags=re.M)[1:]
in_commands = {re.match(r"\*([a-z -]+)\*", part).group(1): part for part in parts}
same(("kvctl --help", "its COMMANDS"), {" ".join(words) for words in commands}, in_commands)
for name, options in own.items():
    lines = [line for line in synopsis.splitlines() if f"*{name}*" in line]
    missing = options - options_in(" ".join(lines) + in_commands.get(name, ""))
    wrong += [f"kvctl {name} has {o}, its man page hasn't" for o in missing]
same(("kvctl --help", "its man page"), everywhere | set().union(*own.values()),
     options_in(text) - FOREIGN["kvctl"] | everywhere)

for name in ("kvbench", "kvengine", "kvcached"):
    same((f"{name} --help", "its man page"), options_in(help_of[name]), options_in(pages[name]) - FOREIGN[name])
    for option in options_in(help_of[name]):
        if not re.search(rf"\*{option}\*", pages[name]):
            wrong.append(f"{name}(1) doesn't explain {option}")

# Benchmarks and probes.
benchmarks = re.findall(r"^  ([a-z]+)(?: .*)?\n      ", help_of["kvbench"].split("Options:")[0], re.M)
assert len(benchmarks) >= 15
bench = pages["kvbench"]
lines = re.findall(r"^\*kvbench\* (.*)", bench.split("# DESCRIPTION")[0], re.M)
in_synopsis = [word for line in lines for word in re.findall(r"\*([a-z]+)\*", line.split(" [")[0].split(" _")[0])]
same(("kvbench --help", "its SYNOPSIS"), benchmarks, in_synopsis)
in_page = {word for line in re.findall(r"^\*[a-z]+\*.*", bench.split("# BENCHMARKS")[-1].split("# OPTIONS")[0], re.M)
           for word in re.findall(r"\*([a-z]+)\*", line)}
same(("kvbench --help", "its man page"), benchmarks, in_page - {"kvbench"})
same(("kvbench --help", "completion of kvctl bench"), benchmarks, offered("bench", ""))
probes = re.findall(r"^  ([a-z_-]+) ", output(kvctl, "doctor", "help"), re.M)
assert len(probes) >= 10
same(("kvctl doctor help", "completion"), probes, offered("doctor", ""))

# What shells complete of the others, in each shell that is here.
VALUES = {"kvcached": {"--event-loop": {"auto", "io_uring", "epoll"}, "--export": {"auto", "vmm", "ipc"}, "--host": set(),
                       "--policy": {"worth", "lru"}, "--log-level": {"debug", "info", "warn", "error"}, "--user-pools": set()},
          "kvbench": {"--dtype": {"f32", "f16", "bf16", "e4m3", "e5m2"}, "--device": {"host", "cuda"}, "--batch": set(),
                      "--layout": {"nhd", "hnd", "nhd-flat", "hnd-flat"}},
          "kvengine": {"--device": {"host", "cuda"}, "--kv-dtype": {"f32", "f16", "bf16"}, "-t": set()}}
FILES = {"kvcached": {"--socket", "--access"}, "kvbench": {"--peers", "-s"}, "kvengine": {"-m", "--prompt-file", "--logits"}}
for shell in ("bash", "zsh", "fish"):
    if not shutil.which(shell):
        print(f"no {shell} here: its completion is left out")
        continue
    same(("kvctl --help", f"its completion by {shell}"), objects, completed(shell, "kvctl", ""))
    same(("kvctl pool in the help", f"its completion by {shell}"), objects["pool"], completed(shell, "kvctl", "pool", ""))
    for name, values in VALUES.items():
        same((f"{name} --help", f"its completion by {shell}"), options_in(help_of[name]), completed(shell, name, "--"))
        firsts = set(benchmarks) if name == "kvbench" else set()
        same((f"{name} --help", f"first words by {shell}"), firsts, completed(shell, name, ""))
        for option, words in values.items():
            same((f"{name} {option} in the help", f"its completion by {shell}"), words, completed(shell, name, option, ""))
        for option in FILES[name]:
            offer = completed(shell, name, option, "" if shell == "bash" else f"{source}/meson.b")
            if not any(":files" in word or word.endswith("meson.build") for word in offer):
                wrong.append(f"{shell} offers no files behind {name} {option}, but {offer}")
    same((f"{shell}: kvengine --model", "its completion"), {"tiny"}, completed(shell, "kvengine", "--model", "ti") - {":files"})
    same((f"{shell}: kvcached --policy", "its completion"), {"lru"}, completed(shell, "kvcached", "--policy", "l"))
    if shell == "bash":
        same(("kvcached --policy=", "its completion"), {"lru"}, completed(shell, "kvcached", "--policy", "=", "l"))
        same(("kvcached --policy=", "its completion"), {"lru", "worth"}, completed(shell, "kvcached", "--policy", "="))

# Headings of tables: in the page's tables, or a paragraph of READING THE SCREEN.
headings = set()
for path in sorted(glob.glob(f"{source}/tools/cmd_*.c")):
    with open(path, encoding="utf-8") as file:
        for head in re.findall(r"kv_emit_head\((.*?)\);", file.read(), re.S):
            headings |= {heading[1:] for heading in re.findall(r'"([<>][^"]+)"', head)}
assert len(headings) > 50, headings
explained = set(re.findall(r"^_([A-Z]+)_$", text, re.M))
columns = text.split("# COLUMNS OF TOP")[1].split("# FIELDS")[0]
for row in re.findall(r"^\|  (.*)", columns, re.M):
    explained |= {row} if row in headings else set(row.split(", "))
same(("a table of kvctl", "its man page"), headings - {"FIELD", "MEANING"}, explained)

for line in wrong:
    print(line)
sys.exit(bool(wrong))
