/* PyTorch's statistics, from gpumem's counters. */
#ifndef GPUMEM_TORCH_STATISTICS_H
#define GPUMEM_TORCH_STATISTICS_H

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "compat.h"
#include "hooks.h"

namespace gpumem {

using c10::CachingAllocator::Stat;

inline Stat stat_of(uint64_t current, uint64_t peak, uint64_t up, uint64_t down) {
    Stat stat;
    stat.current = static_cast<int64_t>(current);
    stat.peak = static_cast<int64_t>(std::max(peak, current));
    stat.allocated = static_cast<int64_t>(up);
    stat.freed = static_cast<int64_t>(down);
    return stat;
}

/* Sums at the last reset, and peaks of the figures that are known only when they are read. */
struct Since {
    TorchStats then{};
    std::array<uint64_t, TORCH_PARTS> peak_active{}, peak_active_bytes{}, peak_segments{}, peak_idle{},
        peak_idle_bytes{}, peak_reserved{};
    std::map<c10::MempoolId_t, uint64_t> peak_of_pools;
};

inline uint64_t raised(uint64_t &peak, uint64_t now) { return peak = std::max(peak, now); }

inline DeviceStats stats_of(const TorchStats &now, Since &since) {
    DeviceStats stats;
    for (int part = 0; part < TORCH_PARTS; part++) {
        const TorchFigures &n = now.parts[part], &t = since.then.parts[part];
        uint64_t blocks = n.allocs - n.frees, bytes = n.allocated - n.allocated_freed;
        uint64_t active = blocks + n.pending, active_bytes = bytes + n.pending_bytes;
        raised(since.peak_active[part], std::max(active, n.peak_blocks));
        raised(since.peak_active_bytes[part], std::max(active_bytes, n.peak_allocated));
        raised(since.peak_reserved[part],
               part == TORCH_ALL ? std::max(n.reserved, now.peak_reserved) : n.reserved);
        stats.allocation[part] =
            stat_of(blocks, n.peak_blocks, n.allocs - t.allocs, n.frees - t.frees);
        stats.allocated_bytes[part] =
            stat_of(bytes, n.peak_allocated, n.allocated - t.allocated,
                    n.allocated_freed - t.allocated_freed);
        stats.requested_bytes[part] =
            stat_of(n.requested - n.requested_freed, n.peak_requested, n.requested - t.requested,
                    n.requested_freed - t.requested_freed);
        /* A block is active until no stream uses it any more. */
        stats.active[part] = stat_of(active, since.peak_active[part], n.allocs - t.allocs,
                                     n.frees - n.pending - (t.frees - t.pending));
        stats.active_bytes[part] =
            stat_of(active_bytes, since.peak_active_bytes[part], n.allocated - t.allocated,
                    n.allocated_freed - n.pending_bytes - (t.allocated_freed - t.pending_bytes));
        stats.segment[part] = stat_of(n.segments, raised(since.peak_segments[part], n.segments), 0, 0);
        stats.reserved_bytes[part] = stat_of(n.reserved, since.peak_reserved[part], 0, 0);
        stats.inactive_split[part] = stat_of(n.idle, raised(since.peak_idle[part], n.idle), 0, 0);
        stats.inactive_split_bytes[part] =
            stat_of(n.idle_bytes, raised(since.peak_idle_bytes[part], n.idle_bytes), 0, 0);
    }
    auto &segments = stats.segment[TORCH_ALL];
    segments.allocated = static_cast<int64_t>(now.device_allocs - since.then.device_allocs);
    segments.freed = static_cast<int64_t>(now.device_frees - since.then.device_frees);
    stats.num_alloc_retries = static_cast<int64_t>(now.retries - since.then.retries);
    stats.num_ooms = static_cast<int64_t>(now.failures - since.then.failures);
    stats.num_sync_all_streams = static_cast<int64_t>(now.waits - since.then.waits);
    stats.num_device_alloc = segments.allocated;
    stats.num_device_free = segments.freed;
    stats.max_split_size = -1; /* any block may be split */
    return stats;
}

inline TorchStats stats_now(const TorchCalls &calls, int device) {
    TorchStats now{};
    calls.stats(device, &now);
    return now;
}

/* The statistics of a device, or of pinned memory, since the program's last resets. */
class Statistics {
   public:
    DeviceStats read(const TorchCalls &calls, int device) {
        std::lock_guard<std::mutex> lock(mutex_);
        DeviceStats stats = stats_of(stats_now(calls, device), since_);
        add_pools(stats, calls, device);
        return stats;
    }
    void reset_sums(const TorchCalls &calls, int device) {
        std::lock_guard<std::mutex> lock(mutex_);
        since_.then = stats_now(calls, device);
    }
    void reset_peaks(const TorchCalls &calls, int device) {
        std::lock_guard<std::mutex> lock(mutex_);
        calls.reset_peaks(device);
        since_ = Since{since_.then};
    }

   private:
    /* Adds the bytes of each pool. Their peaks are those that were seen when they were read. */
    template <typename Stats>
    void add_pools(Stats &stats, const TorchCalls &calls, int device) {
        if constexpr (requires { stats.reserved_bytes_by_private_pools; }) {
            std::vector<TorchPoolBytes> pools(calls.pool_bytes(device, nullptr, 0));
            pools.resize(
                std::min(pools.size(), calls.pool_bytes(device, pools.data(), pools.size())));
            std::map<c10::MempoolId_t, uint64_t> now;
            for (auto &pool : pools) now[{pool.pool[0], pool.pool[1]}] += pool.reserved;
            for (auto &[id, nbytes] : now) raised(since_.peak_of_pools[id], nbytes);
            for (auto &[id, peak] : since_.peak_of_pools)
                stats.reserved_bytes_by_private_pools[id][TORCH_ALL] = stat_of(now[id], peak, 0, 0);
        }
    }

    std::mutex mutex_;
    Since since_;
};

}  // namespace gpumem

#endif
