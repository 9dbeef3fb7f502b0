/* The differences between the releases of PyTorch, 2.11 to 2.15.
 *
 * Virtual methods that changed are declared in allocator.cpp once for each signature, without
 * `override`: each overrides the one of the releases that have it, and a pure one that is missing
 * ends the compilation. The other differences are here.
 */
#ifndef GPUMEM_TORCH_COMPAT_H
#define GPUMEM_TORCH_COMPAT_H

#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/ApproximateClock.h>

#include <memory>
#include <optional>
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
using StreamSegments = std::vector<cca::StreamSegmentSize>;

/* Annotations of a block came with 2.13. */
template <typename Entry = TraceEntry>
std::optional<TraceEntry::Action> annotate_action() {
    if constexpr (requires { Entry::ANNOTATE; })
        return Entry::ANNOTATE;
    else
        return std::nullopt;
}

}  // namespace gpumem

#endif
