"""Best fit with coalescing over address ranges: the data structure and its invariants.

It deals with addresses and sizes, without Python objects, driver calls or locks. The caller locks.

A *region* is one range of addresses from the backing. It is cut without gap or overlap into
*chunks*, each wholly free or wholly used, linked in address order. Free chunks hang in the
*bins* of a *stream slot*. Each stream has a slot; slot 0 is for memory that any stream may use:

    never used by a stream, or released      slot 0
    owned by stream s (used)                 in no bin
    freed while s may still have work on it  slot s, stamped with the epoch of s at the free

An *epoch* of a stream ends when an event is recorded on it. `completed` of a slot is the last
epoch with an event that is known to have completed: chunks up to it are in slot 0, so that the
epoch of a free chunk in slot s is later. Marks are slot numbers, never pointers to streams.

Search (after TLSF: M. Masmano, I. Ripoll, A. Crespo, J. Real, ECRTS 2004, with a bounded best
fit in front): sizes fall into two-level bins, 32 linear steps per power of two, so every
bin above the request's own fits. The search reads at most SCAN_LIMIT chunks of the request's own
bin and takes the smallest that fits; else two bit scans find the next filled bin. No loop in
allocate or free runs over more than SCAN_LIMIT chunks, or PACK_LIMIT bins where the table packs. A
freed chunk merges with its neighbours at once. Where several streams free into a table, two free
chunks may lie side by side: a stamped chunk merges only with released ones that are no larger.

A table that *packs* takes for blocks above PACK_BYTES the lowest of the heads of the PACK_LIMIT
smallest bins with heads that fit: long-lived blocks gather at low addresses, and free memory above
them stays in one piece (serving with caches that grow, nothing moved: 1.05 of the requested bytes
instead of 1.19). The head of a bin lies below all chunks that were freed into the bin since, and
the bins store the places of their heads, so that no other chunk is read. While other streams hold
unfinished memory, the table takes the smallest chunk instead: blocks of several streams side by
side keep their free memory from merging. A table that *mixes* packs nevertheless: its streams may
allocate unfinished memory of others, after a wait on the device.

A small block may stay in a thread's cache (arena/thread_cache) after its free: its chunk is then
*cached*. In the table it is still used; it counts in `in_use`, and only the cache's owner changes
it.

Chunks live in one array that grows without moving and are named by index: a link is four bytes,
and a cache may turn an index into a pointer without the lock.
"""

from libc.stdint cimport uint16_t, uint32_t, uint64_t, uint8_t

from gpumem._support.atomics cimport load32, load8
from gpumem._support.memory cimport LineStart

cdef enum:
    NIL = 0xFFFFFFFF        # no chunk, no region, no stream slot
    QUANTUM_BITS = 8        # sizes and addresses are multiples of 256 bytes
    QUANTUM = 256
    STEP_BITS = 5           # linear steps per power of two: 32, so a bin spans 1/32 of its size
    STEPS = 32
    LEVELS = 36             # sizes below 2**48 bytes
    BINS = 1152             # LEVELS * STEPS
    SCAN_LIMIT = 8          # chunks read in one bin
    PACK_LIMIT = 10         # bins that a table that packs searches for the lowest head
    PLACE_BITS = 17         # a place is a step of 128 KiB
    PACK_BYTES = 65536      # blocks of at most that size are not packed
    NEARLY_BITS = 8         # SPLIT_EXACT: a chunk larger than a request by 1/256 is nearly as large
    SWAP_BYTES = 2097152    # MIN: from that size on a block may take a place that swaps fill
    SWAP_SKIPS = 3          # searches for such a place that are left out after one that found none,
    SWAP_PARTS = 50         # for blocks below this part of the bytes in use
    SLOT_RELEASED = 0       # free for any stream
    MAX_CHUNKS = 33554432   # of one table; 1.5 GiB of reserved addresses

cdef enum:
    # Bytes: more than any machine has or a bin holds, and sums of such sizes do not overflow.
    ABSURD = 281474976710656
    MAX_BYTES = 281474976710400    # of a block: rounded up to a quantum it is not absurd yet

cdef enum ChunkState:
    CHUNK_UNUSED = 0        # a slot of the array that names no memory
    CHUNK_FREE = 1
    CHUNK_USED = 2
    CHUNK_CACHED = 3        # used in the table, and in a thread's cache
    CHUNK_PENDING_FREE = 5  # freed, but other streams still use it, see bfc/table
    CHUNK_HOLE = 4          # address space without memory, see bfc/holes; never found or merged

cdef enum SplitRule:
    SPLIT_TIGHT = 0         # split off any remainder of at least one quantum
    SPLIT_ORT = 1           # ONNX Runtime: if the chunk is twice the request or wastes max_dead
    SPLIT_NEVER = 2         # a block is the whole chunk
    SPLIT_EXACT = 3         # the same, and it exceeds the request by little: see wastes_too_much

