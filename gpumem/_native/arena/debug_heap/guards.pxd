"""Guards and patterns of a debug heap in memory, and its lists, table and findings.

Guards and patterns are written and examined with `turn` held: by the CPU where the memory allows
it, else by the driver's copies, on a stream of the heap's own that waits for no other, so that
nothing here waits for the user's work. Every function returns the driver's code, and has done its
work when it returns.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.debug_heap.types cimport (
    DebugHeap, HeapBlock, HeapFault, HeapFinding, HeapSite, HeapState,
)
from gpumem._native.arena.values cimport HeapCounts
from gpumem._native.driver cimport CUresult, DeviceContext

# Writes the guards, and the fresh pattern between them.
cdef CUresult block_prepare(DebugHeap* heap, DeviceContext* context,
                            const HeapBlock* block) noexcept nogil
# Examines the guards; of a quarantined block also its bytes. NULL in `findings`: no byte is wrong,
# or out of host memory; else a list, and the wrong bytes are restored.
cdef CUresult block_examine(DebugHeap* heap, DeviceContext* context, const HeapBlock* block,
                            HeapFinding** findings) noexcept nogil
# Writes the freed pattern over the user's bytes.
cdef CUresult block_fill_freed(DebugHeap* heap, DeviceContext* context,
                               const HeapBlock* block) noexcept nogil
# Destroys the stream and the staging memory.
cdef void guards_end(DebugHeap* heap, DeviceContext* context) noexcept nogil


# ---- metadata: lists, the table of handles, findings, sites of calls -----------------------------

# Caller holds `lock`. A block's list is that of its state; a block is added at its end.
cdef void list_add(DebugHeap* heap, HeapBlock* block, HeapState state) noexcept nogil
cdef void list_remove(DebugHeap* heap, HeapBlock* block) noexcept nogil
# Caller does not hold `lock`.
cdef HeapBlock* list_first(DebugHeap* heap, HeapState state) noexcept nogil
cdef HeapBlock* list_after(DebugHeap* heap, HeapBlock* block) noexcept nogil

# Caller holds `lock`.
cdef bint table_create(DebugHeap* heap) noexcept nogil
cdef HeapBlock* table_find(DebugHeap* heap, uint64_t handle) noexcept nogil
cdef void table_add(DebugHeap* heap, HeapBlock* block) noexcept nogil
cdef void table_remove(DebugHeap* heap, HeapBlock* block) noexcept nogil

# Reads the sums without a lock.
cdef HeapCounts heap_counts(const DebugHeap* heap) noexcept nogil
# Returns copies of the live blocks, the oldest first, and with `freed` of the other blocks after
# them; the caller frees them. NULL: out of host memory.
cdef HeapBlock* heap_copy(DebugHeap* heap, bint freed, uint64_t* count) noexcept nogil

# Caller holds `lock`. Takes ownership of the finding. NULL: the host had no memory for it.
cdef void note_finding(DebugHeap* heap, HeapFinding* finding) noexcept nogil
# Makes a finding about a call, without an examination of the block's bytes.
cdef HeapFinding* finding_of(const HeapBlock* block, HeapFault fault, uint64_t address,
                             const HeapSite* again) noexcept nogil
# Takes all findings, the oldest first, which the caller frees; `lost`: how many more there were.
cdef HeapFinding* heap_findings(DebugHeap* heap, uint64_t* lost) noexcept nogil

# Caller holds no lock, because this may take the interpreter lock.
cdef void site_here(DebugHeap* heap, HeapSite* site) noexcept nogil
# Counts a call, and returns whether its stack is to be stored.
cdef bint heap_wants_stack(DebugHeap* heap) noexcept nogil
# Sets the number of the interpreter's stack for this thread's next site, while the thread still has
# the interpreter lock; 0 clears it.
cdef void heap_note_stack(uint32_t stack) noexcept nogil
