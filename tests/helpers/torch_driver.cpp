/* Drives PyTorch's current allocator as PyTorch does, through c10's own functions; compiled by the
 * tests against a PyTorch that is unpacked, and called by ctypes. A function returns 0, 1 for an
 * exception or 2 for c10::OutOfMemoryError; what it has to say is the text of `driver_said`. */
#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <unordered_set>

namespace c10::cuda::_internal {
C10_CUDA_API void setHasPrimaryContext(bool (*)(DeviceIndex)); /* ATen's part of CUDA calls it */
}

namespace cca = c10::cuda::CUDACachingAllocator;
using c10::DataPtr;
using c10::MempoolId_t;
using Stream = cudaStream_t;

namespace {

thread_local std::string said;

template <typename Call>
int guarded(Call call) {
    try {
        std::ostringstream text;
        call(text);
        said = text.str();
        return 0;
    } catch (const c10::OutOfMemoryError &error) {
        said = error.what_without_backtrace();
        return 2;
    } catch (const c10::Error &error) {
        said = error.what_without_backtrace();
        return 1;
    } catch (const std::exception &error) {
        said = error.what();
        return 1;
    }
}

DataPtr pointer(void *address) {
    return DataPtr(address, address, cca::get()->raw_deleter(), {c10::kCUDA, 0});
}

MempoolId_t pool(unsigned long long number) { return {0, number}; }

/* A MemPool's own allocator, of host memory; all that it is asked is memory. */
struct Foreign : cca::CUDAAllocator {
    int given = 0, taken = 0;
    void *raw_alloc(size_t nbytes) override {
        given++;
        return std::aligned_alloc(512, (nbytes + 511) / 512 * 512);
    }
    void raw_delete(void *address) override {
        taken++;
        std::free(address);
    }
    [[noreturn]] static void no() { throw std::runtime_error("the foreign allocator was asked"); }
    DataPtr allocate(size_t) override { no(); }
    c10::DeleterFnPtr raw_deleter() const override { no(); }
    void copy_data(void *, const void *, size_t) const override { no(); }
    void *raw_alloc_with_stream(size_t, Stream) override { no(); }
    void init(int) override { no(); }
    bool initialized() override { no(); }
    double getMemoryFraction(c10::DeviceIndex) override { no(); }
    void setMemoryFraction(double, c10::DeviceIndex) override { no(); }
    std::vector<cca::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex) override { no(); }
    void emptyCache(MempoolId_t) override { no(); }
    void enable(bool) override { no(); }
    bool isEnabled() const override { no(); }
    void cacheInfo(c10::DeviceIndex, size_t *) override { no(); }
    void *getBaseAllocation(void *, size_t *) override { no(); }
    void recordStream(const DataPtr &, c10::cuda::CUDAStream) override { no(); }
    cca::DeviceStats getDeviceStats(c10::DeviceIndex) override { no(); }
    void resetAccumulatedStats(c10::DeviceIndex) override { no(); }
    void resetPeakStats(c10::DeviceIndex) override { no(); }
    cca::SnapshotInfo snapshot(MempoolId_t, bool) override { no(); }
    void beginAllocateToPool(c10::DeviceIndex, MempoolId_t, std::function<bool(Stream)>) override { no(); }
    void endAllocateToPool(c10::DeviceIndex, MempoolId_t) override { no(); }
    void releasePool(c10::DeviceIndex, MempoolId_t) override { no(); }
    cca::ShareableHandle shareIpcHandle(void *) override { no(); }
    std::shared_ptr<void> getIpcDevPtr(std::string) override { no(); }
    void recordHistory(bool, cca::CreateContextFn, size_t, cca::RecordContext, bool,
                       const std::vector<std::string> &) override { no(); }
    void attachOutOfMemoryObserver(cca::OutOfMemoryObserver) override { no(); }
    void attachOomRejectionObserver(std::function<void(int64_t, size_t, size_t, size_t)>) { no(); }
    void attachAllocatorTraceTracker(cca::AllocatorTraceTracker) override { no(); }
    void enablePeerAccess(c10::DeviceIndex, c10::DeviceIndex) override { no(); }
    cudaError_t memcpyAsync(void *, int, const void *, int, size_t, Stream, bool) override { no(); }
    std::shared_ptr<cca::AllocatorState> getCheckpointState(c10::DeviceIndex, MempoolId_t) override { no(); }
    cca::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex,
                                                std::shared_ptr<cca::AllocatorState>) override { no(); }
    std::string name() override { return "foreign"; }
};

