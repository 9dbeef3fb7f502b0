"""Budget: limits in a tree, shared by resources and users, and by processes of a node."""

from threading import get_ident
from types import NoneType
from weakref import WeakValueDictionary

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.budget cimport (
    budget_admit, budget_ceiling, BUDGET_DEPTH, budget_drop, budget_has_crossed, budget_holdings,
    budget_left, budget_load, budget_make, budget_next_crossed, budget_refusing, budget_retain,
    budget_room, budget_tightest, budget_uncharge, BUDGET_UNLIMITED, BudgetCore, Holding,
    holdings_free, lease_for, release_idle_below, tell_crossed,
)
from gpumem._node cimport bytes_of, device_of, node_join, node_of_level, NodeMember
from gpumem._support.atomics cimport store64, sum_add
from gpumem._support.memory cimport require_memory
from gpumem._support.process cimport call_unraisable, process, process_is_exiting, report_unraisable

from gpumem._support.arguments import MISSING, refuse_call, require_name, whole_number
from gpumem._support.out_of_memory import kept_mappings
from gpumem._support.releases import release_retired
from gpumem._support.signatures import ClassSignature
from gpumem._support.sizes import exact_size, format_size
from gpumem.device import Device
from gpumem.errors import BudgetExceededError, ConfigError, NodeError, ReservationError
from gpumem.stats import BudgetLevel, collection_text, OutOfMemoryReport


cdef enum:
    MAX_CALLS = 16          # of callbacks that free something, for one request
    MAX_RETRIES = 16        # where a second check found room

cdef enum Step:
    PENDING = 0
    COMMITTED = 1
    CANCELLED = 2
    RELEASED = 3

cdef tuple STEPS = ("pending", "committed", "cancelled", "released")

cdef tuple KEYWORDS = ("limit", "soft", "parent", "name", "on_pressure", "node", "priority",
                       "deadline")

# Each device's own budget, as long as it is referred to.
cdef object of_devices = WeakValueDictionary()


