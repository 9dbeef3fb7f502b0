/* The other processes that use a timeline's page, and whether they are alive.
 *
 * A process that uses the page has an entry in it, and a lock on the bytes of that entry in the
 * file, by an open file description that no other process has. The kernel drops the lock when
 * the process ends, for whatever reason, and shows it to every process that has the file:
 * ids of processes mean nothing in another PID namespace. An entry that is marked and not
 * locked is of a process that died without leaving.
 *
 * A process that found no entry free, or that could not open the file anew because it has no
 * /proc, counts as alive. A process that is stopped or hangs is alive. One that closed its last
 * use has left and is not a peer. A waiting stream of a device does not check for dead processes.
 */
#ifndef GPUMEM_TIMELINE_PEERS_H
#define GPUMEM_TIMELINE_PEERS_H

#include <fcntl.h>
#include <stdio.h>
#include <sys/random.h>

#include "timeline_page.h"

enum { PEER_NONE = -1 };

/* Give a descriptor an open file description of its own; false: it has the one that it had. */
static inline bool timeline_own_file(int file) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    int own = open(path, O_RDWR | O_CLOEXEC);
    bool done = own >= 0 && dup3(own, file, O_CLOEXEC) == file;
    if (own >= 0) close(own);
    return done;
}

/* A number that distinguishes processes with equal ids in different namespaces; not 0. */
static inline uint64_t timeline_process_mark(void) {
    uint64_t mark = 0;
    if (getrandom(&mark, sizeof mark, 0) != sizeof mark) mark = timeline_now();
    return mark | 1;
}

/* Lock, unlock or query (F_OFD_GETLK) an entry, by the file's description; 0: success. */
static inline int peer_lock(int file, int entry, int command, short *type) {
    struct flock range = {.l_type = *type, .l_whence = SEEK_SET, .l_len = sizeof(TimelinePeer)};
    range.l_start = (off_t)(offsetof(TimelinePage, peers) + (size_t)entry * sizeof(TimelinePeer));
    int result = fcntl(file, command, &range);
    *type = range.l_type;
    return result;
}

/* Take an entry for this process; PEER_NONE: all are taken. Free ones first, so that a death
 * is remembered as long as there is room. `turn` differs from call to call. */
static inline int timeline_attach(TimelinePage *page, int file, uint64_t mark, uint32_t turn) {
    bool own = timeline_own_file(file);
    for (int marked = 0; own && marked < 2; marked++)
        for (int i = 0; i < TIMELINE_PEERS; i++) {
            TimelinePeer *peer = &page->peers[i];
            short type = F_WRLCK;
            if ((atomic_load(&peer->claim) != 0) != marked) continue;
            if (peer_lock(file, i, F_OFD_SETLK, &type) != 0) continue;
            atomic_store(&peer->mark, mark);
            atomic_store(&peer->claim, (uint64_t)getpid() << 32 | (turn | 1u));
            return i;
        }
    atomic_fetch_add(&page->unwatched, 1);
    return PEER_NONE;
}

static inline void timeline_detach(TimelinePage *page, int file, int entry) {
    short type = F_UNLCK;
    if (entry == PEER_NONE) {
        atomic_fetch_sub(&page->unwatched, 1);
        return;
    }
    atomic_store(&page->peers[entry].claim, 0); /* before the lock goes: this is no death */
    peer_lock(file, entry, F_OFD_SETLK, &type);
}

static inline bool peer_is_dead(int file, int entry) {
    short type = F_WRLCK;
    return peer_lock(file, entry, F_OFD_GETLK, &type) == 0 && type == F_UNLCK;
}

/* The id of a dead process, if one died and no other process that could signal is left; else 0. */
static inline uint64_t timeline_deserted(TimelinePage *page, int file, uint64_t mark) {
    uint64_t dead = 0;
    if (atomic_load(&page->unwatched) != 0) return 0;
    for (int i = 0; i < TIMELINE_PEERS; i++) {
        TimelinePeer *peer = &page->peers[i];
        uint64_t claim = atomic_load(&peer->claim), owner = atomic_load(&peer->mark);
        if (claim == 0 || owner == mark) continue;
        if (!peer_is_dead(file, i)) return 0;
        /* Not if it left just now, and perhaps another process has the entry. */
        if (atomic_load(&peer->claim) != claim || atomic_load(&peer->mark) != owner) return 0;
        dead = claim >> 32;
    }
    return dead;
}

#endif
