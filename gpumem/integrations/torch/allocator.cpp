/* PyTorch's allocator over gpumem's arenas: a subclass of CUDAAllocator.
 *
 * Compiled by _build.py for the installed PyTorch. Of PyTorch's own allocator it calls only the
 * function that opens another process's memory; of gpumem it calls the table of functions in
 * hooks.h. The path of an allocation, from `allocate` to `calls_->allocate`, takes no lock here and
 * looks nothing up; a free neither.
 */
#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/env.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <unordered_set>

#include "compat.h"
#include "history.h"
#include "hooks.h"
#include "pinned.h"
#include "pools.h"
#include "statistics.h"

#define GPUMEM_EXPORT extern "C" __attribute__((visibility("default")))

namespace gpumem {
namespace {

using c10::DataPtr;
using c10::DeviceIndex;
using c10::MempoolId_t;

void delete_block(void *address);

c10::Device device_of(int index) { return {c10::kCUDA, static_cast<DeviceIndex>(index)}; }

/* ---- a MemPool's own allocator, as where a pool's memory comes from ----------------------------- */

struct ForeignMemory : TorchSource {
    explicit ForeignMemory(std::shared_ptr<CUDAAllocator> given) : allocator(std::move(given)) {
        reserve = [](TorchSource *self, size_t nbytes) -> void * {
            try {
                return static_cast<ForeignMemory *>(self)->allocator->raw_alloc(nbytes);
            } catch (const std::exception &) {
                return nullptr; /* to gpumem it is memory that cannot be had */
            }
        };
        release = [](TorchSource *self, void *address) {
            try {
                static_cast<ForeignMemory *>(self)->allocator->raw_delete(address);
            } catch (const std::exception &error) {
                std::fprintf(stderr, "gpumem: a MemPool's allocator refused a free: %s\n",
                             error.what());
            }
        };
        forget = [](TorchSource *self) { delete static_cast<ForeignMemory *>(self); };
    }
    std::shared_ptr<CUDAAllocator> allocator;
};

/* ---- checkpoints of a pool ---------------------------------------------------------------------- */

struct Checkpoint : cca::AllocatorState {
    MempoolId_t pool;
    std::vector<TorchBlock> blocks; /* that were live */
};

/* ---- snapshots ------------------------------------------------------------------------------------ */

void add_to_snapshot(SnapshotInfo &info, const TorchBlock &block, bool begins, Context context) {
    if (begins) {
        Segment segment;
        segment.device = static_cast<DeviceIndex>(block.device);
        segment.address = block.address;
        segment.stream = stream_of(block);
        segment.is_large = !block.is_small;
        segment.is_expandable = block.is_expandable;
        segment.owner_private_pool_id = pool_of(block);
        info.segments.push_back(std::move(segment));
    }
    auto &segment = info.segments.back();
    typename decltype(segment.blocks)::value_type entry;
    entry.size = block.size;
    entry.requested_size = block.requested;
    entry.allocated = block.state == TORCH_USED;
    entry.active = block.state != TORCH_FREE;
    entry.context_when_allocated = std::move(context);
    segment.total_size += block.size;
    if (entry.allocated) segment.allocated_size += block.size;
    if (entry.allocated) segment.requested_size += block.requested;
    if (entry.active) segment.active_size += block.size;
    segment.blocks.push_back(std::move(entry));
}

/* ---- the allocator ---------------------------------------------------------------------------------- */

class Allocator final : public CUDAAllocator {
   public:
    Allocator(const TorchCalls *calls, double fraction, CUDAAllocator *replaced)
        : calls_(calls), replaced_(replaced), pools_(*calls), history_(*calls) {
        for (auto &each : fraction_) each.store(fraction);
        Allocator::enable(true);
    }

    std::string name() override { return "gpumem"; }
    void init(int device_count) override { device_count_ = std::max(device_count_.load(), device_count); }
    bool initialized() override { return device_count_.load() != 0; }

    /* ---- blocks ---- */

    DataPtr allocate(size_t nbytes) override {
        DeviceIndex device = c10::cuda::current_device();
        void *address = nullptr;
        if (nbytes != 0)
            address = allocate_block(device, nbytes, c10::cuda::getCurrentCUDAStream(device).stream());
        return {address, address, &delete_block, device_of(device)};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &delete_block; }

