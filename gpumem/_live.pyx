"""This process's page for `gpumem top`: made, refreshed by a thread, removed.

The page is the file /dev/shm/gpumem-<user id>-<process id>, mode 0600, little-endian: a header,
then two copies of everything. The process writes them in turn; each carries its number and, first
of all, a CRC-32 (zlib's) of the bytes after it. Of the copies with a right CRC a reader takes the
one with the higher number. So it never sees half of an update, in any order of the machine's
stores, and finds the previous copy whole if the process was killed in the middle of one. The
process holds flock(LOCK_EX) on the file: a reader that gets the lock has found a process that
ended, or runs another program.

The thread belongs to the process, not to the interpreter, and takes no lock of an allocator: the
numbers stay true while a thread sits in a system call, or keeps the interpreter lock. It does take
the locks of the lists of resources and of budgets, so that neither is freed while it is read.

`start` publishes; GPUMEM_TOP=1 publishes with the first resource, so that a process without one is
not listed. In a fork's child publishing begins again with the child's first resource.
"""

import atexit
import fcntl
import os
import sys
import warnings

from libc.errno cimport EEXIST, ENOMEM
from libc.stdint cimport uint32_t, uint64_t, uint8_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset
from posix.unistd cimport close

from gpumem._buffer cimport BlockLedger, HOOK_OF_TOP, LedgerCounters, set_resource_hook
from gpumem._native.arena.api cimport (
    arena_counts_now, arena_state, ArenaCore, ArenaCounts, STATE_CLOSED,
)
from gpumem._native.budget cimport budget_load, BudgetCore, budgets_visit
from gpumem._support.atomics cimport load32, load64
from gpumem._support.clock cimport clock_ns, time_of_day_ns
from gpumem._support.events cimport event_sources_visit, EventSource, OWNER_ARENA, OWNER_LEDGER
from gpumem._support.process cimport on_fork, process_is_exiting

from gpumem._support.environment import read_switch, warn_of_variable
from gpumem._support.files import is_at
from gpumem._support.forks import ForkLock


cdef enum:
    LIVE_VERSION = 4            # changes with the structs below and ArenaCounts
    LIVE_HEADER_BYTES = 4096
    LIVE_RESOURCES = 256        # room in a copy; further ones are only counted
    LIVE_BUDGETS = 128
    MAX_READS = 8               # of one resource's counters, until two in a row agree

cdef struct LiveHeader:
    char[8] magic
    uint32_t version
    uint32_t header_bytes
    uint32_t copy_bytes         # from the beginning of one copy to that of the next
    uint32_t resource_bytes
    uint32_t budget_bytes
    uint32_t period_ms          # between two updates
    uint64_t process

cdef struct LiveResource:
    uint64_t id                 # of the resource in its process; never used again
    uint64_t budget             # id of the budget that it charges; 0: none
    uint64_t source             # id of the resource that its memory comes from; 0: none
    char[32] memory             # texts are UTF-8, cut and ended by a 0
    char[24] kind
    char[64] name
    ArenaCounts counters

cdef struct LiveBudget:
    uint64_t id                 # of the budget in its process; never used again
    uint64_t parent             # id; 0: a root
    char[64] name
    uint64_t used
    uint64_t limit              # 1 << 63: none; so for `soft`
    uint64_t soft
    uint64_t peak

# LiveResource[resources] and LiveBudget[budgets] follow.
cdef struct LiveCopy:
    uint32_t crc                # of all later bytes, up to `bytes`
    uint32_t bytes              # of this copy, with its last record
    uint64_t number             # of the update, from 1
    uint64_t time               # ns since 1970
    uint64_t clock              # ns, monotonic
    uint32_t resources          # records of them, the newest first
    uint32_t budgets
    uint32_t resources_left_out
    uint32_t budgets_left_out

cdef uint32_t LIVE_COPY_BYTES = (sizeof(LiveCopy) + LIVE_RESOURCES * sizeof(LiveResource)
                                 + LIVE_BUDGETS * sizeof(LiveBudget) + 4095) & ~4095
cdef uint32_t LIVE_FILE_BYTES = LIVE_HEADER_BYTES + 2 * LIVE_COPY_BYTES

# Readers unpack the page without padding, as little-endian.
assert sizeof(LiveHeader) == 40 and sizeof(LiveCopy) == 48 and sizeof(LiveBudget) == 112
assert sizeof(LiveResource) == 144 + sizeof(ArenaCounts) and sys.byteorder == "little"

cdef extern from "files.h" nogil:
    int file_write(int file, const void* bytes, size_t nbytes, uint64_t offset)

