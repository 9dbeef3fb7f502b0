/* PyTorch's pluggable allocator, over gpumem's arenas; see hooks.h.
 *
 * Signatures are those of torch/csrc/cuda/CUDAPluggableAllocator.h, versions 2.9 to 2.15. A
 * cudaStream_t is a pointer, a MempoolId_t a pair of integers; nothing of PyTorch is included.
 */
#include "hooks.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using Stream = void *;
using PoolId = std::pair<unsigned long long, unsigned long long>;
using Filter = std::function<bool(Stream)>;

TorchCalls calls;
std::atomic<void *> hooks[TORCH_DEVICES];
std::atomic<void (*)(const char *)> thrower;

/* ---- failures ---------------------------------------------------------------------------------- */

[[noreturn]] void fail(int device, size_t nbytes, Stream stream, int status) {
    int is_memory = 0;
    std::unique_ptr<char, decltype(&std::free)> reason(
        calls.report(device, nbytes, stream, status, &is_memory), &std::free);
    std::string text = reason ? reason.get() : "gpumem: an allocation failed with status " +
                                                   std::to_string(status);
    if (auto throw_out_of_memory = thrower.load()) {
        if (is_memory) throw_out_of_memory(text.c_str());
    }
    throw std::runtime_error(text);
}

/* ---- devices ----------------------------------------------------------------------------------- */

void *hook_of(int device) {
    if (device < 0 || device >= TORCH_DEVICES)
        throw std::runtime_error("gpumem: device " + std::to_string(device) +
                                 " is not from 0 to " + std::to_string(TORCH_DEVICES - 1));
    if (void *hook = hooks[device].load(std::memory_order_acquire)) return hook;
    if (void *hook = calls.find(device)) return hook;
    throw std::runtime_error("gpumem: no arena serves cuda:" + std::to_string(device));
}

/* ---- graph captures ---------------------------------------------------------------------------- */

/* A pool lives while a graph or a capture uses it; its blocks may outlive it. A route sends the
   streams that its filter accepts to a pool; the route that began last comes first. */
struct Pool {
    void *hook;
    int uses;
    int routes;
};
struct Route {
    int device;
    PoolId id;
    void *hook;
    Filter filter;
};

std::shared_mutex pools_mutex;
std::map<std::pair<int, PoolId>, Pool> pools;
std::vector<Route> routes;
std::atomic<size_t> route_count;

/* Return a reference to the pool that serves a stream now; nullptr: there is none. */
void *retain_routed(int device, Stream stream) {
    std::shared_lock<std::shared_mutex> lock(pools_mutex);
    for (auto route = routes.rbegin(); route != routes.rend(); ++route) {
        if (route->device != device || !route->filter(stream)) continue;
        calls.retain_pool(route->hook);
        return route->hook;
    }
    return nullptr;
}

}  // namespace

/* ---- the hooks --------------------------------------------------------------------------------- */

#define HOOK extern "C" __attribute__((visibility("default")))

HOOK void *gpumem_torch_alloc(size_t nbytes, int device, Stream stream) {
    if (nbytes == 0) return nullptr;
    void *hook = hook_of(device);
    void *address = nullptr;
    /* Zero but for captures. The lock is not held while allocating, which may take long. */
    void *pool = route_count.load(std::memory_order_acquire) ? retain_routed(device, stream)
                                                              : nullptr;
    int status = calls.allocate(pool ? pool : hook, nbytes, stream, &address);
    if (pool) calls.drop_pool(pool);
    if (status != 0) fail(device, nbytes, stream, status);
    return address;
}

/* Pool mode: a segment for PyTorch's own caching allocator, which handles nullptr itself. */
HOOK void *gpumem_torch_alloc_segment(size_t nbytes, int device, Stream stream) {
    void *address = nullptr;
    if (nbytes != 0) calls.allocate_segment(hook_of(device), nbytes, stream, &address);
    return address;
}

HOOK void gpumem_torch_free(void *address, size_t nbytes, int device, Stream) noexcept {
    if (address == nullptr) return;
    int status = calls.release(address);
    if (status == 0) return;
    /* PyTorch frees in destructors, so that an exception would end the process. */
    std::fprintf(stderr, "gpumem: PyTorch freed %zu bytes at %p of cuda:%d, refused with status %d\n",
                 nbytes, address, device, status);
}

HOOK void gpumem_torch_init(int) {}

HOOK void gpumem_torch_reset() {
    for (auto &hook : hooks)
        if (void *at = hook.load(std::memory_order_acquire)) calls.shrink(at);
}

HOOK void gpumem_torch_memory_fraction(double fraction, int device) {
    hook_of(device);
    calls.limit(device, fraction);
}

HOOK void *gpumem_torch_base_alloc(void *address, size_t *nbytes) {
    if (nbytes) *nbytes = calls.size(address);
    return address;
}

HOOK void gpumem_torch_record_stream(void *address, Stream stream) {
    if (address == nullptr) return;
    int status = calls.record(address, stream);
    if (status != 0)
        throw std::runtime_error("gpumem: record_stream failed with status " +
                                 std::to_string(status));
}

