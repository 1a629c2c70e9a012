#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models in two processes over one device's memory: two models of different shape beside each
other, replicas that share a system prompt, prefill handed over to decode without a copy, and eight samples by
fork. Weights are random; every token is held against what the framework's own cache gives.

usage: with_transformers.py [--device cuda]      (a kvcached must run; KVCACHED_SOCKET names its socket)
"""
import json
import subprocess
import sys

try:
    import torch
    import transformers

    import kvclient
    import kvclient.transformers
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(0)

DEVICE = "cuda" if "--device" in sys.argv and sys.argv[sys.argv.index("--device") + 1] == "cuda" else "cpu"
SIZES = dict(vocab_size=300, hidden_size=128, intermediate_size=256, num_attention_heads=4, head_dim=64,
             max_position_embeddings=1024, bos_token_id=1, eos_token_id=None, pad_token_id=0)
SHAPES = {
    "wide": lambda: transformers.LlamaConfig(**SIZES, num_hidden_layers=3, num_key_value_heads=4),
    "windows": lambda: transformers.Gemma2Config(**SIZES, num_hidden_layers=4, num_key_value_heads=1,
                                                 sliding_window=48, query_pre_attn_scalar=64),
}
N_SAMPLES, N_NEW = 8, 16


def tokens_of(seed, n):
    return torch.randint(3, 300, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


SYSTEM, DOCUMENT = tokens_of(1, 160), tokens_of(2, 200)


def model_of(name):
    torch.manual_seed(7)
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_config(SHAPES[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model.to(DEVICE)


@torch.no_grad()
def by_the_framework(model, prompt, n, choose=lambda logits: int(logits.argmax())):
    """The tokens that the model writes with the framework's own cache."""
    model.set_attn_implementation("eager")
    argument = kvclient.transformers.cache_argument(model)
    ids, cache, tokens = [prompt], {}, []
    while len(tokens) < n:
        out = model(input_ids=torch.tensor(ids, device=DEVICE), use_cache=True, **cache)
        tokens.append(choose(out.logits[0, -1]))
        ids, cache = [tokens[-1:]], {argument: getattr(out, argument)}
    model.set_attn_implementation("kvclient")
    return tokens


def engine_of(client, name):
    model = model_of(name)
    return kvclient.transformers.Engine(model, client, f"example-{name}", max_tokens=256, max_len=512)


def other():
    """The second process: another model, a replica of the first, and the prefill of a document."""
    with kvclient.Client(name="other") as client, engine_of(client, "windows") as windows, \
            engine_of(client, "wide") as wide:
        prompt = tokens_of(3, 100)
        written = windows.generate([prompt], N_NEW)[0][0]
        question = SYSTEM + tokens_of(4, 20)
        answer = wide.generate([question], N_NEW)[0][0]
        with wide.sequence() as seq:
            seq.start(DOCUMENT)
            wide.step([(seq, len(DOCUMENT))])
            seq.publish()
            client.ping()
            print(json.dumps({
                "right": written == by_the_framework(windows.model, prompt, N_NEW)
                and answer == by_the_framework(wide.model, question, N_NEW),
                "bytes": [pool.block_bytes for pool in windows.pools], "blocks": seq.part(0).blocks.tolist()}),
                flush=True)
            sys.stdin.readline()  # hold the blocks until decode has them


def sample(logits, random):
    return int(torch.multinomial(torch.softmax(logits.float().cpu(), -1), 1, generator=random))


def eight_samples(engine, prompt):
    """Eight sequences of one prompt: they share its blocks until each writes its own."""
    randoms = [torch.Generator().manual_seed(i) for i in range(N_SAMPLES)]
    first = engine.sequence()
    hit = first.start(prompt, n_more=N_NEW)
    logits = engine.step([(first, len(prompt) - hit)])[0]
    seqs = [first] + [first.fork() for _ in range(N_SAMPLES - 1)]
    samples = [[sample(logits, random)] for random in randoms]
    held = len({block for seq in seqs for block in seq.part(0).blocks.tolist()})
    while len(samples[0]) < N_NEW:
        for seq, tokens in zip(seqs, samples):
            seq.reserve(len(seq) + 1)
            seq.append(tokens[-1:])
        for row, tokens, random in zip(engine.step([(seq, 1) for seq in seqs]), samples, randoms):
            tokens.append(sample(row, random))
    for seq in seqs:
        seq.close()
    for i, tokens in enumerate(samples):
        random = torch.Generator().manual_seed(i)
        assert tokens == by_the_framework(engine.model, prompt, N_NEW, lambda row: sample(row, random)), \
            "a sample differs from the framework's"
    return held


def main():
    process = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--other"], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    second = json.loads(process.stdout.readline() or "{}")
    assert second.get("right"), "the other process wrote other tokens than the framework"
    with kvclient.Client(name="main") as client, engine_of(client, "wide") as engine:
        print(f"two models: blocks of {engine.pool.block_bytes} bytes here, of {second['bytes']} there, on one device")

        question = SYSTEM + tokens_of(5, 30)
        (answer, hit), = engine.generate([question], N_NEW)
        right = by_the_framework(engine.model, question, N_NEW)
        assert hit == len(SYSTEM) and answer == right, f"{hit} tokens found, {answer} instead of {right}"
        print(f"replicas: {hit} tokens of the system prompt were found, the answer is the framework's")

        with engine.sequence() as seq:
            hit = seq.start(DOCUMENT, n_more=N_NEW)
            shared = seq.part(0).blocks.tolist()[:hit // engine.pool.block_tokens]
            assert shared == second["blocks"][:len(shared)] and hit == 192, "these are other blocks"
            written = [int(engine.step([(seq, len(DOCUMENT) - hit)])[0].argmax())]
            while len(written) < N_NEW:
                seq.append(written[-1:])
                written.append(int(engine.step([(seq, 1)])[0].argmax()))
        assert written == by_the_framework(engine.model, DOCUMENT, N_NEW), "decode wrote other tokens"
        print(f"hand-over: decode goes on in {len(shared)} blocks of prefill, and writes the framework's tokens")

        held = eight_samples(engine, tokens_of(6, 90))
        assert held == 7, f"a fork took more blocks than it wrote: {held}"
        process.communicate(b"\n", timeout=60)
        client.ping()
        assert client.check().n_errors == 0
    print(f"samples: {N_SAMPLES} sequences of 90 tokens, with room for 16 more, held {held} blocks; all tokens are the framework's")


if __name__ == "__main__":
    other() if "--other" in sys.argv else main()
