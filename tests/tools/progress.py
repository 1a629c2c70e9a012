#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""progress.py BUILD: long work shows how far it is on a terminal, wipes it away, and shows nothing elsewhere."""
import json, os, pty, re, select, subprocess, sys, tempfile, time

build = sys.argv[1]
trace = tempfile.NamedTemporaryFile("w", suffix=".jsonl")
for i in range(200):
    print(json.dumps({"timestamp": i, "input_length": 1024, "output_length": 1, "hash_ids": [0, i + 1]}), file=trace)
trace.flush()
command = [build + "/tools/bench/kvbench", "replay", trace.name, "--capacity", "500"]


def on_terminal(command):
    """What it writes to a terminal that is its stderr, and to a pipe that is its stdout."""
    ours, theirs = pty.openpty()
    p = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    seen, end = b"", time.monotonic() + 90
    while time.monotonic() < end:
        if not select.select([ours], [], [], 1)[0]:
            continue
        try:
            more = os.read(ours, 65536)
        except OSError:  # its last holder has closed it
            break
        if not more:
            break
        seen += more
    out = p.stdout.read()
    os.close(ours)
    assert p.wait(30) == 0, (seen, out)
    return seen, out


seen, out = on_terminal(command)
assert re.search(rb"\r\[[#.]{30}\] +\d+ %, \d+ of 200 requests\x1b\[K", seen), seen
assert seen.endswith(b"\r\x1b[K"), seen
assert b"of 200 requests" not in out and b"hit" in out, out

quiet = subprocess.run(command, capture_output=True, timeout=90)
assert quiet.returncode == 0 and b"\r" not in quiet.stderr + quiet.stdout, quiet

seen, out = on_terminal(command + ["--json"])
assert seen == b"" and json.loads(out)["served"] == 200, (seen, out)
