"""Memory that sleeps: its handles, its copies and the store."""

from libc.errno cimport EBADMSG
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, qsort, realloc
from libc.string cimport memset

from gpumem._native.backing cimport (
    Backing, backing_release, host_pages_end, host_pages_left, numa_init, pinned_begin, pinned_init,
    pinned_take, THE_DEVICE,
)
from gpumem._native.driver cimport (
    access_apply, access_init, access_next, context_enter, context_leave, CU_EVENT_DISABLE_TIMING,
    CU_STREAM_NON_BLOCKING, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_UNKNOWN,
    CUDA_SUCCESS, CUevent, CUresult, CUstream, DeviceContext, note_call,
)
from gpumem._native.pages.space cimport page_create
from gpumem._support.atomics cimport store64, sum_add
from gpumem._support.events cimport note_page, REC_ASLEEP, REC_RELEASE, REC_RESERVE
from gpumem._support.memory cimport array_reserve


cdef extern from "files.h" nogil:
    int file_write(int file, const void* bytes, size_t nbytes, uint64_t offset)
    int file_read(int file, void* bytes, size_t nbytes, uint64_t offset)
    void file_sum(const void* bytes, size_t nbytes, uint64_t* sums)

cdef extern from "meminfo.h":
    uint64_t memory_available(const char* groups) noexcept nogil
    const char* CONTROL_GROUPS

cdef enum:
    CHUNK = 268435456       # bytes, 256 MiB: of the store, made in one piece
    GROUP = 134217728       # bytes, 128 MiB: handles that are released, or made, together
    AHEAD = 4               # groups with queued copies while the one before them is unmapped
    PEER_GROUP = 536870912  # bytes, 512 MiB: released together in a sleep on another device,
    PEER_AHEAD = 2          # the next is copied meanwhile, unless an unmap waits for it (H100)
    PEER_PART = 33554432    # bytes, 32 MiB: of one copy, for which an unmap waits (H200)
    FILE_PAGE = 4096
    WINDOW = 16777216       # bytes, 16 MiB: of a file, read or written in one call

# The copies under way of one call.
cdef struct Copies:
    CUstream stream         # its own, so that it waits for no other work; NULL: nothing is copied
    CUevent events[AHEAD]   # after the copies of a group
    uint32_t ends[AHEAD]    # the page after the group
    uint64_t copied[AHEAD]  # bytes of the store that are copied by then
    uint32_t begun          # groups
    uint32_t done
    uint32_t unmapped       # pages of all groups that are done
    uint32_t released       # pages of those with released memory


# ---- pages and pieces ----------------------------------------------------------------------------

cdef bint sleeper_add_page(Sleeper* sleeper, uint64_t address, uint64_t nbytes,
                           uint64_t* memory) noexcept nogil:
    if not array_reserve(<void**>&sleeper.pages, &sleeper.page_capacity, sleeper.page_count + 1, 64,
                         sizeof(SleepPage)):
        return False
    sleeper.pages[sleeper.page_count] = SleepPage(address, nbytes, memory, False)
    sleeper.page_count += 1
    return True


cdef bint sleeper_add_piece(Sleeper* sleeper, uint64_t address, uint64_t nbytes,
                            uint64_t block) noexcept nogil:
    if not array_reserve(<void**>&sleeper.pieces, &sleeper.piece_capacity, sleeper.piece_count + 1,
                         64, sizeof(SleepPiece)):
        return False
    sleeper.pieces[sleeper.piece_count] = SleepPiece(address, nbytes, 0, block)
    sleeper.piece_count += 1
    return True


cdef int by_address(const void* one, const void* other) noexcept nogil:
    # Pages and pieces begin with their addresses.
    cdef uint64_t a = (<const uint64_t*>one)[0]
    cdef uint64_t b = (<const uint64_t*>other)[0]
    return (a > b) - (a < b)


cdef void sort_pages(Sleeper* sleeper) noexcept nogil:
    if sleeper.page_count > 1:
        qsort(sleeper.pages, sleeper.page_count, sizeof(SleepPage), by_address)


