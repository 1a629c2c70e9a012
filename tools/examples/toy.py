# SPDX-License-Identifier: Apache-2.0
"""A small transformer with random weights in numpy, for the examples: once over a shared pool, once by
itself over all tokens, so that each example can check that it wrote the right ones.
"""
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of so small matrices threads only wait

import numpy as np  # noqa: E402

import kvclient  # noqa: E402


def norm(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-6))


def rotate(x, positions):
    """Rotary positions: [T, heads, dim]."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] / 10000.0 ** (np.arange(half) / half)
    cos, sin, a, b = np.cos(angle), np.sin(angle), x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(np.float32)


class Toy:
    def __init__(self, seed, n_layers=4, n_heads=8, n_kv_heads=2, head_dim=32, vocab=512):
        random = np.random.default_rng(seed)
        width = n_heads * head_dim
        self.n_layers, self.n_heads, self.n_kv, self.dim = n_layers, n_heads, n_kv_heads, head_dim

        def matrix(rows, columns):
            return (random.standard_normal((rows, columns)) / rows ** 0.5).astype(np.float32)

        self.embed = random.standard_normal((vocab, width)).astype(np.float32)
        self.layers = [{"q": matrix(width, width), "k": matrix(width, n_kv_heads * head_dim),
                        "v": matrix(width, n_kv_heads * head_dim), "o": matrix(width, width),
                        "up": matrix(width, 2 * width), "down": matrix(2 * width, width)}
                       for _ in range(n_layers)]
        self.head = matrix(width, vocab)
        self.name = f"toy-{seed}-{n_layers}x{n_heads}x{n_kv_heads}x{head_dim}"

    def open(self, client):
        """The model's pool: every process that opens it shares what it holds."""
        layout = kvclient.Layout.uniform(self.n_layers, self.n_kv, self.dim, "f32", block_tokens=16)
        return client.pool(self.name, model=self.name, layout=layout)

    def forward(self, tokens, positions, attend):
        """Logits of each token. attend(layer, q, k, v) stores K and V and gives attention's output."""
        x = self.embed[tokens]
        for i, w in enumerate(self.layers):
            h = norm(x)
            q = rotate((h @ w["q"]).reshape(-1, self.n_heads, self.dim), positions)
            k = rotate((h @ w["k"]).reshape(-1, self.n_kv, self.dim), positions)
            v = (h @ w["v"]).reshape(-1, self.n_kv, self.dim)
            x = x + attend(i, q, k, v).reshape(len(x), -1) @ w["o"]
            x = x + np.maximum(norm(x) @ w["up"], 0) @ w["down"]
        return norm(x) @ self.head

    def step(self, pool, batch):
        """One step of a batch over the pool's blocks: logits of each sequence's last token."""
        def attend(i, q, k, v):
            layer = pool.layer(i)
            layer.write(k, v, batch)
            return layer.attention(np.ascontiguousarray(q), batch)

        batch.copy()
        logits = self.forward(batch.tokens, batch.positions, attend)
        return logits[batch.query_start_loc[1:] - 1]

    def generate(self, pool, prompt, n):
        """Greedy tokens after a prompt, and how many tokens of the prompt were cached already."""
        batch = pool.batch(1, len(prompt), (len(prompt) + n) // pool.block_tokens + 1)
        with pool.sequence() as seq:
            hit = seq.start(prompt, n_more=n)
            logits = self.step(pool, batch.build([(seq, len(prompt) - hit)]))
            seq.publish()
            tokens = [int(logits[0].argmax())]
            while len(tokens) < n:
                seq.append(tokens[-1:])
                tokens.append(int(self.step(pool, batch.build([seq]))[0].argmax()))
            seq.publish()
        return tokens, hit

    def alone(self, prompt, n):
        """The same tokens without any cache: everything is computed anew for each."""
        tokens = list(prompt)
        for _ in range(n):
            tokens.append(int(self.forward(np.array(tokens), np.arange(len(tokens)),
                                           self._attend_all)[-1].argmax()))
        return tokens[len(prompt):]

    def _attend_all(self, _, q, k, v):
        group = self.n_heads // self.n_kv
        k, v = np.repeat(k, group, 1).transpose(1, 2, 0), np.repeat(v, group, 1).transpose(1, 0, 2)
        x = q.transpose(1, 0, 2) @ k * np.float32(self.dim ** -0.5)
        x = np.where(np.tril(np.ones(x.shape[1:], bool)), x, -np.inf)
        p = np.exp(x - x.max(-1, keepdims=True))
        return (p / p.sum(-1, keepdims=True) @ v).transpose(1, 0, 2)


def prompt_of(seed, n):
    return np.random.default_rng(seed).integers(0, 512, n).astype(np.int32)
