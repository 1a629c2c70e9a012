#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A router's view of a daemon's events, by a real ZMQ subscriber: what is stored, removed and cleared, in
which order, in both encodings; several pools of an engine; memory that becomes another block's; replay; who comes
late; a worker's death; subscribers that don't read; consumers that pass over AllBlocksCleared.

usage: events_consumer.py BUILD_FOLDER ENCODING       exit 77 where zmq or msgpack are missing
"""
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

try:
    import msgpack
    import zmq
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

DEADLINE_S = 60
STORED = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
          "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"]
REMOVED = ["block_hashes", "medium", "group_idx"]
build, encoding = sys.argv[1:]
folder = tempfile.mkdtemp(prefix="kvcached-test.")
path = os.path.join(folder, "kvcached.sock")
env = dict(os.environ, KVCACHED_SOCKET=path)
started = []


def start(*command, **options):
    process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], env=env, **options)
    started.append(process)
    return process


def kvctl(*words):
    return subprocess.run([f"{build}/tools/kvctl", *words], env=env, capture_output=True, text=True,
                          timeout=DEADLINE_S)


def holder(pool, n_tokens, *salt, rank=None):
    words = [] if rank is None else ["env", f"HOLDER_NAME=holder/{rank}"]
    process = start(*words, f"{build}/tests/support/holder", pool, "0", str(n_tokens), *salt, stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("ready")
    return process


def end(process):
    process.stdin.close()
    assert process.wait(DEADLINE_S) == 0


def free_ports(n):
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    return [s.getsockname()[1] for s in held]


def tokens_of(n):
    return [i * 7 % 1000 for i in range(n)]


def decode(payload):
    """[(type, fields)] and the rank: each form of event is read as its consumers do."""
    batch = msgpack.unpackb(payload)
    assert isinstance(batch, list) and len(batch) == 3, batch
    assert abs(batch[0] - time.time()) < 600, batch[0]
    events = []
    for event in batch[1]:
        if encoding == "current":
            assert isinstance(event, dict), event
            fields = dict(event)
            events.append((fields.pop("type"), fields))
        else:
            assert isinstance(event, list), event
            names = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": []}[event[0]]
            assert len(event) == len(names) + 1, event
            events.append((event[0], dict(zip(names, event[1:]))))
    return events, batch[2]


class Router:
    """The blocks of one stream, as a router keeps them."""

    def __init__(self, context, port, topic, late=False):
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic)
        self.socket.setsockopt(zmq.RCVTIMEO, 200)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.topic, self.next, self.rank = topic, None if late else 0, None
        self.lost = late  # what was told before is not known: what is taken back may be unknown
        self.blocks, self.seen, self.raw = {}, [], []
        self.n_removed, self.most = 0, 0

    def take(self):
        topic, number, payload = self.socket.recv_multipart()
        assert topic == self.topic and len(topic.split(b"@")) == 3, topic
        number = struct.unpack(">Q", number)[0]
        if self.next is None or number < self.next:  # another publisher: what it sent before is missing
            self.next, self.lost = number, True
        assert number == self.next, f"sequence {number}, expected {self.next}"
        self.next += 1
        self.raw.append((number, payload))
        events, self.rank = decode(payload)
        for kind, fields in events:
            self.seen.append(kind)
            self.apply(kind, fields)
        self.most = max(self.most, len(self.blocks))

    def clear(self):
        left = {k: v for k, v in self.blocks.items() if k[0] != self.rank}  # the other ranks' stay
        assert self.lost or left == self.blocks, "what is stored is removed by name before all is cleared"
        self.blocks, self.lost = left, False

    def apply(self, kind, fields):
        if kind == "AllBlocksCleared":
            self.clear()
            return
        hashes, group = fields["block_hashes"], fields["group_idx"]
        assert fields["medium"].lower() == "cpu" and group in (0, 1)
        assert all(isinstance(h, int) and 0 <= h < 1 << 64 for h in hashes)
        if kind == "BlockRemoved":
            self.n_removed += len(hashes)
            for hash_ in hashes:
                assert self.blocks.pop((self.rank, group, hash_), None) is not None or self.lost, "removed, but never stored"
            return
        size, tokens = fields["block_size"], fields["token_ids"]
        assert size == 16 and len(tokens) == size * len(hashes)
        assert fields["kv_cache_spec_kind"] == "full_attention"
        parent = fields["parent_block_hash"]
        before = [] if parent is None else self.blocks[self.rank, group, parent]  # a parent is stored before its child
        for i, hash_ in enumerate(hashes):
            assert (self.rank, group, hash_) not in self.blocks or self.lost
            before = before + tokens[i * size:(i + 1) * size]
            self.blocks[self.rank, group, hash_] = before

    def until(self, condition, what):
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}; {self.seen}"
            try:
                self.take()
            except zmq.Again:
                pass

    def has(self, n_tokens, group=0, rank=0):
        """Exactly the blocks of the holders' prompt."""
        wanted = [tokens_of(16 * (i + 1)) for i in range(n_tokens // 16)]
        found = (tokens for (r, g, _), tokens in self.blocks.items() if (r, g) == (rank, group))
        return sorted(found, key=len) == wanted


class PassesOver(Router):
    """One that knows no AllBlocksCleared."""

    def clear(self):
        self.lost = False


def replay(context, port, start_at, topic):
    asker = context.socket(zmq.DEALER)
    asker.setsockopt(zmq.RCVTIMEO, DEADLINE_S * 1000)
    asker.setsockopt(zmq.LINGER, 0)
    asker.connect(f"tcp://127.0.0.1:{port}")
    asker.send_multipart([b"", struct.pack(">Q", start_at)] + ([topic] if topic else []))
    found = []
    while True:
        empty, number, payload = asker.recv_multipart()
        assert empty == b""
        if number == b"\xff" * 8:
            assert payload == b""
            return found
        found.append((struct.unpack(">Q", number)[0], payload))


def main():
    port, again = free_ports(2)
    loop = os.environ.get("KV_TEST_EVENT_LOOP")
    with open(os.path.join(folder, "log"), "w") as log:
        start(f"{build}/daemon/kvcached", "--host", "64M", "--socket", path, "--events",
              f"tcp://127.0.0.1:{port},replay=tcp://127.0.0.1:{again},encoding={encoding}",
              *(["--event-loop", loop] if loop else []), stderr=log)
    deadline = time.monotonic() + DEADLINE_S
    while kvctl("ping").returncode:
        if "without libzmq" in open(os.path.join(folder, "log")).read():
            print("skipped: built without libzmq")
            sys.exit(77)
        assert time.monotonic() < deadline, open(os.path.join(folder, "log")).read()
        time.sleep(0.05)

    context = zmq.Context()
    router = Router(context, port, b"kv@holder@holder")
    passes_over = PassesOver(context, port, b"kv@holder@holder")
    lazy = context.socket(zmq.SUB)  # never reads
    lazy.setsockopt(zmq.RCVHWM, 1)
    lazy.setsockopt(zmq.SUBSCRIBE, b"")
    lazy.connect(f"tcp://127.0.0.1:{port}")
    time.sleep(0.5)  # a subscription takes a moment, and nothing says when it is there

    print("what is published is stored, once, and ends with its engine")
    first = holder("pool", 100)
    router.until(lambda: router.has(96), "six blocks")
    assert router.seen[0] == "AllBlocksCleared" and router.rank == 0
    second = holder("pool", 100)
    third = holder("pool", 200)
    router.until(lambda: router.has(192), "twelve blocks")
    assert router.seen.count("AllBlocksCleared") == 1
    for process in (first, second, third):
        assert router.blocks
        end(process)
    router.until(lambda: not router.blocks, "nothing when the engine has gone")
    passes_over.until(lambda: passes_over.next == router.next, "the same messages")
    assert not passes_over.blocks

    print("an engine that comes later is told of all that is there")
    fourth = holder("pool", 17)
    router.until(lambda: router.has(192), "the twelve blocks again")

    print("what is dropped is removed, what is held stays")
    assert kvctl("pool", "drop", "pool").returncode == 0
    router.until(lambda: router.has(16), "one block that is held")
    assert router.n_removed == 12 + 11

    print("who comes late has the whole picture, and nobody else another one")
    late = Router(context, port, b"kv@holder@holder", late=True)
    late.until(lambda: late.seen.count("AllBlocksCleared") and late.has(16), "one block")
    for consumer in (router, passes_over):
        consumer.until(lambda: consumer.next == late.next, "what the late one was told")
        assert consumer.has(16)

    print("two pools of an engine are two groups of one sequence")
    other = holder("other", 50)
    router.until(lambda: router.has(48, 1), "three blocks of the other pool")
    assert router.has(16)
    cleared = router.seen.count("AllBlocksCleared")
    end(other)
    router.until(lambda: router.has(0, 1), "the other pool's blocks removed")
    assert router.has(16) and router.seen.count("AllBlocksCleared") == cleared

    print("ranks of an engine share its topic and its sequence, and each has its own blocks")
    second = holder("pool", 16, rank=1)
    router.until(lambda: router.has(16, rank=1), "the block, also of rank 1")
    assert router.has(16)
    end(second)
    router.until(lambda: router.has(0, rank=1), "nothing of rank 1")
    assert router.has(16)

    print("replay gives the same bytes again")
    assert replay(context, again, 0, b"kv@holder@holder") == router.raw
    assert replay(context, again, 2, None) == router.raw[2:]
    assert replay(context, again, 10 ** 9, b"") == []
    assert replay(context, again, 0, b"kv@nobody@holder") == []

    print("another worker begins anew with all that is cached")
    worker = None
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{pid}/cmdline").read().split("\0")
        except OSError:
            continue
        if "--worker" in words and path in words:
            worker = int(pid)
    os.kill(worker, signal.SIGKILL)
    before = router.seen.count("AllBlocksCleared")
    router.until(lambda: router.seen.count("AllBlocksCleared") > before and router.has(16), "a new start")
    assert router.next < 7 and before > 2
    passes_over.until(lambda: passes_over.seen.count("AllBlocksCleared") > before and passes_over.has(16),
                      "the same of the new worker")

    print("what is evicted is removed before its memory is another block's")
    room = 64 * 1024 // 16  # blocks that the arena has
    for i in range(6):
        end(holder("pool", 16 * 1000, f"salt {i}"))
    router.until(lambda: router.n_removed > 6000 - room, "removals")
    assert 2000 < router.most < room, router.most

    print("a block that is moved is the same block")
    assert kvctl("pool", "drop", "pool").returncode == 0
    scattered = [holder("pool", 200, f"scattered {i}") for i in range(40)]
    for process in scattered[::2]:
        end(process)
    assert kvctl("pool", "drop", "pool").returncode == 0
    for process in scattered[1::2]:
        end(process)
    assert kvctl("pool", "compact", "pool", "--wait").returncode == 0
    assert any(pool["compacted_bytes_total"] > 0 for pool in json.loads(kvctl("--json", "stats").stdout)["pools"])
    router.until(lambda: len(router.blocks) == 1 + 20 * 12, "what was moved, and one that is held")
    assert kvctl("pool", "drop", "pool").returncode == 0
    router.until(lambda: router.has(16), "one block that is held")

    print("events that nobody takes cost nobody anything")
    start_s = time.monotonic()
    for _ in range(3):
        end(holder("pool", 2000))
    assert kvctl("ping").returncode == 0 and kvctl("check").returncode == 0
    assert time.monotonic() - start_s < DEADLINE_S / 2
    end(fourth)
    router.until(lambda: not router.blocks, "the end")
    for bad in ("nonsense", f"tcp://127.0.0.1:{port}", "tcp://127.0.0.1:0,encoding=new", "foo://x"):
        ended = subprocess.run([f"{build}/daemon/kvcached", "--host", "16M", "--socket", path + "2", "--events",
                                bad], capture_output=True, text=True, timeout=DEADLINE_S)
        assert ended.returncode == 1 and "--events: " in ended.stderr, (bad, ended)
    context.destroy(linger=0)


try:
    main()
finally:
    for process in started:
        process.terminate()
    for process in started:
        process.wait(DEADLINE_S)
    subprocess.run(["rm", "-rf", folder], check=False)
