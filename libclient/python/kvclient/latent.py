# SPDX-License-Identifier: Apache-2.0
"""Latent attention (MLA) and the sparse choice of its tokens (DSA). See kvcached/mla.h and dsa.h."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from ._lib import check, ffi, lib
from .arrays import Pointer, View, stream_of
from .layout import DTYPES, Component
from .ops import Layer, Workspaces, device_of, empty_like

if TYPE_CHECKING:
    from .batch import Batch
    from .pool import Pool

__all__ = ["IndexLayer", "LatentLayer", "index_component", "latent_component"]


def latent_component(layer: int, latent_dim: int, rope_dim: int, dtype: str = "bf16") -> Component:
    """What latent attention keeps of a token: [latent | rope], one for all heads."""
    return Component(layer, "k", 1, latent_dim + rope_dim, dtype)


def index_component(layer: int) -> Component:
    """The indexer's key of a token: 128 e4m3 codes and a scale."""
    return Component(layer, "index", 1, lib.KV_INDEX_ROW_FP8, "bytes")


class LatentLayer(Layer):
    """Latent attention in the space of latents; rows of ``pool``'s component (layer, "k").

    attention() is Layer's, with q [T, heads, latent + rope], ``sm_scale`` given, and out [T, heads, latent].
    """

    def __init__(self, pool: "Pool", number: int, latent_dim: int, gpu: Optional[int] = None) -> None:
        self.pool, self.number = pool, number
        self.gpu = pool._first_gpu() if gpu is None else gpu
        self.k: View = pool.view(number, "k", self.gpu)
        self.latent_dim, self.rope_dim = latent_dim, self.k.shape[3] - latent_dim
        self.out_dim = latent_dim
        self._args = ffi.new("struct kv_attention_args *")
        self._write = ffi.new("struct kv_mla_write_args *")
        self._sparse = ffi.new("struct kv_sparse_mla_args *")
        for struct in (self._args, self._write, self._sparse):
            struct.size = ffi.sizeof(struct[0])
            struct.device = device_of(pool)
            struct.latent_dim, struct.rope_dim = self.latent_dim, self.rope_dim
        self._args.k = self.k.struct
        self._write.cache = self._sparse.cache = self.k.struct

    def write(self, latent: Any, rope: Any, slots: Any, stream: Any = None) -> None:
        """Stores rows of T tokens: latent [T, latent_dim] after its norm, rope [T, rope_dim] after rotation."""
        parts = Pointer("latent", latent), Pointer("rope", rope)
        where = Pointer("slots", getattr(slots, "slots", slots)).dense("slots", "i64", 1)
        for name, part, dim in zip(("latent", "rope"), parts, (self.latent_dim, self.rope_dim)):
            self._same_device(name, part)
            if part.shape != (where.shape[0], dim):
                raise ValueError(f"{name}: shape {part.shape} given, {(where.shape[0], dim)} is needed")
        if parts[0].dtype != parts[1].dtype or parts[0].dtype not in DTYPES:
            raise TypeError(f"latent and rope: {parts[0].dtype} and {parts[1].dtype} given; one of f32, f16, "
                            "bf16 is needed")
        with self.pool._lock:
            self.pool._c()
            args = self._write
            args.dtype, args.n_tokens = DTYPES[parts[0].dtype], where.shape[0]
            args.latent, args.latent_stride = parts[0].void, parts[0].rows("latent", 2)
            args.rope, args.rope_stride = parts[1].void, parts[1].rows("rope", 2)
            args.slots = ffi.cast("int64_t *", where.address)
            args.stream = stream_of(stream, self.pool.is_cuda, self.k.ordinal)
            check(lib.kv_mla_write(args))

    def sparse(self, q: Any, chosen: Any, sm_scale: float, out: Any = None, stream: Any = None) -> Any:
        """Attention of each query over its own chosen slots, [T, top_k] i32, negative: none."""
        query = Pointer("q", q)
        query.dense("q", query.dtype, 3)
        slots = Pointer("chosen", chosen).dense("chosen", "i32", 2)
        self._same_device("q", query)
        self._same_device("chosen", slots)
        if query.shape[2] != self.latent_dim + self.rope_dim or slots.shape[0] != query.shape[0]:
            raise ValueError(f"q: shape {query.shape} given for {slots.shape[0]} rows of chosen; "
                             f"[{slots.shape[0]}, heads, {self.latent_dim + self.rope_dim}] is needed")
        if out is None:
            out = empty_like(q, query.shape[:2] + (self.latent_dim,), query.dtype)
        with self.pool._lock:
            self.pool._c()
            args = self._sparse
            args.dtype = DTYPES[query.dtype]
            args.n_tokens, args.n_heads = query.shape[:2]
            args.top_k, args.sm_scale = slots.shape[1], sm_scale
            args.q, args.out = query.void, Pointer("out", out).dense("out", query.dtype, 3).void
            args.chosen = ffi.cast("int32_t *", slots.address)
            args.stream = stream_of(stream, self.pool.is_cuda, self.k.ordinal)
            Workspaces.of(self.pool).give("sparse", args, lib.kv_sparse_mla_workspace_bytes, self.gpu,
                                          self.k.ordinal)
            check(lib.kv_sparse_mla(args))
        return out


