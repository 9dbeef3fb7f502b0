"""Limits that processes of one machine share: a page in shared memory, without a server.

The page of a node is the file /dev/shm/gpumem-node-<user id>-<node>, mode 0600, or with
GPUMEM_NODE_GROUP set gpumem-node-g<group id>-<node>, mode 0660. It has a header, a tree of names
with limits, and a slot for each process. A slot counts what its process has leased. The process
leases in chunks, and its budgets charge what it has leased, so a charge that fits touches no page.

The sum of the slots is the only total, so a process that is killed in any instruction loses
nothing: its slot is refunded as a whole. A lease first claims its bytes in its own slot and then
reads all slots. If the claims of all are within each limit, the claim is held; if not, withdrawn.
Of two processes that claim at the same time, the later one reads both claims, so the held bytes
never exceed a limit. No lock is held meanwhile: a stopped process delays no other one.

Each process holds a lock of the kernel on its slot's bytes of the file, which ends with the process
in any PID namespace. A process that gets the lock of a slot has found a dead one. A sealed set has
a slot of its own, which is locked as long as a process has its descriptor.

The page is read and written by system calls and never mapped: a file that another program cuts off
ends a read early, where an access of a mapping would be fatal, and a file that can be found by its
name cannot be sealed. Each record has a checksum, because a read may see half of a write; numbers
and texts of a record are checked before they are used.

A node may be of a device. Then each lease also asks the driver for its free bytes, less what was
leased and is not allocated yet: so memory counts that was not allocated through gpumem, and two
processes that begin at once see each other's leases. Each slot says how much of its lease was not
allocated when it was written; what was allocated since counts twice until the process writes again,
at the latest when others ask it for memory.

A process that lacks memory writes that into its slot and touches the file's times. A thread in each
process waits for that, releases what is idle, and calls the `on_pressure` callbacks.
"""

from libc.errno cimport EACCES, ENOENT, errno
from libc.stdint cimport INT64_MAX, UINT64_MAX
from libc.string cimport memcmp, memcpy, memset, strlen, strncmp
from posix.fcntl cimport F_UNLCK, F_WRLCK, O_CLOEXEC, O_CREAT, O_RDWR, open as open_file
from posix.stat cimport fchmod, fstat, futimens, S_ISREG, stat, struct_stat
from posix.unistd cimport close, fchown, ftruncate, geteuid, getpid, pread, pwrite

from gpumem._native.budget cimport (
    await_refund, budget_add, budget_left, budget_load, budget_refusing, budget_uncharge,
    BUDGET_UNLIMITED, lease_for, release_idle_below,
)
from gpumem._native.driver cimport (
    context_enter, context_is_dead, context_leave, CUDA_SUCCESS,
)
from gpumem._support.atomics cimport store64
from gpumem._support.clock cimport clock_ns, sleep_ns
from gpumem._support.interpreter cimport interpreter_know_thread
from gpumem._support.lock cimport lock_acquire, lock_init, lock_release
from gpumem._support.process cimport on_fork, process_is_exiting


cdef extern from *:
    """
    #include <errno.h>
    #include <fcntl.h>
    #include <poll.h>
    #include <sys/inotify.h>
    #include <sys/stat.h>
    #include <unistd.h>

    /* Takes or drops the lock on a byte of an open file; False: another open file has it. */
    static int byte_lock(int fd, int64_t offset, int kind) {
        struct flock lock = {.l_type = (short)kind, .l_whence = SEEK_SET, .l_start = offset,
                             .l_len = 1};
        return fcntl(fd, F_OFD_SETLK, &lock) == 0;
    }

    static int bell_open(const char *path) {
        int bell = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
        if (bell >= 0 && inotify_add_watch(bell, path, IN_ATTRIB) < 0) {
            close(bell);
            bell = -1;
        }
        return bell;
    }

    /* Waits for the bell; without one, 50 ms. */
    static void bell_wait(int bell) {
        char events[4096];
        struct pollfd waiting = {.fd = bell, .events = POLLIN};
        poll(&waiting, 1, bell < 0 ? 50 : -1);
        while (bell >= 0 && read(bell, events, sizeof events) > 0) {}
    }

    static void fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
    """
    enum:
        O_NOFOLLOW
    bint byte_lock(int fd, int64_t offset, int kind) noexcept nogil
    int bell_open(const char* path) noexcept nogil
    void bell_wait(int bell) noexcept nogil
    void fence() noexcept nogil

