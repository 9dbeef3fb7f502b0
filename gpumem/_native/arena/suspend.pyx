"""Suspend and resume."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from gpumem._native.arena.bookkeeping cimport (
    arena_charge_pages_anew, arena_reconcile, note_reserved,
)
from gpumem._native.arena.growth cimport trim_pages
from gpumem._native.arena.streams cimport drain_streams, free_all_pending, wait_for_device
from gpumem._native.arena.thread_cache cimport caches_flush
from gpumem._native.arena.types cimport (
    apart_from, ARENA_CLOSED, ARENA_HALF_SUSPENDED, ARENA_NO_COPY, ARENA_OK, ARENA_OVER_BUDGET,
    ArenaCore, driver_refused, SavedBlock, SPACES, STATE_CLOSED, STATE_OPEN, STATE_SUSPENDED,
)
from gpumem._native.bfc cimport Bfc, CHUNK_USED, NIL, state_of
from gpumem._native.driver cimport context_enter, context_leave, CUDA_SUCCESS, CUresult, CUstream
from gpumem._native.pages cimport space_release_pages, space_restore
from gpumem._support.atomics cimport store64, sum_add
from gpumem._support.lock cimport lock_acquire, lock_release
from gpumem._support.streams cimport LEGACY_STREAM


cdef extern from *:
    """
    #include <sys/mman.h>
    /* Huge pages where the kernel has them: a copy touches every page once. */
    static void *gm_copy_map(size_t nbytes) {
        void *bytes = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                           -1, 0);
        if (bytes == MAP_FAILED) return NULL;
        madvise(bytes, nbytes, MADV_HUGEPAGE);
        return bytes;
    }
    static void gm_copy_unmap(void *bytes, size_t nbytes) {
        if (bytes) munmap(bytes, nbytes);
    }
    """
    void* gm_copy_map(size_t nbytes) noexcept nogil
    void gm_copy_unmap(void* bytes, size_t nbytes) noexcept nogil


cdef int arena_suspend(ArenaCore* arena) noexcept nogil:
    return change_from(arena, STATE_OPEN, suspend)


cdef int arena_resume(ArenaCore* arena) noexcept nogil:
    return change_from(arena, STATE_SUSPENDED, resume)


cdef int change_from(ArenaCore* arena, uint32_t state,
                     int (*change)(ArenaCore*) noexcept nogil) noexcept nogil:
    # Changes an arena that is in this state; in the other one it is already.
    cdef int status = ARENA_OK
    lock_acquire(&arena.grow_lock)
    if arena.closed == STATE_CLOSED:
        status = ARENA_CLOSED
    elif arena.closed == state:
        status = change(arena)
        arena_reconcile(arena)
    lock_release(&arena.grow_lock)
    return status


cdef void set_state(ArenaCore* arena, int state) noexcept nogil:
    lock_acquire(&arena.lock)
    arena.closed = state
    lock_release(&arena.lock)


# ---- suspend -------------------------------------------------------------------------------------

cdef int suspend(ArenaCore* arena) noexcept nogil:
    cdef int status
    # First of all: from here on no thread is given a block that the copy would miss.
    set_state(arena, STATE_SUSPENDED)
    status = move_to_host(arena)
    if status != ARENA_OK and status != ARENA_HALF_SUSPENDED:
        copy_forget(arena)
        set_state(arena, STATE_OPEN)
    return status


cdef int move_to_host(ArenaCore* arena) noexcept nogil:
    cdef const char* call = NULL
    cdef CUresult code = drain(arena)
    if code != CUDA_SUCCESS:
        return driver_refused(arena, code, "cuCtxSynchronize")
    caches_flush(arena)
    trim_pages(arena)
    if not copy_make(arena):
        return ARENA_NO_COPY
    code = copy_blocks(arena, True, &call)
    if code != CUDA_SUCCESS:
        return driver_refused(arena, code, call)
    return release_pages(arena)


cdef CUresult drain(ArenaCore* arena) noexcept nogil:
    # Everything queued on the device, on whatever stream: any of it may use a live block.
    cdef CUresult code = wait_for_device(arena)
    if code == CUDA_SUCCESS:
        drain_streams(arena, NULL)
        free_all_pending(arena)
    return code


cdef int release_pages(ArenaCore* arena) noexcept nogil:
    # If the driver refuses to unmap a page, the others come back. Should that be refused too, the
    # arena stays suspended, with its copy, and resume can be tried.
    cdef CUresult code = CUDA_SUCCESS
    cdef int i
    for i in range(SPACES):
        if code == CUDA_SUCCESS:
            code = space_release_pages(&arena.spaces[i], &arena.lock)
    if code == CUDA_SUCCESS:
        return ARENA_OK
    if restore(arena) == ARENA_OK:
        return driver_refused(arena, code, "cuMemUnmap")
    return ARENA_HALF_SUSPENDED


# ---- resume --------------------------------------------------------------------------------------

cdef int resume(ArenaCore* arena) noexcept nogil:
    cdef int status = ARENA_OVER_BUDGET
    # What was freed meanwhile has no work queued on it, and the driver has nothing of it.
    caches_flush(arena)
    drain_streams(arena, NULL)
    trim_pages(arena)
    # The budget before the driver: a refusal then leaves the arena suspended, as it was.
    if arena_charge_pages_anew(arena):
        status = restore(arena)
    if status == ARENA_OK:
        copy_forget(arena)
        set_state(arena, STATE_OPEN)
        lock_acquire(&arena.lock)
        note_reserved(arena)    # peaks may have been reset meanwhile
        lock_release(&arena.lock)
    return status


cdef int restore(ArenaCore* arena) noexcept nogil:
    cdef CUresult code = CUDA_SUCCESS
    cdef const char* call = "cuMemCreate"
    cdef int i
    for i in range(SPACES):
        if code == CUDA_SUCCESS:
            code = space_restore(&arena.spaces[i], &call)
    if code == CUDA_SUCCESS:
        code = copy_blocks(arena, False, &call)
    if code == CUDA_SUCCESS:
        return ARENA_OK
    for i in range(SPACES):
        space_release_pages(&arena.spaces[i], &arena.lock)
    return driver_refused(arena, code, call)


# ---- the copy ------------------------------------------------------------------------------------

cdef bint copy_make(ArenaCore* arena) noexcept nogil:
    # A list of the live blocks, and host memory for their bytes.
    # Under the lock the list is made; its blocks can only be freed afterwards, which a generation
    # shows.
    cdef uint64_t blocks
    lock_acquire(&arena.lock)
    blocks = arena.table.used_chunks + arena.small.used_chunks
    arena.saved = <SavedBlock*>calloc(blocks + 1, sizeof(SavedBlock))
    if arena.saved != NULL:
        arena.saved_count = 0
        arena.saved_bytes = 0
        list_blocks(arena, &arena.table)
        list_blocks(arena, &arena.small)
    lock_release(&arena.lock)
    if arena.saved == NULL:
        return False
    if arena.saved_bytes:
        arena.saved_copy = gm_copy_map(arena.saved_bytes)
    return arena.saved_bytes == 0 or arena.saved_copy != NULL


cdef void list_blocks(ArenaCore* arena, Bfc* table) noexcept nogil:
    # In address order within a range, so that neighbours are copied in one piece. What lies apart
    # stays where it is.
    cdef uint32_t region, index
    cdef SavedBlock* block
    for region in range(table.region_count):
        if (table.regions[region].size == 0
                or apart_from(arena, table.regions[region].address) != NULL):
            continue
        index = table.regions[region].first
        while index != NIL:
            if state_of(table, index) == CHUNK_USED:
                block = &arena.saved[arena.saved_count]
                block.address = table.chunks[index].address
                block.nbytes = table.chunks[index].size
                block.index = index
                block.generation = table.chunks[index].generation
                block.small = table == &arena.small
                arena.saved_count += 1
                arena.saved_bytes += block.nbytes
            index = table.chunks[index].next


cdef bint still_live(ArenaCore* arena, const SavedBlock* block) noexcept nogil:
    cdef const Bfc* table = &arena.small if block.small else &arena.table
    return (state_of(table, block.index) == CHUNK_USED
            and table.chunks[block.index].generation == block.generation)


cdef CUresult copy_blocks(ArenaCore* arena, bint down, const char** call) noexcept nogil:
    # Blocks side by side in one copy; all are queued, then waited for. What was freed is left out.
    cdef CUresult code = context_enter(arena.context)
    cdef CUresult waited
    if code != CUDA_SUCCESS:
        call[0] = "cuCtxPushCurrent"
        return code
    call[0] = "cuMemcpyDtoHAsync" if down else "cuMemcpyHtoDAsync"
    code = queue_copies(arena, down)
    waited = wait_for_copies(arena)
    if code == CUDA_SUCCESS and waited != CUDA_SUCCESS:
        call[0] = "cuStreamSynchronize"
        code = waited
    context_leave(arena.context)
    return code


cdef CUresult wait_for_copies(ArenaCore* arena) noexcept nogil:
    # Memory must not go away under a copy: if this wait is refused, the whole device is waited for.
    cdef CUresult code = arena.context.table.cuStreamSynchronize(<CUstream><uint64_t>LEGACY_STREAM)
    if code != CUDA_SUCCESS:
        code = arena.context.table.cuCtxSynchronize()
    return code


cdef CUresult queue_copies(ArenaCore* arena, bint down) noexcept nogil:
    cdef uint64_t offset = 0        # of this block in the copy
    cdef uint64_t start = 0         # where the piece begins there that has not been queued yet
    cdef uint64_t begin = 0         # and on the device
    cdef uint64_t length = 0
    cdef uint32_t i
    cdef const SavedBlock* block
    cdef CUresult code = CUDA_SUCCESS
    for i in range(arena.saved_count):
        block = &arena.saved[i]
        if still_live(arena, block):
            # Not a neighbour, on the device or in the copy: the piece before it is complete.
            if begin + length != block.address or start + length != offset:
                code = copy_piece(arena, begin, start, length, down)
                if code != CUDA_SUCCESS:
                    return code
                begin = block.address
                start = offset
                length = 0
            length += block.nbytes
        offset += block.nbytes
    return copy_piece(arena, begin, start, length, down)


cdef inline CUresult copy_piece(ArenaCore* arena, uint64_t address, uint64_t start,
                                uint64_t nbytes, bint down) noexcept nogil:
    cdef CUstream stream = <CUstream><uint64_t>LEGACY_STREAM
    cdef char* host = <char*>arena.saved_copy + start
    if nbytes == 0:
        return CUDA_SUCCESS
    sum_add(&arena.backing.calls, 1)
    if down:
        return arena.context.table.cuMemcpyDtoHAsync(host, address, nbytes, stream)
    return arena.context.table.cuMemcpyHtoDAsync(address, host, nbytes, stream)


cdef void copy_forget(ArenaCore* arena) noexcept nogil:
    gm_copy_unmap(arena.saved_copy, arena.saved_bytes)
    free(arena.saved)
    arena.saved_copy = NULL
    arena.saved = NULL
    store64(&arena.saved_bytes, 0)
    arena.saved_count = 0
