/* PyTorch's pinned memory over an arena: a subclass of its HostAllocator.
 *
 * PyTorch names a block's streams while tensors are copied; those of several GPUs may use one block.
 * When the block is freed, an event is recorded on each of them, and the block is freed in the arena
 * once all have completed. To the arena it is unused then, because the arena is passed no streams of
 * PyTorch's here.
 *
 * A block that is allocated while a graph is captured, or freed after a captured copy of it, belongs to
 * the graph's pool. A replay may use it at any time, so it stays until the pool has ended, and then until
 * `empty_cache`, which waits for the GPU. The pool's own allocations reuse blocks that no copy has used.
 *
 * Blocks that the allocator before it made stay valid: their uses are recorded there.
 */
#ifndef GPUMEM_TORCH_PINNED_H
#define GPUMEM_TORCH_PINNED_H

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Event.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "hooks.h"
#include "pools.h"
#include "statistics.h"

namespace gpumem {

class PinnedAllocator final : public at::HostAllocator {
   public:
    using Filter = std::function<bool(c10::Stream)>;

    PinnedAllocator(const TorchCalls &calls, at::HostAllocator *replaced)
        : calls_(calls), replaced_(replaced) {}

    /* Whether a request that is refused gets memory that is not pinned, instead of an exception. */
    void set_fallback(bool unpinned) { unpinned_ = unpinned; }

    at::DataPtr allocate(size_t nbytes) override {
        if (nbytes == 0) return {nullptr, nullptr, &delete_block, c10::kCPU};
        release_completed();
        const auto pool = pool_now();
        auto *block = take_from_pool(pool, nbytes);
        if (block == nullptr) block = take_from_arena(pool, nbytes);
        if (block == nullptr) return c10::GetCPUAllocator()->allocate(nbytes);
        const auto at = reinterpret_cast<uintptr_t>(block->address);
        std::lock_guard<std::mutex> lock(mutex_);
        if (block->entry) {
            block->entry.key() = at;
            live_.insert(std::move(block->entry));
        } else {
            live_.emplace(at, block);
        }
        return {block->address, block, &delete_block, c10::kCPU};
    }

    /* The address may lie inside a block, and the context be another library's that wraps one. */
    bool record_event(void *address, void *context, c10::Stream stream) override {
        const auto at = reinterpret_cast<uintptr_t>(address);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            auto next = live_.upper_bound(at);
            auto *block = next == live_.begin() ? nullptr : std::prev(next)->second;
            if (block != nullptr && at - std::prev(next)->first < block->nbytes) {
                auto &streams = block->streams;
                if (std::find(streams.begin(), streams.end(), stream) == streams.end())
                    streams.push_back(stream);
                return true;
            }
        }
        return replaced_ != nullptr && replaced_->record_event(address, context, stream);
    }

    void copy_data(void *to, const void *from, std::size_t nbytes) const override {
        default_copy_data(to, from, nbytes);
    }

