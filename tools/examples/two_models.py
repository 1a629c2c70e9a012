#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two models of different shape in two processes share one device's memory: a guaranteed minimum for
each, the rest for whoever needs it.

usage: two_models.py           (a kvcached must run; KVCACHED_SOCKET names its socket)
"""
import json
import subprocess
import sys

from toy import Toy, prompt_of  # first: it bounds numpy's threads

import kvclient

MODELS = {"small": dict(seed=11, n_layers=2, n_heads=4, n_kv_heads=4, head_dim=16),
          "large": dict(seed=12, n_layers=6, n_heads=8, n_kv_heads=2, head_dim=32)}


def engine(name):
    model = Toy(**MODELS[name])
    prompt = prompt_of(5, 75)
    with kvclient.Client(name=name) as client, model.open(client) as pool:
        tokens, _ = model.generate(pool, prompt, 12)
        client.ping()
        print(json.dumps({"tokens": tokens, "block_bytes": pool.block_bytes,
                          "right": tokens == model.alone(prompt, 12)}), flush=True)
        sys.stdin.readline()  # stay attached until the other one is done as well


def main():
    if len(sys.argv) > 1:
        engine(sys.argv[1])
        return
    engines = [subprocess.Popen([sys.executable, __file__, name], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE) for name in MODELS]
    answers = [json.loads(engine.stdout.readline()) for engine in engines]
    with kvclient.Client(name="onlooker") as client:
        pools = {pool["name"]: pool for pool in client.stats()["pools"]}
        gpu = client.stats()["gpus"][0]
        check = client.check()
    for process in engines:
        process.communicate(b"\n", timeout=60)
    for (name, shape), answer in zip(MODELS.items(), answers):
        pool = pools[Toy(**shape).name]
        print(f"{name}: blocks of {answer['block_bytes']} bytes, {pool['blocks_cached']} cached, "
              f"{pool['extent_bytes'] >> 20} of {gpu['bytes_arena'] >> 20} MiB are its")
    assert all(answer["right"] for answer in answers), "a model wrote other tokens than without cache"
    assert answers[0]["block_bytes"] != answers[1]["block_bytes"]
    assert check.n_errors == 0, check.first_error
    print("both wrote what they write without a cache, and the daemon's books balance")


if __name__ == "__main__":
    main()
