"""Making tensors of new memory, and writing elements of any array into any other."""

cimport cython
from libc.stdint cimport int64_t

from gpumem._arena cimport is_in_graph_pool
from gpumem._buffer cimport Buffer, MemoryResource, require_open, Stream
from gpumem._copy cimport fill_captured, fill_elements, refuse_captured, Side
from gpumem._tensor.imports cimport tensor_seeing
from gpumem._tensor.layout cimport (
    element_of, ElementType, layout_extent, layout_is_c, layout_is_nested, layout_size, MAX_RANK,
    numpy, shape_from,
)
from gpumem._tensor.tensor cimport (
    alignment_named, hold_elements, resource_beside, serving, Tensor, tensor_allocate, tensor_move,
    tensor_within,
)

from gpumem._support.arguments import MISSING, refuse, refuse_keywords, whole_number
from gpumem._support.sizes import exact_size
from gpumem._support.texts import shown
from gpumem.device import MemoryInfo
from gpumem.errors import NoAllocatorError

# `empty`, `zeros` and `full` have parameters only to refuse them. Their signatures are without, so
# each text begins with the signature, in the form that Python reads.
cdef object missing = MISSING       # in a variable of C, which costs less to look up
cdef tuple WHERE = ("memory", "resource", "environment", "stream", "shareable")
cdef int MAX_STEPS = 100000
cdef dict FROM_ELSEWHERE = {"device": "memory", "arena": "resource"}


@cython.embedsignature(False)
def empty(shape, dtype=MISSING, *, memory=None, resource=None, environment=None, stream=None,
          shareable=False, device=None, arena=None):
    """empty(shape, dtype, *, memory=None, resource=None, environment=None, stream=None, \
shareable=False)\n--\n\n\
Return a tensor of new memory with arbitrary bytes.

    Parameters
    ----------
    shape : int or sequence of int
        Up to 64 dimensions.
    dtype : dtype
        A dtype of NumPy in any form, without Python objects; a dtype of PyTorch; a short name:
        ``"bf16"``, ``"fp16"``, ``"fp8_e4m3"`` (float8_e4m3fn), ``"fp8_e5m2"``. The number in a
        short name of NumPy counts bytes: ``"f4"`` is float32, and ``"f32"`` is refused. bfloat16
        and float8 need the package ml_dtypes.
    memory : MemoryInfo, Device or str, optional
        The address has its alignment. None: the memory of `resource`, of the innermost
        `using_resource`, or of `default_device`.
    resource : MemoryResource, optional
        Allocates the memory; None: see `get_default_resource`.
    environment : Environment, optional
        Its allocator of the memory is used.
    stream : stream, optional
        Work on this stream uses the memory first; None is the resource's default stream.
    shareable : bool
        The memory can be shared with other processes by `gpumem.interop.export`; see
        `Arena.allocate`.

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
        An invalid shape, dtype or memory.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.empty((3, 4), "float32", memory="host").nbytes
    48
    """
    cdef int64_t lengths[MAX_RANK]
    if dtype is missing or device is not None or arena is not None:
        refuse_making("empty", dtype, device, arena)
    cdef ElementType element = element_of(dtype)
    cdef int ndim = shape_from(shape, lengths)
    cdef MemoryResource source
    # Without either, the innermost `using_resource` or the default serves the memory.
    if resource is None and environment is None:
        source = serving(memory)
    else:
        source = chosen_resource(memory, resource, environment)
    return tensor_allocate(source, element, ndim, lengths, stream, shareable,
                           alignment_named(memory))


def tensor_of(Buffer buffer not None, shape, dtype, offset):
    """Make the tensor of `Buffer.tensor`."""
    cdef int64_t lengths[MAX_RANK]
    cdef ElementType element = element_of(dtype)
    cdef int ndim = shape_from(shape, lengths)
    cdef int64_t count = layout_size(ndim, lengths, element.itemsize)
    require_open(buffer)
    number = whole_number(offset)
    if number is None or not 0 <= number <= buffer.nbytes or number % element.dtype.alignment:
        raise ValueError(f"invalid offset = {shown(offset)}: expected a multiple of "
                         f"{element.dtype.alignment} from 0 to {buffer.nbytes}")
    offset = number
    if count < 0 or count * element.itemsize > buffer.nbytes - offset:
        needed = "2**63 bytes or more" if count < 0 else exact_size(count * element.itemsize)
        raise ValueError(f"shape {shape} of {element.dtype} does not fit into {buffer!r} from "
                         f"offset {offset} on: it needs {needed}, "
                         f"and {exact_size(buffer.nbytes - offset)} are there")
    return tensor_within(buffer, element, offset, ndim, lengths, count)