HOOK void gpumem_torch_begin_pool(int device, PoolId id, Filter filter) {
    void *hook = hook_of(device);
    std::unique_lock<std::shared_mutex> lock(pools_mutex);
    auto found = pools.find({device, id});
    if (found == pools.end()) {
        void *opened = calls.open_pool(hook);
        if (!opened)
            throw std::runtime_error("gpumem: no graph pool can be opened beside the arena of cuda:" +
                                     std::to_string(device));
        found = pools.emplace(std::make_pair(device, id), Pool{opened, 0, 0}).first;
    }
    Pool &pool = found->second;
    if (pool.routes == 0) calls.begin_pool(pool.hook);
    routes.push_back(Route{device, id, pool.hook, std::move(filter)});
    pool.routes++;
    pool.uses++;
    route_count.store(routes.size(), std::memory_order_release);
}

HOOK void gpumem_torch_end_pool(int device, PoolId id) {
    std::unique_lock<std::shared_mutex> lock(pools_mutex);
    for (auto route = routes.rbegin(); route != routes.rend(); ++route) {
        if (route->device != device || route->id != id) continue;
        routes.erase(std::next(route).base());
        pools.at({device, id}).routes--;
        break;
    }
    route_count.store(routes.size(), std::memory_order_release);
}

HOOK void gpumem_torch_release_pool(int device, PoolId id) {
    std::unique_lock<std::shared_mutex> lock(pools_mutex);
    auto found = pools.find({device, id});
    if (found == pools.end() || --found->second.uses > 0) return;
    void *hook = found->second.hook;
    pools.erase(found);
    calls.drop_pool(hook);
}

/* ---- other devices -----------------------------------------------------------------------------
 *
 * Before PyTorch first copies from one device to another, or lets a kernel read both, it asks its
 * allocator for access, and it lets the allocator copy. A pluggable allocator gives access to what
 * cuMemAlloc makes only, and fails to copy where there is none. */

namespace {

using EnablePeer = void (*)(void *, signed char, signed char);
using Copy = int (*)(void *, void *, int, const void *, int, size_t, Stream, bool);

EnablePeer enable_peer_before;
Copy copy_before;

void enable_peer(void *self, signed char device, signed char owner) {
    enable_peer_before(self, device, owner); /* between the contexts: for regions and graph pools */
    std::unique_ptr<char, decltype(&std::free)> reason(calls.add_peer(owner, device), &std::free);
    if (reason) throw std::runtime_error(reason.get());
}

int copy(void *self, void *dst, int to, const void *src, int from, size_t nbytes, Stream stream,
         bool has_access) {
    if (has_access || to == from)
        return copy_before(self, dst, to, src, from, nbytes, stream, has_access);
    return calls.copy(hook_of(to), dst, hook_of(from), src, nbytes, stream);
}

}  // namespace

int torch_hooks_adopt(void *object, void *table, const void *enable, const void *copies) {
    enum { BEFORE_FUNCTIONS = 2 }; /* words of a table: an offset and the type */
    Dl_info found;
    ElfW(Sym) *symbol = nullptr;
    bool known = dladdr1(table, &found, reinterpret_cast<void **>(&symbol), RTLD_DL_SYMENT) != 0;
    if (!known || symbol == nullptr || found.dli_saddr != table) return 0;
    void **functions = static_cast<void **>(table) + BEFORE_FUNCTIONS;
    auto *of_object = static_cast<void ***>(object);
    if (*of_object != functions) return 0; /* of another class, or adopted before */
    size_t words = symbol->st_size / sizeof(void *);
    void **own = new void *[words]; /* as long as the object: to the end of the process */
    std::memcpy(own, table, words * sizeof(void *));
    void **peer = nullptr, **copying = nullptr;
    for (size_t i = BEFORE_FUNCTIONS; i < words; i++) {
        if (own[i] == enable) peer = &own[i];
        if (own[i] == copies) copying = &own[i];
    }
    if (peer == nullptr || copying == nullptr) {
        delete[] own;
        return 0;
    }
    enable_peer_before = reinterpret_cast<EnablePeer>(*peer);
    copy_before = reinterpret_cast<Copy>(*copying);
    *peer = reinterpret_cast<void *>(&enable_peer);
    *copying = reinterpret_cast<void *>(&copy);
    *of_object = own + BEFORE_FUNCTIONS;
    return 1;
}

/* ---- gpumem's side ----------------------------------------------------------------------------- */

void torch_hooks_init(const TorchCalls *given) { calls = *given; }

void torch_hooks_set(int device, void *hook) {
    hooks[device].store(hook, std::memory_order_release);
}

void *torch_hooks_get(int device) { return hooks[device].load(std::memory_order_acquire); }

void torch_hooks_set_thrower(void (*given)(const char *)) { thrower.store(given); }

void torch_hooks_addresses(uintptr_t addresses[TORCH_HOOKS]) {
    const uintptr_t all[TORCH_HOOKS] = {
        reinterpret_cast<uintptr_t>(&gpumem_torch_alloc),
        reinterpret_cast<uintptr_t>(&gpumem_torch_alloc_segment),
        reinterpret_cast<uintptr_t>(&gpumem_torch_free),
        reinterpret_cast<uintptr_t>(&gpumem_torch_init),
        reinterpret_cast<uintptr_t>(&gpumem_torch_reset),
        reinterpret_cast<uintptr_t>(&gpumem_torch_memory_fraction),
        reinterpret_cast<uintptr_t>(&gpumem_torch_base_alloc),
        reinterpret_cast<uintptr_t>(&gpumem_torch_record_stream),
        reinterpret_cast<uintptr_t>(&gpumem_torch_begin_pool),
        reinterpret_cast<uintptr_t>(&gpumem_torch_end_pool),
        reinterpret_cast<uintptr_t>(&gpumem_torch_release_pool),
    };
    for (int i = 0; i < TORCH_HOOKS; i++) addresses[i] = all[i];
}
