# SPDX-License-Identifier: Apache-2.0
"""The shared arena as arrays, and kernels on arrays that callers bring."""
import gc

import numpy as np
import pytest

import kvclient

torch = None
try:
    import torch
except ImportError:
    pass
needs_torch = pytest.mark.skipif(torch is None, reason="no torch here")


def tokens(seed, n):
    return np.random.default_rng(seed).integers(0, 1000, n).astype(np.int32)


def reference(q, k, v):
    """Causal attention over all tokens, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, 1) for x in (k, v))
    x = np.einsum("thd,shd->hts", q.astype(np.float64), k) / np.sqrt(q.shape[2])
    x = np.where(np.tril(np.ones(x.shape[1:], bool), len(k) - len(q)), x, -np.inf)
    p = np.exp(x - x.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("kind", ["flat", "paged"])
@pytest.mark.parametrize("head_major", [False, True])
def test_written_keys_stand_in_the_view_and_attention_sees_them(client, kind, head_major):
    layout = kvclient.Layout.uniform(2, 2, 16, "f32", block_tokens=16, kind=kind, head_major=head_major)
    random = np.random.default_rng(5)
    k, v = (random.standard_normal((50, 2, 16), np.float32) for _ in range(2))
    q = random.standard_normal((50, 4, 16), np.float32)
    with client.pool(f"{kind} {head_major}", layout=layout, max_bytes=8 << 20) as pool:
        batch, seq = pool.batch(1, 64, 8), pool.sequence()
        seq.start(tokens(1, 50))
        batch.build([(seq, 50)])
        layer = pool.layer(1)
        layer.write(k, v, batch)
        stands = layer.k.numpy()[seq.blocks].reshape(-1, 2, 16)[:50]
        assert (stands == k).all()
        lse = np.empty((50, 4), np.float32)
        out = layer.attention(q, batch, lse=lse)
        assert np.abs(out - reference(q, k, v)).max() < 1e-5 and np.isfinite(lse).all()
        # A decode step, into memory of the caller's.
        seq.reserve(51)
        seq.append([1])
        batch.build([seq])
        layer.write(k[:1] * 2, v[:1], batch)
        into = np.empty((1, 4, 16), np.float32)
        assert layer.attention(q[:1], batch, into) is into
        right = reference(q[:1], np.concatenate([k, k[:1] * 2]), np.concatenate([v, v[:1]]))
        assert np.abs(into - right).max() < 1e-5


def test_keys_may_be_slices_of_a_projection(client):
    """One [T, 3, heads, dim] array: the tokens' stride is not heads * dim."""
    with client.pool("slices", layout=kvclient.Layout.uniform(1, 2, 16, "f32")) as pool:
        qkv = np.random.default_rng(6).standard_normal((20, 3, 2, 16), np.float32)
        batch, seq = pool.batch(1, 64, 8), pool.sequence()
        seq.start(tokens(2, 20))
        batch.build([(seq, 20)])
        pool.layer(0).write(qkv[:, 1], qkv[:, 2], batch)
        assert (pool.view(0, "v").numpy()[seq.blocks].reshape(-1, 2, 16)[:20] == qkv[:, 2]).all()


def test_what_was_written_is_read_back_as_rows(client):
    with client.pool("read back", layout=kvclient.Layout.uniform(1, 2, 16, "f32")) as pool:
        k, v = np.random.default_rng(7).standard_normal((2, 70, 2, 16), np.float32)
        batch, seqs = pool.batch(2, 128, 8), [pool.sequence(), pool.sequence()]
        for i, (seq, n) in enumerate(zip(seqs, (50, 20))):
            seq.start(tokens(20 + i, n))
        batch.build([(seqs[0], 50), (seqs[1], 20)])
        layer = pool.layer(0)
        layer.write(k, v, batch)
        key, value = np.full((2, 24, 2, 16), 7, np.float32)
        # 12 tokens of the first from its 30th on, 10 of the second; row 22 and the next are nobody's.
        layer.read(key, value, batch.block_table, np.array([0, 12, 22], np.int32),
                   np.array([30, 0], np.int32))
        assert (key[:12] == k[30:42]).all() and (key[12:22] == k[50:60]).all() and (key[22:] == 7).all()
        assert (value[:12] == v[30:42]).all() and (value[12:22] == v[50:60]).all() and (value[22:] == 7).all()
        for bad, words in (((key[:, :1], value), "key: shape"), ((key, value[:3]), "value: shape"),
                           ((key, value.astype(np.float64)), "f8")):
            with pytest.raises((ValueError, TypeError), match=words):
                layer.read(*bad, batch.block_table, np.array([0, 1, 2], np.int32))
        with pytest.raises(ValueError, match="start_loc: 2 entries given, the table has 2 rows"):
            layer.read(key, value, batch.block_table, np.array([0, 1], np.int32))


def test_a_prompt_that_leaves_another_inside_a_block_has_its_keys_by_a_copy(client):
    with client.pool("partial", layout=kvclient.Layout.uniform(1, 2, 16, "f32")) as pool:
        k = np.random.default_rng(9).standard_normal((40, 2, 16), np.float32)
        batch, first, second = pool.batch(1, 64, 8), pool.sequence(), pool.sequence()
        prompt = tokens(9, 40)
        first.start(prompt)
        batch.build([(first, 40)])
        pool.layer(0).write(k, k, batch)
        first.publish()
        client.ping()
        prompt = np.concatenate([prompt[:25], prompt[:15] + 1])
        assert pool.sequence().lookup(prompt) == 16
        assert second.start(prompt, partial=True) == 25
        batch.build([(second, 15)])
        batch.copy()
        pool.layer(0).write(-k[25:], -k[25:], batch)
        stands = pool.view(0, "k").numpy()[second.blocks].reshape(-1, 2, 16)[:40]
        assert (stands == np.concatenate([k[:25], -k[25:]])).all()
        assert (pool.view(0, "k").numpy()[first.blocks].reshape(-1, 2, 16)[:40] == k).all()


