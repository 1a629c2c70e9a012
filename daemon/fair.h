/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whose message is worked off next: the worker's time is divided among the users of the machine, and a user's
 * part among its connections. Who is alone has all of it.
 *
 *	kv_daemon::speaking --- user --- user ...	those with something to be served
 *	                         |  `-- speaking: peer, peer ...
 *
 * In one turn of the loop every user in the circle is served for KV_FAIR_TURN of time as it passes, one
 * message or one slice of a long answer (walk.h) of each of its connections after the other. What the
 * last of them took too long is owed, and taken off the next turn. So another user waits for as many turns as
 * there are users, and for a slice of each, whatever they ask and over how many connections.
 * (M. Shreedhar, G. Varghese: Efficient Fair Queueing Using Deficit Round Robin, SIGCOMM 1995; in time, not
 * in bytes.)
 */
#ifndef KV_DAEMON_FAIR_H
#define KV_DAEMON_FAIR_H

#include "include/internal/socket.h"

struct kv_daemon;
struct kv_peer;
struct kv_user;

#define KV_FAIR_TURN (200 * KV_MSEC / 1000)

/* kv_fair_start() - 0; -ENOMEM with text */
int kv_fair_start(struct kv_daemon *d);
void kv_fair_end(struct kv_daemon *d);

/* kv_fair_add() - @peer has something to be served: kv_peer_serve() is called for it until that says no */
void kv_fair_add(struct kv_peer *peer);
void kv_fair_remove(struct kv_peer *peer); /* it is being hung up on or freed */

#endif
