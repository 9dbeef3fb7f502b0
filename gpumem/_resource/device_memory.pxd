"""The holders of a device's memory: as the driver reports them, and resources of this process."""

from gpumem._buffer cimport MemoryResource
from gpumem._native.driver cimport DeviceContext

# The fields of OutOfMemoryReport about the device, as a dict. `owner` is the C struct of the
# resource that reports. Calls the driver: hold no lock.
cdef dict device_figures(MemoryResource resource, DeviceContext* context, const void* owner)

# Whether another device has a way to a resource's memory. ConfigError if it is no other device of
# the same type, ValueError if there is none of that name.
cdef bint peer_is_reached(MemoryResource resource, object device) except -1
cdef object no_way_between(object peer, object own)