def is_like(Tensor tensor not None, shape, dtype):
    """Return whether a tensor has a shape and a dtype; those that `empty` refuses are errors."""
    cdef int64_t lengths[MAX_RANK]
    cdef ElementType element = element_of(dtype)
    cdef int ndim = shape_from(shape, lengths)
    if ndim != tensor.rank or element.dtype != tensor.element.dtype:
        return False
    return all([tensor.lengths[i] == lengths[i] for i in range(ndim)])


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
    # A name or an alignment may differ: only the place counts.
    if memory is not None:
        info = MemoryInfo.parse(memory)
        own = (<MemoryResource>resource).memory
        if (info.device, info.kind) != (own.device, own.kind):
            raise ValueError(f"memory {info} is not that of the resource, {own}")
    return resource


@cython.embedsignature(False)
def zeros(shape, dtype=MISSING, *, memory=None, resource=None, environment=None, stream=None,
          shareable=False, device=None, arena=None):
    """zeros(shape, dtype, *, memory=None, resource=None, environment=None, stream=None, \
shareable=False)\n--\n\n\
Return a tensor of new memory with zeros in all bytes.

    Parameters
    ----------
    shape, dtype, memory, resource, environment, stream, shareable
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
    if dtype is missing or device is not None or arena is not None:
        refuse_making("zeros", dtype, device, arena)
    cdef Tensor tensor = empty(shape, dtype, memory=memory, resource=resource,
                               environment=environment, stream=stream, shareable=shareable)
    fill_elements(tensor.buffer, tensor.address, tensor.count, bytes(tensor.element.itemsize),
                  stream)
    return tensor


@cython.embedsignature(False)
def full(shape, fill_value, dtype=None, *, memory=None, resource=None, environment=None,
         stream=None, shareable=False, device=None, arena=None):
    """full(shape, fill_value, dtype=None, *, memory=None, resource=None, \
environment=None, stream=None, shareable=False)\n--\n\n\
Return a tensor of new memory with one value everywhere.

    Parameters
    ----------
    fill_value : scalar
        Converted by NumPy's rules of assignment.
    dtype : dtype, optional
        None: NumPy's dtype of the value.
    shape, memory, resource, environment, stream, shareable
        As `zeros`.

    Returns
    -------
    Tensor
        In C order.

    Raises
    ------
    ValueError
        The value is not a scalar.
    OverflowError
        The dtype does not hold it.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.full(2, 1.5, memory="host").numpy()
    array([1.5, 1.5])
    """
    if device is not None or arena is not None:
        refuse_making("full", dtype, device, arena)
    # The value is checked before the memory is allocated.
    if dtype is None:
        dtype = numpy().asarray(fill_value).dtype
    value = _element_from("fill_value", fill_value, element_of(dtype).dtype)
    cdef Tensor tensor = empty(shape, dtype, memory=memory, resource=resource,
                               environment=environment, stream=stream, shareable=shareable)
    fill_elements(tensor.buffer, tensor.address, tensor.count, value.tobytes(), stream)
    return tensor


cdef int refuse_making(str name, object dtype, object device, object arena) except -1:
    # The parameters `device` and `arena` of other libraries' functions are not in the signatures.
    given = ["device"] * (device is not None) + ["arena"] * (arena is not None)
    first = ("shape", "fill_value", "dtype") if name == "full" else ("shape", "dtype")
    refuse_keywords(f"{name}()", given, (*first, *WHERE), FROM_ELSEWHERE)
    raise TypeError(f"{name}({', '.join(first)}): dtype is missing, such as 'float32'")


def _element_from(name, given, dtype):
    if (dtype.kind in "iu" and isinstance(given, (numpy().generic, numpy().ndarray))
            and given.ndim == 0 and given.dtype.kind in "iuf"):
        given = given.item()        # NumPy truncates its own numbers, but checks Python's
    if isinstance(given, int) and dtype.kind in "iu":
        limits = numpy().iinfo(dtype)       # older NumPy wraps around, with a warning
        if not limits.min <= given <= limits.max:
            raise OverflowError(f"{name} {given} is not from {limits.min} to {limits.max}, "
                                f"the range of {dtype}")
    value = numpy().array(given, dtype)
    if value.ndim:
        raise ValueError(f"{name} {given!r} is not a scalar")
    return value


# ---- assignment ----------------------------------------------------------------------------------

def fill(Tensor dst not None, value, stream):
    """Fill a tensor, as `Tensor.fill` describes."""
    cdef Side to = Side(dst.address, dst.steps, False)
    element = _element_from("value", value, dst.element.dtype)
    _require_writable(dst)
    _held = hold_elements(dst)
    if layout_is_c(dst.rank, dst.lengths, dst.steps, dst.element.itemsize):
        fill_elements(dst.buffer, dst.address, dst.count, element.tobytes(), stream)
    elif not fill_captured(dst.buffer, &to, dst.rank, dst.lengths, element.tobytes(), stream):
        copy(dst, numpy().broadcast_to(element, dst.shape), stream)


def assign(Tensor dst not None, value):
    """Write a scalar or an array into all of `dst`, as `Tensor.__setitem__` describes."""
    np = numpy()
    is_hosts = isinstance(value, (np.ndarray, np.generic, int, float, complex, list, tuple))
    if not is_hosts:
        copy(dst, value)
    elif np.ndim(value) == 0:
        fill(dst, value, None)
    else:
        if isinstance(value, np.ndarray):
            value = value.astype(dst.element.dtype, casting="same_kind", copy=False)
        value = np.asarray(value, dst.element.dtype)
        while value.ndim > dst.rank and value.shape[0] == 1:
            value = value[0]
        try:
            value = np.broadcast_to(value, dst.shape)
        except ValueError:
            raise ValueError(f"values of shape {value.shape} do not fit into a tensor of shape "
                             f"{dst.shape}: expected that shape, or one that NumPy broadcasts "
                             "to it") from None
        copy(dst, value)


# ---- copy(): elements from any array into any other ----------------------------------------------


def copy(dst, src, stream=None):
    """Copy the elements of one array into another of the same shape and dtype.

    Both may be in any memory (the host's, pinned, managed, a GPU's, another GPU's) and of any
    strides. Pitched copies of two and three dimensions are one driver call.

    Parameters
    ----------
    dst, src : array
        A Tensor, a Buffer (bytes), a NumPy array, an object with ``__dlpack__``,
        ``__cuda_array_interface__`` or the buffer protocol. Work that a producer has queued
        comes first, by those protocols' rules.
    stream : stream, optional
        Where the copy is queued, of `dst`'s device or `src`'s; of any device if both are memory of
        the CPU. None: the stream of the buffer in a GPU's own memory, of `dst`'s first, else of
        `dst`'s if its device is a GPU, else of `src`'s; and between memory of the CPU no stream.

    Raises
    ------
    TypeError
        An argument is not an array; or the dtypes differ: nothing is converted.
    ValueError
        The shapes differ: nothing is broadcast (``numpy.broadcast_to(src, dst.shape)`` is taken as
        a source); elements of `dst` share bytes; or the stream is of another device.
    BufferError
        `dst` is read-only.
    ClosedError
        A buffer is closed.
    DriverError
        The driver refused. Parts of `dst` may be written; nothing else has changed.
    MemoryError
        A copy through host memory found none; `dst` is as it was, or partly written.

    Notes
    -----
    Between pinned, managed and device memory the copy is asynchronous: it returns when it is
    queued. Both memories stay alive until it is done, and what gpumem does with them later comes
    after it: `Tensor.numpy` waits, a free takes effect after it. If one of them belongs to a
    stream of its own, that stream waits for the copy, too. A default stream, which has other work,
    does not wait for a copy on a `stream` that is an object: only later uses by gpumem, and exports
    to other libraries, come after it. Before a kernel of your own uses the bytes there, call
    ``default.wait(stream.record())``.
    For an array in CPU memory that gpumem did not make (NumPy's, PyTorch's pinned tensors) no
    library waits: without a `stream` such a copy is done when it returns. With one, the program
    waits for that stream before it changes a source or reads a destination; a Tensor over a
    pinned destination does so by itself, so that such a copy is done when it returns. While a
    stream is captured into a graph, the program keeps memory that gpumem did not allocate.

    Of memory that the driver did not allocate or register ("pageable": NumPy's, ``bytearray``), a
    source may change, and a destination is written, when the call returns. So a call that writes
    such memory, or reads 4 MiB of it or more, waits for the stream. Between it and a device copies
    of that size go through pinned memory (`Arena.staging`), filled and emptied by several threads;
    so do layouts that would need more than 128 driver calls.

    Between two memories that the CPU reads, pinned or pageable, the driver would wait. There the
    CPU copies, in its turn on the stream: at once if the stream is idle and there is little to
    copy, else in a function that the stream calls. While it is captured, a copy is a node of
    the graph, and one that only the CPU can make (of more than 128 driver calls, or to pageable
    memory) is a DriverError. So is one that has to be done when it returns: of an array that
    gpumem did not make, without a `stream`.

    Overlapping arrays are copied through a third array, as NumPy does. While the stream is
    captured, that is memory of the arena's graph pool (see `Arena.capture`); where the array's
    resource has none for the stream, the copy is a DriverError.

    Examples
    --------
    >>> import gpumem, numpy
    >>> tensor = gpumem.empty((2, 3), "float32", memory="host")
    >>> gpumem.copy(tensor[:, ::-1], numpy.arange(6, dtype="float32").reshape(2, 3))
    >>> tensor.numpy()
    array([[2., 1., 0.],
           [5., 4., 3.]], dtype=float32)
    """
    cdef Tensor to = _seen(dst, "dst")
    cdef Tensor origin = _seen(src, "src")
    _require_alike(to, origin)
    _require_writable(to)
    require_open(to.buffer)
    # The block of a closed source may be the one that `dst` has now.
    require_open(origin.buffer)
    if overlap(to, origin):
        # Onto itself: nothing to do. Otherwise a copy of the source is out of the way.
        if to.address == origin.address and to.strides == origin.strides:
            return
        origin = copied_aside(to, origin, stream)
    tensor_move(to, origin, stream, not isinstance(dst, (Tensor, Buffer)))


# ---- what is refused -----------------------------------------------------------------------------

def _seen(array, name):
    cdef Tensor tensor = tensor_seeing(array)
    if tensor is None:
        raise TypeError(f"invalid {name} of type {type(array).__name__}: expected a Tensor, a "
                        "Buffer, or an object with __dlpack__, __cuda_array_interface__ or the "
                        "buffer protocol")
    return tensor


def _require_alike(Tensor dst not None, Tensor src not None):
    if dst.element.dtype != src.element.dtype:
        raise TypeError(f"dst has dtype {dst.dtype} and src {src.dtype}: a copy converts nothing, "
                        "so view() or convert one of them first")
    if dst.shape != src.shape:
        raise ValueError(f"dst has shape {dst.shape} and src {src.shape}: a copy broadcasts "
                         "nothing, so give src the shape of dst first")


def _require_writable(Tensor dst not None):
    if dst.is_read_only:
        raise BufferError(f"{dst!r} is read-only: it cannot be copied into")
    # The order of the writes is not defined, so no two elements may share a byte.
    if dst.count == 0 or layout_is_nested(dst.rank, dst.lengths, dst.steps, dst.element.itemsize):
        return
    steps = sorted(((abs(step), length - 1) for step, length in zip(dst.strides, dst.shape)
                    if length > 1), reverse=True)
    if _do_elements_meet(steps, 0, dst.element.itemsize, False, [MAX_STEPS]):
        raise ValueError(f"dst has strides {dst.strides} in shape {dst.shape}: its elements of "
                         f"{exact_size(dst.element.itemsize)} share bytes")


def _do_elements_meet(steps, distance, itemsize, apart, left):
    """Return whether two elements that are `distance` bytes apart so far can share bytes.

    They differ by any multiple of each step up to its limit; larger steps come first. `apart`: they
    are two different elements. `left` counts the steps of the search down; at 0 the answer is no,
    which no view of an array reaches.
    """
    left[0] -= 1
    if left[0] < 0:
        return False
    if not steps:
        return apart and abs(distance) < itemsize
    (step, most), *rest = steps
    reach = sum(each * times for each, times in rest) + itemsize - 1
    if step == 0:
        return abs(distance) <= reach
    first = max(-most, -((reach + distance) // step))
    # Either of two elements may be the first one.
    if not apart:
        first = max(first, 0)
    return any(_do_elements_meet(rest, distance + times * step, itemsize, apart or times != 0, left)
               for times in range(first, min(most, (reach - distance) // step) + 1))


# ---- overlap -------------------------------------------------------------------------------------

cdef bint overlap(Tensor a, Tensor b):
    # Returns whether the ranges of addresses have bytes in common. Elements of two tensors may
    # interleave without sharing a byte: then this is True, and costs a copy.
    cdef int64_t a_low, a_high, b_low, b_high
    if a.count == 0:
        return False
    layout_extent(a.rank, a.lengths, a.steps, a.element.itemsize, &a_low, &a_high)
    layout_extent(b.rank, b.lengths, b.steps, b.element.itemsize, &b_low, &b_high)
    return a.address + a_low < b.address + b_high and b.address + b_low < a.address + a_high


cdef Tensor copied_aside(Tensor to, Tensor origin, object stream):
    cdef MemoryResource resource = resource_beside(origin)
    cdef Tensor made
    # Between memories of the CPU it may be of another device; the copies are ordered all the same.
    elsewhere = (isinstance(stream, Stream)
                 and (<Stream>stream).driver_device is not resource.driver_device)
    made = tensor_allocate(resource, origin.element, origin.rank, origin.lengths,
                           None if elsewhere else stream, False, 0)
    # It ends with the copy, and a graph writes to it at each launch: only a graph pool keeps it.
    if not is_in_graph_pool(made.buffer):
        refuse_captured(to.buffer, origin.buffer, stream)
    tensor_move(made, origin, stream, False)
    return made
