"""A node as Python sees it: this process's part, and the view of others."""

import grp
import os
import re
from threading import get_ident
from weakref import WeakSet

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset, strlen

from gpumem._native.budget cimport (
    budget_drop, budget_left, budget_make, BUDGET_UNLIMITED, BudgetCore,
)
from gpumem._node.page cimport (
    ask_others, await_sizing, close_page, device_memory, due_of_device, ensure_open, find_name,
    hand_over, keep_node, lock_names, MAX_READS, NODE_ABSENT, NODE_BUSY, NODE_DAMAGED, NODE_FOREIGN,
    NODE_FULL, NODE_GONE, NODE_NAMES, NODE_OK, NODE_OTHER_LIMIT, NODE_OTHER_VERSION, NODE_SLOTS,
    NODE_SYSTEM, NODE_VERSION, NodeCore, NodeName, NodePage, NodeSlot, note_room, open_page,
    pid_namespace, read_page, refund_dead, remove_name, return_unused, sum_under, TEXT_BYTES,
    unlock_names, write_limit, write_own,
)
from gpumem._native.driver cimport DriverDevice
from gpumem._support.lock cimport lock_acquire, lock_init, lock_release
from gpumem._support.memory cimport require_memory
from gpumem._support.process cimport call_unraisable

from gpumem._support.sizes import format_size, is_share, share_of, whole_bytes
from gpumem._support.texts import visible
from gpumem.device import Device, device_of_uuid, uuid_of
from gpumem.errors import ConfigError, DeviceMismatchError, NodeError
from gpumem.stats import BudgetLevel, NodeHolder


cdef dict nodes = {}            # this process's by name

NAME = re.compile(r"[A-Za-z0-9_.-]{1,32}(/[A-Za-z0-9_.-]{1,32}){0,3}", re.ASCII)


cdef class NodeAccess:
    def __cinit__(self, name, *_):
        self.core = make_core(name)

    def __dealloc__(self):
        # A process that has joined keeps its part for good.
        if self.core != NULL:
            close_page(self.core)
            budget_drop(self.core.level)
            free(self.core.page)
            free(self.core)

    cdef int change_limit(self, uint64_t limit, bint may_differ) except -1:
        """Set the limit of the name; unless it may differ, only where no process uses the name."""
        cdef NodeCore* core = self.core
        cdef int outcome
        with nogil:
            lock_acquire(&core.lock)
            outcome = ensure_open(core)
            if outcome == NODE_OK:
                outcome = lock_names(core)
            if outcome == NODE_OK:
                outcome = read_page(core)
                if outcome == NODE_OK:
                    outcome = write_limit(core, core.own.name, limit, may_differ)
                unlock_names(core)
            if outcome == NODE_OK and core.level != NULL:
                note_room(core)
            lock_release(&core.lock)
            if outcome == NODE_OK and may_differ and core.level != NULL:
                return_unused(core)         # the others do so once the bell has rung
        require_outcome(core, outcome)

    def read(self):
        """Return a BudgetLevel of each name, and a NodeHolder of each process."""
        cdef NodePage page
        cdef const NodeSlot* slot
        cdef const NodeName* name
        cdef uint32_t i
        levels = []
        holders = []
        require_outcome(self.core, copy_page(self.core, &page))
        for i in range(NODE_NAMES):
            name = &page.names[i]
            if name.check:
                levels.append(BudgetLevel(text_of(name), sum_under(&page, i, True),
                                          None if name.limit >= BUDGET_UNLIMITED else name.limit))
        for i in range(NODE_SLOTS):
            slot = &page.slots[i]
            if slot.check:
                holders.append(NodeHolder(
                    text_of(&page.names[slot.name]), slot.process,
                    slot.namespace == pid_namespace(), slot.held, slot.priority,
                    slot.answered_at / 1e9, slot.answered_bytes))
        return tuple(levels), tuple(sorted(holders, key=lambda holder: -holder.held))