cdef enum BfcStatus:
    BFC_OK = 0
    BFC_NO_METADATA = 1     # out of host memory for metadata; nothing changed
    BFC_STALE = 2           # the handle's block was freed
    BFC_MAY_SWAP = 3        # a chunk would be split, and swaps may fill a place below it

cdef enum:
    ANY_EPOCH = -1          # as unsigned, later than every epoch

cdef extern from *:
    """
    #include <stdint.h>
    typedef struct {
        uint64_t address, size;
        uint32_t prev, next, generation;
        uint16_t stream_slot;
        uint8_t state, persistent;
        union { uint64_t requested, epoch; };
        uint32_t bin_prev, bin_next;
    } Chunk;
    """
    # 48 bytes. A used chunk has requested bytes, any other one an epoch: the two share a word.
    # Fields that are read of a neighbour come before those that are read for the chunk alone.
    ctypedef struct Chunk:
        uint64_t address        # of the first byte
        uint64_t size           # bytes, a multiple of QUANTUM
        uint32_t prev           # neighbours by address, same region; NIL at its ends
        uint32_t next           # (unused slot: next unused slot)
        uint32_t generation     # +1 at each allocation, so that an old handle is stale
        uint16_t stream_slot    # free: the slot that has it in its bins. used: of its stream
        uint8_t state           # ChunkState; see state_of
        uint8_t persistent      # the one chunk of a persistent region
        uint64_t requested      # used: the requested bytes
        uint64_t epoch          # else: the epoch of its stream at the free; 0 in slot 0
        # Free: neighbours in the bin. Used: both hold the address of the cache that it returns to,
        # see gm_home. Cached: the bytes that still count as requested; the next of the stack.
        uint32_t bin_prev
        uint32_t bin_next

cdef struct Region:
    uint64_t address
    uint64_t size           # bytes; == sum of its chunks, holes too; 0: this slot is unused
    uint32_t first          # chunk at `address`
    uint32_t id             # ordinal of its reservation, for reports
    bint persistent         # holds exactly one block of its own, never searched, never shrunk
    bint is_range           # reserved address space of chunks and holes, backed by pages

# The bins of one stream slot: bit f of `levels` is set iff steps[f] != 0, bit s of steps[f] iff
# head[f * STEPS + s] != NIL. free_bytes == sum of the sizes that hang here.
cdef struct StreamBins:
    # Every operation changes these, which share a cache line with the steps of sizes below 256 KiB.
    uint64_t levels
    uint64_t free_bytes
    uint64_t free_chunks
    uint64_t completed      # epochs up to this one have completed
    uint64_t behind         # during a plan: it may use epochs up to this one, and wait; else 0
    uint32_t steps[LEVELS + 1]      # the last is 0: a search may read one level more
    uint32_t head[BINS]
    uint32_t place[BINS]            # place_of the head, so that a search need not read it

# Fields that are read without the lock come first; those that every operation changes follow in
# other cache lines.
cdef struct Bfc:
    Chunk* chunks           # max_chunks reserved, capacity usable; the first count were ever used
    uint32_t count
    uint32_t capacity
    Region* regions
    uint32_t region_count   # slots ever used
    uint32_t region_capacity
    uint32_t regions_live
    uint32_t next_region_id
    StreamBins** bins       # stream_slot_count pointers, so that bins never move
    uint32_t stream_slot_count
    uint32_t holes          # head of the list of holes
    SplitRule split_rule
    uint32_t max_chunks     # MAX_CHUNKS, or fewer under a limit on addresses (RLIMIT_AS)
    # SPLIT_ORT: bytes. SPLIT_EXACT: bytes that the next blocks together may leave unused.
    uint64_t max_dead
    bint merge_released     # a chunk of slot 0 may join its neighbour's slot
    bint shared             # several streams have freed blocks: may_spread
    bint packs              # takes the lowest of the smallest for large blocks
    bint mixes              # also while other streams hold unfinished memory
    uint64_t swaps_from     # address of the lowest hole that a swap of pages may fill; -1: none
    uint64_t swapless       # bytes from which the last search found no place that swaps fill
    uint64_t swaps_skipped  # searches left out since
    LineStart of_changes
    uint32_t unused         # head of the list of unused slots
    uint32_t bins_filled    # slots, except slot 0, that have free chunks
    # Sums that bfc_check recomputes; used here means used or cached.
    uint64_t in_use         # bytes of used chunks, padding included
    uint64_t requested_in_use   # without the changes of caches that have not been flushed
    uint64_t reserved       # bytes of all chunks but holes
    uint64_t used_chunks
    uint64_t pending_free_chunks

