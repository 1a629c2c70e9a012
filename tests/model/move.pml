/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compaction (include/internal/shm.h draws it): a cached block is moved while readers find it, pin it, read
 * it and may be killed, and while the daemon goes on evicting and reusing. Two blocks, one index entry, one
 * mover, which may die at any step; bytes are two words, so that a copy can be torn.
 *
 *   never   a reader that holds and has verified a block reads bytes of another content
 *   never   a block is written, or free, while a living reader holds and has verified it
 *   always  at the end, with all readers dead or done, no bit is set and no block is MOVING
 *
 * MUTANT breaks one step, to show that the model would notice:
 *   1  the old block is freed without a look at its holders
 *   2  the new one says CACHED before the mover has finished
 *   3  nobody asks whether the old block is still what it was when the copy began
 *   4  the new one says CACHED before its descriptor says what it holds
 *   5  holders are looked at before the old block says EVICTING, and not after
 *   6  a mover that has died is taken for one that has finished
 */
#ifndef MUTANT
#define MUTANT 0
#endif
#define ROUNDS	2 /* contents, one after the other */
#define MOVES	2
#define NOTHING 2 /* no block */

mtype = { FREE, LEASED, CACHED, EVICTING, MOVING };
mtype = { IDLE, GO, DONE, DIED };

mtype state[2] = FREE;
byte serial[2]; /* of the descriptors */
byte low[2], high[2]; /* bytes */
byte entry = NOTHING; /* of the index, for the content of `shown` */
byte shown = 0; /* what a lookup would look for */
bool holders[4]; /* [block * 2 + reader] */
bool verified[4]; /* ghost */
bool dead[2];
mtype mover = IDLE;
byte from, to;

#define held(b)	    (holders[(b) * 2] || holders[(b) * 2 + 1])
#define in_hands(b) (verified[(b) * 2] || verified[(b) * 2 + 1])

proctype reader(byte me)
{
	byte want, b;

	do
	:: shown > 0 ->
		want = shown;
		b = entry;
		if
		:: b == NOTHING -> goto missed
		:: else
		fi;
		holders[b * 2 + me] = true;
		if
		:: state[b] != CACHED -> holders[b * 2 + me] = false; goto missed
		:: else
		fi;
		if
		:: serial[b] != want -> holders[b * 2 + me] = false; goto missed
		:: else
		fi;
		verified[b * 2 + me] = true;
		if
		:: atomic { verified[b * 2 + me] = false; dead[me] = true }; goto end_dead
		:: skip
		fi;
		assert(low[b] == want);
		assert(high[b] == want);
		assert(state[b] == CACHED || state[b] == EVICTING);
		verified[b * 2 + me] = false;
		holders[b * 2 + me] = false;
missed:
		skip
	:: dead[me] = true; goto end_dead
	od;
end_dead:
	skip
}

active proctype mover_process()
{
end_waits:
	do
	:: mover == GO ->
		if
		:: low[to] = low[from];
			if
			:: high[to] = high[from]; mover = DONE
			:: mover = DIED
			fi
		:: mover = DIED
		fi
	od
}

byte n_shown = 0, n_moves = 0, moving_serial;

/* Computed by somebody, and published: nobody finds it before. */
inline fill(b)
{
	n_shown++;
	state[b] = LEASED;
	assert(!in_hands(b));
	low[b] = n_shown;
	high[b] = n_shown;
	serial[b] = n_shown;
	state[b] = CACHED;
	entry = b;
	shown = n_shown
}

inline evict(b)
{
	state[b] = EVICTING;
	if
	:: held(b) -> state[b] = CACHED
	:: else ->
		assert(!in_hands(b));
		entry = NOTHING;
		state[b] = FREE
	fi
}

inline change_over()
{
	if
#if MUTANT != 3
	:: state[from] != CACHED || serial[from] != moving_serial -> state[to] = FREE
#endif
	:: else ->
#if MUTANT == 5
		if
		:: held(from) -> goto stays
		:: else
		fi;
		state[from] = EVICTING;
#else
		state[from] = EVICTING;
#if MUTANT != 1
		if
		:: held(from) -> state[from] = CACHED; goto stays
		:: else
		fi;
#endif
#endif
#if MUTANT == 4
		state[to] = CACHED;
		serial[to] = moving_serial;
#else
		serial[to] = moving_serial;
		state[to] = CACHED;
#endif
		entry = to;
		assert(!in_hands(from));
		state[from] = FREE;
		goto moved;
stays:
		state[to] = FREE;
moved:
		skip
	fi;
	mover = IDLE
}

active proctype daemon()
{
	byte b;

	atomic { run reader(0); run reader(1) };
	do
	:: n_shown < ROUNDS && entry == NOTHING && state[0] == FREE -> b = 0; fill(b)
	:: n_shown < ROUNDS && entry == NOTHING && state[1] == FREE -> b = 1; fill(b)
	:: entry != NOTHING && state[entry] == CACHED && n_shown < ROUNDS -> b = entry; evict(b)
	:: mover == IDLE && n_moves < MOVES && entry != NOTHING && state[1 - entry] == FREE ->
		n_moves++;
		from = entry;
		to = 1 - from;
		moving_serial = serial[from];
		state[to] = MOVING;
		mover = GO
#if MUTANT == 2
	:: mover == GO && state[to] == MOVING ->
		serial[to] = moving_serial; state[to] = CACHED; entry = to
#endif
	:: mover == DONE -> change_over()
	:: mover == DIED ->
#if MUTANT == 6
		change_over()
#else
		state[to] = FREE;
		mover = IDLE
#endif
	/* The pidfd has said so: nothing of it runs. */
	:: dead[0] && (holders[0] || holders[2]) -> holders[0] = false; holders[2] = false
	:: dead[1] && (holders[1] || holders[3]) -> holders[1] = false; holders[3] = false
	:: dead[0] && dead[1] && mover == IDLE -> break
	od;
	holders[0] = false; holders[1] = false; holders[2] = false; holders[3] = false;
	assert(state[0] == FREE || state[0] == CACHED);
	assert(state[1] == FREE || state[1] == CACHED)
}
