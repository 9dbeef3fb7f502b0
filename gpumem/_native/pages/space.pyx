"""An address space and its pages: the data of plans, the budget of moves, the driver's calls."""

from libc.math cimport INFINITY
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from gpumem._native.backing cimport memory_create, THE_DEVICE
from gpumem._native.bfc cimport (
    Bfc, BFC_OK, bin_from, bin_of, Chunk, CHUNK_FREE, CHUNK_HOLE, gm_low_bit64, holes_add_range,
    holes_carve, holes_fill, NIL, state_of, StreamBins,
)
from gpumem._native.driver cimport (
    Access, context_enter, context_is_dead, context_leave, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS,
    CUdeviceptr, CUmemAccessDesc, CUresult, DeviceContext,
)
from gpumem._native.pages.types cimport (
    address_of, bytes_of, end_of, GRANULE, GRANULE_BITS, granule_from, granule_of, is_backed,
    is_idle, MAX_RANGES, may_use, Page, page_mapped_at, page_over, Range, RETIRED, RetiredView,
    round_to_granule, Space,
)
from gpumem._support.atomics cimport sum_add
from gpumem._support.events cimport EventSource, note_page
from gpumem._support.lock cimport Lock, lock_acquire, lock_release
from gpumem._support.memory cimport addresses_bound, array_reserve


cdef void view_set(Space* space, uint32_t first, uint32_t granules, uint32_t page) noexcept nogil:
    cdef uint32_t g
    for g in range(first, first + granules):
        space.page_at[g] = page


cdef void see_idle_pages(Space* space, uint32_t stream_slot) noexcept nogil:
    cdef uint32_t i
    cdef Page* page
    cdef IdleSearch search = IdleSearch(stream_slot, False, 0)
    see_free_chunks(space, &search)
    # After all chunks: a page that none of them holds whole has a live byte, and is not idle.
    space.table.swaps_from = <uint64_t>-1
    space.idle_count = 0
    for i in range(space.page_count):
        page = &space.page[i]
        page.busy = not is_idle(space, page)
        space.idle[space.idle_count] = i
        space.idle_count += not page.busy
        note_dormant(space, page)


cdef uint64_t see_swappable(Space* space, uint32_t stream_slot) noexcept nogil:
    # Marks only idle pages with a dormant view, which a swap would make the active one.
    cdef IdleSearch search = IdleSearch(stream_slot, True, <uint64_t>-1)
    see_free_chunks(space, &search)
    return search.lowest


cdef void note_dormant(Space* space, const Page* page) noexcept nogil:
    if page.granules and page.dormant != NIL:
        space.table.swaps_from = min(space.table.swaps_from, address_of(space, page.dormant))
        space.swaps_at[page.active >> 6] |= <uint64_t>1 << (page.active & 63)


# A search for idle pages in free chunks.
cdef struct IdleSearch:
    uint32_t stream_slot        # that may use the chunks
    bint to_swap                # only pages with a dormant view
    uint64_t lowest             # address of a dormant view of theirs; -1: none


cdef void see_free_chunks(Space* space, IdleSearch* search) noexcept nogil:
    cdef uint32_t i
    space.plans += 1
    for i in range(space.table.stream_slot_count):
        see_stream_slot(space, space.table.bins[i], search)


cdef void see_stream_slot(Space* space, const StreamBins* bins, IdleSearch* search) noexcept nogil:
    # Bins of chunks below one granule are left out: these hold no whole page.
    cdef uint32_t bin = bin_from(bins, bin_of(GRANULE))
    cdef uint32_t index
    while bin != NIL:
        index = bins.head[bin]
        while index != NIL:
            if may_use(space, &space.table.chunks[index], search.stream_slot):
                if search.to_swap:
                    see_swappable_in(space, index, search)
                else:
                    see_chunk(space, index)
            index = space.table.chunks[index].bin_next
        bin = bin_from(bins, bin + 1)


cdef void see_chunk(Space* space, uint32_t index) noexcept nogil:
    # Marks every page inside this free chunk as idle. A free chunk has memory throughout.
    cdef const Chunk* chunk = &space.table.chunks[index]
    cdef uint32_t g = granule_from(space, chunk.address)
    cdef uint32_t last = granule_of(space, end_of(chunk))       # first granule not wholly inside
    cdef uint32_t end
    cdef Page* page
    while g < last:
        page = &space.page[space.page_at[g]]
        end = page.active + page.granules
        if page.active == g and end <= last:
            if page.busy:       # it had live bytes at the last plan: its idle time begins now
                page.idle_since = space.plans
                page.busy = False
            page.seen_idle = space.plans
            page.chunk = index
        g = end