cdef extern from "threads.h" nogil:
    ctypedef struct pthread_t:
        pass
    int thread_start(pthread_t* thread, bint detached, size_t stack_bytes,
                     void* (*run)(void*) noexcept nogil, void* argument)

cdef NodeCore* all_nodes = NULL


cdef void ring_bells(const NodeCore* node) noexcept nogil:
    futimens(node.fd, NULL)


cdef uint64_t pid_namespace() noexcept nogil:
    cdef struct_stat status
    return status.st_ino if stat("/proc/self/ns/pid", &status) == 0 else 0


# ---- the page ------------------------------------------------------------------------------------

cdef uint64_t checksum(const void* record) noexcept nogil:
    cdef const uint64_t* words = <const uint64_t*>record
    cdef uint64_t sum = 0x9E3779B97F4A7C15ULL
    cdef uint32_t i
    for i in range(1, RECORD_WORDS):
        sum = (sum ^ words[i]) * 0x100000001B3ULL
        sum ^= sum >> 29
    return sum | 1              # a used record is never all zeros


cdef bint record_fits(const void* record, const void* zeros) noexcept nogil:
    cdef uint64_t check = (<const uint64_t*>record)[0]
    return memcmp(record, zeros, RECORD_BYTES) == 0 if check == 0 else check == checksum(record)


cdef int check_page(const NodePage* page) noexcept nogil:
    cdef char[RECORD_BYTES] zeros
    cdef const NodeSlot* slot
    cdef uint32_t i
    memset(zeros, 0, RECORD_BYTES)
    if memcmp(page.header.magic, b"gpumemND", 8) != 0:
        return NODE_DAMAGED
    if page.header.version != NODE_VERSION:
        return NODE_OTHER_VERSION
    for i in range(NODE_NAMES):
        if (not record_fits(&page.names[i], zeros) or page.names[i].parent > i
                or page.names[i].limit > BUDGET_UNLIMITED
                or page.names[i].text[TEXT_BYTES - 1] != 0):
            return NODE_DAMAGED
    for i in range(NODE_SLOTS):
        slot = &page.slots[i]
        if (not record_fits(slot, zeros) or slot.name >= NODE_NAMES
                or slot.asked_name >= NODE_NAMES or slot.claim >= BUDGET_UNLIMITED
                or slot.held > slot.claim or slot.asked_bytes >= BUDGET_UNLIMITED
                or slot.unallocated > slot.held):
            return NODE_DAMAGED
    return NODE_OK


cdef int read_page(NodeCore* node) noexcept nogil:
    """Read the page, and note what this process's name has left. Caller holds `lock`."""
    cdef struct_stat status
    cdef int outcome = NODE_DAMAGED
    cdef uint32_t i
    fence()                     # after this process's claim
    if node.fd < 0 or fstat(node.fd, &status) != 0 or status.st_nlink == 0:
        return NODE_GONE
    for i in range(MAX_READS):
        if pread(node.fd, node.page, sizeof(NodePage), 0) != sizeof(NodePage):
            return NODE_DAMAGED
        outcome = check_page(node.page)
        if outcome != NODE_DAMAGED:
            break
        if i > 4:
            sleep_ns(1000 * i)
    if outcome == NODE_OK and node.level != NULL:
        note_room(node)
    return outcome


cdef void note_room(NodeCore* node) noexcept nogil:
    node.room = room_under(node, False)
    store64(&node.level.spare, BUDGET_UNLIMITED if node.room == INT64_MAX else max(node.room, 0))


