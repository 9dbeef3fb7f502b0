/* The allocators that gpumem is compared with, written from their published descriptions.
 *
 * Both hand out addresses of one large range that is never touched, name blocks by index (so that a
 * free needs no search), and keep gpumem's lock and statistics.
 */
#include "subject.h"

#include <algorithm>
#include <array>
#include <set>
#include <vector>

#include "lock.h"

namespace {

constexpr uint64_t QUANTUM = 256;
constexpr uint32_t NONE = ~UINT32_C(0);

struct Chunk {
    uint64_t address;
    uint64_t size;
    uint64_t requested;
    uint32_t prev, next; /* by address */
    bool used;
};

struct Statistics {
    uint64_t in_use, requested_in_use, max_in_use, max_alloc_size, allocs, frees;
};

/* Ordered by size, then address. */
struct Key {
    uint64_t size;
    uint64_t address;
    uint32_t index;
    bool operator<(const Key &other) const {
        return size != other.size ? size < other.size : address < other.address;
    }
};

/* Bins of powers of two from 256 bytes; the last takes everything larger. A bin's set is walked from
 * its smallest chunk on. Of a chunk that is less than twice the request nothing is split off,
 * unless that would waste 128 MiB. */
struct BinnedSets {
    static constexpr int BINS = 21;
    static constexpr uint64_t MAX_DEAD = UINT64_C(128) << 20;
    std::array<std::set<Key>, BINS> bins;

    static int bin_of(uint64_t size) {
        return std::min(BINS - 1, 63 - __builtin_clzll(size / QUANTUM));
    }
    void insert(const Key &key) { bins[bin_of(key.size)].insert(key); }
    void erase(const Key &key) { bins[bin_of(key.size)].erase(key); }
    uint32_t take(uint64_t size) {
        for (int bin = bin_of(size); bin < BINS; bin++) {
            for (auto at = bins[bin].begin(); at != bins[bin].end(); ++at) {
                if (at->size < size) continue;
                uint32_t index = at->index;
                bins[bin].erase(at);
                return index;
            }
        }
        return NONE;
    }
    static bool splits(uint64_t have, uint64_t want) {
        return have >= want * 2 || have - want >= MAX_DEAD;
    }
};

/* The smallest chunk that fits, by one search; all that is left over is split off. */
struct BestFit {
    std::set<Key> free;

    void insert(const Key &key) { free.insert(key); }
    void erase(const Key &key) { free.erase(key); }
    uint32_t take(uint64_t size) {
        auto at = free.lower_bound(Key{size, 0, 0});
        if (at == free.end()) return NONE;
        uint32_t index = at->index;
        free.erase(at);
        return index;
    }
    static bool splits(uint64_t have, uint64_t want) { return have - want >= QUANTUM; }
};

/* Lists in bins of two levels, eight steps per power of two, with a bitmap for each level. A request
 * is rounded up to the next step, so that the first chunk of any bin from there on fits: no search
 * looks at a chunk (after TLSF: Masmano and others, 2004). */
struct BitmapBins {
    static constexpr int STEP_BITS = 3, STEPS = 1 << STEP_BITS, LEVELS = 48;
    struct Links {
        uint32_t prev, next;
    };
    uint64_t levels = 0;
    std::array<uint8_t, LEVELS> steps{};
    std::array<uint32_t, LEVELS * STEPS> heads;
    std::vector<Links> links; /* by chunk */

    BitmapBins() { heads.fill(NONE); }
    static uint32_t bin_of(uint64_t quanta) {
        if (quanta < STEPS) return static_cast<uint32_t>(quanta);
        int shift = 63 - __builtin_clzll(quanta) - STEP_BITS;
        return static_cast<uint32_t>((shift + 1) * STEPS + ((quanta >> shift) & (STEPS - 1)));
    }
    static uint64_t rounded_up(uint64_t quanta) {
        if (quanta < STEPS) return quanta;
        int shift = 63 - __builtin_clzll(quanta) - STEP_BITS;
        return quanta + (UINT64_C(1) << shift) - 1;
    }
    void insert(const Key &key) {
        uint32_t bin = bin_of(key.size / QUANTUM), head = heads[bin];
        if (key.index >= links.size()) links.resize(2 * key.index + 64);
        links[key.index] = Links{NONE, head};
        if (head != NONE) links[head].prev = key.index;
        heads[bin] = key.index;
        steps[bin / STEPS] |= static_cast<uint8_t>(1u << bin % STEPS);
        levels |= UINT64_C(1) << bin / STEPS;
    }
    void erase(const Key &key) {
        Links gone = links[key.index];
        if (gone.next != NONE) links[gone.next].prev = gone.prev;
        if (gone.prev != NONE)
            links[gone.prev].next = gone.next;
        else
            first_becomes(bin_of(key.size / QUANTUM), gone.next);
    }
    void first_becomes(uint32_t bin, uint32_t index) {
        heads[bin] = index;
        if (index != NONE) return;
        steps[bin / STEPS] &= static_cast<uint8_t>(~(1u << bin % STEPS));
        if (steps[bin / STEPS] == 0) levels &= ~(UINT64_C(1) << bin / STEPS);
    }
    uint32_t take(uint64_t size) {
        uint32_t bin = bin_of(rounded_up(size / QUANTUM)), level = bin / STEPS;
        unsigned later = steps[level] & (~0u << bin % STEPS);
        if (later == 0) {
            uint64_t above = levels & (~UINT64_C(1) << level);
            if (above == 0) return NONE;
            level = static_cast<uint32_t>(__builtin_ctzll(above));
            later = steps[level];
        }
        bin = level * STEPS + static_cast<uint32_t>(__builtin_ctz(later));
        uint32_t index = heads[bin], next = links[index].next;
        if (next != NONE) links[next].prev = NONE;
        first_becomes(bin, next);
        return index;
    }
    static bool splits(uint64_t have, uint64_t want) { return have > want; }
};

template <class Order>
class Allocator {
  public:
    explicit Allocator(uint64_t bytes) {
        lock_init(&lock);
        uint32_t all = new_slot();
        chunks[all] = Chunk{UINT64_C(1) << 40, bytes, 0, NONE, NONE, false};
        order.insert(key(all));
    }

