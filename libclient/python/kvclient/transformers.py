# SPDX-License-Identifier: Apache-2.0
"""Causal language models of Hugging Face transformers with their KV and states in shared pools.

::

    import kvclient, kvclient.transformers

    with kvclient.Client() as client:
        engine = kvclient.transformers.Engine(model, client, "llama", revision="weights of May")
        for tokens, hit in engine.generate(prompts, max_new_tokens=64): ...

Two of the framework's own extension points are used: a ``Cache``, whose update() writes into blocks, and an
attention function, "kvclient", which reads them. Of gated delta nets and of sparse indexers, for which it has
none, the layer's forward is replaced while an Engine's step runs. All sequences of a step stand in one row of
the input, prompts in chunks beside single tokens (continuous batching); prefixes that any process has
computed with the same name and revision are found.

Layers may differ: K and V of all tokens or of a window, with sinks and soft caps; latents (MLA), also with an
indexer (DSA); states of gated delta nets. Layers that keep the same are a group with a pool of its own; a
prefix is found where every group has it. Others are refused. Written for transformers 4.56 and newer, latents
and states for 5.17 and newer; torch 2.1 and newer.
"""
from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any, Callable, Iterable, Optional, Sequence as Seq

import numpy as np
import torch
from transformers import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .batch import Batch
from .client import Client
from .errors import NoRoom, TooLarge
from .families import DTYPES, Layers, cache_argument
from .groups import Group, Groups, GroupSequence
from .layout import Layout
from .pool import Pool
from .state import Lanes

__all__ = ["Engine", "PagedCache"]

_running = threading.local()  # .step: of the forward pass that this thread is in


def _step() -> Any:
    return getattr(_running, "step", None)


class _Step:
    """The arrays of a step. Kernels read them until its event, so two take turns."""

    def __init__(self, batches: dict[int, Batch], lanes: Optional[Lanes], engine: "Engine") -> None:
        self.batches, self.lanes = batches, lanes
        self.first = next(iter(batches.values()))
        self._of = {kept.number: batches[i] for i, (_, _, layers) in enumerate(engine.kinds) if i in batches
                    for kept in layers}
        self.kept = engine.layers.kept
        self.mask = torch.zeros((1, 1, 1, 1), device=engine.model.device) if engine.layers.sparse else None
        self._event: Any = torch.cuda.Event() if engine.pool.is_cuda else None

    def batch_of(self, kept: Any) -> Batch:
        return self._of[kept.number]

    def build(self, items: list[tuple[GroupSequence, int]]) -> None:
        if self._event is not None:
            self._event.synchronize()
        for i, batch in self.batches.items():
            batch.build([(seq.part(i), n) for seq, n in items])
            batch.copy()
        if self.lanes is not None:
            self.lanes.build(items)

    def queued(self) -> None:
        if self._event is not None:
            self._event.record()


class PagedCache(Cache):  # type: ignore[misc]
    """For one forward pass: what the model's layers hand over is written at the batch's slots."""

    def __init__(self, step: _Step) -> None:
        super().__init__(layers=[])
        self.step = step

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any) -> Any:
        kept = self.step.kept[layer_idx]
        kept.update(key_states, value_states, self.step.batch_of(kept))
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        return 0

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False

    def get_mask_sizes(self, query_length: Any, *_: Any, **__: Any) -> tuple[int, int]:
        n = query_length if isinstance(query_length, int) else len(query_length)
        return n, 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self.step.kept)

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self.step.kept)

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * len(self.step.kept)


def _attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Optional[float] = None,
               dropout: float = 0.0, sliding_window: Optional[int] = None, softcap: Optional[float] = None,
               s_aux: Any = None, indices: Any = None, **_: Any) -> tuple[Any, None]:
    """Attention of the framework's interface over the blocks of the step that runs."""
    step = _running.step
    kept = step.kept[module.layer_idx]
    out = kept.attend(query, step.batch_of(kept), scaling or 0.0, softcap=softcap or 0.0, indices=indices,
                      window_left=sliding_window - 1 if sliding_window else -1,
                      sinks=None if s_aux is None else s_aux.float().contiguous())
    return out[None], None


def _no_mask(*_: Any, **__: Any) -> Any:
    """Who sees whom follows from the batch. Indexers take a piece of a mask, which nobody looks at."""
    step = _step()
    return None if step is None else step.mask


