# SPDX-License-Identifier: Apache-2.0
"""Memory as arrays, without copies: components of the arena, and pointers of what callers bring."""
from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from ._lib import check, ffi, lib
from .layout import DTYPE_BYTES, DTYPE_NAMES

if TYPE_CHECKING:
    from .pool import Pool

__all__ = ["View"]

# bf16 and 8-bit floats have no name in these protocols: their bits are shown.
_TYPESTR = {"f32": "<f4", "f16": "<f2", "bf16": "<i2", "f8_e4m3": "|u1", "bytes": "|u1"}
_NUMPY_TYPE = {"f32": "<f4", "f16": "<f2", "bf16": "<u2", "f8_e4m3": "|u1", "bytes": "|u1"}
_DL_UINT = 1

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_capsule_is = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _drop_capsule(capsule: int) -> None:
    """A capsule that nobody has made a tensor of; one that was used has another name."""
    if _capsule_is(capsule, b"dltensor"):
        tensor = ffi.cast("struct dl_managed *", _capsule_pointer(capsule, b"dltensor"))
        tensor.deleter(tensor)


class HostMemory:
    """An address that numpy reads in place; ``keep`` lives as long as any array made of it."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str, keep: Any,
                 strides: Optional[tuple[int, ...]] = None) -> None:
        self.keep = keep
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": shape,
                                    "typestr": typestr, "strides": strides}


class View:
    """One component of every block, as a strided array over the shared arena.

    ``shape`` is (blocks, rows, heads, elements), for a state (blocks, heads, elements). Index it by
    the ids of blocks that are held: others' content is not yours to read or write. Arrays made of it
    keep the arena mapped, also when the pool is closed.
    """

    def __init__(self, pool: "Pool", index: int, gpu: int) -> None:
        component = pool.layout.components[index]
        struct = ffi.new("struct kv_view *")
        check(lib.kv_pool_view(pool._c(), gpu, index, struct))
        hold = ffi.new("struct kv_hold **")
        check(lib.kv_pool_hold(pool._c(), gpu, hold))
        self._hold = ffi.gc(hold[0], lib.kv_hold_free)
        self._dlpack_source = (pool, gpu, index)
        self.struct = struct[0]
        self._struct_memory = struct
        self.index = index
        self.layer = component.layer
        self.role = component.role
        self.dtype = DTYPE_NAMES[struct.dtype]
        self.itemsize = DTYPE_BYTES[self.dtype]
        self.scale = float(struct.scale)
        self.is_cuda = pool.is_cuda
        self.ordinal = check_number(lib.kv_pool_ordinal(pool._c(), gpu))
        self.ptr = int(ffi.cast("uintptr_t", struct.base))
        rows = () if component.role == "state" else ((struct.block_tokens, struct.token_stride),)
        dims = ((pool.id_limit, struct.block_stride),) + rows + (
            (struct.n_heads, struct.head_stride), (struct.head_dim, self.itemsize))
        self.shape: tuple[int, ...] = tuple(n for n, _ in dims)
        #: in bytes
        self.strides: tuple[int, ...] = tuple(stride for _, stride in dims)

    def __repr__(self) -> str:
        return (f"<kvclient.View layer {self.layer} {self.role} {self.dtype} {self.shape} on "
                f"{'cuda:%d' % self.ordinal if self.is_cuda else 'host'}>")

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self.is_cuda:
            raise AttributeError("the pool is mapped on a GPU: take torch() or __dlpack__")
        return {"version": 3, "data": (self.ptr, False), "shape": self.shape,
                "typestr": _NUMPY_TYPE[self.dtype], "strides": self.strides}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """bf16 as int16, 8-bit floats as uint8: the protocol has no names for them."""
        if not self.is_cuda:
            raise AttributeError("the pool is mapped in host memory: take numpy() or __dlpack__")
        return {"version": 3, "data": (self.ptr, False), "shape": self.shape,
                "typestr": _TYPESTR[self.dtype], "strides": self.strides, "stream": None}

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.ordinal) if self.is_cuda else (1, 0)

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None,
                   copy: Optional[bool] = None) -> Any:
        """A capsule for torch.from_dlpack() and others; bf16 and 8-bit floats have their types."""
        if copy:
            raise BufferError("this is shared memory; copy what was made of it instead")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"it lies on {self.__dlpack_device__()}, not on {dl_device}")
        return self._capsule(None)

    def _capsule(self, type_code: Optional[int]) -> Any:
        pool, gpu, index = self._dlpack_source
        tensor = ffi.new("void **")
        check(lib.kv_pool_dlpack(pool._c(), gpu, index, tensor))
        managed = ffi.cast("struct dl_managed *", tensor[0])
        if type_code is not None:
            managed.type_code = type_code
        return _new_capsule(int(ffi.cast("uintptr_t", managed)), b"dltensor",
                            ctypes.cast(_drop_capsule, ctypes.c_void_p))

    def numpy(self) -> "np.ndarray[Any, Any]":
        """In place, writable. bf16 as its bits in uint16, 8-bit floats in uint8."""
        self.__array_interface__  # numpy would make an object of one whose memory it can't read
        return np.asarray(self)

    def torch(self) -> Any:
        """In place, writable, in its own type, on its own device."""
        import torch

        if self.dtype != "f8_e4m3":
            return torch.utils.dlpack.from_dlpack(self._capsule(None))
        bits = torch.utils.dlpack.from_dlpack(self._capsule(_DL_UINT))
        return bits.view(torch.float8_e4m3fn) if hasattr(torch, "float8_e4m3fn") else bits


def check_number(result: int) -> int:
    if result < 0:
        check(result)
    return result


_TORCH_NAMES = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16",
                "torch.int32": "i32", "torch.int64": "i64", "torch.uint8": "bytes",
                "torch.float8_e4m3fn": "f8_e4m3"}
_NUMPY_NAMES = {"<f4": "f32", "<f2": "f16", "<u2": "bf16", "<i4": "i32", "<i8": "i64", "|u1": "bytes"}


class Pointer:
    """Address, type, shape and device of an array that a caller brings. Holds it alive."""

    __slots__ = ("owner", "address", "dtype", "shape", "strides", "is_cuda")

    def __init__(self, what: str, array: Any) -> None:
        self.owner = array
        if type(array).__module__.split(".")[0] == "torch":
            self.address = array.data_ptr()
            self.dtype = _TORCH_NAMES.get(str(array.dtype), str(array.dtype))
            self.shape = tuple(array.shape)
            self.strides = tuple(array.stride())
            self.is_cuda = bool(array.is_cuda)
            return
        interface = getattr(array, "__cuda_array_interface__", None)
        self.is_cuda = interface is not None
        if interface is None:
            interface = getattr(array, "__array_interface__", None)
        if interface is None:
            raise TypeError(f"{what}: {type(array).__name__} given; a torch tensor, a numpy array, or "
                            "what has __cuda_array_interface__ is needed")
        self.address = interface["data"][0]
        self.dtype = _NUMPY_NAMES.get(interface["typestr"], interface["typestr"])
        self.shape = tuple(interface["shape"])
        size = np.dtype(interface["typestr"]).itemsize
        strides = interface.get("strides")
        if strides is None:
            dense = [1]
            for n in reversed(self.shape[1:]):
                dense.insert(0, dense[0] * n)
            self.strides = tuple(dense)
        else:
            self.strides = tuple(stride // size for stride in strides)

    def rows(self, what: str, n_dims: int) -> int:
        """The stride of the first axis in elements; the other axes must be dense."""
        if len(self.shape) != n_dims:
            raise ValueError(f"{what}: shape {self.shape} given, {n_dims} dimensions are needed")
        dense = 1
        for n, stride in zip(reversed(self.shape[1:]), reversed(self.strides[1:])):
            if n > 1 and stride != dense:
                raise ValueError(f"{what}: strides {self.strides} for shape {self.shape}; all axes but "
                                 "the first must be dense")
            dense *= n
        return self.strides[0] if self.shape[0] > 1 else dense

    def dense(self, what: str, dtype: str, n_dims: int) -> "Pointer":
        if self.dtype != dtype:
            raise TypeError(f"{what}: {self.dtype} given, {dtype} is needed")
        row = self.rows(what, n_dims)
        size = 1
        for n in self.shape[1:]:
            size *= n
        if self.shape[0] > 1 and row != size:
            raise ValueError(f"{what}: strides {self.strides} for shape {self.shape}; it must be dense")
        return self

    @property
    def void(self) -> Any:
        return ffi.cast("void *", self.address)


def stream_of(stream: Any, is_cuda: bool, ordinal: int) -> Any:
    """The CUDA stream for a call: as given, or else torch's current one."""
    if not is_cuda:
        return ffi.NULL
    if stream is None and "torch" in sys.modules:
        stream = sys.modules["torch"].cuda.current_stream(ordinal)
    if stream is None:
        return ffi.NULL
    if hasattr(stream, "__cuda_stream__"):
        number = stream.__cuda_stream__()[1]
    else:
        number = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
    return ffi.cast("void *", int(number))
