# SPDX-License-Identifier: Apache-2.0
"""What can go wrong. Every exception is a KvError with the library's words and its errno; most are a
built-in exception as well, so ``except TimeoutError`` works as one would think.
"""
from __future__ import annotations

import errno as _errno

__all__ = ["KvError", "InvalidError", "NotFoundError", "LostError", "WaitedTooLong", "ExistsError",
           "UnsupportedError", "NotMappedError", "NoRoom", "TooLarge"]


class KvError(Exception):
    """A call of the library failed. ``errno`` is positive, as in the module errno."""

    errno: int

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.errno = code


class InvalidError(KvError, ValueError):
    """EINVAL, E2BIG, EOVERFLOW: the text names the field, the value and what would be right."""


class NotFoundError(KvError, LookupError):
    """ENOENT: no such pool, file or daemon."""


class LostError(KvError, ConnectionError):
    """ECONNRESET, ECONNREFUSED, ECHILD: the daemon is gone, or this is a forked child."""


class WaitedTooLong(KvError, TimeoutError):
    """ETIMEDOUT."""


class ExistsError(KvError):
    """EEXIST: a pool of that name has another identity; the text lists what differs."""


class UnsupportedError(KvError, NotImplementedError):
    """ENOTSUP: no backend, device or layout can do it; the text says why."""


class NotMappedError(KvError):
    """ENXIO: the pool isn't mapped on that device in this process."""


class NoRoom(KvError):
    """Not now: the pool is full of blocks in use. Nothing was taken."""


class TooLarge(KvError):
    """Never: the request exceeds the pool itself. Nothing was taken."""


_CLASSES: dict[int, type[KvError]] = {
    _errno.EINVAL: InvalidError,
    _errno.E2BIG: InvalidError,
    _errno.EOVERFLOW: InvalidError,
    _errno.ENOENT: NotFoundError,
    _errno.ECONNRESET: LostError,
    _errno.ECONNREFUSED: LostError,
    _errno.ECHILD: LostError,
    _errno.ETIMEDOUT: WaitedTooLong,
    _errno.EEXIST: ExistsError,
    _errno.ENOTSUP: UnsupportedError,
    _errno.ENXIO: NotMappedError,
}


def error_of(code: int, text: str) -> KvError:
    """The exception for a positive errno."""
    return _CLASSES.get(code, KvError)(text or _errno.errorcode.get(code, str(code)), code)
