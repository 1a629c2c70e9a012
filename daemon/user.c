/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blocks: leases are counted as they go. Who holds a cached block is known only by a walk over the
 * pool's descriptors, since clients pin and unpin without a message. So what a user holds is
 * counted when its limit seems to be reached, at most every 5 ms; in between what its sessions have
 * published since is added: an upper bound of what else they can have come to hold that was theirs.
 */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "daemon/access.h"
#include "daemon/daemon.h"
#include "daemon/log.h"
#include "daemon/user.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"

#define COUNT_AGAIN (5 * KV_MSEC)
/* What may come at once, in time of the limit. */
#define BURST (100 * KV_MSEC)

const char *const kv_user_options[KV_USER_LIMITS] = {
	[KV_USER_CLIENTS] = "--user-clients",	[KV_USER_SESSIONS] = "--user-sessions",
	[KV_USER_POOLS] = "--user-pools",	[KV_USER_BLOCKS] = "--user-blocks",
	[KV_USER_MESSAGES] = "--user-messages",
};

const uint64_t kv_user_defaults[KV_USER_LIMITS] = {
	[KV_USER_CLIENTS] = 768,
	[KV_USER_SESSIONS] = 512,
	[KV_USER_POOLS] = 128,
	[KV_USER_MESSAGES] = 100000,
};

static const char *const names[KV_USER_LIMITS] = {
	[KV_USER_CLIENTS] = "connections",
	[KV_USER_SESSIONS] = "sessions",
	[KV_USER_POOLS] = "pools",
	[KV_USER_BLOCKS] = "blocks",
	[KV_USER_MESSAGES] = "messages a second",
};

static uint64_t limit_of(const struct kv_user *user, enum kv_user_limit limit)
{
	return user->daemon->config.user_limits[limit];
}

struct kv_user *kv_user_get(struct kv_daemon *d, uid_t uid)
{
	struct kv_user *user;

	for (struct kv_link *l = d->users.next; l != &d->users; l = l->next) {
		user = kv_container_of(l, struct kv_user, link);
		if (user->uid == uid) {
			user->n_refs++;
			return user;
		}
	}
	user = calloc(1, sizeof(*user));
	if (!user)
		return NULL;
	user->daemon = d;
	user->uid = uid;
	user->n_refs = 1;
	user->credit = INT64_MAX;
	kv_link_init(&user->link);
	kv_link_init(&user->turn);
	kv_link_init(&user->speaking);
	kv_list_append(&d->users, &user->link);
	return user;
}

struct kv_user *kv_user_put(struct kv_user *user)
{
	if (user && !--user->n_refs) {
		kv_link_unlink(&user->link);
		kv_link_unlink(&user->turn);
		free(user);
	}
	return NULL;
}

static int exceeded(const struct kv_user *user, enum kv_user_limit limit, uint64_t have)
{
	return kv_error(-EDQUOT,
			"user %u has %llu %s; the most one user may have is %llu (kvcached %s)",
			user->uid, (unsigned long long)have, names[limit],
			(unsigned long long)limit_of(user, limit), kv_user_options[limit]);
}

int kv_user_add(struct kv_user *user, enum kv_user_limit limit)
{
	if (!user)
		return 0;
	if (limit_of(user, limit) && user->n[limit] >= limit_of(user, limit))
		return exceeded(user, limit, user->n[limit]);
	user->n[limit]++;
	return 0;
}

void kv_user_take(struct kv_user *user, enum kv_user_limit limit)
{
	if (user)
		user->n[limit]--;
}

/* ---- blocks ---- */

static bool is_of(const struct kv_session *s, const struct kv_user *user)
{
	return s && s->peer->user == user;
}

static uint64_t blocks_of(const struct kv_user *user)
{
	uint64_t n = 0;

	for (struct kv_link *l = user->daemon->peers.next; l != &user->daemon->peers; l = l->next) {
		const struct kv_session *s = kv_container_of(l, struct kv_peer, link)->session;

		if (is_of(s, user))
			n += s->pool->books.n_leased_by[s->slot] + s->n_set_aside + s->n_held +
			     (s->n_published - s->n_published_then);
	}
	return n;
}

static void count_held(struct kv_user *user)
{
	user->counted_ns = kv_now();
	for (struct kv_link *l = user->daemon->pools.next; l != &user->daemon->pools; l = l->next) {
		struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);
		uint32_t n = 0;

		for (uint32_t i = 0; i < KV_MAX_SESSIONS; i++)
			n += is_of(pool->slots[i], user);
		if (n)
			kv_held_update(pool);
	}
}

