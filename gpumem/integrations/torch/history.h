/* Memory history: trace entries for PyTorch's snapshots and for trackers. */
#ifndef GPUMEM_TORCH_HISTORY_H
#define GPUMEM_TORCH_HISTORY_H

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <stack>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "compat.h"
#include "hooks.h"

namespace gpumem {

/* Every block and free piece now. */
inline std::vector<TorchBlock> blocks_now(const TorchCalls &calls) {
    size_t count = 0;
    std::unique_ptr<TorchBlock, decltype(&std::free)> found(calls.blocks(&count), &std::free);
    TORCH_CHECK(found || count == 0, "gpumem: out of host memory for a snapshot");
    return {found.get(), found.get() + count};
}

inline c10::MempoolId_t pool_of(const TorchBlock &block) { return {block.pool[0], block.pool[1]}; }
inline cudaStream_t stream_of(const TorchBlock &block) {
    return reinterpret_cast<cudaStream_t>(block.stream);
}

class History {
   public:
    using Tracker = cca::AllocatorTraceTracker;

    explicit History(const TorchCalls &calls) : calls_(calls) {}

    /* Whether blocks are recorded or tracked: the only check of an allocation. */
    bool is_watched() const { return watched_.load(std::memory_order_relaxed); }
    bool is_recording() const { return recording_.load(std::memory_order_relaxed); }

    void record(bool enabled, cca::CreateContextFn recorder, size_t max_entries, RecordContext when,
                bool clear, const std::vector<std::string> &skipped) {
        TORCH_CHECK(when == RecordContext::NEVER || recorder, "gpumem: no function gathers stacks");
        std::set<TraceEntry::Action> skips;
        for (auto &name : skipped)
            skips.insert(c10::CachingDeviceAllocator::parseTraceEntryAction(name));
        std::lock_guard<std::mutex> lock(mutex_);
        skips_ = std::move(skips);
        max_entries_ = std::max<size_t>(1, max_entries);
        recorder_.store(enabled ? recorder : nullptr);
        when_.store(enabled ? when : RecordContext::NEVER);
        if (!enabled || clear) {
            traces_.clear();
            annotations_.clear();
        }
        if (!enabled) contexts_.clear();
        recording_.store(enabled);
        watch();
    }

    void track(Tracker tracker) {
        std::lock_guard<std::mutex> lock(mutex_);
        trackers_.push_back(std::move(tracker));
        watch();
    }

    /* The caller's stack, if stacks are recorded. It may acquire the interpreter lock, which comes
       before the lock of the history. */
    Context gather(RecordContext least) const {
        auto recorder = recorder_.load();
        return recorder && when_.load() >= least ? recorder() : nullptr;
    }

    void allocated(const TorchBlock &block) {
        Context context = gather(RecordContext::STATE);
        std::lock_guard<std::mutex> lock(mutex_);
        note_segments(context);
        if (context) contexts_[block.address] = context;
        note(TraceEntry::ALLOC, block, std::move(context));
    }

    /* Before the free: the next owner's entry comes after it. */
    void freeing(const TorchBlock &block) {
        Context context = gather(RecordContext::ALL);
        std::lock_guard<std::mutex> lock(mutex_);
        auto found = contexts_.find(block.address);
        if (found != contexts_.end()) {
            if (!context) context = std::move(found->second);
            contexts_.erase(found);
        }
        note(TraceEntry::FREE_REQUESTED, block, context);
        note(TraceEntry::FREE_COMPLETED, block, std::move(context));
    }

    void out_of_memory(int device, size_t nbytes, cudaStream_t stream, size_t device_free) {
        Context context = gather(RecordContext::ALL);
        std::lock_guard<std::mutex> lock(mutex_);
        note(TraceEntry::OOM, device, device_free, nbytes, stream, {0, 0}, std::move(context));
    }

    void memory_changed() {
        if (!is_watched()) return;
        Context context = gather(RecordContext::ALL);
        std::lock_guard<std::mutex> lock(mutex_);
        note_segments(context);
    }

    void annotate(int device, const std::vector<std::pair<std::string, std::string>> &pairs) {
        if (!is_recording()) return;
        Annotation annotation(static_cast<c10::DeviceIndex>(device), c10::getApproximateTime());
        for (auto &[name, value] : pairs) annotation.recordUserMetadata(name, value);
        std::lock_guard<std::mutex> lock(mutex_);
        annotations_.push_back(std::move(annotation));
        if (annotations_.size() > max_entries_) annotations_.pop_front();
    }

    void annotate_block(const TorchBlock &block, const std::string &text) {
        auto action = annotate_action();
        if (!action || !is_recording()) return;
        Context context = gather(RecordContext::ALLOC);
        std::lock_guard<std::mutex> lock(mutex_);
        note(*action, block, std::move(context), &text);
    }

    Context context_of(uint64_t address) {
        std::lock_guard<std::mutex> lock(mutex_);
        auto found = contexts_.find(address);
        return found == contexts_.end() ? nullptr : found->second;
    }