cdef extern from "ticker.h" nogil:
    int ticker_start(void (*tick)() noexcept nogil, uint64_t period)
    void ticker_stop()
    void ticker_set_period(uint64_t period)

cdef ArenaCounts no_counts
counts = tuple(no_counts)       # the names of the fields, in their order
# Only a reader under an arena's lock has these, or they have no meaning outside of an arena.
hidden = ("spanned", "num_regions", "largest_free", "moves_refused", "rows_in_use", "live_spans",
          "graphs")
COUNTERS = tuple(name for name in counts if name not in hidden)     # named as in gpumem.Stats
COUNTERS_FORMAT = "".join("8x" if name in hidden else "Q" for name in counts)   # for `struct`

# CRC-32 of zlib, four bits at a time: polynomial 0xEDB88320, reflected.
cdef uint32_t[16] CRC = [
    0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
    0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
]

VERSION = LIVE_VERSION
FOLDER = "/dev/shm"
PERIOD = 0.1                    # default seconds between updates

cdef char* page = NULL          # this process's, as in its file; NULL: nothing is published
cdef int lock_file = -1         # the file, locked as long as it is open
cdef uint64_t updates = 0       # of the page
cdef double wanted = 0          # seconds between updates, also of a fork's child; 0: off
cdef object published = None    # the file's path
cdef object changing = ForkLock()   # whether anything is published


# ---- writing, without the interpreter ------------------------------------------------------------

# A copy that is being written, and the number of records that it has room for.
cdef struct Writing:
    LiveCopy* copy
    uint32_t max_resources
    uint32_t max_budgets


cdef void write_copy(Writing* writing, uint64_t number) noexcept nogil:
    cdef LiveCopy* copy = writing.copy
    copy.number = number
    copy.time = time_of_day_ns()
    copy.clock = clock_ns()
    copy.resources = 0
    copy.budgets = 0
    copy.resources_left_out = 0
    copy.budgets_left_out = 0
    copy.bytes = sizeof(LiveCopy)
    event_sources_visit(add_resource, writing)
    budgets_visit(add_budget, writing)


cdef void add_resource(EventSource* source, void* context) noexcept nogil:
    cdef LiveCopy* copy = (<Writing*>context).copy
    cdef LiveResource* entry = <LiveResource*>(<char*>copy + copy.bytes)
    if copy.resources == (<Writing*>context).max_resources:
        copy.resources_left_out += 1
        return
    if not read_counters(source, &entry.counters):
        return
    entry.id = source.serial
    entry.budget = source.budget
    entry.source = source.upstream
    memcpy(entry.memory, source.memory, sizeof(entry.memory))
    memcpy(entry.kind, source.kind, sizeof(entry.kind))
    memcpy(entry.name, source.name, sizeof(entry.name))
    copy.resources += 1
    copy.bytes += sizeof(LiveResource)


cdef void add_budget(const BudgetCore* level, void* context) noexcept nogil:
    cdef LiveCopy* copy = (<Writing*>context).copy
    cdef LiveBudget* entry = <LiveBudget*>(<char*>copy + copy.bytes)
    if copy.budgets == (<Writing*>context).max_budgets:
        copy.budgets_left_out += 1
        return
    entry.id = level.serial
    # The parent of a root that leases from a node counts leases, not what is used.
    entry.parent = (0 if level.parent == NULL or level.parent.is_account
                    else level.parent.serial)
    memset(entry.name, 0, sizeof(entry.name))
    snprintf(entry.name, sizeof(entry.name), "%s", level.name)
    entry.used = budget_load(&level.used)
    entry.limit = budget_load(&level.limit)
    entry.soft = budget_load(&level.soft)
    entry.peak = budget_load(&level.peak)
    copy.budgets += 1
    copy.bytes += sizeof(LiveBudget)


cdef void update() noexcept nogil:
    # The two copies are written in turn, so that the other one is always complete.
    global updates
    cdef Writing writing
    updates += 1
    writing.copy = <LiveCopy*>(page + LIVE_HEADER_BYTES + (updates & 1) * LIVE_COPY_BYTES)
    writing.max_resources = LIVE_RESOURCES
    writing.max_budgets = LIVE_BUDGETS
    write_copy(&writing, updates)
    seal(writing.copy)
    # The header too: another process may have shortened the file. A write that fails is repeated by
    # the next update; until then readers see the copy before.
    file_write(lock_file, page, sizeof(LiveHeader), 0)
    file_write(lock_file, writing.copy, writing.copy.bytes, <char*>writing.copy - page)