cdef void lay_out(Sleeper* sleeper) noexcept nogil:
    # Neighbours follow each other in the store too, and are copied in one piece.
    cdef uint64_t offset = 0
    cdef uint32_t i
    if sleeper.piece_count > 1:
        qsort(sleeper.pieces, sleeper.piece_count, sizeof(SleepPiece), by_address)
    for i in range(sleeper.piece_count):
        sleeper.pieces[i].offset = offset
        offset += sleeper.pieces[i].nbytes
    store64(&sleeper.nbytes, offset)
    sleeper.copied = 0
    sleeper.cursor = 0
    sleeper.within = 0


# ---- going to sleep ------------------------------------------------------------------------------

cdef CUresult sleeper_sleep(Sleeper* sleeper, const StorePlace* place,
                            const char** call) noexcept nogil:
    cdef Copies copies
    cdef CUresult code
    sort_pages(sleeper)
    lay_out(sleeper)
    sleeper.no_store = place != NULL and not store_open(&sleeper.store, sleeper.context, place,
                                                        sleeper.nbytes)
    if sleeper.no_store:
        return CUDA_ERROR_OUT_OF_MEMORY
    note_kept(sleeper, 0)
    code = context_enter(sleeper.context)
    if code != CUDA_SUCCESS:
        call[0] = "cuCtxPushCurrent"
        return code
    if place != NULL and place.kind == STORE_HOST:
        pinned_begin(&sleeper.store.backing, &sleeper.store.ahead, store_lacks(&sleeper.store))
    code = copies_begin(sleeper, &copies, call)
    if code == CUDA_SUCCESS:
        code = copy_down(sleeper, &copies, call)
    code = copies_end(sleeper, &copies, code, call)
    host_pages_end(&sleeper.store.ahead)
    context_leave(sleeper.context)
    return code


cdef CUresult copy_down(Sleeper* sleeper, Copies* copies, const char** call) noexcept nogil:
    cdef bint to_peer = copies.stream != NULL and sleeper.store.place.kind == STORE_DEVICE
    cdef uint32_t ahead = PEER_AHEAD if to_peer else AHEAD
    cdef uint32_t first = 0         # page of the group
    cdef uint32_t end = 0
    cdef CUresult code = CUDA_SUCCESS
    while first < sleeper.page_count and code == CUDA_SUCCESS:
        end = group_end(sleeper, first, PEER_GROUP if to_peer else GROUP)
        code = queue_pieces(sleeper, copies.stream, end_of_page(&sleeper.pages[end - 1]), True,
                            call)
        if code == CUDA_SUCCESS:
            code = group_mark(sleeper, copies, end, call)
        # While the copies run.
        if to_peer and code == CUDA_SUCCESS:
            make_chunks_ahead(sleeper)
        release_unmapped(sleeper, copies)
        while code == CUDA_SUCCESS and copies.begun - copies.done >= ahead:
            code = group_unmap(sleeper, copies, call)
        first = end
    while code == CUDA_SUCCESS and copies.done < copies.begun:
        release_unmapped(sleeper, copies)
        code = group_unmap(sleeper, copies, call)
    release_unmapped(sleeper, copies)
    return code


cdef uint32_t group_end(const Sleeper* sleeper, uint32_t first, uint64_t least) noexcept nogil:
    cdef uint64_t nbytes = 0
    while first < sleeper.page_count and nbytes < least:
        nbytes += sleeper.pages[first].nbytes
        first += 1
    return first


cdef void make_chunks_ahead(Sleeper* sleeper) noexcept nogil:
    # Makes chunks for the next group's copies. A refusal is reported when a copy needs the chunk.
    cdef const char* call = NULL
    cdef uint64_t index = (queued_to(sleeper) + CHUNK - 1) // CHUNK
    cdef uint64_t end = min(queued_to(sleeper) + PEER_GROUP, sleeper.nbytes)
    while index * CHUNK < end and store_reach(sleeper, index, &call) == CUDA_SUCCESS:
        index += 1
    sleeper.no_store = False