    /* Adds the recorded entries to a snapshot, in Unix time. */
    void copy_to(SnapshotInfo &info, int devices) {
        auto nanoseconds = clock_.makeConverter();
        std::lock_guard<std::mutex> lock(mutex_);
        info.device_traces.resize(devices);
        for (int device = 0; device < devices; device++) {
            auto &kept = traces_[device];
            auto &copied = info.device_traces[device];
            copied.assign(kept.begin(), kept.end());
            for (auto &entry : copied)
                entry.time_.t_ = nanoseconds(entry.time_.approx_t_) / 1000;
            /* Of this snapshot, for later ones. */
            note(TraceEntry::SNAPSHOT, device, 0, 0, nullptr, {0, 0}, nullptr);
        }
        for (auto annotation : annotations_) {
            annotation.time_.t_ = nanoseconds(annotation.time_.approx_t_) / 1000;
            info.external_annotations.push_back(std::move(annotation));
        }
    }

    /* Of the calling thread; entries carry both. */
    static std::stack<std::string> &compiling() {
        static thread_local std::stack<std::string> names;
        return names;
    }
    static std::string &metadata() {
        static thread_local std::string text;
        return text;
    }

   private:
    /* A piece of a segment, [begin, end), and its pool. */
    using Owner = std::tuple<int, c10::MempoolId_t, bool>;
    using Piece = std::pair<uint64_t, uint64_t>;
    using Pieces = std::map<Owner, std::vector<Piece>>;

    void watch() {
        bool before = watched_.exchange(is_recording() || !trackers_.empty());
        if (!before && is_watched()) { /* segments of before make no entries */
            changes_ = calls_.changes();
            pieces_ = pieces_now();
        }
    }

    void note(TraceEntry::Action action, const TorchBlock &block, Context context,
              const std::string *text = nullptr) {
        note(action, block.device, block.address, block.requested, stream_of(block), pool_of(block),
             std::move(context), text);
    }

    void note(TraceEntry::Action action, int device, size_t address, size_t nbytes,
              cudaStream_t stream, c10::MempoolId_t pool, Context context,
              const std::string *text = nullptr) {
        if (when_.load() < RecordContext::ALLOC) context = nullptr;
        TraceEntry entry(action, static_cast<c10::DeviceIndex>(device), address, nbytes, stream, pool,
                         c10::getApproximateTime(), std::move(context),
                         compiling().empty() ? "N/A" : compiling().top(), text ? *text : metadata());
        for (auto &tracker : trackers_) tracker(entry);
        if (!is_recording() || skips_.count(action)) return;
        auto &kept = traces_[device];
        kept.push_back(std::move(entry));
        if (kept.size() > max_entries_) kept.pop_front();
    }

    /* Compares the segments with those of before, if any memory has come or gone since. */
    void note_segments(const Context &context) {
        uint64_t changes = calls_.changes();
        if (changes == changes_) return;
        changes_ = changes;
        Pieces before = std::move(pieces_);
        pieces_ = pieces_now();
        for (auto &[owner, old] : before)
            note_pieces(owner, without(old, pieces_[owner]), TraceEntry::SEGMENT_FREE,
                        TraceEntry::SEGMENT_UNMAP, context);
        for (auto &[owner, now] : pieces_)
            note_pieces(owner, without(now, before[owner]), TraceEntry::SEGMENT_ALLOC,
                        TraceEntry::SEGMENT_MAP, context);
    }

    void note_pieces(const Owner &owner, const std::vector<Piece> &pieces, TraceEntry::Action whole,
                     TraceEntry::Action mapped, const Context &context) {
        auto [device, pool, is_expandable] = owner;
        for (auto [begin, end] : pieces)
            note(is_expandable ? mapped : whole, device, begin, end - begin, nullptr, pool,
                 context);
    }

    Pieces pieces_now() const {
        Pieces pieces;
        const TorchBlock *last = nullptr;
        std::vector<TorchBlock> blocks = blocks_now(calls_);
        for (auto &block : blocks) {
            auto &own = pieces[Owner{block.device, pool_of(block), block.is_expandable != 0}];
            if (last && last->segment == block.segment)
                own.back().second += block.size;
            else
                own.emplace_back(block.address, block.address + block.size);
            last = &block;
        }
        for (auto &[owner, own] : pieces) std::sort(own.begin(), own.end());
        return pieces;
    }

    /* The parts of some sorted pieces that lie in none of others. */
    static std::vector<Piece> without(const std::vector<Piece> &some, const std::vector<Piece> &others) {
        std::vector<Piece> left;
        size_t first = 0;
        for (auto [begin, end] : some) {
            while (first < others.size() && others[first].second <= begin) first++;
            for (size_t i = first; i < others.size() && others[i].first < end; i++) {
                if (others[i].first > begin) left.emplace_back(begin, others[i].first);
                begin = std::max(begin, others[i].second);
            }
            if (begin < end) left.emplace_back(begin, end);
        }
        return left;
    }

    const TorchCalls &calls_;
    c10::ApproximateClockToUnixTimeConverter clock_;
    std::atomic<bool> watched_{false};
    std::atomic<bool> recording_{false};
    std::atomic<cca::CreateContextFn> recorder_{nullptr};
    std::atomic<RecordContext> when_{RecordContext::NEVER};

    std::mutex mutex_; /* of all below */
    std::vector<Tracker> trackers_;
    std::set<TraceEntry::Action> skips_;
    size_t max_entries_ = 1; /* entries of each device, and annotations */
    std::map<int, std::deque<TraceEntry>> traces_;
    std::deque<Annotation> annotations_;
    std::unordered_map<uint64_t, Context> contexts_; /* of live blocks, by address */
    uint64_t changes_ = 0;
    Pieces pieces_;
};

}  // namespace gpumem

#endif
