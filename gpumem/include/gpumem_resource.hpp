/* A memory resource over an arena, as CCCL's cuda::mr and RMM's resources are; see gpumem.h.
 *
 *     gpumem::resource resource{gpumem_arena_of(capsule)};
 *     void *block = resource.allocate(stream, 1 << 20);
 *     resource.deallocate(stream, block, 1 << 20);
 *
 * Header only, C++17, for CCCL 3.1 and later (`cuda::mr::resource`, allocation by stream first). It
 * can be copied; each copy has a reference to the arena, and two are equal if they have the same one.
 * A function takes Python's interpreter lock only to report why memory is out.
 */
#ifndef GPUMEM_RESOURCE_HPP
#define GPUMEM_RESOURCE_HPP

#include <gpumem.h>

#include <cuda/memory_resource>
#include <cuda/stream_ref>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace gpumem {

/* Memory is out; what() has the arena's report. */
class out_of_memory : public std::bad_alloc {
  public:
    explicit out_of_memory(std::string text) : text_(std::move(text)) {}
    char const *what() const noexcept override { return text_.c_str(); }

  private:
    std::string text_;
};

/* `OutOfMemory`: the exception if memory is out, made from a std::string. Other failures are
   std::runtime_error, and std::invalid_argument for an alignment above 256 and for no arena.

   A stream without a handle is the legacy default stream, and the calling thread's where
   CUDA_API_PER_THREAD_DEFAULT_STREAM is defined, as in calls of the CUDA runtime. */
template <class OutOfMemory = out_of_memory>
class basic_resource {
  public:
    static constexpr std::size_t alignment = 256; /* of every block */

    /* `arena`: the result of gpumem_arena_of. */
    explicit basic_resource(gpumem_arena *arena) : arena_(arena) {
        if (arena_ == nullptr) throw std::invalid_argument("gpumem: no arena was passed");
        arena_->calls->retain(arena_);
    }
    basic_resource(basic_resource const &other) noexcept : arena_(other.arena_) {
        arena_->calls->retain(arena_);
    }
    basic_resource &operator=(basic_resource const &other) noexcept {
        other.arena_->calls->retain(other.arena_);
        arena_->calls->release(std::exchange(arena_, other.arena_));
        return *this;
    }
    ~basic_resource() { arena_->calls->release(arena_); }

    /* A block for work on the stream; no bytes: nullptr. */
    void *allocate(cuda::stream_ref stream, std::size_t bytes, std::size_t align = alignment) {
        return allocate_for(handle_of(stream), bytes, align);
    }
    /* The stream waits by now for all uses of the block. If it cannot be named, because host memory
       is out, the block stays allocated. */
    void deallocate(cuda::stream_ref stream, void *block, std::size_t,
                    std::size_t = alignment) noexcept {
        arena_->calls->deallocate_on(arena_, block, handle_of(stream));
    }

    /* A block for any work from now on: the host waits for earlier work on its memory. */
    void *allocate_sync(std::size_t bytes, std::size_t align = alignment) {
        void *block = allocate_for(nullptr, bytes, align);
        int status = arena_->calls->synchronize(arena_, nullptr);
        if (status != GPUMEM_OK) {
            arena_->calls->deallocate(arena_, block);
            fail(bytes, nullptr, status);
        }
        return block;
    }
    /* All uses of the block are done. */
    void deallocate_sync(void *block, std::size_t, std::size_t = alignment) noexcept {
        arena_->calls->deallocate(arena_, block);
    }

    gpumem_arena *arena() const noexcept { return arena_; }

    friend bool operator==(basic_resource const &a, basic_resource const &b) noexcept {
        return a.arena_->identity == b.arena_->identity;
    }
    friend bool operator!=(basic_resource const &a, basic_resource const &b) noexcept {
        return !(a == b);
    }
    friend constexpr void get_property(basic_resource const &, cuda::mr::device_accessible) noexcept {}

  private:
    static void *handle_of(cuda::stream_ref stream) noexcept {
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
        if (stream.get() == nullptr) return cudaStreamPerThread;
#endif
        return stream.get();
    }

    void *allocate_for(void *stream, std::size_t bytes, std::size_t align) {
        void *block = nullptr;
        int status = arena_->calls->allocate(arena_, bytes, align, stream, &block);
        if (status != GPUMEM_OK) fail(bytes, stream, status);
        return block;
    }

    [[noreturn]] void fail(std::size_t bytes, void *stream, int status) {
        char *report = arena_->calls->report(arena_, bytes, stream, status);
        std::string text = report ? report : arena_->calls->text(status);
        std::free(report);
        text.insert(0, "gpumem: ");
        if (status == GPUMEM_OUT_OF_MEMORY) throw OutOfMemory(text);
        if (status == GPUMEM_INVALID) throw std::invalid_argument(text);
        throw std::runtime_error(text);
    }

    gpumem_arena *arena_;
};

using resource = basic_resource<>;

} // namespace gpumem

#endif
