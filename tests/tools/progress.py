#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""progress.py BUILD: long work shows how far it is on a terminal, wipes it away, and shows nothing elsewhere."""
import json, os, pty, re, select, subprocess, sys, tempfile, time

build = sys.argv[1]
trace = tempfile.NamedTemporaryFile("w", suffix=".jsonl")
for i in range(200):
    print(json.dumps({"timestamp": i, "input_length": 1024, "output_length": 1, "hash_ids": [0, i + 1]}), file=trace)
trace.flush()
kvctl, kvbench = build + "/tools/kvctl", build + "/tools/bench/kvbench"
command = [kvbench, "replay", trace.name, "--capacity", "500"]


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

# Each benchmark that kvbench knows: what it counts, and what it needs to be short here.
SHORT = ["--shape", "8/2/64", "--batch", "1,2", "--context", "256"]
counts = {"attach": ("rounds",), "attention": ("cases", *SHORT), "colocate": ("requests", trace.name, "--capacity", "100"),
          "compact": None, "conv": ("cases",), "crowd": ("phases", "--engines", "1"), "dsa": ("cases",),
          "elastic": ("rounds",), "gdn": ("cases",), "lease": None, "mamba": ("cases",),
          "merge": ("cases", *SHORT), "metadata": ("batches",), "mla": ("cases",), "prefix": ("lengths",),
          "replay": None, "write": ("cases", *SHORT)}
told = subprocess.run([kvbench, "--help"], check=True, capture_output=True, text=True).stdout
named = re.findall(r"^  ([a-z]+)(?: .*)?\n      ", told, re.M)
assert sorted(named) == sorted(counts), (named, "a benchmark without a bar, or without a row here")
for name, row in counts.items():
    if not row:  # replay is above; the others have no short form
        continue
    seen, out = on_terminal([kvbench, name, "--device", "host", *row[1:]])
    assert re.search(rb"\r\[[#.]{30}\] +\d+ %, \d+ of \d+ " + row[0].encode() + rb"\x1b\[K", seen), (name, seen)
    assert seen.endswith(b"\r\x1b[K") and out and b"\r" not in out, (name, seen, out)

# On a daemon: what takes the worker's time, what goes on in the background, a page, benchmarks.
WIPED = b"\r\x1b[K"


def shows(command, bar, words):
    """On a terminal a bar, wiped away in the end; the answer on stdout, with nothing of the bar; nothing for JSON, or in a pipe."""
    seen, out = on_terminal(command)
    assert re.search(bar, seen) and seen.endswith(WIPED), (command, seen)
    assert words in out and b"\r" not in out, (command, out)
    seen, out = on_terminal(command + ["--json"])
    assert seen == b"" and json.loads(out), (command, seen, out)
    quiet = subprocess.run(command, capture_output=True, timeout=90)
    assert quiet.returncode == 0 and quiet.stderr == b"" and b"\r" not in quiet.stdout, quiet


with tempfile.TemporaryDirectory() as folder:
    socket = folder + "/kvcached.sock"
    ctl = [kvctl, "-t", "60", "-s", socket]
    daemon = subprocess.Popen([build + "/daemon/kvcached", "--host", "256M", "--socket", socket],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while subprocess.run(ctl + ["ping"], capture_output=True).returncode:
            assert daemon.poll() is None and time.monotonic() < end, "kvcached doesn't answer"
            time.sleep(0.05)
        engine = [build + "/tools/engine/kvengine", "--socket", socket, "--model", "tiny", "--device", "host",
                  "--prompt", "The harbour town of Merrow lies on a narrow bay.", "-n", "8"]
        subprocess.run(engine, check=True, capture_output=True, timeout=90)
        pools = json.loads(subprocess.run(ctl + ["--json", "pool", "list"], check=True, capture_output=True).stdout)
        pool = pools[0]["name"]
        shows(ctl + ["restart-worker"], rb"\r\[\.{30}\] +0 %, 0 of 1 workers replaced\x1b\[K", b"took over from")
        shows(ctl + ["report", folder + "/page.html"], rb"\r\[[#.]{30}\] +0 %, 0 of 1 pools drawn\x1b\[K", b"samples")
        shows([kvctl, "-s", socket, "bench", "prefix"], rb"\r\[[#.]{30}\] +\d+ %, \d+ of \d+ lengths\x1b\[K", b"LOOKUP")
        done = subprocess.run(ctl + ["pool", "compact", pool, "--wait", "--json"], check=True, capture_output=True)
        assert "compacted_bytes" in json.loads(done.stdout) and not done.stderr, done
        done = subprocess.run(ctl + ["pool", "compact", pool, "1G", "--wait"], check=True, capture_output=True)
        assert b"is over" in done.stdout and not done.stderr, done
        # Extents of 128 blocks, in turns leased to somebody who gives them back and filled with what stays cached.
        holders = []
        for i in range(8):
            for words in (["100", "0"], ["0", "448", str(i)]):
                holder = subprocess.Popen([build + "/tests/support/holder", "scattered", *words], stdin=subprocess.PIPE,
                                          stdout=subprocess.PIPE, env=os.environ | {"KVCACHED_SOCKET": socket})
                holders.append(holder)
                assert select.select([holder.stdout], [], [], 60)[0] and b"ready" in holder.stdout.readline()
        for holder in holders:
            holder.communicate(timeout=60)
            assert holder.returncode == 0
        seen, out = on_terminal(ctl + ["pool", "compact", "scattered", "1M", "--wait"])
        assert re.search(rb"\r\[[#.]{30}\] +[1-9]\d* %, [1-9]\d* of \d+ MiB of gaps closed\x1b\[K", seen), seen
        assert seen.endswith(WIPED) and b"is over" in out and b"\r" not in out, (seen, out)
        wrong = subprocess.run(ctl + ["pool", "compact", pool, "1G", "--wiat"], capture_output=True)
        assert wrong.returncode == 2 and b"--wiat" in wrong.stderr, wrong
    finally:
        daemon.terminate()
        assert daemon.wait(30) == 0
