/* Functions for PyTorch's pluggable allocator, over gpumem's arenas: the way into PyTorch where
 * allocator.cpp cannot be compiled.
 *
 * Signatures are those of torch/csrc/cuda/CUDAPluggableAllocator.h, versions 2.9 to 2.15. A
 * cudaStream_t is a pointer, a MempoolId_t a pair of integers; nothing of PyTorch is included.
 */
#include "hooks.h"

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "pools.h"

namespace {

using Stream = void *;
using Pools = gpumem::Pools<Stream>;
using gpumem::PoolId;

const TorchCalls *calls;
Pools *pools; /* to the end of the process: blocks may be freed as it ends */

void *hook_of(int device) { return gpumem::hook_of(*calls, device); }

[[noreturn]] void fail(int device, size_t nbytes, Stream stream, int status) {
    int is_memory = 0;
    gpumem::Text reason(calls->report(device, nbytes, stream, status, &is_memory), &std::free);
    throw std::runtime_error(reason ? reason.get()
                                    : "gpumem: an allocation failed with status " +
                                          std::to_string(status));
}

}  // namespace

#define HOOK extern "C" __attribute__((visibility("default")))

HOOK void *gpumem_torch_alloc(size_t nbytes, int device, Stream stream) {
    if (nbytes == 0) return nullptr;
    void *hook = hook_of(device);
    void *address = nullptr;
    int status;
    if (!pools->has_routes()) {
        status = calls->allocate(hook, nbytes, stream, &address);
    } else {
        gpumem::PoolHook pool = pools->routed(device, stream);
        status = calls->allocate(pool.get() ? pool.get() : hook, nbytes, stream, &address);
    }
    if (status != 0) fail(device, nbytes, stream, status);
    return address;
}

/* Pool mode: a segment for PyTorch's own caching allocator, which handles nullptr itself. */
HOOK void *gpumem_torch_alloc_segment(size_t nbytes, int device, Stream stream) {
    void *address = nullptr;
    if (nbytes != 0) calls->allocate_segment(hook_of(device), nbytes, stream, &address);
    return address;
}

HOOK void gpumem_torch_free(void *address, size_t nbytes, int device, Stream) noexcept {
    if (address == nullptr) return;
    int status = calls->release(address);
    if (status == 0) return;
    /* PyTorch frees in destructors, so that an exception would end the process. */
    std::fprintf(stderr, "gpumem: PyTorch freed %zu bytes at %p of cuda:%d, refused with status %d\n",
                 nbytes, address, device, status);
}

HOOK void gpumem_torch_reset() { calls->shrink(); }

HOOK void gpumem_torch_memory_fraction(double fraction, int device) {
    hook_of(device);
    calls->limit(device, fraction);
}

HOOK void *gpumem_torch_base_alloc(void *address, size_t *nbytes) {
    TorchBlock block;
    if (nbytes) *nbytes = calls->block(address, &block) ? block.requested : 0;
    return address;
}

HOOK void gpumem_torch_record_stream(void *address, Stream stream) {
    if (address == nullptr) return;
    int status = calls->record(address, stream);
    if (status != 0)
        throw std::runtime_error("gpumem: record_stream failed with status " +
                                 std::to_string(status));
}

HOOK void gpumem_torch_begin_pool(int device, PoolId id, Pools::Filter filter) {
    pools->begin(device, id, std::move(filter));
}

HOOK void gpumem_torch_end_pool(int device, PoolId id) { pools->end(device, id); }

HOOK void gpumem_torch_release_pool(int device, PoolId id) { pools->release(device, id); }

/* ---- gpumem's side ----------------------------------------------------------------------------- */

void torch_hooks_init(const TorchCalls *given) {
    calls = given;
    pools = new Pools(*given);
}

void torch_hooks_addresses(uintptr_t addresses[TORCH_HOOKS]) {
    const uintptr_t all[TORCH_HOOKS] = {
        reinterpret_cast<uintptr_t>(&gpumem_torch_alloc),
        reinterpret_cast<uintptr_t>(&gpumem_torch_alloc_segment),
        reinterpret_cast<uintptr_t>(&gpumem_torch_free),
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