ALL_ATTENTION_FUNCTIONS.register("kvclient", _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register("kvclient", _no_mask)


class _Request:
    def __init__(self, index: int, prompt: Seq[int], n_new: int) -> None:
        self.index, self.n_new = index, n_new
        self.tokens = [int(token) for token in prompt]
        self.n_prompt = len(self.tokens)
        self.seq: Optional[GroupSequence] = None
        self.hit = 0
        self.counted = False


class Engine:
    """A model, its pools, and a scheduler for many sequences.

    :param model: a causal language model, in eval mode; its attention becomes "kvclient"
    :param name: of the pool; processes that say the same name, model and revision share it. Further pools
        are NAME.window (or NAME.window.2, ...) and NAME.state.
    :param revision: which weights: pools can't tell them apart
    :param max_seqs: sequences in a step
    :param max_tokens: tokens in a step: longer prompts come in chunks
    :param max_len: tokens of a sequence
    :param block_tokens: None: 64 with an indexer, else 16
    :param interval: tokens from one kept state to the next: prefixes of models with states are multiples
    :param max_bytes: of each pool; 0: no bound
    """

    def __init__(self, model: Any, client: Client, name: str, *, revision: Optional[str] = None,
                 max_seqs: int = 32, max_tokens: int = 512, max_len: int = 4096,
                 block_tokens: Optional[int] = None, interval: int = 256, max_bytes: int = 0) -> None:
        self.model = model
        self.cache_argument = cache_argument(model)
        self.layers = Layers(model, _step)
        block_tokens = block_tokens or (64 if self.layers.sparse else 16)
        self.kinds = self.layers.groups()
        model.set_attn_implementation("kvclient")
        self.pools: list[Pool] = []
        groups, names = [], {"full": "", "window": ".window", "state": ".state"}
        used: dict[str, int] = {}
        try:
            for kind, window, layers in self.kinds:
                used[kind] = used.get(kind, 0) + 1
                suffix = names[kind] if self.pools else ""
                if used[kind] > 1:
                    suffix += f".{used[kind]}"
                parts = [kept.components(DTYPES[model.dtype]) for kept in layers]
                layout = Layout(sum(parts, []), 1 if kind == "state" else block_tokens)
                pool = client.pool(name + suffix, model=type(model).__name__, revision=revision, layout=layout,
                                   max_bytes=max_bytes)
                self.pools.append(pool)
                at = 0
                for kept, part in zip(layers, parts):
                    kept.bind(pool, at)
                    at += len(part)
                groups.append(Group(kind, pool, window=window, interval=interval if kind == "state" else 0))
            self.groups = Groups(groups)
        except BaseException:
            self.close()
            raise
        self.pool = self.pools[0]
        self.block_tokens = block_tokens
        self._shown: "weakref.WeakKeyDictionary[GroupSequence, int]" = weakref.WeakKeyDictionary()
        self.max_seqs, self.max_tokens = max_seqs, max_tokens
        width = -(-max_len // block_tokens) + 1
        self._steps = [_Step(
            {i: group.pool.batch(max_seqs, max_tokens, width) for i, group in enumerate(groups)
             if group.kind != "state"},
            next((Lanes(self.groups, i, max_seqs, max_len) for i, group in enumerate(groups)
                  if group.kind == "state"), None), self) for _ in range(2)]

    def close(self) -> None:
        """Closes the pools; the model's layers are as they were, its attention "kvclient" until it is set anew."""
        for pool in self.pools:
            pool.close()
        for kept in self.layers.kept.values():
            kept.release()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def sequence(self) -> GroupSequence:
        """An empty sequence, for step()."""
        return self.groups.sequence()

    @torch.no_grad()
    def step(self, items: Iterable[tuple[GroupSequence, int]]) -> Any:
        """Computes the last n tokens of each sequence. Return: logits of each one's last, [n_seqs, vocab]."""
        step = self._steps[0]
        self._steps.reverse()
        step.build(list(items))
        batch, device = step.first, self.model.device
        last = batch.query_start_loc[1:].astype(np.int64) - 1
        _running.step = step
        try:
            out = self.model(
                input_ids=batch.torch("tokens").to(device, non_blocking=True).long()[None],
                position_ids=batch.torch("positions").to(device, non_blocking=True)[None],
                use_cache=True, logits_to_keep=torch.from_numpy(last).to(device),
                **{self.cache_argument: PagedCache(step)})
        finally:
            del _running.step
            step.queued()
        return out.logits[0]

    def publish(self, seqs: Iterable[GroupSequence]) -> None:
        """Shows what became complete with the last step, after the stream's work so far."""
        for seq in seqs:
            n = len(seq) // self.block_tokens
            if n != self._shown.get(seq, 0):  # most steps of decoding complete no block
                self._shown[seq] = n
                seq.publish()

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
                self.publish([r.seq for r, _ in work if r.seq is not None])
                for (r, _), token in zip(work, tokens):
                    assert r.seq is not None
                    r.seq.done(len(r.seq))
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
            seq = self.sequence()
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
            n = min(len(r.tokens) - len(r.seq), left, r.seq.stop or left)
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
