/* Limits in a tree: check and reserve in one step, exact whatever threads do.
 *
 * A charge goes from the level where it is made up to the root. Each level adds it to `used` by a
 * compare-and-swap that refuses bytes above `limit`, so `used` is never above a limit, not even
 * for a moment; where a level refuses, the levels below it are rolled back. A request that does
 * not fit is mostly refused before anything is added. Between that check and the swaps, two
 * requests may both be refused although either would fit once the other is rolled back: a caller
 * that gets BUDGET_REFUSED calls budget_refusing before it gives up.
 *
 * Plain C on words: no lock, no driver, no interpreter; any thread, any hook.
 */
#ifndef GPUMEM_BUDGET_H
#define GPUMEM_BUDGET_H

#include <stdint.h>

/* Above what any machine has, and far from where sums of sizes overflow. */
#define BUDGET_UNLIMITED ((uint64_t)1 << 63)

enum { BUDGET_DEPTH = 32 }; /* levels of budgets in a tree; accounts add up to two */

typedef enum BudgetCharge {
    BUDGET_REFUSED = 0,
    BUDGET_CHARGED = 1,
    BUDGET_CROSSED = 2 /* charged, and a level has passed its soft limit */
} BudgetCharge;

/* One level: a Budget, or the account of a resource that charges one. The first line is all that
 * a charge touches. */
typedef struct BudgetCore {
    uint64_t used;  /* bytes charged here and below (atomic) */
    uint64_t limit; /* (atomic) */
    uint64_t soft;  /* (atomic) */
    uint64_t peak;  /* highest `used` (atomic) */
    struct BudgetCore *parent; /* a reference; NULL: a root */
    uint32_t crossed; /* `used` has passed `soft`, which is not reported yet (atomic) */
    uint32_t depth;   /* levels above it */
    uint64_t serial;  /* of the level in its process, from 1; never used again */
    uint64_t spare;   /* bytes that the node of a leased level had left when last read (atomic) */
    uint64_t pending; /* of `used`: in reservations that are not committed (atomic) */
    int32_t references; /* (atomic) */
    int is_account; /* a resource's; it may have a limit of its own */
    char *name;
    void *node; /* the part of a node's budget that this level leases; NULL: it leases nothing */
    void *face; /* the Budget object; not owned, ends before the level; interpreter lock */
    /* Under the lock of the trees. */
    struct BudgetCore *child; /* the youngest */
    struct BudgetCore *older; /* siblings */
    struct BudgetCore *younger;
    struct BudgetCore *next; /* list of all */
    struct BudgetCore *previous;
} BudgetCore;

static inline uint64_t budget_load(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

/* Returns the bytes that this level leaves; its limit may have been lowered below `used`. */
static inline uint64_t budget_left(const BudgetCore *level) {
    uint64_t limit = budget_load(&level->limit), used = budget_load(&level->used);
    return used < limit ? limit - used : 0;
}

/* Returns the bytes that a charge could have now, with what the level's node could lease to it. */
static inline uint64_t budget_room(const BudgetCore *from) {
    uint64_t room = BUDGET_UNLIMITED;
    for (; from; from = from->parent) {
        uint64_t left = budget_left(from) + budget_load(&from->spare);
        if (left < room) room = left;
    }
    return room;
}

/* Returns the lowest level that has no room for `bytes`; NULL: all have room. */
static inline BudgetCore *budget_refusing(BudgetCore *from, uint64_t bytes) {
    while (from && bytes <= budget_left(from)) from = from->parent;
    return from;
}

static inline void budget_note_peak(BudgetCore *level, uint64_t used) {
    uint64_t peak = budget_load(&level->peak);
    while (used > peak && !__atomic_compare_exchange_n(&level->peak, &peak, used, 1,
                                                       __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

/* Returns the used bytes of the level after the charge; 0: it refuses. */
static inline uint64_t budget_add(BudgetCore *level, uint64_t bytes) {
    uint64_t used = budget_load(&level->used), limit;
    do {
        limit = budget_load(&level->limit);
        if (used > limit || bytes > limit - used) return 0;
    } while (!__atomic_compare_exchange_n(&level->used, &used, used + bytes, 1, __ATOMIC_ACQUIRE,
                                          __ATOMIC_RELAXED));
    budget_note_peak(level, used + bytes);
    return used + bytes;
}

/* Refunds at every level from here up to `end`, which is not touched; NULL: the root too. */
static inline void budget_release(BudgetCore *level, const BudgetCore *end, uint64_t bytes) {
    for (; level != end; level = level->parent)
        __atomic_fetch_sub(&level->used, bytes, __ATOMIC_RELEASE);
}

static inline void budget_mark_crossed(BudgetCore *level, uint64_t over) {
    for (; over; over >>= 1, level = level->parent)
        if (over & 1) __atomic_store_n(&level->crossed, 1, __ATOMIC_RELEASE);
}

/* Charges more than 0 bytes to the level and all above it, or to none. */
static inline BudgetCharge budget_charge(BudgetCore *from, uint64_t bytes) {
    uint64_t over = 0, bit = 1; /* levels at which this charge passed the soft limit */
    if (budget_refusing(from, bytes)) return BUDGET_REFUSED;
    for (BudgetCore *level = from; level; level = level->parent, bit <<= 1) {
        uint64_t used = budget_add(level, bytes), soft = budget_load(&level->soft);
        if (used == 0) {
            budget_release(from, level, bytes);
            return BUDGET_REFUSED;
        }
        if (used > soft && used - bytes <= soft) over |= bit;
    }
    if (__builtin_expect(over == 0, 1)) return BUDGET_CHARGED;
    budget_mark_crossed(from, over);
    return BUDGET_CROSSED;
}

static inline void budget_uncharge(BudgetCore *from, uint64_t bytes) {
    budget_release(from, 0, bytes);
}

#endif