@cython.final
cdef class Budget:
    """A limit on bytes that many share, in a tree of them.

    Levels may be a process, a device, a tenant, a session: a charge counts at its own level and at
    every one above, or nowhere. It is exact with any number of threads: no hard limit is passed,
    not even for a moment. Charging takes no lock, no driver call and no interpreter.

    Pass it as ``budget=`` to a resource that holds memory: an `Arena`, a `DriverPool`, an
    `ExternalAllocator`, a `MemoryResource` of your own, or any resource through
    `gpumem.adaptors.limit(resource, budget)`. Each charges the memory that it holds from
    the device, before the driver call and until that memory is released, so that allocations which
    the resource serves from memory it holds cost nothing more; with ``count="in_use"`` each
    charges its allocated blocks. `reserve` charges memory of other libraries.

    Parameters
    ----------
    limit : int, str or None
        Bytes, 0 to 2**63 - 1, or a text such as ``"20GiB"``, that are never passed; with a `node`
        of a device also a share of its memory, ``"80%"``, as for `soft` and `reserve`. None: only
        the levels above limit it.
    soft : int or str, optional
        Bytes or a text, at most `limit`: `on_pressure` is called once each time that `used` passes
        them. No request fails because of it.
    parent : Budget, optional
        The level above. Its limit may be lower than `limit`, also later: each is kept, so the
        lowest one on the way up counts.
    name : str, optional
        Name used in error messages and reports.
    on_pressure : callable, optional
        ``on_pressure(budget, nbytes)``, called with the bytes that are needed. It may free memory:
        drop caches, shrink arenas. See Notes.
    node : str, optional
        A name that processes of this machine share, such as ``"gpu0"``, or one below it such as
        ``"gpu0/tenant-a"``; ``"cuda:0"``, or a GPU's UUID, is of that GPU, and its free memory is a
        limit, too.
        `limit` then holds for all of them together. None as the limit keeps the one that the name
        has. This process leases from the node in chunks of up to 256 MiB, and returns what it does
        not use when another process lacks memory.
    priority : int, optional
        Of this process under the name, -2**31 to 2**31 - 1: those with lower ones are asked first.
        None: as an earlier budget of the name has it, at first 0.
    deadline : float, optional
        Seconds, above 0 to 3600, that a request waits for the other processes of the node to
        release memory. None: as an earlier budget of the name has it, at first 1.

    Attributes
    ----------
    parent : Budget or None
        The level above.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid, or the tree would have more than 31 levels.
    NodeError
        The node's page is another user's, damaged or full, or its name has another limit.

    Examples
    --------
    >>> import gpumem
    >>> process = gpumem.Budget(64 << 20, name="process")
    >>> tenant = gpumem.Budget(16 << 20, parent=process, name="tenant")
    >>> arena = gpumem.Arena("host", budget=tenant)
    >>> buffer = arena.allocate(1 << 20)
    >>> tenant.used == process.used == arena.stats().reserved
    True
    >>> try:
    ...     arena.allocate(32 << 20)
    ... except gpumem.errors.BudgetExceededError as error:
    ...     error.budget, error.limit
    ('tenant', 16777216)

    Notes
    -----
    A request that a hard limit refuses first uses idle memory of its own resource: blocks that
    other streams have finished with, cached chunks, pages that can move, idle memory. Then
    `on_pressure` of the level that refused is called, then of those above it, last of those below
    it down to where the request was made. After each call, arenas without references are released
    and the request is tried again; arenas of pinned and managed memory must be closed by a
    callback, because their end waits for the device. A callback that freed something, but too
    little, is called again, up to 16 times for one request. Last, arenas at and below the level
    that refused release idle memory in which no work is unfinished. Then the request fails with
    BudgetExceededError, with the callbacks' exceptions as its cause; if it succeeds after all, they
    are passed to `sys.unraisablehook`.

    Under a node's budget, the other processes are asked before this process's callbacks: those of
    lower priority first. Each returns what it has leased and does not use, releases idle memory,
    and then calls its callbacks on a thread of gpumem's. A process that is stopped costs the
    deadline.

    A callback runs without any lock of gpumem's, on the thread that allocates, so it may run on
    several threads at once. Its own allocations may be refused; it is not called again for them on
    the same thread.

    For a soft limit the callback is called right after the charge, or, where the charging thread
    does not run Python, soon after by the main thread. Its exceptions are passed to
    `sys.unraisablehook`.

    In a fork's child every budget is empty: the charged memory is the parent's.
    """

    __signature__ = ClassSignature()

    def __cinit__(self, limit=MISSING, *excess, soft=None, parent=None, name=None,
                  on_pressure=None, node=None, priority=None, deadline=None, **others):
        # `__init__` has the signature. This runs first, so it refuses what does not fit it.
        if excess or others or limit is MISSING:
            refuse_call("Budget", "limit", "bytes such as '20GiB', or None for no limit",
                        (limit, *excess), others, most=1, keywords=KEYWORDS,
                        meant={"soft_limit": "soft"})
        self.device = device_of(node) if isinstance(node, str) else None
        cdef uint64_t hard = bytes_of("limit", limit, False, self.device)
        cdef uint64_t gentle = soft_of(soft, hard, self.device)
        require_name(name)
        if parent is not None and not isinstance(parent, Budget):
            raise TypeError(f"parent must be a Budget, not {type(parent).__name__}")
        self.parent = parent
        if node is None and (priority, deadline) != (None, None):
            raise ValueError("priority and deadline are a node's: expected node = ..., too")
        if node is not None:
            if parent is not None:
                raise ValueError(f"invalid parent = {parent!r} with node = {node!r}: a node's "
                                 f"budget is a root")
            self.member = member_of(node, hard, priority, deadline)
            hard = BUDGET_UNLIMITED     # the node has the limit
            name = node if name is None else name
        elif parent is not None:
            self.member = self.parent.member
        if self.parent is not None and self.parent.core.depth + 3 > BUDGET_DEPTH:
            raise ValueError(f"parent {self.parent.name!r} has {self.parent.core.depth} levels "
                             f"above it: a tree has up to {BUDGET_DEPTH - 1}")
        self.pressure = callback_of(on_pressure)
        self.pressing = set()
        title = ("budget" if name is None else name).encode("utf-8", "replace")
        self.core = budget_make(level_above(self), title, hard, gentle, False)
        require_memory(self.core != NULL, "allocating a budget")
        self.core.face = <void*>self
        if self.member is not None:
            self.member.budgets.add(self)

    def __init__(self, limit, *, soft=None, parent=None, name=None, on_pressure=None, node=None,
                 priority=None, deadline=None):
        """Take the arguments that the class describes."""
        # __cinit__ has made it.

    def __dealloc__(self):
        if self.core != NULL:
            self.core.face = NULL
            budget_drop(self.core)

    @staticmethod
    def of_device(device):
        """Return this process's budget of a device, limited to what the driver has free.

        The limit is read when the budget is made, as ``device.free_bytes``: the bytes
        that no process held at that moment. It may be set to anything else. While a reference to
        the budget exists, every call returns the same object.

        Parameters
        ----------
        device : Device, MemoryInfo or str

        Raises
        ------
        TypeError, ValueError
            The device does not exist.
        DriverError
            The device does not answer.

        Examples
        --------
        >>> import gpumem
        >>> budget = gpumem.Budget.of_device("host")
        >>> budget is gpumem.Budget.of_device("host"), budget.free > 0
        (True, True)
        """
        where = Device(getattr(device, "device", device))
        budget = of_devices.get(where)
        if budget is None:
            budget = of_devices.setdefault(where, Budget(where.free_bytes, name=str(where)))
        return budget

    # ---- what it is ------------------------------------------------------------------------------

    @property
    def name(self):
        """Name used in error messages and reports."""
        return self.core.name.decode()

    @property
    def limit(self):
        """Bytes that are never passed; None: only the levels above limit it.

        May be set. Below what is used, nothing more is charged until that much is refunded;
        `on_pressure` is called once with the bytes above the new limit. A limit below `soft` means
        that `soft` is not reached any more.
        """
        if self.node is not None:
            return next((level.limit for level in self.member.levels()), None)
        return or_none(budget_load(&self.core.limit))

    @limit.setter
    def limit(self, value):
        cdef uint64_t limit = bytes_of("limit", value, False, self.device)
        cdef uint64_t used
        if self.node is not None:
            self.member.change_limit(limit, True)
            return
        store64(&self.core.limit, limit)
        used = budget_load(&self.core.used)
        if used > limit:
            call_outside_request(self, used - limit)

    @property
    def soft(self):
        """Bytes from which on `on_pressure` is called; None: never.

        May be set, up to `limit`; it applies to later charges.
        """
        return or_none(budget_load(&self.core.soft))

    @soft.setter
    def soft(self, value):
        store64(&self.core.soft, soft_of(value, budget_load(&self.core.limit), self.device))

    @property
    def on_pressure(self):
        """The callback, or None. May be set."""
        return self.pressure

    @on_pressure.setter
    def on_pressure(self, value):
        self.pressure = callback_of(value)

    @property
    def node(self):
        """Name of the node's budget that it is this process's part of; None: of none."""
        return None if self.member is None or self.parent is not None else self.member.name

    # ---- what it holds ---------------------------------------------------------------------------

    @property
    def used(self):
        """Bytes charged here and below, reservations that are not committed yet included.

        Dropped arenas that need no wait are released first.
        """
        release_retired(False)
        return budget_load(&self.core.used)

    @property
    def pending(self):
        """Of `used`: bytes in reservations, made here or below, that are not committed yet."""
        return budget_load(&self.core.pending)

    @property
    def peak(self):
        """The highest `used` so far."""
        return budget_load(&self.core.peak)

    @property
    def free(self):
        """Bytes that could be charged here now, under every limit above too; None: no limit.

        A process of a node may size itself by them: another one that reads them waits until it has
        leased half of them, at most for a second, and for the first eight reads of a process.
        """
        cdef uint64_t room
        release_retired(False)
        if self.member is None:
            unlimited = budget_ceiling(self.core) == BUDGET_UNLIMITED
            return None if unlimited else budget_room(self.core)
        self.member.size()          # reads what the node has left
        room = budget_room(self.core)
        return None if room >= BUDGET_UNLIMITED else room

    def holders(self):
        """Return the holders of its bytes: (name, bytes) of each, the largest first.

        These are resources, budgets under it, and as "reservations" those made at this level.
        """
        release_retired(False)
        return holders_of(self.core)

    def reserve(self, nbytes):
        """Reserve room for memory that another library allocates.

        Parameters
        ----------
        nbytes : int or str
            Bytes, 0 or more, or a text such as ``"2GiB"``.

        Returns
        -------
        Reservation
            The bytes count from now on: call `Reservation.commit` once the memory is allocated,
            `Reservation.cancel` if it will not be.

        Raises
        ------
        TypeError, ValueError
            `nbytes` is not an integer, or negative.
        BudgetExceededError
            A limit here or above has no room, and no callback made any.

        Examples
        --------
        >>> import gpumem
        >>> budget = gpumem.Budget(1000)
        >>> with budget.reserve(600) as room:
        ...     room.commit()           # the memory was there
        >>> budget.used, room.state
        (600, 'committed')
        >>> room.release()
        >>> budget.free
        1000
        """
        cdef uint64_t size = bytes_of("nbytes", nbytes, True, self.device)
        cdef Reservation made = Reservation.__new__(Reservation)
        made.budget = self
        made.core = self.core
        budget_retain(self.core)
        if size:
            admit_or_raise(self.core, size, {})
            add_pending(self.core, size)
        made.size = size
        made.step = PENDING
        return made

    def __repr__(self):
        try:
            limit = "no limit" if self.limit is None else f"limit {format_size(self.limit)}"
        except NodeError as error:      # the node's page was damaged
            limit = str(error)
        return f"<gpumem.Budget {self.name!r}: {format_size(self.used)} in use, {limit}>"


