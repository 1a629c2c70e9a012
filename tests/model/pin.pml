/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pinning, eviction, reuse and publishing of one block (include/internal/shm.h draws the protocol), by
 * one daemon and two clients, one of which publishes it and either of which may be killed at any step.
 *
 * Accesses that the code makes seq_cst or release/acquire are steps here, in program order. The word of
 * the descriptor is `state` and `generation`, stored at once; `serial` is what the descriptor says the
 * block holds, `content` what its bytes hold: who leases it writes them.
 *
 *   never   a client that holds and has verified a block sees other bytes, or another generation
 *   never   a block is leased, or free, while a client that lives holds and has verified it
 *   never   a client that found it reads bytes that aren't those it looked for
 *   always  at the end, with all clients dead or done, no bit is set
 *
 * Moving a block (compaction) is move.pml.
 *
 * MUTANT breaks one step, to show that the model would notice:
 *   1  the daemon looks at the holders before it says EVICTING, and not after
 *   2  a client looks at the state before it sets its bit, and not after
 *   3  a client compares before it holds, and not after
 *   4  the daemon frees the leases of a client that still runs
 */
#ifndef MUTANT
#define MUTANT 0
#endif
#define ROUNDS 3 /* contents that the block has, one after the other */

mtype = { FREE, LEASED, CACHED, EVICTING };

mtype state = FREE;
byte generation = 0;
byte serial = 0;  /* of the descriptor */
byte content = 0; /* of the bytes */
bool holders[2];
bool verified[2]; /* ghost: the client holds it and has compared */
bool dead[2];
bool publishing = false; /* the publisher's op is in its ring */
bool ready = false;	 /* the grant is in its ring */
byte wanted = 0; /* what a lookup would look for: the last serial that was shown */

inline die(me)
{
	atomic { verified[me] = false; dead[me] = true; }
	goto end_dead;
}

/* What any client does that finds the block in the index. */
inline look_up(me, want, had)
{
	want = wanted;
#if MUTANT == 2
	if
	:: state != CACHED -> goto missed
	:: else
	fi;
#endif
#if MUTANT == 3
	if
	:: serial != want || content != want -> goto missed
	:: else
	fi;
#endif
	holders[me] = true;
#if MUTANT != 2
	if
	:: state != CACHED -> holders[me] = false; goto missed
	:: else
	fi;
#endif
#if MUTANT != 3
	if
	:: serial != want -> holders[me] = false; goto missed
	:: else
	fi;
#endif
	atomic { verified[me] = true; had = generation };
	/* The step reads it, and finds what it looked for, unchanged. */
	assert(content == want);
	assert(generation == had);
	assert(state == CACHED || state == EVICTING);
	assert(content == want);
	atomic { verified[me] = false };
	holders[me] = false;
missed:
	skip
}

active proctype reader()
{
	byte want, had;

	do
	:: wanted > 0 -> look_up(1, want, had)
	:: die(1)
	:: break
	od;
	dead[1] = true;
end_dead:
	skip
}

/* Computes what the block holds, shows it, reads it on, lets it go. */
active proctype publisher()
{
	byte had;

	do
	:: ready ->
		atomic { ready = false; had = generation };
		/* It writes, while the lease is its own. */
		assert(state == LEASED && generation == had);
		content = had;
		assert(state == LEASED && generation == had);
		if
		:: publishing = true
		:: die(0)
		fi;
		/* Cached by then, and held for it: it reads on. */
		if
		:: !publishing
		:: die(0)
		fi;
		if
		:: state == CACHED || state == EVICTING ->
			atomic { verified[0] = true };
			assert(content == had && generation == had);
			assert(content == had && generation == had);
			if
			:: atomic { verified[0] = false }; holders[0] = false
			:: die(0)
			fi
		:: else -> assert(false)
		fi
	:: die(0)
	:: break
	od;
	dead[0] = true;
end_dead:
	skip
}

inline forget(slot)
{
	/* The pidfd has said that it is dead: nothing of it runs. */
	holders[slot] = false;
	if
	:: slot == 0 && state == LEASED && !publishing ->
		atomic { generation++; state = FREE; ready = false }
	:: else
	fi
}

active proctype daemon()
{
	bool held, over = false;

	do
	:: state == FREE && generation < ROUNDS && !dead[0] ->
		assert(!verified[0] && !verified[1]);
		atomic { generation++; state = LEASED };
		ready = true
	:: publishing ->
		/* The books and the descriptor first, the publisher's bit, then the state. */
		serial = generation;
		holders[0] = true;
		state = CACHED;
		wanted = serial;
		publishing = false
	:: state == CACHED ->
		/* Evicted or moved. */
#if MUTANT == 1
		held = holders[0] || holders[1];
		state = EVICTING;
#else
		state = EVICTING;
		held = holders[0];
		held = held || holders[1];
#endif
		if
		:: held -> state = CACHED
		:: else ->
			assert(!verified[0] && !verified[1]);
			atomic { generation++; state = FREE }
		fi
#if MUTANT == 4
	:: state == LEASED && !publishing -> atomic { generation++; state = FREE; ready = false }
#endif
	:: dead[0] && !publishing -> forget(0); if :: dead[1] -> break :: else fi
	:: dead[1] -> forget(1)
	od;
	forget(0);
	forget(1);
	assert(!holders[0] && !holders[1]);
	assert(state == FREE || state == CACHED)
}
