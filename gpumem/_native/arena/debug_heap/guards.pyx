"""Guards, patterns and metadata of a debug heap."""

from libc.stdint cimport int64_t, uint32_t, uint64_t, uint8_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset

from gpumem._native.arena.debug_heap.types cimport (
    DebugHeap, HEAP_FINDINGS, HEAP_FRAMES, HEAP_FREED, HEAP_LATE_WRITE, HEAP_LIVE, HEAP_NO_STACK,
    HEAP_OVERRUN, HEAP_QUARANTINED, HEAP_SEEN, HEAP_STRAY_WRITE, HEAP_UNDERRUN, HeapBlock,
    HeapFault, HeapFinding, HeapSite, HeapState,
)
from gpumem._native.bfc cimport round_to_quantum
from gpumem._native.driver cimport (
    context_enter, context_leave, context_relax, context_restore, CU_STREAM_NON_BLOCKING,
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUresult, CUstreamCaptureMode, DeviceContext,
)
from gpumem._support.atomics cimport load64, store64, sum_add
from gpumem._support.lock cimport lock_acquire, lock_release


cdef extern from "callers.h" nogil:
    uint32_t callers_of_this(void** frames, uint32_t most)

cdef extern from *:
    """
    #include <pthread.h>
    static _Thread_local uint32_t gm_noted_stack;
    static inline void gm_note_stack(uint32_t stack) { gm_noted_stack = stack; }
    static inline uint32_t gm_take_stack(void) {
        uint32_t stack = gm_noted_stack;
        gm_noted_stack = 0;
        return stack;
    }
    static inline uint64_t gm_thread_now(void) { return (uint64_t)pthread_self(); }
    """
    void gm_note_stack(uint32_t stack) noexcept nogil
    uint32_t gm_take_stack() noexcept nogil
    uint64_t gm_thread_now() noexcept nogil

cdef enum:
    STAGED = 1 << 20        # bytes that come from the device at once
    FIRST_BUCKETS = 64      # of a table; a power of two

# Part of a block that holds one byte value; the offset is from the user's first byte.
cdef struct Pattern:
    int64_t offset
    uint64_t nbytes
    int value               # -1: neither written nor examined
    HeapFault fault         # of a byte that has another value


cdef Pattern front_guard(const DebugHeap* heap, const HeapBlock* block) noexcept nogil:
    return Pattern(-<int64_t>heap.settings.guard, heap.settings.guard, heap.settings.guard_byte,
                   HEAP_UNDERRUN)


cdef Pattern body_pattern(const HeapBlock* block, int value) noexcept nogil:
    # After a free on a stream without order, a write may be legal work of the other stream.
    return Pattern(0, block.requested, value,
                   HEAP_STRAY_WRITE if block.strayed else HEAP_LATE_WRITE)


cdef Pattern rear_guard(const DebugHeap* heap, const HeapBlock* block) noexcept nogil:
    # It begins with the first byte after the user's, so that an overrun by one byte is found, too.
    cdef uint64_t end = round_to_quantum(block.requested) + heap.settings.guard
    return Pattern(block.requested, end - block.requested, heap.settings.guard_byte, HEAP_OVERRUN)


# ---- patterns of a block -------------------------------------------------------------------------

cdef CUresult block_prepare(DebugHeap* heap, DeviceContext* context,
                            const HeapBlock* block) noexcept nogil:
    cdef Pattern patterns[3]
    patterns[0] = front_guard(heap, block)
    patterns[1] = body_pattern(block, heap.settings.fresh_byte)
    patterns[2] = rear_guard(heap, block)
    return fill(heap, context, block.address, patterns, 3)


cdef CUresult block_fill_freed(DebugHeap* heap, DeviceContext* context,
                               const HeapBlock* block) noexcept nogil:
    cdef Pattern body = body_pattern(block, heap.settings.freed_byte)
    return fill(heap, context, block.address, &body, 1)


cdef CUresult block_examine(DebugHeap* heap, DeviceContext* context, const HeapBlock* block,
                            HeapFinding** findings) noexcept nogil:
    cdef Pattern patterns[3]
    cdef CUresult code = CUDA_SUCCESS
    cdef int i
    # The bytes of a live or freed block are the user's: only its guards can be wrong.
    patterns[0] = front_guard(heap, block)
    patterns[1] = rear_guard(heap, block)
    patterns[2] = body_pattern(block,
                               heap.settings.freed_byte if block.state == HEAP_QUARANTINED else -1)
    findings[0] = NULL
    for i in range(3):
        if code == CUDA_SUCCESS and patterns[i].value >= 0 and patterns[i].nbytes != 0:
            code = examine(heap, context, block, &patterns[i], findings)
    return code


