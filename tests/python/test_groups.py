# SPDX-License-Identifier: Apache-2.0
"""Group sequences: what is found, grown and ended in all groups or in none."""
import gc

import numpy as np
import pytest

import kvclient

HEADS, DIM = 2, 16


def open_groups(client, name, interval=32):
    kv = client.pool(name, layout=kvclient.Layout.uniform(1, 1, 16, "f32", block_tokens=16), max_bytes=4 << 20)
    rows = client.pool(name + ".state", max_bytes=4 << 20, layout=kvclient.Layout(
        kvclient.delta_components(0, HEADS, HEADS, DIM, DIM, 4, "f32"), block_tokens=1))
    return kvclient.Groups([kvclient.Group("full", kv), kvclient.Group("state", rows, interval=interval)])


def inputs(n, seed=3):
    random = np.random.default_rng(seed)
    return (random.standard_normal((n, 3 * HEADS * DIM), np.float32), random.standard_normal((n, HEADS), np.float32),
            random.standard_normal((n, HEADS), np.float32))


def run(groups, seq, lanes, layer, tokens, chunk):
    """Outputs of the tokens that the sequence hasn't, computed in chunks."""
    x, a, b = inputs(len(tokens))
    random = np.random.default_rng(9)
    weights = {"weight": random.standard_normal((x.shape[1], 4), np.float32),
               "a_log": random.standard_normal(HEADS).astype(np.float32),
               "dt_bias": random.standard_normal(HEADS).astype(np.float32)}
    found = []
    while len(seq) < len(tokens):
        at = len(seq)
        n = min(chunk, len(tokens) - at)
        seq.reserve(at + n)
        seq.append(tokens[at:at + n])
        lanes.build([(seq, n)])
        found.append(layer.forward(x[at:at + n], a[at:at + n], b[at:at + n], lanes, **weights))
        seq.publish()
        seq.done(len(seq))
    return np.concatenate(found)


@pytest.fixture(autouse=True)
def in_host_memory(device):
    if device != "host":
        pytest.skip("numpy arrays")


def test_a_state_is_continued_from_a_checkpoint_and_cut_into_any_chunks_with_the_same_output(client):
    tokens = np.arange(100, dtype=np.int32)
    with open_groups(client, "continued") as groups:
        assert groups.unit == 32
        lanes = kvclient.Lanes(groups, 1, 4, 256)
        layer = kvclient.DeltaLayer(groups.groups[1].pool, 0, 1, HEADS, HEADS, DIM, DIM)
        with groups.sequence() as seq:
            whole = run(groups, seq, lanes, layer, tokens, 100)
        client.ping()
        with groups.sequence() as seq:
            hit = seq.lookup(tokens)
            assert hit == 96
            rest = run(groups, seq, lanes, layer, tokens, 3)
        assert np.abs(rest - whole[hit:]).max() < 1e-5
        client.drop("continued")
        client.drop("continued.state")
        with groups.sequence() as seq:
            assert seq.lookup(tokens) == 0
            pieces = run(groups, seq, lanes, layer, tokens, 7)
        assert np.abs(pieces - whole).max() < 1e-5


def test_a_fork_goes_on_by_itself_and_a_rollback_says_where_it_could_go(client):
    tokens = np.arange(50, dtype=np.int32)
    with open_groups(client, "forked") as groups:
        lanes = kvclient.Lanes(groups, 1, 4, 256)
        layer = kvclient.DeltaLayer(groups.groups[1].pool, 0, 1, HEADS, HEADS, DIM, DIM)
        with groups.sequence() as seq:
            run(groups, seq, lanes, layer, tokens[:40], 40)
            with seq.fork() as other:
                longer = run(groups, other, lanes, layer, tokens, 10)
                assert len(other) == 50 and len(seq) == 40
            again = run(groups, seq, lanes, layer, tokens, 10)
            assert (longer == again).all()
            with pytest.raises(kvclient.KvError, match="group"):
                seq.rollback(45)
            seq.rollback(0)
            assert len(seq) == 0


def test_groups_end_with_their_pools_in_any_order(client):
    groups = open_groups(client, "ends")
    kv, rows = (group.pool for group in groups.groups)
    seq = groups.sequence()
    seq.start(np.arange(40, dtype=np.int32))
    assert len(seq.part(0).blocks) == 3
    with pytest.raises(ValueError, match="state"):
        seq.part(1).blocks
    rows.close()
    with pytest.raises(ValueError, match="closed"):
        len(seq)
    groups.close()
    kv.close()
    del groups, seq
    gc.collect()
    client.ping()
    assert all(pool["blocks_leased"] == 0 for pool in client.stats()["pools"] if pool["name"].startswith("ends"))