    void *raw_alloc(size_t nbytes) override {
        DeviceIndex device = c10::cuda::current_device();
        return raw_alloc_with_stream(nbytes, c10::cuda::getCurrentCUDAStream(device).stream());
    }

    void *raw_alloc_with_stream(size_t nbytes, cudaStream_t stream) override {
        if (nbytes == 0) return nullptr;
        return allocate_block(c10::cuda::current_device(), nbytes, stream);
    }

    void raw_delete(void *address) override {
        if (address == nullptr) return;
        if (C10_UNLIKELY(history_.is_watched() || c10::memoryProfilingEnabled())) tell_free(address);
        const c10::impl::PyInterpreter *sanitizer = c10::impl::GPUTrace::get_trace();
        if (C10_UNLIKELY(sanitizer != nullptr))
            (*sanitizer)->trace_gpu_memory_deallocation(c10::kCUDA,
                                                        reinterpret_cast<uintptr_t>(address));
        int status = calls_->release(address);
        if (C10_LIKELY(status == 0)) return;
        /* Destructors call this, so that an exception would end the process. */
        std::fprintf(stderr, "gpumem: PyTorch freed %p, refused with status %d\n", address, status);
    }

    using CUDAAllocator::recordStream;
    void recordStream(const DataPtr &data, c10::cuda::CUDAStream stream) override {
        if (!data.get()) return;
        /* Memory of another library, which PyTorch's allocator passes over as well. */
        if (data.get_deleter() != &delete_block) return;
        int status = calls_->record(data.get(), stream.stream());
        TORCH_CHECK(status == 0, "gpumem: record_stream failed with status ", status);
    }

    void copy_data(void *to, const void *from, std::size_t nbytes) const override {
        C10_CUDA_CHECK(cudaMemcpy(to, from, nbytes, cudaMemcpyDeviceToDevice));
    }

    void *getBaseAllocation(void *address, size_t *nbytes) override {
        TorchBlock block;
        TORCH_CHECK(calls_->block(address, &block), "gpumem: no block begins at ", address);
        if (nbytes) *nbytes = block.size;
        return address;
    }

    /* ---- limits and idle memory ---- */

    /* One pool is released once nothing uses it, since graphs write its idle memory. */
    void emptyCache(MempoolId_t id) override {
        const uint64_t label[2] = {id.first, id.second};
        if (id == MempoolId_t{0, 0})
            calls_->shrink();
        else if (!pools_.is_used(id))
            calls_->shrink_pool(label);
        history_.memory_changed();
    }

    /* Without caching every block has memory of its own, which is released once it is free, and counts
       in no statistics. A variable of PyTorch's forbids caching, so that memory checkers see each
       block. */
    void enable(bool value) override {
        is_caching_.store(value && !c10::utils::has_env("PYTORCH_NO_CUDA_MEMORY_CACHING"));
    }
    bool isEnabled() const override { return is_caching_.load(); }

    void cacheInfo(DeviceIndex device, size_t *largest) override {
        hook_of(*calls_, device);
        *largest = std::max(*largest, calls_->largest(device));
    }

    double getMemoryFraction(DeviceIndex device) override { return fraction_.at(device).load(); }
    void setMemoryFraction(double fraction, DeviceIndex device) override {
        TORCH_CHECK(0 <= fraction && fraction <= 1, "invalid fraction: ", fraction,
                    ". Please set within [0, 1].");
        hook_of(*calls_, device);
        calls_->limit(device, fraction);
        fraction_.at(device).store(fraction);
    }

    /* ---- statistics ---- */

    DeviceStats getDeviceStats(DeviceIndex device) override {
        return statistics_.at(device).read(*calls_, device);
    }

    void resetAccumulatedStats(DeviceIndex device) override {
        statistics_.at(device).reset_sums(*calls_, device);
    }

    void resetPeakStats(DeviceIndex device) override {
        statistics_.at(device).reset_peaks(*calls_, device);
    }

