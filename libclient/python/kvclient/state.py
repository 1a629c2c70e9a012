# SPDX-License-Identifier: Apache-2.0
"""State rows: which of them a step reads and writes, and the gated delta net on them. See kvcached/state.h."""
from __future__ import annotations

from typing import Any, Iterable

import numpy as np

from ._lib import check, ffi, lib
from .arrays import Pointer, stream_of
from .groups import GroupSequence, Groups
from .layout import DTYPES, Component
from .ops import Workspaces, device_of, empty_like
from .pool import Pool

__all__ = ["DeltaLayer", "Lanes", "delta_components"]

_ACTIVATIONS = {None: lib.KV_ACTIVATION_NONE, "silu": lib.KV_ACTIVATION_SILU}


def delta_components(layer: int, n_heads_k: int, n_heads_v: int, dim_k: int, dim_v: int, conv_width: int,
                     dtype: str, state_dtype: str = "f32") -> list[Component]:
    """What a gated delta net keeps in a row: its state, and the inputs that its convolution still needs.

    A pool of rows has layouts of such components with ``block_tokens=1``.
    """
    channels = 2 * n_heads_k * dim_k + n_heads_v * dim_v
    return [Component(layer, "state", n_heads_v, dim_k * dim_v, state_dtype),
            Component(layer, "state", conv_width - 1, channels, dtype)]


