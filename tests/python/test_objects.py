# SPDX-License-Identifier: Apache-2.0
"""Clients, pools, sequences and batches as Python objects: what they do, refuse and outlive."""
import gc
import inspect
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import kvclient
from conftest import DEADLINE_S, until

LAYOUT = kvclient.Layout.uniform(2, 2, 16, "f32", block_tokens=16)


def pool_of(client, name, **options):
    return client.pool(name, layout=LAYOUT, **options)


def tokens(seed, n):
    return np.random.default_rng(seed).integers(0, 1000, n).astype(np.int32)


def test_a_missing_daemon_is_named():
    with pytest.raises(kvclient.KvError, match="/nowhere/at.all") as caught:
        kvclient.Client("/nowhere/at.all")
    assert isinstance(caught.value, (LookupError, ConnectionError)) and caught.value.errno > 0


def test_another_identity_is_refused_and_says_what_differs(client):
    with pool_of(client, "identity", model="a"):
        with pytest.raises(kvclient.ExistsError, match="model"):
            pool_of(client, "identity", model="b")
    with pytest.raises(kvclient.NotFoundError):
        client.pool("nobody made this one")


def test_errors_have_the_words_of_the_library(client):
    with pool_of(client, "words") as pool, pool.sequence() as seq:
        with pytest.raises(kvclient.KvError, match="reserve first"):
            seq.append([1, 2, 3])
        with pytest.raises(kvclient.InvalidError, match="the sequence has 0 tokens"):
            seq.rollback(1)
        with pytest.raises(ValueError, match="max_seqs 0"):
            pool.batch(0, 1, 1)
        with pytest.raises(kvclient.TooLarge):
            seq.reserve(1 << 40)
        assert len(seq) == 0 and seq.capacity == 0


def test_stats_are_those_of_kvctl(client):
    with pool_of(client, "stats"):
        ours = client.stats()
        said = json.loads(subprocess.run(
            [os.environ["KVCTL_BIN"], "-s", os.environ["KVCACHED_SOCKET"], "--json", "pool", "list"],
            check=True, stdout=subprocess.PIPE).stdout)
    pools = said if isinstance(said, list) else said["pools"]
    mine = {pool["name"]: pool for pool in ours["pools"]}["stats"]
    theirs = {pool["name"]: pool for pool in pools}["stats"]
    assert mine.keys() == theirs.keys()
    assert mine["block_bytes"] == theirs["block_bytes"] == LAYOUT.block_bytes
    assert ours["daemon"]["pid"] > 1 and ours["gpus"][0]["bytes_arena"] == client.gpus[0].arena_bytes