    StreamSegments getExpandableSegmentSizes(DeviceIndex device) {
        StreamSegments sizes;
        TorchStats now = stats_now(*calls_, device);
        for (int part : {TORCH_SMALL, TORCH_LARGE})
            if (now.parts[part].reserved)
                sizes.emplace_back(nullptr, part == TORCH_SMALL, now.parts[part].reserved);
        return sizes;
    }

    /* ---- pools ---- */

    void beginAllocateToPool(DeviceIndex device, MempoolId_t id,
                             std::function<bool(cudaStream_t)> filter) override {
        pools_.begin(device, id, std::move(filter));
    }
    void endAllocateToPool(DeviceIndex device, MempoolId_t id) override { pools_.end(device, id); }
    void releasePool(DeviceIndex device, MempoolId_t id) override { pools_.release(device, id); }
    int getPoolUseCount(DeviceIndex device, MempoolId_t id) override {
        return pools_.use_count(device, id);
    }
    void createOrIncrefPool(DeviceIndex device, MempoolId_t id, std::shared_ptr<CUDAAllocator> from) {
        pools_.create(device, id, from ? new ForeignMemory(std::move(from)) : nullptr);
    }
    void setUseOnOOM(DeviceIndex device, MempoolId_t id, bool value) {
        pools_.serve_when_out(device, id, value);
    }
    void setNoSplit(DeviceIndex device, MempoolId_t id) { pools_.never_split(device, id); }

    bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t id,
                                  const std::unordered_set<void *> &expected) override {
        std::vector<uint64_t> live = live_in(device, id);
        return live.size() == expected.size() &&
               std::all_of(live.begin(), live.end(), [&](uint64_t address) {
                   return expected.count(reinterpret_cast<void *>(address)) != 0;
               });
    }

    std::shared_ptr<cca::AllocatorState> getCheckpointState(DeviceIndex device,
                                                            MempoolId_t id) override {
        auto state = std::make_shared<Checkpoint>();
        state->pool = id;
        for (uint64_t address : live_in(device, id)) {
            TorchBlock block;
            if (calls_->block(reinterpret_cast<void *>(address), &block))
                state->blocks.push_back(block);
        }
        return state;
    }

    /* Frees the blocks that are live now, and allocates those of the checkpoint at their addresses. */
    cca::CheckpointDelta setCheckpointPoolState(DeviceIndex device,
                                                std::shared_ptr<cca::AllocatorState> given) override {
        auto *state = dynamic_cast<Checkpoint *>(given.get());
        TORCH_CHECK(state, "gpumem: a checkpoint of another allocator cannot be restored");
        PoolHook pool = pools_.find(device, state->pool);
        cca::CheckpointDelta delta;
        for (uint64_t address : live_in(device, state->pool)) {
            delta.ptrs_freed.push_back(reinterpret_cast<void *>(address));
            raw_delete(delta.ptrs_freed.back());
        }
        if (!pool.get()) return delta;
        calls_->begin_pool(pool.get());
        for (auto &block : state->blocks) {
            void *address = reinterpret_cast<void *>(block.address);
            int status = calls_->restore(pool.get(), &block);
            TORCH_CHECK(status == 0, "gpumem: a block of ", block.size, " bytes cannot be restored at ",
                        address, ": status ", status);
            if (C10_UNLIKELY(history_.is_watched())) history_.allocated(block);
            delta.dataptrs_allocd.emplace_back(address, address, &delete_block, device_of(device));
        }
        return delta;
    }

    /* ---- memory history and observers ---- */

    SnapshotInfo snapshot(MempoolId_t pool, bool include_traces) {
        SnapshotInfo info{};
        const TorchBlock *last = nullptr;
        std::vector<TorchBlock> blocks = blocks_now(*calls_);
        for (auto &block : blocks) {
            if (pool != MempoolId_t{0, 0} && pool_of(block) != pool) continue;
            bool begins = !last || last->segment != block.segment;
            add_to_snapshot(info, block, begins,
                            block.state == TORCH_FREE ? nullptr : history_.context_of(block.address));
            last = &block;
        }
        info.config_metadata.max_split_size = std::numeric_limits<size_t>::max();
        if (include_traces) history_.copy_to(info, device_count_);
        return info;
    }

