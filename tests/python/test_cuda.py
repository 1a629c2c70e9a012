# SPDX-License-Identifier: Apache-2.0
"""A GPU's arena as tensors, and kernels on torch tensors, torch's streams and in its graphs: --device cuda."""
import gc
import os
import threading
import time

import numpy as np
import pytest

import kvclient
from test_arrays import reference, tokens

torch = pytest.importorskip("torch")
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
CLOSE = {"f32": 1e-3, "f16": 4e-3, "bf16": 2e-2}


@pytest.fixture(autouse=True)
def on_a_gpu(device):
    if device != "cuda":
        pytest.skip("with --device cuda")


def pool_of(client, name, dtype="bf16", head_dim=64, n_layers=2):
    return client.pool(name, layout=kvclient.Layout.uniform(n_layers, 2, head_dim, dtype, block_tokens=16))


class Cai:
    """What has the interface and nothing else."""

    def __init__(self, view):
        self.view = view
        self.__cuda_array_interface__ = view.__cuda_array_interface__


@pytest.mark.parametrize("dtype", TYPES)
def test_a_view_is_the_same_memory_by_dlpack_and_by_the_array_interface(client, dtype):
    with pool_of(client, "views " + dtype, dtype) as pool:
        view = pool.view(1, "k")
        tensor, again = view.torch(), torch.from_dlpack(view)
        assert tensor.dtype == again.dtype == TYPES[dtype] and tensor.is_cuda
        assert tensor.data_ptr() == again.data_ptr() == view.ptr
        assert tuple(tensor.shape) == view.shape
        assert [stride * view.itemsize for stride in tensor.stride()] == list(view.strides)
        third = torch.as_tensor(Cai(view), device="cuda")
        assert third.data_ptr() == view.ptr and third.stride() == tensor.stride()
        block = int(pool.take(1)[0])
        tensor[block] = 3
        bits = {"f32": 3.0, "f16": 3.0, "bf16": 0x4040}[dtype]
        assert bool((third[block] == bits).all()) and float(again[block].float().sum()) == 3 * 16 * 2 * 64
        with pytest.raises(AttributeError):
            view.numpy()


def test_a_tensor_outlives_the_pool_and_the_client_it_came_from(daemon):
    client = kvclient.Client()
    pool = pool_of(client, "outlived", "f32")
    block = int(pool.take(1)[0])
    tensor = pool.view(0, "v").torch()
    tensor[block] = 5
    kept = tensor[block, 3]
    client.close()
    del client, pool, tensor
    gc.collect()
    assert kept.shape == (2, 64)
    kept.sum().item()  # still mapped: an access that faulted would end this context
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", TYPES)
def test_writes_and_attention_take_torch_s_tensors_and_current_stream(client, dtype):
    torch.manual_seed(1)
    q, k, v = (torch.randn(100, heads, 64, dtype=TYPES[dtype], device="cuda") for heads in (4, 2, 2))
    right = reference(*(x.float().cpu().numpy() for x in (q, k, v)))
    with pool_of(client, "kernels " + dtype, dtype) as pool, pool.batch(2, 128, 8) as batch:
        with pool.sequence() as seq:
            seq.start(tokens(7, 100))
            batch.build([(seq, 100)])
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # The writes stand behind this sleep: on any other stream attention would come before them.
                torch.cuda._sleep(20_000_000)
                pool.layer(1).write(k, v, batch)
                lse = torch.empty(100, 4, device="cuda")
                out = pool.layer(1).attention(q, batch, lse=lse)
            stream.synchronize()
            assert out.dtype == TYPES[dtype] and out.is_cuda
            assert np.abs(out.float().cpu().numpy() - right).max() < CLOSE[dtype]
            assert bool(torch.isfinite(lse).all())
            stands = pool.view(1, "k").torch()[torch.from_numpy(seq.blocks).long().cuda()]
            assert bool((stands.reshape(-1, 2, 64)[:100] == k).all())
            with pytest.raises(ValueError, match="host memory"):
                pool.layer(1).write(k.cpu(), v.cpu(), batch)


def test_a_captured_graph_replays_steps_of_longer_sequences(client):
    torch.manual_seed(2)
    q, k, v = (torch.randn(60, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))
    with pool_of(client, "graph") as pool, pool.batch(1, 64, 8) as prompt, pool.batch(1, 1, 8) as batch:
        layer = pool.layer(0)
        with pool.sequence() as seq:
            seq.start(tokens(8, 40), n_more=20)
            prompt.build([(seq, 40)])
            layer.write(k[:40], v[:40], prompt)
            one = [x[:1].clone() for x in (q, k, v)]
            out = torch.empty_like(one[0])
            side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            for at in range(40, 60):
                seq.append([at])
                batch.build([seq])
                for into, x in zip(one, (q, k, v)):
                    into.copy_(x[at:at + 1])
                if at < 42:
                    side.wait_stream(torch.cuda.current_stream())

                    def step():
                        layer.write(one[1], one[2], batch)
                        layer.attention(one[0], batch, out, max_seq_len=128)

                    with torch.cuda.stream(side):
                        if at == 40:
                            step()
                        else:
                            with torch.cuda.graph(graph, stream=side):
                                step()
                            graph.replay()
                    torch.cuda.current_stream().wait_stream(side)
                else:
                    graph.replay()
                torch.cuda.synchronize()
                right = reference(*(x[:at + 1].float().cpu().numpy() for x in (q, k, v)))[-1:]
                assert np.abs(out.float().cpu().numpy() - right).max() < 2e-2, at


def test_what_is_published_waits_for_the_stream_and_the_gil_is_free_meanwhile(client):
    with pool_of(client, "waits") as pool, pool.batch(1, 32, 4) as batch:
        prompt = tokens(9, 33)
        with pool.sequence() as seq:
            seq.start(prompt)
            batch.build([(seq, 32)]) if len(seq) == 32 else batch.build([(seq, 1)])
            torch.cuda._sleep(1_000_000_000)  # half a second
            seq.publish()
            client.ping()
            with pool.sequence() as other:
                early = other.lookup(prompt)
            counted, stop = [0], threading.Event()

            def count():
                while not stop.is_set():
                    counted[0] += 1
                    time.sleep(0.001)

            thread = threading.Thread(target=count)
            thread.start()
            torch.cuda.synchronize()
            with pool.sequence() as other:  # a call that looks for finished work
                other.publish()
            with pytest.raises(kvclient.NoRoom):
                ids = pool.take(pool.max_blocks - 8, timeout=5)
                try:
                    pool.take(64, timeout=0.3)
                finally:
                    pool.give(ids)
            stop.set()
            thread.join()
            client.ping()
            with pool.sequence() as other:
                late = other.lookup(prompt)
    assert early == 0 and late == 32 and counted[0] > 20


def test_lanes_and_batches_lie_where_the_gpu_reads_them(client):
    with pool_of(client, "pinned") as pool, pool.batch(1, 16, 2) as batch, pool.sequence() as seq:
        seq.start(tokens(1, 16))
        batch.build([(seq, 16)])
        there = batch.torch("slots").to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert there.tolist() == batch.slots.tolist()
    assert os.environ["KVCACHED_SOCKET"]
