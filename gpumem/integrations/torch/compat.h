/* The differences between the releases of PyTorch, 2.9 to 2.15.
 *
 * Virtual methods that changed are declared in allocator.cpp once for each signature, without
 * `override`: each overrides the one of the releases that have it, and a pure one that is missing
 * ends the compilation. The other differences are here. TORCH_RELEASE is 211 for 2.11, and comes
 * with the compiler's options.
 */
#ifndef GPUMEM_TORCH_COMPAT_H
#define GPUMEM_TORCH_COMPAT_H

#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/ApproximateClock.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace gpumem {

namespace cca = c10::cuda::CUDACachingAllocator;

using cca::CUDAAllocator;
using cca::RecordContext;
using cca::SnapshotInfo;
using cca::TraceEntry;
using c10::CachingDeviceAllocator::DeviceStats;
using Context = std::shared_ptr<c10::GatheredContext>;
using Annotation = decltype(SnapshotInfo::external_annotations)::value_type;
using Segment = decltype(SnapshotInfo::segments)::value_type;

#if TORCH_RELEASE >= 210
using StreamSegments = std::vector<cca::StreamSegmentSize>;
#else /* PyTorch does not request them */
struct StreamSegment {
    StreamSegment(cudaStream_t, bool, size_t) {}
};
using StreamSegments = std::vector<StreamSegment>;
#endif

/* The last parameter came with 2.10. */
template <typename Entry = TraceEntry>
Entry make_entry(TraceEntry::Action action, int device, size_t address, size_t nbytes,
                 cudaStream_t stream, c10::MempoolId_t pool, Context context,
                 const std::string &compiling, const std::string &metadata) {
    auto now = c10::getApproximateTime();
    auto index = static_cast<c10::DeviceIndex>(device);
    if constexpr (requires(Entry entry) { entry.user_metadata_; })
        return Entry(action, index, address, nbytes, stream, pool, now, std::move(context), compiling,
                     metadata);
    else
        return Entry(action, index, address, nbytes, stream, pool, now, std::move(context), compiling);
}

/* Annotations of a block came with 2.13. */
template <typename Entry = TraceEntry>
std::optional<TraceEntry::Action> annotate_action() {
    if constexpr (requires { Entry::ANNOTATE; })
        return Entry::ANNOTATE;
    else
        return std::nullopt;
}

/* The sums of blocks and regions of pinned memory; their names changed with 2.10. */
template <typename Stats = at::HostStats>
Stats host_stats_of(const DeviceStats &counted) {
    constexpr size_t all = 0;
    Stats stats;
    if constexpr (requires { stats.active_requests; }) {
        stats.active_requests = counted.allocation[all];
        stats.active_bytes = counted.allocated_bytes[all];
        stats.allocations = counted.segment[all];
        stats.allocated_bytes = counted.reserved_bytes[all];
    } else {
        stats.allocation = counted.allocation[all];
        stats.allocated_bytes = counted.allocated_bytes[all];
        stats.segment = counted.segment[all];
        stats.reserved_bytes = counted.reserved_bytes[all];
    }
    stats.num_host_alloc = counted.num_device_alloc;
    stats.num_host_free = counted.num_device_free;
    return stats;
}

/* Names of actions, in the order of their numbers; PyTorch's own table came with 2.10. */
inline std::optional<TraceEntry::Action> action_named(std::string_view name) {
    constexpr std::array<std::string_view, 10> names = {
        "alloc",       "free_requested", "free_completed", "segment_alloc", "segment_free",
        "segment_map", "segment_unmap",  "snapshot",       "oom",           "annotate"};
    for (size_t i = 0; i < names.size(); i++)
        if (names[i] == name) return static_cast<TraceEntry::Action>(i);
    return std::nullopt;
}

}  // namespace gpumem

#endif