cdef bint write_record(NodeCore* node, void* record, int64_t offset) noexcept nogil:
    (<uint64_t*>record)[0] = checksum(record)
    return pwrite(node.fd, record, RECORD_BYTES, offset) == RECORD_BYTES


cdef bint write_word(NodeCore* node, const uint64_t* word) noexcept nogil:
    """Write one word of the header as it was last read."""
    cdef int64_t offset = <const char*>word - <const char*>node.page
    return pwrite(node.fd, word, sizeof(uint64_t), offset) == sizeof(uint64_t)


cdef inline int64_t name_offset(uint32_t index) noexcept nogil:
    return RECORD_BYTES * (1 + <int64_t>index)


cdef inline int64_t slot_offset(uint32_t index) noexcept nogil:
    return RECORD_BYTES * (1 + NODE_NAMES + <int64_t>index)


cdef uint64_t unallocated(const NodeCore* node) noexcept nogil:
    """Return what this process has leased and not charged, or charged for memory that is not there.

    Memory of other libraries is reserved before they allocate it.
    """
    return budget_left(node.level) + budget_load(&node.level.pending)


cdef bint write_own(NodeCore* node) noexcept nogil:
    node.own.serial += 1
    node.own.unallocated = min(node.own.held, unallocated(node))
    return write_record(node, &node.own, slot_offset(node.slot))


cdef bint is_under(const NodePage* page, uint32_t name, uint32_t above) noexcept nogil:
    while name != above and page.names[name].parent:
        name = <uint32_t>page.names[name].parent - 1    # lower each time
    return name == above


cdef uint64_t sum_under(const NodePage* page, uint32_t name, bint held) noexcept nogil:
    """Add up what is held, or claimed, under a name."""
    cdef uint64_t total = 0
    cdef const NodeSlot* slot
    cdef uint32_t i
    for i in range(NODE_SLOTS):
        slot = &page.slots[i]
        if slot.claim and is_under(page, slot.name, name):
            total = min(total + (slot.held if held else slot.claim), BUDGET_UNLIMITED)
    return total


cdef int64_t room_under(NodeCore* node, bint held) noexcept nogil:
    """Return the bytes that this process's name, those above it and the device have left.

    Below 0: a limit is exceeded; INT64_MAX: there is none. Also set `refusing`.
    """
    cdef const NodePage* page = node.page
    cdef uint32_t name = node.own.name
    cdef int64_t room = INT64_MAX
    cdef int64_t left
    cdef uint64_t free_bytes, total
    node.refusing = name
    while True:
        if page.names[name].limit < BUDGET_UNLIMITED:
            left = <int64_t>(page.names[name].limit - sum_under(page, name, held))
            if left < room:
                room = left
                node.refusing = name
        if page.names[name].parent == 0:
            break
        name = <uint32_t>page.names[name].parent - 1
    if device_memory(node, &free_bytes, &total):
        left = <int64_t>(free_bytes - due_of_device(node, held))
        if left < room:
            room = left
            node.refusing = name
    return room


cdef bint device_memory(const NodeCore* node, uint64_t* free_bytes, uint64_t* total) noexcept nogil:
    cdef size_t free_now = 0
    cdef size_t all_bytes = 0
    cdef bint known
    if (node.context == NULL or context_is_dead(node.context)
            or context_enter(node.context) != CUDA_SUCCESS):
        return False
    known = node.context.table.cuMemGetInfo(&free_now, &all_bytes) == CUDA_SUCCESS
    context_leave(node.context)
    free_bytes[0] = free_now
    total[0] = all_bytes
    return known


cdef uint64_t due_of_device(const NodeCore* node, bint held) noexcept nogil:
    cdef const NodeSlot* slot
    cdef uint64_t due = unallocated(node)
    cdef uint32_t i
    if not held:
        due += node.own.claim - node.own.held       # the page may have them as they were before
    for i in range(NODE_SLOTS):
        slot = &node.page.slots[i]
        if i != node.slot:
            due += slot.unallocated if held else slot.unallocated + slot.claim - slot.held
            due = min(due, BUDGET_UNLIMITED)
    return due