    bool isHistoryEnabled() override { return history_.is_recording(); }
    void recordHistory(bool enabled, cca::CreateContextFn recorder, size_t max_entries, RecordContext when,
                       bool clear, const std::vector<std::string> &skipped) override {
        history_.record(enabled, recorder, max_entries, when, clear, skipped);
    }
    void recordAnnotation(const std::vector<std::pair<std::string, std::string>> &pairs) override {
        if (history_.is_recording()) history_.annotate(c10::cuda::current_device(), pairs);
    }
    void pushCompileContext(std::string &text) override { History::compiling().push(text); }
    void popCompileContext() override {
        if (!History::compiling().empty()) History::compiling().pop();
    }
    bool supportsUserMetadata() { return true; }
    void setUserMetadata(const std::string &text) { History::metadata() = text; }
    std::string getUserMetadata() { return History::metadata(); }
    void annotateMemory(const void *address, const std::string &text) {
        TorchBlock block;
        if (calls_->block(const_cast<void *>(address), &block)) history_.annotate_block(block, text);
    }
    Context getContextForPointer(const void *address) {
        return history_.context_of(reinterpret_cast<uint64_t>(address));
    }
    void attachAllocatorTraceTracker(cca::AllocatorTraceTracker tracker) override {
        history_.track(std::move(tracker));
    }
    void attachOutOfMemoryObserver(cca::OutOfMemoryObserver observer) override {
        std::lock_guard<std::mutex> lock(observers_mutex_);
        observers_.push_back(std::move(observer));
    }
    /* Every refusal comes from the driver or a limit, and none before, so that none is observed here. */
    void attachOomRejectionObserver(std::function<void(int64_t, size_t, size_t, size_t)>) {}

    /* ---- other devices and other processes ---- */

    void enablePeerAccess(DeviceIndex device, DeviceIndex owner) override {
        c10::cuda::CUDAGuard guard(device);
        cudaError_t error = cudaDeviceEnablePeerAccess(owner, 0); /* for regions and graph pools */
        if (error == cudaErrorPeerAccessAlreadyEnabled)
            (void)cudaGetLastError();
        else
            C10_CUDA_CHECK(error);
        Text reason(calls_->add_peer(owner, device), &std::free);
        TORCH_CHECK(!reason, reason.get());
    }

    cudaError_t memcpyAsync(void *to, int to_device, const void *from, int from_device, size_t nbytes,
                            cudaStream_t stream, bool has_access) override {
        if (has_access || to_device == from_device)
            return cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDeviceToDevice, stream);
        return static_cast<cudaError_t>(calls_->copy(hook_of(*calls_, to_device), to,
                                                     hook_of(*calls_, from_device), from, nbytes,
                                                     stream));
    }