cdef inline uint64_t end_of_page(const SleepPage* page) noexcept nogil:
    return page.address + page.nbytes


cdef CUresult group_mark(Sleeper* sleeper, Copies* copies, uint32_t end,
                         const char** call) noexcept nogil:
    cdef uint32_t at = copies.begun % AHEAD
    cdef CUresult code = CUDA_SUCCESS
    if copies.stream != NULL:
        code = note_call(sleeper.calls, call, "cuEventRecord", sleeper.context.table.cuEventRecord(
            copies.events[at], copies.stream))
    copies.ends[at] = end
    copies.copied[at] = queued_to(sleeper)
    copies.begun += code == CUDA_SUCCESS
    return code


cdef uint64_t queued_to(const Sleeper* sleeper) noexcept nogil:
    if sleeper.cursor == sleeper.piece_count:
        return sleeper.nbytes
    return sleeper.pieces[sleeper.cursor].offset + sleeper.within


cdef CUresult group_unmap(Sleeper* sleeper, Copies* copies, const char** call) noexcept nogil:
    cdef uint32_t at = copies.done % AHEAD
    cdef CUresult code = CUDA_SUCCESS
    if copies.stream != NULL:
        code = note_call(sleeper.calls, call, "cuEventSynchronize",
                         sleeper.context.table.cuEventSynchronize(copies.events[at]))
    if code != CUDA_SUCCESS:
        return code
    sleeper.copied = copies.copied[at]
    while copies.unmapped < copies.ends[at] and code == CUDA_SUCCESS:
        code = run_unmap(sleeper, &copies.unmapped, copies.ends[at], call)
    copies.done += code == CUDA_SUCCESS
    return code


cdef CUresult run_unmap(Sleeper* sleeper, uint32_t* next_page, uint32_t end,
                        const char** call) noexcept nogil:
    # Pages side by side are unmapped in one call: a refusal leaves all of them mapped. One without
    # memory lost it to an earlier call.
    cdef uint32_t first = next_page[0]
    cdef uint32_t last = first
    cdef uint64_t begin = sleeper.pages[first].address
    cdef uint64_t stop = begin
    cdef CUresult code
    while (last < end and sleeper.pages[last].address == stop
           and sleeper.pages[last].memory[0] != 0):
        stop = end_of_page(&sleeper.pages[last])
        last += 1
    if last == first:
        next_page[0] += 1
        return CUDA_SUCCESS
    code = note_call(sleeper.calls, call, "cuMemUnmap",
                     sleeper.context.table.cuMemUnmap(begin, stop - begin))
    if code == CUDA_SUCCESS:
        next_page[0] = last
    return code


cdef void release_unmapped(Sleeper* sleeper, Copies* copies) noexcept nogil:
    while copies.released < copies.unmapped:
        page_release(sleeper, &sleeper.pages[copies.released])
        copies.released += 1


cdef void page_release(Sleeper* sleeper, SleepPage* page) noexcept nogil:
    # The page is unmapped.
    if page.memory[0] == 0:
        return
    sum_add(sleeper.calls, 1)
    if sleeper.context.table.cuMemRelease(page.memory[0]) != CUDA_SUCCESS:
        sleeper.orphan(sleeper.owner, page.memory[0])
    page.memory[0] = 0
    note_page(sleeper.events, REC_RELEASE, page.address, page.nbytes, REC_ASLEEP)


# ---- waking --------------------------------------------------------------------------------------