cdef CUresult examine(DebugHeap* heap, DeviceContext* context, const HeapBlock* block,
                      const Pattern* pattern, HeapFinding** findings) noexcept nogil:
    cdef HeapFinding found
    cdef CUresult code
    memset(&found, 0, sizeof(found))
    code = scan(heap, context, block.address, pattern, &found)
    if code != CUDA_SUCCESS or found.wrong == 0:
        return code
    found.fault = pattern.fault
    found.block = block[0]
    found.expected = <uint8_t>pattern.value
    add_finding(&found, findings)
    # Restored, so that the next examination finds new writes alone.
    return fill(heap, context, block.address, pattern, 1)


cdef void add_finding(const HeapFinding* found, HeapFinding** findings) noexcept nogil:
    # Out of host memory the finding is lost: the examination itself must not fail.
    cdef HeapFinding* copy = <HeapFinding*>malloc(sizeof(HeapFinding))
    if copy != NULL:
        copy[0] = found[0]
        copy.next = findings[0]
        findings[0] = copy


# ---- filling -------------------------------------------------------------------------------------

cdef CUresult fill(DebugHeap* heap, DeviceContext* context, uint64_t address,
                   const Pattern* patterns, int count) noexcept nogil:
    cdef CUstreamCaptureMode mode
    cdef CUresult code
    cdef int i
    if heap.settings.by_cpu:
        for i in range(count):
            if patterns[i].value >= 0:
                memset(<void*>(address + patterns[i].offset), patterns[i].value, patterns[i].nbytes)
        return CUDA_SUCCESS
    code = begin(heap, context, &mode)
    if code != CUDA_SUCCESS:
        return code
    for i in range(count):
        if code == CUDA_SUCCESS and patterns[i].value >= 0 and patterns[i].nbytes != 0:
            code = context.table.cuMemsetD8Async(address + patterns[i].offset,
                                                 <unsigned char>patterns[i].value,
                                                 patterns[i].nbytes, heap.stream)
    return end(heap, context, mode, code)


# ---- examining -----------------------------------------------------------------------------------

cdef CUresult scan(DebugHeap* heap, DeviceContext* context, uint64_t address,
                   const Pattern* pattern, HeapFinding* found) noexcept nogil:
    cdef CUstreamCaptureMode mode
    cdef CUresult code
    cdef uint64_t done = 0
    cdef uint64_t part
    if heap.settings.by_cpu:
        compare(<const uint8_t*>(address + pattern.offset), pattern.nbytes, pattern.value,
                pattern.offset, found)
        return CUDA_SUCCESS
    code = begin(heap, context, &mode)
    if code != CUDA_SUCCESS:
        return code
    # In parts, so that a block of any size needs one small buffer on the host.
    while code == CUDA_SUCCESS and done < pattern.nbytes:
        part = min(<uint64_t>STAGED, pattern.nbytes - done)
        code = context.table.cuMemcpyDtoHAsync(heap.staging, address + pattern.offset + done, part,
                                               heap.stream)
        if code == CUDA_SUCCESS:
            code = context.table.cuStreamSynchronize(heap.stream)
        if code == CUDA_SUCCESS:
            compare(heap.staging, part, pattern.value, pattern.offset + <int64_t>done, found)
        done += part
    return end(heap, context, mode, code)


cdef void compare(const uint8_t* at, uint64_t nbytes, int value, int64_t offset,
                  HeapFinding* found) noexcept nogil:
    # All bytes are equal if each equals the next: one memcmp finds the usual case.
    cdef uint64_t i
    if at[0] == value and memcmp(at, at + 1, nbytes - 1) == 0:
        return
    for i in range(nbytes):
        if at[i] == value:
            continue
        # The first wrong byte is shown with those after it; of the others only the number.
        if found.wrong == 0:
            found.offset = offset + <int64_t>i
            found.seen_count = <uint32_t>min(<uint64_t>HEAP_SEEN, nbytes - i)
            memcpy(found.seen, at + i, found.seen_count)
        found.wrong += 1


# ---- the heap's own stream -----------------------------------------------------------------------

