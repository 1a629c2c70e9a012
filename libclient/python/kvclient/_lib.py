# SPDX-License-Identifier: Apache-2.0
"""libkvclient.so, loaded, and calls of it that raise.

Where it is looked for: $KVCLIENT_LIBRARY; beside this file (a wheel that brings it along); where the
dynamic loader looks. cffi lets other Python threads run during each call.
"""
from __future__ import annotations

import os
from typing import Any, Optional

from . import errors
from ._abi import ffi

_NAME = "libkvclient.so.0"


def _load() -> Any:
    given = os.environ.get("KVCLIENT_LIBRARY")
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), _NAME)
    path = given or (beside if os.path.exists(beside) else _NAME)
    try:
        loaded = ffi.dlopen(path)
        version = ffi.string(loaded.kv_version()).decode()
    except OSError as error:
        raise ImportError(f"kvclient: {path} can't be loaded ({error}); install it, or set "
                          "KVCLIENT_LIBRARY to its path") from None
    # Declarations are those of one minor version.
    if version.split(".")[:2] != [str(loaded.KV_VERSION_MAJOR), str(loaded.KV_VERSION_MINOR)]:
        raise ImportError(f"kvclient: {path} is version {version}, this module was built for "
                          f"{loaded.KV_VERSION_MAJOR}.{loaded.KV_VERSION_MINOR}")
    return loaded


lib = _load()
NULL = ffi.NULL


def check(result: int) -> int:
    """Raises what a call returned, if it is an error or an answer that wasn't asked about."""
    if result == 0:
        return 0
    if result < 0:
        raise errors.error_of(-result, ffi.string(lib.kv_error_text()).decode(errors="replace"))
    if result == lib.KV_NO_ROOM:
        raise errors.NoRoom("no room: the pool is full of blocks in use")
    if result == lib.KV_TOO_LARGE:
        raise errors.TooLarge("too large: the pool never has that many blocks")
    return result


def checked(result: int) -> int:
    """For calls whose positive results are numbers."""
    return result if result >= 0 else check(result)


def nanoseconds(seconds: Optional[float]) -> int:
    """A timeout of the API: None is the library's default of 5 s."""
    return 0 if seconds is None else max(int(seconds * 1e9), 1)


def options(kind: str, /, **fields: Any) -> Any:
    """An options struct with its size; fields that are None keep 0."""
    struct = ffi.new(f"struct {kind} *")
    struct.size = ffi.sizeof(f"struct {kind}")
    for field, value in fields.items():
        if value is not None:
            setattr(struct, field, value)
    return struct


def text(value: Optional[str]) -> Any:
    """A C string to keep alive as long as the struct that names it."""
    return NULL if value is None else ffi.new("char[]", value.encode())