cdef void see_swappable_in(Space* space, uint32_t index, IdleSearch* search) noexcept nogil:
    # Most pages have no dormant view, and are not read.
    cdef const Chunk* chunk = &space.table.chunks[index]
    cdef uint32_t last = granule_of(space, end_of(chunk))
    cdef uint32_t g = next_swap(space, granule_from(space, chunk.address), last)
    cdef Page* page
    while g < last:
        page = &space.page[space.page_at[g]]
        if page.active != g or page.dormant == NIL:
            space.swaps_at[g >> 6] &= ~(<uint64_t>1 << (g & 63))
        elif page.active + page.granules <= last:
            page.seen_idle = space.plans
            page.chunk = index
            search.lowest = min(search.lowest, address_of(space, page.dormant))
        g = next_swap(space, g + 1, last)


cdef inline uint32_t next_swap(const Space* space, uint32_t g, uint32_t last) noexcept nogil:
    # Returns the first granule from `g` on with its bit set, or `last`.
    cdef uint64_t bits
    while g < last:
        bits = space.swaps_at[g >> 6] >> (g & 63)
        if bits != 0:
            return min(g + <uint32_t>gm_low_bit64(bits), last)
        g = (g | 63) + 1
    return last


cdef void take_out(Space* space, Page* page, uint32_t* stream_slot, uint64_t* epoch) noexcept nogil:
    # Makes the active place of an idle page a hole, and updates the pages of the chunk above it.
    cdef uint64_t begin = address_of(space, page.active)
    cdef uint64_t end = address_of(space, page.active + page.granules)
    # The mark is read before the chunk is cut, which may change its index.
    stream_slot[0] = space.table.chunks[page.chunk].stream_slot
    epoch[0] = space.table.chunks[page.chunk].epoch
    page.seen_idle = 0
    see_above(space, holes_carve(space.table, page.chunk, begin, end))


cdef void see_above(Space* space, uint32_t index) noexcept nogil:
    # The chunk that was cut off above has a new index; the chunk below keeps the old one.
    see_again(space, space.table.chunks[index].next)


cdef void see_again(Space* space, uint32_t index) noexcept nogil:
    # Idle pages name their free chunk by its index, which has changed; NIL and chunks that are not
    # free have no such pages.
    cdef const Chunk* chunk
    cdef Page* page
    cdef uint32_t g, last
    if index == NIL or state_of(space.table, index) != CHUNK_FREE:
        return
    chunk = &space.table.chunks[index]
    g = granule_from(space, chunk.address)
    last = granule_of(space, end_of(chunk))
    while g < last:
        page = page_over(space, g)
        if is_idle(space, page):
            page.chunk = index
        g = page.active + page.granules


cdef void fill_granules(Space* space, uint32_t first, uint32_t granules, uint32_t stream_slot,
                        uint64_t epoch) noexcept nogil:
    # Turns granules that are a hole now into free memory.
    cdef uint64_t begin = address_of(space, first)
    cdef uint32_t filled = holes_fill(space.table, hole_at(space, begin), begin,
                                      address_of(space, first + granules), stream_slot, epoch)
    see_again(space, filled)


cdef uint32_t hole_at(const Space* space, uint64_t address) noexcept nogil:
    cdef uint32_t index = space.table.holes
    while index != NIL:
        if space.table.chunks[index].address <= address < end_of(&space.table.chunks[index]):
            return index
        index = space.table.chunks[index].bin_next
    return NIL


cdef void space_create(Space* space, Bfc* table, DeviceContext* context, const Access* access,
                       uint64_t* calls, EventSource* events, uint64_t first_bytes,
                       bint large) noexcept nogil:
    memset(space, 0, sizeof(Space))
    space.table = table
    space.context = context
    space.access = access
    space.calls = calls
    space.events = events
    space.large = large
    space.first_bytes = round_to_granule(addresses_bound(first_bytes))


cdef void page_note(const Space* space, const Page* page, uint32_t kind, uint32_t at,
                    uint32_t origin) noexcept nogil:
    note_page(space.events, kind, address_of(space, at), bytes_of(page),
              0 if origin == NIL else address_of(space, origin))