    uint64_t allocate(uint64_t requested) {
        uint64_t size = (requested + QUANTUM - 1) / QUANTUM * QUANTUM;
        lock_acquire(&lock);
        uint32_t index = order.take(size);
        if (index != NONE) {
            if (Order::splits(chunks[index].size, size)) split(index, size);
            hand_out(index, requested);
        }
        lock_release(&lock);
        return index == NONE ? FAILED : index;
    }

    void release(uint64_t handle) {
        lock_acquire(&lock);
        uint32_t index = static_cast<uint32_t>(handle);
        statistics.in_use -= chunks[index].size;
        statistics.requested_in_use -= chunks[index].requested;
        statistics.frees++;
        chunks[index].used = false;
        uint32_t prev = chunks[index].prev, next = chunks[index].next;
        if (next != NONE && !chunks[next].used) absorb(index, next);
        if (prev != NONE && !chunks[prev].used) {
            order.erase(key(prev));
            merge(prev, index);
            index = prev;
        }
        order.insert(key(index));
        lock_release(&lock);
    }

  private:
    Lock lock;
    Order order;
    std::vector<Chunk> chunks;
    std::vector<uint32_t> unused;
    Statistics statistics{};

    Key key(uint32_t index) const {
        return Key{chunks[index].size, chunks[index].address, index};
    }

    uint32_t new_slot() {
        if (unused.empty()) {
            chunks.emplace_back();
            return static_cast<uint32_t>(chunks.size() - 1);
        }
        uint32_t index = unused.back();
        unused.pop_back();
        return index;
    }

    void split(uint32_t index, uint64_t size) {
        uint32_t rest = new_slot();
        Chunk &chunk = chunks[index];
        chunks[rest] = Chunk{chunk.address + size, chunk.size - size, 0, index, chunk.next, false};
        if (chunk.next != NONE) chunks[chunk.next].prev = rest;
        chunk.next = rest;
        chunk.size = size;
        order.insert(key(rest));
    }

    void hand_out(uint32_t index, uint64_t requested) {
        Chunk &chunk = chunks[index];
        chunk.used = true;
        chunk.requested = requested;
        statistics.in_use += chunk.size;
        statistics.requested_in_use += requested;
        statistics.max_in_use = std::max(statistics.max_in_use, statistics.in_use);
        statistics.max_alloc_size = std::max(statistics.max_alloc_size, chunk.size);
        statistics.allocs++;
    }

    void absorb(uint32_t index, uint32_t next) {
        order.erase(key(next));
        merge(index, next);
    }

    void merge(uint32_t first, uint32_t second) {
        chunks[first].size += chunks[second].size;
        chunks[first].next = chunks[second].next;
        if (chunks[second].next != NONE) chunks[chunks[second].next].prev = first;
        unused.push_back(second);
    }
};

template <class Order>
Subject subject_over(uint64_t bytes) {
    using Made = Allocator<Order>;
    return Subject{
        new Made(bytes),
        [](void *state, uint64_t size, uint32_t) { return static_cast<Made *>(state)->allocate(size); },
        [](void *state, uint64_t handle, uint32_t) { static_cast<Made *>(state)->release(handle); },
        [](void *state) { delete static_cast<Made *>(state); },
    };
}

struct Malloc {
    void *(*malloc)(size_t);
    void (*free)(void *);
};

} // namespace

Subject subject_binned_sets(uint64_t bytes) { return subject_over<BinnedSets>(bytes); }

Subject subject_best_fit(uint64_t bytes) { return subject_over<BestFit>(bytes); }

Subject subject_bitmap_bins(uint64_t bytes) { return subject_over<BitmapBins>(bytes); }

Subject subject_nothing() {
    return Subject{
        nullptr,
        [](void *, uint64_t size, uint32_t) { return size; },
        [](void *, uint64_t, uint32_t) {},
        nullptr,
    };
}

Subject subject_malloc(void *malloc, void *free) {
    Malloc *made = new Malloc;
    made->malloc = reinterpret_cast<void *(*)(size_t)>(malloc);
    made->free = reinterpret_cast<void (*)(void *)>(free);
    return Subject{
        made,
        [](void *state, uint64_t size, uint32_t) {
            void *block = static_cast<Malloc *>(state)->malloc(size);
            return block ? reinterpret_cast<uint64_t>(block) : FAILED;
        },
        [](void *state, uint64_t handle, uint32_t) {
            static_cast<Malloc *>(state)->free(reinterpret_cast<void *>(handle));
        },
        [](void *state) { delete static_cast<Malloc *>(state); },
    };
}
