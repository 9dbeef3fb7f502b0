"""Pages that move: physical memory under reserved addresses, placed where it is needed.

A *space* is reserved address space, cut into granules of 2 MiB. It is made of *ranges*, the first
reserved with the first block, each further one, when no place is left, as large as all before it:
an arena of a few kilobytes uses few addresses, and thousands fit into a process. A
*page* is one physical handle of 1 to 16 granules; the driver maps it whole or not at all, so it is
the unit that moves. A mapping of a page is a *view*. The memory of a page counts in its *active*
view. The *dormant* view is left from before a move and is a hole in the chunk table, until the page
is idle and a block is placed there: then the two views change roles without a driver call.

An idle page (no live byte; it lies inside a free chunk) may be mapped at a second address while
work on it is still queued, for the stream that freed it: that is ordered by the stream itself
(measured on an H200). Other streams' pages count as idle only once their work has completed. A view
is unmapped only after the epoch in which it became dormant has completed: an unmap does not wait. A
page may move again before that: then its dormant view is *retired*. Nothing is placed there until a
later plan unmaps it.

The pages of a graph pool move too, but keep every view: a graph uses the addresses that its capture
was given whenever it is launched. No view counts as quiet there, so none is unmapped and no page is
released before the pool ends. Blocks in two views of a page are never used at the same time, as the
later block was allocated after the free of the earlier one, on its stream.

Growing means building a window for the block: a run of free chunks and holes. New pages fill the
holes while reserved memory stays within a share of the live peak. Above it, the pages that have
been idle longest move there; the share is passed only when none is idle, or the time for moving is
used up.

Caller holds `grow_lock`, everywhere here. Planning also holds the arena lock, and changes the chunk
table and the pages at once; the driver calls follow without it. Then, with the arena lock again,
the plan is finished, or undone if the driver refused a call.
"""

from libc.stdint cimport uint16_t, uint32_t, uint64_t, uint8_t

from gpumem._native.bfc cimport Bfc, Chunk, CHUNK_FREE, NIL, SLOT_RELEASED
from gpumem._native.driver cimport Access, DeviceContext
from gpumem._support.atomics cimport load8
from gpumem._support.events cimport EventSource

cdef enum:
    GRANULE_BITS = 21
    GRANULE = 2097152           # 2 MiB: the smallest handle of a current GPU
    MAX_PAGE_GRANULES = 16      # 32 MiB: up to there all mappings cost the same
    PEAK_PAGES = 224            # pages that the live peak is divided into, at least
    CLAIM_PAGES = 56            # the same of a block that is a large part of it
    BLOCK_PAGES = 8             # blocks of at least this many get pages of the largest size
    LIMITED_GRANULES = 2        # 4 MiB: pages of small blocks below a limit
    LIMIT_BITS = 62             # of a hard limit; one of more bits is none
    MAX_RETIRED = 4096          # views; each plan reads all of them
    RETIRED = 0xFFFFFFFE        # in Space.page_at: a retired view
    MAX_RANGES = 24             # they double, so this is more than there are addresses
    PLANNED_SLOTS = 96          # chunk slots that a plan may need in addition to two per granule

# 48 bytes. The fields that plans read of every page come first.
cdef struct Page:
    uint64_t seen_idle          # number of the last plan that saw it idle
    uint64_t idle_since         # number of the plan that first saw it idle
    uint32_t active             # first granule of the view that counts; NIL: it is being released
    uint32_t dormant            # first granule of the other view; NIL: none
    uint32_t chunk              # the free chunk it lay in when it was last seen idle
    uint16_t dormant_stream_slot    # of work that may still be queued through the dormant view
    uint8_t granules            # 0: this slot is unused
    uint8_t busy                # it had a live byte at the last plan
    uint64_t dormant_epoch
    uint64_t memory             # physical handle of the driver

# A view that a page left two moves ago or earlier, while work was still queued through it.
cdef struct RetiredView:
    uint64_t epoch              # of work that may still be queued through it
    uint32_t stream_slot
    uint32_t first              # granule
    uint32_t page               # exists: a page with a retired view is not released

# One reservation. Granules of all ranges are numbered in one row; each range has one number, and
# one granule of addresses, more than it uses, so that its end is no other range's beginning.
cdef struct Range:
    uint64_t base
    uint64_t bytes              # usable; reserved are these and one granule
    uint32_t first              # number of the granule at `base`
    uint32_t region             # of the table