std::weak_ptr<Foreign> foreign;
int foreign_given, foreign_taken;

struct Stack : c10::GatheredContext {
    explicit Stack(int number) : number(number) {}
    int number;
};
int stacks;
std::shared_ptr<c10::GatheredContext> gather() { return std::make_shared<Stack>(++stacks); }
int stack_of(const std::shared_ptr<c10::GatheredContext> &context) {
    auto *stack = dynamic_cast<Stack *>(context.get());
    return stack ? stack->number : 0;
}

const char *const ACTIONS[] = {"alloc",       "free_requested", "free_completed", "segment_alloc",
                               "segment_free", "segment_map",    "segment_unmap",  "snapshot",
                               "oom"};

template <typename Entry>
std::string json_of(const Entry &entry) {
    std::ostringstream text;
    text << "{\"action\": \"" << ACTIONS[entry.action_] << "\", \"addr\": " << entry.addr_
         << ", \"size\": " << entry.size_ << ", \"pool\": " << entry.mempool_.second
         << ", \"stack\": " << stack_of(entry.context_) << ", \"compiling\": \""
         << entry.compile_context_ << "\", \"metadata\": \"" << entry.user_metadata_
         << "\", \"time\": " << static_cast<long long>(entry.time_.t_) << "}";
    return text.str();
}

std::vector<std::string> tracked;
std::vector<std::string> observed;
std::map<int, std::shared_ptr<cca::AllocatorState>> states;
std::shared_ptr<void> opened; /* another process's block */

struct Profile : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void *, int64_t nbytes, size_t allocated, size_t reserved,
                           c10::Device) override {
        events.push_back("[" + std::to_string(nbytes) + ", " + std::to_string(allocated) + ", " +
                         (reserved >= allocated ? "true" : "false") + "]");
    }
    bool memoryProfilingEnabled() const override { return true; }
    std::vector<std::string> events;
};

std::string joined(const std::vector<std::string> &parts) {
    std::string text = "[";
    for (auto &part : parts) text += (text.size() > 1 ? ", " : "") + part;
    return text + "]";
}

std::string json_of(const c10::CachingAllocator::StatArray &stats) {
    std::vector<std::string> parts;
    for (auto &stat : stats)
        parts.push_back("[" + std::to_string(stat.current) + ", " + std::to_string(stat.peak) + ", " +
                        std::to_string(stat.allocated) + ", " + std::to_string(stat.freed) + "]");
    return joined(parts);
}

/* Current and peak bytes of each pool; null: the release does not count them. */
template <typename Stats>
std::string json_of_pools(const Stats &now) {
    if constexpr (requires { now.reserved_bytes_by_private_pools; }) {
        std::vector<std::string> parts;
        for (auto &[id, stats] : now.reserved_bytes_by_private_pools)
            parts.push_back("[" + std::to_string(id.second) + ", " + std::to_string(stats[0].current) +
                            ", " + std::to_string(stats[0].peak) + "]");
        return joined(parts);
    } else {
        return "null";
    }
}

}  // namespace