cdef CUresult begin(DebugHeap* heap, DeviceContext* context,
                    CUstreamCaptureMode* mode) noexcept nogil:
    # Enters the context and makes staging memory and stream; `end` leaves the context. Relaxed,
    # because a capture on another stream of this thread must not be broken by the heap's calls.
    cdef CUresult code = context_enter(context)
    if code != CUDA_SUCCESS:
        return code
    mode[0] = context_relax(context)
    if heap.staging == NULL:
        heap.staging = <uint8_t*>malloc(STAGED)
        if heap.staging == NULL:
            code = CUDA_ERROR_OUT_OF_MEMORY
    if code == CUDA_SUCCESS and heap.stream == NULL:
        code = context.table.cuStreamCreate(&heap.stream, CU_STREAM_NON_BLOCKING)
    if code != CUDA_SUCCESS:
        context_restore(context, mode[0])
        context_leave(context)
    return code


cdef CUresult end(DebugHeap* heap, DeviceContext* context, CUstreamCaptureMode mode,
                  CUresult code) noexcept nogil:
    # It waits also after a failure: no copy may be under way when the caller continues.
    cdef CUresult last = context.table.cuStreamSynchronize(heap.stream)
    context_restore(context, mode)
    context_leave(context)
    return code if code != CUDA_SUCCESS else last


cdef void guards_end(DebugHeap* heap, DeviceContext* context) noexcept nogil:
    free(heap.staging)
    heap.staging = NULL
    if heap.stream != NULL and context_enter(context) == CUDA_SUCCESS:
        context.table.cuStreamDestroy(heap.stream)
        context_leave(context)
    heap.stream = NULL


# ---- the lists -----------------------------------------------------------------------------------

cdef void list_add(DebugHeap* heap, HeapBlock* block, HeapState state) noexcept nogil:
    block.state = state
    block.before = heap.last[<int>state]
    block.after = NULL
    if block.before != NULL:
        block.before.after = block
    else:
        heap.first[<int>state] = block
    heap.last[<int>state] = block
    change_counts(heap, block, 1)


cdef void list_remove(DebugHeap* heap, HeapBlock* block) noexcept nogil:
    if block.before != NULL:
        block.before.after = block.after
    else:
        heap.first[<int>block.state] = block.after
    if block.after != NULL:
        block.after.before = block.before
    else:
        heap.last[<int>block.state] = block.before
    change_counts(heap, block, -1)


cdef void change_counts(DebugHeap* heap, const HeapBlock* block, int64_t by) noexcept nogil:
    # Atomic stores, because reports read the sums without the lock.
    cdef int state = block.state
    store64(&heap.count[state], heap.count[state] + <uint64_t>by)
    store64(&heap.requested[state], heap.requested[state] + <uint64_t>by * block.requested)
    store64(&heap.held[state], heap.held[state] + <uint64_t>by * block.size)


cdef HeapBlock* list_first(DebugHeap* heap, HeapState state) noexcept nogil:
    cdef HeapBlock* block
    lock_acquire(&heap.lock)
    block = heap.first[<int>state]
    lock_release(&heap.lock)
    return block


cdef HeapBlock* list_after(DebugHeap* heap, HeapBlock* block) noexcept nogil:
    cdef HeapBlock* following
    lock_acquire(&heap.lock)
    following = block.after
    lock_release(&heap.lock)
    return following


# ---- the table -----------------------------------------------------------------------------------

cdef inline HeapBlock** bucket_of(DebugHeap* heap, uint64_t handle) noexcept nogil:
    # The factor is 2**64 over the golden ratio (TAOCP 6.4).
    return &heap.table[((handle * <uint64_t>0x9E3779B97F4A7C15) >> 32) & heap.table_mask]


cdef bint table_create(DebugHeap* heap) noexcept nogil:
    heap.table = <HeapBlock**>calloc(FIRST_BUCKETS, sizeof(HeapBlock*))
    heap.table_mask = FIRST_BUCKETS - 1
    return heap.table != NULL


cdef HeapBlock* table_find(DebugHeap* heap, uint64_t handle) noexcept nogil:
    cdef HeapBlock* block = bucket_of(heap, handle)[0]
    while block != NULL and block.handle != handle:
        block = block.chained
    return block


cdef void table_add(DebugHeap* heap, HeapBlock* block) noexcept nogil:
    # At most one live block for each bucket on average; those in quarantine hang here, too.
    if heap.count[<int>HEAP_LIVE] > heap.table_mask:
        enlarge(heap)
    chain(heap, block)


cdef void chain(DebugHeap* heap, HeapBlock* block) noexcept nogil:
    cdef HeapBlock** bucket = bucket_of(heap, block.handle)
    block.chained = bucket[0]
    bucket[0] = block


cdef void table_remove(DebugHeap* heap, HeapBlock* block) noexcept nogil:
    cdef HeapBlock** link = bucket_of(heap, block.handle)
    while link[0] != block:
        link = &link[0].chained
    link[0] = block.chained


