# SPDX-License-Identifier: Apache-2.0
"""Sequences of models whose layers keep different things: all tokens, a window of them, a state.

See kvcached/group.h: a group sequence is found, grown, forked, rolled back, published and freed in every
group or in none.

::

    with kvclient.Groups([kvclient.Group("full", kv), kvclient.Group("state", rows, interval=256)]) as groups:
        seq = groups.sequence()
        hit = seq.start(prompt, n_more=1)              # the same in all groups
        batch.build([(seq.part(0), len(prompt) - hit)])
        lanes.build([(seq, len(prompt) - hit)])        # rows to read and to write (state.py)
        ...                                            # the step
        seq.publish()
        seq.done(len(seq))                             # its results are back: windows move on
"""
from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Optional, Sequence as Seq, Type

import numpy as np

from ._lib import check, ffi, lib, nanoseconds, options
from .arrays import stream_of
from .layout import number_of
from .pool import Pool
from .sequence import tokens_of

__all__ = ["Group", "GroupSequence", "Groups"]

_KINDS = {"full": lib.KV_GROUP_FULL, "window": lib.KV_GROUP_WINDOW, "chunked": lib.KV_GROUP_CHUNKED,
          "state": lib.KV_GROUP_STATE}


@dataclass(frozen=True)
class Group:
    """Layers that keep the same tokens, and the pool that has their blocks.

    :param kind: "full", "window", "chunked" or "state" (whose rows are the pool's blocks)
    :param window: tokens that a token sees, itself included; of "chunked" those of a chunk
    :param interval: of "state": tokens from checkpoint to checkpoint, a multiple of all block_tokens
    :param n_drafts: of "state": tokens of a step that may be rolled back one by one
    :param n_checkpoints: of "state": how many of its own a sequence goes on holding; 0: one
    """

    kind: str
    pool: Pool
    window: int = 0
    interval: int = 0
    n_drafts: int = 0
    n_checkpoints: int = 0


class Groups:
    """The groups of a model. All engines that share prefixes give the same ones in the same order.

    Closing one of its pools closes it first.
    """

    def __init__(self, groups: Seq[Group]) -> None:
        self.groups = tuple(groups)
        # Each lock once, in an order that all threads keep.
        self._pools = sorted({group.pool for group in groups}, key=id)
        self._sequences: set[Any] = set()
        self._left: "deque[Any]" = deque()  # what was forgotten while another thread had a lock
        self._groups: Any = None
        with self._locked():
            array = ffi.new("struct kv_group[]", [
                {"kind": number_of(_KINDS, g.kind, "kind"), "pool": g.pool._c(), "window": g.window,
                 "interval": g.interval, "n_drafts": g.n_drafts, "n_checkpoints": g.n_checkpoints}
                for g in groups])
            ret = ffi.new("struct kv_groups **")
            check(lib.kv_groups_new(options("kv_groups_options", groups=array, n_groups=len(self.groups)), ret))
            self._groups = ret[0]
            for pool in self._pools:
                pool._users.add(self)

    def _locked(self) -> ExitStack:
        stack = ExitStack()
        for pool in self._pools:
            stack.enter_context(pool._lock)
        return stack

    def _forget(self, seq: "GroupSequence") -> None:
        """As Pool's: all locks or none, and no waiting for one."""
        with ExitStack() as stack:
            for pool in self._pools:
                if not pool._lock.acquire(blocking=False):
                    self._left.append(seq)
                    return
                stack.callback(pool._lock.release)
            seq.close()

    def _c(self) -> Any:
        if self._groups is None:
            raise ValueError("these groups are closed")
        return self._groups

    def close(self) -> None:
        """Ends its sequences. Doing it twice is fine."""
        with self._locked():
            groups, self._groups = self._groups, None
            if groups is None:
                return
            for pool in self._pools:
                if self._sequences and pool._pool is not None:
                    pool._wait_for_work(pool._pool)
            # One by one: the garbage collector may come in between, and end some of them.
            while self._sequences:
                lib.kv_gseq_free(self._sequences.pop(), ffi.NULL)
            lib.kv_groups_free(groups)
            for pool in self._pools:
                pool._users.discard(self)

    def __enter__(self) -> "Groups":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()

    def _stream(self, stream: Any) -> Any:
        pool = self.groups[0].pool
        return stream_of(stream, pool.is_cuda, pool.component(0).ordinal if pool.is_cuda else 0)

    @property
    def unit(self) -> int:
        """Hits are multiples of so many tokens."""
        with self._locked():
            return int(lib.kv_groups_unit(self._c()))

    def sequence(self) -> "GroupSequence":
        """An empty sequence in each group."""
        ret = ffi.new("struct kv_gseq **")
        with self._locked():
            while self._left:
                self._left.popleft().close()
            check(lib.kv_gseq_new(self._c(), ret))
            return GroupSequence(self, ret[0])


