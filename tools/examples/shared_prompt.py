#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two replicas of one model, two processes: the second finds the system prompt that the first computed.

usage: shared_prompt.py        (a kvcached must run; KVCACHED_SOCKET names its socket)
"""
import json
import subprocess
import sys

from toy import Toy, prompt_of  # first: it bounds numpy's threads

import numpy as np

import kvclient

SYSTEM = prompt_of(1, 160)


def replica(question):
    model = Toy(seed=7)
    prompt = np.concatenate([SYSTEM, prompt_of(question, 21)])
    with kvclient.Client(name=f"replica-{question}") as client, model.open(client) as pool:
        tokens, hit = model.generate(pool, prompt, 16)
        client.ping()
    json.dump({"tokens": tokens, "hit": hit, "right": tokens == model.alone(prompt, 16)}, sys.stdout)


def main():
    if len(sys.argv) > 1:
        replica(int(sys.argv[1]))
        return
    answers = []
    for question in (100, 200):
        out = subprocess.run([sys.executable, __file__, str(question)], check=True, stdout=subprocess.PIPE)
        answers.append(json.loads(out.stdout))
        print(f"replica {len(answers)}: {answers[-1]['hit']} of {len(SYSTEM) + 21} tokens of its prompt "
              f"were cached; it wrote {answers[-1]['tokens'][:8]} ...")
    assert all(answer["right"] for answer in answers), "a replica wrote other tokens than without cache"
    assert answers[1]["hit"] == len(SYSTEM), "the second replica should find the whole system prompt"
    print("both wrote what they write without a cache")


if __name__ == "__main__":
    main()
