#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvctl top on a real terminal (a pty): what it shows, its keys, a daemon that goes and comes, how it ends;
and --watch.

usage: top.py BUILD_FOLDER
"""
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time

DEADLINE_S = 60
build = sys.argv[1]
folder = tempfile.mkdtemp(prefix="kvcached-test.")
path = os.path.join(folder, "kvcached.sock")
env = dict(os.environ, KVCACHED_SOCKET=path, TERM="xterm")
kvctl = f"{build}/tools/kvctl"
started = []


def start(*command, **options):
    process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], env=env, **options)
    started.append(process)
    return process


def start_daemon():
    loop = os.environ.get("KV_TEST_EVENT_LOOP")
    daemon = start(f"{build}/daemon/kvcached", "--host", "64M", "--socket", path,
                   *(["--event-loop", loop] if loop else []), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + DEADLINE_S
    while subprocess.run([kvctl, "ping"], env=env, capture_output=True).returncode:
        assert daemon.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return daemon


def holder(pool, n_tokens):
    process = start(f"{build}/tests/support/holder", pool, "0", str(n_tokens), stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("ready")
    return process


class Terminal:
    """24 x 80; `screen` is what stands on it, as far as top's few controls go."""

    def __init__(self, *words):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.process = start(kvctl, *words, stdin=slave, stdout=slave, stderr=slave)
        self.raw = ""

    def read(self, seconds=0.1):
        if select.select([self.master], [], [], seconds)[0]:
            self.raw += os.read(self.master, 65536).decode()

    @property
    def screen(self):
        frame = self.raw[:self.raw.rfind("\033[J")] if "\033[J" in self.raw else ""
        return re.sub(r"\033\[[0-9;?]*[A-Za-z]", "", frame[frame.rfind("\033[H"):]).replace("\r", "")

    def until(self, condition, what):
        deadline = time.monotonic() + DEADLINE_S
        while not condition(self.screen):
            assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}\n{self.screen}"
            self.read()

    def press(self, key):
        os.write(self.master, key.encode())


def in_order(*names):
    return lambda screen: all(name in screen for name in names) and [
        screen.index("\n" + name) for name in names] == sorted(screen.index("\n" + name) for name in names)


def main():
    daemon = start_daemon()
    holders = [holder("aaa", 100), holder("bbb", 400), holder("ccc", 200)]
    top = Terminal("--watch", "0.2", "top")
    top.until(lambda s: "aaa" in s and "TOK/S" in s and "host memory" in s, "its first screen")
    lines = top.screen.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80, lines
    top.press("n")
    top.until(lambda s: "by name" in s and in_order("aaa", "bbb", "ccc")(s), "ordered by name")
    top.press("c")
    top.until(lambda s: "by cached" in s and in_order("bbb", "ccc", "aaa")(s), "ordered by cached bytes")
    top.press("?")
    top.until(lambda s: "e evictions/s" in s, "help")
    top.press(" ")
    top.until(lambda s: "(paused)" in s, "paused")
    top.press(" ")
    top.until(lambda s: "(paused)" not in s, "going on")
    top.press("+")
    top.until(lambda s: "every 400" in s, "slower")
    top.press("-")
    # Tokens a second are seen while somebody asks.
    busy = [holder("aaa", 5000)]
    top.until(lambda s: re.search(r"^aaa .*% ", s, re.M), "a rate and a share of hits")
    for process in holders + busy:
        process.kill()
        process.wait()
    daemon.terminate()
    daemon.wait(DEADLINE_S)
    top.until(lambda s: "no daemon" in s, "a daemon that is gone")
    daemon = start_daemon()
    top.until(lambda s: "no daemon" not in s and "host memory" in s, "another daemon")
    top.press("q")
    deadline = time.monotonic() + DEADLINE_S
    while top.process.poll() is None:
        top.read()
        assert time.monotonic() < deadline, "q doesn't end it"
    assert top.process.returncode == 0
    top.read()
    assert top.raw.endswith("\033[?1049l"), "the old screen isn't back"
    assert termios.tcgetattr(top.slave) == top.before, "the terminal isn't as it was"

    # Not on a terminal: so many screens, without controls.
    out = subprocess.run([kvctl, "--watch", "0.1", "top", "2"], env=env, capture_output=True, text=True,
                         timeout=DEADLINE_S)
    assert out.returncode == 0 and out.stdout.count("kvcached 0.") == 2 and "\033" not in out.stdout
    for words, status in ((["top", "0"], 2), (["--json", "top"], 2), (["--watch", "0", "stats"], 2),
                          (["-s", path + "x", "top", "1"], 3)):
        assert subprocess.run([kvctl, *words], env=env, capture_output=True).returncode == status, words

    # --watch: one JSON value a line, until it is interrupted.
    watch = start(kvctl, "--json", "--watch", "0.1", "stats", stdout=subprocess.PIPE, text=True)
    uptimes = [json.loads(watch.stdout.readline())["daemon"]["uptime_ns"] for _ in range(3)]
    assert uptimes == sorted(set(uptimes))
    daemon.terminate()
    assert watch.wait(DEADLINE_S) == 3, "it ends with the daemon"


try:
    main()
finally:
    for process in started:
        process.kill()
        process.wait()
    subprocess.run(["rm", "-rf", folder], check=False)