cdef extern from *:
    """
    static inline int gm_low_bit32(uint32_t word) { return __builtin_ctz(word); }
    static inline int gm_low_bit64(uint64_t word) { return __builtin_ctzll(word); }
    static inline int gm_high_bit64(uint64_t word) { return 63 - __builtin_clzll(word); }
    /* The address need not be mapped. */
    static inline void gm_prefetch(const void *at) { __builtin_prefetch(at, 1); }
    """
    int gm_low_bit32(uint32_t word) noexcept nogil
    int gm_low_bit64(uint64_t word) noexcept nogil
    int gm_high_bit64(uint64_t word) noexcept nogil
    void gm_prefetch(const void* at) noexcept nogil

cdef inline uint32_t place_of(const Chunk* chunk) noexcept nogil:
    # Returns the step that it begins in; below NIL, since addresses have less than 49 bits.
    return <uint32_t>(chunk.address >> PLACE_BITS)

cdef inline uint64_t round_to_quantum(uint64_t size) noexcept nogil:
    return (size + (QUANTUM - 1)) & ~<uint64_t>(QUANTUM - 1)

cdef inline uint32_t state_of(const Bfc* table, uint32_t index) noexcept nogil:
    # Its owner may change a chunk from used to cached, and back, without the lock.
    return load8(&table.chunks[index].state)

cdef inline bint packs_low(const Bfc* table, uint64_t size, uint32_t stream_slot) noexcept nogil:
    # Whether such a block for this slot goes to a low place: no other stream has unfinished memory.
    return (size > PACK_BYTES and table.packs
            and (table.bins_filled <= (table.bins[stream_slot].levels != 0) or table.mixes))

# Changes of state that the slow paths over address ranges share (bfc/holes).
# Makes enough unused slots that `count` cuts cannot fail. False: out of host memory.
cdef bint slots_ready(Bfc* table, uint32_t count) noexcept nogil
cdef uint32_t slot_allocate(Bfc* table) noexcept nogil
cdef void bin_insert(Bfc* table, uint32_t index) noexcept nogil
cdef void bin_remove(Bfc* table, uint32_t index) noexcept nogil
cdef void chunk_allocate(Bfc* table, uint32_t index, uint64_t requested,
                         uint32_t stream_slot) noexcept nogil
cdef void chunk_free(Bfc* table, uint32_t index, uint32_t stream_slot,
                     uint64_t epoch) noexcept nogil
# Marks a chunk with the stream and epoch of its free; with none if the epoch has completed since.
cdef void chunk_mark(Bfc* table, uint32_t index, uint32_t stream_slot,
                     uint64_t epoch) noexcept nogil
# Cuts a chunk that is in no list after `size` bytes; returns the remainder, which is free with the
# same mark, and in no bin. A slot is ready.
cdef uint32_t chunk_cut(Bfc* table, uint32_t index, uint64_t size) noexcept nogil
cdef void chunk_absorb(Bfc* table, uint32_t index, uint32_t other) noexcept nogil
cdef uint32_t chunk_coalesce(Bfc* table, uint32_t index) noexcept nogil

cdef inline uint64_t handle_of(const Bfc* table, uint32_t index) noexcept nogil:
    return (<uint64_t>table.chunks[index].generation << 32) | index

cdef inline uint32_t bin_of(uint64_t size) noexcept nogil:
    # Level 0 has exact sizes; each further one has 32 linear steps of a power of two. The top bit
    # of `quanta` counts as a level: it stands above the step.
    cdef uint64_t quanta = size >> QUANTUM_BITS
    cdef int shift = gm_high_bit64(quanta | STEPS) - STEP_BITS
    return (shift << STEP_BITS) + <uint32_t>(quanta >> shift)

cdef inline uint32_t bin_from(const StreamBins* bins, uint32_t bin) noexcept nogil:
    # Returns the first filled bin from this one on, which may be one past the last; NIL: none.
    cdef uint32_t level = bin >> STEP_BITS
    cdef uint32_t steps = bins.steps[level] >> (bin & (STEPS - 1))
    cdef uint64_t levels
    if steps != 0:
        return bin + gm_low_bit32(steps)
    levels = bins.levels & <uint64_t>-2 << level
    if levels == 0:
        return NIL
    level = <uint32_t>gm_low_bit64(levels)
    return (level << STEP_BITS) + gm_low_bit32(bins.steps[level])

cdef int bfc_init(Bfc* table, SplitRule split_rule, uint64_t max_dead) noexcept nogil
cdef void bfc_free_all(Bfc* table) noexcept nogil

