# SPDX-License-Identifier: Apache-2.0
"""Causal language models of Hugging Face transformers with their K and V in shared pools.

::

    import kvclient, kvclient.transformers

    with kvclient.Client() as client:
        engine = kvclient.transformers.Engine(model, client, "llama", revision="weights of May")
        for tokens, hit in engine.generate(prompts, max_new_tokens=64): ...

Two of the framework's own extension points are used: a ``Cache``, whose update() writes into blocks, and an
attention function, "kvclient", which reads them. Models stay as they are. All sequences of a step stand in one
row of the input, prompts in chunks beside single tokens (continuous batching); prefixes that any
process has computed with the same name and revision are found.

Layers may differ (windows, sinks, soft caps, sizes of K and V). Models with recurrent layers, latent attention, or
layers that read another layer's K and V are refused. Written for transformers 4.56 and newer, torch 2.1 and newer.
"""
from __future__ import annotations

import inspect
import threading
from collections import deque
from typing import Any, Callable, Iterable, Optional, Sequence as Seq

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .batch import Batch
from .client import Client
from .errors import NoRoom, TooLarge, UnsupportedError
from .layout import Component, Layout
from .pool import Pool
from .sequence import Sequence

__all__ = ["Engine", "PagedCache"]

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_running = threading.local()  # .step: (pool, batch) of the forward pass that this thread is in


class PagedCache(Cache):  # type: ignore[misc]
    """For one forward pass: what the model's layers hand over is written at the batch's slots."""

    def __init__(self, pool: Pool, batch: Batch) -> None:
        super().__init__(layers=[])
        self.pool, self.batch = pool, batch

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any) -> Any:
        # [1, heads, tokens, dim], which is a view of [tokens, heads, dim] in most models.
        rows = [x[0].transpose(0, 1) for x in (key_states, value_states)]
        rows = [x if x[0].is_contiguous() else x.contiguous() for x in rows]
        self.pool.layer(layer_idx).write(rows[0], rows[1], self.batch)
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, *_: Any, **__: Any) -> tuple[int, int]:
        n = query_length if isinstance(query_length, int) else len(query_length)
        return n, 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self.pool.n_layers