class IndexLayer:
    """The indexer of a layer: its keys are ``pool``'s component (layer, "index")."""

    def __init__(self, pool: "Pool", number: int, gpu: Optional[int] = None) -> None:
        self.pool, self.number = pool, number
        self.gpu = pool._first_gpu() if gpu is None else gpu
        self.keys: View = pool.view(number, "index", self.gpu)
        self._write = ffi.new("struct kv_index_write_args *")
        self._args = ffi.new("struct kv_index_args *")
        for struct in (self._write, self._args):
            struct.size = ffi.sizeof(struct[0])
            struct.device = device_of(pool)
            struct.cache = self.keys.struct

    def write(self, key: Any, slots: Any, stream: Any = None) -> None:
        """Stores keys of T tokens, [T, 128]."""
        keys = Pointer("key", key)
        where = Pointer("slots", getattr(slots, "slots", slots)).dense("slots", "i64", 1)
        if keys.shape != (where.shape[0], lib.KV_INDEX_DIM):
            raise ValueError(f"key: shape {keys.shape} given, {(where.shape[0], lib.KV_INDEX_DIM)} is needed")
        with self.pool._lock:
            self.pool._c()
            args = self._write
            args.dtype, args.n_tokens = DTYPES[keys.dtype], where.shape[0]
            args.key, args.key_stride = keys.void, keys.rows("key", 2)
            args.slots = ffi.cast("int64_t *", where.address)
            args.stream = stream_of(stream, self.pool.is_cuda, self.keys.ordinal)
            check(lib.kv_index_write(args))

    def choose(self, q: Any, weights: Any, batch: "Batch", chosen: Any, stream: Any = None) -> Any:
        """The best tokens of each query, as slots: fills and returns ``chosen``, [T, top_k] i32.

        :param q: [T, heads, 128] 8-bit floats (e4m3), dense
        :param weights: [T, heads] f32, q's scale in them
        """
        query, factor = Pointer("q", q), Pointer("weights", weights).dense("weights", "f32", 2)
        if query.dtype not in ("f8_e4m3", "bytes") or query.shape != factor.shape + (lib.KV_INDEX_DIM,):
            raise ValueError(f"q: {query.dtype} {query.shape} given for weights {factor.shape}")
        into = Pointer("chosen", chosen).dense("chosen", "i32", 2)
        if into.shape[0] != batch.n_tokens or query.shape[0] != batch.n_tokens:
            raise ValueError(f"q and chosen: {query.shape[0]} and {into.shape[0]} rows given, the batch has "
                             f"{batch.n_tokens} tokens")
        with self.pool._lock:
            self.pool._c()
            data, args = batch._data, self._args
            args.form = lib.KV_INDEX_SLOTS
            args.n_seqs, args.n_tokens = batch.n_seqs, batch.n_tokens
            args.max_query_len, args.max_seq_len = batch.max_query_len, batch.max_seq_len
            args.table_width = batch.table_width
            args.n_heads, args.top_k = query.shape[1], into.shape[1]
            args.q, args.weights = query.void, ffi.cast("float *", factor.address)
            args.query_start_loc, args.seq_lens = data.query_start_loc, data.seq_lens
            args.block_table = data.block_table
            args.chosen = ffi.cast("int32_t *", into.address)
            args.stream = stream_of(stream, self.pool.is_cuda, self.keys.ordinal)
            Workspaces.of(self.pool).give("index", args, lib.kv_index_workspace_bytes, self.gpu,
                                          self.keys.ordinal)
            check(lib.kv_index_choose(args))
        return chosen
