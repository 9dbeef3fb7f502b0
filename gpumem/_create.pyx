"""Making tensors of new memory."""

from libc.stdint cimport int64_t

from gpumem._buffer cimport MemoryResource
from gpumem._defaults cimport serving
from gpumem._element cimport ElementType, element_of, numpy
from gpumem._indexing cimport shape_from
from gpumem._layout cimport MAX_RANK
from gpumem._tensor cimport Tensor, tensor_allocate, tensor_fill

from gpumem._arguments import refuse
from gpumem.device import MemoryInfo
from gpumem.errors import NoAllocatorError


def empty(shape, dtype, *, memory=None, resource=None, environment=None, stream=None):
    """Return a tensor of new memory, whatever is in it.

    Parameters
    ----------
    shape : int or sequence of int
        Up to 64 dimensions.
    dtype : dtype
        Anything NumPy takes whose elements are not Python objects; ``"bfloat16"`` and
        ``"float8_..."`` where ml_dtypes is installed.
    memory : MemoryInfo, Device or str, optional
        None: the memory of `resource`, of the innermost `using_resource`, or of `default_device`.
    resource : MemoryResource, optional
        What hands out the memory; None: see `get_default_resource`.
    environment : Environment, optional
        Its allocator of the memory is used.
    stream : stream, optional
        Whose work uses the memory first; None is the resource's default stream.

    Returns
    -------
    Tensor
        In C order.

    Raises
    ------
    NoAllocatorError
        The environment has no allocator for the memory.
    OutOfMemoryError
        As `Arena.allocate`.
    ValueError, TypeError
        A shape, dtype or memory that is not accepted.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.empty((3, 4), "float32", memory="host").nbytes
    48
    """
    cdef int64_t lengths[MAX_RANK]
    cdef ElementType element = element_of(dtype)
    cdef int ndim = shape_from(shape, lengths)
    cdef MemoryResource source
    if resource is None and environment is None:
        source = serving(memory)
    else:
        source = chosen_resource(memory, resource, environment)
    return tensor_allocate(source, element, ndim, lengths, stream)


cdef MemoryResource chosen_resource(object memory, object resource, object environment):
    if resource is not None and environment is not None:
        raise ValueError("resource and environment are both given: name one of them")
    if environment is not None:
        if not hasattr(environment, "shared_allocator"):
            refuse("environment", environment, "an Environment or None")
        info = serving(memory).memory if memory is None else MemoryInfo.parse(memory)
        resource = environment.shared_allocator(info)
        if resource is None:
            raise NoAllocatorError(f"the environment has no allocator for {info}: register one")
        memory = None
    if not isinstance(resource, MemoryResource):
        raise TypeError(f"resource {resource!r} is not a MemoryResource")
    if memory is not None:
        info = MemoryInfo.parse(memory)
        own = (<MemoryResource>resource).memory
        if (info.device, info.kind) != (own.device, own.kind):
            raise ValueError(f"memory {info} is not that of the resource, {own}")
    return resource


def zeros(shape, dtype, *, memory=None, resource=None, environment=None, stream=None):
    """Return a tensor of new memory whose bytes are all zero.

    Parameters
    ----------
    shape, dtype, memory, resource, environment, stream
        As `empty`. On a GPU, in managed memory, and wherever `stream` is given, the fill is queued
        on the buffer's stream; `Tensor.numpy` and other consumers wait for it.

    Returns
    -------
    Tensor
        In C order.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.zeros(3, "int16", memory="host").numpy()
    array([0, 0, 0], dtype=int16)
    """
    cdef Tensor tensor = empty(shape, dtype, memory=memory, resource=resource,
                               environment=environment, stream=stream)
    tensor_fill(tensor, bytes(tensor.element.itemsize), stream)
    return tensor


def full(shape, fill_value, dtype=None, *, memory=None, resource=None, environment=None,
         stream=None):
    """Return a tensor of new memory with one value everywhere.

    Parameters
    ----------
    fill_value : scalar
        Converted by NumPy's rules of assignment.
    dtype : dtype, optional
        None: the one NumPy gives the value.
    shape, memory, resource, environment, stream
        As `zeros`.

    Returns
    -------
    Tensor
        In C order.

    Raises
    ------
    ValueError
        The value is no scalar.
    OverflowError
        The dtype does not hold it.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.full(2, 1.5, memory="host").numpy()
    array([1.5, 1.5])
    """
    if dtype is None:
        dtype = numpy().asarray(fill_value).dtype
    value = _element_from(fill_value, element_of(dtype).dtype)
    cdef Tensor tensor = empty(shape, dtype, memory=memory, resource=resource,
                               environment=environment, stream=stream)
    tensor_fill(tensor, value.tobytes(), stream)
    return tensor


def _element_from(given, dtype):
    if isinstance(given, int) and dtype.kind in "iu":
        limits = numpy().iinfo(dtype)       # older NumPy wraps around, with a warning
        if not limits.min <= given <= limits.max:
            raise OverflowError(f"fill_value {given} is not from {limits.min} to {limits.max}, "
                                f"what {dtype} holds")
    value = numpy().array(given, dtype)
    if value.ndim:
        raise ValueError(f"fill_value {given!r} is not a scalar")
    return value