extern "C" {

const char *driver_said() { return said.c_str(); }

int driver_start(int devices) {
    return guarded([&](auto &text) {
        c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
        cca::get()->init(devices);
        text << cca::get()->name() << " " << cca::get()->initialized() << " "
             << (c10::GetAllocator(c10::kCUDA) == cca::get());
    });
}

int driver_alloc(size_t nbytes, void **address) {
    return guarded([&](auto &) { *address = cca::get()->allocate(nbytes).release_context(); });
}
int driver_alloc_on(size_t nbytes, Stream stream, void **address) {
    return guarded([&](auto &) { *address = cca::get()->raw_alloc_with_stream(nbytes, stream); });
}
int driver_free(void *address) {
    return guarded([&](auto &) { cca::get()->raw_delete(address); });
}
int driver_record(void *address, Stream stream) {
    return guarded([&](auto &) {
        DataPtr data = pointer(address);
        cca::get()->recordStream(data, c10::cuda::getStreamFromExternal(stream, 0));
        data.release_context();
    });
}
int driver_base(void *address) {
    return guarded([&](auto &text) {
        size_t nbytes = 0;
        text << (cca::get()->getBaseAllocation(address, &nbytes) == address) << " " << nbytes;
    });
}
int driver_empty_cache(unsigned long long number) {
    return guarded([&](auto &) { cca::get()->emptyCache(pool(number)); });
}
int driver_enable(int value) {
    return guarded([&](auto &) { cca::get()->enable(value != 0); });
}
int driver_fraction_now(size_t device) {
    return guarded([&](auto &text) {
        text << cca::get()->getMemoryFraction(static_cast<c10::DeviceIndex>(device));
    });
}
int driver_fraction(double fraction) {
    return guarded([&](auto &text) {
        cca::get()->setMemoryFraction(fraction, 0);
        text << cca::get()->getMemoryFraction(0);
    });
}
int driver_cache_info() {
    return guarded([&](auto &text) {
        size_t largest = 0;
        cca::get()->cacheInfo(0, &largest);
        text << largest;
    });
}

int driver_stats() {
    return guarded([&](auto &text) {
        auto now = cca::get()->getDeviceStats(0);
        text << "{\"allocation\": " << json_of(now.allocation) << ", \"segment\": " << json_of(now.segment)
             << ", \"active\": " << json_of(now.active)
             << ", \"allocated_bytes\": " << json_of(now.allocated_bytes)
             << ", \"reserved_bytes\": " << json_of(now.reserved_bytes)
             << ", \"active_bytes\": " << json_of(now.active_bytes)
             << ", \"inactive_split_bytes\": " << json_of(now.inactive_split_bytes)
             << ", \"requested_bytes\": " << json_of(now.requested_bytes)
             << ", \"pools\": " << json_of_pools(now) << ", \"num_ooms\": " << now.num_ooms
             << ", \"num_alloc_retries\": " << now.num_alloc_retries
             << ", \"num_device_alloc\": " << now.num_device_alloc
             << ", \"num_device_free\": " << now.num_device_free << "}";
    });
}
int driver_reset_peaks() {
    return guarded([&](auto &) { cca::get()->resetPeakStats(0); });
}
int driver_reset_accumulated() {
    return guarded([&](auto &) { cca::get()->resetAccumulatedStats(0); });
}

int driver_begin(unsigned long long number, Stream accepted) {
    return guarded([&](auto &) {
        cca::get()->beginAllocateToPool(0, pool(number),
                                        [accepted](Stream stream) { return stream == accepted; });
    });
}
int driver_end(unsigned long long number) {
    return guarded([&](auto &) { cca::get()->endAllocateToPool(0, pool(number)); });
}
int driver_release(unsigned long long number) {
    return guarded([&](auto &) { cca::get()->releasePool(0, pool(number)); });
}
int driver_use_count(unsigned long long number) {
    return guarded([&](auto &text) { text << cca::get()->getPoolUseCount(0, pool(number)); });
}
/* As MemPool's constructor; `from_elsewhere`: with an allocator of its own. */
int driver_make_pool(unsigned long long number, int from_elsewhere, int when_out, int no_split) {
    return guarded([&](auto &) {
        std::shared_ptr<Foreign> own;
        if (from_elsewhere) {
            own = std::shared_ptr<Foreign>(new Foreign, [](Foreign *self) {
                foreign_given = self->given;
                foreign_taken = self->taken;
                delete self;
            });
            foreign = own;
        }
        cca::get()->createOrIncrefPool(0, pool(number), own);
        if (when_out) cca::get()->setUseOnOOM(0, pool(number), true);
        if (no_split) cca::get()->setNoSplit(0, pool(number));
    });
}
/* How often the last such allocator was asked, and whether it is alive. */
int driver_foreign() {
    return guarded([&](auto &text) {
        auto own = foreign.lock();
        text << "[" << (own ? own->given : foreign_given) << ", " << (own ? own->taken : foreign_taken)
             << ", " << (own ? "true" : "false") << "]";
    });
}
int driver_live(unsigned long long number, void **expected, size_t count) {
    return guarded([&](auto &text) {
        std::unordered_set<void *> addresses(expected, expected + count);
        text << cca::get()->checkPoolLiveAllocations(0, pool(number), addresses);
    });
}
int driver_checkpoint(unsigned long long number, int name) {
    return guarded([&](auto &) { states[name] = cca::get()->getCheckpointState(0, pool(number)); });
}
int driver_restore(int name) {
    return guarded([&](auto &text) {
        auto delta = cca::get()->setCheckpointPoolState(0, states.at(name));
        std::vector<std::string> freed, allocated;
        for (void *address : delta.ptrs_freed)
            freed.push_back(std::to_string(reinterpret_cast<uintptr_t>(address)));
        for (auto &data : delta.dataptrs_allocd) {
            allocated.push_back(std::to_string(reinterpret_cast<uintptr_t>(data.get())));
            data.release_context();
        }
        text << "[" << joined(freed) << ", " << joined(allocated) << "]";
    });
}

int driver_history(int enabled, size_t most, int when, int clear, const char *skipped) {
    return guarded([&](auto &text) {
        std::vector<std::string> skips;
        if (*skipped) skips.push_back(skipped);
        cca::get()->recordHistory(enabled, &gather, most, static_cast<cca::RecordContext>(when), clear,
                                  skips);
        text << cca::get()->isHistoryEnabled();
    });
}
int driver_snapshot(unsigned long long number, int traces) {
    return guarded([&](auto &text) {
        auto info = cca::get()->snapshot(pool(number), traces);
        std::vector<std::string> segments, entries;
        for (auto &segment : info.segments) {
            std::vector<std::string> blocks;
            for (auto &block : segment.blocks)
                blocks.push_back("[" + std::to_string(block.size) + ", " +
                                 std::to_string(block.requested_size) + ", " +
                                 std::to_string(block.allocated + block.active) + ", " +
                                 std::to_string(stack_of(block.context_when_allocated)) + "]");
            segments.push_back("{\"address\": " + std::to_string(segment.address) +
                               ", \"total\": " + std::to_string(segment.total_size) +
                               ", \"allocated\": " + std::to_string(segment.allocated_size) +
                               ", \"active\": " + std::to_string(segment.active_size) +
                               ", \"pool\": " + std::to_string(segment.owner_private_pool_id.second) +
                               ", \"blocks\": " + joined(blocks) + "}");
        }
        if (!info.device_traces.empty())
            for (auto &entry : info.device_traces[0]) entries.push_back(json_of(entry));
        text << "{\"segments\": " << joined(segments) << ", \"traces\": " << joined(entries)
             << ", \"annotations\": " << info.external_annotations.size() << "}";
    });
}
int driver_share(void *address) {
    return guarded([&](auto &text) {
        auto shared = cca::get()->shareIpcHandle(address);
        text << "{\"text\": \"" << shared.handle << "\", \"offset\": " << shared.offset << "}";
    });
}
int driver_open(const char *handle) {
    return guarded([&](auto &text) {
        opened = cca::get()->getIpcDevPtr(handle);
        text << reinterpret_cast<uintptr_t>(opened.get());
    });
}
int driver_close() {
    return guarded([&](auto &) { opened.reset(); });
}
int driver_annotate() {
    return guarded([&](auto &) { cca::get()->recordAnnotation({{"name", "step"}}); });
}
int driver_mark(const char *compiling, const char *metadata) {
    return guarded([&](auto &text) {
        std::string name = compiling;
        if (*compiling)
            cca::get()->pushCompileContext(name);
        else
            cca::get()->popCompileContext();
        cca::get()->setUserMetadata(metadata);
        text << cca::get()->getUserMetadata();
    });
}
int driver_track() {
    return guarded([&](auto &) {
        cca::get()->attachAllocatorTraceTracker(
            [](const cca::TraceEntry &entry) { tracked.push_back(json_of(entry)); });
    });
}
int driver_tracked() {
    return guarded([&](auto &text) {
        text << joined(tracked);
        tracked.clear();
    });
}
int driver_observe() {
    return guarded([&](auto &) {
        cca::get()->attachOutOfMemoryObserver([](int64_t device, size_t nbytes, size_t most, size_t) {
            observed.push_back("[" + std::to_string(device) + ", " + std::to_string(nbytes) + ", " +
                               std::to_string(most) + "]");
        });
    });
}
int driver_observed() {
    return guarded([&](auto &text) { text << joined(observed); });
}
int driver_profiled(size_t nbytes) {
    return guarded([&](auto &text) {
        auto profile = std::make_shared<Profile>();
        {
            c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, profile);
            cca::get()->raw_delete(cca::get()->raw_alloc(nbytes));
        }
        text << joined(profile->events);
    });
}
/* ---- pinned memory ---- */