class Lanes:
    """Rows and lengths of a step, in memory that the device reads too: made anew by each build()."""

    def __init__(self, groups: Groups, group: int, max_seqs: int, max_len: int) -> None:
        self.groups, self.group, self.max_seqs = groups, group, max_seqs
        what = groups.groups[group]
        self.pool = what.pool
        self.interval = what.interval
        # The state of the last tokens is in a column of its own, also where they are fewer than an interval.
        self.width = max(-(-max_len // what.interval), 1)
        self.steps = 1 + what.n_drafts
        sizes = {"read_rows": max_seqs, "write_rows": max_seqs, "n_computed": max_seqs,
                 "query_start_loc": max_seqs + 1, "table": max_seqs * self.width,
                 "step_rows": max_seqs * self.steps}
        total = sum(sizes.values())
        if self.pool.is_cuda:
            import torch

            self._keep = torch.zeros(total, dtype=torch.int32).pin_memory()
            memory = self._keep.numpy()
        else:
            memory = self._keep = np.zeros(total, np.int32)
        self._arrays, at = {}, 0
        for name, n in sizes.items():
            self._arrays[name] = memory[at:at + n]
            at += n
        self._lanes = ffi.new("struct kv_state_lanes *", {
            name: self._at(name) for name in ("read_rows", "write_rows", "n_computed", "table")})
        self._lanes.table_width = self.width
        if what.n_drafts:
            self._lanes.step_rows = self._at("step_rows")
        self.n_seqs = self.n_tokens = self.max_query_len = 0

    def _at(self, name: str) -> Any:
        return ffi.cast("int32_t *", self._arrays[name].ctypes.data)

    def build(self, items: Iterable[tuple[GroupSequence, int]]) -> "Lanes":
        """The rows of one step: (sequence, tokens of its last append)."""
        pairs = list(items)
        loc = self._arrays["query_start_loc"]
        loc[0] = 0
        for i, (_, n) in enumerate(pairs):
            loc[i + 1] = loc[i] + n
        with self.groups._locked():
            handles = ffi.new("struct kv_gseq *[]", [seq._c() for seq, _ in pairs])
            check(lib.kv_state_lanes(handles, len(pairs), len(pairs), self.group, self._lanes))
        self.n_seqs, self.n_tokens = len(pairs), int(loc[len(pairs)])
        self.max_query_len = max(n for _, n in pairs)
        return self

    def array(self, name: str) -> "np.ndarray[Any, Any]":
        """One of read_rows, write_rows, n_computed, query_start_loc, table, step_rows, whole."""
        return self._arrays[name]

    def _fill(self, batch: Any) -> None:
        batch.n_seqs, batch.n_tokens = self.n_seqs, self.n_tokens
        batch.max_query_len = self.max_query_len
        batch.null_row = self.pool.null_block
        for name in ("query_start_loc", "n_computed", "read_rows", "write_rows", "table"):
            setattr(batch, name, self._at(name))
        batch.table_width, batch.interval = self.width, self.interval
        if self.steps > 1:
            batch.step_rows, batch.step_width = self._at("step_rows"), self.steps


class DeltaLayer:
    """A gated delta net with its convolution, whose states are two components of a pool's rows.

    :param state: number of the component [heads_v, dim_v * dim_k], in the pool's layout
    :param conv: number of the component [width - 1, channels]
    """

    def __init__(self, pool: Pool, state: int, conv: int, n_heads_k: int, n_heads_v: int, dim_k: int,
                 dim_v: int) -> None:
        self.pool = pool
        self.gpu = pool._first_gpu()
        self.state, self.conv = pool.component(state), pool.component(conv)
        self.dims = n_heads_v, dim_v
        self._args = args = ffi.new("struct kv_gdn_args *")
        args.size = ffi.sizeof("struct kv_gdn_args")
        args.device = device_of(pool)
        args.n_heads_k, args.n_heads_v, args.dim_k, args.dim_v = n_heads_k, n_heads_v, dim_k, dim_v
        args.normalize = 1
        args.state = self.state.struct
        rows = args.conv
        rows.base = self.conv.struct.base
        rows.row_stride, rows.tap_stride, rows.channel_stride = self.conv.strides
        rows.dtype = DTYPES[self.conv.dtype]
        args.conv_width = self.conv.shape[1] + 1

    def forward(self, x: Any, a: Any, b: Any, lanes: Lanes, *, weight: Any, bias: Any = None, a_log: Any,
                dt_bias: Any = None, activation: Any = "silu", out: Any = None, stream: Any = None) -> Any:
        """A step of each lane: convolution, normalisation, gates and the delta rule.

        :param x: [T, channels], q | k | v before the convolution
        :param a: [T, heads_v], as b
        :param weight: [channels, width]
        :param a_log: [heads_v] f32, as dt_bias
        :returns: [T, heads_v, dim_v]
        """
        mixed = Pointer("x", x)
        if mixed.shape != (lanes.n_tokens, self.conv.shape[2]):
            raise ValueError(f"x: shape {mixed.shape} given, {(lanes.n_tokens, self.conv.shape[2])} is needed")
        if out is None:
            out = empty_like(x, (mixed.shape[0],) + self.dims, mixed.dtype)
        n = self._args.n_heads_v
        with self.pool._lock:
            self.pool._c()
            args = self._args
            args.dtype = DTYPES[mixed.dtype]
            lanes._fill(args.batch)
            args.q, args.q_stride = mixed.void, mixed.rows("x", 2)
            for name, array in (("a", a), ("b", b)):
                gate = Pointer(name, array)
                if gate.dtype != mixed.dtype or gate.shape != (mixed.shape[0], n):
                    raise ValueError(f"{name}: {gate.dtype} {gate.shape} given, {mixed.dtype} "
                                     f"{(mixed.shape[0], n)} is needed")
                setattr(args, name, gate.void)
                setattr(args, f"{name}_stride", gate.rows(name, 2))
            args.conv_weight = Pointer("weight", weight).dense("weight", mixed.dtype, 2).void
            args.conv_bias = ffi.NULL if bias is None else Pointer("bias", bias).dense("bias", mixed.dtype, 1).void
            args.conv_activation = _ACTIVATIONS[activation]
            args.a_log = ffi.cast("float *", Pointer("a_log", a_log).dense("a_log", "f32", 1).address)
            args.dt_bias = ffi.NULL if dt_bias is None else ffi.cast(
                "float *", Pointer("dt_bias", dt_bias).dense("dt_bias", "f32", 1).address)
            args.out = Pointer("out", out).dense("out", mixed.dtype, 3).void
            args.out_stride = 0
            args.stream = stream_of(stream, self.pool.is_cuda, self.state.ordinal)
            Workspaces.of(self.pool).give("gdn", args, lib.kv_gdn_workspace_bytes, self.gpu, self.state.ordinal)
            check(lib.kv_gdn(args))
        return out
