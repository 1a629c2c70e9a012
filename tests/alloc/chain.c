/* SPDX-License-Identifier: Apache-2.0 */
#include <check.h>

#include "tests/alloc/chain.h"
#include "tests/support/expect.h"

struct pages p;
struct kv_books *const b = &p.books;

void setup(void)
{
	pages_init(&p, N_BLOCKS, BLOCK_TOKENS);
}

void teardown(void)
{
	pages_check(&p, NULL, "at the end");
	pages_deinit(&p);
}

void resize(uint32_t n_blocks)
{
	pages_deinit(&p);
	pages_init(&p, n_blocks, BLOCK_TOKENS);
}

void expect_counts(uint32_t n_free, uint32_t n_leased, uint32_t n_cached, uint32_t n_quarantined)
{
	expect(b->n_free == n_free && b->n_leased == n_leased && b->n_cached == n_cached &&
		       b->n_quarantined == n_quarantined,
	       "free %u leased %u cached %u quarantined %u, expected %u %u %u %u", b->n_free,
	       b->n_leased, b->n_cached, b->n_quarantined, n_free, n_leased, n_cached,
	       n_quarantined);
}

const int32_t *tokens_of(int32_t prompt, uint32_t i)
{
	static int32_t tokens[BLOCK_TOKENS];

	for (int32_t k = 0; k < BLOCK_TOKENS; k++)
		tokens[k] = prompt * 1000 + (int32_t)i * BLOCK_TOKENS + k;
	return tokens;
}

struct kv_key parent_key(const struct chain *c, uint32_t i)
{
	return i ? c->keys[i - 1] : (struct kv_key){0, 0};
}

uint64_t tick(uint64_t n)
{
	return ((struct kv_shm_blocks *)p.shared)->clock += n;
}

struct chain computed(uint32_t slot, int32_t prompt, uint32_t n)
{
	struct chain c = {.prompt = prompt, .n = n};

	kv_books_grant(b, slot, n, c.ids);
	for (uint32_t i = 0; i < n; i++) {
		c.keys[i] = pages_key(&p, parent_key(&c, i), tokens_of(prompt, i));
		ck_assert_int_eq(client_publish(&p, slot, c.ids[i], i ? c.ids[i - 1] : -1,
						c.keys[i], tokens_of(prompt, i), tick(1)),
				 KV_PUBLISHED);
	}
	return c;
}

void use(const struct chain *c)
{
	uint64_t now = tick(c->n) - c->n;

	for (uint32_t i = 0; i < c->n; i++)
		b->descriptors[c->ids[i]].stamp = now + c->n - i;
}

void release(const struct chain *c, uint32_t slot)
{
	for (uint32_t i = 0; i < c->n; i++)
		client_unpin(&p, c->ids[i], slot);
}

uint32_t hit(uint32_t slot, int32_t prompt, uint32_t most)
{
	struct kv_key key = {0, 0};
	uint64_t serial = 0;
	int32_t found[N_BLOCKS];
	uint32_t n = 0;

	while (n < most) {
		key = pages_key(&p, key, tokens_of(prompt, n));
		found[n] = client_find(&p, slot, key, serial, tokens_of(prompt, n));
		if (found[n] < 0)
			break;
		serial = b->descriptors[found[n++]].serial;
	}
	for (uint32_t i = 0; i < n; i++)
		client_unpin(&p, found[i], slot);
	return n;
}
