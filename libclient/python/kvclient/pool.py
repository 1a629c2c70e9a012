# SPDX-License-Identifier: Apache-2.0
"""A pool: the blocks of one model, leased, shared and mapped."""
from __future__ import annotations

import sys
import threading
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any, Iterable, Optional, Type

import numpy as np

from ._lib import check, ffi, lib, nanoseconds
from .arrays import View
from .layout import Layout

if TYPE_CHECKING:
    from .batch import Batch
    from .client import Client
    from .ops import Layer
    from .sequence import Sequence

__all__ = ["Pool"]


class Pool:
    """One attachment to a pool: a session of the daemon.

    Calls from several threads take turns; for work side by side open the pool once a thread. Closing
    it ends its sequences and batches; arrays that were made of them or of its memory stay readable.
    """

    def __init__(self, client: "Client", name: str, pool: Any) -> None:
        self._pool: Any = pool
        self._client = client
        self._lock = threading.RLock()
        # Raw handles that must go before the pool does, whatever becomes of the objects around them.
        self._sequences: set[Any] = set()
        self._batches: set[Any] = set()
        self._users: set[Any] = set()  # Groups, which go before it
        self._left: "deque[Any]" = deque()  # what was forgotten while another thread had the lock
        self._views: dict[tuple[int, int], View] = {}
        self._layers: dict[tuple[int, int], "Layer"] = {}
        self._workspaces: Any = None
        info = ffi.new("struct kv_pool_info *")
        lib.kv_pool_info(pool, info)
        self.name = name
        self.block_tokens: int = info.block_tokens
        self.block_bytes: int = info.block_bytes
        #: the most blocks this pool can ever have
        self.max_blocks: int = info.max_blocks
        #: never handed out; pads block tables
        self.null_block: int = info.null_block
        #: ids are below this
        self.id_limit: int = info.id_limit
        self.gpu_mask: int = info.gpu_mask
        #: number of this session, as kvctl shows it
        self.session: int = info.session
        #: its memory is a GPU's, and mapped here
        self.is_cuda: bool = info.device == lib.KV_DEVICE_CUDA
        self.layout = Layout._of(lib.kv_pool_layout(pool))

    def __repr__(self) -> str:
        return f"<kvclient.Pool '{self.name}' {'closed' if self._pool is None else 'open'}>"

    def _c(self) -> Any:
        if self._pool is None:
            raise ValueError(f"pool '{self.name}' is closed")
        return self._pool

    def close(self) -> None:
        """Gives everything back and detaches. Doing it twice is fine."""
        with self._lock:
            users = list(self._users)
        for user in users:
            user.close()
        with self._lock:
            pool, self._pool = self._pool, None
            if pool is None:
                return
            self._wait_for_work(pool)
            # One by one: the garbage collector may come in between, and end some of them.
            while self._sequences:
                lib.kv_seq_free(self._sequences.pop(), ffi.NULL)
            while self._batches:
                lib.kv_batch_free(self._batches.pop())
            self._views.clear()
            self._layers.clear()
            self._workspaces = None
            lib.kv_pool_close(pool)
        self._client._pools.discard(self)

    def _wait_for_work(self, pool: Any) -> None:
        """Sequences that are ended without a stream may have work queued on any."""
        if not self.is_cuda or "torch" not in sys.modules:
            return
        for gpu in range(self.gpu_mask.bit_length()):
            ordinal = lib.kv_pool_ordinal(pool, gpu)
            try:
                if ordinal >= 0:
                    sys.modules["torch"].cuda.synchronize(ordinal)
            except RuntimeError:
                pass  # a device that is broken does no work any more

    def _forget(self, user: Any) -> None:
        """An object is gone that wasn't closed. Whoever has the lock may wait for one that this thread has."""
        if self._lock.acquire(blocking=False):
            try:
                user.close()
            finally:
                self._lock.release()
        else:
            self._left.append(user)

    def _close_left(self) -> None:
        while self._left:
            self._left.popleft().close()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()

    @property
    def n_layers(self) -> int:
        """One more than the highest layer that a component names."""
        return max(c.layer for c in self.layout.components) + 1

    def view(self, layer: int, role: str, gpu: Optional[int] = None) -> View:
        """One component of all blocks, over the shared memory.

        :param gpu: index of a device this pool is mapped on; None: the first
        """
        for index, component in enumerate(self.layout.components):
            if component.layer == layer and component.role == role:
                return self.component(index, gpu)
        raise KeyError(f"layer {layer} has no component '{role}'")

    def component(self, index: int, gpu: Optional[int] = None) -> View:
        """Likewise, by its number in ``layout.components``."""
        at = (index, self._first_gpu() if gpu is None else gpu)
        with self._lock:
            if at not in self._views:
                self._views[at] = View(self, index, at[1])
            return self._views[at]

    def _first_gpu(self) -> int:
        return (self.gpu_mask & -self.gpu_mask).bit_length() - 1

    def layer(self, number: int, gpu: Optional[int] = None) -> "Layer":
        """One attention layer: its K and V, writing them, attention over them."""
        from .ops import Layer

        at = (number, self._first_gpu() if gpu is None else gpu)
        with self._lock:
            if at not in self._layers:
                self._layers[at] = Layer(self, number, at[1])
            return self._layers[at]

    def sequence(self) -> "Sequence":
        """An empty sequence."""
        from .sequence import Sequence

        ret = ffi.new("struct kv_seq **")
        with self._lock:
            self._close_left()
            check(lib.kv_seq_new(self._c(), ret))
            return Sequence(self, ret[0])

    def batch(self, max_seqs: int, max_tokens: int, max_blocks_per_seq: int) -> "Batch":
        """The arrays of a step, for so many sequences and tokens at most; reused step by step."""
        from .batch import Batch

        return Batch(self, max_seqs, max_tokens, max_blocks_per_seq)

    def take(self, n: int, timeout: float = 0) -> "np.ndarray[Any, Any]":
        """Leases ``n`` blocks that nobody else uses, all or none.

        :raises NoRoom: not within ``timeout`` seconds
        :raises TooLarge: the pool never has that many
        """
        ids = np.empty(n, np.int32)
        with self._lock:
            self._close_left()
            check(lib.kv_blocks_take(self._c(), n, ffi.cast("kv_block_id *", ids.ctypes.data),
                                     nanoseconds(timeout) if timeout else 0))
        return ids

    def give(self, ids: Iterable[int]) -> None:
        """Gives blocks back; no work that uses them may be queued or running."""
        list_ = np.ascontiguousarray(ids, np.int32)
        with self._lock:
            check(lib.kv_blocks_give(self._c(), len(list_),
                                     ffi.cast("kv_block_id *", list_.ctypes.data)))
