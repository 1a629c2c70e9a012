# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face transformers over shared pools against the framework's own cache: small ones with
random weights, one family after the other."""
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.masking_utils")

import kvclient  # noqa: E402
import kvclient.transformers  # noqa: E402
from conftest import DEADLINE_S  # noqa: E402

SMALL = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=512, pad_token_id=0, bos_token_id=1,
             eos_token_id=2)


def configs():
    t = transformers
    yield "llama", t.LlamaConfig(**SMALL)
    yield "qwen3", t.Qwen3Config(**SMALL)
    yield "gemma2", t.Gemma2Config(**SMALL, sliding_window=24, query_pre_attn_scalar=16)
    yield "gemma3", t.Gemma3TextConfig(**{**SMALL, "num_hidden_layers": 6}, sliding_window=24,
                                       query_pre_attn_scalar=16)
    yield "gpt-oss", t.GptOssConfig(**SMALL, sliding_window=24, num_local_experts=4, num_experts_per_tok=2)


def model_of(name):
    torch.manual_seed(1)
    torch.set_num_threads(1)
    config = dict(configs())[name]
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # logits that differ: the framework's own start values are all but equal
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model


def prompt_of(seed, n):
    return torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def own(model, prompt, n):
    """Logits and tokens by the framework's cache."""
    rows, tokens = [], []
    ids, kwargs = torch.tensor([prompt]), {}
    argument = kvclient.transformers._cache_argument(model)
    with torch.no_grad():
        for _ in range(n):
            out = model(input_ids=ids, use_cache=True, **kwargs)
            rows.append(out.logits[0, -1])
            tokens.append(int(rows[-1].argmax()))
            kwargs = {argument: getattr(out, argument)}
            ids = torch.tensor([tokens[-1:]])
    return torch.stack(rows), tokens


@pytest.mark.parametrize("name", [name for name, _ in configs()])
def test_logits_are_those_of_the_framework_s_own_cache(client, name):
    model = model_of(name)
    prompt = prompt_of(5, 70)
    expected, tokens = own(model, prompt, 64)
    with kvclient.transformers.Engine(model, client, name, max_tokens=32) as engine:
        rows = []
        with engine.pool.sequence() as seq:
            seq.reserve(70 + 64)
            for at in range(0, 70, 32):  # a prompt in chunks
                part = prompt[at:at + 32]
                seq.append(part)
                logits = engine.step([(seq, len(part))])
            rows.append(logits[0])
            for token in tokens[:-1]:
                seq.append([token])
                rows.append(engine.step([(seq, 1)])[0])
            seq.publish()
            client.ping()
        error = float((torch.stack(rows) - expected).abs().max() / expected.abs().max())
        assert error < 1e-4, error
        # Once more, beside others, and with what the first has left.
        others = [prompt_of(seed, 20 + seed) for seed in range(3)]
        wanted = []
        for other in others:
            model.set_attn_implementation("eager")
            wanted.append(own(model, other, 12)[1])
        model.set_attn_implementation("kvclient")
        found = engine.generate([prompt] + others, 12)
        assert found[0][0] == tokens[:12] and found[0][1] == 64
        assert [tokens_ for tokens_, _ in found[1:]] == wanted
    assert client.check().n_errors == 0


def test_a_pool_too_small_for_all_serves_them_one_after_the_other(client):
    model = model_of("llama")
    prompts = [prompt_of(seed, 60) for seed in range(6)]
    wanted = [own(model, prompt, 40)[1] for prompt in prompts]
    with kvclient.transformers.Engine(model, client, "tight", max_bytes=2 << 20, max_seqs=6) as engine:
        ids = engine.pool.take(max(engine.pool.max_blocks - 16, 0))
        assert [tokens for tokens, _ in engine.generate(prompts, 40)] == wanted
        engine.pool.give(ids)
        with pytest.raises(kvclient.TooLarge):
            engine.generate([prompt_of(1, 30000)], 1)


def test_recurrent_layers_are_refused_in_words(client):
    config = transformers.Qwen3NextConfig(
        **SMALL, layer_types=["linear_attention", "full_attention", "linear_attention"], num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(kvclient.UnsupportedError, match=r"layers \[0, 2\]"):
        kvclient.transformers.Engine(model, client, "next")


def test_latent_attention_is_refused_in_words(client):
    config = transformers.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4, "head_dim": 8}, moe_intermediate_size=32, n_routed_experts=4,
        n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
        kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(kvclient.UnsupportedError, match="latent"):
        kvclient.transformers.Engine(model, client, "latent")


OTHER = """
import sys
sys.path.insert(0, sys.argv[1])
import kvclient, kvclient.transformers
from test_transformers import model_of, prompt_of
with kvclient.Client(name="other") as client:
    engine = kvclient.transformers.Engine(model_of("qwen3"), client, "shared", revision="1")
    print(engine.generate([prompt_of(9, 100)], 8)[0])
    client.ping()
"""


def test_two_processes_share_what_they_compute(client):
    model = model_of("qwen3")
    wanted = own(model, prompt_of(9, 100), 8)[1]
    out = subprocess.run([sys.executable, "-c", OTHER, os.path.dirname(__file__)], check=True, text=True,
                         stdout=subprocess.PIPE, timeout=10 * DEADLINE_S).stdout
    assert out.strip() == str((wanted, 0))
    with kvclient.transformers.Engine(model, client, "shared", revision="1") as engine:
        assert engine.generate([prompt_of(9, 100)], 8)[0] == (wanted, 96)
    with pytest.raises(kvclient.ExistsError, match="revision"):
        kvclient.transformers.Engine(model_of("qwen3"), client, "shared", revision="2")
