/* The timed loops: one allocator, one list of steps prepared beforehand. */
#include "subject.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace {

uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

#if defined(__x86_64__)
uint64_t ticks() {
    unsigned auxiliary;
    uint64_t stamp = __builtin_ia32_rdtscp(&auxiliary);
    __builtin_ia32_lfence();
    return stamp;
}
#else
uint64_t ticks() { return now_ns(); }
#endif

/* Nanoseconds per tick, over 20 ms. */
double tick_ns() {
    uint64_t begin = now_ns(), first = ticks();
    while (now_ns() - begin < 20000000u) {}
    uint64_t last = ticks(), end = now_ns();
    return static_cast<double>(end - begin) / static_cast<double>(last - first);
}

/* The time between two stamps with nothing between them. */
uint64_t stamp_cost() {
    std::vector<uint64_t> seen;
    for (int i = 0; i < 1001; i++) {
        uint64_t first = ticks();
        seen.push_back(ticks() - first);
    }
    std::sort(seen.begin(), seen.end());
    return seen[seen.size() / 2];
}

/* On the CPU of this number among those that the process may use: for tens of milliseconds, longer
 * than a run, the kernel lets new threads share one. */
void stay_on_cpu(int number) {
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    number %= CPU_COUNT(&allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &allowed) || number-- != 0) continue;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        pthread_setaffinity_np(pthread_self(), sizeof one, &one);
    }
}

/* Between two threads, as fast as memory allows: a power of two of handles. */
struct Ring {
    static constexpr uint64_t SIZE = 1024;
    uint64_t slots[SIZE];
    alignas(64) std::atomic<uint64_t> written{0};
    alignas(64) std::atomic<uint64_t> read{0};
};

} // namespace

uint64_t run_pairs(const Subject *subject, uint64_t *handles, const Step *steps, size_t count,
                   uint32_t stream) {
    uint64_t begin = now_ns();
    for (size_t i = 0; i < count; i++) {
        uint64_t &handle = handles[steps[i].slot];
        if (handle != FAILED) subject->release(subject->state, handle, stream);
        handle = subject->allocate(subject->state, steps[i].size, stream);
        if (handle == FAILED) return 0;
    }
    return now_ns() - begin;
}

bool run_latencies(const Subject *subject, uint64_t *handles, const Step *steps, size_t count,
                   uint32_t stream, float *free_ns, float *allocate_ns) {
    double scale = tick_ns();
    uint64_t own = stamp_cost();
    auto cost = [&](uint64_t begin, uint64_t end) {
        return static_cast<float>(scale * static_cast<double>(std::max(end - begin, own) - own));
    };
    for (size_t i = 0; i < count; i++) {
        uint64_t &handle = handles[steps[i].slot];
        uint64_t first = ticks();
        subject->release(subject->state, handle, stream);
        uint64_t second = ticks();
        handle = subject->allocate(subject->state, steps[i].size, stream);
        uint64_t third = ticks();
        if (handle == FAILED) return false;
        free_ns[i] = cost(first, second);
        allocate_ns[i] = cost(second, third);
    }
    return true;
}

uint64_t run_threads(const Subject *const *subjects, uint64_t **handles, const Step *const *steps,
                     size_t count, const uint32_t *streams, int threads) {
    std::atomic<int> ready{0};
    std::vector<uint64_t> spent(threads);
    auto work = [&](int number) {
        stay_on_cpu(number);
        ready++;
        while (ready.load() < threads) std::this_thread::yield();
        spent[number] = run_pairs(subjects[number], handles[number], steps[number], count,
                                  streams[number]);
    };
    std::vector<std::thread> others;
    for (int number = 0; number < threads; number++) others.emplace_back(work, number);
    for (std::thread &thread : others) thread.join();
    uint64_t sum = 0;
    for (uint64_t one : spent) {
        if (one == 0) return 0;
        sum += one;
    }
    return sum / static_cast<uint64_t>(threads);
}

uint64_t run_handoff(const Subject *subject, const Step *steps, size_t count, uint32_t stream) {
    Ring ring;
    std::atomic<bool> failed{false};
    uint64_t begin = now_ns();
    std::thread consumer([&] {
        for (uint64_t at = 0; at < count; at++) {
            while (ring.written.load(std::memory_order_acquire) <= at) {
                if (failed.load()) return;
                std::this_thread::yield();
            }
            subject->release(subject->state, ring.slots[at % Ring::SIZE], stream);
            ring.read.store(at + 1, std::memory_order_release);
        }
    });
    for (uint64_t at = 0; at < count && !failed.load(); at++) {
        uint64_t handle = subject->allocate(subject->state, steps[at].size, stream);
        if (handle == FAILED) {
            failed = true;
            break;
        }
        while (at - ring.read.load(std::memory_order_acquire) >= Ring::SIZE)
            std::this_thread::yield();
        ring.slots[at % Ring::SIZE] = handle;
        ring.written.store(at + 1, std::memory_order_release);
    }
    consumer.join();
    return failed ? 0 : now_ns() - begin;
}
