#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvengine against HF transformers on the same GGUF file.

usage: check_logits.py BUILD_FOLDER MODEL.gguf TOKENS

Six prompts, one of them longer than a window: their tokens by the package tokenizers (or, of a SentencePiece
vocabulary, by a few lines here), the next-token logits (relative error at most 2e-2) and TOKENS greedy ones by
transformers in float32. kvengine runs all in one batch, with a real daemon. Exit 77, a skip for meson, where
the packages or the model file are missing, or transformers doesn't know the architecture.
"""
import inspect
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

MOST_ERROR = 2e-2
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    \"\"\"Return the n-th number.\"\"\"\n",
    "In 1969 the first people walked on the Moon. The 3 astronauts of Apollo 11 were",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
]
with open(os.path.join(os.path.dirname(__file__), "../../tools/quickstart.txt"), encoding="utf-8") as story:
    PROMPTS.append(story.read() + "Question: Who owns the oldest yard?\nAnswer:")


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


def run_engine(build, model, n_steps, dtype, folder):
    """Texts' tokens and logits of all prompts, from a daemon of our own."""
    import numpy

    socket = os.path.join(folder, "kvcached.sock")
    logits = os.path.join(folder, "logits")
    tokens = os.path.join(folder, "tokens")
    daemon = subprocess.Popen([f"{build}/daemon/kvcached", "--host", "512M", "--socket", socket],
                              stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 30
        while subprocess.run([f"{build}/tools/kvctl", "-s", socket, "ping"],
                             capture_output=True).returncode:
            if daemon.poll() is not None or time.monotonic() > deadline:
                sys.exit("kvcached didn't start")
            time.sleep(0.05)
        command = [f"{build}/tools/engine/kvengine", "--socket", socket, "--model", model,
                   "--tokens", str(n_steps), "--ignore-eos", "--kv-dtype", dtype,
                   "--logits", logits, "--tokens-out", tokens]
        for prompt in PROMPTS:
            command += ["--prompt", prompt]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(30)
    rows = numpy.fromfile(logits, dtype=numpy.float32).reshape(len(PROMPTS), -1)
    with open(tokens, encoding="ascii") as file:
        lists = [[int(line) for line in part.split()] for part in file.read().split("\n\n")]
    return rows, lists


def read_bpe(words, merges, types):
    """Vocabulary and merges in the package tokenizers, as SmolLM2's own files say."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)},
                                     merges=[tuple(merge.split(" ", 1)) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.add_special_tokens([word for word, kind in zip(words, types) if kind == 3])
    return lambda text: tokenizer.encode(text).ids


def read_sentencepiece(words, scores, types, bos):
    """Pairs of the highest score are joined until none is a word: for texts without odd characters."""
    ids = {word: i for i, (word, kind) in enumerate(zip(words, types)) if kind == 1}
    lines = {word: i for i, (word, kind) in enumerate(zip(words, types)) if kind == 4 and not word.strip()}
    runs = re.compile("|".join(sorted(map(re.escape, lines), key=len, reverse=True)))

    def plain(text):
        parts = list(text.replace(" ", "\u2581"))
        while True:
            pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ids]
            if not pairs:
                return [ids[part] for part in parts]
            _, i = min(pairs)
            parts[i:i + 2] = [parts[i] + parts[i + 1]]

    def encode(text):
        tokens, start = [bos], 0
        for run in runs.finditer(text):
            tokens += plain(text[start:run.start()]) + [lines[run.group()]]
            start = run.end()
        return tokens + plain(text[start:])

    return encode


def read_tokenizer(path):
    """A function from a text to its tokens."""
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    words, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    if fields["tokenizer.ggml.model"].contents() == "gpt2":
        return read_bpe(words, fields["tokenizer.ggml.merges"].contents(), types)
    return read_sentencepiece(words, fields["tokenizer.ggml.scores"].contents(), types,
                              fields["tokenizer.ggml.bos_token_id"].contents())


def load_reference(path):
    import torch
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        config = load_gguf_checkpoint(path)["config"]
    except ValueError as error:
        skip(f"this transformers can't read the file: {error}")
    names = {"llama": ("LlamaConfig", "LlamaForCausalLM"),
             "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
             "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM")}[config["model_type"]]
    if not all(hasattr(transformers, name) for name in names):
        skip(f"this transformers has no {names[1]}")
    config = getattr(transformers, names[0])(**config)
    model = getattr(transformers, names[1])(config)
    options = {"return_tensors": True}
    if "model_to_load" in inspect.signature(load_gguf_checkpoint).parameters:  # newer ones want it
        options["model_to_load"] = model
    tensors = load_gguf_checkpoint(path, **options)["tensors"]
    # Without a matrix of its own the output layer is the embedding's.
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if missing or unexpected:
        sys.exit(f"transformers reads the file differently: {missing} missing, {unexpected} unknown")
    return model.to(torch.float32).eval()


def compare(model, prompt_ids, logits, tokens):
    """Relative error of the logits, and how many tokens are those that greedy choice gives.

    The model reads prompt and tokens at once: token n is right if it is the likeliest after all
    before it, so the first wrong one is where the two texts part.
    """
    import numpy
    import torch

    with torch.no_grad():
        rows = model(torch.tensor([prompt_ids + tokens[:-1]])).logits[0, len(prompt_ids) - 1:]
    want = rows[0].numpy()
    best = rows.argmax(dim=-1).tolist()
    same = next((n for n, (a, b) in enumerate(zip(tokens, best)) if a != b), len(tokens))
    return numpy.linalg.norm(logits - want) / numpy.linalg.norm(want), same


def main():
    build, path = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
    n_steps = int(sys.argv[3])
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not os.path.exists(path):
        skip(f"no model at {path}")
    try:
        import gguf  # noqa: F401
        import numpy  # noqa: F401
        import tokenizers  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        skip(f"{error} (tools/setup --python installs it)")

    encode = read_tokenizer(path)
    model = load_reference(path)
    failed = False
    for dtype in "f32", "f16":
        with tempfile.TemporaryDirectory() as folder:
            rows, lists = run_engine(build, path, n_steps, dtype, folder)
        for i, prompt in enumerate(PROMPTS):
            error, same = compare(model, encode(prompt), rows[i], lists[i])
            print(f"K and V in {dtype}, {prompt[:24]!r:28}: relative error {error:.1e}, "
                  f"{same} of {n_steps} tokens the same")
            # Rounding K and V to f16 may turn a choice between near equals: then only f32 counts.
            failed |= not error <= MOST_ERROR or len(lists[i]) != n_steps
            failed |= dtype == "f32" and same < n_steps
    sys.exit(1 if failed else 0)


main()