static uint32_t what_is_left(const struct kv_user *user, uint32_t n)
{
	uint64_t limit = limit_of(user, KV_USER_BLOCKS), have = blocks_of(user);
	uint64_t left = have < limit ? limit - have : 0;

	return n < left ? n : (uint32_t)left;
}

uint32_t kv_user_blocks(struct kv_session *session, uint32_t n)
{
	struct kv_user *user = session->peer->user;
	uint32_t left;

	if (!user || !limit_of(user, KV_USER_BLOCKS))
		return n;
	left = what_is_left(user, n);
	if (left == n || kv_now() < user->counted_ns + COUNT_AGAIN)
		return left;
	count_held(user);
	return what_is_left(user, n);
}

int kv_user_too_many_blocks(const struct kv_session *session, uint32_t n)
{
	const struct kv_user *user = session->peer->user;

	return kv_error(-EDQUOT,
			"%u blocks asked: user %u has %llu; the most one user may have is %llu "
			"(kvcached %s)",
			n, user->uid, (unsigned long long)blocks_of(user),
			(unsigned long long)limit_of(user, KV_USER_BLOCKS),
			kv_user_options[KV_USER_BLOCKS]);
}

/* ---- what belongs to others ---- */

bool kv_user_is_operator(const struct kv_peer *peer)
{
	return !peer->uid || peer->uid == geteuid();
}

/* What the access list gives it; without a list all may open all. */
static uint32_t rights_of(const struct kv_peer *peer, const char *pool)
{
	struct kv_access *access = peer->daemon->access;
	struct kv_who who = { .uid = peer->uid };
	gid_t *groups = NULL;
	uint32_t rights;

	if (!access)
		return pool ? KV_RIGHT_OPEN | KV_RIGHT_READ : 0;
	if (kv_access_refresh(access) < 0)
		kv_log(KV_LOG_ERROR, "%s; the list before it stays in force", kv_error_text());
	kv_peer_groups(peer->fd, peer->gid, &groups, &who.n_groups);
	who.groups = groups;
	rights = kv_access_rights(access, &who, pool);
	free(groups);
	return rights;
}

int kv_user_may_open(const struct kv_peer *peer, const char *pool, bool read_only)
{
	uint32_t rights;

	if (kv_user_is_operator(peer))
		return 0;
	rights = rights_of(peer, pool);
	if (rights & KV_RIGHT_OPEN || (read_only && rights & KV_RIGHT_READ))
		return 0;
	return kv_error(-EACCES, "pool '%s': user %u may %s (%s)", pool, peer->uid,
			rights & KV_RIGHT_READ ? "only read it: open it with read_only" :
			read_only	       ? "not read it" :
						 "not open it",
			kv_access_path(peer->daemon->access));
}

bool kv_user_may_administer(const struct kv_peer *peer)
{
	return kv_user_is_operator(peer) || rights_of(peer, NULL) & KV_RIGHT_ADMIN;
}

int kv_user_may_change(const struct kv_peer *peer, const struct kv_pool *pool)
{
	if (kv_user_is_operator(peer) || (pool->user && pool->user->uid == peer->uid) ||
	    rights_of(peer, pool->name) & KV_RIGHT_ADMIN)
		return 0;
	if (pool->user)
		return kv_error(-EPERM, "pool '%s' was made by user %u: only that user, root, and user %u, "
				"as whom kvcached runs, may change it; you are %u",
				pool->name, pool->user->uid, geteuid(), peer->uid);
	return kv_error(-EPERM, "pool '%s' was made by kvcached: only root and user %u, as whom it runs, "
			"may change it; you are %u", pool->name, geteuid(), peer->uid);
}

/* ---- messages ---- */

bool kv_user_may_speak(struct kv_user *user, uint32_t n)
{
	int64_t now, rate, most;

	if (!user || !limit_of(user, KV_USER_MESSAGES))
		return true;
	/* One message is a billion: credit grows by `rate` with each nanosecond. */
	rate = (int64_t)limit_of(user, KV_USER_MESSAGES);
	most = rate * BURST > KV_SEC ? rate * BURST : KV_SEC;
	now = kv_now();
	if (now - user->credited_ns > BURST || user->credit > most)
		user->credit = most;
	else
		user->credit += (now - user->credited_ns) * rate;
	user->credit = user->credit < most ? user->credit : most;
	user->credited_ns = now;
	if (user->credit < 0)
		return false;
	user->credit -= n * KV_SEC;
	return true;
}

int64_t kv_user_silence(const struct kv_user *user)
{
	int64_t rate = (int64_t)limit_of(user, KV_USER_MESSAGES);

	return rate && user->credit < 0 ? -user->credit / rate + 1 : 0;
}
