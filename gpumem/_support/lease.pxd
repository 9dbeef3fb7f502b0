"""Leases: counted references to a block by its views, held without the interpreter.

A DLPack capsule or a buffer view holds a lease, not a Python object, so that a consumer may drop it
on any thread. The resource that makes a lease gives it the function that frees the block; the last
drop calls that function.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc

from gpumem._support.atomics cimport count64_add, load64, published64, store64

# Another stream that uses a block. The resource chooses the slot; an arena notes, when the block is
# freed, the epoch of the stream after which that use ends.
cdef struct Use:
    uint32_t slot
    uint64_t until

# The streams recorded for one block. It grows while the block lives, so that a free allocates
# nothing. From `next` on the fields are the arena's, for a freed block that waits for the streams.
cdef struct Uses:
    Use* at
    uint32_t count
    uint32_t capacity
    Uses* next
    uint64_t handle         # of the block
    uint32_t stream_slot    # of the stream it was freed on, and that stream's epoch at the free
    uint64_t epoch
    bint taken              # while it is pending free: a thread makes its stream wait for it

# Views that began and views that ended. A view begins under the interpreter lock and ends on any
# thread: with two counters only an end is an atomic operation.
cdef struct ViewCount:
    uint64_t begun
    uint64_t ended

# No view begins once the buffer's own reference has ended. So the end of that reference subtracts
# the views begun from the views ended, and the word is 0 after the last end and after no other. One
# atomic operation shows whether an end is the last; any other end does not access the lease again,
# because another thread may have freed it.
cdef struct Lease:
    ViewCount views         # of this block
    uint32_t stream_slot    # the block is freed on
    uint64_t handle         # of the block, as its resource numbers it
    uint64_t address
    uint64_t nbytes
    Uses* uses              # recorded streams; NULL: none. `release` takes them over
    void* owner             # `release` drops it
    void (*release)(Lease* lease) noexcept nogil    # frees the block and drops the owner
    ViewCount* owner_views  # of all blocks of the owner, this one too; NULL: not counted
    void* view_room         # host memory for what describes an only view; NULL: none yet

cdef inline void view_begin(ViewCount* views) noexcept nogil:
    store64(&views.begun, load64(&views.begun) + 1)


# Caller holds the interpreter lock, so that no view begins. The bytes of an ended view are not read
# any more.
cdef inline uint64_t views_alive(const ViewCount* views) noexcept nogil:
    return load64(&views.begun) - published64(&views.ended)


# Begins a view. Caller holds the interpreter lock, and the buffer's own reference has not ended.
cdef inline void lease_retain(Lease* lease) noexcept:
    view_begin(&lease.views)
    if lease.owner_views != NULL:
        view_begin(lease.owner_views)


# Returns host memory, always of the same size, for the view that `lease_retain` just began. The
# lease keeps and frees it. NULL if another view is alive, which may use it, or out of memory. If no
# other view is alive, each has ended by an atomic operation after its last use of that memory.
cdef inline void* lease_view_room(Lease* lease, size_t nbytes) noexcept:
    if views_alive(&lease.views) != 1:
        return NULL
    if lease.view_room == NULL:
        lease.view_room = malloc(nbytes)
    return lease.view_room


# A lease that holds its buffer's own reference; NULL: no host memory.
cdef inline Lease* lease_create(uint64_t handle, uint64_t address, uint64_t nbytes,
                                uint32_t stream_slot, void* owner,
                                void (*release)(Lease*) noexcept nogil) noexcept nogil:
    cdef Lease* lease = <Lease*>malloc(sizeof(Lease))
    if lease == NULL:
        return NULL
    lease.views.begun = 0
    lease.views.ended = 0
    lease.stream_slot = stream_slot
    lease.handle = handle
    lease.address = address
    lease.nbytes = nbytes
    lease.uses = NULL
    lease.owner = owner
    lease.release = release
    lease.owner_views = NULL
    lease.view_room = NULL
    return lease


cdef inline void lease_end(Lease* lease, uint64_t by) noexcept nogil:
    # Another thread may free the lease after the addition, unless this is the last end.
    if count64_add(&lease.views.ended, by) == 0:
        lease.release(lease)
        free(lease.view_room)
        free(lease)


# Ends a view. NULL is the lease of an empty buffer.
cdef inline void lease_drop(Lease* lease) noexcept nogil:
    if lease == NULL:
        return
    if lease.owner_views != NULL:   # before this view's own end, while the lease keeps its owner
        count64_add(&lease.owner_views.ended, 1)
    lease_end(lease, 1)


# Ends the buffer's own reference, once. Caller holds the interpreter lock, or the buffer is closed.
# Views stay alive.
cdef inline void lease_drop_buffer(Lease* lease) noexcept nogil:
    lease_end(lease, 0 - lease.views.begun)


# ---- recorded streams ----------------------------------------------------------------------------

# Makes room for `count` streams; False if the host has no memory, and nothing has changed.
cdef inline bint uses_reserve(Uses** uses, uint32_t count) noexcept nogil:
    cdef Uses* noted = uses[0]
    cdef Use* grown
    cdef uint32_t capacity
    if noted == NULL:
        noted = <Uses*>calloc(1, sizeof(Uses))
        if noted == NULL:
            return False
    if noted.capacity < count:
        capacity = max(count, noted.capacity * 2, <uint32_t>2)
        grown = <Use*>realloc(noted.at, capacity * sizeof(Use))
        if grown == NULL:
            if uses[0] == NULL:
                free(noted)
            return False
        noted.at = grown
        noted.capacity = capacity
    uses[0] = noted
    return True


# Records a stream once; False as above. `added`: it is new.
cdef inline bint uses_add(Uses** uses, uint32_t slot, bint* added) noexcept nogil:
    cdef Uses* noted = uses[0]
    cdef uint32_t i
    added[0] = False
    if noted != NULL:
        for i in range(noted.count):
            if noted.at[i].slot == slot:
                return True
    if not uses_reserve(uses, noted.count + 1 if noted != NULL else 1):
        return False
    noted = uses[0]
    noted.at[noted.count].slot = slot
    noted.at[noted.count].until = 0
    noted.count += 1
    added[0] = True
    return True


cdef inline void uses_free(Uses* uses) noexcept nogil:
    if uses != NULL:
        free(uses.at)
        free(uses)