def test_a_batch_shows_tables_and_slots_without_copies(client):
    with pool_of(client, "batch") as pool, pool.batch(4, 64, 4) as batch:
        seq = pool.sequence()
        seq.start(tokens(1, 20), n_more=1)
        batch.build([(seq, 20)], pad_seqs=3, pad_tokens=24)
        ids = seq.blocks
        assert batch.block_table.shape == (3, 4) and batch.n_real_tokens == 20
        assert list(batch.block_table[0]) == list(ids) + [pool.null_block] * 2
        assert list(batch.slots[:20]) == [ids[i // 16] * 16 + i % 16 for i in range(20)]
        assert list(batch.slots[20:]) == [-1] * 4
        assert list(batch.query_start_loc) == [0, 20, 20, 20] and list(batch.seq_lens) == [20, 0, 0]
        table = batch.whole("block_table")
        seq.append([5])
        batch.build([seq])
        assert table.ctypes.data == batch.block_table.ctypes.data
        assert list(batch.positions) == [20] and list(batch.tokens) == [5]


def test_logits_are_wanted_of_the_last_tokens(client):
    with pool_of(client, "logits") as pool, pool.batch(4, 64, 4) as batch:
        seqs = [pool.sequence() for _ in range(3)]
        for i, seq in enumerate(seqs):
            seq.start(tokens(i, 20))
        batch.build([(seqs[0], 20), (seqs[1], 3), (seqs[2], 8)])
        assert list(batch.logits([1, 3, 0], pad=6)) == [19, 20, 21, 22, 22, 22]
        assert (batch.n_logits, batch.max_logits_per_seq) == (4, 3)
        with pytest.raises(ValueError, match=r"n_logits\[1\]: 4 given, the item has 3"):
            batch.logits([1, 4, 0])
        batch.build([seqs[0]])
        assert batch.n_logits == 0


def test_arrays_outlive_what_they_came_from(daemon):
    client = kvclient.Client(name="short-lived")
    pool = pool_of(client, "outlived")
    batch = pool.batch(2, 32, 4)
    seq = pool.sequence()
    seq.start(tokens(2, 17))
    batch.build([(seq, 17)])
    slots, k = batch.slots, pool.view(0, "k").numpy()
    k[seq.blocks[0], 3, 1, :] = 7
    expected, block = slots.copy(), int(seq.blocks[0])
    client.close()
    del client, pool, batch, seq
    gc.collect()
    assert (slots == expected).all()
    assert k[block, 3, 1].shape == (16,)  # still mapped: whoever has it may read it
    k[block].sum()


def mappings():
    with open("/proc/self/maps") as maps:
        return sum("kvcached" in line and "arena" in line for line in maps)


def test_the_arena_is_unmapped_with_its_last_array(daemon):
    before = mappings()
    client = kvclient.Client()
    pool = pool_of(client, "mapped")
    assert mappings() > before
    k, v = pool.view(0, "k").numpy(), pool.view(0, "v")
    unused = v.__dlpack__()
    client.close()
    del pool
    gc.collect()
    assert mappings() > before
    del k, v, unused
    gc.collect()
    assert mappings() == before


def test_objects_may_go_in_any_order(daemon):
    for order in range(4):
        client = kvclient.Client()
        pool = pool_of(client, "any order")
        seq, batch = pool.sequence(), pool.batch(1, 16, 2)
        seq.start(tokens(order, 16))
        things = [client, pool, seq, batch]
        things[order].close()
        for thing in things[:order + 1]:
            thing.close()
        with pytest.raises(ValueError, match="closed"):
            seq.append([1]) if order > 0 else pool.sequence()
        del client, pool, seq, batch, thing
        while things:
            things.pop(order % len(things))
            gc.collect()


def test_everything_goes_back_when_nobody_closes_it(client):
    def use():
        pool = client.pool("forgotten", layout=LAYOUT, max_bytes=1 << 20)
        seq = pool.sequence()
        seq.start(tokens(3, 64))

    use()
    for pool in list(client._pools):
        pool.close()
    gc.collect()
    client.ping()
    stats = {pool["name"]: pool for pool in client.stats()["pools"]}["forgotten"]
    assert stats["n_sessions"] == 0 and stats["blocks_leased"] == 0


class Interrupted:
    """The library, but for one function, which something else comes before."""

    def __init__(self, real, name, before):
        self._real, self._name, self._before = real, name, before

    def __getattr__(self, name):
        function = getattr(self._real, name)
        if name != self._name:
            return function

        def call(*args):
            self._before()
            return function(*args)
        return call


def test_what_is_collected_while_its_pool_closes_is_freed_once(client, monkeypatch):
    pool = pool_of(client, "collected")
    kept = [pool.sequence() for _ in range(8)]
    batches = [pool.batch(1, 16, 4) for _ in range(8)]
    for seq in kept:
        seq.start(tokens(1, 40))
    for name, objects in (("kv_seq_free", kept), ("kv_batch_free", batches)):
        monkeypatch.setattr(sys.modules["kvclient.pool"], "lib", Interrupted(
            sys.modules["kvclient.pool"].lib, name, lambda objects=objects: objects and objects.pop()))
    pool.close()
    monkeypatch.undo()
    until(lambda: next(p for p in client.stats()["pools"] if p["name"] == "collected")["blocks_leased"] == 0,
          "its blocks are free")
    assert not [s for s in client.stats()["sessions"] if s["pool"] == "collected"]


def test_what_is_forgotten_waits_for_no_other_thread(client):
    """Two threads, each with the lock of one pool, in each of which the last of the other's sequences goes."""
    pools = [pool_of(client, f"forgotten{i}") for i in range(2)]
    sequences = [[pool.sequence()] for pool in pools]
    both = threading.Barrier(2)
    for (seq,) in sequences:
        seq.start(tokens(1, 40))
    del seq

    def forget(i):
        with pools[i]._lock:
            both.wait(DEADLINE_S)
            sequences[1 - i].clear()
            both.wait(DEADLINE_S)

    threads = [threading.Thread(target=forget, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S / 6)
        assert not thread.is_alive(), "each waits for the other's lock"
    for i, pool in enumerate(pools):
        pool.sequence().close()
        assert not pool._sequences
        pool.close()


def test_a_pool_with_open_sequences_waits_for_its_devices(client, monkeypatch):
    """Nobody has named a stream: whatever is queued on any of them may use the blocks."""
    waited = []

    class Torch:
        class cuda:
            synchronize = staticmethod(waited.append)

    pool = pool_of(client, "waits")
    seq = pool.sequence()
    monkeypatch.setitem(sys.modules, "torch", Torch)
    pool.is_cuda = True
    pool.close()
    assert waited == [0] and seq._seq is not None


def test_no_room_leaves_the_sequence_as_it_was_and_waiting_lets_threads_run(client):
    with client.pool("small", layout=LAYOUT, max_bytes=1 << 20) as pool:
        n = pool.max_blocks
        ids = pool.take(n - 2)
        seq = pool.sequence()
        seq.reserve(16)
        counted, stop = [0], threading.Event()

        def count():
            while not stop.is_set():
                counted[0] += 1
                time.sleep(0.001)

        thread = threading.Thread(target=count)
        thread.start()
        start = time.monotonic()
        with pytest.raises(kvclient.NoRoom):
            seq.reserve(16 * 4, timeout=0.3)
        waited, ran = time.monotonic() - start, counted[0]
        stop.set()
        thread.join()
        assert waited >= 0.3 and ran > 20
        assert seq.capacity == 16
        pool.give(ids)
        seq.reserve(16 * 4, timeout=10)
        assert seq.capacity == 64


def test_threads_on_one_pool_take_turns(client):
    with pool_of(client, "threads") as pool:
        failures = []

        def work(seed):
            try:
                for i in range(100):
                    with pool.sequence() as seq:
                        seq.start(tokens(seed * 7 + i % 5, 40), n_more=8, timeout=5)
                        with seq.fork() as other:
                            other.reserve(len(other) + 1, timeout=5)
                        seq.publish()
            except Exception as error:  # the thread's, told below
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not failures


def test_a_forked_child_is_told_so(client):
    with pool_of(client, "forked") as pool, pool.sequence() as seq:
        seq.start(tokens(4, 16))
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                seq.reserve(64)
            except kvclient.LostError:
                status = 0
            os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        seq.reserve(64)


def test_a_plan_opens_the_pool_of_a_model(client):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 3,
              "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "head_dim": 32,
              "torch_dtype": "bfloat16", "max_position_embeddings": 256, "vocab_size": 100}
    plan = kvclient.Plan(config, 4 << 20, block_size=16, layout="flat")
    assert plan.token_bytes == 3 * 2 * 2 * 32 * 2
    with client.pool("planned", model="m", plan=plan) as pool:
        assert pool.block_tokens == 16 and pool.n_layers == 3
        assert pool.view(2, "v").shape[1:] == (16, 2, 32)
    with pytest.raises(kvclient.InvalidError, match="block-size"):
        kvclient.Plan(config, 4 << 20, block_size="many")


def test_it_says_its_types():
    folder = os.path.dirname(kvclient.__file__)
    assert os.path.exists(os.path.join(folder, "py.typed"))
    said = 0
    for name in kvclient.__all__:
        what = getattr(kvclient, name)
        members = dict(vars(what), **{"": what}) if isinstance(what, type) else {"": what}
        for member, value in members.items():
            value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if member.startswith("_") or not callable(value) or isinstance(value, type) and member:
                continue
            said += 1
            assert value.__doc__, f"kvclient.{name}.{member} has no words"
            if not isinstance(value, type):
                arguments = set(inspect.signature(value).parameters) - {"self", "cls"}
                assert arguments | {"return"} <= set(value.__annotations__), f"kvclient.{name}.{member} has no types"
    assert said > 80, said


ENGINE = """
import sys, numpy as np, kvclient
layout = kvclient.Layout.uniform(2, 2, 16, "f32", block_tokens=16)
client = kvclient.Client(name="engine")
pool = client.pool("two processes", layout=layout)
seq = pool.sequence()
prompt = np.arange(100, dtype=np.int32)
hit = seq.start(prompt)
k = pool.view(1, "k").numpy()
if not hit:
    for i, block in enumerate(seq.blocks):
        k[block] = i + 1
    seq.publish()
    client.ping()
print(hit, [int(k[block].min()) for block in seq.blocks], flush=True)
sys.stdin.readline()
"""


def engine():
    return subprocess.Popen([sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            text=True)


def test_two_processes_share_a_prefix_and_one_dies_of_kill_9(client):
    first = engine()
    assert first.stdout.readline().split(" ", 1) == ["0", "[1, 2, 3, 4, 5, 6, 7]\n"]
    second = engine()
    hit, blocks = second.stdout.readline().split(" ", 1)
    assert hit == "96" and json.loads(blocks)[:6] == [1, 2, 3, 4, 5, 6]
    first.kill()
    second.communicate("\n", timeout=DEADLINE_S)
    first.wait(DEADLINE_S)

    def quiet():
        stats = {pool["name"]: pool for pool in client.stats()["pools"]}["two processes"]
        return stats["n_sessions"] == 0 and stats["blocks_leased"] == 0 and stats["blocks_cached"] == 6

    until(quiet, "the dead process's blocks are back, what it published is cached")