cdef CUresult sleeper_wake(Sleeper* sleeper, const char** call) noexcept nogil:
    cdef Copies copies
    cdef uint32_t i
    cdef CUresult code = context_enter(sleeper.context)
    if code != CUDA_SUCCESS:
        call[0] = "cuCtxPushCurrent"
        return code
    sort_pages(sleeper)
    sleeper.cursor = 0
    sleeper.within = 0
    code = copies_begin(sleeper, &copies, call)
    if code == CUDA_SUCCESS:
        code = copy_up(sleeper, copies.stream, call)
    code = copies_end(sleeper, &copies, code, call)
    # Pages that were made are released. A page that an earlier refusal left with memory stays: its
    # bytes may be nowhere else.
    for i in range(sleeper.page_count):
        if code != CUDA_SUCCESS and sleeper.pages[i].made:
            page_undo(sleeper, i)
    context_leave(sleeper.context)
    return code


cdef void sleeper_release(Sleeper* sleeper) noexcept nogil:
    cdef uint32_t i
    if context_enter(sleeper.context) == CUDA_SUCCESS:
        for i in range(sleeper.page_count):
            page_undo(sleeper, i)
        context_leave(sleeper.context)


cdef uint64_t sleeper_lacks(const Sleeper* sleeper) noexcept nogil:
    cdef uint64_t nbytes = 0
    cdef uint32_t i
    for i in range(sleeper.page_count):
        nbytes += sleeper.pages[i].nbytes if sleeper.pages[i].memory[0] == 0 else 0
    return nbytes


cdef CUresult copy_up(Sleeper* sleeper, CUstream stream, const char** call) noexcept nogil:
    # Bytes are also copied to pages that a refusal left with memory: they are the same there.
    cdef uint32_t end = 0
    cdef CUresult code = CUDA_SUCCESS
    while end < sleeper.page_count and code == CUDA_SUCCESS:
        code = run_make(sleeper, &end, call)
        if code == CUDA_SUCCESS:
            code = queue_pieces(sleeper, stream, end_of_page(&sleeper.pages[end - 1]), False, call)
    return code


cdef CUresult run_make(Sleeper* sleeper, uint32_t* end, const char** call) noexcept nogil:
    # Pages side by side get access in one call; also those with memory, for which it may have been
    # refused.
    cdef uint64_t begin = sleeper.pages[end[0]].address
    cdef uint64_t stop = begin
    cdef CUresult code = CUDA_SUCCESS
    cdef SleepPage* page
    while end[0] < sleeper.page_count and stop - begin < GROUP:
        page = &sleeper.pages[end[0]]
        if page.address != stop:
            break
        if page.memory[0] == 0:
            code = page_make(sleeper, page, call)
            if code != CUDA_SUCCESS:
                return code
        stop += page.nbytes
        end[0] += 1
    return note_call(sleeper.calls, call, "cuMemSetAccess",
                     access_apply(sleeper.context, sleeper.access, begin, stop - begin))


cdef CUresult page_make(Sleeper* sleeper, SleepPage* page, const char** call) noexcept nogil:
    cdef uint64_t memory = 0
    cdef CUresult code = note_call(sleeper.calls, call, "cuMemCreate",
                                   page_create(sleeper.context, page.nbytes, &memory))
    if code != CUDA_SUCCESS:
        return code                     # `memory` may hold a value that is not a handle
    code = note_call(sleeper.calls, call, "cuMemMap", sleeper.context.table.cuMemMap(
        page.address, page.nbytes, 0, memory, 0))
    if code == CUDA_SUCCESS:
        page.memory[0] = memory
        page.made = True
        note_page(sleeper.events, REC_RESERVE, page.address, page.nbytes, REC_ASLEEP)
    elif sleeper.context.table.cuMemRelease(memory) != CUDA_SUCCESS:
        sleeper.orphan(sleeper.owner, memory)
    return code


cdef void page_undo(Sleeper* sleeper, uint32_t page) noexcept nogil:
    # Unmaps and releases a page after a refusal. If that is refused twice, it keeps its memory.
    cdef const char* call = NULL
    cdef uint32_t end = page + 1
    cdef uint32_t unmapped = page
    if (run_unmap(sleeper, &unmapped, end, &call) == CUDA_SUCCESS
            or run_unmap(sleeper, &unmapped, end, &call) == CUDA_SUCCESS):
        page_release(sleeper, &sleeper.pages[page])


