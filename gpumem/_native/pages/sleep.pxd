"""Memory that sleeps: physical handles that are released to the driver, and a store for their
bytes.

The owner of mapped handles fills in a *sleeper*: an arena for its pages, a graph pool for its
regions, a tensor for its own. It names the handles (`SleepPage`) and the live bytes on them
(`SleepPiece`); all else is done here. The owner's addresses stay reserved.

A sleep: bytes are copied in the order of addresses, some groups of handles ahead; once a group's
copies have ended, its handles are unmapped, and released while the next copies run. Several threads
make the pages of pinned memory at the same time; they are registered a chunk at a time. A wake:
handles are made and mapped, a run at a time, and the copies of one run go on while the next is
made.

The store is pinned memory of the host, memory of another device, or a file. Copied bytes stay
in it until `sleeper_wake` has succeeded, so that a refusal at any step can be undone or tried
again. Functions say `down` for a sleep and `up` for a wake.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.backing cimport Backing, HostPages
from gpumem._native.driver cimport Access, CUresult, DeviceContext
from gpumem._support.events cimport EventSource

# One mapped physical handle.
cdef struct SleepPage:
    uint64_t address
    uint64_t nbytes
    uint64_t* memory        # the owner's field with the driver's handle; 0: it sleeps
    bint made               # by the wake under way

# Live bytes, within one page or over neighbours.
cdef struct SleepPiece:
    uint64_t address
    uint64_t nbytes
    uint64_t offset         # in the store
    uint64_t block          # identifies its block to the owner

cdef enum StoreKind:
    STORE_HOST
    STORE_DEVICE
    STORE_FILE

# The place of the copied bytes.
cdef struct StorePlace:
    StoreKind kind
    DeviceContext* device   # STORE_DEVICE: another one
    int file                # STORE_FILE: open, with `room` bytes from `offset` on
    uint64_t offset
    uint64_t room
    uint64_t keep           # STORE_HOST: bytes of chunks that are kept for the next sleep, at most

cdef struct StoreChunk:
    uint64_t address        # 0: not made
    uint64_t nbytes

cdef struct FileWindow:
    uint64_t nbytes         # written
    uint64_t sums[2]        # of samples of them: another process may change the file

# Added to the errno of a file, for a result above those of the driver: ENODATA, if the file was
# shortened, EBADMSG, if it was changed.
cdef enum:
    FILE_FAILED = 1000000

cdef struct Store:
    StorePlace place
    Backing backing         # of the chunks; not of a file's
    Access access           # to chunks on another device
    StoreChunk* chunks      # of 256 MiB each, but the last
    uint32_t count
    uint64_t nbytes         # wanted now; kept chunks may have more
    # A file is read and written in windows of 16 MiB, through the first chunk.
    FileWindow* windows
    uint64_t window         # number of the one in the chunk, from 1; 0: none
    uint64_t filled         # end of the copied bytes, from the beginning of the store
    uint64_t written        # end of the bytes that the file has
    HostPages ahead         # during a sleep: pages for the missing chunks of pinned memory

cdef struct Sleeper:
    DeviceContext* context
    const Access* access    # the places that may access the pages
    uint64_t* calls         # where driver calls are counted
    EventSource* events     # where memory that is made and released is recorded
    void* owner
    # Whether the bytes are still live: they may have been freed while they slept.
    bint (*is_live)(void* owner, const SleepPiece* piece) noexcept nogil
    # Keeps memory without a mapping that the driver refused to release: the owner tries again.
    void (*orphan)(void* owner, uint64_t memory) noexcept nogil
    SleepPage* pages
    uint32_t page_count
    uint32_t page_capacity
    SleepPiece* pieces
    uint32_t piece_count
    uint32_t piece_capacity
    uint64_t nbytes         # of the pieces; read without a lock
    uint64_t kept           # bytes of the store while awake; read without a lock
    uint64_t copied         # bytes from the store's beginning with completed copies
    uint32_t cursor         # the piece to be copied next
    uint64_t within         # bytes of it that are queued
    bint no_store           # the last failure was the store's: no room for the copy
    Store store

# Called anew for each sleep and each wake, because pages may have left. False: the host has no
# memory.
cdef bint sleeper_add_page(Sleeper* sleeper, uint64_t address, uint64_t nbytes,
                           uint64_t* memory) noexcept nogil
cdef bint sleeper_add_piece(Sleeper* sleeper, uint64_t address, uint64_t nbytes,
                            uint64_t block) noexcept nogil

# All work that may access the pages has ended, and none is queued until it has woken. Caller holds
# no lock that a free needs. A refusal leaves some handles released: `sleeper_wake` makes them
# again. Without pieces `place` may be NULL.
cdef CUresult sleeper_sleep(Sleeper* sleeper, const StorePlace* place,
                            const char** call) noexcept nogil
# A refusal leaves it asleep, with its bytes in the store.
cdef CUresult sleeper_wake(Sleeper* sleeper, const char** call) noexcept nogil
# Undoes a wake that succeeded, before anything has used the memory: the store still has the bytes.
cdef void sleeper_release(Sleeper* sleeper) noexcept nogil
# Returns the bytes of memory that the named pages lack.
cdef uint64_t sleeper_lacks(const Sleeper* sleeper) noexcept nogil
# Removes the named pages, before pages are named anew.
cdef void sleeper_forget_pages(Sleeper* sleeper) noexcept nogil
# Bytes that all awake sleepers have kept (atomic).
cdef uint64_t kept_for_sleep
# Ends a sleep: forgets pages and pieces, and the store but for what is to be kept.
cdef void sleeper_forget(Sleeper* sleeper) noexcept nogil
# Releases what an earlier sleep has kept. It is awake.
cdef void sleeper_release_kept(Sleeper* sleeper) noexcept nogil
