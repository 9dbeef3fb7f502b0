/* The address map: disjoint ranges ordered by base, in a treap.
 *
 * A treap because ranges come and go by the hundred thousand, one at a time, and a
 * look-up must cost some fifty nanoseconds. The caller holds the map's lock.
 */
#include "../device/internal.h"

static uint32_t next_heat(AddressMap *map) { /* xorshift */
    uint32_t state = map->heat ? map->heat : 2463534242u;
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return map->heat = state;
}

Range *host_map_after(const AddressMap *map, uintptr_t address) {
    Range *best = NULL;
    for (Range *at = map->root; at;) {
        if (at->base + at->size > address) {
            best = at;
            at = at->left;
        } else {
            at = at->right;
        }
    }
    return best;
}

Range *host_map_find(const AddressMap *map, uintptr_t address) {
    Range *range = host_map_after(map, address);
    return range && range->base <= address ? range : NULL;
}

bool host_map_free(const AddressMap *map, uintptr_t address, size_t size) {
    Range *range = host_map_after(map, address);
    return !range || range->base >= address + size;
}

/* Moves ranges below `base` into *low, all others into *high. */
static void split(Range *at, uintptr_t base, Range **low, Range **high) {
    while (at) {
        if (at->base < base) {
            *low = at;
            low = &at->right;
            at = at->right;
        } else {
            *high = at;
            high = &at->left;
            at = at->left;
        }
    }
    *low = *high = NULL;
}

static Range *join(Range *low, Range *high) { /* all of low lies below all of high */
    Range *root = NULL, **hook = &root;
    while (low && high) {
        if (low->heat > high->heat) {
            *hook = low;
            hook = &low->right;
            low = low->right;
        } else {
            *hook = high;
            hook = &high->left;
            high = high->left;
        }
    }
    *hook = low ? low : high;
    return root;
}

void host_map_insert(AddressMap *map, Range *range) {
    range->heat = next_heat(map);
    Range **hook = &map->root;
    while (*hook && (*hook)->heat >= range->heat)
        hook = range->base < (*hook)->base ? &(*hook)->left : &(*hook)->right;
    split(*hook, range->base, &range->left, &range->right);
    *hook = range;
    map->count++;
}

void host_map_remove(AddressMap *map, Range *range) {
    Range **hook = &map->root;
    while (*hook != range) hook = range->base < (*hook)->base ? &(*hook)->left : &(*hook)->right;
    *hook = join(range->left, range->right);
    range->left = range->right = NULL;
    map->count--;
}