cdef void seal(LiveCopy* copy) noexcept nogil:
    # A copy is sealed last: without the right number a reader uses the other copy.
    cdef const uint8_t* bytes = <const uint8_t*>copy
    cdef uint32_t crc = 0xffffffff
    cdef uint32_t i
    for i in range(sizeof(copy.crc), copy.bytes):
        crc = CRC[(crc ^ bytes[i]) & 15] ^ (crc >> 4)
        crc = CRC[(crc ^ (bytes[i] >> 4)) & 15] ^ (crc >> 4)
    copy.crc = ~crc


cdef void write_header(uint64_t process, uint32_t period_ms) noexcept nogil:
    cdef LiveHeader* header = <LiveHeader*>page
    memcpy(header.magic, b"gpumemTP", sizeof(header.magic))
    header.version = LIVE_VERSION
    header.header_bytes = LIVE_HEADER_BYTES
    header.copy_bytes = LIVE_COPY_BYTES
    header.resource_bytes = sizeof(LiveResource)
    header.budget_bytes = sizeof(LiveBudget)
    header.period_ms = period_ms
    header.process = process


cdef void after_fork_in_child() noexcept nogil:
    # The page and its thread are the parent's; the child's own begins with its first resource.
    global page, lock_file
    if page != NULL:
        free(page)
        close(lock_file)
        page = NULL
        lock_file = -1
    begin_with_first_resource()


on_fork(NULL, NULL, after_fork_in_child)


# ---- publishing ----------------------------------------------------------------------------------

def start(period):
    """Publish, refreshed every `period` seconds; returns the file's path.

    Raises
    ------
    OSError
        Out of memory for the file or its thread, or the file is another user's.
    """
    global wanted
    cdef uint32_t period_ms = max(1, round(period * 1000))
    with changing:
        if page != NULL and not is_at(lock_file, published):
            end_page()
        if page == NULL:
            make_file(period_ms)
        else:
            (<LiveHeader*>page).period_ms = period_ms
            ticker_set_period(<uint64_t>period_ms * 1000000)
        wanted = max(period, 0.001)     # the shortest period that the page can hold
        return published


cdef int make_file(uint32_t period_ms) except -1:
    global published, lock_file
    cdef int descriptor
    target = f"{FOLDER}/gpumem-{os.getuid()}-{os.getpid()}"
    made = f"{target}.new"
    remove_left(made)
    remove_left(target)
    descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        # All blocks are allocated now: updates then succeed while shared memory is full.
        os.posix_fallocate(descriptor, 0, LIVE_FILE_BYTES)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        begin_page(descriptor, period_ms)
        os.rename(made, target)     # a reader that sees the file sees it complete and locked
    except BaseException:
        lock_file = -1
        end_page()
        os.unlink(made)
        os.close(descriptor)
        raise
    published = target
    set_resource_hook(HOOK_OF_TOP, NULL)
    return 0


cdef int remove_left(str path) except -1:
    # Removes the file of a dead process with this id; the lock protects a living process's file.
    if not os.path.lexists(path):
        return 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileExistsError(
            EEXIST, "a process of this id, in another PID namespace, publishes there", path
        ) from None
    finally:
        os.close(descriptor)
    os.unlink(path)
    return 0


cdef int begin_page(int descriptor, uint32_t period_ms) except -1:
    global page, lock_file, updates
    cdef int code
    page = <char*>calloc(1, LIVE_FILE_BYTES)
    if page == NULL:
        raise OSError(ENOMEM, os.strerror(ENOMEM))
    lock_file = descriptor
    updates = 0
    write_header(os.getpid(), period_ms)
    update()
    code = ticker_start(update, <uint64_t>period_ms * 1000000)
    if code != 0:
        free(page)
        page = NULL
        raise OSError(code, f"cannot start the publishing thread: {os.strerror(code)}")
    return 0


cdef void end_page() except *:
    global page, lock_file, published
    if page == NULL:
        return
    # First the step that can fail: the page then goes on, and can be ended again.
    if lock_file >= 0 and is_at(lock_file, published):
        os.unlink(published)
    with nogil:
        ticker_stop()
        free(page)
        if lock_file >= 0:
            close(lock_file)
    page = NULL
    lock_file = -1
    published = None


@atexit.register
def stop():
    """Publish no more. Idempotent."""
    global wanted
    with changing:
        wanted = 0
        set_resource_hook(HOOK_OF_TOP, NULL)
        end_page()


def path():
    """Return the file's path, or None where nothing is published."""
    return published if page != NULL else None