@cython.final
cdef class Reservation:
    """Room in a budget for memory that another library allocates; made by `Budget.reserve`.

    Pending at first. `commit` confirms that the memory was allocated, `cancel` abandons the
    reservation, `release` ends a committed one. Each step is taken once, on any thread. A
    reservation that is not committed is cancelled at the end of its context, and when it is
    dropped. Committed bytes stay charged until `release`, or for as long as the budget lives.

    Attributes
    ----------
    budget : Budget

    Examples
    --------
    >>> import gpumem
    >>> budget = gpumem.Budget(1 << 20)
    >>> with budget.reserve(1000) as reservation:
    ...     budget.used          # held while the other library allocates
    1000
    >>> budget.used              # it was not committed
    0
    """

    def __cinit__(self):
        self.step = CANCELLED
        self.generation = process.generation

    def __init__(self):
        raise TypeError("a Reservation is made by a budget's reserve()")

    def __dealloc__(self):
        if self.step == PENDING:
            end_pending(self)
            refund(self)
        budget_drop(self.core)

    @property
    def nbytes(self):
        """Bytes that were reserved."""
        return self.size

    @property
    def state(self):
        """One of ``"pending"``, ``"committed"``, ``"cancelled"`` and ``"released"``."""
        return STEPS[self.step]

    def commit(self):
        """Confirm that the memory was allocated. The bytes stay charged.

        Raises
        ------
        ReservationError
            It is not pending.
        """
        take_step(self, PENDING, COMMITTED)
        end_pending(self)

    def cancel(self):
        """Abandon the reservation. The bytes are uncharged.

        Raises
        ------
        ReservationError
            It is not pending.
        """
        take_step(self, PENDING, CANCELLED)
        end_pending(self)
        refund(self)

    def release(self):
        """Confirm that the memory was freed. The bytes are uncharged.

        Raises
        ------
        ReservationError
            It is not committed.
        """
        take_step(self, COMMITTED, RELEASED)
        refund(self)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.step == PENDING:
            self.cancel()

    def __repr__(self):
        return f"<gpumem.Reservation of {format_size(self.size)}, {self.state}>"


