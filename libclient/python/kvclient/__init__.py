# SPDX-License-Identifier: Apache-2.0
"""KV cache blocks shared between inference processes: libkvclient for Python.

::

    import kvclient

    with kvclient.Client(name="engine") as client:
        layout = kvclient.Layout.uniform(n_layers=32, n_kv_heads=8, head_dim=128, dtype="bf16")
        with client.pool("llama", model="llama-3-8b", layout=layout) as pool:
            batch = pool.batch(max_seqs=64, max_tokens=2048, max_blocks_per_seq=512)
            seq = pool.sequence()
            hit = seq.start(prompt, n_more=1)        # what anybody has computed of it
            batch.build([(seq, len(prompt) - hit)])  # block table, slots, positions
            batch.copy()
            for i in range(32):
                pool.layer(i).write(k, v, batch)
                out = pool.layer(i).attention(q, batch)
            seq.publish()                            # shown to others when the stream's work is done

Words and rules are those of the C headers: kvcached/types.h has the glossary.
"""
from __future__ import annotations

from ._lib import ffi as _ffi, lib as _lib
from .arrays import View
from .batch import Batch
from .client import CheckResult, Client, Gpu
from .errors import (ExistsError, InvalidError, KvError, LostError, NoRoom, NotFoundError,
                     NotMappedError, TooLarge, UnsupportedError, WaitedTooLong)
from .groups import Group, GroupSequence, Groups
from .latent import IndexLayer, LatentLayer, index_component, latent_component
from .layout import Component, Layout
from .ops import Layer, backend_names
from .plan import Plan
from .pool import Pool
from .sequence import Sequence
from .state import DeltaLayer, Lanes, delta_components

#: version of the library that was loaded
__version__: str = _ffi.string(_lib.kv_version()).decode()

__all__ = ["Batch", "CheckResult", "Client", "Component", "DeltaLayer", "ExistsError", "Gpu", "Group",
           "GroupSequence", "Groups", "IndexLayer", "InvalidError", "KvError", "Lanes", "LatentLayer", "Layer",
           "Layout", "LostError", "NoRoom", "NotFoundError", "NotMappedError", "Plan", "Pool", "Sequence",
           "TooLarge", "UnsupportedError", "View", "WaitedTooLong", "backend_names", "delta_components",
           "index_component", "latent_component", "__version__"]
