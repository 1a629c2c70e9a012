/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one user of the machine (the uid of its processes' sockets) may have of the daemon at a
 * time. A limit of 0 is none. Refusals are -EDQUOT with a text that names the limit, its value and
 * its option; messages beyond the limit are not refused, they are read later: a flood slows its own
 * user down.
 */
#ifndef KV_DAEMON_USER_H
#define KV_DAEMON_USER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "include/internal/list.h"

struct kv_daemon;
struct kv_peer;
struct kv_pool;
struct kv_session;

enum kv_user_limit {
	KV_USER_CLIENTS,  /* connections */
	KV_USER_SESSIONS, /* pools opened, by all its processes */
	KV_USER_POOLS,	  /* pools it has made, while they last */
	KV_USER_BLOCKS,	  /* leased, set aside, and cached and held */
	KV_USER_MESSAGES, /* a second */
	KV_USER_LIMITS
};

struct kv_user {
	struct kv_link link; /* kv_daemon::users */
	struct kv_daemon *daemon;
	uid_t uid;
	uint32_t n_refs;	    /* peers and pools */
	uint64_t n[KV_USER_LIMITS]; /* CLIENTS, SESSIONS, POOLS: how many it has */
	int64_t credit;		    /* messages it may send now, in billionths */
	int64_t credited_ns, counted_ns;
	struct kv_link turn;	 /* kv_daemon::speaking */
	struct kv_link speaking; /* kv_peer::speaking, of its connections */
	int64_t time_ns;	 /* of the worker that it may still have in this turn; negative: it owes */
};

/* The names of the options, "--user-clients" and so on, and what stands for them by default. */
extern const char *const kv_user_options[KV_USER_LIMITS];
extern const uint64_t kv_user_defaults[KV_USER_LIMITS];

/* kv_user_get() - one reference more. NULL: no memory */
struct kv_user *kv_user_get(struct kv_daemon *d, uid_t uid);
/* kv_user_put() - NULL is allowed; returns NULL */
struct kv_user *kv_user_put(struct kv_user *user);

/* kv_user_add(), kv_user_take() - one more of CLIENTS, SESSIONS or POOLS: 0, -EDQUOT; one less */
int kv_user_add(struct kv_user *user, enum kv_user_limit limit);
void kv_user_take(struct kv_user *user, enum kv_user_limit limit);

/**
 * kv_user_blocks() - so many of @n more blocks a session's user may have
 *
 * Return: @n or less; it is never more than the user's limit, and may be less than what is left of
 * it for 5 ms after the user has let go of cached blocks.
 */
uint32_t kv_user_blocks(struct kv_session *session, uint32_t n);
/* kv_user_too_many_blocks() - -EDQUOT with the text, for @n blocks asked */
int kv_user_too_many_blocks(const struct kv_session *session, uint32_t n);

/* kv_user_is_operator() - is it root, or the user that kvcached runs as? */
bool kv_user_is_operator(const struct kv_peer *peer);
/* kv_user_may_open() - as the access list says: access.h. 0; -EACCES */
int kv_user_may_open(const struct kv_peer *peer, const char *pool, bool read_only);
/* kv_user_may_administer() - the daemon itself: operators, and whom the access list names */
bool kv_user_may_administer(const struct kv_peer *peer);
/* kv_user_may_change() - the pool's cache and limits: likewise, and who made it. 0; -EPERM */
int kv_user_may_change(const struct kv_peer *peer, const struct kv_pool *pool);

/* kv_user_may_speak() - @n messages are charged; false: what comes next is to be read later */
bool kv_user_may_speak(struct kv_user *user, uint32_t n);
/* How long until it may speak again. */
int64_t kv_user_silence(const struct kv_user *user);

#endif