cdef class NodeMember(NodeAccess):
    def __cinit__(self, name, relieve):
        self.name = name
        self.budgets = WeakSet()
        self.relieve = relieve
        self.relieving = set()
        self.core.deadline = 1_000_000_000
        self.core.face = <void*>self
        self.core.relieve = call_relieve
        self.core.level = budget_make(NULL, self.core.name, BUDGET_UNLIMITED, BUDGET_UNLIMITED,
                                      True)
        require_memory(self.core.level != NULL, "joining a node")
        self.core.level.used = BUDGET_UNLIMITED     # nothing is leased
        self.core.level.node = self.core

    cdef BudgetCore* level(self) noexcept:
        return self.core.level

    cdef bint ask(self, uint64_t nbytes) except -1:
        cdef uint64_t left
        cdef bint leased
        if get_ident() in self.relieving:
            return False        # processes that ask each other would wait for each other
        with nogil:
            lock_acquire(&self.core.asks)
            lock_acquire(&self.core.lock)
            left = budget_left(self.core.level)
            leased = left >= nbytes or ask_others(self.core, nbytes - left)
            lock_release(&self.core.lock)
            lock_release(&self.core.asks)
        return leased

    def size(self):
        """Read the page once no other process sizes itself by the bytes that it has free."""
        cdef int outcome
        with nogil:
            lock_acquire(&self.core.lock)
            outcome = ensure_open(self.core)
            if outcome == NODE_OK:
                await_sizing(self.core)
                outcome = read_page(self.core)
            lock_release(&self.core.lock)
        require_outcome(self.core, outcome)

    def levels(self):
        """Return a BudgetLevel of this name, of each above it, and of the node's device."""
        cdef uint64_t left, total
        # A name is made after the one above it.
        found = [level for level in reversed(self.read()[0]) if is_below(self.name, level.name)]
        if device_memory(self.core, &left, &total):
            found.append(BudgetLevel("the device",
                                     total - left + due_of_device(self.core, True), total))
        return tuple(found)

    def describe(self, holder):
        """Say who a holder is, and why it could not release what this process asked for."""
        asked = text_of(&self.core.page.names[self.core.own.asked_name])
        text = f"{holder.who()} ({holder.name})"
        if holder.process == 0:
            return text + ":"
        text += ", "
        if holder.is_here and holder.process == self.core.own.process:
            return text + "this one:"
        if not is_below(holder.name, asked) or holder.priority > self.core.own.asked_priority:
            return text + "which was not asked:"
        if holder.answered < self.core.own.asked_at / 1e9:
            return text + f"which did not answer within {self.core.deadline / 1e9:g} s:"
        return text + f"which released {format_size(holder.released)}:"


cdef bint is_below(str name, str above):
    return f"{name}/".startswith(f"{above}/")


cdef str text_of(const NodeName* name):
    return visible(name.text.decode("ascii", "replace"))    # another process may write anything


cdef void call_relieve(NodeCore* node, uint64_t nbytes) noexcept with gil:
    cdef NodeMember face = <NodeMember>node.face
    thread = get_ident()
    face.relieving.add(thread)
    call_unraisable(face.relieve, (face, nbytes), None)
    face.relieving.discard(thread)


cdef NodeMember node_of_level(const BudgetCore* level):
    return <NodeMember>(<NodeCore*>level.node).face


cdef int copy_page(NodeCore* core, NodePage* page) noexcept nogil:
    """Read the page as it is at one moment, once dead processes are refunded."""
    cdef uint32_t _i
    cdef bint is_same = False
    cdef int outcome
    memset(page, 0, sizeof(NodePage))
    lock_acquire(&core.lock)
    outcome = ensure_open(core)
    for _i in range(MAX_READS):
        if outcome != NODE_OK or is_same:
            break
        outcome = read_page(core)
        if outcome == NODE_OK and refund_dead(core):
            continue
        # Two reads in a row agree: no slot changed between its own reads.
        is_same = memcmp(page, core.page, sizeof(NodePage)) == 0
        memcpy(page, core.page, sizeof(NodePage))
    lock_release(&core.lock)
    return outcome


