# SPDX-License-Identifier: Apache-2.0
"""Batches: what a step's kernels read."""
from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Iterable, Optional, Type, Union

import numpy as np

from ._lib import check, ffi, lib, options
from .arrays import HostMemory, stream_of

if TYPE_CHECKING:
    from .pool import Pool
    from .sequence import Sequence

__all__ = ["Batch"]


class Batch:
    """Block table, slots, positions and lengths of a step, in memory that the device reads too.

    The arrays are numpy's over the library's own (pinned where the pool is a GPU's); what they show
    is valid until the next build(). ``torch(name)`` is the same memory as a tensor, so its
    ``.to("cuda", non_blocking=True)`` needs no staging. Sizes are the padded ones of the last build.
    """

    def __init__(self, pool: "Pool", max_seqs: int, max_tokens: int, max_blocks_per_seq: int) -> None:
        ret = ffi.new("struct kv_batch **")
        hold = ffi.new("struct kv_hold **")
        self.pool = pool
        self._batch: Any = None
        with pool._lock:
            check(lib.kv_batch_new(pool._c(), options(
                "kv_batch_options", max_seqs=max_seqs, max_tokens=max_tokens,
                max_blocks_per_seq=max_blocks_per_seq), ret))
            self._batch = ret[0]
            pool._batches.add(self._batch)
            check(lib.kv_batch_hold(self._batch, hold))
        self._keep = keep = ffi.gc(hold[0], lib.kv_hold_free)
        self._data = lib.kv_batch_data(self._batch)
        shapes = {"block_table": ((max_seqs, max_blocks_per_seq), "<i4"), "slots": ((max_tokens,), "<i8"),
                  "query_start_loc": ((max_seqs + 1,), "<i4"), "seq_lens": ((max_seqs,), "<i4"),
                  "positions": ((max_tokens,), "<i8"), "tokens": ((max_tokens,), "<i4"),
                  "n_computed": ((max_seqs,), "<i4")}
        self._whole = {name: np.asarray(HostMemory(
            int(ffi.cast("uintptr_t", getattr(self._data, name))), shape, typestr, keep))
            for name, (shape, typestr) in shapes.items()}
        self.n_seqs = self.n_tokens = self.n_real_seqs = self.n_real_tokens = 0
        self.max_query_len = self.max_seq_len = 0
        self.n_logits = self.max_logits_per_seq = 0

    def _c(self) -> Any:
        if self._batch is None or self._batch not in self.pool._batches:
            raise ValueError("this batch is closed")
        return self._batch

    def close(self) -> None:
        """Its arrays are gone; once more does nothing. The pool's end closes it, too."""
        with self.pool._lock:
            batch, self._batch = self._batch, None
            if batch is not None and batch in self.pool._batches:
                self.pool._batches.discard(batch)
                lib.kv_batch_free(batch)

    def __enter__(self) -> "Batch":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_batch", None) is not None:
            self.pool._forget(self)

    def build(self, items: Iterable[Union["Sequence", tuple["Sequence", int]]], pad_seqs: int = 0,
              pad_tokens: int = 0) -> "Batch":
        """The arrays of one step.

        :param items: (sequence, n_query), n_query being its last tokens that the step computes; a
            sequence alone is (sequence, 1)
        :param pad_seqs: at least so many rows
        :param pad_tokens: at least so many tokens
        """
        pairs = [item if isinstance(item, tuple) else (item, 1) for item in items]
        with self.pool._lock:
            c_items = ffi.new("struct kv_batch_item[]", [(seq._c(), n) for seq, n in pairs])
            check(lib.kv_batch_build(self._c(), c_items, len(pairs), pad_seqs, pad_tokens))
            data = self._data
            self.n_seqs, self.n_tokens = data.n_seqs, data.n_tokens
            self.n_real_seqs, self.n_real_tokens = data.n_real_seqs, data.n_real_tokens
            self.max_query_len, self.max_seq_len = data.max_query_len, data.max_seq_len
            self.n_logits = self.max_logits_per_seq = 0
        return self

    def logits(self, n_logits: Iterable[int], pad: int = 0) -> "np.ndarray[Any, Any]":
        """Which of the last build's tokens logits are wanted of: each item's last ones.

        :param n_logits: how many, for each item: 1 in a decode, 0 in a prompt's chunk that isn't its last
        :param pad: at least so many entries
        :returns: [n_logits, padded] int32, rising, then the last one again; valid until the next build()
        """
        counts = list(n_logits)
        with self.pool._lock:
            data = self._data
            check(lib.kv_batch_logits(self._c(), ffi.new("uint32_t[]", counts), len(counts), pad))
            self.n_logits, self.max_logits_per_seq = data.n_logits, data.max_logits_per_seq
            address, n = int(ffi.cast("uintptr_t", data.logits_indices)), data.n_logits_padded
        return np.asarray(HostMemory(address, (n,), "<i4", self._keep))

    def copy(self, stream: Any = None) -> None:
        """Does the copies of this build (after forks), before the step writes."""
        pool = self.pool
        with pool._lock:
            check(lib.kv_batch_copy(self._c(), stream_of(
                stream, pool.is_cuda, pool.component(0).ordinal if pool.is_cuda else 0)))

    @property
    def copies(self) -> "np.ndarray[Any, Any]":
        """[n, 2] source and destination blocks, for workers that map the pool. A copy."""
        with self.pool._lock:
            self._c()
            n = self._data.n_copies
            flat = ffi.unpack(self._data.copies, 2 * n) if n else []
        return np.array(flat, np.int32).reshape(n, 2)

    def whole(self, name: str) -> "np.ndarray[Any, Any]":
        """An array at its full size: its address stays the same, as a captured graph needs it."""
        return self._whole[name]

    def torch(self, name: str) -> Any:
        """An array of the last build as a torch tensor over the same memory."""
        import torch

        return torch.from_numpy(getattr(self, name))

    @property
    def table_width(self) -> int:
        """Columns of the block table: blocks of the longest sequence that fits."""
        return int(self._whole["block_table"].shape[1])

    @property
    def block_table(self) -> "np.ndarray[Any, Any]":
        """[n_seqs, table_width]; the null block behind a sequence's own."""
        return self._whole["block_table"][:self.n_seqs]

    @property
    def slots(self) -> "np.ndarray[Any, Any]":
        """[n_tokens]; -1 for padding."""
        return self._whole["slots"][:self.n_tokens]

    @property
    def positions(self) -> "np.ndarray[Any, Any]":
        """[n_tokens]"""
        return self._whole["positions"][:self.n_tokens]

    @property
    def tokens(self) -> "np.ndarray[Any, Any]":
        """[n_tokens]"""
        return self._whole["tokens"][:self.n_tokens]

    @property
    def query_start_loc(self) -> "np.ndarray[Any, Any]":
        """[n_seqs + 1]"""
        return self._whole["query_start_loc"][:self.n_seqs + 1]

    @property
    def seq_lens(self) -> "np.ndarray[Any, Any]":
        """[n_seqs]"""
        return self._whole["seq_lens"][:self.n_seqs]

    @property
    def n_computed(self) -> "np.ndarray[Any, Any]":
        """[n_seqs] tokens before this step's; 0: recurrent state starts from zero."""
        return self._whole["n_computed"][:self.n_seqs]