def copy_now():
    """Return a copy as it would be written into the page now, but of everything and unsealed."""
    cdef Writing writing
    cdef bytearray room
    writing.max_resources = LIVE_RESOURCES
    writing.max_budgets = LIVE_BUDGETS
    while True:
        room = bytearray(sizeof(LiveCopy) + writing.max_resources * sizeof(LiveResource)
                         + writing.max_budgets * sizeof(LiveBudget))
        writing.copy = <LiveCopy*><char*>room
        with nogil:
            write_copy(&writing, 1)
        if not writing.copy.resources_left_out and not writing.copy.budgets_left_out:
            return bytes(room[:writing.copy.bytes])
        writing.max_resources += writing.copy.resources_left_out
        writing.max_budgets += writing.copy.budgets_left_out


# ---- with the first resource ---------------------------------------------------------------------

cdef void begin_with_first_resource() noexcept nogil:
    if wanted:
        set_resource_hook(HOOK_OF_TOP, begin_with_resource)


cdef int begin_with_resource() except -1:
    # An allocator must not fail because nothing can be published.
    set_resource_hook(HOOK_OF_TOP, NULL)
    if process_is_exiting():
        return 0
    try:
        start(wanted)
    except OSError as error:
        warnings.warn(f"gpumem top will not see this process: {error}", RuntimeWarning,
                      stacklevel=2)
    return 0


def _read_environment():
    global wanted
    value = os.environ.get("GPUMEM_TOP", "")
    on = read_switch(value)
    if on is None:
        warn_of_variable(f"invalid GPUMEM_TOP={value!r} is ignored: expected 0 or 1, or a "
                         "word such as on or off")
    wanted = PERIOD if on else 0
    begin_with_first_resource()


_read_environment()


# ---- counters of a resource, without its locks ---------------------------------------------------
#
# No lock, no driver call, no interpreter. Each word is read whole, by a relaxed load. All of them
# are read twice, and again while they differ, so that at rest the counters are exact. While threads
# allocate, they may differ by the blocks under way, and while a cache is emptied by what it held.
# The counts of blocks never fall. A block that another thread freed counts as in use until its
# owner's cache collects it.

cdef bint read_counters(EventSource* source, ArenaCounts* counters) noexcept nogil:
    # For a visitor of event sources: the owner cannot be freed. False: it is closed.
    cdef ArenaCounts before
    cdef int _attempt
    if is_closed(source):
        return False
    read_once(source, counters)
    for _attempt in range(MAX_READS):
        before = counters[0]
        read_once(source, counters)
        if memcmp(&before, counters, sizeof(before)) == 0:
            break
    never_falls(&source.told_allocs, &counters.num_allocs)
    never_falls(&source.told_frees, &counters.num_frees)
    return True


cdef inline void never_falls(uint64_t* told, uint64_t* count) noexcept nogil:
    # A count that moves from a cache to its arena during the read may be missing.
    count[0] = told[0] = max(told[0], count[0])


cdef bint is_closed(const EventSource* source) noexcept nogil:
    if source.owner_is == OWNER_ARENA:
        return arena_state(<const ArenaCore*>source.owner) == STATE_CLOSED
    return load32(<const uint32_t*>&(<const BlockLedger*>source.owner).closed)


cdef void read_once(const EventSource* source, ArenaCounts* counters) noexcept nogil:
    memset(counters, 0, sizeof(ArenaCounts))
    if source.owner_is == OWNER_ARENA:
        arena_counts_now(<const ArenaCore*>source.owner, counters)
    elif source.owner_is == OWNER_LEDGER:
        read_ledger(<const BlockLedger*>source.owner, counters)


cdef void read_ledger(const BlockLedger* ledger, ArenaCounts* counters) noexcept nogil:
    # Memory that the driver caches in a pool is left out, because that query might block.
    cdef const LedgerCounters* now = &ledger.counters
    counters.limit = load64(&ledger.limit)
    counters.in_use = load64(&now.in_use)
    counters.requested_in_use = load64(&now.requested)
    counters.reserved = counters.in_use + load64(&now.waiting)
    counters.max_in_use = load64(&now.max_in_use)
    counters.max_reserved = load64(&now.max_held)
    counters.num_allocs = load64(&now.num_allocs)
    counters.num_frees = load64(&now.num_frees)
    counters.num_reserves = load64(&now.num_reserves)
    counters.num_shrinkages = load64(&now.num_shrinks)
    counters.max_alloc_size = load64(&now.max_block)
    counters.driver_calls = load64(&now.calls)
