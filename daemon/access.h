/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvcached --access FILE: who may open which pools, only read them, or administer.
 *
 *	# who may do what: RIGHT [POOL] USER|@GROUP|*...
 *	open  llama-*  alice @engines 1001
 *	read  *        @monitoring
 *	admin llama-*  @operators		limits, epoch, compaction, dropping the cache
 *	admin -        @operators		the daemon itself: kvctl restart-worker
 *
 * POOL is a glob(7) pattern. A right is there if any line gives it: open is also read. What no line
 * gives is refused, but root and the user that kvcached runs as may all, and who made a pool may change
 * it, as without a file. Users are those of SO_PEERCRED, groups theirs and those of SO_PEERGROUPS.
 *
 * The file is looked at whenever somebody asks for something, and read again when it has changed.
 * One with a mistake in it is refused at the start; later the one before it stays in force, and after a
 * restart of the worker nobody has a right by it. Sessions that are open stay open.
 */
#ifndef KV_DAEMON_ACCESS_H
#define KV_DAEMON_ACCESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct kv_access;

enum kv_right {
	KV_RIGHT_READ = 1,
	KV_RIGHT_OPEN = 2,
	KV_RIGHT_ADMIN = 4,
};

/* Who asks: @groups has @n_groups. */
struct kv_who {
	uid_t uid;
	uint32_t n_groups;
	const gid_t *groups;
};

/* kv_access_new() - read @path. 0; -EINVAL with "FILE:LINE: field: ..."; -errno of the file with text */
int kv_access_new(const char *path, struct kv_access **ret);
/* kv_access_new_empty() - for @path, which has mistakes: nobody has a right until it is repaired */
int kv_access_new_empty(const char *path, struct kv_access **ret);
struct kv_access *kv_access_free(struct kv_access *access);

/* kv_access_refresh() - again, if the file has changed. 0; negative with text: the old one stays */
int kv_access_refresh(struct kv_access *access);

/* kv_access_rights() - bits of enum kv_right that lines give @who to @pool; NULL: to the daemon */
uint32_t kv_access_rights(const struct kv_access *access, const struct kv_who *who, const char *pool);

const char *kv_access_path(const struct kv_access *access);

/* kv_peer_groups() - of who is at the other end of a socket: those of its credentials and SO_PEERGROUPS */
int kv_peer_groups(int fd, gid_t gid, gid_t **ret, uint32_t *ret_n);

#endif