cdef NodeCore* make_core(str name) except NULL:
    """Make one of a name, which may begin with a device."""
    cdef NodeCore* core
    cdef bytes text
    name = known_name(name)
    if not NAME.fullmatch(name) or len(name) >= TEXT_BYTES or set(name.split("/")) & {".", ".."}:
        raise ValueError(f"invalid node = {name!r}: expected 1 to 4 parts of 1 to 32 letters, "
                         f"digits, '_', '-' and '.', with '/' between them, such as "
                         f"'gpu0/tenant-a', and at most {TEXT_BYTES - 1} characters")
    group = read_group()
    core = <NodeCore*>calloc(1, sizeof(NodeCore))
    require_memory(core != NULL, "joining a node")
    core.page = <NodePage*>calloc(1, sizeof(NodePage))
    require_memory(core.page != NULL, "joining a node")
    owner = f"g{group}" if group else str(os.geteuid())
    text = f"/dev/shm/gpumem-node-{owner}-{name.partition('/')[0]}".encode()
    memcpy(core.path, <const char*>text, len(text) + 1)
    text = name.encode()
    memcpy(core.name, <const char*>text, len(text) + 1)
    lock_init(&core.lock)
    core.group = group
    core.limit = BUDGET_UNLIMITED
    core.fd = core.bell = -1
    return core


cdef object device_of(str name):
    """Return the Device that a name begins with, such as "cuda:0/tenant-a", or its UUID.

    None if it begins with something else.
    """
    head = name.partition("/")[0]
    if ":" in head:
        return Device(head)
    uuid = uuid_of(head)
    return None if uuid is None else device_of_uuid(uuid)


cdef uint64_t bytes_of(str what, object value, bint needed, object device) except? <uint64_t>-1:
    if value is None and not needed:
        return BUDGET_UNLIMITED
    if is_share(value):
        if device is None:
            raise ConfigError(f"invalid {what} = {value!r}: expected bytes; a percentage needs "
                              f"the node of a device, such as 'cuda:0' or 'cuda:0/NAME'")
        return share_of(what, value, device.total_bytes)
    number = whole_bytes(what, value, accepts_none=not needed)
    if not 0 <= number < 1 << 63:
        raise ValueError(f"invalid {what} = {number}: expected 0 to 2**63 - 1 bytes")
    return number


cdef str known_name(str name):
    """Return a name with the UUID of the device that it begins with, which processes number."""
    head, slash, rest = name.partition("/")
    return (Device(head).uuid if ":" in head else uuid_of(head) or head) + slash + rest


cdef uint32_t read_group() except? <uint32_t>-1:
    name = os.environ.get("GPUMEM_NODE_GROUP", "")
    if not name:
        return 0
    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except (KeyError, OverflowError):
        raise NodeError(f"invalid GPUMEM_NODE_GROUP = {name!r}: expected the name or the number of "
                        f"a group") from None


cdef int require_outcome(NodeCore* core, int outcome) except -1:
    """Raise what an outcome means."""
    if outcome == NODE_OK:
        return 0
    path = core.path.decode()
    owner = f"of group {core.group}, mode 0660" if core.group else "of this user, mode 0600"
    texts = {
        NODE_SYSTEM: f"cannot open or write {path}: {os.strerror(core.error)}",
        NODE_FOREIGN: f"{path} is another user's, or open to others: expected a regular file "
                      f"{owner}",
        NODE_DAMAGED: f"{path} has been cut or overwritten; remove it once no process uses it",
        NODE_OTHER_VERSION: f"{path} is of another version of gpumem: expected {NODE_VERSION}; "
                            f"remove it once no process uses it",
        NODE_BUSY: f"another process keeps {path} locked: it joins, or changes a limit",
        NODE_FULL: f"{path} is full: it has room for {NODE_NAMES} names of 1 to "
                   f"{NODE_SLOTS} processes",
        NODE_GONE: f"{path} was removed",
        NODE_ABSENT: f"there is no node {core.name.decode().partition('/')[0]!r} ({path})",
        NODE_OTHER_LIMIT: f"{core.name.decode()!r} is in use with another limit: expected that "
                          f"one, or None",
    }
    raise NodeError(texts[outcome])