cdef CUresult range_reserve(const Space* space, uint64_t size, Range* fresh) noexcept nogil:
    # Tries the bytes of all ranges together, then halves them as long as the driver refuses.
    cdef uint64_t least = round_to_granule(size) + GRANULE
    cdef uint64_t wanted = space.first_bytes
    cdef CUresult code
    cdef uint32_t i
    # An unused granule separates ranges that the driver places side by side.
    if space.range_count == MAX_RANGES:
        return CUDA_ERROR_OUT_OF_MEMORY
    for i in range(space.range_count):
        wanted += space.ranges[i].bytes + GRANULE
    while True:
        wanted = max(wanted, least)
        code = address_reserve(space.context, wanted, &fresh.base)
        if code == CUDA_SUCCESS or wanted == least:
            break
        wanted = (wanted >> 1) & ~<uint64_t>(GRANULE - 1)
    fresh.bytes = wanted - GRANULE
    return code


cdef bint space_add_range(Space* space, const Range* fresh) noexcept nogil:
    cdef Range* added = &space.ranges[space.range_count]
    added[0] = fresh[0]
    # The numbers of granules continue, with one number between two ranges.
    added.first = 0
    if space.range_count:
        added.first = (added - 1).first + <uint32_t>((added - 1).bytes >> GRANULE_BITS) + 1
    if holes_add_range(space.table, added.base, added.bytes, &added.region) != BFC_OK:
        return False
    space.range_count += 1
    return True


cdef void space_destroy(Space* space) noexcept nogil:
    # Views are unmapped, pages released, then the addresses freed. A refusal cannot be reported
    # from here: each refused call is tried once more.
    cdef int _attempt
    for _attempt in range(2):
        if (space.context != NULL and not context_is_dead(space.context)
                and context_enter(space.context) == CUDA_SUCCESS):
            pages_forget(space)
            ranges_forget(space)
            context_leave(space.context)
    free(space.page)
    free(space.idle)
    free(space.page_at)
    free(space.swaps_at)
    free(space.retired)
    free(space.orphans)
    memset(space, 0, sizeof(Space))


cdef void pages_forget(Space* space) noexcept nogil:
    cdef uint32_t i
    cdef Page* page
    space_give_up_views(space)
    space_drop_retired(space, NULL)
    for i in range(space.page_count):
        page = &space.page[i]
        if page.granules == 0:
            continue
        # Memory is released last: its handle is needed while a view is mapped. Nothing is recorded,
        # because the host may have no memory for that.
        if (page.dormant != NIL
                and view_unmap(space, page.dormant, page.granules) == CUDA_SUCCESS):
            page.dormant = NIL
        if page.memory and view_unmap(space, page.active, page.granules) == CUDA_SUCCESS:
            if space.context.table.cuMemRelease(page.memory) != CUDA_SUCCESS:
                orphan_add(space, page.memory)
            page_give_slot(space, page)
    orphans_release(space)


cdef void space_give_up_views(Space* space) noexcept nogil:
    # Views that are unmapped while the space sleeps are removed, the later ones first: the last
    # view takes the number of a removed retired view.
    cdef uint32_t first, page, i
    space.keeps_views = False
    for i in range(space.views_asleep, 0, -1):
        page = kept_view(space, i - 1, &first)
        if i > space.page_count:
            retired_remove(space, i - 1 - space.page_count)
        elif page != NIL:
            view_set(space, first, space.page[page].granules, NIL)
            space.page[page].dormant = NIL
    space.views_asleep = 0


cdef void ranges_forget(Space* space) noexcept nogil:
    cdef Range* range_
    cdef uint32_t i
    for i in range(space.range_count):
        range_ = &space.ranges[i]
        if range_.base and space.context.table.cuMemAddressFree(
                range_.base, range_.bytes + GRANULE) == CUDA_SUCCESS:
            range_.base = 0


cdef void orphan_add(Space* space, uint64_t memory) noexcept nogil:
    # If the host has no memory for the entry, the handle is lost until the process ends.
    cdef uint64_t* orphans = <uint64_t*>realloc(
        space.orphans, (space.orphan_count + 1) * sizeof(uint64_t))
    if orphans == NULL:
        return
    space.orphans = orphans
    orphans[space.orphan_count] = memory
    space.orphan_count += 1