class Part:
    """A group's blocks of a sequence, as batches take it."""

    def __init__(self, seq: "GroupSequence", group: int) -> None:
        self.seq, self.group = seq, group

    def _c(self) -> Any:
        handle = lib.kv_gseq_seq(self.seq._c(), self.group)
        if handle == ffi.NULL:
            raise ValueError(f"group {self.group} is a state: it has rows, no blocks")
        return handle

    @property
    def blocks(self) -> "np.ndarray[Any, Any]":
        """Ids in order, the null block where a window has moved on. A copy."""
        ret = ffi.new("kv_block_id **")
        with self.seq.groups._locked():
            n = lib.kv_seq_blocks(self._c(), ret)
            return np.frombuffer(ffi.buffer(ret[0], 4 * n), np.int32).copy() if n else np.empty(0, np.int32)


class GroupSequence:
    """``len(seq)`` tokens, the same in all groups. ``stream`` is as in Sequence."""

    def __init__(self, groups: Groups, handle: Any) -> None:
        self.groups = groups
        self._seq: Any = handle
        groups._sequences.add(handle)

    def _c(self) -> Any:
        if self._seq is None or self._seq not in self.groups._sequences:
            raise ValueError("this sequence is closed")
        return self._seq

    def close(self, stream: Any = None) -> None:
        """Ends it; blocks and rows go back after the stream's work so far. What was published stays."""
        groups = self.groups
        with groups._locked():
            seq, self._seq = self._seq, None
            if seq is not None and seq in groups._sequences:
                queue = groups._stream(stream)
                groups._sequences.discard(seq)
                lib.kv_gseq_free(seq, queue)

    def __enter__(self) -> "GroupSequence":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_seq", None) is not None:
            self.groups._forget(self)

    def __len__(self) -> int:
        with self.groups._locked():
            return int(lib.kv_gseq_len(self._c()))

    def part(self, group: int) -> Part:
        """A group's blocks, for a Batch of its pool."""
        return Part(self, group)

    def lookup(self, tokens: Any, partial: bool = False) -> int:
        """The longest prefix that every group has, held in all of them. Return: its tokens.

        :param partial: also the first tokens of the blocks behind, as of :meth:`Sequence.lookup`
        """
        at, n, _keep = tokens_of(tokens)
        hit = ffi.new("size_t *")
        look_up = lib.kv_gseq_lookup_partial if partial else lib.kv_gseq_lookup
        with self.groups._locked():
            check(look_up(self._c(), at, n, hit))
        return int(hit[0])

    def reserve(self, n_tokens: int, timeout: float = 0) -> None:
        """Room for ``n_tokens`` in total in every group, or in none.

        :raises NoRoom: not within ``timeout`` seconds; the sequence is as before
        :raises TooLarge: a pool never has that many blocks
        """
        with self.groups._locked():
            check(lib.kv_gseq_reserve(self._c(), n_tokens, nanoseconds(timeout) if timeout else 0))

    def append(self, tokens: Any) -> None:
        """The tokens that the next step computes; reserve() first. With a state: one append is one step."""
        at, n, _keep = tokens_of(tokens)
        with self.groups._locked():
            check(lib.kv_gseq_append(self._c(), at, n))

    def start(self, prompt: Any, n_more: int = 0, timeout: float = 0, partial: bool = False) -> int:
        """lookup(), reserve() for the prompt and ``n_more``, append() of what wasn't found."""
        prompt = np.ascontiguousarray(prompt, np.int32)
        self.lookup(prompt, partial)
        self.reserve(len(prompt) + n_more, timeout)
        hit = len(self)
        self.append(prompt[hit:])
        return hit

    def fork(self) -> "GroupSequence":
        """A second sequence with the same tokens, blocks and state."""
        ret = ffi.new("struct kv_gseq **")
        with self.groups._locked():
            check(lib.kv_gseq_fork(self._c(), ret))
            return GroupSequence(self.groups, ret[0])

    def rollback(self, n_tokens: int, stream: Any = None) -> None:
        """Forgets the tokens from ``n_tokens`` on, in all groups or in none.

        :raises KvError: a group can't go back there; the text says where it could
        """
        with self.groups._locked():
            check(lib.kv_gseq_rollback(self._c(), n_tokens, self.groups._stream(stream)))

    def publish(self, stream: Any = None) -> None:
        """Shows complete blocks and checkpoints to all, after the stream's work so far. Never waits."""
        with self.groups._locked():
            check(lib.kv_gseq_publish(self._c(), self.groups._stream(stream)))

    def done(self, n_tokens: int, stream: Any = None) -> None:
        """The results of the first ``n_tokens`` are back and stay: windows move on."""
        with self.groups._locked():
            check(lib.kv_gseq_done(self._c(), n_tokens, self.groups._stream(stream)))

    @property
    def stop(self) -> Optional[int]:
        """Tokens until a state can be kept without writing it twice; None without states."""
        with self.groups._locked():
            n = int(lib.kv_gseq_stop(self._c()))
        return n if n < 1 << 62 else None
