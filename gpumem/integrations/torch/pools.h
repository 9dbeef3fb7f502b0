/* Pools of PyTorch's: memory of captured graphs and of MemPools, and which allocations go there.
 *
 * A pool lives while something uses it: a MemPool object, a graph, `use_mem_pool`. Its blocks may
 * outlive it. A route sends the streams that its filter accepts to a pool; the route that began last
 * comes first.
 */
#ifndef GPUMEM_TORCH_POOLS_H
#define GPUMEM_TORCH_POOLS_H

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "hooks.h"

namespace gpumem {

using PoolId = std::pair<unsigned long long, unsigned long long>;
using Text = std::unique_ptr<char, decltype(&std::free)>; /* of a function that leaves it to us */

/* The hook of a device, which is made at the first use. */
inline void *hook_of(const TorchCalls &calls, int device) {
    if (device < 0 || device >= TORCH_DEVICES)
        throw std::runtime_error("gpumem: device " + std::to_string(device) +
                                 " is not from 0 to " + std::to_string(TORCH_DEVICES - 1));
    if (void *hook = __atomic_load_n(&calls.hooks[device], __ATOMIC_ACQUIRE)) return hook;
    if (void *hook = calls.find(device)) return hook;
    throw std::runtime_error("gpumem: no arena serves cuda:" + std::to_string(device));
}

/* A reference to a pool's hook. */
class PoolHook {
   public:
    PoolHook(const TorchCalls &calls, void *hook) : calls_(&calls), hook_(hook) {}
    PoolHook(PoolHook &&other) noexcept
        : calls_(other.calls_), hook_(std::exchange(other.hook_, nullptr)) {}
    PoolHook &operator=(PoolHook &&) = delete;
    ~PoolHook() {
        if (hook_) calls_->drop_pool(hook_);
    }
    void *get() const { return hook_; }

   private:
    const TorchCalls *calls_;
    void *hook_;
};

class Pools {
   public:
    using Filter = std::function<bool(cudaStream_t)>;

    explicit Pools(const TorchCalls &calls) : calls_(calls) {}

    /* Makes a pool for a MemPool, or uses one again. The pool owns `source` from here on; NULL: the device's
       memory. The pool's memory is not touched before its first route. */
    void create(int device, PoolId id, TorchSource *source) {
        std::unique_lock<std::shared_mutex> lock(mutex_);
        auto [at, is_new] = pools_.try_emplace({device, id});
        at->second.uses++;
        if (is_new) {
            at->second.is_of_mem_pool = true;
            at->second.source = source;
        } else if (source) {
            source->forget(source);
        }
    }

    void begin(int device, PoolId id, Filter filter) {
        std::unique_lock<std::shared_mutex> lock(mutex_);
        auto [at, is_new] = pools_.try_emplace({device, id});
        Pool &pool = at->second;
        try {
            open(device, id, pool);
        } catch (...) {
            if (is_new) pools_.erase(at);
            throw;
        }
        /* Graphs of one pool do not run at the same time. A MemPool's blocks may be in use. */
        if (pool.routes == 0 && !pool.is_of_mem_pool) calls_.begin_pool(pool.hook);
        routes_.push_back(Route{device, id, pool.hook, std::move(filter)});
        pool.routes++;
        pool.uses++;
        route_count_.store(routes_.size(), std::memory_order_release);
    }

    void end(int device, PoolId id) {
        std::unique_lock<std::shared_mutex> lock(mutex_);
        auto route = std::find_if(routes_.rbegin(), routes_.rend(), [&](const Route &each) {
            return each.device == device && each.id == id;
        });
        if (route == routes_.rend()) return;
        routes_.erase(std::next(route).base());
        auto found = pools_.find({device, id});
        if (found != pools_.end()) found->second.routes--;
        route_count_.store(routes_.size(), std::memory_order_release);
    }

    void release(int device, PoolId id) {
        std::unique_lock<std::shared_mutex> lock(mutex_);
        auto found = pools_.find({device, id});
        if (found == pools_.end() || --found->second.uses > 0) return;
        Pool pool = found->second;
        pools_.erase(found);
        if (pool.source) pool.source->forget(pool.source);
        if (pool.hook) calls_.drop_pool(pool.hook);
    }