cdef bint device_lacks(const NodeCore* node, uint64_t nbytes) noexcept nogil:
    cdef uint64_t left, total
    return device_memory(node, &left, &total) and left < nbytes + due_of_device(node, True)


# ---- leases --------------------------------------------------------------------------------------

cdef bint take_slot(NodeCore* node, uint32_t index) noexcept nogil:
    """Lock a slot that no process has, and free it. Caller unlocks it."""
    cdef NodeSlot slot
    if not byte_lock(node.fd, slot_offset(index), F_WRLCK):
        return False
    # The owner may have ended after the page was read.
    memset(&slot, 0, sizeof(slot))
    if pwrite(node.fd, &slot, RECORD_BYTES, slot_offset(index)) == RECORD_BYTES:
        return True
    byte_lock(node.fd, slot_offset(index), F_UNLCK)
    return False


cdef bint take_free_slot(NodeCore* node) noexcept nogil:
    """Lock a slot that was free when the page was read, and set `slot`; False: there is none."""
    cdef uint32_t i
    for i in range(NODE_SLOTS):
        if node.page.slots[i].check == 0 and take_slot(node, i):
            node.slot = i
            return True
    return False


cdef bint refund_dead(NodeCore* node) noexcept nogil:
    """Refund what dead processes held. Caller holds `lock` and has read the page.

    A process loses host memory before its files, and so before its slot's lock. The driver may
    release a GPU's memory later: the free bytes of the node's device show it.
    """
    cdef bint refunded = False
    cdef uint32_t i
    for i in range(NODE_SLOTS):
        if node.page.slots[i].check and i != node.slot and take_slot(node, i):
            byte_lock(node.fd, slot_offset(i), F_UNLCK)
            refunded = True
    if refunded:
        node.page.header.refunded_at = clock_ns()
        write_word(node, &node.page.header.refunded_at)
    return refunded


cdef bint claim(NodeCore* node, uint64_t nbytes) noexcept nogil:
    """Claim bytes above those that are held, and read the page; False: they do not fit."""
    node.own.claim = node.own.held + nbytes
    if write_own(node) and read_page(node) == NODE_OK and node.room >= 0:
        return True
    node.own.claim = node.own.held
    return False