# Allocates the best block for `stream_slot`; NIL if there is none or, with *status set, if the
# array could not grow, or if a swap of pages may provide a lower place. `size` is a multiple of
# QUANTUM.
cdef uint32_t bfc_allocate(Bfc* table, uint64_t size, uint64_t requested, uint32_t stream_slot,
                           int* status) noexcept nogil
# Returns the chunk that bfc_allocate chooses where the table packs, without swaps; NIL: none.
cdef uint32_t bfc_lowest(const Bfc* table, uint64_t size, uint32_t stream_slot) noexcept nogil
# The results of searches for a place that swaps fill.
cdef inline void bfc_note_swap(Bfc* table, uint64_t size, bint found) noexcept nogil:
    table.swaps_skipped = 0
    table.swapless = <uint64_t>-1 if found else size
# Takes a block of the free chunk `index`; NIL: none was named, or, with *status set, as above.
cdef uint32_t bfc_allocate_at(Bfc* table, uint32_t index, uint64_t size, uint64_t requested,
                              uint32_t stream_slot, int* status) noexcept nogil
# The same from one stream slot, among its chunks of epochs <= `completed`.
cdef uint32_t bfc_allocate_from(Bfc* table, uint64_t size, uint64_t requested, uint32_t source,
                                uint64_t completed, uint32_t stream_slot,
                                int* status) noexcept nogil
# Returns the bytes of a block for a request of `want`, in a free chunk of `have` bytes.
cdef uint64_t bfc_block_size(const Bfc* table, uint64_t have, uint64_t want) noexcept nogil
cdef bint bfc_has(const Bfc* table, uint64_t size, uint32_t source) noexcept nogil
# Finds the chunk of an allocated block.
cdef inline int bfc_resolve(const Bfc* table, uint64_t handle, uint32_t* index) noexcept nogil:
    cdef uint32_t slot = <uint32_t>handle
    if slot >= load32(&table.count) or state_of(table, slot) != CHUNK_USED:
        return BFC_STALE
    if load32(&table.chunks[slot].generation) != <uint32_t>(handle >> 32):
        return BFC_STALE
    index[0] = slot
    return BFC_OK
# Prefetches the neighbours of a chunk that will be freed soon: they decide whether it merges.
cdef inline void bfc_expect_free(const Bfc* table, uint32_t index) noexcept nogil:
    cdef const Chunk* chunk = &table.chunks[index]
    if chunk.prev != NIL:
        gm_prefetch(&table.chunks[chunk.prev])
    if chunk.next != NIL:
        gm_prefetch(&table.chunks[chunk.next])
# Frees a used or cached chunk: it becomes free in `stream_slot`, stamped `epoch`, and merges with
# its neighbours.
cdef void bfc_free(Bfc* table, uint32_t index, uint32_t stream_slot, uint64_t epoch) noexcept nogil

cdef int bfc_add_region(Bfc* table, uint64_t address, uint64_t size, bint persistent,
                        uint32_t* region) noexcept nogil
# Allocates the block of a fresh region, which is all of it.
cdef uint32_t bfc_allocate_region(Bfc* table, uint32_t region, uint64_t requested,
                                  uint32_t stream_slot) noexcept nogil
cdef bint bfc_region_is_idle(const Bfc* table, uint32_t region) noexcept nogil
cdef void bfc_remove_region(Bfc* table, uint32_t region) noexcept nogil

cdef int bfc_add_stream_slot(Bfc* table, uint32_t* stream_slot) noexcept nogil
# Moves chunks that were freed in epochs of `stream_slot` up to `completed` to slot 0, where they
# merge. It loops over all chunks.
cdef void bfc_release_completed(Bfc* table, uint32_t stream_slot, uint64_t completed) noexcept nogil

cdef uint64_t bfc_largest_free(const Bfc* table) noexcept nogil


# ---- Pending-free chunks: freed by their owner, and still used by other streams ------------------
#
# Such a chunk cannot be allocated, hangs in no bin and merges with nothing; like a used one it
# keeps its region.

# Changes a chunk from used to pending free.
cdef void bfc_begin_pending_free(Bfc* table, uint32_t index, uint32_t stream_slot,
                                 uint64_t epoch) noexcept nogil
# Changes a chunk from pending free to free in a stream slot, and merges it. A persistent block
# hangs in no bin.
cdef void bfc_end_pending_free(Bfc* table, uint32_t index, uint32_t stream_slot,
                               uint64_t epoch) noexcept nogil

# Recomputes every invariant that is stated above from the chunks. Returns 0, or the number of the
# first broken one; bfc_invariant returns its text. `folded`: all caches are flushed, so that
# `requested_in_use` is exact.
cdef int bfc_check(const Bfc* table, bint folded) noexcept nogil
cdef const char* bfc_invariant(int number) noexcept nogil
