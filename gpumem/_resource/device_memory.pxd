"""Who holds a device's memory: the driver's word, and this process's resources."""

from gpumem._buffer cimport MemoryResource
from gpumem._native.driver cimport DeviceContext

# A dict of what OutOfMemoryReport says of the device, in its words. `owner` is the C struct of the
# resource that asks. Calls the driver: hold no lock.
cdef dict device_figures(MemoryResource resource, DeviceContext* context, const void* owner)
