# SPDX-License-Identifier: Apache-2.0
"""The connection to the daemon of this machine."""
from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Mapping, Optional, Type, Union

from ._lib import NULL, check, ffi, lib, nanoseconds, options, text
from .arrays import check_number
from .layout import Layout
from .plan import Plan
from .pool import Pool

__all__ = ["Client", "Gpu", "CheckResult"]


@dataclass(frozen=True)
class Gpu:
    """One device of the daemon; ``index`` is its bit in ``gpu_mask``."""

    index: int
    name: str
    uuid: str
    export_kind: str
    arena_bytes: int
    is_cuda: bool


@dataclass(frozen=True)
class CheckResult:
    """What the daemon found when it walked its books."""

    n_pools: int
    n_blocks: int
    n_errors: int
    first_error: str


class Client:
    """A connection. May be used from several threads, not in a forked child.

    :param socket: None: $KVCACHED_SOCKET, else the daemon's default path
    :param name: label for operators; None: the program's name
    :param timeout: seconds; None: 5
    """

    def __init__(self, socket: Union[str, "os.PathLike[str]", None] = None,
                 name: Optional[str] = None, *, timeout: Optional[float] = None) -> None:
        self._client: Any = None
        self._lock = threading.Lock()
        self._pools: "set[Pool]" = set()
        path, label = text(None if socket is None else os.fspath(socket)), text(name)
        ret = ffi.new("struct kv_client **")
        check(lib.kv_connect(options("kv_connect_options", socket=path, name=label,
                                     timeout=nanoseconds(timeout)), ret))
        self._client = ret[0]

    def _c(self) -> Any:
        if self._client is None:
            raise ValueError("this client is closed")
        return self._client

    def close(self) -> None:
        """Closes its pools, then the connection. Doing it twice is fine."""
        for pool in list(self._pools):
            pool.close()
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            lib.kv_disconnect(client)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_client", None) is not None:
            self.close()

    def ping(self, timeout: Optional[float] = None) -> None:
        """A round trip: what this process gave and published before has been worked off by then."""
        check(lib.kv_ping(self._c(), nanoseconds(timeout)))

    @property
    def gpus(self) -> list[Gpu]:
        """The daemon's devices."""
        ret = ffi.new("struct kv_gpu **")
        n = check_number(lib.kv_client_gpus(self._c(), ret))
        return [Gpu(g.index, _string(g.name), _string(g.uuid), _string(g.export_kind),
                    g.arena_bytes, g.device == lib.KV_DEVICE_CUDA) for g in ret[0][0:n]]

    def pool(self, name: str, *, model: Optional[str] = None, revision: Optional[str] = None,
             name_space: Optional[str] = None, layout: Optional[Layout] = None,
             plan: Optional[Plan] = None, plan_pool: int = 0,
             config: Union[str, "os.PathLike[str]", None] = None, tp_ranks: int = 0,
             gpu_mask: int = 0, min_bytes: int = 0, max_bytes: int = 0, mapped: bool = True,
             map_mask: int = 0, max_seq_tokens: int = 0, timeout: Optional[float] = None) -> Pool:
        """Attaches to a pool, creating it if it is new.

        Those who give the same name share it, and must say the same ``model``, ``revision``,
        ``name_space``, ``tp_ranks`` and layout. The layout is a ``layout``, one pool of a ``plan``, or
        that of a ``config`` (a config.json, its folder, a .gguf file); with none of them the pool
        must exist. ``mapped=False`` leases and looks up without touching the memory. No sequence of it
        gets room for more than ``max_seq_tokens`` (0: no bound).

        :raises ExistsError: a pool of that name has another identity
        :raises NotFoundError: there is none, and no layout was given
        """
        texts = [text(name), text(model), text(revision), text(name_space),
                 text(None if config is None else os.fspath(config))]
        layout_struct = layout._struct() if layout is not None else (NULL, None)
        what = options("kv_pool_options", name=texts[0], model=texts[1], revision=texts[2],
                       name_space=texts[3], config=texts[4], tp_ranks=tp_ranks,
                       layout=layout_struct[0], gpu_mask=gpu_mask, min_bytes=min_bytes,
                       max_bytes=max_bytes, mapped=int(mapped), map_mask=map_mask,
                       max_seq_tokens=max_seq_tokens,
                       timeout=nanoseconds(timeout), plan=plan._plan if plan else None,
                       plan_pool=plan_pool)
        ret = ffi.new("struct kv_pool **")
        check(lib.kv_pool_open(self._c(), what, ret))
        pool = Pool(self, name, ret[0])
        self._pools.add(pool)
        return pool

    def drop(self, name: str, timeout: Optional[float] = None) -> None:
        """Evicts what a pool has cached and nobody holds; without sessions the pool is removed."""
        check(lib.kv_pool_drop(self._c(), text(name), nanoseconds(timeout)))

    def check(self, timeout: Optional[float] = None) -> CheckResult:
        """Lets the daemon walk its books, the shared pages and the extents, and compare."""
        ret = ffi.new("struct kv_check_result *")
        check(lib.kv_check(self._c(), ret, nanoseconds(timeout)))
        return CheckResult(ret.n_pools, ret.n_blocks, ret.n_errors, _string(ret.first_error))

    def stats(self, timeout: Optional[float] = None) -> Mapping[str, Any]:
        """All that the daemon can say of itself, as ``kvctl --json stats`` does.

        ``{"daemon": {...}, "gpus": [...], "pools": [...], "sessions": [...]}``; the keys are the
        fields of kvcached/stats.h.
        """
        kinds = {"gpus": lib.KV_STAT_GPU, "pools": lib.KV_STAT_POOL, "sessions": lib.KV_STAT_SESSION}
        found: dict[str, Any] = {"daemon": self._stats(lib.KV_STAT_DAEMON, timeout)[0]}
        for name, kind in kinds.items():
            found[name] = self._stats(kind, timeout)
        return found

    def _stats(self, kind: int, timeout: Optional[float]) -> list[dict[str, Any]]:
        items, n = ffi.new("void **"), ffi.new("size_t *")
        check(lib.kv_stats(self._c(), kind, items, n, nanoseconds(timeout)))
        memory = ffi.gc(items[0], lib.free)
        fields, size = lib.kv_stat_fields(kind), lib.kv_stat_bytes(kind)
        return [_item(ffi.cast("char *", memory) + i * size, fields) for i in range(n[0])]


def _string(chars: Any) -> str:
    return str(ffi.string(chars).decode(errors="replace"))


def _item(at: Any, fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    i = 0
    while fields[i].name != NULL:
        place = at + fields[i].offset
        found[_string(fields[i].name)] = (
            _string(place) if fields[i].type == lib.KV_STAT_TEXT
            else int(ffi.cast("uint64_t *", place)[0]))
        i += 1
    return found