def _attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Optional[float] = None,
               dropout: float = 0.0, sliding_window: Optional[int] = None, softcap: Optional[float] = None,
               s_aux: Any = None, **_: Any) -> tuple[Any, None]:
    """Attention of the framework's interface over the blocks of the step that runs."""
    pool, batch = _running.step
    out = pool.layer(module.layer_idx).attention(
        query[0].transpose(0, 1).contiguous(), batch, sm_scale=scaling or 0.0, softcap=softcap or 0.0,
        window_left=sliding_window - 1 if sliding_window else -1,
        sinks=None if s_aux is None else s_aux.float().contiguous())
    return out[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """Who sees whom follows from the batch."""


ALL_ATTENTION_FUNCTIONS.register("kvclient", _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register("kvclient", _no_mask)


class _Recorder(DynamicCache):  # type: ignore[misc]
    """Notes what each layer hands over for one token."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.found: dict[int, tuple[int, int, int]] = {}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.found[layer_idx] = (key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _cache_argument(model: Any) -> str:
    """Its name in forward(): past_key_values, or cache in newer versions."""
    return "cache" if "cache" in inspect.signature(model.base_model.forward).parameters else "past_key_values"


def layout_of(model: Any, block_tokens: int = 16) -> Layout:
    """The layout of a model's pool, by running one token through it.

    :raises UnsupportedError: a layer keeps something else than K and V of each token
    """
    config = model.config.get_text_config()
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedError(f"{type(model).__name__} keeps a latent, which its layers expand for all tokens "
                               "before attention: kvclient's attention function sees too late what to read")
    recorder = _Recorder(config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=token, use_cache=True, **{_cache_argument(model): recorder})
    n_layers = config.num_hidden_layers
    missing = [i for i in range(n_layers) if i not in recorder.found]
    if missing:
        raise UnsupportedError(f"layers {missing} of {type(model).__name__} don't keep K and V of each token")
    dtype = _DTYPES[model.dtype]
    return Layout([part for i in range(n_layers) for heads, k_dim, v_dim in [recorder.found[i]]
                   for part in (Component(i, "k", heads, k_dim, dtype), Component(i, "v", heads, v_dim, dtype))],
                  block_tokens)


class _Request:
    def __init__(self, index: int, prompt: Seq[int], n_new: int) -> None:
        self.index, self.n_new = index, n_new
        self.tokens = [int(token) for token in prompt]
        self.n_prompt = len(self.tokens)
        self.seq: Optional[Sequence] = None
        self.hit = 0
        self.counted = False


class Engine:
    """A model, its pool, and a scheduler for many sequences.

    :param model: a causal language model, in eval mode; its attention becomes "kvclient"
    :param name: of the pool; processes that say the same name, model and revision share it
    :param revision: which weights: pools can't tell them apart
    :param max_seqs: sequences in a step
    :param max_tokens: tokens in a step: longer prompts come in chunks
    :param max_len: tokens of a sequence
    """

    def __init__(self, model: Any, client: Client, name: str, *, revision: Optional[str] = None,
                 max_seqs: int = 32, max_tokens: int = 512, max_len: int = 4096, block_tokens: int = 16,
                 max_bytes: int = 0) -> None:
        self.model = model
        self.cache_argument = _cache_argument(model)
        layout = layout_of(model, block_tokens)
        model.set_attn_implementation("kvclient")
        self.pool = client.pool(name, model=type(model).__name__, revision=revision, layout=layout,
                                max_bytes=max_bytes)
        self.max_seqs, self.max_tokens = max_seqs, max_tokens
        self.batch = self.pool.batch(max_seqs, max_tokens, -(-max_len // block_tokens) + 1)

    def close(self) -> None:
        self.pool.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @torch.no_grad()
    def step(self, items: Iterable[tuple[Sequence, int]]) -> Any:
        """Computes the last n tokens of each sequence. Return: logits of each one's last, [n_seqs, vocab]."""
        batch = self.batch.build(items)
        device = self.model.device
        batch.copy()
        _running.step = (self.pool, batch)
        try:
            out = self.model.base_model(
                input_ids=batch.torch("tokens").long()[None].to(device, non_blocking=True),
                position_ids=batch.torch("positions")[None].to(device, non_blocking=True),
                use_cache=True, **{self.cache_argument: PagedCache(self.pool, batch)})
        finally:
            del _running.step
        last = torch.from_numpy(batch.query_start_loc[1:].astype(np.int64) - 1).to(device)
        logits = self.model.get_output_embeddings()(out[0][0, last])
        softcap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    def generate(self, prompts: Seq[Seq[int]], max_new_tokens: int,
                 choose: Optional[Callable[[Any], Any]] = None,
                 eos: Optional[int] = None) -> list[tuple[list[int], int]]:
        """The tokens after each prompt, and how many tokens of it were found in the cache.

        :param choose: logits [n, vocab] to tokens [n]; None: the most likely
        :param eos: a sequence ends behind it
        :raises TooLarge: a sequence that never fits
        """
        choose = choose or (lambda logits: logits.argmax(-1))
        requests = [_Request(i, prompt, max_new_tokens) for i, prompt in enumerate(prompts)]
        waiting, running = deque(requests), []
        try:
            while waiting or running:
                self._admit(waiting, running)
                work = self._plan(waiting, running)
                tokens = choose(self.step([(r.seq, n) for r, n in work])).tolist()
                for (r, _), token in zip(work, tokens):
                    assert r.seq is not None
                    r.seq.publish()
                    if len(r.seq) < len(r.tokens):
                        continue  # a chunk of a prompt: its rest comes next
                    r.tokens.append(token)
                    if len(r.tokens) == r.n_prompt + r.n_new or token == eos:
                        r.seq.close()
                        running.remove(r)
        finally:
            for r in running:
                if r.seq is not None:
                    r.seq.close()
        return [(r.tokens[r.n_prompt:], r.hit) for r in requests]

    def _admit(self, waiting: "deque[_Request]", running: list[_Request]) -> None:
        while waiting and len(running) < self.max_seqs:
            r = waiting[0]
            seq = self.pool.sequence()
            hit = seq.lookup(np.array(r.tokens, np.int32))
            try:
                seq.reserve(len(r.tokens) + 1)
            except NoRoom:
                seq.close()
                if not running:
                    raise TooLarge(f"a sequence of {len(r.tokens)} tokens doesn't fit into the pool now") from None
                return
            if not r.counted:
                r.hit, r.counted = hit, True
            r.seq = seq
            running.append(waiting.popleft())

    def _plan(self, waiting: "deque[_Request]", running: list[_Request]) -> list[tuple[_Request, int]]:
        """What the next step computes; who finds no room for one more token goes back to the queue."""
        work, left = [], self.max_tokens
        for r in sorted(running, key=lambda r: (len(r.tokens) - len(r.seq or []), r.index)):
            assert r.seq is not None
            n = min(len(r.tokens) - len(r.seq), left)
            if not n:
                continue
            try:
                r.seq.reserve(len(r.seq) + n)
            except NoRoom:
                r.seq.close()
                r.seq = None
                running.remove(r)
                waiting.append(r)
                continue
            r.seq.append(r.tokens[len(r.seq):len(r.seq) + n])
            work.append((r, n))
            left -= n
        if not work:
            raise TooLarge("no sequence has room for one more token")
        return work