# ---- arguments -----------------------------------------------------------------------------------

cdef uint64_t soft_of(object value, uint64_t limit, object device) except? <uint64_t>-1:
    cdef uint64_t soft = bytes_of("soft", value, False, device)
    if soft > limit and value is not None:
        raise ValueError(f"invalid soft = {exact_size(soft)}: expected 0 to the limit, "
                         f"{exact_size(limit)}")
    return soft


cdef NodeMember member_of(object name, uint64_t limit, object priority, object deadline):
    if not isinstance(name, str):
        raise TypeError(f"node must be a str, not {type(name).__name__}")
    given = priority
    priority = whole_number(priority)
    if priority is None and given is not None:
        raise TypeError(f"priority must be an integer, not {type(given).__name__}")
    if priority is not None and not -1 << 31 <= priority < 1 << 31:
        raise ValueError(f"invalid priority = {priority}: expected -2**31 to 2**31 - 1")
    if not isinstance(deadline, (int, float, NoneType)) or isinstance(deadline, bool):
        raise TypeError(f"deadline must be a number, not {type(deadline).__name__}")
    if deadline is not None and not 0 < deadline <= 3600:
        raise ValueError(f"invalid deadline = {deadline}: expected above 0 to 3600 seconds")
    return node_join(name, limit, priority, deadline, relieve_node)


