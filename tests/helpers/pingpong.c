/* One side of a game of ping-pong between two processes, for tests and measurements.
 *
 *   pingpong MODE SIDE ROUNDS FD [FD]     MODE: spin, brief, park, mixed, futex     SIDE: 0 begins, 1 answers
 *
 * FD is a timeline's page, the second a page of notes. Each side signals its own values on one
 * timeline: round r is 2r + 1 from side 0 and 2r + 2 from side 1. Before it signals, a side writes
 * the value into its note; after a wait it reads the other's: an early wake-up finds an old note,
 * a lost one never ends. "futex" plays the same with nothing but two words and the system call.
 * Prints the median and the mean time of a round in ns.
 */
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifdef JITTER /* delays between the steps of waits and signals, so that these meet in every way */
static void jitter(void) {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    for (volatile uint32_t i = state >> 24; i > 0; i--) {
    }
    if (state >> 29 == 0) sched_yield();
}
#define TIMELINE_STEP() jitter()
#endif

#include "timeline_page.h"

typedef struct Notes {
    uint64_t note[2][8]; /* plain words: the timeline alone orders them */
    _Atomic uint32_t word[2][16];
} Notes;

static void *map(const char *fd) {
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(fd), 0);
    if (page == MAP_FAILED) exit(3);
    return page;
}

static void fail(const char *what, uint64_t round) {
    fprintf(stderr, "%s in round %llu\n", what, (unsigned long long)round);
    exit(1);
}

static void await(TimelinePage *page, uint64_t value, uint64_t spin) {
    if (timeline_wait(page, value, UINT64_MAX, spin) != TIMELINE_OK) fail("lost", value);
}

static void turn(TimelinePage *page, Notes *notes, int side, uint64_t round, uint64_t spin) {
    uint64_t mine = 2 * round + 1 + (uint64_t)side, theirs = mine - 1, known;
    if (theirs > 0) {
        await(page, theirs, spin);
        if (notes->note[!side][0] != theirs) fail("early", round);
        if (timeline_value(page) != theirs) fail("another value", round);
    }
    notes->note[side][0] = mine;
    if (!timeline_claim(page, mine, &known)) fail("not above", round);
    timeline_signal(page, mine);
}

static void futex_turn(Notes *notes, int side, uint64_t round) {
    uint32_t theirs = (uint32_t)(side ? round + 1 : round), seen;
    while ((seen = atomic_load(&notes->word[!side][0])) != theirs)
        syscall(SYS_futex, &notes->word[!side][0], FUTEX_WAIT, seen, NULL, NULL, 0);
    atomic_fetch_add(&notes->word[side][0], 1);
    syscall(SYS_futex, &notes->word[side][0], FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* ns; "brief" is what gpumem does. */
static uint64_t spin_time(const char *mode, uint64_t round) {
    if (!strcmp(mode, "park")) return 0;
    if (!strcmp(mode, "brief")) return 5000;
    return !strcmp(mode, "mixed") ? round % 3 * 1000 : 100000000;
}

static int compare(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

int main(int count, char **arguments) {
    if (count < 6) return 2;
    const char *mode = arguments[1];
    int side = atoi(arguments[2]);
    uint64_t rounds = strtoull(arguments[3], NULL, 10);
    TimelinePage *page = map(arguments[4]);
    Notes *notes = map(arguments[5]);
    uint64_t *times = malloc(rounds * sizeof *times);
    uint64_t before = timeline_now(), begin = before;
    for (uint64_t round = 0; round < rounds; round++) {
        if (!strcmp(mode, "futex")) futex_turn(notes, side, round);
        else turn(page, notes, side, round, spin_time(mode, round));
        uint64_t now = timeline_now();
        times[round] = now - before;
        before = now;
    }
    uint64_t total = timeline_now() - begin;
    qsort(times, rounds, sizeof *times, compare);
    printf("%llu %llu\n", (unsigned long long)times[rounds / 2], (unsigned long long)(total / rounds));
    return 0;
}
