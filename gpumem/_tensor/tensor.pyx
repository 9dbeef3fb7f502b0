"""Tensor: views of typed memory, its form in each protocol, and making one."""

cimport cython
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_C_CONTIGUOUS, PyBUF_F_CONTIGUOUS, PyBUF_FORMAT, PyBUF_ND,
    PyBUF_STRIDES, PyBUF_WRITABLE,
)
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from gpumem._buffer cimport (
    array_owner, Buffer, buffer_share, call_first, DEFAULT_SLOT, DL_CPU, DL_IS_COPIED, DLDevice,
    dlpack_capsule, dlpack_check_stream, dlpack_device_from, dlpack_export, dlpack_read_call,
    dlpack_wants_versioned, DLPackCall, drop_share, exchange_capsule, Export, MemoryResource,
    note_discarded, order_host, order_stream, own_stream, raise_discarded, require_open, vectorcall,
)
from gpumem._copy cimport copy_elements, Side
from gpumem._native.bfc cimport QUANTUM
from gpumem._support.arithmetic cimport refuse_arithmetic
from gpumem._support.instances cimport destructor, forbid_instantiation, replace_dealloc
from gpumem._support.memory cimport require_memory
from gpumem._tensor.export cimport export_named, export_order, export_reaches, export_refusal
from gpumem._tensor.layout cimport (
    element_of, ElementType, Layout, layout_c_strides, layout_extent, layout_index, layout_is_c,
    layout_is_f, layout_reshape, layout_size, MAX_RANK, new_shape_from, numpy,
)

