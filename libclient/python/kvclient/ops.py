# SPDX-License-Identifier: Apache-2.0
"""Kernels on blocks: writing K and V, attention over block tables. See kvcached/attention.h.

On a GPU each call queues work on the stream and returns: nothing is waited for, and with ``out`` given
nothing is allocated, so calls can be captured in a CUDA graph (call once before, for the workspace).
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from ._lib import check, ffi, lib
from .arrays import Pointer, View, stream_of
from .layout import DTYPES

if TYPE_CHECKING:
    from .batch import Batch
    from .pool import Pool

__all__ = ["Layer", "backend_names"]

_NUMPY_OUT = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def backend_names(cuda: bool = False) -> list[str]:
    """The attention backends of this build, most preferred first."""
    names = lib.kv_backend_names(lib.KV_DEVICE_CUDA if cuda else lib.KV_DEVICE_HOST)
    found, i = [], 0
    while names[i] != ffi.NULL:
        found.append(ffi.string(names[i]).decode())
        i += 1
    return found


def empty_like(array: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """For results: where and what the inputs are."""
    if type(array).__module__.split(".")[0] == "torch":
        return array.new_empty(shape)
    return np.empty(shape, _NUMPY_OUT[dtype])


def device_of(pool: "Pool") -> int:
    return int(lib.KV_DEVICE_CUDA if pool.is_cuda else lib.KV_DEVICE_HOST)


class Workspaces:
    """The largest workspace asked for so far, one a kind, device and stream: calls on one stream take turns."""

    def __init__(self, is_cuda: bool) -> None:
        self.is_cuda = is_cuda
        self._have: dict[Any, tuple[int, int, Any]] = {}

    @staticmethod
    def of(pool: "Pool") -> "Workspaces":
        if pool._workspaces is None:
            pool._workspaces = Workspaces(pool.is_cuda)
        return pool._workspaces

    def give(self, kind: str, args: Any, ask: Any, gpu: int, ordinal: int) -> None:
        """Sets workspace and workspace_bytes of a call to what ``ask`` says of it."""
        need = ffi.new("size_t *")
        args.workspace, args.workspace_bytes = ffi.NULL, 0
        check(ask(args, need))
        if not need[0]:
            return
        at = (kind, gpu, int(ffi.cast("uintptr_t", args.stream)))
        have = self._have.get(at)
        if have is None or have[1] < need[0]:
            have = self._have[at] = self._new(int(need[0]), ordinal)
        args.workspace = ffi.cast("void *", have[0])
        args.workspace_bytes = have[1]

    def _new(self, n: int, ordinal: int) -> tuple[int, int, Any]:
        align = int(lib.KV_WORKSPACE_ALIGN)
        if self.is_cuda:
            import torch

            memory = torch.zeros(n + align, dtype=torch.uint8, device=f"cuda:{ordinal}")
            address = memory.data_ptr()
        else:
            memory = np.zeros(n + align, np.uint8)
            address = memory.ctypes.data
        return (address + align - 1) // align * align, n, memory


class Layer:
    """One attention layer of a pool: ``k`` and ``v`` are views of the arena."""

    def __init__(self, pool: "Pool", number: int, gpu: int) -> None:
        self.pool = pool
        self.number = number
        self.gpu = gpu
        self.k: View = pool.view(number, "k", gpu)
        self.v: View = pool.view(number, "v", gpu)
        self.out_dim = self.v.shape[3]
        self._write = ffi.new("struct kv_write_args *")
        self._args = ffi.new("struct kv_attention_args *")
        self._read = ffi.new("struct kv_read_args *")
        for struct in (self._write, self._read, self._args):
            struct.size = ffi.sizeof(struct[0])
            struct.device = device_of(pool)
            struct.k = self.k.struct
            struct.v = self.v.struct

    def _same_device(self, what: str, pointer: Pointer) -> None:
        if pointer.is_cuda != self.pool.is_cuda:
            raise ValueError(f"{what}: it lies {'on a GPU' if pointer.is_cuda else 'in host memory'}, "
                             f"the pool {'on a GPU' if self.pool.is_cuda else 'in host memory'}")

    def write(self, key: Any, value: Any, slots: Any, stream: Any = None) -> None:
        """Stores K and V of T tokens.

        :param key: [T, heads, head_dim], axes but the first dense
        :param value: likewise
        :param slots: [T] int64, or the step's Batch; negative: the token is skipped
        """
        k, v = Pointer("key", key), Pointer("value", value)
        where = Pointer("slots", getattr(slots, "slots", slots)).dense("slots", "i64", 1)
        for what, pointer, view in (("key", k, self.k), ("value", v, self.v)):
            self._same_device(what, pointer)
            if pointer.shape[1:] != view.shape[2:] or pointer.shape[0] != where.shape[0]:
                raise ValueError(f"{what}: shape {pointer.shape} given, {where.shape + view.shape[2:]} "
                                 "is needed")
        if k.dtype != v.dtype or k.dtype not in DTYPES:
            raise TypeError(f"key and value: {k.dtype} and {v.dtype} given; one of f32, f16, bf16 is "
                            "needed")
        with self.pool._lock:
            self.pool._c()
            args = self._write
            args.dtype = DTYPES[k.dtype]
            args.n_tokens = where.shape[0]
            args.key, args.key_stride = k.void, k.rows("key", 3)
            args.value, args.value_stride = v.void, v.rows("value", 3)
            args.slots = ffi.cast("int64_t *", where.address)
            args.stream = stream_of(stream, self.pool.is_cuda, self.k.ordinal)
            check(lib.kv_write(args))

    def read(self, key: Any, value: Any, block_table: Any, start_loc: Any, first: Any = None,
             stream: Any = None) -> None:
        """K and V of sequences, from their blocks to rows one after the other.

        :param key: [T, heads, head_dim], filled, axes but the first dense; of an 8-bit pool the true values
        :param value: likewise
        :param block_table: [sequences, blocks] int32, dense
        :param start_loc: [sequences + 1] int32: the rows that receive each one's tokens
        :param first: [sequences] int32: its token that comes first; None: 0
        """
        k, v = Pointer("key", key), Pointer("value", value)
        table = Pointer("block_table", block_table).dense("block_table", "i32", 2)
        starts = Pointer("start_loc", start_loc).dense("start_loc", "i32", 1)
        for what, pointer, view in (("key", k, self.k), ("value", v, self.v)):
            self._same_device(what, pointer)
            if pointer.shape[1:] != view.shape[2:] or pointer.shape[0] != k.shape[0]:
                raise ValueError(f"{what}: shape {pointer.shape} given, {k.shape[:1] + view.shape[2:]} "
                                 "is needed")
        if k.dtype != v.dtype or k.dtype not in DTYPES:
            raise TypeError(f"key and value: {k.dtype} and {v.dtype} given; one of f32, f16, bf16 is "
                            "needed")
        if starts.shape[0] != table.shape[0] + 1:
            raise ValueError(f"start_loc: {starts.shape[0]} entries given, the table has {table.shape[0]} rows")
        for what, pointer in (("block_table", table), ("start_loc", starts)):
            self._same_device(what, pointer)
        with self.pool._lock:
            self.pool._c()
            args = self._read
            args.dtype = DTYPES[k.dtype]
            args.n_seqs, args.table_width = table.shape
            args.n_tokens = k.shape[0]
            args.key, args.key_stride = k.void, k.rows("key", 3)
            args.value, args.value_stride = v.void, v.rows("value", 3)
            args.block_table = ffi.cast("int32_t *", table.address)
            args.start_loc = ffi.cast("int32_t *", starts.address)
            args.first = ffi.NULL
            if first is not None:
                begin = Pointer("first", first).dense("first", "i32", 1)
                self._same_device("first", begin)
                if begin.shape != table.shape[:1]:
                    raise ValueError(f"first: {begin.shape[0]} entries given, the table has "
                                     f"{table.shape[0]} rows")
                args.first = ffi.cast("int32_t *", begin.address)
            args.stream = stream_of(stream, self.pool.is_cuda, self.k.ordinal)
            check(lib.kv_read(args))

    def attention(self, q: Any, batch: "Batch", out: Any = None, lse: Any = None, *,
                  sm_scale: float = 0.0, softcap: float = 0.0, window_left: int = -1,
                  sinks: Any = None, causal: bool = True, invariant: bool = False, max_query_len: Optional[int] = None,
                  max_seq_len: Optional[int] = None, stream: Any = None) -> Any:
        """Attention of a step's tokens over the blocks of their sequences.

        :param q: [T, heads of q, head_dim], dense; T is the batch's n_tokens
        :param out: [T, heads of q, head_dim of v], dense, same type; None: a new one
        :param lse: [T, heads of q] f32, filled; or None
        :param sm_scale: 0: 1 / sqrt(head_dim)
        :param sinks: [heads of q] f32, on the pool's device: one more logit of each head
        :param max_seq_len: None: the batch's. To replay a captured graph with longer sequences,
            capture it with the longest they may have.
        :returns: out
        """
        query = Pointer("q", q)
        if query.dtype not in _NUMPY_OUT:
            raise TypeError(f"q: {query.dtype} given, f32, f16 or bf16 is needed")
        query.dense("q", query.dtype, 3)
        self._same_device("q", query)
        if query.shape[0] != batch.n_tokens:
            raise ValueError(f"q: {query.shape[0]} rows given, the batch has {batch.n_tokens} tokens")
        if query.shape[2] != self.k.shape[3] or query.shape[1] % self.k.shape[2]:
            raise ValueError(f"q: shape {query.shape} given; heads must be a multiple of "
                             f"{self.k.shape[2]}, head_dim {self.k.shape[3]}")
        shape = query.shape[:2] + (self.out_dim,)
        if out is None:
            out = empty_like(q, shape, query.dtype)
        into = Pointer("out", out).dense("out", query.dtype, 3)
        self._same_device("out", into)
        if into.shape != shape:
            raise ValueError(f"out: shape {into.shape} given, {shape} is needed")
        with self.pool._lock:
            self.pool._c()
            data, args = batch._data, self._args
            args.dtype = DTYPES[query.dtype]
            args.n_seqs, args.n_tokens = batch.n_seqs, batch.n_tokens
            args.n_heads_q = query.shape[1]
            args.max_query_len = batch.max_query_len if max_query_len is None else max_query_len
            args.max_seq_len = batch.max_seq_len if max_seq_len is None else max_seq_len
            args.table_width = batch.table_width
            args.q, args.out = query.void, into.void
            args.lse = ffi.NULL
            if lse is not None:
                args.lse = ffi.cast("float *", Pointer("lse", lse).dense("lse", "f32", 2).address)
            args.query_start_loc, args.seq_lens = data.query_start_loc, data.seq_lens
            args.block_table = data.block_table
            args.sm_scale, args.softcap, args.window_left = sm_scale, softcap, window_left
            args.sinks = ffi.NULL
            if sinks is not None:
                args.sinks = ffi.cast("float *", Pointer("sinks", sinks).dense("sinks", "f32", 1).address)
            args.causal, args.invariant = int(causal), int(invariant)
            args.stream = stream_of(stream, self.pool.is_cuda, self.k.ordinal)
            Workspaces.of(self.pool).give("attention", args, lib.kv_attention_workspace_bytes, self.gpu,
                                          self.k.ordinal)
            check(lib.kv_attention(args))
        return out