    int use_count(int device, PoolId id) {
        std::shared_lock<std::shared_mutex> lock(mutex_);
        auto found = pools_.find({device, id});
        return found == pools_.end() ? 0 : found->second.uses;
    }

    /* Whether other allocations of the device may use the pool's memory once the arena's is out. */
    void serve_when_out(int device, PoolId id, bool value) {
        std::unique_lock<std::shared_mutex> lock(mutex_);
        auto found = pools_.find({device, id});
        if (found != pools_.end()) found->second.serves_when_out = value;
    }

    /* Each block then fills its region. The pool must not be in use yet. */
    void never_split(int device, PoolId id) {
        std::unique_lock<std::shared_mutex> lock(mutex_);
        auto found = pools_.find({device, id});
        if (found == pools_.end()) return;
        if (found->second.hook)
            throw std::runtime_error("gpumem: a pool in use splits its blocks: say no_split before");
        found->second.splits = false;
    }

    /* Costs one load where no pool has a route. */
    bool has_routes() const { return route_count_.load(std::memory_order_acquire) != 0; }

    /* The pool that serves a stream now; empty: there is none. */
    PoolHook routed(int device, cudaStream_t stream) {
        std::shared_lock<std::shared_mutex> lock(mutex_);
        for (auto route = routes_.rbegin(); route != routes_.rend(); ++route)
            if (route->device == device && route->filter(stream)) return retained(route->hook);
        return PoolHook(calls_, nullptr);
    }

    /* A pool by its number; empty: there is none, or it has not been used. */
    PoolHook find(int device, PoolId id) {
        std::shared_lock<std::shared_mutex> lock(mutex_);
        auto found = pools_.find({device, id});
        return retained(found == pools_.end() ? nullptr : found->second.hook);
    }

    /* Whether anything uses the pool on any device. */
    bool is_used(PoolId id) {
        std::shared_lock<std::shared_mutex> lock(mutex_);
        return std::any_of(pools_.begin(), pools_.end(),
                           [&](const auto &each) { return each.first.second == id; });
    }

    bool has(int device, PoolId id) {
        std::shared_lock<std::shared_mutex> lock(mutex_);
        return pools_.count({device, id}) != 0;
    }

    /* Those that serve a device's other allocations when memory is out. */
    std::vector<PoolHook> reserves(int device) {
        std::shared_lock<std::shared_mutex> lock(mutex_);
        std::vector<PoolHook> found;
        for (auto &[key, pool] : pools_)
            if (key.first == device && pool.serves_when_out && pool.hook)
                found.push_back(retained(pool.hook));
        return found;
    }

   private:
    struct Pool {
        void *hook = nullptr;          /* a reference; NULL until the first route */
        TorchSource *source = nullptr; /* owned until the hook owns it */
        int uses = 0;
        int routes = 0;
        bool is_of_mem_pool = false;
        bool serves_when_out = false;
        bool splits = true;
    };
    struct Route {
        int device;
        PoolId id;
        void *hook;
        Filter filter;
    };

    void open(int device, PoolId id, Pool &pool) {
        if (pool.hook) return;
        const uint64_t label[2] = {id.first, id.second};
        pool.hook = calls_.open_pool(hook_of(calls_, device), label, pool.source, pool.splits,
                                     !pool.is_of_mem_pool);
        if (!pool.hook)
            throw std::runtime_error("gpumem: no graph pool can be opened next to the arena of cuda:" +
                                     std::to_string(device));
        pool.source = nullptr;
    }

    PoolHook retained(void *hook) {
        if (hook) calls_.retain_pool(hook);
        return PoolHook(calls_, hook);
    }

    const TorchCalls &calls_;
    std::shared_mutex mutex_;
    std::map<std::pair<int, PoolId>, Pool> pools_;
    std::vector<Route> routes_;
    std::atomic<size_t> route_count_{0};
};

}  // namespace gpumem

#endif
