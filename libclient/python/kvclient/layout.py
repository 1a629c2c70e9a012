# SPDX-License-Identifier: Apache-2.0
"""Layouts: what a block holds. See kvcached/layout.h."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Sequence as Seq

from ._lib import check, ffi, lib

__all__ = ["Component", "Layout", "DTYPES", "ROLES"]

#: Names of element types. "bytes" are rows that only their kernel can read.
DTYPES = {"f32": lib.KV_F32, "f16": lib.KV_F16, "bf16": lib.KV_BF16, "f8_e4m3": lib.KV_F8_E4M3,
          "bytes": lib.KV_BYTES}
ROLES = {"k": lib.KV_ROLE_K, "v": lib.KV_ROLE_V, "state": lib.KV_ROLE_STATE,
         "index": lib.KV_ROLE_INDEX, "k_scale": lib.KV_ROLE_K_SCALE, "v_scale": lib.KV_ROLE_V_SCALE}
DTYPE_NAMES = {number: name for name, number in DTYPES.items()}
ROLE_NAMES = {number: name for name, number in ROLES.items()}
DTYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f8_e4m3": 1, "bytes": 1}
KINDS = {"flat": lib.KV_LAYOUT_FLAT, "paged": lib.KV_LAYOUT_PAGED}


def number_of(table: dict[str, int], name: str, what: str) -> int:
    if name not in table:
        raise ValueError(f"{what}: '{name}' given, one of {', '.join(table)} is needed")
    return table[name]


@dataclass(frozen=True)
class Component:
    """What one layer keeps under one role: ``n_heads`` rows of ``head_dim`` for each token, or, for
    the role "state", for each block."""

    layer: int
    role: str
    n_heads: int
    head_dim: int
    dtype: str = "bf16"
    scale: float = 1.0
    n_rows: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Layout:
    """The components of a block. ``kind`` is "flat" (a block is one range of bytes) or "paged"."""

    components: Seq[Component]
    block_tokens: int = 16
    kind: str = "flat"
    head_major: bool = False
    flags: int = field(default=0, repr=False)

    @staticmethod
    def uniform(n_layers: int, n_kv_heads: int, head_dim: int, dtype: str = "bf16", *,
                block_tokens: int = 16, kind: str = "flat", head_major: bool = False) -> "Layout":
        """K and V of equal attention layers."""
        return Layout([Component(layer, role, n_kv_heads, head_dim, dtype)
                       for layer in range(n_layers) for role in ("k", "v")],
                      block_tokens, kind, head_major)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all components."""
        bytes_ = ffi.new("uint64_t *")
        struct, _components = self._struct()
        check(lib.kv_layout_block_bytes(struct, ffi.NULL, bytes_))
        return int(bytes_[0])

    def _struct(self) -> tuple[Any, Any]:
        """The C struct, and what it points to."""
        components = ffi.new("struct kv_component[]", [
            {"layer": c.layer, "role": number_of(ROLES, c.role, "role"),
             "dtype": number_of(DTYPES, c.dtype, "dtype"), "n_heads": c.n_heads,
             "head_dim": c.head_dim, "scale": c.scale, "n_rows": c.n_rows, "offset": c.offset}
            for c in self.components])
        flags = self.flags | (lib.KV_LAYOUT_HEAD_MAJOR if self.head_major else 0)
        struct = ffi.new("struct kv_layout *", {
            "kind": number_of(KINDS, self.kind, "kind"), "flags": flags,
            "block_tokens": self.block_tokens, "n_components": len(self.components),
            "components": components})
        return struct, components

    @staticmethod
    def _of(struct: Any) -> "Layout":
        kind = "flat" if struct.kind == lib.KV_LAYOUT_FLAT else "paged"
        return Layout([Component(c.layer, ROLE_NAMES[c.role], c.n_heads, c.head_dim,
                                 DTYPE_NAMES[c.dtype], c.scale, c.n_rows, c.offset)
                       for c in struct.components[0:struct.n_components]],
                      struct.block_tokens, kind, bool(struct.flags & lib.KV_LAYOUT_HEAD_MAJOR),
                      struct.flags & ~lib.KV_LAYOUT_HEAD_MAJOR)
