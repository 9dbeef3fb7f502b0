"""Buffer, and the methods that it calls of its resource."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from gpumem._buffer.dlpack cimport DLDevice
from gpumem._buffer.ledger cimport BlockLedger
from gpumem._native.driver cimport CUstream, DriverDevice
from gpumem._support.lease cimport Lease, lease_drop, lease_retain, Uses

# Whether a live block's memory may leave its place.
cdef enum Place:
    PLACE_FIXED
    PLACE_EXPORTABLE            # fixed, and other processes may map it
    PLACE_SLEEPS                # sleep unmaps it

# A *slot* is a resource's own number for a stream.
cdef class ResourceBase:
    cdef readonly object memory         # MemoryInfo
    cdef DriverDevice driver_device
    cdef DLDevice dl_device             # DLPack's device of the memory
    cdef bint cpu_can_read              # blocks are host-accessible
    cdef bint is_read_only              # its blocks may not be written
    cdef bint is_foreign                # gpumem did not allocate them
    cdef dict streams                   # slot -> stream object, kept alive while marks may name it
    cdef bint is_borrowed               # it makes buffers over memory with another owner
    cdef bint is_streamless             # no stream orders its bytes
    # Work that gpumem queued for its memory and that no stream orders: a list of QueuedUse or None.
    cdef list queued_uses
    cdef uint64_t registered            # registrations held, of blocks that sleep would unmap
    cdef uint64_t registered_fixed      # and of others
    # Copies, fills and runs under way. Caller holds the interpreter's lock.
    cdef uint64_t accesses
    cdef BlockLedger* ledger            # of a resource that allocates block by block; else NULL

    cdef int slot_of(self, object stream, uint32_t* slot) except -1
    cdef uint64_t stream_at(self, uint32_t slot) noexcept
    # Frees a buffer's block. It runs in finalizers, so it neither waits nor raises.
    cdef void free_buffer(self, Buffer buffer) noexcept
    # A new lease on the buffer's block, which then owns it. NULL without an exception: out of host
    # memory.
    cdef Lease* lease(self, Buffer buffer) except? NULL
    cdef void move_lease(self, Lease* lease, uint32_t slot) noexcept
    # The place of an open buffer's notes of recorded streams; `free_buffer` and leases take the
    # notes over.
    cdef Uses** uses_of(self, Buffer buffer) except NULL
    # Notes that another stream uses a live block; `uses` are the notes of its buffer.
    cdef int record(self, Buffer buffer, Uses** uses, uint32_t slot) except -1
    # Raises if no memory is at the addresses of its blocks now. For a buffer its `home` is called.
    cdef int require_present(self) except -1
    # Keeps the memory behind bytes of an open block that is not empty, until the result is dropped.
    # ValueError: some have no memory. None: the block itself keeps it.
    cdef object hold_bytes(self, Buffer buffer, uint64_t low, uint64_t high)
    # The resource that the calling thread's allocations are made from now.
    cdef ResourceBase given_now(self)
    # Orders an access to the bytes after work of others, which gpumem did not queue: the CPU waits,
    # or a stream waits on the device. A stream of another device than the resource's is then also
    # ordered after the buffer's own.
    cdef int before_cpu(self, Buffer buffer) except -1
    cdef int before_stream(self, Buffer buffer, CUstream stream,
                           DriverDevice driver_device) except -1
    # Lets another device access its blocks; returns whether it may. Without access only the
    # driver's peer copies reach them.
    cdef bint let_access(self, DriverDevice peer) except -1
    cdef int keep_stream(self, object stream, CUstream handle, uint32_t slot) except -1
    cdef Place place_of(self, Buffer buffer) noexcept
    # The resource that counts the registrations and accesses of its blocks.
    cdef ResourceBase registrar(self)
    # Runs before a transport registers a block.
    cdef int before_registration(self, Buffer buffer) except -1
    # Keeps a stream's object.
    cdef int store_stream(self, uint32_t slot, object stream) except -1
    # Raises ClosedError if it belongs to the parent of a fork.
    cdef int require_own(self) except -1

cdef class Buffer:
    cdef readonly ResourceBase resource     # allocated it, and frees it
    cdef ResourceBase home                  # the resource of its memory and streams
    cdef uint64_t address
    cdef uint64_t requested_bytes
    cdef uint64_t handle                # of the block, as the resource knows it
    cdef uint64_t block_bytes           # bytes of the block; 0: empty buffer
    cdef uint32_t slot                  # stream it is freed on
    cdef bint is_closed
    cdef Uses* uses                     # streams recorded while nothing shared it; NULL: none
    # Work that gpumem queued on its stream and that the CPU waits for before it accesses the bytes.
    cdef uint64_t queued                # reads and writes so far
    cdef uint64_t written               # those up to the last write
    cdef uint64_t awaited               # more than one of these: the CPU has waited for its work
    cdef Lease* shared                  # NULL until a view shares the memory

# TypeError for an object if its __init__ did not run, or did not call its base's.
cdef int require_made(ResourceBase resource) except -1
cdef int refuse_forgotten(ResourceBase resource) except -1
# Wraps a block that was just allocated. `handle` is the resource's own name for it.
cdef Buffer buffer_of(ResourceBase resource, uint64_t address, uint64_t requested,
                      uint64_t nbytes, uint64_t handle, uint32_t slot)
cdef Buffer empty_buffer(ResourceBase resource, uint32_t slot)
# Closes a buffer. Every end of a buffer calls this.
cdef void buffer_end(Buffer buffer) noexcept
# Raises if the buffer is closed, or its memory is asleep.
cdef inline int require_open(Buffer buffer) except -1:
    if buffer.is_closed:
        return refuse_closed()
    return buffer.home.require_present() if buffer.block_bytes else 0


cdef int refuse_closed() except -1
# Records a consumer's stream, a handle above 0, if it is a default stream.
cdef int buffer_note_consumer(Buffer buffer, uint64_t stream) except -1
# One more reference to the block, for a view; NULL for an empty buffer. drop_share ends it.
cdef inline Lease* buffer_share(Buffer buffer) except? NULL:
    require_open(buffer)
    if buffer.shared == NULL:
        return share_first(buffer)
    lease_retain(buffer.shared)
    return buffer.shared


cdef Lease* share_first(Buffer buffer) except? NULL
# Between these two, other threads may run: the block lives, and its arena does not sleep. NULL: an
# empty buffer.
cdef Lease* access_begin(Buffer buffer) except? NULL
cdef int access_end(Buffer buffer, Lease* lease) except -1
# An object with the buffer protocol over some bytes of a buffer, which it keeps.
cdef object array_owner(Buffer buffer, uint64_t address, int64_t nbytes, bint read_only)
# A buffer around another one takes its block over, without a view of it: `buffer_lease` makes the
# lease of an open buffer that is not empty, and `buffer_hand_over` closes that buffer. Its own
# reference stays; `lease_drop_buffer` ends it, on any thread.
cdef Lease* buffer_lease(Buffer buffer) except NULL
cdef Lease* buffer_hand_over(Buffer buffer) noexcept
cdef inline void drop_share(void* lease) noexcept nogil:
    lease_drop(<Lease*>lease)
# NumPy discards the exception of `__getbuffer__`, then calls `__array__` of the same object, and
# passes on the exceptions of that: so Ctrl-C is noted in the first and raised again in the second.
cdef int note_discarded(object exporter, object error) except -1
cdef int raise_discarded(object exporter) except -1
