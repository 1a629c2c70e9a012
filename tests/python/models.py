# SPDX-License-Identifier: Apache-2.0
"""Small models of each family with random weights, and what they say with the framework's own cache."""
from contextlib import nullcontext

import torch
import transformers
from torch.overrides import TorchFunctionMode

import kvclient.transformers

PROMPT, DECODE = 150, 64
VOCAB = 256
SMALL = dict(vocab_size=VOCAB, hidden_size=128, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, head_dim=64, max_position_embeddings=512, pad_token_id=0, bos_token_id=1,
             eos_token_id=2)
# Every expert is asked: which of two with nearly equal scores a token takes is the rounding's choice, not the cache's.
EXPERTS = dict(num_experts_per_tok=4, moe_intermediate_size=64)
HYBRID = dict(layer_types=["linear_attention"] * 3 + ["full_attention"], linear_num_key_heads=2,
              linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
              linear_conv_kernel_dim=4)
LATENT = dict({**SMALL, "num_key_value_heads": 4, "head_dim": 64}, **EXPERTS, n_routed_experts=4, n_shared_experts=1,
              n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=96,
              qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64)
INDEXED = dict(index_n_heads=8, index_head_dim=128)


def _qwen3_next(t):
    return t.Qwen3NextConfig(**SMALL, **HYBRID, **EXPERTS, num_experts=4, shared_expert_intermediate_size=64)


def _windows(t, kind, **more):
    return kind(**SMALL, sliding_window=40, query_pre_attn_scalar=64,
                layer_types=["sliding_attention"] * 3 + ["full_attention"], **more)


CONFIGS = {
    "llama": lambda t: t.LlamaConfig(**SMALL),
    "qwen3": lambda t: t.Qwen3Config(**SMALL),
    "gemma2": lambda t: _windows(t, t.Gemma2Config),
    "gemma3": lambda t: _windows(t, t.Gemma3TextConfig),
    "gpt-oss": lambda t: t.GptOssConfig(**SMALL, sliding_window=40, num_local_experts=4, num_experts_per_tok=4),
    "qwen3-next": _qwen3_next,
    "qwen3.5": lambda t: t.Qwen3_5TextConfig(**SMALL, **HYBRID),
    "deepseek-v3": lambda t: t.DeepseekV3Config(**LATENT),
    "deepseek-v3.2": lambda t: t.DeepseekV32Config(**LATENT, **INDEXED, index_topk=256),
    # Fewer tokens than there are: in f32, so that rounding doesn't choose others.
    "deepseek-v3.2-chosen": lambda t: t.DeepseekV32Config(**LATENT, **INDEXED, index_topk=64),
}
NAMES = list(CONFIGS)
#: what is found of a prompt of PROMPT tokens that is cached: whole blocks, kept states
UNITS = {"qwen3-next": 64, "qwen3.5": 64, "deepseek-v3.2": 64, "deepseek-v3.2-chosen": 64}


def hit_of(name):
    unit = UNITS.get(name, 16)
    return (PROMPT - 1) // unit * unit


def model_of(name, device="host"):
    torch.manual_seed(1)
    torch.set_num_threads(1)
    config = CONFIGS[name](transformers)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():  # logits that differ: the framework's own start values are all but equal
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=random)
    if device == "cuda":
        model = model.to(torch.float32 if name.endswith("chosen") else torch.bfloat16).cuda()
    return model


def prompt_of(seed, n=PROMPT):
    return torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_of(model, client, name, **options):
    options = {"max_tokens": 64, "interval": 64, "max_len": 512, **options}
    return kvclient.transformers.Engine(model, client, name, **options)


class RoundedKeys(TorchFunctionMode):
    """The indexer's own mathematics with its operands in 8 bits, which is how its keys are kept."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.matmul and args[1].dim() == 4 and args[1].shape[1:3] == (1, 128):
            args = self.rounded(args[0]), self.rounded(args[1].transpose(-1, -2)).transpose(-1, -2)
        return function(*args, **(kwargs or {}))

    @staticmethod
    def rounded(x):
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
        return (x / scale).to(torch.float8_e4m3fn).float() * scale


def own(model, prompt, n, chosen=False):
    """Logits and tokens by the framework's cache."""
    rows, tokens = [], []
    ids, kwargs = torch.tensor([prompt], device=model.device), {}
    argument = kvclient.transformers.cache_argument(model)
    model.set_attn_implementation("eager")
    with torch.no_grad(), RoundedKeys() if chosen else nullcontext():
        for _ in range(n):
            out = model(input_ids=ids, use_cache=True, **kwargs)
            rows.append(out.logits[0, -1].float())
            tokens.append(int(rows[-1].argmax()))
            kwargs = {argument: getattr(out, argument)}
            ids = torch.tensor([tokens[-1:]], device=model.device)
    return torch.stack(rows), tokens


def ours(engine, prompt, tokens, chunk=64):
    """Logits of the same steps from the pools, and how much of the prompt was found."""
    rows = []
    with engine.sequence() as seq:
        hit = seq.lookup(prompt)
        seq.reserve(len(prompt) + len(tokens))
        while len(seq) < len(prompt):
            part = prompt[len(seq):len(seq) + min(chunk, seq.stop or chunk)]
            seq.append(part)
            logits = engine.step([(seq, len(part))])
            seq.publish()
        rows.append(logits[0].float())
        for token in tokens[:-1]:
            seq.append([token])
            rows.append(engine.step([(seq, 1)])[0].float())
            engine.publish([seq])
            seq.done(len(seq))
    return torch.stack(rows), hit


def exactly(model, name, prompt, tokens):
    """The logits of the same steps by the same weights in f32, without a cache."""
    wide = model_of(name, "host").to(model.device)
    wide.load_state_dict({key: value.float() for key, value in model.state_dict().items()})
    with torch.no_grad():
        return wide(input_ids=torch.tensor([prompt + tokens[:-1]], device=model.device)).logits[0, len(prompt) - 1:]


def check_logits(found, expected, tokens, tolerance):
    """The error as a part of the largest logit, of the worst step and of half of them, and the same greedy
    tokens wherever the first is clear of the second.

    Return: the largest error, and at how many of the steps the token is the same.
    """
    rows = (found - expected).abs().amax(-1) / expected.abs().max()
    error = float(rows.max())
    assert error <= tolerance[0] and float(rows.median()) <= tolerance[1], (error, float(rows.median()), tolerance)
    top = expected.topk(2, -1).values
    clear = (top[:, 0] - top[:, 1]) > 2 * rows * expected.abs().max()
    same = found.argmax(-1).cpu() == torch.tensor(tokens)
    assert bool((same | ~clear.cpu()).all()) and int(clear.sum()) > len(tokens) // 4
    return error, int(same.sum())
