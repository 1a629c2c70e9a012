#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A prefill process computes a prompt, a decode process goes on with it: the same blocks, no copy.

usage: hand_over.py            (a kvcached must run; KVCACHED_SOCKET names its socket)
"""
import json
import subprocess
import sys

from toy import Toy, prompt_of  # first: it bounds numpy's threads

import kvclient

PROMPT = prompt_of(3, 200)


def prefill():
    model = Toy(seed=21)
    with kvclient.Client(name="prefill") as client, model.open(client) as pool:
        with pool.sequence() as seq, pool.batch(1, 64, 16) as batch:
            seq.reserve(len(PROMPT))
            for at in range(0, len(PROMPT), 64):
                part = PROMPT[at:at + 64]
                seq.append(part)
                model.step(pool, batch.build([(seq, len(part))]))
                seq.publish()
            client.ping()
            print(json.dumps([int(id) for id in seq.blocks]), flush=True)
            sys.stdin.readline()


def decode():
    model = Toy(seed=21)
    with kvclient.Client(name="decode") as client, model.open(client) as pool:
        with pool.sequence() as seq, pool.batch(1, 64, 16) as batch:
            hit = seq.start(PROMPT, n_more=16)
            shared = [int(id) for id in seq.blocks[:hit // pool.block_tokens]]
            tokens = [int(model.step(pool, batch.build([(seq, len(PROMPT) - hit)]))[0].argmax())]
            while len(tokens) < 16:
                seq.append(tokens[-1:])
                tokens.append(int(model.step(pool, batch.build([seq]))[0].argmax()))
        print(json.dumps({"blocks": shared, "hit": hit, "right": tokens == model.alone(PROMPT, 16)}))


def main():
    if len(sys.argv) > 1:
        {"prefill": prefill, "decode": decode}[sys.argv[1]]()
        return
    first = subprocess.Popen([sys.executable, __file__, "prefill"], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)
    blocks = json.loads(first.stdout.readline())
    second = json.loads(subprocess.run([sys.executable, __file__, "decode"], check=True,
                                       stdout=subprocess.PIPE).stdout)
    first.communicate(b"\n", timeout=60)
    n = len(second["blocks"])
    print(f"prefill computed {len(PROMPT)} tokens into blocks {blocks}")
    print(f"decode found {second['hit']} of them in blocks {second['blocks']}")
    assert n == (len(PROMPT) - 1) // 16 and second["blocks"] == blocks[:n], "these are other blocks"
    assert second["right"], "decode wrote other tokens than without cache"
    print("the same blocks, and the tokens that are written without a cache")


if __name__ == "__main__":
    main()