cdef NodeMember node_join(str name, uint64_t limit, object priority, object deadline,
                          object relieve):
    cdef NodeCore* core
    device = device_of(name)
    name = known_name(name)
    cdef NodeMember node = nodes.get(name)
    cdef int outcome
    cdef int64_t rank
    cdef uint64_t wait
    cdef bint is_new = node is None
    if is_new:
        node = NodeMember(name, relieve)
    core = node.core
    rank = core.own.priority if priority is None else priority
    wait = core.deadline if deadline is None else int(deadline * 1e9)
    if device is not None:
        core.context = &(<DriverDevice>device._open()).context
    with nogil:
        lock_acquire(&core.lock)
        core.limit = limit
        core.own.priority = rank
        core.deadline = wait
        outcome = ensure_open(core)
        if outcome == NODE_OK:
            write_own(core)         # another priority
        lock_release(&core.lock)
    require_outcome(core, outcome)
    if not is_new and limit != BUDGET_UNLIMITED:
        node.change_limit(limit, False)
    if is_new:
        keep_node(core)
        nodes[name] = node
    return node


def hand_over_leased(str name, uint64_t nbytes):
    """Move bytes that this process has leased to a slot that a descriptor holds; return it."""
    cdef NodeMember member = nodes[name]
    cdef int outcome
    cdef int fd = -1
    with nogil:
        outcome = hand_over(member.core, nbytes, &fd)
    require_outcome(member.core, outcome)
    return fd


# ---- looks from outside --------------------------------------------------------------------------

def node_files():
    """Return the names of the nodes of this user, or of the group that is set."""
    group = read_group()
    prefix = f"gpumem-node-{f'g{group}' if group else os.geteuid()}-"
    return sorted(name.removeprefix(prefix) for name in os.listdir("/dev/shm")
                  if name.startswith(prefix) and NAME.fullmatch(name.removeprefix(prefix)))


cdef class NodeView(NodeAccess):
    """A node as others see it: it has no slot and leases nothing."""

    def __cinit__(self, name):
        cdef int outcome = open_page(self.core, False)
        if outcome == NODE_OK:
            unlock_names(self.core)
        require_outcome(self.core, outcome)
        self.core.slot = NODE_SLOTS

    @property
    def device(self):
        """The Device that the name begins with; None: with none, or it is not here."""
        try:
            return device_of(self.core.name.decode())
        except DeviceMismatchError:
            return None

    def set_limit(self, limit):
        """Set the limit of the name that was given, as `Budget` reads it."""
        device = device_of(self.core.name.decode()) if is_share(limit) else None
        self.find()
        self.change_limit(bytes_of("limit", limit, False, device), True)

    def remove(self):
        """Remove the name with those below it, unless a process uses one; a node with its file."""
        name = self.core.name.decode()
        require_outcome(self.core, lock_names(self.core))
        try:
            users = [holder.who() for holder in self.read()[1]
                     if is_below(holder.name, name)]
            if users:
                raise NodeError(f"{name!r} is in use by {', '.join(users)}")
            if "/" in name:
                self.find()
                require_outcome(self.core, remove_name(self.core))
            else:
                os.unlink(self.core.path.decode())
        except OSError as error:
            raise NodeError(f"{name!r} cannot be removed: {error}") from None
        finally:
            unlock_names(self.core)

    cdef int find(self) except -1:
        names = [level.name for level in self.read()[0]]
        self.core.own.name = find_name(self.core, <uint32_t>strlen(self.core.name)) - 1
        if self.core.own.name >= NODE_NAMES:
            raise NodeError(f"there is no name {self.core.name.decode()!r}: expected one of "
                            + ", ".join(names))
