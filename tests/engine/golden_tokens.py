#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints golden_tokens.h: what the package sentencepiece makes of texts with a GGUF file's vocabulary.

usage: golden_tokens.py gemma-3-270m-q4_k_m.gguf > golden_tokens.h   (made with sentencepiece 0.2.3)

The model is put together from the file's tokens, scores and types; spaces of its words are U+2581 there.
"""
import sys

import gguf
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as proto

TEXTS = [
    "Hello world", "Hello, world! It's 2024, isn't it?", " leading", "trailing ", "a", " ", "  ", "   ",
    "two  spaces   three    four", "tabs\tand\t\ttabs", "line\nline\n\nline\n\n\nend\n", "\n", "\r\n\r\n",
    "    def f(x):\n        return x + 1\n", "x=3.14159; y[10]+=0x7f", "1234567890 12 345 6,789.00",
    "The quick brown fox jumps over the lazy dog.", "HELLO HeLLo hELLO", "don't can't we'll they've I'm",
    "<table><tr><td>1</td></tr></table>", "<html><body>not special</body></html>", "<h1>t</h1> <b>x</b>",
    "<0x0A> is text, <bos> and <eos> too, <start_of_turn>user", "[multimodal] <start_of_image>", "<unused7>",
    "über naïve café", "Ünïcödé", "日本語のテキスト", "中文和English混合", "한국어 텍스트", "Привет, мир!", "Ελληνικά",
    "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "ไทยไม่มีช่องว่าง", "😀 😃 👩‍👩‍👧‍👦 🇩🇪 👍🏽", "a\u0301 e\u0301 combining",
    "\u00a0no\u00a0break\u2009thin\u3000wide", "▁literal▁lower▁block", "\u200bzero\u200dwidth\ufeff", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𒀀𒀁", "\U000f0000\U0010ffff",
    "∑_{i=0}^{n} x_i² ≤ √(2π)", "€100 £50 ¥1000 ½ ¾", "https://example.com/a/b?c=d&e=f#g", "user@example.com",
    "{\"key\": [1, 2.5, null, true], \"s\": \"\\n\"}", "SELECT * FROM t WHERE a >= 10;", "for (int i = 0; i < n; i++) {",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "==============================", "-----\n*****\n_____",
    " " * 40 + "x", "\n" * 40 + "x", "\t" * 33, "antidisestablishmentarianism supercalifragilisticexpialidocious",
    "The capital of France is", "Once upon a time, in a village by the sea, there lived", "",
]


def make_model(path):
    fields = gguf.GGUFReader(path).fields
    words = fields["tokenizer.ggml.tokens"].contents()
    scores = fields["tokenizer.ggml.scores"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    model = proto.ModelProto()
    for i, (word, score, kind) in enumerate(zip(words, scores, types)):
        # It wants one unknown token, which GGUF calls a control one here.
        kind = 2 if word == "<unk>" else kind
        model.pieces.add(piece=word.replace(" ", "\u2581"), score=score, type=kind)
    model.trainer_spec.model_type = proto.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.vocab_size = len(words)
    for name, word in ("pad", "<pad>"), ("eos", "<eos>"), ("bos", "<bos>"), ("unk", "<unk>"):
        setattr(model.trainer_spec, f"{name}_id", words.index(word))
        setattr(model.trainer_spec, f"{name}_piece", word)
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.escape_whitespaces = True
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def quote(text):
    """As a C string, a byte that isn't plain in octal."""
    return "".join(chr(b) if 32 <= b < 127 and chr(b) not in '"\\?' else f"\\{b:03o}" for b in text.encode())


def main():
    tokenizer = make_model(sys.argv[1])
    print("/* SPDX-License-Identifier: Apache-2.0 */")
    print("/* Made by golden_tokens.py: texts and their tokens in the vocabulary of Gemma 3. */")
    print("#include <stddef.h>\n#include <stdint.h>\n")
    print("static const struct golden_tokens {\n\tconst char *text;\n\tsize_t n;\n\tint32_t ids[64];")
    print("} golden_tokens[] = {")
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert len(ids) <= 64, text
        quoted = quote(text)
        # In parts that fit a line, none of which ends inside an escape
        parts, part = [], ""
        while quoted:
            n = 4 if quoted[0] == "\\" else 1
            part, quoted = part + quoted[:n], quoted[n:]
            if len(part) > 80:
                parts, part = parts + [part], ""
        parts += [part] if part or not parts else []
        print("\t{" + "\n\t ".join(f'"{part}"' for part in parts) + ",\n\t " + f"{len(ids)},\n\t {{")
        for i in range(0, len(ids), 12):
            print("\t\t " + ", ".join(str(v) for v in ids[i:i + 12]) + ",")
        if not ids:
            print("\t\t 0,")
        print("\t }},")
    print("};")


main()
