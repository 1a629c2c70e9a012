# SPDX-License-Identifier: Apache-2.0
"""What the layers of Hugging Face models keep in pools, and how they use it. For kvclient.transformers.

A layer is one of these; each says its components, binds itself to a pool, and computes over blocks or rows:

    Dense    K and V of each token, all of them or a window     the framework's attention interface
    Latent   the latent and the rotated part of K (MLA)         likewise, in the space of latents
    Sparse   Latent, and the indexer's key (DSA)                likewise, over the chosen tokens
    Delta    a state and the inputs of a convolution (GDN)      in place of the layer's forward
"""
from __future__ import annotations

import inspect
import sys
from typing import Any, Callable, Optional

import torch
from transformers.cache_utils import DynamicCache

from .errors import UnsupportedError
from .latent import IndexLayer, LatentLayer, index_component, latent_component
from .layout import Component
from .pool import Pool
from .state import DeltaLayer, delta_components

__all__ = ["DTYPES", "Layers", "cache_argument"]

DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
#: gives the step that this thread is in, or None
Running = Callable[[], Any]


def cache_argument(model: Any) -> str:
    """Its name in forward(): past_key_values, or cache in newer versions."""
    return "cache" if "cache" in inspect.signature(model.base_model.forward).parameters else "past_key_values"


def _restore(module: Any, ours: Any, before: Any) -> None:
    """Takes a forward back, unless another Engine has put its own in front."""
    if module.forward == ours:
        module.forward = before


class _Kept:
    """A layer, by its number in the model."""

    kind = "full"
    window = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def release(self) -> None:
        """Leaves the model as it was."""


class Dense(_Kept):
    def __init__(self, number: int, heads: int, k_dim: int, v_dim: int, window: int) -> None:
        super().__init__(number)
        self.heads, self.k_dim, self.v_dim = heads, k_dim, v_dim
        if window:
            self.kind, self.window = "window", window

    def components(self, dtype: str) -> list[Component]:
        return [Component(self.number, "k", self.heads, self.k_dim, dtype),
                Component(self.number, "v", self.heads, self.v_dim, dtype)]

    def bind(self, pool: Pool, first: int) -> None:
        self.layer = pool.layer(self.number)

    def update(self, key: Any, value: Any, batch: Any) -> None:
        # [1, heads, tokens, dim], which is a view of [tokens, heads, dim] in most models.
        rows = [x[0].transpose(0, 1) for x in (key, value)]
        rows = [x if x[0].is_contiguous() else x.contiguous() for x in rows]
        self.layer.write(rows[0], rows[1], batch)

    def attend(self, query: Any, batch: Any, scale: float, **how: Any) -> Any:
        return self.layer.attention(query[0].transpose(0, 1).contiguous(), batch, sm_scale=scale,
                                    **{name: how[name] for name in ("softcap", "window_left", "sinks")})