def test_wrong_arrays_are_refused_before_the_kernel_sees_them(client):
    with client.pool("refused", layout=kvclient.Layout.uniform(1, 2, 16, "f32")) as pool:
        batch, seq = pool.batch(1, 64, 8), pool.sequence()
        seq.start(tokens(3, 20))
        batch.build([(seq, 20)])
        layer, good = pool.layer(0), np.zeros((20, 2, 16), np.float32)
        for bad, words in ((good[:19], "key: shape"), (good.astype(np.float64), "f8"),
                           (good[:, :, ::2], "key: shape"), ([1, 2], "list given"),
                           (np.zeros((20, 2, 32), np.float32)[:, :, ::2], "dense")):
            with pytest.raises((ValueError, TypeError), match=words):
                layer.write(bad, good, batch)
        q = np.zeros((20, 4, 16), np.float32)
        for bad, words in ((q[:5], "5 rows"), (np.zeros((20, 3, 16), np.float32), "multiple of 2"),
                           (q.astype(np.int32), "i32 given"), (q.transpose(1, 0, 2)[:, :, :], "rows|dense")):
            with pytest.raises((ValueError, TypeError), match=words):
                layer.attention(bad, batch)
        with pytest.raises(ValueError, match="out: shape"):
            layer.attention(q, batch, np.zeros((20, 4, 8), np.float32))
        with pytest.raises(KeyError, match="no component 'state'"):
            pool.view(0, "state")
        with pytest.raises(AttributeError):
            layer.k.__cuda_array_interface__


def test_an_unmapped_pool_has_no_views(client):
    layout = kvclient.Layout.uniform(1, 2, 16, "f32")
    with client.pool("scheduler", layout=layout, mapped=False) as pool:
        seq = pool.sequence()
        seq.start(tokens(4, 33))
        assert len(seq.blocks) == 3
        with pytest.raises(kvclient.NotMappedError, match="not mapped"):
            pool.view(0, "k")


def test_a_state_has_no_axis_of_tokens(client):
    layout = kvclient.Layout([kvclient.Component(0, "state", 4, 64, "f32"),
                              kvclient.Component(1, "k", 2, 16, "bf16"),
                              kvclient.Component(1, "v", 2, 16, "bf16")], block_tokens=16)
    with client.pool("states", layout=layout) as pool:
        state = pool.view(0, "state").numpy()
        assert state.shape == (pool.id_limit, 4, 64) and state.strides[0] == pool.block_bytes
        ids = pool.take(2)
        state[ids[0]], state[ids[1]] = 1, 2
        assert state[ids[0]].sum() == 256 and state[ids[1]].sum() == 512
        assert pool.view(1, "k").numpy().dtype == np.uint16


@needs_torch
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_torch_sees_and_writes_the_same_bytes(client, dtype):
    types = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    with client.pool("torch " + dtype, layout=kvclient.Layout.uniform(2, 2, 16, dtype)) as pool:
        view = pool.view(1, "k")
        tensor, again = view.torch(), torch.from_dlpack(view)
        assert tensor.dtype == again.dtype == types[dtype]
        assert tensor.data_ptr() == again.data_ptr() == view.ptr
        assert [stride * view.itemsize for stride in tensor.stride()] == list(view.strides)
        block = int(pool.take(1)[0])
        tensor[block] = 3
        bits = {"f32": 0x40400000, "f16": 0x4200, "bf16": 0x4040}[dtype]
        raw = view.numpy()[block]
        assert (raw.view(np.uint32 if dtype == "f32" else np.uint16) == bits).all()
        pool.close()
        del pool, view, again
        gc.collect()
        assert float(tensor[block].float().sum()) == 3 * 16 * 2 * 16


@needs_torch
def test_eight_bit_floats_are_torch_s(client):
    if not hasattr(torch, "float8_e4m3fn"):
        pytest.skip("this torch has no 8-bit floats")
    with client.pool("f8", layout=kvclient.Layout.uniform(1, 2, 16, "f8_e4m3")) as pool:
        tensor = pool.view(0, "v").torch()
        assert tensor.dtype == torch.float8_e4m3fn
        block = int(pool.take(1)[0])
        tensor.view(torch.uint8)[block] = 0x38
        assert float(tensor[block].float().mean()) == 1.0


@needs_torch
def test_kernels_take_torch_tensors(client):
    with client.pool("kernels", layout=kvclient.Layout.uniform(1, 2, 16, "bf16")) as pool:
        batch, seq = pool.batch(2, 64, 8), pool.sequence()
        seq.start(tokens(7, 40))
        batch.build([(seq, 40)])
        torch.manual_seed(1)
        q, k, v = (torch.randn(40, heads, 16).bfloat16() for heads in (4, 2, 2))
        pool.layer(0).write(k, v, batch.torch("slots"))
        out = pool.layer(0).attention(q, batch)
        assert out.dtype == torch.bfloat16
        right = reference(*(x.float().numpy() for x in (q, k, v)))
        assert np.abs(out.float().numpy() - right).max() < 0.02
        assert batch.torch("block_table").data_ptr() == batch.block_table.ctypes.data
