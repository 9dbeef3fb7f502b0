"""The page of a node, and this process's slot of it: below the interpreter."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from gpumem._native.budget cimport BudgetCore
from gpumem._native.driver cimport DeviceContext
from gpumem._support.lock cimport Lock

cdef enum:
    NODE_VERSION = 3            # changes with the structs below
    NODE_NAMES = 31
    NODE_SLOTS = 128
    RECORD_BYTES = 128
    RECORD_WORDS = 16
    TEXT_BYTES = 96
    MAX_READS = 64              # of a page, until each record's checksum fits
    MAX_CLAIMS = 16             # for one lease
    CHUNK = 268435456           # bytes of a lease
    CHUNK_PARTS = 16            # and at most this part of what the node has left
    DEATH_WAIT = 2_000_000_000  # ns after it, in which the driver may still release its memory
    SIZE_WAIT = 1_000_000_000   # ns in which a process leases what it has read to be free
    MAX_SIZINGS = 8             # reads of one process for which others wait
    JOIN_WAIT = 2_000_000_000   # ns that a process waits for another one that joins
    POLL = 200_000              # ns between two looks of a process that waits for others
    REFUND_POLL = 2_000_000     # ns between two requests to a driver that releases memory

cdef enum Outcome:
    NODE_OK
    NODE_SYSTEM                 # `error` has the errno
    NODE_FOREIGN
    NODE_DAMAGED
    NODE_OTHER_VERSION
    NODE_BUSY
    NODE_FULL
    NODE_GONE
    NODE_OTHER_LIMIT
    NODE_ABSENT

cdef struct NodeHeader:
    char[8] magic
    uint64_t version
    uint64_t refunded_at        # ns, monotonic: when the latest slot of a dead process was freed
    uint64_t sized_until        # ns, monotonic: see await_sizing
    uint64_t[12] unused

# A record that is all zeros is free.
cdef struct NodeName:
    uint64_t check              # of the words after it
    uint64_t limit
    uint64_t parent             # its number, from 1 and lower than this one's; 0: the root
    char[TEXT_BYTES] text       # from the root on, such as "gpu0/tenant-a"; ended by a 0
    uint64_t unused

cdef struct NodeSlot:
    uint64_t check              # of the words after it
    uint64_t serial             # of the write
    uint64_t claim              # bytes: leased, or to be leased
    uint64_t held               # bytes that are leased
    uint32_t name               # index
    int32_t process             # its id in its own PID namespace; 0: a sealed set
    int64_t priority
    uint64_t asked_bytes        # that it lacks; 0: it asks for nothing
    uint64_t asked_at           # ns, monotonic
    uint64_t asked_until
    int64_t asked_priority      # up to which the others are asked
    uint64_t asked_name         # index of the name that refuses
    uint64_t answered_at        # ns, monotonic: when it began to serve the requests up to then
    uint64_t answered_bytes     # released
    uint64_t unallocated        # bytes of `held` that were leased and not allocated at the write
    uint64_t asks_device        # whether the device lacks the bytes asked for, not a limit alone
    uint64_t namespace          # the PID namespace of `process`: its inode

cdef struct NodePage:
    NodeHeader header
    NodeName[NODE_NAMES] names
    NodeSlot[NODE_SLOTS] slots

cdef struct NodeCore:
    Lock asks                   # acquired before `lock`: one thread asks at a time
    Lock lock                   # of everything below
    char[TEXT_BYTES] name
    char[256] path
    uint32_t group              # id; 0: pages are the user's own
    uint64_t limit              # that the name must have
    uint64_t deadline           # ns
    int fd                      # -1: not open
    int bell
    int error
    uint32_t slot               # index
    NodeSlot own                # as the page has it
    NodePage* page              # as last read
    uint64_t sized_until        # as this process has written it; 0: it does not size itself now
    uint64_t sized_held         # bytes of which the lease ends it
    uint32_t sizings            # that this process has begun
    int64_t room                # bytes left under all limits then, with all claims
    uint32_t refusing           # index of the name that has the least left; the device: the root
    DeviceContext* context      # of the device that the node is of; NULL: of none
    BudgetCore* level           # what is leased is what is left in it, with what it has charged
    NodeCore* next
    void* face                  # the NodeMember
    # Calls the callbacks of this process; takes the interpreter lock.
    void (*relieve)(NodeCore* node, uint64_t nbytes) noexcept nogil

# Releases the slot's lock and the thread of this process with it; for a view, which has neither.
cdef void close_page(NodeCore* node) noexcept nogil
# Opens the file, checks who owns it, and acquires the lock of those that change names.
cdef int open_page(NodeCore* node, bint make) noexcept nogil
# Joins, if this process has not. Caller holds `lock`; so for all below.
cdef int ensure_open(NodeCore* node) noexcept nogil
cdef bint write_own(NodeCore* node) noexcept nogil
cdef int read_page(NodeCore* node) noexcept nogil
cdef int write_limit(NodeCore* node, uint32_t index, uint64_t limit, bint may_differ) noexcept nogil
# Moves leased bytes to a slot that is held by the descriptor; acquires `lock` itself.
cdef int hand_over(NodeCore* node, uint64_t nbytes, int* fd) noexcept nogil
cdef uint64_t return_unused(NodeCore* node) noexcept nogil
cdef bint ask_others(NodeCore* node, uint64_t nbytes) noexcept nogil
# Waits for a process that has read the free bytes, so that two do not size themselves by the same.
cdef void await_sizing(NodeCore* node) noexcept nogil
# Acquires the lock of those that change names, for which it waits at most JOIN_WAIT.
cdef int lock_names(NodeCore* node) noexcept nogil
cdef void unlock_names(NodeCore* node) noexcept nogil
# Frees the slots of dead processes; False: there is none. Caller holds `lock`; has read the page.
cdef bint refund_dead(NodeCore* node) noexcept nogil
# Bytes that are held, or claimed, under a name.
cdef uint64_t sum_under(const NodePage* page, uint32_t name, bint held) noexcept nogil
# Free bytes of the node's device, and all; False: the node is of none, or it does not answer.
cdef bint device_memory(const NodeCore* node, uint64_t* free_bytes, uint64_t* total) noexcept nogil
# Bytes that processes lease, or claim, of the device, and have not allocated yet.
cdef uint64_t due_of_device(const NodeCore* node, bint held) noexcept nogil
# Notes what this process's name has left in the page as last read.
cdef void note_room(NodeCore* node) noexcept nogil
cdef uint32_t find_name(const NodeCore* node, uint32_t length) noexcept nogil
# Frees this name and those below it. Caller has the lock of names, and no process uses them.
cdef int remove_name(NodeCore* node) noexcept nogil
cdef uint64_t pid_namespace() noexcept nogil
# Has the children of forks leave the node.
cdef void keep_node(NodeCore* node) noexcept nogil
