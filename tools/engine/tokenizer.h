/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tokenizer a GGUF file carries.
 *
 * "gpt2": byte-level BPE, with the pre-tokenizers "smollm" (each digit alone, then GPT-2's pattern) and
 * "gpt-2" (the pattern alone). A vocabulary of the 256 bytes and no merges makes every byte a token.
 *
 *	text -> special tokens cut out -> pieces by the pattern -> bytes -> merges by rank -> ids
 *
 * "llama": SentencePiece's BPE with byte tokens for what the vocabulary lacks.
 *
 *	text -> spaces to U+2581 -> special tokens cut out -> characters -> merges by score -> ids
 *
 * Bytes that aren't UTF-8 are kept as they are by both.
 *
 * Sources: byte pair encoding of text, arXiv:1508.07909; SentencePiece, arXiv:1808.06226.
 * Threads: read-only after kv_tokenizer_new(), from any thread.
 */
#ifndef KV_ENGINE_TOKENIZER_H
#define KV_ENGINE_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tools/engine/gguf.h"

struct kv_tokenizer;

/* A growing list of token ids; all zero is empty. */
struct kv_tokens {
	int32_t *at;
	size_t n;
	size_t n_max;
};

/* kv_tokens_push() - Return: 0 or -ENOMEM */
int kv_tokens_push(struct kv_tokens *tokens, int32_t token);
void kv_tokens_deinit(struct kv_tokens *tokens);

/**
 * kv_tokenizer_new() - from the file's metadata; @file must outlive it
 *
 * Return: 0; -ENOTSUP for another kind of tokenizer; -EINVAL for a broken one; -ENOMEM.
 */
int kv_tokenizer_new(const struct kv_gguf *file, struct kv_tokenizer **ret);

/* NULL is allowed; returns NULL. */
struct kv_tokenizer *kv_tokenizer_free(struct kv_tokenizer *tokenizer);

/**
 * kv_tokenizer_encode() - append the tokens of a text
 * @special: names of special tokens in the text ("<|im_end|>") become those tokens; otherwise they
 *           are text like any other. What a SentencePiece vocabulary has of its user's own (runs of
 *           spaces and lines, say) is found in either case.
 *
 * Return: 0; -ENOMEM; -EINVAL for 2 GiB or more.
 */
int kv_tokenizer_encode(const struct kv_tokenizer *tokenizer, const char *text, size_t len,
			bool special, struct kv_tokens *tokens);

/**
 * kv_tokenizer_prompt() - append what a model is given for a user's text
 * @chat: put it as the user's turn into the model's chat template (ChatML, with the system turn
 *        the template begins with, or Gemma's turns); the text's own special tokens are then plain text
 *
 * Return: 0; -ENOTSUP if the file has no such template; -ENOMEM.
 */
int kv_tokenizer_prompt(const struct kv_tokenizer *tokenizer, const char *text, size_t len,
			bool chat, struct kv_tokens *tokens);

/* kv_tokenizer_piece() - the bytes of a token; none for control tokens and unknown ids */
struct kv_text kv_tokenizer_piece(const struct kv_tokenizer *tokenizer, int32_t token);

/* kv_tokenizer_is_end() - does the model say by this token that it is done? */
bool kv_tokenizer_is_end(const struct kv_tokenizer *tokenizer, int32_t token);

#endif