cdef BudgetCore* level_above(Budget budget) noexcept:
    if budget.parent is not None:
        return budget.parent.core
    return NULL if budget.member is None else budget.member.level()


cdef object or_none(uint64_t value):
    return None if value == BUDGET_UNLIMITED else value


cdef object callback_of(object callback):
    if callback is not None and not callable(callback):
        raise TypeError(f"on_pressure = {callback!r} is not callable")
    return callback


cdef BudgetCore* account_of(object budget, object count, str holder, bint* in_use) except? NULL:
    in_use[0] = count == "in_use"
    if count not in ("reserved", "in_use"):
        raise ConfigError(f"invalid count = {count!r}: expected 'reserved' or 'in_use'")
    if budget is None:
        if in_use[0]:
            raise ConfigError("count = 'in_use' has no effect without a budget")
        return NULL
    if not isinstance(budget, Budget):
        raise TypeError(f"budget must be a Budget, not {type(budget).__name__}")
    return account_under((<Budget>budget).core, BUDGET_UNLIMITED, holder)


cdef BudgetCore* limit_of(object nbytes, str holder) except NULL:
    return account_under(NULL, bytes_of("nbytes", nbytes, True, None), holder)


cdef BudgetCore* account_under(BudgetCore* parent, uint64_t limit, str holder) except NULL:
    cdef BudgetCore* account = budget_make(parent, holder.encode("utf-8", "replace"), limit,
                                           BUDGET_UNLIMITED, True)
    require_memory(account != NULL, "allocating a budget's account")
    return account


# ---- reservations: one function per change of state ----------------------------------------------

cdef int take_step(Reservation reservation, int before, int after) except -1:
    # The interpreter lock is held from the comparison to the assignment.
    if reservation.step != before:
        raise ReservationError(f"this reservation is {STEPS[reservation.step]}: only one that is "
                               f"{STEPS[before]} can be {STEPS[after]}")
    reservation.step = after
    return 0


cdef void add_pending(BudgetCore* level, uint64_t change) noexcept nogil:
    while level != NULL:
        sum_add(&level.pending, change)
        level = level.parent


cdef void end_pending(Reservation reservation) noexcept:
    if reservation.generation == process.generation:
        add_pending(reservation.core, 0 - reservation.size)


cdef void refund(Reservation reservation) noexcept:
    # The budgets of a fork's child began empty.
    if reservation.generation == process.generation:
        budget_uncharge(reservation.core, reservation.size)


cdef int admit_or_raise(BudgetCore* level, uint64_t nbytes, dict numbers) except -1:
    cdef PressureState pressure = PressureState(0, 0, 0, 0, NULL, 0, False, False)
    cdef list errors = []
    while not budget_admit(level, nbytes):
        if not call_pressure_callback(level, nbytes, &pressure, errors):
            with kept_mappings:
                raise_exceeded(level, nbytes, errors, numbers)
    report_errors(errors)
    if budget_has_crossed():
        call_crossing_callbacks()
    return 0


# ---- pressure ------------------------------------------------------------------------------------

cdef inline BudgetCore* users_level(BudgetCore* level) noexcept nogil:
    """Find the user's budget that an account charges; an account without one has the limit itself.

    An arena's account also has the limit max_mem, which is checked elsewhere.
    """
    while level.is_account and level.parent != NULL:
        level = level.parent
    return level


