"""The DLPack devices that a memory is exported under, and the order of a consumer's work."""

from libc.stdint cimport uint64_t, uintptr_t

from gpumem._buffer cimport (
    Buffer, buffer_note_consumer, DL_CPU, DL_CUDA, DL_CUDA_HOST, DL_CUDA_MANAGED, DLDevice,
    dlpack_check_stream, dlpack_device_from, order_host, order_stream, ResourceBase, same_device,
)
from gpumem._native.driver cimport CUstream

from gpumem.device import MemoryKind


_NAMES = {"cpu": DL_CPU, "cuda": DL_CUDA, "cuda_host": DL_CUDA_HOST,
          "cuda_managed": DL_CUDA_MANAGED}


cdef bint export_reaches(ResourceBase resource, DLDevice device):
    memory = resource.memory
    if same_device(device, resource.dl_device):
        return True
    # Pinned and managed memory are also CUDA's, by the same addresses.
    if device.device_type == DL_CUDA:
        return memory.device.type == "cuda" and device.device_id == memory.device.index
    # The CPU is one device, whatever its memory is called.
    if device.device_id != 0:
        return False
    if device.device_type == DL_CPU:
        return resource.cpu_can_read
    return device.device_type == DL_CUDA_HOST and memory.kind is MemoryKind.HOST_ACCESSIBLE


cdef object export_refusal(ResourceBase resource, DLDevice device):
    return BufferError(f"{resource.memory} cannot be shared as DLPack device "
                       f"({device.device_type}, {device.device_id}): copy it there first, "
                       "with .to(memory)")


cdef DLDevice export_named(ResourceBase resource, object named) except *:
    cdef DLDevice device
    if isinstance(named, str):
        name, _, index = named.partition(":")
        if name not in _NAMES or (":" in named and not index.isdecimal()):
            accepted = ", ".join(f'"{each}"' for each in _NAMES)
            raise ValueError(f"unknown DLPack device {named!r}: expected {accepted}, a device "
                             "type or a pair (type, id)")
        if index:
            return dlpack_device_from((_NAMES[name], int(index)))
        named = _NAMES[name]
    if isinstance(named, int) and not isinstance(named, bool):
        device = dlpack_device_from((named, 0))
        # A type alone means the memory's own device of that type.
        if device.device_type == DL_CUDA:
            device.device_id = resource.memory.device.index
        return device
    return dlpack_device_from(named)


cdef int order_consumer(Buffer buffer, DLDevice device, object stream) except -1:
    cdef uint64_t handle = 1        # DLPack's number of the legacy default stream
    dlpack_check_stream(device, stream)
    # A consumer that reads by the CPU has no stream to wait on the device.
    if device.device_type == DL_CPU or device.device_type == DL_CUDA_HOST:
        return order_host(buffer)
    if stream is None and device.device_type == DL_CUDA_MANAGED:
        return order_host(buffer)       # consumers pass no stream for it, and order nothing
    if stream is not None:
        if stream == -1:            # the consumer orders it itself
            return 0
        handle = stream
    # The consumer's stream waits on the device; the CPU does not wait.
    order_stream(buffer, <CUstream><uintptr_t>handle)
    return buffer_note_consumer(buffer, handle)
