#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Eight samples of one prompt by fork: they share its blocks until each writes its own.

usage: sample_many.py          (a kvcached must run; KVCACHED_SOCKET names its socket)
"""
from toy import Toy, prompt_of  # first: it bounds numpy's threads

import numpy as np

import kvclient

N, LENGTH = 8, 24
PROMPT = prompt_of(9, 90)


def choose(logits, random):
    p = np.exp(logits - logits.max())
    return int(random.choice(len(p), p=p / p.sum()))


def main():
    model = Toy(seed=31)
    randoms = [np.random.default_rng(i) for i in range(N)]
    with kvclient.Client(name="sampler") as client, model.open(client) as pool:
        batch = pool.batch(N, len(PROMPT), 16)
        first = pool.sequence()
        first.reserve(len(PROMPT))
        first.append(PROMPT)
        logits = model.step(pool, batch.build([(first, len(PROMPT))]))
        seqs = [first] + [first.fork() for _ in range(N - 1)]
        samples = [[choose(logits[0], random)] for random in randoms]
        used = len({int(id) for seq in seqs for id in seq.blocks})
        print(f"{N} sequences of {len(PROMPT)} tokens hold {used} blocks between them")
        copies = 0
        while len(samples[0]) < LENGTH:
            for seq, sample in zip(seqs, samples):
                seq.reserve(len(seq) + 1)
                seq.append(sample[-1:])
            batch.build(seqs)
            copies += len(batch.copies)
            for row, sample, random in zip(model.step(pool, batch), samples, randoms):
                sample.append(choose(row, random))
        for seq in seqs:
            seq.close()
        batch.close()
    assert used == -(-len(PROMPT) // 16), "a fork copied more than it wrote"
    assert copies in (N - 1, N), f"{copies} blocks were copied, one for each that wrote into a shared one"

    # The same eight without any cache.
    for sample, seed in zip(samples, range(N)):
        random, tokens = np.random.default_rng(seed), list(PROMPT)
        for token in sample:
            logits = model.forward(np.array(tokens), np.arange(len(tokens)), model._attend_all)[-1]
            assert choose(logits, random) == token, "a sample differs from the one without cache"
            tokens.append(token)
    print(f"{copies} blocks were copied when they began to differ; all samples are right")


if __name__ == "__main__":
    main()
