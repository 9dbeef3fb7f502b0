/* What PyTorch's libraries export of their allocators, by the same names: one object of the class
 * of pluggable allocators, asked by virtual functions as PyTorch asks it. */
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>

struct CUstream_st;

namespace c10::cuda::CUDACachingAllocator {
struct CUDAAllocator {
    virtual ~CUDAAllocator() = default;
    virtual int before() { return 1; }
    virtual void enablePeerAccess(int8_t device, int8_t owner) = 0;
    virtual int memcpyAsync(void *dst, int to, const void *src, int from, size_t nbytes,
                            CUstream_st *stream, bool has_access) = 0;
    virtual int after() { return 2; }
};
std::atomic<CUDAAllocator *> allocator;
}  // namespace c10::cuda::CUDACachingAllocator

namespace torch::cuda::CUDAPluggableAllocator {
struct CUDAPluggableAllocator : c10::cuda::CUDACachingAllocator::CUDAAllocator {
    void enablePeerAccess(int8_t device, int8_t owner) override;
    int memcpyAsync(void *dst, int to, const void *src, int from, size_t nbytes,
                    CUstream_st *stream, bool has_access) override;
    int after() override { return 3; }
    int enabled = 0;
};
void CUDAPluggableAllocator::enablePeerAccess(int8_t, int8_t) { enabled++; }
int CUDAPluggableAllocator::memcpyAsync(void *, int, const void *, int, size_t, CUstream_st *, bool) {
    return 999;
}
}  // namespace torch::cuda::CUDAPluggableAllocator

namespace {
struct Other : torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator {
    int before() override { return 4; }
};
using c10::cuda::CUDACachingAllocator::allocator;
}  // namespace

extern "C" {
void peers_begin(int other) {
    allocator = other ? new Other : new torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;
}
/* 0: done; 1: an exception, with its text. */
int peers_enable(int device, int owner, char *said, size_t room) {
    try {
        allocator.load()->enablePeerAccess(static_cast<int8_t>(device), static_cast<int8_t>(owner));
        return 0;
    } catch (const std::exception &error) {
        std::strncpy(said, error.what(), room - 1);
        return 1;
    }
}
int peers_copy(void *dst, int to, const void *src, int from, size_t nbytes, void *stream, int has_access) {
    return allocator.load()->memcpyAsync(dst, to, src, from, nbytes,
                                         static_cast<CUstream_st *>(stream), has_access != 0);
}
/* How often the class's own function ran, and whether its neighbours still answer. */
int peers_enabled() {
    return static_cast<torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator *>(allocator.load())->enabled;
}
int peers_others() { return allocator.load()->before() * 10 + allocator.load()->after(); }
}
