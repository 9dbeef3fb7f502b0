"""Memory that sleeps: physical handles that are released to the driver, and a store for their
bytes.

A *sleeper* is what the owner of mapped handles fills in: an arena for its pages, a graph pool for
its regions, a tensor for its own. It names the handles (`SleepPage`) and the live bytes on them
(`SleepPiece`); all else is done here, alike for all. Addresses stay reserved, the owner's.

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
    uint64_t block          # how the owner names what it is of

cdef enum StoreKind:
    STORE_HOST
    STORE_DEVICE
    STORE_FILE

# Where bytes go.
cdef struct StorePlace:
    StoreKind kind
    DeviceContext* device   # STORE_DEVICE: another one
    int file                # STORE_FILE: open, and with that much room from an offset on
    uint64_t offset
    uint64_t room
    uint64_t keep           # STORE_HOST: bytes that stay for the next time

cdef struct StoreChunk:
    uint64_t address        # 0: not made
    uint64_t nbytes

cdef struct FileWindow:
    uint64_t nbytes         # written
    uint64_t sums[2]        # of these bytes: another process may change the file

# Results of a file, above all results of the driver.
cdef enum:
    FILE_SHORTENED = 1000000
    FILE_CHANGED = 1000001
    FILE_FAILED = 1000002   # and an errno

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
    HostPages ahead         # of chunks of pinned memory that are not there yet, during a sleep

cdef struct Sleeper:
    DeviceContext* context
    const Access* access    # who may touch the pages
    uint64_t* calls         # where driver calls are counted
    EventSource* events     # where memory that comes and goes is recorded
    void* owner
    # Are the bytes still wanted? They may have been freed while they slept.
    bint (*is_live)(void* owner, const SleepPiece* piece) noexcept nogil
    # Memory without a mapping that the driver refused to take back: the owner tries again.
    void (*orphan)(void* owner, uint64_t memory) noexcept nogil
    SleepPage* pages
    uint32_t page_count
    uint32_t page_capacity
    SleepPiece* pieces
    uint32_t piece_count
    uint32_t piece_capacity
    uint64_t nbytes         # of the pieces; read without a lock
    uint64_t copied         # bytes from the store's beginning that are copied for sure
    uint32_t cursor         # the piece to be copied next
    uint64_t within         # bytes of it that are queued
    bint no_store           # the last failure was the store's: no room for the copy
    Store store

# Called anew for each sleep and each wake, because pages may have left. False: out of host memory.
cdef bint sleeper_add_page(Sleeper* sleeper, uint64_t address, uint64_t nbytes,
                           uint64_t* memory) noexcept nogil
cdef bint sleeper_add_piece(Sleeper* sleeper, uint64_t address, uint64_t nbytes,
                            uint64_t block) noexcept nogil

# All work that may touch the pages has ended, and none is queued until it has woken. No lock that a
# free needs is held. A refusal leaves some handles released: `sleeper_wake` makes them again.
# Without pieces `place` may be NULL.
cdef CUresult sleeper_sleep(Sleeper* sleeper, const StorePlace* place,
                            const char** call) noexcept nogil
# A refusal leaves it asleep, with its bytes in the store.
cdef CUresult sleeper_wake(Sleeper* sleeper, const char** call) noexcept nogil
# Undoes a wake that succeeded, before anything has used the memory: the store has the bytes still.
cdef void sleeper_release(Sleeper* sleeper) noexcept nogil
# Bytes of memory that the named pages lack.
cdef uint64_t sleeper_lacks(const Sleeper* sleeper) noexcept nogil
# Before pages are named anew.
cdef void sleeper_forget_pages(Sleeper* sleeper) noexcept nogil
# Ends a sleep: forgets pages and pieces, and the store but for what is to be kept.
cdef void sleeper_forget(Sleeper* sleeper) noexcept nogil