    /* The handle by which another process opens the block that begins at an address; _sharing.py
       describes how. */
    cca::ShareableHandle shareIpcHandle(void *address) override {
        size_t offset = 0;
        char *refused = nullptr;
        Text text(calls_->share(address, &offset, &refused), &std::free);
        Text reason(refused, &std::free);
        TORCH_CHECK(text,
                    reason ? reason.get() : "gpumem: a block cannot be shared as the process ends");
        return {static_cast<ptrdiff_t>(offset), text.get()};
    }
    /* The block of another process, for as long as the pointer lives. A process with PyTorch's own
       allocator sends a handle of that one, which opens it and allocates nothing. */
    std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
        if (handle.rfind("gpumem-block ", 0) != 0) {
            std::call_once(is_ready_, [this] { replaced_->init(device_count_.load()); });
            return replaced_->getIpcDevPtr(std::move(handle));
        }
        void *address = nullptr;
        char *refused = nullptr;
        void *opened = calls_->open_shared(handle.c_str(), &address, &refused);
        Text reason(refused, &std::free);
        TORCH_CHECK(opened,
                    reason ? reason.get() : "gpumem: no block can be opened as the process ends");
        auto close = calls_->close_shared;
        return {address, [opened, close](void *) { close(opened); }};
    }

   private:
    void *allocate_block(DeviceIndex device, size_t nbytes, cudaStream_t stream) {
        void *hook = hook_of(*calls_, device);
        void *address = nullptr;
        if (C10_LIKELY(!pools_.has_routes())) {
            int status = take(device, hook, nbytes, stream, &address);
            if (C10_UNLIKELY(status != 0))
                address = allocate_at_last(hook, device, nbytes, stream, status);
        } else {
            PoolHook pool = pools_.routed(device, stream);
            void *from = pool.get() ? pool.get() : hook;
            int status = take(device, from, nbytes, stream, &address);
            if (C10_UNLIKELY(status != 0))
                address = allocate_at_last(from, device, nbytes, stream, status);
        }
        if (C10_UNLIKELY(history_.is_watched() || c10::memoryProfilingEnabled()))
            tell_allocation(address);
        const c10::impl::PyInterpreter *sanitizer = c10::impl::GPUTrace::get_trace();
        if (C10_UNLIKELY(sanitizer != nullptr))
            (*sanitizer)->trace_gpu_memory_allocation(c10::kCUDA,
                                                      reinterpret_cast<uintptr_t>(address));
        return address;
    }

    int take(DeviceIndex device, void *hook, size_t nbytes, cudaStream_t stream, void **address) {
        if (C10_LIKELY(is_caching_.load(std::memory_order_relaxed)))
            return calls_->allocate(hook, nbytes, stream, address);
        return calls_->allocate_alone(device, nbytes, stream, address);
    }

    /* After a refusal: PyTorch's callbacks free memory, then pools that serve others are tried, at last
       garbage is collected; else it throws. No lock of gpumem's or of this allocator's is held. PyTorch's
       callers may hold some, such as that of the node whose gradient is computed. Nothing is collected
       during a capture, in which finalizers must not call the driver. */
    void *allocate_at_last(void *hook, DeviceIndex device, size_t nbytes, cudaStream_t stream,
                           int status) {
        void *address = nullptr;
        Text line(nullptr, &std::free);
        int collected = TORCH_NOTHING_FREED;
        if (calls_->is_memory(status)) {
            auto *callbacks = c10::FreeCudaMemoryCallbacksRegistry();
            bool freed = false;
            for (auto &name : callbacks->Keys()) freed |= callbacks->Create(name)->Execute();
            if (freed) status = take(device, hook, nbytes, stream, &address);
            for (auto &pool : pools_.reserves(device)) {
                if (status == 0 || !calls_->is_memory(status)) break;
                status = take(device, pool.get(), nbytes, stream, &address);
            }
        }
        bool again = c10::cuda::currentStreamCaptureStatusMayInitCtx() ==
                     c10::cuda::CaptureStatus::None;
        while (status != 0 && again) {
            char *said = nullptr;
            collected = calls_->collect(device, nbytes, status, &said);
            if (said) line.reset(said);
            if (collected == TORCH_FREED || collected == TORCH_RELIEVED)
                status = take(device, hook, nbytes, stream, &address);
            again = collected == TORCH_RELIEVED;
        }
        if (status != 0) fail(device, nbytes, stream, status, collected, line.get());
        return address;
    }

    /* `collected` and `line`: of `collect`. */
    [[noreturn]] void fail(DeviceIndex device, size_t nbytes, cudaStream_t stream, int status,
                           int collected, const char *line) {
        int is_memory = collected == TORCH_NO_INTERPRETER;
        Text reason(is_memory ? nullptr : calls_->report(device, nbytes, stream, status, &is_memory),
                    &std::free);
        std::string text = reason ? reason.get()
                                  : "gpumem: an allocation failed with status " + std::to_string(status);
        if (line) text = reason ? text + "\n" + line : line;
        if (!is_memory) TORCH_CHECK(false, text);
        size_t free = 0, total = 0;
        (void)cudaMemGetInfo(&free, &total);
        const auto limit = static_cast<size_t>(fraction_.at(device).load() * total);
        if (history_.is_watched()) history_.out_of_memory(device, nbytes, stream, free);
        if (c10::memoryProfilingEnabled()) {
            TorchFigures now = stats_now(*calls_, device).parts[TORCH_ALL];
            c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(nbytes),
                                             now.allocated - now.allocated_freed, now.reserved,
                                             device_of(device));
        }
        std::vector<cca::OutOfMemoryObserver> observers;
        {
            std::lock_guard<std::mutex> lock(observers_mutex_);
            observers = observers_;
        }
        for (auto &observer : observers) observer(device, nbytes, limit, free);
        throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
    }

    void tell_allocation(void *address) {
        TorchBlock block;
        if (!calls_->block(address, &block)) return;
        if (history_.is_watched()) history_.allocated(block);
        tell_profiler(block, static_cast<int64_t>(block.size));
    }

    void tell_free(void *address) {
        TorchBlock block;
        if (!calls_->block(address, &block)) return;
        if (history_.is_watched()) history_.freeing(block);
        tell_profiler(block, -static_cast<int64_t>(block.size));
    }

    /* A free is reported before it is done, so its bytes are subtracted here. */
    void tell_profiler(const TorchBlock &block, int64_t nbytes) {
        if (!c10::memoryProfilingEnabled()) return;
        TorchFigures now = stats_now(*calls_, block.device).parts[TORCH_ALL];
        uint64_t freed = nbytes < 0 ? block.size : 0;
        c10::reportMemoryUsageToProfiler(reinterpret_cast<void *>(block.address), nbytes,
                                         now.allocated - now.allocated_freed - freed, now.reserved,
                                         device_of(block.device));
    }

    std::vector<uint64_t> live_in(DeviceIndex device, MempoolId_t id) {
        TORCH_CHECK(pools_.has(device, id), "gpumem: cuda:", static_cast<int>(device),
                    " has no pool (", id.first, ", ", id.second, ")");
        PoolHook pool = pools_.find(device, id);
        if (!pool.get()) return {};
        std::vector<uint64_t> addresses(calls_->live(pool.get(), nullptr, 0));
        addresses.resize(std::min(addresses.size(),
                                  calls_->live(pool.get(), addresses.data(), addresses.size())));
        return addresses;
    }

    const TorchCalls *calls_;
    CUDAAllocator *replaced_; /* PyTorch's own, which lives as long as the process */
    std::once_flag is_ready_; /* replaced_ is initialised */
    Pools pools_;
    History history_;
    std::atomic<bool> is_caching_;
    std::atomic<int> device_count_{0};
    std::array<std::atomic<double>, TORCH_DEVICES> fraction_{};
    std::array<Statistics, TORCH_DEVICES> statistics_;
    std::mutex observers_mutex_;
    std::vector<cca::OutOfMemoryObserver> observers_;
};