cdef struct Space:
    Bfc* table
    DeviceContext* context      # of the arena, as the four others; NULL: nothing was reserved yet
    const Access* access        # the places that may access the pages
    uint64_t* calls             # where calls of the driver are counted
    EventSource* events
    Range ranges[MAX_RANGES]
    uint32_t range_count
    uint64_t first_bytes        # of addresses, for the first range
    uint32_t* page_at           # page mapped at each granule; NIL: none; RETIRED
    # A bit at the first granule of each active view with a dormant one, now or before.
    uint64_t* swaps_at
    uint32_t granules           # of page_at and swaps_at
    Page* page                  # page_capacity slots
    uint32_t page_count         # slots ever used
    uint32_t page_capacity
    uint32_t page_unused        # slots below it are in use
    uint32_t* idle              # numbers of the pages that the last plan saw idle, upward
    uint32_t idle_count
    RetiredView* retired
    uint32_t retired_count
    uint32_t retired_capacity
    uint64_t physical           # bytes of all pages
    uint64_t plans
    bint large                  # holds blocks from 256 KiB on, in pages of more than one granule
    bint keeps_views            # of a graph pool: no view is unmapped while it is in use
    uint32_t views_asleep       # views that are unmapped while such a space sleeps
    uint64_t created            # pages that were mapped; minus `released`: pages there are
    uint64_t moved
    uint64_t swapped            # dormant views made active again, without a driver call
    uint64_t released           # of those, released to the driver; not those that sleep
    uint64_t spared             # pages made without a search for idle ones: no time left to move
    uint64_t* orphans           # memory without a view that the driver refused to release
    uint32_t orphan_count

cdef enum ActionKind:
    ACTION_CREATE = 0           # new memory at granule `to`
    ACTION_MOVE = 1             # an idle page from `origin` to `to`
    ACTION_RELEASE = 2          # an idle page is released to the driver
    ACTION_DROP = 3             # a dormant view is unmapped, to make room
    ACTION_DROP_RETIRED = 4     # a retired view is unmapped

# One step of a plan, with the data to undo it.
cdef struct Action:
    ActionKind kind
    uint32_t page
    uint32_t to
    uint32_t origin             # active view before
    uint32_t unmap[2]           # views to unmap first: the dormant one, the active one; NIL: none
    bint unmapped[2]
    bint slept                  # the page had no memory: it slept
    uint32_t stream_slot        # mark of the free chunk it lay in
    uint64_t epoch
    bint created                # memory was made
    bint done                   # mapped at `to`

cdef enum PlanResult:
    PLAN_OK = 0
    PLAN_NO_PLACE = 1           # no range has room for the block: another may be added
    PLAN_NO_MEMORY = 2          # neither the hard limit nor idle pages leave what is missing
    PLAN_NO_METADATA = 3

# A part of the claimed window that was free, in another slot than the released one.
cdef struct Piece:
    uint64_t begin              # address
    uint64_t end
    uint64_t epoch              # mark of its free chunk
    uint32_t stream_slot

cdef struct Plan:
    uint32_t chunk              # the claimed window, used until finished
    Piece* pieces               # upward
    uint32_t piece_count
    Action* actions
    uint32_t count
    bint over_limit             # it needs more than the hard limit, and must be undone
    bint spares                 # pages are made because the time for moves is used up
    uint64_t beyond_share       # bytes of new pages that pass the share limit
    uint32_t creates            # how many of the actions make a page
    uint32_t moves              # how many move or release one
    uint64_t move_ns            # nanoseconds of the driver calls of those
    uint64_t create_ns          # and of the new pages
    uint32_t next_idle          # see longest_idle: where the search for an idle page goes on,
    uint32_t next_wanted        # of at most this many granules; 0: no search has begun
    uint32_t next_granules      # of the latest page that it found
    uint64_t next_since
    const char* refused         # the driver's call that failed

cdef struct Demand:
    uint64_t size               # bytes of the block, in quanta
    uint64_t claim              # bytes of its place until it is finished; see build_within
    uint64_t requested
    uint32_t stream_slot        # stream that will use it
    uint64_t live_peak          # bytes, this block included
    uint64_t reserved           # bytes of physical memory held by the arena, all ranges
    uint64_t share_limit        # bytes up to which pages are made without a search for idle ones
    uint64_t spare_limit        # bytes up to which new pages are made before idle ones move
    uint64_t hard_limit         # bytes never passed
    bint by_budget              # the hard limit is a budget's, not max_mem
    bint unfinished             # may use memory of other streams, after a wait on the device
    bint gapped                 # a plan had gaps that every idle page was too large for
    bint anew                   # its place has no page before; see build_within

