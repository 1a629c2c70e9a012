/* SPDX-License-Identifier: Apache-2.0 */
/* Scope-bound release, and handing over what a scope built. */
#ifndef KV_INTERNAL_CLEANUP_H
#define KV_INTERNAL_CLEANUP_H

#include <stdlib.h>
#include <unistd.h>

#define kv_cleanup(f) __attribute__((cleanup(f)))

/* Take the pointer out of an owned local: the local becomes NULL, so its cleanup does nothing. */
#define kv_steal(p)                                                                                \
	__extension__({                                                                            \
		__typeof__(p) kv_stolen_ = (p);                                                    \
		(p) = NULL;                                                                        \
		kv_stolen_;                                                                        \
	})

static inline int kv_steal_fd(int *fd)
{
	int r = *fd;

	*fd = -1;
	return r;
}

static inline int kv_close(int fd)
{
	if (fd >= 0)
		close(fd);
	return -1;
}

static inline void kv_closep(int *fd)
{
	*fd = kv_close(*fd);
}

static inline void kv_freep(void *p)
{
	free(*(void **)p);
}

#endif