class Latent(_Kept):
    def __init__(self, number: int, module: Any) -> None:
        super().__init__(number)
        config = module.config
        self.module = module
        self.latent_dim, self.rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
        self.nope_dim = config.qk_nope_head_dim
        self.latent: Any = None  # of the step that runs
        self.hook = module.kv_a_layernorm.register_forward_hook(self._note)

    def release(self) -> None:
        self.hook.remove()

    def _note(self, _: Any, __: Any, latent: Any) -> None:
        self.latent = latent

    def components(self, dtype: str) -> list[Component]:
        return [latent_component(self.number, self.latent_dim, self.rope_dim, dtype)]

    def bind(self, pool: Pool, first: int) -> None:
        self.layer = LatentLayer(pool, self.number, self.latent_dim)
        weight = self.module.kv_b_proj.weight
        parts = weight.view(-1, weight.shape[0] // self._heads(), self.latent_dim)
        self.w_uk = parts[:, :self.nope_dim]  # [heads, nope, latent]
        self.w_uv = parts[:, self.nope_dim:].transpose(1, 2)  # [heads, latent, v]

    def _heads(self) -> int:
        return int(self.module.config.num_attention_heads)

    def update(self, key: Any, value: Any, batch: Any) -> None:
        # Newer versions hand over the parts, older ones what heads have made of them: the rotated part
        # is the end of both, the latent is what its norm gave.
        rope = value if key.shape[1] == 1 and key.shape[3] == self.latent_dim else key
        latent = self.latent.reshape(-1, self.latent_dim)
        self.layer.write(latent, rope[0, 0, :, -self.rope_dim:].contiguous(), batch)
        self.latent = None

    def absorbed(self, query: Any) -> Any:
        """[1, heads, T, nope + rope] to [T, heads, latent + rope]."""
        into = torch.cat([query[0, ..., :self.nope_dim] @ self.w_uk, query[0, ..., self.nope_dim:]], -1)
        return into.transpose(0, 1).contiguous()

    def expanded(self, out: Any) -> Any:
        """[T, heads, latent] to [T, heads, v]."""
        return (out.transpose(0, 1) @ self.w_uv).transpose(0, 1)

    def attend(self, query: Any, batch: Any, scale: float, indices: Any = None, **_: Any) -> Any:
        return self.expanded(self.layer.attention(self.absorbed(query), batch, sm_scale=scale))


class Sparse(Latent):
    def __init__(self, number: int, module: Any, running: Running) -> None:
        super().__init__(number, module)
        indexer = self.indexer = module.indexer
        if not any(kind.__name__ == "DeepseekV32Indexer" for kind in type(indexer).__mro__):
            raise UnsupportedError(f"layer {number}: {type(indexer).__name__} is no indexer that kvclient knows")
        if indexer.head_dim != 128:
            raise UnsupportedError(f"layer {number}: an indexer of {indexer.head_dim} elements; 128 are needed")
        self.running = running
        self.own_forward = indexer.forward
        indexer.forward = self._choose

    def release(self) -> None:
        super().release()
        _restore(self.indexer, self._choose, self.own_forward)

    def components(self, dtype: str) -> list[Component]:
        return super().components(dtype) + [index_component(self.number)]

    def bind(self, pool: Pool, first: int) -> None:
        super().bind(pool, first)
        self.index = IndexLayer(pool, self.number)

    def _choose(self, hidden: Any, q_resid: Any, position_embeddings: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of the indexer's forward: stores keys, and chooses by what the pool has."""
        step = self.running()
        if step is None or step.kept.get(self.number) is not self:
            return self.own_forward(hidden, q_resid, position_embeddings, *args, **kwargs)
        indexer, batch = self.indexer, step.batch_of(self)
        rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
        n_rope = indexer.qk_rope_head_dim
        q = indexer.wq_b(q_resid).view(1, -1, indexer.n_heads, indexer.head_dim)
        k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
        q_rope, k_rope = rotate(q[..., :n_rope], k[..., :n_rope], *position_embeddings, unsqueeze_dim=2)
        q = torch.cat([q_rope, q[..., n_rope:]], -1)[0].float()
        k = torch.cat([k_rope, k[..., n_rope:]], -1)[0, :, 0]
        scale = q.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
        weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))[0].float()
        weights = weights * (indexer.n_heads ** -0.5 * indexer.softmax_scale) * scale[..., 0]
        self.index.write(k.contiguous(), batch)
        chosen = torch.empty((q.shape[0], indexer.index_topk), dtype=torch.int32, device=q.device)
        return self.index.choose((q / scale).to(torch.float8_e4m3fn), weights.contiguous(), batch, chosen)

    def attend(self, query: Any, batch: Any, scale: float, indices: Any = None, **_: Any) -> Any:
        return self.expanded(self.layer.sparse(self.absorbed(query), indices, scale))


