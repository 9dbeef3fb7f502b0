"""Sleeping: an arena that gives its memory back and keeps its addresses."""

from libc.stdint cimport uint64_t

from gpumem._native.arena cimport (
    ARENA_DEAD, ARENA_OK, ARENA_OVER_BUDGET, arena_reserved_now, arena_resume,
    arena_suspend, ArenaCore, heap_suspend, STATE_SUSPENDED,
)
from gpumem._native.driver cimport context_is_dead, synchronize_device
from gpumem._resource.arena.reports cimport ArenaBase, raise_status, under_pressure
from gpumem._support.lease cimport views_alive

from gpumem.errors import ConfigError, InUseError


cdef class SleepingArena(ArenaBase):
    """What an arena does to sleep and to wake; `gpumem.Arena` adds the rest."""

    def suspend(self):
        """Give all memory back to the driver; the bytes of live blocks wait on the host.

        Addresses stay: after `resume`, pointers, tensors over them and captured graphs are valid
        as before. Waits for everything queued on the device; Ctrl-C ends that wait, and the arena
        goes on. From here to `resume` no work may be queued on the arena's blocks, and allocating
        raises `SuspendedError`; buffers may be dropped, and are then not copied back. Persistent
        blocks are included. Shareable blocks and those for a transport stay as they are, as others
        may use them. Idempotent.

        Returns
        -------
        int
            Bytes that the device has back.

        Raises
        ------
        InUseError
            A registration of a block is held (see `Buffer.register`), other than of a block for
            ``transport="ipc"``. Or, of memory that the CPU reads, a view of a block is alive.
            Nothing is changed.
        ConfigError
            The arena has regions: their addresses cannot be kept.
        OutOfMemoryError
            The host has no memory for the copy; the arena goes on as before.
        DriverError
            The driver refused; the arena goes on as before.
        SuspendedError
            The driver refused to unmap a page, and then to undo what was done: the arena is
            suspended, its bytes are in the copy, and some memory has not gone back. `resume` can
            be tried.
        ClosedError
            The arena is closed, or belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> weights = arena.allocate_persistent(1 << 20)
        >>> arena.suspend(), arena.stats().reserved
        (2097152, 0)
        >>> arena.resume()
        >>> weights.close()
        """
        cdef uint64_t held = arena_reserved_now(self.core)
        cdef int status
        self._require_awake_or_asleep()
        if self.core.closed == STATE_SUSPENDED:
            return 0
        if self.registered:
            raise InUseError(f"arena {self.name!r} cannot be suspended: {self.registered} "
                             "registrations of its blocks are held")
        # A registration counts as a view; those left are of blocks that a suspend leaves.
        views = views_alive(&self.core.views) - self.registered_fixed
        if self.cpu_can_read and views:
            raise InUseError(f"arena {self.name!r} cannot be suspended: {views} views of its "
                             "blocks are alive, and the CPU could read them")
        # Ctrl-C ends this wait; the one below is for what was queued meanwhile.
        synchronize_device(&self.driver_device.context)
        with nogil:
            if self.core.heap != NULL:
                status = heap_suspend(self.core)
            else:
                status = arena_suspend(self.core)
        if status != ARENA_OK:
            raise_status(self, self.stats().in_use, 0, self.default_slot, status)
        return held - arena_reserved_now(self.core)

    def resume(self):
        """Make the memory of a suspended arena again, at the same addresses, with its bytes.

        Returns when they are there: copies on the device's legacy default stream, and so waits for
        what is queued on it. Idempotent.

        Raises
        ------
        OutOfMemoryError, DriverError
            The driver refused, or its budget (BudgetExceededError); the arena is still suspended,
            and this can be tried again.
        ConfigError, ClosedError
            As `suspend`.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> buffer = arena.allocate(1000)
        >>> with memoryview(buffer) as view:
        ...     view[0] = 7
        >>> address, _ = buffer.ptr, arena.suspend()
        >>> arena.resume()
        >>> buffer.ptr == address, memoryview(buffer)[0]
        (True, 7)
        """
        cdef int status
        self._require_awake_or_asleep()
        with nogil:
            status = arena_resume(self.core)
        if status == ARENA_OVER_BUDGET:
            status = under_pressure(self, resume_again, self.stats().in_use)
        if status != ARENA_OK:
            raise_status(self, self.stats().in_use, 0, self.default_slot, status)

    def _require_awake_or_asleep(self):
        self.require_own()
        self.require_open()
        if context_is_dead(&self.driver_device.context):
            raise_status(self, 0, 0, self.default_slot, ARENA_DEAD)
        if not self.core.settings.paged:
            raise ConfigError(f"arena {self.name!r} has backing = 'regions', which cannot be "
                              "suspended; backing = 'virtual' can")


cdef int resume_again(ArenaCore* core, uint64_t nbytes) noexcept nogil:
    return arena_resume(core)
