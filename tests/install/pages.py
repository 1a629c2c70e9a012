#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs what a page tells its reader to run, and holds what it prints against what the page shows.

usage: pages.py BUILD_FOLDER PAGE...
       pages.py --write BUILD_FOLDER PAGE...		puts what was printed into the pages

In a block that begins with ```console, lines behind "$ " are commands (a backslash at the end goes on), and the
others are what they print. All commands of a page run in one shell in an empty folder, with kvcached's programs in
its PATH. Numbers may differ from one machine to the next: all are taken for the same. Exit status 77: a program that
the page needs isn't here.
"""
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

DEADLINE_S = 120
SOURCE = os.path.realpath(os.path.join(os.path.dirname(__file__), "../.."))
MARK = "-- end of a command --"


def blocks(text):
    """(start, end) of the inside of each console block."""
    return [m.span(1) for m in re.finditer(r"^```console\n(.*?)^```$", text, re.M | re.S)]


def commands(block):
    """[(command, lines it prints)]"""
    found, lines = [], block.splitlines()
    while lines:
        line = lines.pop(0)
        if line.startswith("$ "):
            while line.endswith("\\"):
                line += "\n" + lines.pop(0)
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def same(text):
    """What is the same on all machines: no numbers, no units of them, no width of columns."""
    text = re.sub(r"\d[\d.]*( ?(ns|us|ms|s|min|h|B|[KMGT]iB|%)\b)?( \d+ (s|min|h)\b)?", "N", text)
    text = re.sub(r"\[[#+.]+\]", "[BAR]", text)
    text = re.sub(r"^event loop: .*", "event loop", text)
    return re.sub(r"\s+", " ", text).strip()


class Shell:
    def __init__(self, build, folder):
        path = [f"{build}/tools", f"{build}/tools/engine", f"{build}/tools/bench", f"{build}/daemon"]
        env = dict(os.environ, PATH=":".join([*path, os.environ["PATH"]]), LC_ALL="C.UTF-8", NO_COLOR="1",
                   PKG_CONFIG_PATH=f"{build}/meson-uninstalled", LD_LIBRARY_PATH=f"{build}/libclient",
                   PYTHONPATH=f"{folder}/.python",
                   KVCLIENT_LIBRARY=f"{build}/libclient/libkvclient.so.0", PYTHONDONTWRITEBYTECODE="1")
        for name in ("KVCACHED_SOCKET", "XDG_RUNTIME_DIR"):
            env.pop(name, None)
        shutil.copytree(f"{SOURCE}/libclient/python/kvclient", f"{folder}/.python/kvclient")
        shutil.copy(f"{build}/libclient/python/_abi.py", f"{folder}/.python/kvclient")
        for name in os.listdir(f"{SOURCE}/tools/examples"):
            shutil.copy(f"{SOURCE}/tools/examples/{name}", folder)
        self.folder = folder
        self.process = subprocess.Popen(["bash", "--norc"], cwd=folder, env=env, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        start_new_session=True)

    def run(self, command):
        if command.rstrip().endswith("&"):  # a daemon: what follows needs it
            command += "\nfor i in $(seq 300); do kvctl ping > /dev/null 2>&1 && break; sleep 0.1; done"
        self.process.stdin.write(f"{command}\nstatus=$?; echo; echo '{MARK}' $status\n")
        self.process.stdin.flush()
        lines = []
        for line in self.process.stdout:
            if line.startswith(MARK):
                if lines and not lines[-1]:
                    lines.pop()
                return lines, int(line[len(MARK):])
            lines.append(line.rstrip().replace(self.folder, "/tmp/demo"))
        sys.exit(f"the shell ended in: {command}\n" + "\n".join(lines))

    def end(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def run_page(build, page, write):
    with open(page, encoding="utf-8") as file:
        text = file.read()
    errors, out, at = 0, "", 0
    with tempfile.TemporaryDirectory(prefix="kvcached-page.") as folder:
        shell = Shell(build, folder)
        try:
            for start, end in blocks(text):
                out += text[at:start]
                at = end
                for command, want in commands(text[start:end]):
                    got, status = shell.run(command)
                    out += f"$ {command}\n" + "".join(line + "\n" for line in got)
                    if status or (not write and [same(w) for w in want] != [same(g) for g in got]):
                        errors += 1
                        print(f"{os.path.basename(page)}: $ {command}: exit status {status}; it shows",
                              *want, "and printed", *got, sep="\n")
        finally:
            shell.end()
    assert at, f"{page}: no command was found"
    if write and not errors:
        with open(page, "w", encoding="utf-8") as file:
            file.write(out + text[at:])
    return errors


def main():
    args = sys.argv[1:]
    write = args[0] == "--write"
    build, *pages = args[write:]
    if any(not shutil.which(name) for name in ("cc", "pkg-config", "bash")):
        sys.exit(77)
    # The Python that has numpy; tools/setup --python makes it.
    os.environ["PATH"] = os.path.join(SOURCE, ".venv/bin") + ":" + os.environ["PATH"]
    if subprocess.run(["python3", "-c", "import cffi, numpy"], stderr=subprocess.DEVNULL).returncode:
        sys.exit(77)
    signal.alarm(DEADLINE_S * len(pages))
    sys.exit(bool(sum(run_page(os.path.realpath(build), page, write) for page in pages)))


if __name__ == "__main__":
    main()
