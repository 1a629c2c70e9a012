# SPDX-License-Identifier: Apache-2.0
"""Plans: what a model's cache costs, and the layouts of its pools. See kvcached/plan.h."""
from __future__ import annotations

import json
import os
from typing import Any, Mapping, Union

from ._lib import NULL, check, ffi, lib, options
from .arrays import check_number
from .layout import Layout

__all__ = ["Plan"]


class Plan:
    """The pools of a model within a budget.

    :param config: path of a config.json, its folder or a .gguf file; or a configuration as a mapping,
        such as ``transformers_config.to_dict()``
    :param budget_bytes: what the pools may take together
    :param choices: as on command lines, with _ for -: ``tp=2``, ``block_size=16``, ``layout="flat"``,
        ``kv_dtype="fp8"``, ...
    """

    def __init__(self, config: Union[str, "os.PathLike[str]", Mapping[str, Any]], budget_bytes: int,
                 **choices: Any) -> None:
        arch = ffi.new("struct kv_arch **")
        if isinstance(config, Mapping):
            words = json.dumps(config).encode()
            check(lib.kv_arch_parse(words, len(words), b"config", arch))
        else:
            check(lib.kv_arch_read(os.fspath(config).encode(), arch))
        held = ffi.gc(arch[0], lib.kv_arch_free)
        how = options("kv_plan_options", budget_bytes=budget_bytes)
        for name, value in choices.items():
            check(lib.kv_plan_option(how, name.replace("_", "-").encode(), str(value).encode()))
        ret = ffi.new("struct kv_plan **")
        check(lib.kv_plan_arch(held, NULL, how, ret))
        self._plan = ffi.gc(ret[0], lib.kv_plan_free)

    @property
    def token_bytes(self) -> int:
        """A token in all layers that keep all tokens."""
        return int(self._plan.token_bytes)

    @property
    def state_bytes(self) -> int:
        """A sequence's states."""
        return int(self._plan.state_bytes)

    @property
    def pools(self) -> list[dict[str, Any]]:
        """Name, block_tokens, block_bytes, n_blocks and bytes of each pool."""
        return [{"name": ffi.string(p.name).decode(), "block_tokens": p.block_tokens,
                 "block_bytes": p.block_bytes, "n_blocks": p.n_blocks, "bytes": p.bytes}
                for p in self._plan.pools[0:self._plan.n_pools]]

    def layout(self, pool: int = 0) -> Layout:
        """The layout that a pool of the plan is opened with."""
        components = ffi.new("struct kv_component[]", self._plan.n_components)
        struct = ffi.new("struct kv_layout *")
        check_number(lib.kv_plan_pool_layout(self._plan, pool, components, struct))
        return Layout._of(struct)
