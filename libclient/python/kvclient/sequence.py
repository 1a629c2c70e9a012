# SPDX-License-Identifier: Apache-2.0
"""Sequences: the tokens of one request and the blocks that hold their K and V."""
from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Optional, Type

import numpy as np

from ._lib import check, ffi, lib, nanoseconds
from .arrays import stream_of

if TYPE_CHECKING:
    from .pool import Pool

__all__ = ["Sequence"]


def tokens_of(tokens: Any) -> tuple[Any, int, Any]:
    """Pointer, length, and what must stay alive, of a list, an array or a host tensor."""
    array = np.ascontiguousarray(tokens, np.int32)
    if array.ndim != 1:
        raise ValueError(f"tokens: shape {array.shape} given, one dimension is needed")
    return ffi.cast("int32_t *", array.ctypes.data), len(array), array


class Sequence:
    """``len(seq)`` tokens, found in the cache or appended, and room for ``capacity``.

    ``stream`` in a call is a CUDA stream (a number, torch's or cupy's); None is torch's current
    one. What the call gives back or shows waits for the work queued there so far. In host memory,
    and in pools that are not mapped, it is ignored: call when the step's results are there.
    """

    def __init__(self, pool: "Pool", handle: Any) -> None:
        self.pool = pool
        self._seq = handle
        pool._sequences.add(handle)

    def _c(self) -> Any:
        if self._seq is None or self._seq not in self.pool._sequences:
            raise ValueError("this sequence is closed")
        return self._seq

    def _stream(self, stream: Any) -> Any:
        pool = self.pool
        if not pool.is_cuda:
            return ffi.NULL
        return stream_of(stream, True, pool.component(0).ordinal)

    def close(self, stream: Any = None) -> None:
        """Ends it; its blocks go back after the stream's work so far. What was published stays."""
        pool = self.pool
        with pool._lock:
            # The address may be another sequence's afterwards: it is forgotten at once.
            seq, self._seq = self._seq, None
            if seq is not None and seq in pool._sequences:
                queue = self._stream(stream)
                pool._sequences.discard(seq)
                lib.kv_seq_free(seq, queue)

    def __enter__(self) -> "Sequence":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_seq", None) is not None:
            self.pool._forget(self)

    def __len__(self) -> int:
        with self.pool._lock:
            return int(lib.kv_seq_len(self._c()))

    @property
    def capacity(self) -> int:
        """Tokens that its blocks have room for."""
        with self.pool._lock:
            return int(lib.kv_seq_capacity(self._c()))

    @property
    def tokens(self) -> "np.ndarray[Any, Any]":
        """A copy."""
        with self.pool._lock:
            n, at = lib.kv_seq_len(self._c()), lib.kv_seq_tokens(self._c())
            return np.frombuffer(ffi.buffer(at, 4 * n), np.int32).copy() if n else np.empty(0, np.int32)

    @property
    def blocks(self) -> "np.ndarray[Any, Any]":
        """Ids in order. A copy: the batch has tables to hand to kernels."""
        ret = ffi.new("kv_block_id **")
        with self.pool._lock:
            n = lib.kv_seq_blocks(self._c(), ret)
            return np.frombuffer(ffi.buffer(ret[0], 4 * n), np.int32).copy() if n else np.empty(0, np.int32)

    def lookup(self, tokens: Any, partial: bool = False) -> int:
        """Finds the longest cached prefix of a prompt and holds its blocks.

        :param partial: also the first tokens of the block behind: reserve() notes a copy of it, which
            the next batch carries, or lets go of it where there is no room: ask len() then
        Return: tokens found, at most len(tokens) - 1; whole blocks, but for ``partial``. No message, no wait.
        """
        at, n, _keep = tokens_of(tokens)
        hit = ffi.new("size_t *")
        look_up = lib.kv_seq_lookup_partial if partial else lib.kv_seq_lookup
        with self.pool._lock:
            check(look_up(self._c(), at, n, hit))
        return int(hit[0])

    def reserve(self, n_tokens: int, timeout: float = 0) -> None:
        """Room for ``n_tokens`` in total, writable from len on, all or nothing.

        :raises NoRoom: not within ``timeout`` seconds; the sequence is as before
        :raises TooLarge: the pool never has that many blocks
        """
        with self.pool._lock:
            check(lib.kv_seq_reserve(self._c(), n_tokens, nanoseconds(timeout) if timeout else 0))

    def append(self, tokens: Any) -> None:
        """The next tokens, whose K and V are about to be computed; reserve() first."""
        at, n, _keep = tokens_of(tokens)
        with self.pool._lock:
            check(lib.kv_seq_append(self._c(), at, n))

    def start(self, prompt: Any, n_more: int = 0, timeout: float = 0, partial: bool = False) -> int:
        """lookup(), reserve() for the prompt and ``n_more``, append() of what wasn't found.

        Return: tokens found; the other len(prompt) - hit are to be computed.
        """
        prompt = np.ascontiguousarray(prompt, np.int32)
        self.lookup(prompt, partial)
        self.reserve(len(prompt) + n_more, timeout)
        hit = len(self)
        self.append(prompt[hit:])
        return hit

    def fork(self) -> "Sequence":
        """A second sequence with the same tokens and blocks; nothing is copied until one writes."""
        ret = ffi.new("struct kv_seq **")
        with self.pool._lock:
            check(lib.kv_seq_fork(self._c(), ret))
            return Sequence(self.pool, ret[0])

    def rollback(self, n_tokens: int, stream: Any = None) -> None:
        """Forgets the tokens from ``n_tokens`` on."""
        with self.pool._lock:
            check(lib.kv_seq_rollback(self._c(), n_tokens, self._stream(stream)))

    def publish(self, stream: Any = None) -> None:
        """Shows complete blocks to all processes, after the stream's work so far. Never waits."""
        with self.pool._lock:
            check(lib.kv_seq_publish(self._c(), self._stream(stream)))