cdef bint call_pressure_callback(BudgetCore* level, uint64_t nbytes, PressureState* pressure,
                                 list errors) except -1:
    cdef BudgetCore* refusing = budget_refusing(users_level(level), nbytes)
    cdef BudgetCore* called
    if refusing == NULL:
        # Bytes were refunded, perhaps those of another request.
        pressure.retries += 1
        if pressure.retries <= MAX_RETRIES:
            return True
        refusing = budget_tightest(users_level(level))
    if refusing.node != NULL and not pressure.others_asked:
        pressure.others_asked = True
        if node_of_level(refusing).ask(nbytes):
            return True
    note_outcome(pressure, refusing)
    called = first_to_call(refusing, NULL, pressure)
    if called == NULL:
        called = first_to_call(level, refusing, pressure)
    if called == NULL:
        return release_idle(refusing, missing_bytes(refusing, nbytes), level, pressure)
    pressure.called = <uint32_t>1 << called.depth
    pressure.calls += 1
    call(<Budget>called.face, missing_bytes(refusing, nbytes), errors)
    # Arenas that it dropped keep their charges until they are released.
    release_retired(False)
    if refusing.node != NULL:
        lease_for(refusing, nbytes)     # the arena plans by the room that the node had last
    return True


def relieve_node(NodeMember member not None, uint64_t nbytes):
    """Call the callbacks of this process because another one lacks memory, and release theirs."""
    cdef BudgetCore* level = member.level()
    cdef list errors = []
    for budget in sorted(member.budgets, key=depth_of):
        if (<Budget>budget).pressure is not None:
            call(budget, nbytes, errors)
    release_retired(False)
    if release_idle_below != NULL:
        with nogil:
            release_idle_below(level, nbytes, NULL)
    report_errors(errors)


def depth_of(Budget budget not None):
    return budget.core.depth


cdef bint release_idle(const BudgetCore* refusing, uint64_t missing, const BudgetCore* asking,
                       PressureState* pressure) noexcept:
    """Release idle memory of arenas below a level, once callbacks have freed theirs."""
    cdef uint64_t released = 0
    if release_idle_below != NULL and not pressure.idle_released:
        pressure.idle_released = True
        with nogil:
            released = release_idle_below(refusing, missing, asking)
    return released != 0


cdef void note_outcome(PressureState* pressure, BudgetCore* refusing) noexcept nogil:
    """Mark the last callback as spent if it freed nothing, or after the last call allowed."""
    # The requesting arena may have used the freed bytes at once.
    if (pressure.refusing == refusing and budget_load(&refusing.used) >= pressure.used
            or pressure.calls >= MAX_CALLS):
        pressure.spent |= pressure.called
    pressure.refusing = refusing
    pressure.used = budget_load(&refusing.used)


cdef BudgetCore* first_to_call(BudgetCore* level, const BudgetCore* end,
                               const PressureState* pressure) except? NULL:
    """Find the lowest level, from one up to `end`, that has a callback to call; or NULL."""
    while level != end and not may_call(level, pressure):
        level = level.parent
    return NULL if level == end else level


cdef uint64_t missing_bytes(const BudgetCore* refusing, uint64_t nbytes) noexcept nogil:
    """Return the bytes that a level must be refunded first; `nbytes`, if there is room by now."""
    cdef uint64_t wanted = budget_load(&refusing.used) + nbytes
    cdef uint64_t limit = budget_load(&refusing.limit)
    return wanted - limit if wanted > limit else nbytes


cdef bint may_call(const BudgetCore* level, const PressureState* pressure) except -1:
    cdef Budget budget
    if level.face == NULL or pressure.spent >> level.depth & 1:
        return False
    budget = <Budget>level.face
    return budget.pressure is not None and get_ident() not in budget.pressing


cdef int call(Budget budget, uint64_t nbytes, list errors) except -1:
    """Call its callback and keep its Exception; any other BaseException is raised."""
    thread = get_ident()
    budget.pressing.add(thread)
    try:
        budget.pressure(budget, nbytes)
    except Exception as error:
        errors.append(error)
    finally:
        budget.pressing.discard(thread)
    return 0


cdef bint budget_call_pressure(BudgetCore* level, uint64_t nbytes,
                               PressureState* pressure) noexcept nogil:
    return not process_is_exiting() and call_and_report(level, nbytes, pressure)


cdef bint call_and_report(BudgetCore* level, uint64_t nbytes,
                          PressureState* pressure) noexcept with gil:
    cdef list errors = []
    cdef bint again = False
    try:
        again = call_pressure_callback(level, nbytes, pressure, errors)
    except BaseException as error:
        errors.append(error)
    report_errors(errors)
    return again


