/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A forked child must not keep its parent's sockets open, nor speak on them: the handler closes them in
 * the child and moves the generation on, so that every handle of the parent's answers -ECHILD there.
 * (The shared pages are not inherited: MADV_DONTFORK.)
 */
#include <errno.h>
#include <unistd.h>

#include "libclient/internal.h"

uint32_t kv_fork_generation;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct kv_link connections = { &connections, &connections };

static void before(void)
{
	pthread_mutex_lock(&lock);
}

static void in_parent(void)
{
	pthread_mutex_unlock(&lock);
}

static void in_child(void)
{
	for (struct kv_link *l = connections.next; l != &connections; l = l->next) {
		struct kv_connection *c = kv_container_of(l, struct kv_connection, link);

		c->fd = kv_close(c->fd);
	}
	kv_fork_generation++;
	pthread_mutex_unlock(&lock);
}

static void install(void)
{
	pthread_atfork(before, in_parent, in_child);
}

void kv_fork_add(struct kv_connection *c)
{
	pthread_once(&once, install);
	pthread_mutex_lock(&lock);
	kv_list_append(&connections, &c->link);
	pthread_mutex_unlock(&lock);
}

void kv_fork_remove(struct kv_connection *c)
{
	pthread_mutex_lock(&lock);
	kv_link_unlink(&c->link);
	pthread_mutex_unlock(&lock);
}

int kv_forked_error(void)
{
	return kv_error(-ECHILD, "this handle was made before a fork; connect anew");
}
