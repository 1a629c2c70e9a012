#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a decode step of a Hugging Face model costs over shared pools, against the framework's own static cache.

Both run eagerly, with the same weights, prompts and tokens; the framework's attention is sdpa, or its own where
it has no sdpa (gpt-oss). On the host both have one thread, so that a busy machine costs both the same. A step is
measured from the tokens on the host to logits on the device, all of ours included: append, tables, publish.

usage: transformers_step.py [--device cuda] [--models NAME,NAME] [--layers N] [--width N] [--context N] [--batch N,N...] [--steps N]
       (a kvcached must run; KVCACHED_SOCKET names its socket)
"""
import argparse
import statistics
import time

import torch
import transformers
from transformers import StaticCache

import kvclient
import kvclient.transformers

VOCAB = 32000


def sizes(o, **more):
    return {**dict(hidden_size=o.width, intermediate_size=3 * o.width, num_hidden_layers=o.layers,
                   num_attention_heads=o.width // 128, num_key_value_heads=o.width // 256, head_dim=128,
                   vocab_size=VOCAB, max_position_embeddings=8192, pad_token_id=0, bos_token_id=1, eos_token_id=2),
            **more}


def kinds(o, one, every):
    """Layers of kind @one, each @every-th of which has full attention."""
    return ["full_attention" if i % every == every - 1 else one for i in range(o.layers)]


# All experts are asked: which of two with nearly equal scores a token takes is the rounding's choice.
SHAPES = {
    "llama": lambda t, o: t.LlamaConfig(**sizes(o)),
    "qwen3": lambda t, o: t.Qwen3Config(**sizes(o)),
    "gemma3": lambda t, o: t.Gemma3TextConfig(**sizes(o), sliding_window=256, query_pre_attn_scalar=128,
                                              layer_types=kinds(o, "sliding_attention", 4)),
    "gpt-oss": lambda t, o: t.GptOssConfig(**sizes(o, head_dim=64, num_attention_heads=o.width // 64,
                                                   num_key_value_heads=o.width // 512 or 1,
                                                   intermediate_size=o.width), sliding_window=128,
                                           layer_types=kinds(o, "sliding_attention", 2), num_local_experts=4,
                                           num_experts_per_tok=4),
    "qwen3-next": lambda t, o: t.Qwen3NextConfig(
        **sizes(o), layer_types=kinds(o, "linear_attention", 4), linear_num_key_heads=o.width // 256,
        linear_num_value_heads=o.width // 128, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=4, moe_intermediate_size=o.width // 4,
        shared_expert_intermediate_size=o.width // 4),
    "deepseek-v3": lambda t, o: t.DeepseekV3Config(
        **sizes(o, num_key_value_heads=o.width // 128, head_dim=64), n_routed_experts=4, num_experts_per_tok=4,
        n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, moe_intermediate_size=o.width // 4,
        kv_lora_rank=512, q_lora_rank=o.width // 2, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128),
}


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(step, n, device):
    """Median seconds of a step, after a few to warm up."""
    times = []
    for i in range(n + 3):
        wait(device)
        start = time.perf_counter()
        step(i)
        wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


@torch.no_grad()
def static_step(model, prompts, tokens, n):
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # gpt-oss: no sinks there
        model.set_attn_implementation("eager")
    size = prompts.shape[1] + n + 4
    try:
        cache = StaticCache(config=model.config, max_cache_len=size)
    except TypeError:  # older versions
        cache = StaticCache(model.config, len(prompts), size, device=model.device, dtype=model.dtype)
    argument = kvclient.transformers.cache_argument(model)
    rows = []

    def run(ids, at):
        positions = torch.arange(at, at + ids.shape[1], device=model.device)[None].expand(len(ids), -1)
        return model(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1,
                     **{argument: cache}).logits[:, -1]

    rows.append(run(prompts, 0))
    return timed(lambda i: rows.append(run(tokens[i].to(model.device)[:, None], prompts.shape[1] + i)), n,
                 model.device), rows


def our_step(model, client, name, prompts, tokens, n):
    size = prompts.shape[1] + n + 4
    rows = []
    with kvclient.transformers.Engine(model, client, name, max_seqs=len(prompts), max_len=size,
                                      max_tokens=max(prompts.shape[1], len(prompts))) as engine:
        seqs = []
        for prompt in prompts.tolist():
            seq = engine.sequence()
            seq.reserve(size)
            seq.append(prompt)
            rows.append(engine.step([(seq, len(prompt))]))
            seqs.append(seq)
        rows = [torch.cat(rows)]

        def step(i):
            for seq, token in zip(seqs, tokens[i].tolist()):
                seq.append([token])
            rows.append(engine.step([(seq, 1) for seq in seqs]))
            engine.publish(seqs)

        took = timed(step, n, model.device)
        for seq in seqs:
            seq.close()
    return took, rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["host", "cuda"], default="host")
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    device = torch.device("cuda" if options.device == "cuda" else "cpu")
    if options.device == "host":
        torch.set_num_threads(1)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.layers} layers of "
          f"{options.width}, {options.context} tokens before, {dtype}, {device}")
    print(f"{'model':12} {'batch':>5} {'static ms':>10} {'pools ms':>9} {'ratio':>6}  largest difference of logits")
    with kvclient.Client(name="bench") as client:
        for name in options.models.split(","):
            torch.manual_seed(1)
            model = transformers.AutoModelForCausalLM.from_config(SHAPES[name](transformers, options))
            model = model.to(device, dtype).eval()
            for n_seqs in map(int, options.batch.split(",")):
                random = torch.Generator().manual_seed(n_seqs)
                prompts = torch.randint(3, VOCAB, (n_seqs, options.context), generator=random).to(device)
                tokens = torch.randint(3, VOCAB, (options.steps + 3, n_seqs), generator=random)
                theirs, expected = static_step(model, prompts, tokens, options.steps)
                mine, found = our_step(model, client, f"bench-{name}-{n_seqs}", prompts, tokens, options.steps)
                error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected))
                assert len(found) == len(expected) and error < 5e-2, error
                print(f"{name:12} {n_seqs:5} {theirs * 1e3:10.3f} {mine * 1e3:9.3f} {mine / theirs:6.2f}  {error:.1e}",
                      flush=True)


if __name__ == "__main__":
    main()