# ---- copies --------------------------------------------------------------------------------------

cdef CUresult copies_begin(Sleeper* sleeper, Copies* copies, const char** call) noexcept nogil:
    cdef CUresult code = CUDA_SUCCESS
    cdef int i
    memset(copies, 0, sizeof(Copies))
    if sleeper.piece_count == 0:
        return code
    code = note_call(sleeper.calls, call, "cuStreamCreate", sleeper.context.table.cuStreamCreate(
        &copies.stream, CU_STREAM_NON_BLOCKING))
    if code != CUDA_SUCCESS:
        copies.stream = NULL
    for i in range(AHEAD):
        if code == CUDA_SUCCESS:
            code = note_call(sleeper.calls, call, "cuEventCreate",
                             sleeper.context.table.cuEventCreate(&copies.events[i],
                                                                 CU_EVENT_DISABLE_TIMING))
            if code != CUDA_SUCCESS:
                copies.events[i] = NULL
    return code


cdef CUresult copies_end(Sleeper* sleeper, Copies* copies, CUresult code,
                         const char** call) noexcept nogil:
    # Pages and store stay until all copies have ended.
    cdef CUresult waited = CUDA_SUCCESS
    cdef int i
    if copies.stream != NULL:
        waited = sleeper.context.table.cuStreamSynchronize(copies.stream)
        sum_add(sleeper.calls, 1)
        if waited != CUDA_SUCCESS:
            waited = sleeper.context.table.cuCtxSynchronize()
        if code == CUDA_SUCCESS and waited != CUDA_SUCCESS:
            call[0] = "cuStreamSynchronize"
            code = waited
    for i in range(AHEAD):
        if copies.events[i] != NULL and sleeper.context.table.cuEventDestroy(
                copies.events[i]) != CUDA_SUCCESS:
            sleeper.context.table.cuEventDestroy(copies.events[i])      # once more
    if copies.stream != NULL and sleeper.context.table.cuStreamDestroy(
            copies.stream) != CUDA_SUCCESS:
        sleeper.context.table.cuStreamDestroy(copies.stream)
    if sleeper.store.window:
        sleeper.store.window = 0
        chunk_end(&sleeper.store, &sleeper.store.chunks[0])
    return code


cdef CUresult queue_pieces(Sleeper* sleeper, CUstream stream, uint64_t end, bint down,
                           const char** call) noexcept nogil:
    # Continues where the last call ended, as far as pieces lie below `end`. Pieces side by side are
    # one copy. Freed bytes are left out; a wake also leaves out bytes that a refused sleep never
    # copied.
    cdef uint64_t limit = sleeper.nbytes if down else sleeper.copied
    cdef uint64_t address = 0       # on the device, of the copy that has not been queued yet
    cdef uint64_t offset = 0        # and in the store
    cdef uint64_t length = 0
    cdef uint64_t start, part
    cdef SleepPiece* piece
    cdef CUresult code = CUDA_SUCCESS
    while sleeper.cursor < sleeper.piece_count and code == CUDA_SUCCESS:
        piece = &sleeper.pieces[sleeper.cursor]
        if piece.address + sleeper.within >= end:
            break
        part = min(piece.nbytes, end - piece.address) - sleeper.within
        start = piece.offset + sleeper.within
        if start < limit and sleeper.is_live(sleeper.owner, piece):
            if address + length != piece.address + sleeper.within or offset + length != start:
                code = copy_part(sleeper, stream, address, offset, length, down, call)
                address = piece.address + sleeper.within
                offset = start
                length = 0
            length += min(part, limit - start)
        sleeper.within += part
        if sleeper.within == piece.nbytes:
            sleeper.within = 0
            sleeper.cursor += 1
    if code == CUDA_SUCCESS:
        code = copy_part(sleeper, stream, address, offset, length, down, call)
    if code == CUDA_SUCCESS and down and sleeper.store.window:
        code = window_leave(sleeper, stream, down, call)
    return code