    void empty_cache() override {
        release_completed();
        std::vector<Block *> ended;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            ended.swap(ended_);
        }
        std::set<c10::DeviceIndex> devices;
        for (auto *block : ended) devices.insert(block->device);
        for (auto device : devices) {
            c10::cuda::CUDAGuard guard(device);
            c10::cuda::device_synchronize();
        }
        for (auto *block : ended) free_in_arena(block);
        calls_.shrink_pinned();
        if (replaced_ != nullptr) replaced_->empty_cache();
    }

    /* ---- statistics ---- */

    at::HostStats get_stats() override {
        DeviceStats counted = statistics_.read(calls_, TORCH_PINNED);
        at::HostStats stats;
        stats.active_requests = counted.allocation[TORCH_ALL];
        stats.active_bytes = counted.allocated_bytes[TORCH_ALL];
        stats.allocations = counted.segment[TORCH_ALL];
        stats.allocated_bytes = counted.reserved_bytes[TORCH_ALL];
        stats.num_host_alloc = counted.num_device_alloc;
        stats.num_host_free = counted.num_device_free;
        return stats;
    }
    void reset_accumulated_stats() override { statistics_.reset_sums(calls_, TORCH_PINNED); }
    void reset_peak_stats() override { statistics_.reset_peaks(calls_, TORCH_PINNED); }

    /* ---- pools of captured graphs ---- */

    void begin_allocate_to_pool(c10::MempoolId_t id, Filter filter) override {
        std::lock_guard<std::mutex> lock(mutex_);
        TORCH_CHECK(std::none_of(routes_.begin(), routes_.end(),
                                 [&](const Route &route) { return route.id == id; }),
                    "gpumem: pinned memory is allocated to pool (", id.first, ", ", id.second,
                    ") already");
        pools_[id].uses++;
        routes_.push_back({id, std::move(filter)});
        route_count_.store(routes_.size(), std::memory_order_release);
    }

    void end_allocate_to_pool(c10::MempoolId_t id) override {
        std::lock_guard<std::mutex> lock(mutex_);
        auto route = std::find_if(routes_.begin(), routes_.end(),
                                  [&](const Route &each) { return each.id == id; });
        TORCH_CHECK(route != routes_.end(), "gpumem: no pinned memory is allocated to pool (", id.first,
                    ", ", id.second, ")");
        routes_.erase(route);
        route_count_.store(routes_.size(), std::memory_order_release);
    }

    void release_pool(c10::MempoolId_t id) override {
        std::lock_guard<std::mutex> lock(mutex_);
        auto found = pools_.find(id);
        if (found == pools_.end() || --found->second.uses > 0) return;
        auto &[uses, freed, unused] = found->second;
        ended_.insert(ended_.end(), freed.begin(), freed.end());
        for (auto &[nbytes, block] : unused) ended_.push_back(block);
        pools_.erase(found);
    }

   private:
    static constexpr c10::MempoolId_t NO_POOL{0, 0};
    struct Block;
    using Live = std::map<uintptr_t, Block *>;
    struct Block {
        PinnedAllocator *owner = nullptr;
        void *address = nullptr;
        size_t nbytes = 0;
        c10::DeviceIndex device = 0; /* of a pool: the graph's */
        c10::MempoolId_t pool = NO_POOL;
        std::vector<c10::Stream> streams;
        Live::node_type entry; /* of `live_`, while the block is freed: the next one needs none */
    };
    struct Freed {
        Block *block;
        std::vector<c10::Event> events;
    };
    struct Pool {
        int uses = 0;
        std::vector<Block *> freed;            /* a copy of a graph may use them */
        std::multimap<size_t, Block *> unused; /* by size; no copy has used them */
    };
    struct Route {
        c10::MempoolId_t id;
        Filter filter;
    };

    static void delete_block(void *context) {
        auto *block = static_cast<Block *>(context);
        if (block != nullptr) block->owner->release(block);
    }

    /* The smallest one that is large enough and of which less than half is left over, or null. */
    Block *take_from_pool(c10::MempoolId_t id, size_t nbytes) {
        if (id == NO_POOL) return nullptr;
        std::lock_guard<std::mutex> lock(mutex_);
        auto pool = pools_.find(id);
        if (pool == pools_.end()) return nullptr;
        auto &unused = pool->second.unused;
        auto found = unused.lower_bound(nbytes);
        if (found == unused.end() || found->first / 2 >= nbytes) return nullptr;
        auto *block = found->second;
        unused.erase(found);
        return block;
    }

    /* Null: the request is refused, and memory that is not pinned serves it. */
    Block *take_from_arena(c10::MempoolId_t pool, size_t nbytes) {
        auto *block = spare_.exchange(nullptr, std::memory_order_acquire);
        if (block == nullptr) block = new Block;
        block->owner = this;
        block->nbytes = nbytes;
        block->pool = pool;
        if (pool != NO_POOL) block->device = c10::cuda::current_device();
        block->streams.clear();
        int status = take(block);
        if (status != 0 && calls_.is_memory(status) && wait_for_freed()) status = take(block);
        if (status != 0) {
            delete block;
            if (unpinned_ && calls_.is_memory(status)) return nullptr;
            fail(nbytes, status);
        }
        return block;
    }

    int take(Block *block) {
        return calls_.allocate(hook(), block->nbytes, nullptr, &block->address);
    }

    void *hook() {
        if (void *hook = __atomic_load_n(&calls_.hooks[TORCH_PINNED], __ATOMIC_ACQUIRE)) return hook;
        if (void *hook = calls_.find(TORCH_PINNED)) return hook;
        TORCH_CHECK(false, "gpumem: no arena of pinned memory could be made");
    }

    [[noreturn]] void fail(size_t nbytes, int status) {
        int is_memory = 0;
        Text reason(calls_.report(TORCH_PINNED, nbytes, nullptr, status, &is_memory), &std::free);
        std::string text = reason ? reason.get()
                                  : "gpumem: pinned memory was refused with status " +
                                        std::to_string(status);
        TORCH_CHECK(is_memory, text);
        throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
    }

    /* Destructors call this, so that an exception would end the process. */
    void release(Block *block) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            block->entry = live_.extract(reinterpret_cast<uintptr_t>(block->address));
            for (auto &stream : block->streams) join_capture(block, stream);
            if (block->pool != NO_POOL) return keep_for_pool(block);
        }
        if (block->streams.empty()) return free_in_arena(block);
        Freed freed{block, {}};
        try {
            for (auto &stream : block->streams) {
                freed.events.emplace_back(c10::kCUDA);
                freed.events.back().record(stream);
            }
        } catch (const std::exception &error) {
            /* The end of the stream's work is unknown. */
            std::fprintf(stderr, "gpumem: %zu bytes of pinned memory stay in use: %s\n", block->nbytes,
                         error.what());
            return;
        }
        std::lock_guard<std::mutex> lock(mutex_);
        freed_.push_back(std::move(freed));
        any_freed_.store(true, std::memory_order_release);
    }

    /* Caller holds `mutex_`. A block that a graph under capture copies from or to is the graph's, too. */
    void join_capture(Block *block, c10::Stream stream) {
        for (auto &route : routes_)
            if (route.filter(stream)) {
                block->pool = route.id;
                block->device = stream.device_index();
            }
    }

    /* Caller holds `mutex_`. */
    void keep_for_pool(Block *block) {
        auto pool = pools_.find(block->pool);
        if (pool == pools_.end())
            ended_.push_back(block);
        else if (block->streams.empty())
            pool->second.unused.emplace(block->nbytes, block);
        else
            pool->second.freed.push_back(block);
    }

    void free_in_arena(Block *block) {
        int status = calls_.release(block->address);
        if (status != 0)
            std::fprintf(stderr, "gpumem: PyTorch freed pinned memory at %p, refused with status %d\n",
                         block->address, status);
        delete spare_.exchange(block, std::memory_order_acq_rel);
    }

    /* In the order of their frees, up to the first that a stream still uses. */
    void release_completed() {
        while (any_freed_.load(std::memory_order_acquire)) {
            std::deque<Freed> first;
            {
                std::lock_guard<std::mutex> lock(mutex_);
                any_freed_.store(!freed_.empty(), std::memory_order_release);
                if (freed_.empty()) return;
                first.push_back(std::move(freed_.front()));
                freed_.pop_front();
            }
            auto &events = first.front().events;
            if (!std::all_of(events.begin(), events.end(),
                             [](const c10::Event &event) { return event.query(); })) {
                std::lock_guard<std::mutex> lock(mutex_);
                freed_.push_front(std::move(first.front()));
                any_freed_.store(true, std::memory_order_release);
                return;
            }
            free_in_arena(first.front().block);
        }
    }

    /* Returns whether a freed block was still in use. */
    bool wait_for_freed() {
        std::deque<Freed> all;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            all.swap(freed_);
        }
        for (auto &each : all) {
            for (auto &event : each.events) event.synchronize();
            free_in_arena(each.block);
        }
        return !all.empty();
    }

    /* Costs one load where nothing is captured. */
    c10::MempoolId_t pool_now() {
        if (route_count_.load(std::memory_order_acquire) == 0) return NO_POOL;
        c10::Stream stream = c10::cuda::getCurrentCUDAStream().unwrap();
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto &route : routes_)
            if (route.filter(stream)) return route.id;
        return NO_POOL;
    }

    const TorchCalls &calls_;
    at::HostAllocator *const replaced_; /* PyTorch's own; null: there was none */
    std::atomic<bool> unpinned_{false};
    std::mutex mutex_; /* of all below but the statistics */
    Live live_;
    std::deque<Freed> freed_;     /* streams still used them when they were freed */
    std::atomic<bool> any_freed_{false};  /* whether there are any; read without the lock */
    std::atomic<Block *> spare_{nullptr}; /* the record of a freed block, for the next one */
    std::vector<Block *> ended_;  /* of pools that have ended */
    std::map<c10::MempoolId_t, Pool> pools_;
    std::vector<Route> routes_;
    std::atomic<size_t> route_count_{0};
    Statistics statistics_;
};

}  // namespace gpumem

#endif