class Delta(_Kept):
    kind = "state"

    def __init__(self, number: int, module: Any, running: Running) -> None:
        super().__init__(number)
        self.module, self.running = module, running
        self.own_forward = module.forward
        module.forward = self._forward

    def release(self) -> None:
        _restore(self.module, self._forward, self.own_forward)

    def components(self, dtype: str) -> list[Component]:
        m = self.module
        return delta_components(self.number, m.num_k_heads, m.num_v_heads, m.head_k_dim, m.head_v_dim,
                                m.conv_kernel_size, dtype)

    def bind(self, pool: Pool, first: int) -> None:
        m = self.module
        self.layer = DeltaLayer(pool, first, first + 1, m.num_k_heads, m.num_v_heads, m.head_k_dim, m.head_v_dim)
        self.weights = {"weight": m.conv1d.weight[:, 0].contiguous(), "bias": m.conv1d.bias,
                        "a_log": m.A_log.float(), "dt_bias": m.dt_bias.float(), "activation": m.activation}

    def _forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of the layer's forward: the same projections, and its states in rows of the pool."""
        step = self.running()
        if step is None or step.kept.get(self.number) is not self:
            return self.own_forward(hidden_states, *args, **kwargs)
        m, n = self.module, hidden_states.shape[1]
        if hasattr(m, "in_proj_qkvz"):
            q, k, v, z, b, a = m.fix_query_key_value_ordering(m.in_proj_qkvz(hidden_states),
                                                              m.in_proj_ba(hidden_states))
            mixed = torch.cat([x.reshape(n, -1) for x in (q, k, v)], -1)
        else:
            mixed, z = m.in_proj_qkv(hidden_states)[0], m.in_proj_z(hidden_states)
            b, a = m.in_proj_b(hidden_states), m.in_proj_a(hidden_states)
        out = self.layer.forward(mixed, a[0].contiguous(), b[0].contiguous(), step.lanes, **self.weights)
        out = m.norm(out.reshape(-1, m.head_v_dim), z.reshape(-1, m.head_v_dim))
        return m.out_proj(out.reshape(1, n, -1))


class _Recorder(DynamicCache):  # type: ignore[misc]
    """Notes what each layer hands over for one token."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.found: dict[int, tuple[int, int, int]] = {}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.found[layer_idx] = (key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class Layers:
    """The layers of a model, by number, after running one token through it.

    :raises UnsupportedError: a layer keeps something that kvclient doesn't know
    """

    def __init__(self, model: Any, running: Running) -> None:
        config = model.config.get_text_config()
        n_layers = config.num_hidden_layers
        model.set_attn_implementation("eager")  # of this token, whatever comes later
        recorder = _Recorder(config)
        token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        with torch.no_grad():
            model(input_ids=token, use_cache=True, **{cache_argument(model): recorder})
        kinds = getattr(config, "layer_types", None) or [None] * n_layers
        self.kept: dict[int, Any] = {}
        modules = [m for m in model.modules() if getattr(m, "layer_idx", None) is not None]
        for module in modules:
            if hasattr(module, "kv_a_layernorm") and hasattr(module, "kv_b_proj"):
                self.kept[module.layer_idx] = (
                    Sparse(module.layer_idx, module, running) if hasattr(module, "indexer")
                    else Latent(module.layer_idx, module))
            elif all(hasattr(module, name) for name in ("A_log", "dt_bias", "conv1d", "head_k_dim", "num_v_heads")):
                self.kept[module.layer_idx] = Delta(module.layer_idx, module, running)
        for i, shape in recorder.found.items():
            if i in self.kept:
                continue
            if kinds[i] == "chunked_attention":
                raise UnsupportedError(f"layer {i} of {type(model).__name__} attends to chunks; all tokens or a "
                                       "window are known")
            self.kept[i] = Dense(i, *shape, config.sliding_window if kinds[i] == "sliding_attention" else 0)
        missing = [i for i in range(n_layers) if i not in self.kept]
        if missing:
            raise UnsupportedError(f"layers {missing} of {type(model).__name__} keep neither K and V of each token, "
                                   "nor a latent, nor the state of a gated delta net")

    @property
    def sparse(self) -> bool:
        return any(isinstance(kept, Sparse) for kept in self.kept.values())

    def groups(self) -> list[tuple[str, int, list[Any]]]:
        """(kind, window, layers) of what can share blocks; states last."""
        found: dict[tuple[str, int], list[Any]] = {}
        for _, kept in sorted(self.kept.items()):
            found.setdefault((kept.kind, kept.window), []).append(kept)
        order = {"full": 0, "window": 1, "state": 2}
        return [(kind, window, layers) for (kind, window), layers
                in sorted(found.items(), key=lambda item: (order[item[0][0]], item[0][1]))]