cdef CUresult copy_part(Sleeper* sleeper, CUstream stream, uint64_t address, uint64_t offset,
                        uint64_t nbytes, bint down, const char** call) noexcept nogil:
    # Queues a copy for each chunk of the store, or window of a file, that it crosses. While copies
    # between GPUs are queued, the driver's calls for mappings wait for the one that runs.
    cdef Store* store = &sleeper.store
    cdef bint in_file = store.place.kind == STORE_FILE
    cdef uint64_t unit = WINDOW if in_file else CHUNK
    cdef uint64_t place, part
    cdef CUresult code = CUDA_SUCCESS
    while nbytes and code == CUDA_SUCCESS:
        code = store_reach(sleeper, 0 if in_file else offset // CHUNK, call)
        if code == CUDA_SUCCESS and in_file:
            code = window_reach(sleeper, stream, offset // WINDOW, down, call)
        if code != CUDA_SUCCESS:
            return code
        place = store.chunks[0 if in_file else offset // CHUNK].address + offset % unit
        part = min(nbytes, unit - offset % unit)
        if store.place.kind == STORE_DEVICE:
            part = min(part, <uint64_t>PEER_PART)
        code = copy_one(sleeper, stream, address, place, part, down, call)
        store.filled = offset + part
        address += part
        offset += part
        nbytes -= part
    return code


cdef CUresult copy_one(Sleeper* sleeper, CUstream stream, uint64_t address, uint64_t place,
                       uint64_t nbytes, bint down, const char** call) noexcept nogil:
    cdef DeviceContext* context = sleeper.context
    cdef DeviceContext* other = sleeper.store.place.device
    if sleeper.store.place.kind != STORE_DEVICE and down:
        return note_call(sleeper.calls, call, "cuMemcpyDtoHAsync", context.table.cuMemcpyDtoHAsync(
            <void*>place, address, nbytes, stream))
    if sleeper.store.place.kind != STORE_DEVICE:
        return note_call(sleeper.calls, call, "cuMemcpyHtoDAsync", context.table.cuMemcpyHtoDAsync(
            address, <const void*>place, nbytes, stream))
    if down:
        return note_call(sleeper.calls, call, "cuMemcpyPeerAsync", context.table.cuMemcpyPeerAsync(
            place, other.primary, address, context.primary, nbytes, stream))
    return note_call(sleeper.calls, call, "cuMemcpyPeerAsync", context.table.cuMemcpyPeerAsync(
        address, context.primary, place, other.primary, nbytes, stream))


# ---- a file --------------------------------------------------------------------------------------


cdef CUresult window_reach(Sleeper* sleeper, CUstream stream, uint64_t index, bint down,
                           const char** call) noexcept nogil:
    # Moves the chunk to another window of the file. Copies from and to it end before.
    cdef Store* store = &sleeper.store
    cdef CUresult code = CUDA_SUCCESS
    if store.window == index + 1:
        return code
    if store.window:
        code = window_leave(sleeper, stream, down, call)
    if code == CUDA_SUCCESS:
        store.window = index + 1
        if not down:
            code = window_read(store, call)
    return code


cdef CUresult window_leave(Sleeper* sleeper, CUstream stream, bint down,
                           const char** call) noexcept nogil:
    # Ends the copies, and in a sleep writes the bytes that they have added to the window.
    cdef Store* store = &sleeper.store
    cdef FileWindow* window = &store.windows[store.window - 1]
    cdef uint64_t begin = max(store.written, (store.window - 1) * WINDOW)
    cdef const char* bytes = <const char*>store.chunks[0].address + begin % WINDOW
    cdef int error
    cdef CUresult code = note_call(sleeper.calls, call, "cuStreamSynchronize",
                                   sleeper.context.table.cuStreamSynchronize(stream))
    if code != CUDA_SUCCESS or not down or store.filled <= begin:
        return code
    error = file_write(store.place.file, bytes, store.filled - begin, store.place.offset + begin)
    if error != 0:
        call[0] = "pwrite"
        return <CUresult>(FILE_FAILED + error)
    file_sum(bytes, store.filled - begin, window.sums)
    window.nbytes += store.filled - begin
    store.written = store.filled
    return CUDA_SUCCESS


cdef CUresult window_read(Store* store, const char** call) noexcept nogil:
    cdef FileWindow* window = &store.windows[store.window - 1]
    cdef void* bytes = <void*>store.chunks[0].address
    cdef uint64_t[2] sums
    cdef int error = file_read(store.place.file, bytes, window.nbytes,
                               store.place.offset + (store.window - 1) * WINDOW)
    sums[0] = sums[1] = 0
    file_sum(bytes, window.nbytes, sums)
    if error == 0 and (sums[0] != window.sums[0] or sums[1] != window.sums[1]):
        error = EBADMSG
    call[0] = "pread"
    return CUDA_SUCCESS if error == 0 else <CUresult>(FILE_FAILED + error)


# ---- the store -----------------------------------------------------------------------------------

cdef bint store_open(Store* store, DeviceContext* context, const StorePlace* place,
                     uint64_t nbytes) noexcept nogil:
    # Chunks are made when a copy needs them; those of pinned memory may be kept from before.
    cdef uint32_t count = <uint32_t>((nbytes + CHUNK - 1) // CHUNK)
    cdef uint64_t kept = store_bytes(store)
    cdef uint64_t available
    cdef StoreChunk* chunks
    if store.place.kind != place.kind or place.kind != STORE_HOST:
        store_close(store, 0)
        kept = 0
    if place.kind != STORE_DEVICE and (store.backing.context == NULL
                                       or store.place.kind == STORE_DEVICE):
        pinned_init(&store.backing, context)
    store.place = place[0]
    store.nbytes = nbytes
    if place.kind == STORE_FILE:
        count = min(count, <uint32_t>1)
        store.written = 0
        store.windows = <FileWindow*>calloc(nbytes // WINDOW + 1, sizeof(FileWindow))
        if store.windows == NULL:
            return False
    if count > store.count:
        chunks = <StoreChunk*>realloc(store.chunks, count * sizeof(StoreChunk))
        if chunks == NULL:
            return False
        memset(chunks + store.count, 0, (count - store.count) * sizeof(StoreChunk))
        store.chunks = chunks
        store.count = count
    if place.kind == STORE_FILE:
        return nbytes <= place.room
    if place.kind == STORE_DEVICE:
        numa_init(&store.backing, place.device, THE_DEVICE)
        # The device that copies has access, or every copy would be staged by the driver.
        access_init(&store.access, place.device, -1)
        access_next(&store.access, context.device)
        store.access.count += 1
        store.backing.access = &store.access
        return True
    # Without this check a copy that does not fit would fail half-way.
    available = memory_available(CONTROL_GROUPS)
    return available == 0 or nbytes <= available + kept


cdef CUresult store_reach(Sleeper* sleeper, uint64_t index, const char** call) noexcept nogil:
    # Makes the chunk if there is none, or if it is too small.
    cdef Store* store = &sleeper.store
    cdef Backing* backing = &store.backing
    cdef StoreChunk* chunk = &store.chunks[index]
    cdef uint64_t nbytes = chunk_bytes(store, index)
    cdef CUresult code
    if chunk.address and chunk.nbytes >= nbytes:
        return CUDA_SUCCESS
    call[0] = backing.call
    if chunk.address and not chunk_end(store, chunk):
        return CUDA_ERROR_UNKNOWN
    code = context_enter(backing.context)
    if code != CUDA_SUCCESS:
        call[0] = "cuCtxPushCurrent"
        return code
    code = CUDA_ERROR_NOT_SUPPORTED
    if host_pages_left(&store.ahead) >= nbytes:
        code = pinned_take(backing, &store.ahead, nbytes, &chunk.address)
    if code != CUDA_SUCCESS and code != CUDA_ERROR_OUT_OF_MEMORY:
        code = backing.reserve(backing, nbytes, &chunk.address)
    context_leave(backing.context)
    chunk.nbytes = nbytes
    if code != CUDA_SUCCESS:
        chunk.address = 0
    # A lack of memory is a failure of the store, all else one of the driver.
    sleeper.no_store = code == CUDA_ERROR_OUT_OF_MEMORY
    return code


cdef uint64_t chunk_bytes(const Store* store, uint64_t index) noexcept nogil:
    cdef uint64_t granule = max(store.backing.granule, <uint64_t>FILE_PAGE)
    cdef uint64_t most = WINDOW if store.place.kind == STORE_FILE else CHUNK
    cdef uint64_t nbytes = min(most, store.nbytes - index * CHUNK)
    return (nbytes + granule - 1) // granule * granule


cdef uint64_t store_lacks(const Store* store) noexcept nogil:
    # Returns the bytes of chunks that are not made yet, or too small.
    cdef uint64_t nbytes = 0
    cdef uint32_t i
    for i in range(<uint32_t>((store.nbytes + CHUNK - 1) // CHUNK)):
        if store.chunks[i].address == 0 or store.chunks[i].nbytes < chunk_bytes(store, i):
            nbytes += chunk_bytes(store, i)
    return nbytes


cdef bint chunk_end(Store* store, StoreChunk* chunk) noexcept nogil:
    if chunk.address == 0:
        return True
    if (backing_release(&store.backing, chunk.address, chunk.nbytes) != CUDA_SUCCESS
            and backing_release(&store.backing, chunk.address, chunk.nbytes) != CUDA_SUCCESS):
        return False            # refused once more
    chunk.address = 0
    return True


cdef uint64_t store_bytes(const Store* store) noexcept nogil:
    cdef uint64_t nbytes = 0
    cdef uint32_t i
    for i in range(store.count):
        nbytes += store.chunks[i].nbytes if store.chunks[i].address else 0
    return nbytes


cdef void store_close(Store* store, uint64_t keep) noexcept nogil:
    # Memory that the driver refuses to release is kept.
    cdef uint64_t held = store_bytes(store)
    cdef StoreChunk* last
    free(store.windows)
    store.windows = NULL
    while store.count and held > keep:
        last = &store.chunks[store.count - 1]
        if not chunk_end(store, last):
            return
        held -= last.nbytes
        last.nbytes = 0
        store.count -= 1
    if store.count == 0:
        free(store.chunks)
        store.chunks = NULL


cdef uint64_t bytes_to_keep(const Store* store) noexcept nogil:
    # The host has at least as much memory available besides.
    cdef uint64_t held = store_bytes(store)
    cdef uint64_t available = memory_available(CONTROL_GROUPS) if held else 0   # 0: unknown
    return min(store.place.keep, (held + available) // 2 if available else held)


cdef void note_kept(Sleeper* sleeper, uint64_t nbytes) noexcept nogil:
    sum_add(&kept_for_sleep, nbytes - sleeper.kept)
    store64(&sleeper.kept, nbytes)


cdef void sleeper_release_kept(Sleeper* sleeper) noexcept nogil:
    store_close(&sleeper.store, 0)
    note_kept(sleeper, store_bytes(&sleeper.store))


cdef void sleeper_forget(Sleeper* sleeper) noexcept nogil:
    store_close(&sleeper.store, bytes_to_keep(&sleeper.store))
    note_kept(sleeper, store_bytes(&sleeper.store))
    store64(&sleeper.nbytes, 0)
    sleeper.copied = 0
    sleeper_forget_pages(sleeper)
    free(sleeper.pieces)
    sleeper.pieces = NULL
    sleeper.piece_count = 0
    sleeper.piece_capacity = 0


cdef void sleeper_forget_pages(Sleeper* sleeper) noexcept nogil:
    free(sleeper.pages)
    sleeper.pages = NULL
    sleeper.page_count = 0
    sleeper.page_capacity = 0