cdef int call_outside_request(Budget budget, uint64_t nbytes) noexcept:
    """Call outside of a request, unless this thread is inside the callback."""
    cdef list errors = []
    if budget.pressure is None or get_ident() in budget.pressing:
        return 0
    try:
        call(budget, nbytes, errors)
    except BaseException as error:
        errors.append(error)
    report_errors(errors)
    errors.clear()      # their frames hold objects that the callback dropped
    call_unraisable(release_retired, (False,), None)
    return 0


cdef void report_errors(list errors) noexcept:
    for error in errors:
        report_unraisable(error, None)


cdef void call_crossing_callbacks() noexcept:
    cdef BudgetCore* level = budget_next_crossed()
    cdef uint64_t used, soft
    while level != NULL:
        used = budget_load(&level.used)
        soft = budget_load(&level.soft)
        if level.face != NULL and used > soft:
            call_outside_request(<Budget>level.face, used - soft)
        budget_drop(level)
        level = budget_next_crossed()


tell_crossed = call_crossing_callbacks


# ---- failing -------------------------------------------------------------------------------------

cdef int raise_exceeded(BudgetCore* level, uint64_t nbytes, list errors, dict numbers) except -1:
    cdef BudgetCore* refusing = budget_refusing(users_level(level), nbytes)
    if refusing == NULL:
        refusing = budget_tightest(users_level(level))
    used = budget_load(&refusing.used)
    limit = budget_load(&refusing.limit)
    path = path_of(level)
    holders = holders_of(refusing)
    name = refusing.name.decode()
    missing = missing_bytes(refusing, nbytes)
    if refusing.node != NULL:
        member = node_of_level(refusing)
        above = member.levels()
        path = path[:-1] + above        # the last one is this process's part of the node
        name, used, limit = min(above, key=room_of)
        missing -= min(missing, room_of((name, used, limit)))
        holders = tuple((member.describe(each), each.held) for each in member.read()[1])
    held = ", ".join(f"{holder} {format_size(n)}" for holder, n in holders) or "nothing"
    levels = ", within ".join(map(shown, path))
    advice = (f"the request alone is larger than the limit of {name!r}: raise it" if nbytes > limit
              else f"free some of what {name!r} holds, or raise its limit")
    report = numbers.get("report") or OutOfMemoryReport(**{
        "memory": "", "requested_nbytes": nbytes, "allocated_nbytes": nbytes, "in_use": used,
        "reserved": used, "largest_free": budget_left(refusing), **numbers})
    asked = exact_size(report.requested_nbytes)
    if report.requested_nbytes != nbytes:
        asked += f", which takes {exact_size(nbytes)} more of the device's memory"
    raise BudgetExceededError(
        f"budget {name!r} is exceeded: asked for {asked}; {format_size(used)} of its "
        f"limit of {format_size(limit)} in use; limits: {levels}; held by: {held}; {advice}"
        + "".join(f"\n{line}" for line in (
            report.owners(), collection_text(report.collected or 0, report.cycles)) if line),
        report.under(path, advice), budget=name, limit=limit,
        missing=missing, path=path, holders=holders) from cause_of(errors)


def room_of(level):
    _, used, limit = level
    return BUDGET_UNLIMITED if limit is None else max(limit - used, 0)


cdef object cause_of(list errors):
    if not errors:
        return None
    return errors[0] if len(errors) == 1 else ExceptionGroup("on_pressure callbacks", errors)


cdef str shown(object level):
    limit = "unlimited" if level.limit is None else format_size(level.limit)
    return f"{level.name} {format_size(level.used)} of {limit}"


cdef tuple path_of(const BudgetCore* level):
    path = []
    while level != NULL:
        if not level.is_account:
            path.append(BudgetLevel(level.name.decode(), budget_load(&level.used),
                                    or_none(budget_load(&level.limit))))
        level = level.parent
    return tuple(path)


cdef tuple holders_of(BudgetCore* level):
    cdef uint32_t count = 0
    cdef uint32_t i
    cdef uint64_t own = budget_load(&level.used)
    cdef Holding* holdings = budget_holdings(level, &count)
    require_memory(holdings != NULL, "listing the holders of a budget")
    holders = [(holdings[i].name.decode(), holdings[i].used) for i in range(count)
               if holdings[i].used]
    holdings_free(holdings, count)
    for _, nbytes in holders:
        own -= min(own, <uint64_t>nbytes)   # other threads may charge
    if own:
        holders.append(("reservations", own))
    return tuple(sorted(holders, key=lambda holder: -holder[1]))
