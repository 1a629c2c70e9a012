#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decode attention of kvcached beside other packages, on the same data in the same run.

    PYTHONPATH=build/libclient/python KVCLIENT_LIBRARY=build/libclient/libkvclient.so.0 \\
        tests/bench/peers.py [--shape 32/8/128] [--batch 32] [--context 4096] [--page 16] [--rounds 20]

Peers: FlashInfer (package flashinfer), FlashAttention (flash_attn_interface, or flash_attn; pages of 256 in its
second version), and torch's own attention over gathered keys in f32, which is the check. A package that can't be
imported, or can't do a case, has a line that says so. Each contestant's result is held against the check before it
is timed; a wrong one has no time. Times are medians of CUDA graphs of calls that rotate over disjoint tables of at
least 256 MiB, contestants in turns.

Exit status: 0; 1: a result of ours is wrong; 77: no torch, no GPU, or no kvclient.
"""
import argparse
import statistics
import sys

ROTATED = 256 << 20


def leave(text):
    print(text)
    sys.exit(77)


try:
    import torch
except ImportError as error:
    leave(f"skipped: torch can't be imported ({error})")
if not torch.cuda.is_available():
    leave("skipped: torch finds no GPU")
try:
    from kvclient._lib import check, ffi, lib
except ImportError as error:
    leave(f"skipped: kvclient can't be imported ({error})")


class Case:
    """Pages of K and V [blocks, page, heads, dim] and n tables of disjoint blocks in random order."""

    def __init__(self, shape, batch, context, page):
        self.heads_q, self.heads_kv, self.dim = (int(x) for x in shape.split("/"))
        self.batch, self.context, self.page = batch, context, page
        self.width = -(-context // page)
        self.bytes = batch * context * self.heads_kv * self.dim * 4
        self.n = min(64, -(-ROTATED // self.bytes))
        blocks = self.n * batch * self.width
        self.k, self.v = (torch.randn(blocks, page, self.heads_kv, self.dim, device="cuda", dtype=torch.bfloat16)
                          for _ in range(2))
        self.tables = torch.randperm(blocks, device="cuda", dtype=torch.int32).view(self.n, batch, self.width)
        self.lens = torch.full((batch,), context, device="cuda", dtype=torch.int32)
        self.q = torch.randn(batch, self.heads_q, self.dim, device="cuda", dtype=torch.bfloat16)

    def answer(self, rows=2):
        """The first rows of table 0, in f32 by plain sums."""
        out = []
        for b in range(min(rows, self.batch)):
            ids = self.tables[0, b].long()
            k, v = (x[ids].reshape(-1, self.heads_kv, self.dim)[:self.context].float() for x in (self.k, self.v))
            q = self.q[b].float().view(self.heads_kv, -1, self.dim)
            scores = torch.einsum("hgd,jhd->hgj", q, k) / self.dim ** 0.5
            out.append(torch.einsum("hgj,jhd->hgd", scores.softmax(-1), v).reshape(self.heads_q, self.dim))
        return torch.stack(out)


class Ours:
    name = "kvcached"

    def __init__(self, case):
        self.case, self.out = case, torch.empty_like(case.q)
        self.starts = torch.arange(case.batch + 1, device="cuda", dtype=torch.int32)
        self.args = a = ffi.new("struct kv_attention_args *")
        a.size, a.device, a.dtype = ffi.sizeof(a[0]), lib.KV_DEVICE_CUDA, lib.KV_BF16
        a.n_seqs = a.n_tokens = case.batch
        a.n_heads_q, a.max_query_len, a.max_seq_len, a.table_width = case.heads_q, 1, case.context, case.width
        a.q, a.out = self.pointer(case.q), self.pointer(self.out)
        a.query_start_loc, a.seq_lens = self.pointer(self.starts), self.pointer(case.lens)
        a.block_table = self.pointer(case.tables)
        for view, pages in ((a.k, case.k), (a.v, case.v)):
            view.base = self.pointer(pages)
            view.block_stride, view.token_stride, view.head_stride = (2 * s for s in pages.stride()[:3])
            view.block_tokens, view.n_heads, view.head_dim = case.page, case.heads_kv, case.dim
            view.dtype, view.scale = lib.KV_BF16, 1
        a.window_left, a.causal = -1, 1
        need = ffi.new("size_t *")
        check(lib.kv_attention_workspace_bytes(a, need))
        self.workspace = torch.zeros(need[0] + 1, device="cuda", dtype=torch.uint8)
        a.workspace, a.workspace_bytes = self.pointer(self.workspace), need[0]

    @staticmethod
    def pointer(tensor):
        return ffi.cast("void *", tensor.data_ptr())

    def call(self, i):
        self.args.block_table = self.pointer(self.case.tables[i])
        self.args.stream = ffi.cast("void *", torch.cuda.current_stream().cuda_stream)
        check(lib.kv_attention(self.args))
        return self.out


class FlashInfer:
    """One wrapper a table, planned once: its plan isn't timed."""
    name = "flashinfer"

    def __init__(self, case):
        import flashinfer
        self.case, self.wrappers = case, []
        indptr = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda") * case.width
        last = torch.full((case.batch,), (case.context - 1) % case.page + 1, dtype=torch.int32, device="cuda")
        for i in range(case.n):
            ids = case.tables[i].reshape(-1).contiguous()
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                torch.zeros(128 << 20, dtype=torch.uint8, device="cuda"), "NHD", use_cuda_graph=True,
                use_tensor_cores=True, paged_kv_indptr_buffer=indptr.clone(), paged_kv_indices_buffer=ids.clone(),
                paged_kv_last_page_len_buffer=last.clone())
            wrapper.plan(indptr, ids, last, case.heads_q, case.heads_kv, case.dim, case.page,
                         q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
            self.wrappers.append(wrapper)

    def call(self, i):
        return self.wrappers[i].run(self.case.q, (self.case.k, self.case.v))


class FlashAttention:
    name = "flash-attention"

    def __init__(self, case):
        try:
            from flash_attn_interface import flash_attn_with_kvcache as attend  # the third version
            self.table = "page_table"
        except ImportError:
            from flash_attn import flash_attn_with_kvcache as attend
            self.table = "block_table"
            if case.page % 256:
                raise RuntimeError(f"its second version has pages of 256, not of {case.page}") from None
        self.case, self.attend = case, attend

    def call(self, i):
        out = self.attend(self.case.q.unsqueeze(1), self.case.k, self.case.v, cache_seqlens=self.case.lens,
                          causal=True, **{self.table: self.case.tables[i]})
        return (out[0] if isinstance(out, tuple) else out).squeeze(1)


def graph_of(contestant, n):
    """A graph of a call for each table."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        contestant.call(0)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(n):
            contestant.call(i)
    return graph


def seconds_of(graph, n):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / n


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="32/8/128")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(1)
    case = Case(options.shape, options.batch, options.context, options.page)
    right, graphs, status = case.answer(), {}, 0
    for kind in (Ours, FlashInfer, FlashAttention):
        try:
            contestant = kind(case)
            out = contestant.call(0)[:len(right)].float()
        except ImportError as error:
            print(f"{kind.name:16} skipped: can't be imported ({error})")
            continue
        except Exception as error:  # a peer that can't do the case is no failure of ours
            print(f"{kind.name:16} skipped: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
            status |= kind is Ours
            continue
        error = ((out - right).norm() / right.norm()).item()
        if not error <= 5e-3:
            print(f"{kind.name:16} WRONG: off by {error:.2g}, no time")
            status |= kind is Ours
            continue
        graphs[kind.name] = (graph_of(contestant, case.n), contestant, error)
    times = {name: [] for name in graphs}
    for _ in range(options.rounds + 2):
        for name, (graph, _, _) in graphs.items():
            times[name].append(seconds_of(graph, case.n))
    for name, (_, _, error) in graphs.items():
        median = statistics.median(times[name][2:])
        print(f"{name:16} {median * 1e6:9.2f} us {case.bytes / median / 1e12:6.3f} TB/s  off by {error:.1e}")
    return status


if __name__ == "__main__":
    sys.exit(main())
