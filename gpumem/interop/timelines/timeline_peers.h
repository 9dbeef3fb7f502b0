/* The other processes that use a timeline's page, and whether they are alive.
 *
 * A process that uses the page has an entry in it: its id, when it started (ids are given
 * again) and the namespace that the id is of. A process that ends without freeing its
 * entry, for whatever reason, is found dead by the next process that looks.
 *
 * A process in another namespace cannot be checked, nor one that found no entry free: they
 * count as alive. A process that is stopped or hangs is alive. One that closed its last use has
 * left and is not a peer. A stream of a device that waits does not look.
 */
#ifndef GPUMEM_TIMELINE_PEERS_H
#define GPUMEM_TIMELINE_PEERS_H

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "timeline_page.h"

enum { PEER_FREE, PEER_CLAIMED, PEER_ATTACHED, PEER_NONE = -1 };

static inline uint64_t peer_claim(uint64_t process, int state) {
    return process << 2 | (uint64_t)state;
}

/* The namespace of this process's id; 0: unknown. */
static inline uint64_t peer_space(void) {
    struct stat status;
    return stat("/proc/self/ns/pid", &status) == 0 ? (uint64_t)status.st_ino : 0;
}

/* When a process started (field 22 of its stat); 0: unknown. `state` is field 3. */
static inline uint64_t peer_started(uint64_t process, char *state) {
    char path[40], text[1024];
    unsigned long long started = 0;
    snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)process);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = file < 0 ? 0 : read(file, text, sizeof text - 1);
    if (file >= 0) close(file);
    text[size > 0 ? size : 0] = 0;
    const char *after = strrchr(text, ')'); /* the name before it may have any character */
    const char *format = ") %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s "
                         "%*s %*s %llu";
    if (!after || sscanf(after, format, state, &started) != 2) return 0;
    return started;
}

static inline bool peer_is_dead(uint64_t process, uint64_t started, uint64_t space) {
    char state = 0;
    if (space == 0 || space != peer_space()) return false;
    if (kill((pid_t)process, 0) != 0) return errno == ESRCH;
    uint64_t now = peer_started(process, &state);
    if (now == 0) return false; /* hidden, or it ended just now: the next look finds it dead */
    return now != started || state == 'Z' || state == 'X';
}

static inline bool entry_is_dead(TimelinePeer *peer, uint64_t claim) {
    return (claim & 3) == PEER_ATTACHED && peer_is_dead(claim >> 2, peer->started, peer->space);
}

/* Take an entry for this process; PEER_NONE: all are taken. Free ones first, so that a death
 * is remembered as long as there is room. */
static inline int timeline_attach(TimelinePage *page) {
    char state;
    uint64_t process = (uint64_t)getpid();
    for (int dead = 0; dead < 2; dead++)
        for (int i = 0; i < TIMELINE_PEERS; i++) {
            TimelinePeer *peer = &page->peers[i];
            uint64_t seen = atomic_load(&peer->claim);
            if (dead ? !entry_is_dead(peer, seen) : seen != PEER_FREE) continue;
            if (!atomic_compare_exchange_strong(&peer->claim, &seen, peer_claim(process, PEER_CLAIMED)))
                continue;
            peer->started = peer_started(process, &state);
            peer->space = peer_space();
            atomic_store(&peer->claim, peer_claim(process, PEER_ATTACHED));
            return i;
        }
    atomic_fetch_add(&page->unwatched, 1);
    return PEER_NONE;
}

static inline void timeline_detach(TimelinePage *page, int entry) {
    if (entry == PEER_NONE) atomic_fetch_sub(&page->unwatched, 1);
    else atomic_store(&page->peers[entry].claim, PEER_FREE);
}

/* The id of a dead process, if one died and no other process that could signal is left; else 0. */
static inline uint64_t timeline_deserted(TimelinePage *page) {
    uint64_t dead = 0, own = (uint64_t)getpid();
    if (atomic_load(&page->unwatched) != 0) return 0;
    for (int i = 0; i < TIMELINE_PEERS; i++) {
        uint64_t claim = atomic_load(&page->peers[i].claim);
        if (claim == PEER_FREE || claim >> 2 == own) continue;
        if (!entry_is_dead(&page->peers[i], claim)) return 0;
        dead = claim >> 2;
    }
    return dead;
}

#endif