cdef void enlarge(DebugHeap* heap) noexcept nogil:
    # Out of host memory the chains grow instead: searches become slower, nothing fails.
    cdef uint64_t buckets = heap.table_mask + 1
    cdef HeapBlock** before = heap.table
    cdef HeapBlock** larger = <HeapBlock**>calloc(4 * buckets, sizeof(HeapBlock*))
    cdef HeapBlock* block
    cdef HeapBlock* following
    cdef uint64_t i
    if larger == NULL:
        return
    heap.table = larger
    heap.table_mask = 4 * buckets - 1
    for i in range(buckets):
        block = before[i]
        while block != NULL:
            following = block.chained
            chain(heap, block)
            block = following
    free(before)


# ---- counting ------------------------------------------------------------------------------------

cdef HeapCounts heap_counts(const DebugHeap* heap) noexcept nogil:
    return HeapCounts(
        load64(&heap.count[<int>HEAP_LIVE]), load64(&heap.requested[<int>HEAP_LIVE]),
        load64(&heap.count[<int>HEAP_FREED]) + load64(&heap.count[<int>HEAP_QUARANTINED]),
        load64(&heap.held[<int>HEAP_FREED]) + load64(&heap.held[<int>HEAP_QUARANTINED]))


cdef HeapBlock* heap_copy(DebugHeap* heap, bint freed, uint64_t* count) noexcept nogil:
    cdef int last = HEAP_QUARANTINED if freed else HEAP_LIVE
    cdef uint64_t most = 1
    cdef HeapBlock* copies
    cdef HeapBlock* block
    cdef int state
    count[0] = 0
    # Counted and copied under one lock, so that both agree.
    lock_acquire(&heap.lock)
    for state in range(last + 1):
        most += heap.count[state]
    copies = <HeapBlock*>malloc(most * sizeof(HeapBlock))
    for state in range(last + 1):
        block = heap.first[state] if copies != NULL else NULL
        while block != NULL:
            copies[count[0]] = block[0]
            count[0] += 1
            block = block.after
    lock_release(&heap.lock)
    return copies


# ---- findings and where calls came from ----------------------------------------------------------

cdef void note_finding(DebugHeap* heap, HeapFinding* finding) noexcept nogil:
    # The first findings are the useful ones: above the limit new ones are only counted.
    if finding == NULL or heap.finding_count == HEAP_FINDINGS:
        heap.lost_findings += 1
        free(finding)
        return
    finding.next = NULL
    if heap.findings == NULL:
        heap.findings = finding
    else:
        heap.last_finding.next = finding
    heap.last_finding = finding
    heap.finding_count += 1


cdef HeapFinding* finding_of(const HeapBlock* block, HeapFault fault, uint64_t address,
                             const HeapSite* again) noexcept nogil:
    cdef HeapFinding* finding = <HeapFinding*>calloc(1, sizeof(HeapFinding))
    if finding != NULL:
        finding.fault = fault
        finding.block = block[0]
        finding.address = address
        finding.again = again[0]
    return finding


cdef HeapFinding* heap_findings(DebugHeap* heap, uint64_t* lost) noexcept nogil:
    cdef HeapFinding* findings
    lock_acquire(&heap.lock)
    findings = heap.findings
    lost[0] = heap.lost_findings
    heap.findings = heap.last_finding = NULL
    heap.finding_count = 0
    heap.lost_findings = 0
    lock_release(&heap.lock)
    return findings


cdef bint heap_wants_stack(DebugHeap* heap) noexcept nogil:
    return (heap.settings.stack_depth != 0
            and sum_add(&heap.sites, 1) % heap.settings.stack_every == 0)


cdef void heap_note_stack(uint32_t stack) noexcept nogil:
    gm_note_stack(stack)


cdef void site_here(DebugHeap* heap, HeapSite* site) noexcept nogil:
    # The stack that Python noted comes first, then the interpreter's, if this call is sampled. A
    # thread without one stores the return addresses of its C functions.
    memset(site, 0, sizeof(HeapSite))
    site.thread = gm_thread_now()
    site.stack = gm_take_stack()
    if site.stack == 0:
        site.stack = (heap.hooks.stack(heap.settings.stack_depth) if heap_wants_stack(heap)
                      else <uint32_t>HEAP_NO_STACK)
    if site.stack == 0:
        site.depth = callers_of_this(site.frames, HEAP_FRAMES)
    elif site.stack == HEAP_NO_STACK:
        site.stack = 0
