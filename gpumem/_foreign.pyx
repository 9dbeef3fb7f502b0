"""Buffers over others' memory; see _foreign.pxd."""

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from gpumem._buffer cimport Buffer, MemoryResource, resource_init
from gpumem._dlpack cimport Incoming, dlpack_delete
from gpumem._driver cimport Place, place_is_dead
from gpumem._lease cimport Lease, lease_create
from gpumem._support.process cimport process_is_exiting
from gpumem._support.streams cimport LEGACY_STREAM

from gpumem.device import MemoryKind


# Who is told of the end: a producer's deleter, or a reference that is dropped.
cdef struct Owner:
    void* managed
    bint versioned
    PyObject* object
    Place* place            # NULL: the CPU's memory, which outlives a fork

# memory's text -> its resource; made anew in a fork's child
cdef dict resources = {}


@cython.final
cdef class ForeignMemory(MemoryResource):
    """The resource of buffers over memory that gpumem did not allocate.

    It hands nothing out. Dropping such a buffer and its views tells the memory's owner.
    """

    def __init__(self, memory):     # the base's is for resources that allocate
        resource_init(self, memory, f"others' memory on {memory}")
        self.is_foreign = True

    cdef uint64_t stream_at(self, uint32_t slot) noexcept:
        return LEGACY_STREAM        # what producers are asked to be ordered before

    cdef void give_back(self, Buffer buffer) noexcept:
        end_owner(<Owner*>buffer.handle)

    cdef Lease* lease(self, Buffer buffer) except NULL:
        cdef Lease* lease = lease_create(buffer.handle, buffer.address, buffer.requested_bytes, 0,
                                         NULL, release_lease)
        if lease == NULL:
            raise MemoryError("no host memory for a view's lease")
        return lease


cdef Buffer foreign_buffer(object memory, uint64_t address, uint64_t nbytes, object owner):
    cdef ForeignMemory resource = resource_of(memory)
    cdef Buffer buffer = Buffer.__new__(Buffer)
    cdef Owner* end = <Owner*>malloc(sizeof(Owner))
    if end == NULL:
        raise MemoryError("no host memory for a buffer over others' memory")
    end.managed = NULL
    end.versioned = False
    end.object = NULL
    end.place = NULL if memory.kind is MemoryKind.HOST else &resource.place.place
    if owner is not None:
        Py_INCREF(owner)
        end.object = <PyObject*>owner
    buffer.resource = buffer.home = resource
    buffer.address = address
    buffer.requested_bytes = nbytes
    buffer.block_bytes = nbytes or 1        # not 0: also an empty one has somebody to tell
    buffer.handle = <uint64_t>end
    return buffer


cdef void foreign_adopt(Buffer buffer, const Incoming* incoming) noexcept:
    cdef Owner* end = <Owner*>buffer.handle
    end.managed = incoming.managed
    end.versioned = incoming.versioned


cdef ForeignMemory resource_of(object memory):
    cdef ForeignMemory known = resources.get(str(memory))
    if known is None or place_is_dead(&known.place.place):
        known = ForeignMemory(memory)
        resources[str(memory)] = known
    return known


cdef void release_lease(Lease* lease) noexcept nogil:
    end_owner(<Owner*>lease.handle)


cdef void end_owner(Owner* end) noexcept nogil:
    # A GPU's memory of the parent process is not the child's to free.
    if end.place == NULL or not place_is_dead(end.place):
        if end.managed != NULL:
            dlpack_delete(end.managed, end.versioned)
        if end.object != NULL and not process_is_exiting():
            with gil:
                Py_DECREF(<object>end.object)
    free(end)