Allocator *installed; /* for the rest of the process: blocks may be freed as it ends */

void delete_block(void *address) { installed->Allocator::raw_delete(address); }

}  // namespace
}  // namespace gpumem

/* Puts the allocator in PyTorch's place for its own; 0: PyTorch has initialised CUDA, or another
   allocator is there. `fraction` of each device's memory is the limit of its arena at first. */
GPUMEM_EXPORT int gpumem_torch_install(const TorchCalls *calls, double fraction) {
    auto &current = c10::cuda::CUDACachingAllocator::allocator;
    if (gpumem::installed || current.load()->initialized()) return 0;
    gpumem::installed = new gpumem::Allocator(calls, fraction, current.load());
    current.store(gpumem::installed);
    /* At the lowest priority that is enough: PyTorch's own has 0, from 2.12 on 1. */
    for (int priority = 0; c10::GetAllocator(c10::kCUDA) != gpumem::installed; priority++)
        c10::SetAllocator(c10::kCUDA, gpumem::installed, static_cast<uint8_t>(priority));
    return 1;
}

/* Puts an allocator of pinned memory in the place of PyTorch's. The arena of TORCH_PINNED serves it,
   and is made at the first use. A further call only changes whether `unpinned` memory serves requests
   that are refused. */
GPUMEM_EXPORT void gpumem_torch_install_pinned(const TorchCalls *calls, int unpinned) {
    /* Blocks may outlive the interpreter. */
    static auto *pinned = new gpumem::PinnedAllocator(*calls, at::getHostAllocator(c10::kCUDA));
    pinned->set_fallback(unpinned != 0);
    for (int priority = 0; priority == 0 || at::getHostAllocator(c10::kCUDA) != pinned; priority++)
        at::setHostAllocator(c10::kCUDA, pinned, static_cast<uint8_t>(priority));
}