cdef bint lease(NodeCore* node, uint64_t nbytes) noexcept nogil:
    """Lease a chunk that has at least these bytes. Caller holds `lock`."""
    cdef uint64_t spare = budget_load(&node.level.spare)
    cdef uint64_t size = max(nbytes, min(<uint64_t>CHUNK, spare // CHUNK_PARTS))
    cdef uint32_t i
    for i in range(MAX_CLAIMS):
        if claim(node, size):
            node.own.held = node.own.claim
            budget_uncharge(node.level, size)
            write_own(node)     # if it cannot, others count the claim
            if node.sized_until and node.own.held >= node.sized_held:
                end_sizing(node)
            return True
        if size > nbytes:
            size = nbytes
            continue
        write_own(node)
        if read_page(node) != NODE_OK:
            break
        if refund_dead(node):
            continue
        if room_under(node, True) < <int64_t>nbytes:
            break
        # Another process's claim was in the way. The one with the lower slot tries again first.
        sleep_ns(<uint64_t>(node.slot + 1) * (i + 1) * 1000)
    return False


cdef void await_sizing(NodeCore* node) noexcept nogil:
    """Wait while another process sizes itself; then this one does. Caller holds `lock`.

    A process may size itself by the bytes that it reads to be free, also one that has loaded its
    weights before. It has SIZE_WAIT to lease half of them. A process that reads them for a log
    delays others MAX_SIZINGS times, and then no more.
    """
    cdef uint64_t now = clock_ns()
    cdef uint64_t until = now + SIZE_WAIT       # also of what a stranger has written
    while node.sizings < MAX_SIZINGS and lock_names(node) == NODE_OK:
        if read_page(node) != NODE_OK or node.room == INT64_MAX:
            unlock_names(node)
            break
        if (node.page.header.sized_until <= now or now >= until
                or node.page.header.sized_until == node.sized_until):
            node.sized_until = node.page.header.sized_until = now + SIZE_WAIT
            node.sized_held = node.own.held + <uint64_t>max(node.room, 0) // 2
            node.sizings += 1
            write_word(node, &node.page.header.sized_until)
            unlock_names(node)
            break
        unlock_names(node)
        lock_release(&node.lock)
        sleep_ns(POLL)
        lock_acquire(&node.lock)
        now = clock_ns()


cdef void end_sizing(NodeCore* node) noexcept nogil:
    """Let others read the free bytes, unless one of them does so already."""
    if read_page(node) == NODE_OK and node.page.header.sized_until == node.sized_until:
        node.page.header.sized_until = 0
        write_word(node, &node.page.header.sized_until)
    node.sized_until = 0


cdef bint lease_missing(BudgetCore* level, uint64_t nbytes) noexcept nogil:
    cdef BudgetCore* refusing = budget_refusing(level, nbytes)
    cdef NodeCore* node
    cdef uint64_t left
    cdef bint leased = False
    if refusing == NULL or refusing.node == NULL:
        return False
    node = <NodeCore*>refusing.node
    lock_acquire(&node.lock)
    left = budget_left(refusing)
    if left >= nbytes:
        leased = True           # another thread leased it
    elif ensure_open(node) == NODE_OK:
        leased = lease(node, nbytes - left)
    lock_release(&node.lock)
    return leased


cdef uint64_t return_unused(NodeCore* node) noexcept nogil:
    """Return leased bytes that nothing charges; return how many."""
    cdef uint64_t left = 0
    lock_acquire(&node.lock)
    if node.fd >= 0:
        left = budget_left(node.level)
        # A charge: no other thread can use the bytes from here on.
        while left and not budget_add(node.level, left):
            left = budget_left(node.level)
        node.own.held -= left
        node.own.claim = node.own.held
        write_own(node)
    lock_release(&node.lock)
    return left


cdef int hand_over(NodeCore* node, uint64_t nbytes, int* fd) noexcept nogil:
    """Move leased bytes that nothing charges to a slot of their own.

    The slot is held as long as a process has the descriptor. Others may see both meanwhile.
    """
    cdef NodeCore other
    cdef int outcome
    lock_acquire(&node.lock)
    other = node[0]             # which reads into the same page
    outcome = open_page(&other, False)
    if outcome == NODE_OK:
        other.own.held = other.own.claim = nbytes
        other.own.asked_bytes = other.own.unallocated = other.own.process = 0
        other.own.answered_at = UINT64_MAX      # no process answers for it
        if not (take_free_slot(&other)
                and write_record(&other, &other.own, slot_offset(other.slot))):
            outcome = NODE_FULL
        unlock_names(&other)
    # The charge keeps the bytes from other threads.
    if outcome == NODE_OK and (budget_add(node.level, nbytes)
                               or lease(node, nbytes) and budget_add(node.level, nbytes)):
        node.own.held -= nbytes
        node.own.claim = node.own.held
        write_own(node)
        fd[0] = other.fd
    else:
        close(other.fd)
        outcome = outcome if outcome != NODE_OK else NODE_SYSTEM
    lock_release(&node.lock)
    return outcome


lease_for = lease_missing


# ---- pressure ------------------------------------------------------------------------------------

cdef bint is_asked(const NodeCore* node, const NodeSlot* slot, uint64_t now) noexcept nogil:
    return (slot.asked_bytes != 0 and slot.asked_until > now
            and slot.asked_at > node.own.answered_at
            and node.own.priority <= slot.asked_priority
            and is_under(node.page, node.own.name, <uint32_t>slot.asked_name))


cdef void answer(NodeCore* node) noexcept nogil:
    """Release bytes for which other processes ask, and those leased above a lowered limit."""
    cdef uint64_t now, before
    cdef uint64_t released = 0
    cdef uint64_t asked = 0
    cdef uint64_t asks_device = False
    cdef bint is_above = False
    cdef uint32_t i
    lock_acquire(&node.lock)
    now = clock_ns()
    if read_page(node) == NODE_OK:
        for i in range(NODE_SLOTS):
            if i != node.slot and is_asked(node, &node.page.slots[i], now):
                asked += node.page.slots[i].asked_bytes
                asks_device |= node.page.slots[i].asks_device
        is_above = room_under(node, True) < 0
    before = node.own.unallocated
    lock_release(&node.lock)
    if is_above or asked:
        released = return_unused(node)
    if asked == 0:
        return
    if asks_device:
        # The device's free bytes have what was released since the last write.
        released = before - min(before, node.own.unallocated)
    if released < asked and release_idle_below != NULL:
        release_idle_below(node.level, asked - released, NULL)
        released += return_unused(node)
    if released < asked and not process_is_exiting():
        node.relieve(node, asked - released)
        released += return_unused(node)
    lock_acquire(&node.lock)
    node.own.answered_at = now
    node.own.answered_bytes = released
    write_own(node)
    lock_release(&node.lock)


cdef void* answer_all(void* given) noexcept nogil:
    cdef NodeCore* node = <NodeCore*>given
    interpreter_know_thread()
    while not process_is_exiting():
        bell_wait(node.bell)
        if not process_is_exiting():
            answer(node)
    return NULL


cdef bint next_priority(const NodeCore* node, int64_t* found) noexcept nogil:
    """Find the lowest priority of others that hold what is asked for and have not answered."""
    cdef const NodeSlot* slot
    cdef bint has = False
    cdef uint32_t i
    for i in range(NODE_SLOTS):
        slot = &node.page.slots[i]
        if (slot.held and i != node.slot and slot.answered_at < node.own.asked_at
                and (not has or slot.priority < found[0])
                and is_under(node.page, slot.name, <uint32_t>node.own.asked_name)):
            found[0] = slot.priority
            has = True
    return has


cdef bint ask_others(NodeCore* node, uint64_t nbytes) noexcept nogil:
    """Ask by priority until the bytes can be leased. Caller holds `lock`."""
    cdef uint64_t until = clock_ns() + node.deadline
    cdef uint64_t now
    cdef bint leased = False
    cdef int64_t room, priority
    node.own.asked_bytes = 0
    if ensure_open(node) != NODE_OK:
        return False
    while read_page(node) == NODE_OK:
        if refund_dead(node):
            continue
        room = room_under(node, True)
        leased = room >= <int64_t>nbytes and lease(node, nbytes)
        now = clock_ns()
        if leased or now > until:
            break
        if node.own.asked_bytes == 0 or node.own.asked_name != node.refusing:
            node.own.asked_name = node.refusing
            node.own.asked_at = now
            node.own.asked_bytes = 0
        if not next_priority(node, &priority):
            # A process that has ended may have been the holder.
            if now > refunds_until(node) or not device_lacks(node, nbytes):
                break
        elif node.own.asked_bytes == 0 or priority > node.own.asked_priority:
            node.own.asked_bytes = nbytes - min(nbytes, <uint64_t>max(room, 0))
            node.own.asked_until = until
            node.own.asked_priority = priority
            node.own.asks_device = device_lacks(node, nbytes)
            # Answers of processes that read the slots before the first write do not count.
            if not write_own(node):
                break
            node.own.asked_at = clock_ns()
            write_own(node)
            ring_bells(node)
        lock_release(&node.lock)
        sleep_ns(POLL)
        lock_acquire(&node.lock)
    else:
        return False
    node.own.asked_bytes = 0
    write_own(node)
    return leased


cdef uint64_t refunds_until(const NodeCore* node) noexcept nogil:
    return node.page.header.refunded_at + DEATH_WAIT


cdef bint await_ended(BudgetCore* level, uint64_t* until) noexcept nogil:
    cdef NodeCore* node
    while level.parent != NULL:
        level = level.parent
    if level.node == NULL:
        return False
    node = <NodeCore*>level.node
    lock_acquire(&node.lock)
    if until[0] == 0 and ensure_open(node) == NODE_OK and read_page(node) == NODE_OK:
        refund_dead(node)
        until[0] = min(clock_ns() + node.deadline, refunds_until(node))
    lock_release(&node.lock)
    return clock_ns() < until[0] and (sleep_ns(REFUND_POLL) or True)


await_refund = await_ended


# ---- joining -------------------------------------------------------------------------------------

cdef int ensure_open(NodeCore* node) noexcept nogil:
    """Join, in a fork's child again. Caller holds `lock`."""
    cdef int outcome
    if node.fd >= 0:
        return NODE_OK
    outcome = open_page(node, True)
    if outcome == NODE_OK:
        outcome = join(node)
        unlock_names(node)
    if outcome != NODE_OK:
        close_page(node)
    return outcome


cdef void close_page(NodeCore* node) noexcept nogil:
    if node.fd >= 0:
        close(node.fd)
    if node.bell >= 0:
        close(node.bell)
    node.fd = node.bell = -1


cdef int open_page(NodeCore* node, bint make) noexcept nogil:
    """Open the file, check its owner, and take the lock of those that change names."""
    cdef uint64_t until = clock_ns() + JOIN_WAIT
    cdef int outcome = open_once(node, make)
    # It was removed meanwhile, or its maker is about to let the group use it.
    while ((outcome == NODE_GONE or outcome == NODE_FOREIGN and node.group)
           and clock_ns() < until):
        close_page(node)
        sleep_ns(POLL)
        outcome = open_once(node, make)
    return outcome


cdef int open_once(NodeCore* node, bint make) noexcept nogil:
    cdef uint32_t mode = 0o660 if node.group else 0o600
    cdef struct_stat status
    cdef int outcome
    node.fd = open_file(node.path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | (O_CREAT if make else 0), mode)
    node.error = errno
    if node.fd < 0:
        if node.error == ENOENT:
            return NODE_ABSENT
        return NODE_FOREIGN if node.error == EACCES else NODE_SYSTEM
    if fstat(node.fd, &status) != 0 or not S_ISREG(status.st_mode):
        return NODE_FOREIGN
    if status.st_uid == geteuid() and status.st_size == 0 and node.group:
        fchown(node.fd, <uint32_t>-1, node.group)
        fchmod(node.fd, mode)
        fstat(node.fd, &status)
    if ((status.st_mode & 0o777 & ~mode) or (status.st_gid != node.group if node.group
                                             else status.st_uid != geteuid())):
        return NODE_FOREIGN
    outcome = lock_names(node)
    if outcome == NODE_OK:
        fstat(node.fd, &status)     # another process may have made the page
        outcome = prepare_page(node, status.st_size)
    return outcome


cdef int prepare_page(NodeCore* node, int64_t size) noexcept nogil:
    """Write the header of a new page, also of one that another process began; or check one."""
    cdef NodeHeader header
    if size <= <int64_t>sizeof(header):
        memset(&header, 0, sizeof(header))
        memcpy(header.magic, b"gpumemND", 8)
        header.version = NODE_VERSION
        if (pwrite(node.fd, &header, sizeof(header), 0) != sizeof(header)
                or ftruncate(node.fd, sizeof(NodePage)) != 0):
            node.error = errno
            return NODE_SYSTEM
    return read_page(node)


cdef int join(NodeCore* node) noexcept nogil:
    """Take a slot. Caller holds `lock` and the lock of names."""
    cdef uint32_t length = <uint32_t>strlen(node.name)
    cdef uint32_t parent = 0
    cdef uint32_t end
    cdef pthread_t thread
    cdef int outcome
    node.slot = NODE_SLOTS
    refund_dead(node)
    if read_page(node) != NODE_OK:
        return NODE_DAMAGED
    for end in range(1, length + 1):
        if end == length or node.name[end] == b"/":
            parent = ensure_name(node, end, parent)
            if parent == 0:
                return NODE_FULL
    if node.limit != BUDGET_UNLIMITED:
        outcome = write_limit(node, parent - 1, node.limit, False)
        if outcome != NODE_OK:
            return outcome
        node.limit = BUDGET_UNLIMITED   # a fork's child joins with the limit that there is
    if not take_free_slot(node):
        return NODE_FULL
    node.sized_until = node.sizings = 0     # a fork's child has the values of its parent
    node.own.name = parent - 1
    node.own.process = getpid()
    node.own.namespace = pid_namespace()
    node.bell = bell_open(node.path)
    note_room(node)
    if not write_own(node) or thread_start(&thread, True, 0, answer_all, node) != 0:
        return NODE_SYSTEM
    return NODE_OK


cdef uint32_t find_name(const NodeCore* node, uint32_t length) noexcept nogil:
    """Return the number, from 1, of a name that this process's one begins with; 0: it is none."""
    cdef const NodeName* name
    cdef uint32_t i
    for i in range(NODE_NAMES):
        name = &node.page.names[i]
        if name.check and strncmp(name.text, node.name, length) == 0 and name.text[length] == 0:
            return i + 1
    return 0


cdef uint32_t ensure_name(NodeCore* node, uint32_t length, uint32_t parent) noexcept nogil:
    """Return the number of a name, which is made if there is none; 0: no room."""
    cdef uint32_t number = find_name(node, length)
    cdef NodeName* name
    cdef uint32_t i
    for i in range(parent, NODE_NAMES if number == 0 else 0):
        name = &node.page.names[i]
        if name.check == 0:
            memset(name, 0, sizeof(NodeName))
            memcpy(name.text, node.name, length)
            name.limit = BUDGET_UNLIMITED
            name.parent = parent
            return i + 1 if write_record(node, name, name_offset(i)) else 0
    return number


cdef int write_limit(NodeCore* node, uint32_t index, uint64_t limit,
                     bint may_differ) noexcept nogil:
    """Set the limit of a name. Caller holds `lock` and the lock of names, and has read the page."""
    cdef NodeName* name = &node.page.names[index]
    cdef uint32_t i
    if limit == name.limit:
        return NODE_OK
    if not may_differ and name.limit != BUDGET_UNLIMITED:
        for i in range(NODE_SLOTS):
            if node.page.slots[i].check and is_under(node.page, node.page.slots[i].name, index):
                return NODE_OTHER_LIMIT
    name.limit = limit
    if not write_record(node, name, name_offset(index)):
        return NODE_SYSTEM
    ring_bells(node)
    return NODE_OK


cdef int remove_name(NodeCore* node) noexcept nogil:
    """Free this name and those below it. Caller has the lock of names, and no process uses them."""
    cdef NodeName empty
    cdef uint32_t i
    memset(&empty, 0, sizeof(empty))
    refund_dead(node)
    for i in range(NODE_NAMES):
        if (node.page.names[i].check and is_under(node.page, i, node.own.name)
                and pwrite(node.fd, &empty, RECORD_BYTES, name_offset(i)) != RECORD_BYTES):
            node.error = errno
            return NODE_SYSTEM
    return NODE_OK


cdef int lock_names(NodeCore* node) noexcept nogil:
    cdef uint64_t until = clock_ns() + JOIN_WAIT
    while not byte_lock(node.fd, 0, F_WRLCK):
        if clock_ns() > until:
            return NODE_BUSY
        sleep_ns(POLL)
    return NODE_OK


cdef void unlock_names(NodeCore* node) noexcept nogil:
    byte_lock(node.fd, 0, F_UNLCK)


cdef void keep_node(NodeCore* node) noexcept nogil:
    global all_nodes
    node.next = all_nodes
    all_nodes = node


cdef void leave_in_child() noexcept nogil:
    # The parent's slot has its lock until every copy of the open file is closed.
    cdef NodeCore* node = all_nodes
    while node != NULL:
        lock_init(&node.asks)
        lock_init(&node.lock)
        close_page(node)
        node.own.claim = node.own.held = node.own.asked_bytes = 0
        node.level.used = node.level.limit
        node = node.next


on_fork(NULL, NULL, leave_in_child)     # after the budgets, which set what is used to 0