cdef void orphans_release(Space* space) noexcept nogil:
    cdef uint32_t kept = 0
    cdef uint32_t i
    for i in range(space.orphan_count):
        if space.context.table.cuMemRelease(space.orphans[i]) != CUDA_SUCCESS:
            space.orphans[kept] = space.orphans[i]
            kept += 1
    space.orphan_count = kept


cdef bint granules_ready(Space* space, uint32_t count) noexcept nogil:
    cdef uint32_t capacity = space.granules
    cdef uint64_t* swaps_at
    if count <= capacity:
        return True
    if not array_reserve(<void**>&space.page_at, &capacity, count, 256, sizeof(uint32_t)):
        return False
    swaps_at = <uint64_t*>realloc(space.swaps_at, capacity // 8)
    if swaps_at == NULL:
        return False
    space.swaps_at = swaps_at
    # The numbers of granules never change, so the arrays only grow; 0xFF is NIL in every byte.
    memset(space.page_at + space.granules, 0xFF, (capacity - space.granules) * sizeof(uint32_t))
    memset(swaps_at + space.granules // 64, 0, (capacity - space.granules) // 8)
    space.granules = capacity
    return True


cdef bint pages_ready(Space* space, uint32_t count) noexcept nogil:
    cdef uint32_t capacity = space.page_capacity
    count += space.page_count
    return (array_reserve(<void**>&space.idle, &capacity, count, 64, sizeof(uint32_t))
            and array_reserve(<void**>&space.page, &space.page_capacity, count, 64, sizeof(Page)))


cdef bint retired_ready(Space* space, uint32_t count) noexcept nogil:
    return array_reserve(<void**>&space.retired, &space.retired_capacity,
                         space.retired_count + count, 64, sizeof(RetiredView))


cdef void retired_add(Space* space, uint32_t page, uint32_t first, uint32_t stream_slot,
                      uint64_t epoch) noexcept nogil:
    space.retired[space.retired_count] = RetiredView(epoch, stream_slot, first, page)
    space.retired_count += 1
    view_set(space, first, space.page[page].granules, RETIRED)


cdef void retired_remove(Space* space, uint32_t i) noexcept nogil:
    # The last view takes its number.
    cdef const RetiredView* view = &space.retired[i]
    view_set(space, view.first, space.page[view.page].granules, NIL)
    space.retired_count -= 1
    space.retired[i] = space.retired[space.retired_count]


cdef uint32_t kept_view(const Space* space, uint32_t i, uint32_t* first) noexcept nogil:
    # Dormant views have the numbers of their pages; retired views follow.
    if i >= space.page_count:
        first[0] = space.retired[i - space.page_count].first
        return space.retired[i - space.page_count].page
    first[0] = space.page[i].dormant
    return i if space.page[i].granules and first[0] != NIL else NIL


cdef bint has_retired(const Space* space, uint32_t page) noexcept nogil:
    cdef uint32_t i
    for i in range(space.retired_count):
        if space.retired[i].page == page:
            return True
    return False


cdef uint32_t page_slot(Space* space) noexcept nogil:
    # Returns the lowest slot of a released page, else a fresh one; pages_ready has made room.
    cdef uint32_t i
    for i in range(space.page_unused, space.page_count):
        if space.page[i].granules == 0:
            space.page_unused = i + 1
            return i
    space.page_count += 1
    space.page_unused = space.page_count
    return space.page_count - 1


cdef void page_give_slot(Space* space, Page* page) noexcept nogil:
    page.granules = 0
    space.page_unused = min(space.page_unused, <uint32_t>(page - space.page))


# ---- The budget of time for moves ----------------------------------------------------------------


cdef enum:
    # 100 ms: the maximum of a burst of moves. The first steps of a training move hundreds of pages;
    # new pages instead would take three quarters of the time, and would be kept.
    SAVED_NS = 100000000
    # 1 s: the maximum with the time that making pages adds. One process makes 80 GB in less; with
    # eight processes each call takes seven times as long.
    EARNED_NS = 1000000000
    # 800 ms: overdrawn by 80 ms, new pages are made up to 1 % of the live peak; by 400 ms, 25 %.
    OVERDRAWN_NS = 800000000
    # 16 MiB at least: of a small arena, 1 % is less than a page.
    MIN_SLACK = 16777216


cdef void budget_init(MoveBudget* budget, double share) noexcept nogil:
    budget.share = share
    budget.saved = SAVED_NS if share > 0 else 0


cdef void budget_fill(MoveBudget* budget, uint64_t now) noexcept nogil:
    # Adds the share of the time since the last call.
    if budget.filled_at and now > budget.filled_at:
        budget_add(budget, <double>(now - budget.filled_at) * budget.share, SAVED_NS)
    budget.filled_at = now


cdef double budget_slack(MoveBudget* budget, uint64_t now, uint64_t live_peak) noexcept nogil:
    # The square: a budget that is overdrawn by little costs little memory, which soon makes moves
    # rare.
    cdef double overdrawn
    budget_fill(budget, now)
    if budget.share >= 1 or budget.saved > 0:
        return 0
    if budget.share == 0:
        return INFINITY
    overdrawn = -budget.saved / OVERDRAWN_NS
    return max(<double>live_peak * overdrawn * overdrawn, <double>MIN_SLACK)


cdef bint budget_rested(MoveBudget* budget, uint64_t now) noexcept nogil:
    budget_fill(budget, now)
    return budget.share >= 1 or budget.saved * 2 >= SAVED_NS


cdef void budget_spend(MoveBudget* budget, uint64_t nanoseconds) noexcept nogil:
    budget.saved -= <double>nanoseconds


cdef void budget_earn(MoveBudget* budget, uint64_t nanoseconds) noexcept nogil:
    # While new pages are made, because a program begins or has released its memory, moves may take
    # as long again: a new page instead of a move would take as long, and would be kept.
    if budget.share > 0:
        budget_add(budget, nanoseconds, EARNED_NS)


cdef void budget_add(MoveBudget* budget, double nanoseconds, double maximum) noexcept nogil:
    # An excess over `maximum` stays.
    budget.saved = max(budget.saved, min(budget.saved + nanoseconds, maximum))


# ---- Driver calls: reserve, create, map, unmap, release ------------------------------------------


cdef enum:
    ADDRESS_ALIGNMENT = 33554432        # 32 MiB, the largest page


cdef CUresult address_reserve(DeviceContext* context, uint64_t nbytes,
                              uint64_t* address) noexcept nogil:
    cdef CUdeviceptr pointer = 0
    cdef CUresult code = context_enter(context)
    if code != CUDA_SUCCESS:
        return code
    code = context.table.cuMemAddressReserve(&pointer, nbytes, ADDRESS_ALIGNMENT, 0, 0)
    context_leave(context)
    address[0] = pointer
    return code


# Whether new pages can be exported.
cdef bint exportable = False


cdef void pages_make_exportable() noexcept nogil:
    global exportable
    exportable = True


cdef bint pages_are_exportable() noexcept nogil:
    return exportable


cdef CUresult page_create(DeviceContext* context, uint64_t nbytes, uint64_t* memory) noexcept nogil:
    return memory_create(context, THE_DEVICE, exportable, nbytes, memory)


cdef CUresult space_set_access(const Space* space, const CUmemAccessDesc* place) noexcept nogil:
    # Dormant views are included, because they become active without a driver call, and all views of
    # a graph. There is one call for each run of views side by side, which never crosses a range's
    # end.
    cdef CUresult code = CUDA_SUCCESS
    cdef uint32_t first = 0
    cdef uint32_t end
    while first < space.granules and code == CUDA_SUCCESS:
        end = first
        while is_mapped(space, end):
            end += 1
        if end > first:
            sum_add(space.calls, 1)
            code = space.context.table.cuMemSetAccess(
                address_of(space, first), <uint64_t>(end - first) << GRANULE_BITS, place, 1)
        first = end + 1
    return code


cdef inline bint is_mapped(const Space* space, uint32_t granule) noexcept nogil:
    # A page without memory sleeps: the driver has no view of it.
    cdef const Page* page = page_over(space, granule)
    if page == NULL:
        return (space.keeps_views and space.views_asleep == 0
                and page_mapped_at(space, granule) == RETIRED)
    return page.memory != 0 and (space.views_asleep == 0 or is_backed(space, granule))


cdef bint space_reserves(const Space* space, uint64_t address, uint64_t size) noexcept nogil:
    # Modulo 2**64: an address below a range is above its size.
    cdef const Range* each
    cdef uint32_t i
    for i in range(space.range_count):
        each = &space.ranges[i]
        if address - each.base < each.bytes and size <= each.base + each.bytes - address:
            return True
    return False


cdef bint space_page_around(const Space* space, uint64_t address, MappedPage* found) noexcept nogil:
    cdef uint32_t granule
    cdef const Page* page
    if not space_reserves(space, address, 1):
        return False
    granule = granule_of(space, address)
    page = page_over(space, granule)
    # A page without memory sleeps.
    if page == NULL or page.memory == 0 or not is_backed(space, granule):
        return False
    found.begin = address_of(space, page.active)
    found.nbytes = bytes_of(page)
    found.memory = page.memory
    return True


cdef CUresult space_drop_retired(Space* space, Lock* lock) noexcept nogil:
    cdef CUresult code = CUDA_SUCCESS
    cdef const RetiredView* view
    while space.retired_count and code == CUDA_SUCCESS:
        view = &space.retired[space.retired_count - 1]
        code = view_unmap(space, view.first, space.page[view.page].granules)
        sum_add(space.calls, 1)
        if code == CUDA_SUCCESS:
            if lock != NULL:
                lock_acquire(lock)
            retired_remove(space, space.retired_count - 1)
            if lock != NULL:
                lock_release(lock)
    return code


cdef CUresult view_unmap(const Space* space, uint32_t first, uint32_t granules) noexcept nogil:
    return space.context.table.cuMemUnmap(address_of(space, first),
                                          <uint64_t>granules << GRANULE_BITS)


# ---- Validation ----------------------------------------------------------------------------------


cdef int pages_check(const Space* space) noexcept nogil:
    cdef uint64_t physical = 0
    cdef uint32_t mapped = 0
    cdef uint32_t i
    cdef int broken
    cdef const Page* page
    for i in range(space.page_count):
        page = &space.page[i]
        if page.granules == 0 and i < space.page_unused:
            return 45
        if page.granules == 0 or page.active == NIL:
            continue
        physical += bytes_of(page)
        mapped += page.granules if page.dormant == NIL else 2 * page.granules
        if not (check_view(space, page.active, page.granules, i)
                and (page.dormant == NIL or check_view(space, page.dormant, page.granules, i))):
            return 40
        if page.dormant != NIL and next_swap(space, page.active, page.active + 1) != page.active:
            return 47
    if physical != space.physical:
        return 41
    for i in range(space.retired_count):
        page = &space.page[space.retired[i].page]
        mapped += page.granules
        if page.granules == 0 or not check_view(space, space.retired[i].first, page.granules,
                                                RETIRED):
            return 46
    # Each granule that names a page lies in a view of that page.
    for i in range(space.granules):
        mapped -= space.page_at[i] != NIL
    if mapped != 0:
        return 42
    # The sum over the chunks must agree with that over the pages.
    physical = 0
    for i in range(space.range_count):
        broken = check_range(space, space.ranges[i].region, &physical)
        if broken:
            return broken
    return 44 if physical != space.physical else 0


cdef bint check_view(const Space* space, uint32_t first, uint32_t granules,
                     uint32_t index) noexcept nogil:
    cdef uint32_t g
    for g in range(first, first + granules):
        if page_mapped_at(space, g) != index:
            return False
    return True


cdef int check_range(const Space* space, uint32_t region, uint64_t* physical) noexcept nogil:
    # Each byte of a chunk has memory, and no byte of a hole has.
    cdef uint32_t index = space.table.regions[region].first
    cdef const Chunk* chunk
    cdef uint32_t g, last
    while index != NIL:
        chunk = &space.table.chunks[index]
        last = min(granule_from(space, end_of(chunk)), space.granules)
        for g in range(granule_of(space, chunk.address), last):
            if is_backed(space, g) == (state_of(space.table, index) == CHUNK_HOLE):
                return 43
        if state_of(space.table, index) != CHUNK_HOLE:
            physical[0] += chunk.size
        index = chunk.next
    return 0


cdef extern from *:
    """
    /* From number 40 on: those below are of bfc/table. */
    static const char *gm_pages_invariant(unsigned number) {
        static const char *const texts[] = {
            "every granule of a page's views names the page",
            "physical is the sum over pages",
            "a granule without a view names no page",
            "chunks have memory and holes have none",
            "chunks and pages of a space have the same bytes",
            "every slot of a page below page_unused is in use",
            "every granule of a retired view is marked, and its page exists",
            "a search for swaps finds every page with a dormant view",
        };
        return number - 40 < sizeof texts / sizeof *texts ? texts[number - 40]
                                                          : "unknown invariant";
    }
    """
    const char* gm_pages_invariant(unsigned number) noexcept nogil


cdef const char* pages_invariant(int number) noexcept nogil:
    return gm_pages_invariant(number)