int driver_pinned_alloc(size_t nbytes, Stream stream, void **context) {
    return guarded([&](auto &text) {
        c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(stream, 0));
        DataPtr data = at::getHostAllocator(c10::kCUDA)->allocate(nbytes);
        text << (data.device().is_cpu() ? reinterpret_cast<uintptr_t>(data.get()) : 1);
        *context = data.release_context();
    });
}
int driver_pinned_free(void *context) {
    return guarded([&](auto &) {
        DataPtr none = at::getHostAllocator(c10::kCUDA)->allocate(0);
        none.get_deleter()(context);
    });
}
int driver_pinned_record(void *address, void *context, Stream stream) {
    return guarded([&](auto &text) {
        auto used_on = c10::cuda::getStreamFromExternal(stream, 0).unwrap();
        text << at::getHostAllocator(c10::kCUDA)->record_event(address, context, used_on);
    });
}
int driver_pinned_empty() {
    return guarded([&](auto &) { at::getHostAllocator(c10::kCUDA)->empty_cache(); });
}
int driver_pinned_stats() {
    return guarded([&](auto &text) {
        auto now = at::getHostAllocator(c10::kCUDA)->get_stats();
        text << "{\"active_requests\": " << json_of({now.active_requests})
             << ", \"active_bytes\": " << json_of({now.active_bytes})
             << ", \"allocations\": " << json_of({now.allocations})
             << ", \"allocated_bytes\": " << json_of({now.allocated_bytes})
             << ", \"num_host_alloc\": " << now.num_host_alloc
             << ", \"num_host_free\": " << now.num_host_free << "}";
    });
}
int driver_pinned_reset() {
    return guarded([&](auto &) {
        at::getHostAllocator(c10::kCUDA)->reset_accumulated_stats();
        at::getHostAllocator(c10::kCUDA)->reset_peak_stats();
    });
}
int driver_pinned_begin(unsigned long long number, Stream accepted) {
    return guarded([&](auto &) {
        at::getHostAllocator(c10::kCUDA)
            ->begin_allocate_to_pool(pool(number), [accepted](c10::Stream stream) {
                return c10::cuda::CUDAStream(stream).stream() == accepted;
            });
    });
}
int driver_pinned_end(unsigned long long number) {
    return guarded([&](auto &) { at::getHostAllocator(c10::kCUDA)->end_allocate_to_pool(pool(number)); });
}
int driver_pinned_release(unsigned long long number) {
    return guarded([&](auto &) { at::getHostAllocator(c10::kCUDA)->release_pool(pool(number)); });
}

int driver_peer(int device, int owner) {
    return guarded([&](auto &) { cca::get()->enablePeerAccess(device, owner); });
}
int driver_copy(void *to, int to_device, const void *from, int from_device, size_t nbytes, Stream stream) {
    return guarded([&](auto &text) {
        text << cca::get()->memcpyAsync(to, to_device, from, from_device, nbytes, stream, false);
    });
}
}