from gpumem._defaults import get_default_resource, last_served, using
from gpumem._support.arguments import require
from gpumem._buffer.holders import BLOCKS
from gpumem.device import can_access, MemoryInfo


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class Tensor:
    """Typed, strided elements in a `Buffer`, seen by NumPy and every GPU library without a copy.

    Made by `empty`, `zeros`, `full`, `asarray` and `from_dlpack`. Its layout never changes:
    indexing, `reshape` and `view` return further tensors over the same buffer, and each keeps the
    memory, as do the views of other libraries.

    Work that gpumem queues for it (a fill, a copy) is ordered by the buffer's own stream: `numpy`,
    the buffer protocol and DLPack consumers wait for it. (``torch.asarray`` uses none of these: it
    reads any buffer's bytes as its default dtype.)

    A tensor does not compare: ``==`` with a tensor, a number or a list is a TypeError. To compare
    elements, use `item`, `numpy` or `tolist`. As a key of a dict and a member of a set a tensor is
    found by identity. ``in``, ``list.index`` and ``list.remove`` compare it with each element
    before it: ``any(each is tensor for each in tensors)`` does not.

    ``copy.copy`` returns a view of the same memory, ``copy.deepcopy`` a copy in new memory of the
    same resource, which is not read-only.

    Attributes
    ----------
    buffer : Buffer
        The whole block that it lies in.

    Examples
    --------
    >>> import gpumem
    >>> tensor = gpumem.zeros((2, 3), "float32", memory="host")
    >>> tensor.numpy()[:, 1] = 7
    >>> tensor[1].numpy()
    array([0., 7., 0.], dtype=float32)
    """

    # The C exchange API: what a consumer takes from the type, once.
    __dlpack_c_exchange_api__ = exchange_capsule()

    # ---- what it is ------------------------------------------------------------------------------

    @property
    def shape(self):
        """Elements along each dimension, a tuple of int."""
        return numbers(self.rank, self.lengths)

    @property
    def strides(self):
        """Bytes from one element to the next along each dimension, a tuple of int."""
        return numbers(self.rank, self.steps)

    @property
    def ndim(self):
        """Number of dimensions."""
        return self.rank

    @property
    def size(self):
        """Number of elements."""
        return self.count

    @property
    def dtype(self):
        """The numpy.dtype of its elements."""
        return self.element.dtype

    @property
    def itemsize(self):
        """Bytes of one element."""
        return self.element.itemsize

    @property
    def nbytes(self):
        """Bytes of its elements, gaps between them not counted."""
        return self.count * self.element.itemsize

    @property
    def ptr(self):
        """Address of the element with index 0 everywhere; 0 for an empty buffer.

        ClosedError once the buffer is closed.
        """
        if self.buffer.is_closed:
            require_open(self.buffer)
        return self.address

    @property
    def memory(self):
        """The MemoryInfo it lives in."""
        return self.buffer.home.memory

    @property
    def device(self):
        """The Device of its memory."""
        return self.buffer.home.memory.device

    @property
    def read_only(self):
        """Whether consumers must not write."""
        return bool(self.is_read_only)

    def transports(self):
        """Return how others can reach its memory, as `gpumem.interop.transports` does.

        Examples
        --------
        >>> import gpumem
        >>> gpumem.zeros(1000, "int8", memory="host").transports().host
        True
        """
        return self.buffer.transports()

    def __len__(self):
        if self.rank == 0:
            raise TypeError("a tensor without dimensions has no length, and no parts")
        return self.lengths[0]

    def __iter__(self):
        # Without this method Python would take the first IndexError for the end.
        return map(self.__getitem__, range(len(self)))

    def __repr__(self):
        read_only = ", read-only" if self.is_read_only else ""
        return (f"<gpumem.Tensor {self.shape} {self.element.dtype} at {self.address:#x} in "
                f"{self.buffer.home.memory}{read_only}>")

    # ---- views of the same memory ----------------------------------------------------------------

    def __getitem__(self, key):
        """Return a view, by integers, slices of any step, Ellipsis and None (a new dimension)."""
        cdef Layout layout
        cdef int64_t offset
        # An index never copies: integers move the address, slices change strides.
        layout_index(key, self.rank, self.lengths, self.steps, &layout, &offset)
        return tensor_view(self, self.element, self.address + offset, layout.ndim, layout.shape,
                           layout.strides)

    @property
    def T(self):
        """A view with the dimensions in reverse order."""
        cdef Tensor made = tensor_whole(self)
        for i in range(self.rank):
            made.lengths[i] = self.lengths[self.rank - 1 - i]
            made.steps[i] = self.steps[self.rank - 1 - i]
        return made

    def reshape(self, *shape, copy=None):
        """Return the same elements, in C order, in another shape.

        Parameters
        ----------
        *shape : int, or one sequence of int
            One of them may be -1: the remaining factor.
        copy : bool, optional
            None: a view where strides can describe it, else a copy in the same memory, as NumPy
            does. True: always a copy. False: never.

        Raises
        ------
        ValueError
            Another number of elements.
        BufferError
            ``copy=False`` and no view can describe it.
        TypeError
            `copy` is none of these.

        Examples
        --------
        >>> import gpumem
        >>> gpumem.zeros((2, 6), "int8", memory="host").reshape(3, -1).shape
        (3, 4)
        """
        cdef int64_t lengths[MAX_RANK]
        cdef int64_t steps[MAX_RANK]
        cdef int ndim = new_shape_from(shape, self.count, lengths)
        cdef Tensor source = self
        if copy is not None:
            require("copy", copy, bool, "True, False or None")
        if copy or not layout_reshape(self.rank, self.lengths, self.steps, self.element.itemsize,
                                      ndim, lengths, steps):
            if copy is False:
                raise BufferError(f"shape {self.shape} with strides {self.strides} cannot be seen "
                                  f"as {numbers(ndim, lengths)} without a copy")
            # The copy is in C order, of which every shape of as many elements is a view.
            source = tensor_copy(self, resource_beside(self), None, 0)
            layout_c_strides(ndim, lengths, self.element.itemsize, steps)
        return tensor_view(source, self.element, source.address, ndim, lengths, steps)

    def view(self, dtype):
        """Return the same bytes as elements of another dtype.

        Where the sizes differ, the last dimension changes its length, and must be adjacent.

        Raises
        ------
        ValueError
            The bytes cannot be divided so.
        TypeError
            It is not a dtype.

        Examples
        --------
        >>> import gpumem
        >>> tensor = gpumem.full((2, 3), 1.0, "float32", memory="host")
        >>> [hex(bits) for bits in tensor.view("uint32").numpy()[0]]
        ['0x3f800000', '0x3f800000', '0x3f800000']
        >>> tensor.view("uint8").shape
        (2, 12)
        """
        cdef Tensor made = tensor_whole(self)
        cdef int64_t old = self.element.itemsize
        cdef int64_t new
        cdef int last = self.rank - 1
        made.element = element_of(dtype)
        new = made.element.itemsize
        if new != old:
            if last < 0:
                raise ValueError("a tensor without dimensions keeps the size of its element: "
                                 f"{made.dtype} has {new} bytes, not {old}")
            if self.lengths[last] != 1 and self.steps[last] != old and self.count:
                raise ValueError(f"the last dimension has strides of {self.steps[last]} bytes: "
                                 f"its {old}-byte elements must be adjacent")
            if self.lengths[last] * old % new:
                raise ValueError(f"{self.lengths[last] * old} bytes of the last dimension are not "
                                 f"a multiple of {new}, the size of {made.dtype}")
            # The outer dimensions stay: rows keep their bytes and their distance.
            made.lengths[last] = self.lengths[last] * old // new
            made.steps[last] = new
            made.count = self.count * old // new
        return made

    def as_read_only(self):
        """Return a view that consumers must not write.

        NumPy and the buffer protocol enforce it; PyTorch ignores DLPack's flag.

        Examples
        --------
        >>> import gpumem
        >>> tensor = gpumem.zeros(3, "int8", memory="host")
        >>> shown = tensor.as_read_only()
        >>> tensor.numpy()[0] = 7            # the owner still writes
        >>> shown.numpy().flags.writeable, shown.numpy().tolist()
        (False, [7, 0, 0])
        """
        cdef Tensor made = tensor_whole(self)
        made.is_read_only = True
        return made

    def export_as(self, dlpack_device):
        """Return a view that DLPack exports under another device, which also reaches the memory.

        By default pinned memory is exported as CPU memory and managed memory as managed memory.
        PyTorch imports neither CUDAHost nor CUDAManaged; CuPy does not import CPU memory.

        Parameters
        ----------
        dlpack_device : str, int or (int, int)
            ``"cpu"``, ``"cuda"``, ``"cuda_host"``, ``"cuda_managed"``; DLPack's device type; or
            its (type, id).

        Raises
        ------
        ValueError
            There is no such device.
        BufferError
            That device does not reach the memory.

        Examples
        --------
        >>> import gpumem
        >>> tensor = gpumem.empty(4, "int8", memory="host/managed")
        >>> tensor.__dlpack_device__(), tensor.export_as("cpu").__dlpack_device__()
        ((13, 0), (1, 0))
        """
        cdef Tensor made = tensor_whole(self)
        made.dl_device = export_named(self.buffer.home, dlpack_device)
        if not export_reaches(self.buffer.home, made.dl_device):
            raise export_refusal(self.buffer.home, made.dl_device)
        return made

    # ---- assignment ------------------------------------------------------------------------------

    def __setitem__(self, key, value):
        """Write a scalar or the elements of an array into a part.

        Numbers, lists and NumPy's arrays are converted and broadcast as in NumPy, but an array is
        cast as by ``numpy.copyto``: one of floats does not fit into integers (TypeError). Another
        library's array and a Tensor are accepted as by `copy`.
        Work is queued as by `fill` and `copy`, without a stream of the caller's. While the buffer's
        own stream is captured into a graph, a scalar becomes a part of the graph, and an array that
        gpumem did not make is a DriverError: the graph would read it at each launch.

        Examples
        --------
        >>> import gpumem
        >>> tensor = gpumem.zeros((2, 3), "int16", memory="host")
        >>> tensor[:, 1] = 7
        >>> tensor[0] = [1, 2, 3]
        >>> tensor.tolist()
        [[1, 2, 3], [0, 7, 0]]
        """
        from gpumem._tensor.create import assign    # it needs this module
        assign(self[key], value)

    def fill(self, value, stream=None):
        """Write one value into every element.

        Parameters
        ----------
        value : scalar
            Converted by NumPy's rules of assignment.
        stream : stream, optional
            Where the fill is queued. None: the buffer's own; host memory is filled at once.

        Raises
        ------
        ValueError
            The value is not a scalar.
        OverflowError
            The dtype does not hold it.
        BufferError
            The tensor is read-only.
        DriverError
            The driver refused; or the stream is captured into a graph, and the layout would need
            more than 128 driver calls.
        """
        from gpumem._tensor.create import fill
        fill(self, value, stream)

    # ---- copies ----------------------------------------------------------------------------------

    def contiguous(self, stream=None):
        """Return itself if its elements are adjacent in C order, else a copy in the same memory.

        Parameters
        ----------
        stream : stream, optional
            The copy is queued on it, and its buffer belongs to it; None is the resource's own.

        Examples
        --------
        >>> import gpumem
        >>> tensor = gpumem.zeros((4, 6), "int16", memory="host")
        >>> column = tensor[:, 2]
        >>> column.strides, column.contiguous().strides
        ((12,), (2,))
        >>> tensor.contiguous() is tensor
        True
        """
        if layout_is_c(self.rank, self.lengths, self.steps, self.element.itemsize):
            return self
        return tensor_copy(self, resource_beside(self), stream, 0)

    def copy(self, stream=None):
        """Return a copy of its elements in the same memory, in C order.

        The argument is that of `contiguous`.

        Examples
        --------
        >>> import gpumem
        >>> tensor = gpumem.zeros((2, 3), "int16", memory="host")
        >>> copied = tensor.T.copy()
        >>> copied.shape, copied.ptr == tensor.ptr
        ((3, 2), False)
        """
        return tensor_copy(self, resource_beside(self), stream, 0)

    def to(self, memory, stream=None, copy=None):
        """Return the elements in another memory; itself where that is the same for its readers.

        Parameters
        ----------
        memory : MemoryInfo, Device or str
            Its default resource allocates the memory, if a copy is made.
        stream : stream, optional
            The copy is queued on it, and its buffer belongs to it.
        copy : bool, optional
            None: only if the memories are not compatible, or the readers of `memory` cannot access
            this one. True: always. False: never.

        Raises
        ------
        BufferError
            ``copy=False`` and a copy is needed.
        TypeError
            `copy` is none of these.

        Notes
        -----
        Returns once the copy is queued, or done where it cannot be asynchronous; `numpy` and
        other consumers wait for it.

        Examples
        --------
        >>> import gpumem
        >>> tensor = gpumem.zeros(3, "float32", memory="host/managed")
        >>> tensor.to("host") is tensor      # the host reads managed memory as it is
        True
        >>> copied = tensor.to("host", copy=True)
        >>> str(copied.memory), copied.ptr == tensor.ptr
        ('host:0', False)
        """
        # Anything else would be read as True or False below.
        if copy is not None:
            require("copy", copy, bool, "True, False or None")
        return tensor_to(self, memory, stream, copy)

    def __copy__(self):
        return tensor_whole(self)

    def __deepcopy__(self, memo):
        # On the stream that the memory belongs to, as later work on either tensor.
        cdef Buffer buffer = self.buffer
        cdef Tensor made
        is_default = buffer.home.is_foreign or buffer.slot == DEFAULT_SLOT
        made = tensor_copy(self, resource_beside(self), None if is_default else buffer.stream, 0)
        if not buffer.home.is_foreign:
            made.dl_device = self.dl_device
        return made

    # ---- NumPy and the buffer protocol -----------------------------------------------------------

    def numpy(self, *, writable=None, sync=True):
        """Return a NumPy array of the same memory, without a copy.

        The array keeps the memory, also when every object of gpumem has ended.

        Parameters
        ----------
        writable : bool, optional
            None: unless the tensor is read-only.
        sync : bool
            Wait until work that gpumem queued on the buffer's stream has finished. False: the
            caller has waited.

        Raises
        ------
        BufferError
            The CPU cannot read the memory, or `writable` is True and it is read-only.

        Examples
        --------
        >>> import gpumem
        >>> tensor = gpumem.zeros(3, "float32", memory="host")
        >>> array = tensor.numpy()
        >>> array[1] = 7                     # the tensor's own bytes
        >>> del tensor                       # which the array keeps
        >>> array
        array([0., 7., 0.], dtype=float32)
        """
        cdef int64_t low = 0
        cdef int64_t high = 0
        # It refuses before it shares or waits.
        require_cpu(self)
        if writable and self.is_read_only:
            raise BufferError("this tensor is read-only: copy it to write it, as with "
                              ".to(memory, copy=True)")
        layout_extent(self.rank, self.lengths, self.steps, self.element.itemsize, &low, &high)
        # NumPy checks that an array lies in its base, so the base begins at the lowest byte, which
        # negative strides put below the first element.
        owner = array_owner(self.buffer, self.address + low, high - low,
                            self.is_read_only or (writable is not None and not writable))
        if sync:
            order_host(self.buffer)
        return numpy().ndarray(self.shape, self.element.dtype, owner, -low, self.strides)

    def item(self):
        """Return the one element as a Python scalar.

        Waits until it is written; from memory that the CPU cannot read, the element is copied.

        Raises
        ------
        ValueError
            The tensor has not exactly one element.

        Examples
        --------
        >>> import gpumem
        >>> gpumem.full((1, 1), 2.5, "float32", memory="host").item()
        2.5
        """
        if self.count != 1:
            raise ValueError(f"a tensor of shape {self.shape} has {self.count} elements: expected "
                             "exactly 1")
        if not self.buffer.home.cpu_can_read:
            return self.to("host").item()
        _held = hold_elements(self)
        return self.numpy(writable=False).item()

    def tolist(self):
        """Return the elements as nested lists of Python scalars; waits and copies as `item`."""
        _held = hold_elements(self)
        return self.to("host").numpy(writable=False).tolist()

    def __eq__(self, other):
        # NumPy's arrays and scalars compare elements themselves. A tensor would be unequal to one
        # of the same elements, and a number silently unequal.
        if type(other) in (Tensor, bool, int, float, complex, list, tuple):
            raise TypeError(f"a tensor and {other!r} cannot be compared: expected item(), numpy() "
                            "or tolist() of the tensor")
        return NotImplemented

    def __hash__(self):
        return object.__hash__(self)

    def __bool__(self):
        return bool(self.item())

    def __int__(self):
        return int(self.item())

    def __float__(self):
        return float(self.item())

    def __complex__(self):
        return complex(self.item())

    def __index__(self):
        # With dimensions it is not one: `bytes` and `bytearray` then read the elements.
        if self.rank or self.element.dtype.kind not in "iu":
            raise TypeError(f"a tensor of shape {self.shape} and {self.element.dtype} "
                            "is not an integer: expected no dimensions and integers")
        return self.item()

    def __reduce__(self):
        raise TypeError("a Tensor cannot be pickled: allocate it with shareable=True, and send the "
                        "Handle that gpumem.interop.export(tensor) returns")

    def __bytes__(self):
        _held = hold_elements(self)
        return bytes(memoryview(self))

    def __array__(self, dtype=None, *, copy=None):
        """Return a NumPy array, by NumPy 2's rules: a copy where `copy` or `dtype` needs it."""
        raise_discarded(self)
        array = self.numpy()
        # Another dtype always needs a copy, which then is the one that `copy=True` wants.
        if dtype is not None and numpy().dtype(dtype) != array.dtype:
            if copy is False:
                raise ValueError(f"a conversion of {array.dtype} to {dtype} needs a copy")
            _held = hold_elements(self)
            return array.astype(dtype)
        _held = hold_elements(self) if copy else None
        return array.copy() if copy else array

    def __getbuffer__(self, Py_buffer* view, int flags):
        require_cpu(self)
        if flags & PyBUF_WRITABLE and self.is_read_only:
            raise BufferError("this tensor is read-only")
        if flags & PyBUF_FORMAT and self.element.format is None:
            raise BufferError(f"the buffer protocol has no format for {self.element.dtype}: use "
                              "numpy(), or view() it as integers")
        require_order(self, flags)
        # The view has the lease, which __releasebuffer__ ends on any thread.
        view.internal = buffer_share(self.buffer)
        try:
            order_host(self.buffer)
        except BaseException as error:
            drop_share(view.internal)
            note_discarded(self, error)
            raise
        view.buf = <void*><uintptr_t>self.address
        view.len = self.count * self.element.itemsize
        view.readonly = self.is_read_only
        view.itemsize = self.element.itemsize
        view.format = <char*>self.element.format if flags & PyBUF_FORMAT else NULL
        view.ndim = self.rank
        view.shape = <Py_ssize_t*>self.lengths if flags & PyBUF_ND and self.rank else NULL
        view.strides = NULL
        if self.rank and includes(flags, PyBUF_STRIDES):
            view.strides = <Py_ssize_t*>self.steps
        view.suboffsets = NULL
        view.obj = self

    def __releasebuffer__(self, Py_buffer* view):
        drop_share(view.internal)

    @property
    def __cuda_array_interface__(self):
        """Version 3 of the CUDA array interface; absent on memory that CUDA does not reach.

        Its stream is the buffer's own: a consumer waits for it, or queues its work there.
        """
        memory = self.buffer.home.memory
        if memory.device.type != "cuda":
            raise AttributeError(f"{memory} memory is not accessible to CUDA")
        if self.element.typestr is None:
            raise AttributeError("__cuda_array_interface__ has no typestr for "
                                 f"{self.element.dtype}: "
                                 f"use DLPack, or view('u{self.element.itemsize}')")
        # A consumer waits for `stream` alone, so that waits for all other work on the memory.
        require_open(self.buffer)
        order_stream(self.buffer, own_stream(self.buffer))
        contiguous = layout_is_c(self.rank, self.lengths, self.steps, self.element.itemsize)
        described = {
            "shape": self.shape,
            "typestr": self.element.typestr,
            "data": (self.address if self.count else 0, bool(self.is_read_only)),
            "version": 3,
            "strides": None if contiguous else self.strides,
            "stream": <uintptr_t>own_stream(self.buffer),
        }
        if self.element.dtype.names is not None:
            described["descr"] = self.element.dtype.descr
        return described

    # ---- DLPack ----------------------------------------------------------------------------------

    def __dlpack_device__(self):
        """Return DLPack's (device type, device id)."""
        return self.dl_device.device_type, self.dl_device.device_id

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Return a DLPack capsule over the elements.

        Parameters
        ----------
        stream : int, optional
            The consumer's stream, which is then ordered after the buffer's stream. On a CUDA device
            None and 1 are the legacy default stream, 2 the thread's own, -1 means no order. For CPU
            memory None: the call waits. The block is not reused while work that a default stream
            had when the block was freed is unfinished; a consumer on another stream keeps its view
            until its work is done, or calls `Buffer.record_stream`.
        max_version : tuple of int, optional
            The newest DLPack that the consumer reads; from (1, 0) it gets a versioned capsule.
        dl_device : tuple of int, optional
            Where it should be: any device that reaches the memory; the CPU, by a copy, of any.
        copy : bool, optional
            None: only if `dl_device` needs it. True: adjacent elements in new memory. False: never.

        Raises
        ------
        BufferError
            This export is not possible.
        ValueError
            A malformed argument.
        """
        cdef DLPackCall call
        call.stream = <PyObject*>stream
        call.max_version = <PyObject*>max_version
        call.dl_device = <PyObject*>dl_device
        call.copy = <PyObject*>copy
        return tensor_dlpack(self, &call)


cdef inline object numbers(int ndim, const int64_t* values):
    # The two usual ranks, without a list.
    if ndim == 1:
        return (values[0],)
    if ndim == 2:
        return values[0], values[1]
    return tuple([values[i] for i in range(ndim)])


# ---- the resource of a memory --------------------------------------------------------------------

cdef extern from "Python.h":
    int PyContextVar_Get(object variable, PyObject* default, PyObject** value) except -1

# In variables of C, which cost less to look up.
cdef object open_blocks = using
cdef type memory_type = MemoryInfo
cdef list last = last_served


cdef MemoryResource serving(object memory):
    cdef PyObject* value = NULL
    PyContextVar_Get(open_blocks, NULL, &value)
    Py_DECREF(<object>value)    # the context, or the variable, has another reference
    if value == <PyObject*>None and last[0] is memory:
        return <MemoryResource>last[1]
    return get_default_resource(memory)


# ---- making tensors ------------------------------------------------------------------------------

cdef Tensor tensor_new(Buffer buffer, ElementType element, uint64_t address, int ndim):
    cdef Tensor tensor = Tensor.__new__(Tensor)
    if ndim > INLINE_RANK:
        tensor.lengths = <int64_t*>malloc(3 * ndim * sizeof(int64_t))
        require_memory(tensor.lengths != NULL, "creating a tensor")
    else:
        tensor.lengths = tensor.inline_numbers
    # Shape, strides and DLPack's strides lie in one array, one after the other.
    tensor.steps = tensor.lengths + ndim
    tensor.dl_steps = tensor.steps + ndim
    tensor.rank = ndim
    tensor.buffer = buffer
    tensor.element = element
    tensor.address = address
    tensor.dl_device = buffer.home.dl_device
    return tensor


# Without a `__dealloc__`, around which Cython saves and restores the exception that is set.
cdef destructor dealloc_object


cdef void dealloc(PyObject* self) noexcept:
    # Only more numbers than fit into the object have memory of their own.
    if (<Tensor>self).lengths != (<Tensor>self).inline_numbers:
        free((<Tensor>self).lengths)
    dealloc_object(self)


dealloc_object = replace_dealloc(<PyTypeObject*>Tensor, dealloc)


cdef Tensor tensor_allocate(MemoryResource resource, ElementType element, int ndim,
                            const int64_t* shape, object stream, object shareable,
                            uint64_t alignment):
    cdef int64_t size = layout_size(ndim, shape, element.itemsize)
    cdef Buffer buffer
    if size < 0:
        raise ValueError(f"shape {numbers(ndim, shape)} of {element.dtype} has more than "
                         "2**63 - 1 bytes")
    # `obtain` reads no stream: it is the short way to a block on the resource's own.
    if alignment:
        options = {} if shareable is False else {"shareable": shareable}
        buffer = resource.allocate(size * element.itemsize, stream, alignment=alignment, **options)
    elif shareable is not False:
        buffer = resource.allocate(size * element.itemsize, stream, shareable=shareable)
    elif stream is None:
        buffer = resource.obtain(size * element.itemsize)
    else:
        buffer = resource.allocate(size * element.itemsize, stream)
    # The bytes are those of an earlier block.
    return tensor_within(buffer, element, 0, ndim, shape, size)


cdef Tensor tensor_within(Buffer buffer, ElementType element, int64_t offset, int ndim,
                          const int64_t* shape, int64_t count):
    cdef Tensor tensor = tensor_new(buffer, element, buffer.address + offset, ndim)
    memcpy(tensor.lengths, shape, ndim * sizeof(int64_t))
    layout_c_strides(ndim, shape, element.itemsize, tensor.steps)
    tensor.count = count
    return tensor


cdef uint64_t alignment_named(object memory) except? 1:
    if type(memory) is not memory_type or memory.alignment <= QUANTUM:
        return 0
    return memory.alignment


cdef Tensor tensor_copy(Tensor source, MemoryResource resource, object stream, uint64_t alignment):
    cdef Tensor made = tensor_allocate(resource, source.element, source.rank, source.lengths,
                                       stream, False, alignment)
    tensor_move(made, source, stream, False)
    return made


cdef int tensor_move(Tensor dst, Tensor src, object stream, bint dst_is_temporary) except -1:
    cdef Side to = Side(dst.address, dst.steps, dst_is_temporary)
    cdef Side origin = Side(src.address, src.steps, False)
    # A new `dst` has memory.
    _src_held = hold_elements(src)
    _dst_held = hold_elements(dst)
    return copy_elements(dst.buffer, &to, src.buffer, &origin, dst.rank, dst.lengths,
                         dst.element.itemsize, stream)


cdef object hold_elements(Tensor tensor):
    cdef Buffer buffer = tensor.buffer
    cdef int64_t low = 0
    cdef int64_t high = 0
    require_open(buffer)
    if tensor.count == 0:
        return None
    layout_extent(tensor.rank, tensor.lengths, tensor.steps, tensor.element.itemsize, &low, &high)
    return buffer.home.hold_bytes(buffer, tensor.address + low, tensor.address + high)


cdef MemoryResource resource_beside(Tensor tensor):
    # Memory that gpumem did not allocate has no resource that could allocate more of it.
    # The buffer's own resource may be an adaptor: its limits then count the copy, too.
    if tensor.buffer.home.is_foreign:
        return serving(tensor.buffer.home.memory)
    return <MemoryResource>tensor.buffer.resource


cdef Tensor tensor_to(Tensor tensor, object memory, object stream, object copy):
    source = tensor.buffer.home.memory
    target = MemoryInfo.parse(memory)
    cdef uint64_t alignment = alignment_named(memory)
    cdef bint is_aligned = alignment == 0 or tensor.address % alignment == 0
    # Both tensors have the same buffer, so later work on them is in one order.
    if not copy and is_aligned and is_memory_for(source, target):
        return tensor
    if copy is not None and not copy:
        why = f"{source} is not {target}" if is_aligned else f"not aligned to {alignment} bytes"
        raise BufferError(f"{why}: a copy is needed, and copy=False forbids it")
    return tensor_copy(tensor, serving(target), stream, alignment)


cdef bint is_memory_for(object source, object target):
    # Whether readers of `target` may read `source` instead: both are the same memory to the
    # driver, the target's device reaches it, and so does the CPU if it reads the target.
    return (source.shares_memory_with(target)
            and can_access(target.device, source)
            and (source.host_accessible or not target.host_accessible))


cdef Tensor tensor_view(Tensor base, ElementType element, uint64_t address, int ndim,
                        const int64_t* lengths, const int64_t* steps):
    cdef Tensor made = tensor_new(base.buffer, element, address, ndim)
    cdef int i
    # DLPack's strides are not copied: they are found at the view's first export.
    made.count = 1
    for i in range(ndim):
        made.lengths[i] = lengths[i]
        made.steps[i] = steps[i]
        made.count *= lengths[i]
    made.is_read_only = base.is_read_only
    made.dl_device = base.dl_device
    return made


cdef Tensor tensor_whole(Tensor base):
    return tensor_view(base, base.element, base.address, base.rank, base.lengths, base.steps)


# ---- what protocols require ----------------------------------------------------------------------

cdef int require_cpu(Tensor tensor) except -1:
    if not tensor.buffer.home.cpu_can_read:
        raise BufferError(f"{tensor.buffer.home.memory} is not readable by the CPU: copy it "
                          "first, with .to('host')")
    return 0


cdef int require_order(Tensor tensor, int flags) except -1:
    # Refuses a buffer request for an order that the elements do not have.
    cdef bint in_c = layout_is_c(tensor.rank, tensor.lengths, tensor.steps,
                                 tensor.element.itemsize)
    cdef bint in_f = layout_is_f(tensor.rank, tensor.lengths, tensor.steps,
                                 tensor.element.itemsize)
    # Without a request for strides the consumer assumes C order.
    if ((in_c or includes(flags, PyBUF_STRIDES))
            and (in_c or not includes(flags, PyBUF_C_CONTIGUOUS))
            and (in_f or not includes(flags, PyBUF_F_CONTIGUOUS))
            and (in_c or in_f or not includes(flags, PyBUF_ANY_CONTIGUOUS))):
        return 0
    raise BufferError(f"strides {tensor.strides} are not in the order asked for: copy it "
                      "first, with .contiguous()")


cdef inline bint includes(int flags, int request) noexcept:
    return (flags & request) == request     # the requests share bits


cdef Export* tensor_export(Tensor tensor, DLDevice device, uint64_t flags,
                           bint versioned) except NULL:
    # The export takes over the lease, which the consumer's deleter ends.
    cdef Export* exported = dlpack_export(tensor.rank, flags, tensor.element.dl_minor, versioned,
                                          buffer_share(tensor.buffer))
    cdef int i
    tensor_describe(tensor, device, exported.tensor)
    # A loop: for two or three numbers, calls of memcpy would take longer.
    for i in range(tensor.rank):
        exported.tensor.shape[i] = tensor.lengths[i]
        exported.tensor.strides[i] = tensor.dl_steps[i]
    return exported


cdef int find_words(Tensor tensor) except -1:
    cdef ElementType element = tensor.element
    cdef int i
    # This runs once: neither the element type nor the strides of a tensor change.
    if element.dl.bits == 0:
        raise BufferError(f"DLPack has no type for {element.dtype}: view() it as integers")
    for i in range(tensor.rank):
        if tensor.steps[i] < 0:
            raise BufferError(f"strides {tensor.strides} are negative, which not every DLPack "
                              "consumer takes: copy it first, with .contiguous() or copy=True")
        # DLPack counts in elements; where it has a name for them, their size is a power of two.
        if tensor.steps[i] & (element.itemsize - 1):
            raise BufferError(f"strides {tensor.strides} are not multiples of {element.itemsize} "
                              "bytes: copy it first, with .contiguous() or copy=True")
        tensor.dl_steps[i] = tensor.steps[i] >> element.shift
    tensor.is_described = True
    return 0


# The body of Tensor.__dlpack__.
cdef object tensor_dlpack(Tensor tensor, const DLPackCall* call):
    cdef DLDevice device = tensor.dl_device
    cdef bint versioned = dlpack_wants_versioned(<object>call.max_version)
    cdef bint reaches = True
    # An explicit device replaces the one that the tensor is exported under by default.
    if call.dl_device != <PyObject*>None:
        device = dlpack_device_from(<object>call.dl_device)
        reaches = export_reaches(tensor.buffer.home, device)
    if not reaches or (call.copy != <PyObject*>None and <object>call.copy):
        return export_copy(tensor, device, versioned, <object>call.stream, <object>call.copy)
    # A capsule from before DLPack 1.0 has no flag for it.
    if tensor.is_read_only and not versioned:
        raise BufferError("read-only memory needs a versioned DLPack capsule: call with "
                          "max_version=(1, 0)")
    tensor_find_words(tensor)
    export_order(tensor.buffer, device, <object>call.stream)
    return dlpack_capsule(tensor_export(tensor, device, tensor_flags(tensor), versioned))


cdef object quick_dlpack(PyObject* method, PyObject* const* arguments, size_t count,
                         PyObject* names):
    cdef DLPackCall call
    if dlpack_read_call(<PyTypeObject*>Tensor, arguments, count, names, &call):
        return tensor_dlpack(<Tensor>arguments[0], &call)
    return general_dlpack(method, arguments, count, names)


cdef vectorcall general_dlpack = call_first(Tensor.__dict__["__dlpack__"], quick_dlpack)


cdef object export_copy(Tensor tensor, DLDevice device, bint versioned, object stream,
                        object copy):
    # Exports adjacent elements in new memory: of the same kind, or on the CPU. The consumer's
    # stream is checked before the copy is made, and ordered after it.
    cdef Tensor made
    cdef bint here = export_reaches(tensor.buffer.home, device)
    cdef bint on_cpu = device.device_type == DL_CPU and device.device_id == 0
    if copy is False or not (here or on_cpu):
        raise export_refusal(tensor.buffer.home, device)
    dlpack_check_stream(device, stream)
    made = tensor_copy(tensor, resource_beside(tensor) if here else serving("host"), None, 0)
    tensor_find_words(made)
    export_order(made.buffer, device, stream)
    return dlpack_capsule(tensor_export(made, device, DL_IS_COPIED, versioned))


cdef PyObject* refuse_new(PyTypeObject* cls, PyObject* args, PyObject* kwargs) except NULL:
    raise TypeError("a Tensor is made by gpumem.empty, zeros, full, asarray or from_dlpack")


cdef PyObject* refuse_to_compute(PyObject* left, PyObject* right) except NULL:
    # NumPy's scalars and the arrays of other libraries compute with a tensor themselves.
    for value in (<object>left, <object>right):
        if type(value) not in (Tensor, bool, int, float, complex):
            Py_INCREF(NotImplemented)
            return <PyObject*>NotImplemented
    raise TypeError("a Tensor holds memory and does not compute: its elements do as x.numpy(), "
                    "torch.from_dlpack(x) or another library's array")


forbid_instantiation(Tensor, refuse_new)
refuse_arithmetic(Tensor, refuse_to_compute)
# It keeps the block of a closed buffer, too.
BLOCKS[Tensor] = lambda tensor: (
    (<Tensor>tensor).buffer.address, (<Tensor>tensor).buffer.block_bytes)