cdef inline uint32_t granule_of(const Space* space, uint64_t address) noexcept nogil:
    # An address in the granule after a range's end has the number after its last one.
    cdef uint32_t i = 0
    while address - space.ranges[i].base >= space.ranges[i].bytes + GRANULE:
        i += 1
    return space.ranges[i].first + <uint32_t>((address - space.ranges[i].base) >> GRANULE_BITS)

cdef inline uint32_t granule_from(const Space* space, uint64_t address) noexcept nogil:
    # Returns the first granule that begins at an address or above it.
    return granule_of(space, address + GRANULE - 1)

cdef inline uint64_t round_to_granule(uint64_t nbytes) noexcept nogil:
    return (nbytes + GRANULE - 1) & ~<uint64_t>(GRANULE - 1)

cdef inline uint64_t address_of(const Space* space, uint32_t granule) noexcept nogil:
    cdef uint32_t i = space.range_count - 1
    while granule < space.ranges[i].first:
        i -= 1
    return space.ranges[i].base + (<uint64_t>(granule - space.ranges[i].first) << GRANULE_BITS)

cdef inline uint32_t page_mapped_at(const Space* space, uint32_t granule) noexcept nogil:
    return space.page_at[granule] if granule < space.granules else NIL

cdef inline Page* page_over(const Space* space, uint32_t granule) noexcept nogil:
    # Returns the page that has the granule in its active or dormant view; NULL: none has.
    cdef uint32_t mapped = page_mapped_at(space, granule)
    if mapped == NIL or mapped == RETIRED:
        return NULL
    return &space.page[mapped]

cdef inline uint64_t bytes_of(const Page* page) noexcept nogil:
    return <uint64_t>page.granules << GRANULE_BITS

cdef inline uint64_t end_of(const Chunk* chunk) noexcept nogil:
    return chunk.address + chunk.size

cdef inline bint may_use(const Space* space, const Chunk* chunk,
                         uint32_t stream_slot) noexcept nogil:
    # Whether a chunk is free for work of `stream_slot` now: it was freed on it, is free for every
    # stream, or its work can be waited for. No event is polled here.
    return load8(&chunk.state) == CHUNK_FREE and (
        chunk.stream_slot == stream_slot or chunk.stream_slot == SLOT_RELEASED
        or chunk.epoch <= space.table.bins[chunk.stream_slot].behind)

cdef inline bint is_idle(const Space* space, const Page* page) noexcept nogil:
    return page.seen_idle == space.plans

cdef inline bint is_quiet(const Space* space, uint32_t stream_slot, uint64_t epoch) noexcept nogil:
    # Whether all work of this mark has completed, and no graph will repeat it.
    return not space.keeps_views and (
        stream_slot == SLOT_RELEASED or epoch <= space.table.bins[stream_slot].completed)

cdef inline bint overlaps(const Space* space, const Page* page, uint64_t begin,
                          uint64_t end) noexcept nogil:
    return (address_of(space, page.active) < end
            and address_of(space, page.active + page.granules) > begin)

cdef inline bint is_movable(const Space* space, const Page* page, uint64_t begin,
                            uint64_t end) noexcept nogil:
    # Whether a page is idle, outside of [begin, end), and its dormant view, if any, can be unmapped
    # or retired. Plans check each page in `idle`, because they have used some of them.
    return (is_idle(space, page) and not overlaps(space, page, begin, end)
            and (space.retired_count < MAX_RETIRED or is_dormant_quiet(space, page)))

cdef inline bint is_dormant_quiet(const Space* space, const Page* page) noexcept nogil:
    # Whether the dormant view, if any, can be unmapped now.
    return (page.dormant == NIL
            or is_quiet(space, page.dormant_stream_slot, page.dormant_epoch))

cdef inline bint has_active(const Page* page, uint32_t granule) noexcept nogil:
    # Returns whether the granule is in its active view. NIL is above every granule.
    return page.active <= granule < page.active + page.granules

cdef inline bint is_backed(const Space* space, uint32_t granule) noexcept nogil:
    cdef const Page* page = page_over(space, granule)
    return page != NULL and has_active(page, granule)
