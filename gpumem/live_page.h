/* A process's counters in a file in memory, for whoever watches it (`gpumem top`).
 *
 * /dev/shm/gpumem-<user id>-<process id>, mode 0600, little-endian: a header, then two copies of
 * everything. The process writes them by turns; each carries its number and, first of all, a
 * CRC-32 (zlib's) of what follows it. A reader takes the copy with the higher number whose CRC
 * holds. So it never sees half of an update, whatever orders the machine's stores have, and
 * also of a process that was killed in the middle of one the copy before is whole.
 *
 * The process holds flock(LOCK_EX) on the file. Who gets the lock knows that it has ended, or
 * runs another program now.
 */
#ifndef GPUMEM_LIVE_PAGE_H
#define GPUMEM_LIVE_PAGE_H

#include <stddef.h>
#include <stdint.h>

#define LIVE_MAGIC "gpumemTP"

enum {
    LIVE_VERSION = 1,
    LIVE_HEADER_BYTES = 4096,
    LIVE_RESOURCES = 256, /* that a copy has room for; the rest is counted */
    LIVE_BUDGETS = 128,
};

/* What is told of a resource; the names are those of gpumem.Stats. */
typedef enum LiveCounter {
    LIVE_LIMIT, /* 0: none */
    LIVE_IN_USE,
    LIVE_REQUESTED_IN_USE,
    LIVE_RESERVED,
    LIVE_MAX_IN_USE,
    LIVE_MAX_RESERVED,
    LIVE_NUM_ALLOCS,
    LIVE_NUM_FREES,
    LIVE_NUM_RESERVES,
    LIVE_NUM_EXTENSIONS,
    LIVE_NUM_SHRINKAGES,
    LIVE_MAX_ALLOC_SIZE,
    LIVE_PAGES_MOVED,
    LIVE_DRIVER_CALLS,
    LIVE_SUSPENDED_BYTES,
    LIVE_COUNTERS
} LiveCounter;

typedef struct LiveHeader {
    char magic[8];
    uint32_t version;
    uint32_t header_bytes;
    uint32_t copy_bytes; /* from the beginning of one copy to that of the next */
    uint32_t resource_bytes;
    uint32_t budget_bytes;
    uint32_t period_ms; /* between two updates */
    uint64_t process;
} LiveHeader;

typedef struct LiveResource {
    uint64_t id;     /* of the resource in its process; never used again */
    uint64_t budget; /* id of the budget that it charges; 0: none */
    char memory[32]; /* texts are UTF-8, cut and ended by a 0 */
    char kind[24];
    char name[64];
    uint64_t counters[LIVE_COUNTERS];
} LiveResource;

typedef struct LiveBudget {
    uint64_t id;     /* of the budget in its process; never used again */
    uint64_t parent; /* id; 0: a root */
    char name[64];
    uint64_t used;
    uint64_t limit; /* 1 << 63: none; so are those of `soft` */
    uint64_t soft;
    uint64_t peak;
} LiveBudget;

typedef struct LiveCopy {
    uint32_t crc; /* of the rest, up to `bytes` */
    uint32_t bytes; /* of this copy, with its last record */
    uint64_t number; /* of the update, from 1 */
    uint64_t time; /* ns since 1970 */
    uint64_t clock; /* ns, monotonic */
    uint32_t resources; /* records of them, the newest first */
    uint32_t budgets;
    uint32_t resources_left_out;
    uint32_t budgets_left_out;
    /* LiveResource resources[]; LiveBudget budgets[]; */
} LiveCopy;

enum {
    LIVE_COPY_BYTES = (sizeof(LiveCopy) + LIVE_RESOURCES * sizeof(LiveResource) +
                       LIVE_BUDGETS * sizeof(LiveBudget) + 4095) & ~4095,
    LIVE_FILE_BYTES = LIVE_HEADER_BYTES + 2 * LIVE_COPY_BYTES,
};

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "readers expect the bytes in this order");
_Static_assert(sizeof(LiveHeader) == 40, "no padding but what is named");
_Static_assert(sizeof(LiveCopy) == 48, "no padding but what is named");
_Static_assert(sizeof(LiveResource) == 136 + 8 * LIVE_COUNTERS, "no padding but what is named");
_Static_assert(sizeof(LiveBudget) == 112, "no padding but what is named");

/* CRC-32 with the polynomial 0xEDB88320, four bits at a time. */
static inline uint32_t live_crc(const void *bytes, size_t count) {
    static const uint32_t table[16] = {
        0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4,
        0x4db26158, 0x5005713c, 0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
        0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
    const uint8_t *byte = bytes;
    uint32_t crc = 0xffffffff;
    for (; count > 0; count--, byte++) {
        crc = table[(crc ^ *byte) & 15] ^ (crc >> 4);
        crc = table[(crc ^ (*byte >> 4)) & 15] ^ (crc >> 4);
    }
    return ~crc;
}

/* The last thing done to a copy. */
static inline void live_seal(LiveCopy *copy) {
    copy->crc = live_crc(&copy->bytes, copy->bytes - offsetof(LiveCopy, bytes));
}

#endif
