"""Storages that autograd has saved, on the host while nothing needs them.

The unit that moves is a storage, so that several saved views of one move once. A storage is known
by a weak reference, since its address is used again. Records live as long as autograd holds one of
their tensors: a graph that ends without a backward pass frees them.
"""

import threading
import weakref
from collections import deque
from importlib import import_module

cimport cython
from libc.stdint cimport int64_t

from gpumem.integrations.torch._offload.plan import Planner
from gpumem.integrations.torch._offload.report import Moves, OffloadReport


cdef enum:
    MAX_WAITS = 4096    # of which the report is not told before it is asked for


@cython.final
cdef class Record:
    """A storage that autograd has saved, while it holds a tensor of it."""

    # `original` and `back` are weak references, to the storage and to that which came back. `flat`
    # holds the latter while tensors are `pending`: no backward pass has needed them.
    cdef object owner, original, flat, back, __weakref__
    cdef str module
    cdef object stream          # that its first tensor was saved on
    cdef int64_t nbytes, version
    cdef object step, item      # of the planner
    cdef Py_ssize_t number      # of the item in the step
    cdef list saved             # weak references to its saved tensors
    cdef Py_ssize_t pending
    cdef list host              # pieces of pinned memory; None: it stays on the GPU
    cdef int64_t first, last    # bytes that the host has
    # Its bytes on the GPU, the end of their copy, a stream; the end of a copy back, and the stream
    # of its memory. None: there is no such copy.
    cdef tuple leaving, copy
    cdef bint is_out, is_awaited    # is_awaited: a stream waits for the copy back

    def __del__(self):
        self.version = -1       # another thread may find it while this one waits for the lock
        if self.host is None:
            return
        with self.owner._lock:
            self.leave()
            self.set_out(False)
        if not self.is_awaited:
            self.owner._mover.drop(*self.copy)
        self.owner._mover.host.free(self.host)

    cdef bint leave(self) except -1:
        # Frees the GPU's block in the order of its stream, which waits for the copy.
        leaving, self.leaving = self.leaving, None
        if leaving is None:
            return False
        self.owner._mover.release(*leaving)
        self.owner._planner.leaving -= self.nbytes
        self.set_out(True)
        return True

    cdef bint is_early(self):
        # Whether it is on the GPU again, and nothing has needed it yet.
        return self.flat is not None and not self.is_awaited

    cdef int64_t leave_again(self) except -1:
        # Frees the GPU's block if it is back and not needed yet; returns its bytes.
        if not self.is_early():
            return 0
        self.owner._mover.drop(*self.copy)
        self.flat, self.is_awaited = None, True
        self.set_out(True)
        return self.nbytes

    cdef void set_out(self, bint is_out):
        self.owner._planner.out += self.nbytes * (<int>is_out - <int>self.is_out)
        self.is_out = is_out


@cython.final
cdef class Saved:
    """The place of a saved tensor in a record; the tensor itself if it stays."""

    cdef Record record
    cdef object tensor, counter     # None once its storage leaves; holder of its versions
    cdef bint is_used
    cdef object dtype, size, offset, strides, __weakref__

    cdef void leave(self):
        # Keeps what rebuilds the tensor, and its counter of versions, but not its memory.
        tensor = self.tensor
        self.dtype, self.size = tensor.dtype, tensor.size()
        self.offset, self.strides = tensor.storage_offset(), tensor.stride()
        tensor.data = tensor.new_empty(0)   # keeps the counter
        self.tensor = None


cdef void check(tensor, version):
    # Raises what PyTorch raises of a saved tensor; it leaves the check to hooks.
    if version is not None and tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: a saved tensor is at version {tensor._version}; "
            f"expected version {version} instead"
        )


class Inside(threading.local):
    """The outermost module that a thread was in last, the paths of those that it is in, and of all.

    The reference to the module is weak.
    """

    def __init__(self):
        self.outermost = lambda: None
        self.paths = []
        self.names = {}


cdef class Storages:
    """The hooks of saved tensors, and the storages that they have seen.

    Parameters
    ----------
    torch : module
        PyTorch.
    mover : Mover
        Copies storages of a device, and counts its memory.
    limit : int
        Bytes that the device's allocator may hold.
    min_bytes : int
        Smaller storages stay.
    """

    cdef public object _planner
    cdef readonly object _mover, _lock, _inside
    # By the addresses of storages, which none has again while there is a reference: records, and
    # references to parameters and buffers.
    cdef readonly object _records
    cdef dict fixed
    # Of this step: a weak reference to the first record; records by number; weak references in the
    # order of the copies; numbers of moved storages that are not back yet, None: unknown.
    cdef object first, moved, leaving, coming
    cdef readonly list _waits       # copies that a stream waited for, with two events
    cdef object told                # the report
    cdef object unknown             # the last step that followed no plan
    cdef int64_t min_bytes
    cdef object torch, kinds, strided, task, reference, weak, is_wrapped

    def __cinit__(self, torch, mover, int64_t limit, int64_t min_bytes):
        self._planner = Planner(limit, sees_peaks=mover.sees_peaks)
        self._mover = mover
        self._lock = threading.RLock()
        self.torch = torch
        self.kinds = {torch.Tensor, torch.nn.Parameter}
        self.strided = torch.strided
        self.task = torch._C._current_graph_task_id
        self.reference = import_module("torch.multiprocessing.reductions").StorageWeakRef
        self.weak = torch.UntypedStorage._new_with_weak_ptr
        self.is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
        self.min_bytes = min_bytes
        self._records = weakref.WeakValueDictionary()
        self.moved = weakref.WeakValueDictionary()
        self.leaving = deque()
        self.fixed = {}
        self.first = lambda: None
        self._inside = Inside()
        self._waits = []
        self.told = OffloadReport()

    def report(self):
        """Return the bytes that have moved, by module; waits for the copies under way."""
        with self._lock:
            self.tell_waits(0)
            total = Moves()
            for each in self.told.modules.values():
                total._add(each)
            vars(self.told).update(vars(total))
            return self.told

    cdef void tell_waits(self, Py_ssize_t kept):
        # Adds waits to the report, but those for the last copies, which may be under way.
        cdef Py_ssize_t count = max(0, len(self._waits) - kept)
        for moves, nbytes, before, after in self._waits[:count]:
            after.synchronize()
            seconds = before.elapsed_time(after) / 1000
            # Two events next to each other are microseconds apart.
            waited = seconds > 20e-6
            self.told.wait_seconds += seconds if waited else 0
            moves.waited += nbytes if waited else 0
            moves.hidden += 0 if waited else nbytes
        del self._waits[:count]

    # ---- which tensors move ----------------------------------------------------------------------

    cdef int64_t gradients(self) except -1:
        # The bytes of gradients that the backward pass of this step will allocate.
        outermost = self._inside.outermost()
        if outermost is None:
            return 0
        return sum([
            each.nbytes
            for each in outermost.parameters()
            if each.requires_grad and each.grad is None and each.device == self._mover.device
        ])

    def _begin_call(self):
        """Begin a step anew if the graph of the one under way has ended, as by an exception."""
        with self._lock:
            if self.first() is None and self.task() == -1:
                self._planner.drop_step()

    def _fix(self, module):
        """Note the parameters and buffers of a module, which stay."""
        copies = module.__dict__.get("_former_parameters", {})  # of a replica of DataParallel
        for tensors in (module._parameters, module._buffers, copies):
            for each in tensors.values():
                if each is None or self.is_wrapped(each):
                    continue
                if not self.is_known(each) and self.why_not(each) is None:
                    storage = each.untyped_storage()
                    self.fixed[storage._cdata] = self.reference(storage)

    cdef bint is_known(self, tensor) except -1:
        # Whether it lies in a parameter or a buffer of a module: most tensors do.
        return (
            type(tensor) in self.kinds
            and tensor.layout is self.strided
            and tensor.untyped_storage()._cdata in self.fixed
        )

    cdef str why_not(self, tensor):
        # Why a tensor cannot move; or None.
        if type(tensor) not in self.kinds or tensor.is_quantized or tensor.is_nested:
            return "subclass"
        if tensor.layout is not self.strided:
            return "not strided"
        if tensor.device != self._mover.device:
            return f"on {tensor.device.type}"
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            return "lazily conjugated, negated or zero"
        return None

    cdef bint is_fixed(self, tensor) except -1:
        # Whether it lies in a parameter or a buffer that no module has, or is a small part of a
        # tensor without a history, such as a batch of a data set that the program holds on the GPU.
        owner = tensor._base
        if owner is None:
            owner = tensor
        return owner.is_leaf and (
            owner.requires_grad or isinstance(owner, self.torch.nn.Parameter)
            or tensor.nbytes * 8 < owner.nbytes
        )

    # ---- the hooks -------------------------------------------------------------------------------

    def _pack(self, tensor):
        """Return what autograd saves: a `Saved`, or a tensor that stays and its version.

        PyTorch calls it without gradients.
        """
        cdef Record record
        cdef Saved saved
        if self.is_known(tensor):
            return self.keep(tensor)
        reason = self.why_not(tensor)
        if reason is not None:
            skipped = self.told.skipped
            skipped[reason] = skipped.get(reason, 0) + 1
            return self.keep(tensor)
        storage = tensor.untyped_storage()
        # A backward pass frees soon what it saves, such as by recomputation.
        if storage.nbytes() < self.min_bytes or self.task() != -1 or tensor.is_inference():
            return self.keep(tensor)
        key = storage._cdata
        stream = self._mover.current_stream()
        with self._lock:
            record = self._records.get(key)
            if record is None or record.version != <int64_t>tensor._version:
                if self.is_fixed(tensor):
                    return self.keep(tensor)
                record = self._records[key] = self.begin(storage, tensor._version, stream)
            saved = Saved.__new__(Saved)
            saved.record = record
            saved.tensor = saved.counter = tensor.detach()
            record.pending += 1
            record.saved.append(weakref.ref(saved))
            if stream != record.stream:
                self._mover.note_use(tensor, stream)
            if record.host is not None:
                self.extend(record, saved, storage, stream)
            return saved

    cdef tuple keep(self, tensor):
        # An inference tensor has no version. A tensor with a history is not held: it may be a
        # result of the node that saves it.
        kept = tensor if tensor.is_leaf else tensor.detach()
        return kept, None if tensor.is_inference() else tensor._version

    def _unpack(self, saved):
        """Return a tensor; the current stream waits for its bytes."""
        cdef Saved place
        cdef Record record
        if type(saved) is tuple:
            check(saved[0], saved[1])
            return saved[0]
        place = saved
        record = place.record
        check(place.counter, record.version)
        with self._lock:
            storage = self.find(record, place)
            if not place.is_used:
                place.is_used = True
                record.pending -= 1
            if record.pending == 0:
                record.flat = None
            # A node may hold what it gets: it keeps its memory where the storage leaves meanwhile,
            # and its counter of versions.
            if place.tensor is not None:
                return place.tensor.detach()
            empty = self.torch.empty(0, dtype=place.dtype, device=self._mover.device)
            tensor = place.counter.detach()
            tensor.data = empty.set_(storage, place.offset, place.size, place.strides)
            return tensor

    cdef object find(self, Record record, Saved saved):
        # Returns the storage, which is on the GPU; at the step's first need the next ones follow.
        cdef bint is_back, frees
        cdef int64_t live
        storage = self.revive(record.original)
        if storage is not None and storage.nbytes() != record.nbytes:
            storage = None      # it was resized
        is_back = saved.tensor is not None or storage is not None
        if record.step is self._planner.step and record.item.end is not None:
            return storage if is_back else self.wait(record)
        now, peak, waste = self._mover.live()
        frees = not is_back or record.leaving is not None or record.host is None
        self._planner.need(record.step, record.number, now, peak, waste, frees=frees)
        live = now - self.make_room(now)
        if not is_back:
            storage = self.wait(record)
        if record.step is self._planner.step:
            self.bring_next(live)
        return storage

    # ---- to the host -----------------------------------------------------------------------------

    cdef Record begin(self, storage, int64_t version, stream):
        # Begins a record, with host memory if it moves.
        cdef Record record = Record.__new__(Record)
        planner = self._planner
        cdef bint moves
        cdef list paths = self._inside.paths
        record.owner = self
        record.original = self.reference(storage)
        record.nbytes, record.version, record.stream = storage.nbytes(), version, stream
        record.module = paths[len(paths) - 1] if paths else ""
        record.saved, record.is_awaited = [], True
        live, peak, waste = self._mover.live()
        moves = planner.save(record.module, record.nbytes, live, peak, waste)
        if planner.plan is None and planner.step is not self.unknown:
            self.unknown, planner.coming = planner.step, self.gradients()
        self.make_room(live)
        record.step = planner.step
        record.number = len(planner.step.items) - 1
        record.item = planner.step.items[record.number]
        if record.number == 0:
            self.first = weakref.ref(record)
            self._mover.host.begin_step()
            self.moved = weakref.WeakValueDictionary()
            self.leaving = deque([each for each in self.leaving if each() is not None])
            self.fixed = {key: each for key, each in list(self.fixed.items()) if not each.expired()}
        self.coming = None
        if moves:
            self._mover.require_no_capture()
            self.allocate_host(record)
        return record

    cdef void allocate_host(self, Record record):
        record.host = self._mover.host.allocate(record.nbytes)
        moves = self.moves_of(record)
        if record.host is None:
            moves.refused += record.nbytes
        else:
            moves.moved += record.nbytes
            self.moved[record.number] = record

    cdef int64_t make_room(self, int64_t live) except -1:
        # Frees as much as the time up to the next point needs; returns the bytes. Not as soon as
        # copies have ended: each step then gives the same addresses to its blocks, and few pages
        # move.
        cdef int64_t released = 0
        if self.leaving:
            released = self.release(-self._planner.room(live))
        self._planner.out_before = self._planner.out
        if released and self._mover.sees_peaks:
            self._mover.live()   # the highest bytes are those from now on
        return released

    cdef int64_t release(self, double nbytes) except -1:
        # Frees blocks of at least so many bytes that leave, the oldest copies first; returns their
        # bytes. Their streams wait for the copies, and no thread does.
        cdef int64_t released = 0
        cdef Record record
        while self.leaving and released < nbytes:
            record = self.leaving.popleft()()
            if record is not None and record.leave():
                released += record.nbytes
                self.coming = None
        return released

    def _relieve(self, int64_t nbytes):
        """Free memory before a request of so many bytes is refused; returns the bytes.

        Storages that stay move, and those that came back too early leave again.
        """
        cdef int64_t live = self._mover.allocated() if self._mover.sees_peaks else 0
        cdef int64_t released = self.release(nbytes)
        cdef list records = list(self._records.values())    # those needed last come first
        cdef Record each
        cdef bint early = False
        if live:
            for each in records:
                early = early or each.is_early()
            if released < nbytes:
                live = self._mover.allocated()
            self._planner.refuse(nbytes, live, early=early, leaving=released >= nbytes)
        for each in records:
            if released >= nbytes:
                break
            released += self.evict(each) if each.host is None else each.leave_again()
        self.coming = None
        return released

    cdef int64_t evict(self, Record record) except -1:
        # Moves a storage that stays; returns the bytes that are free then.
        cdef list found = []
        cdef Saved each
        storage = self.revive(record.original)
        for ref in record.saved:
            each = ref()
            if each is not None and each.is_used:
                return 0            # a node may hold it
            if each is not None and each.tensor is not None:
                found.append(each)
        if storage is None or not found:
            return 0
        self.allocate_host(record)
        if record.host is not None:
            with self.torch.no_grad():
                for each in found:
                    self.extend(record, each, storage, record.stream)
        storage = None
        if record.leave() and self.revive(record.original) is None:
            return record.nbytes
        return 0

    cdef void extend(self, Record record, Saved saved, storage, stream):
        # Copies a tensor's bytes to the host, but those that are there, and lets go of the tensor.
        # Others of the storage may be written later, by a kernel that counts no version.
        cdef int64_t size = saved.tensor.element_size()
        cdef int64_t first = saved.tensor.storage_offset() * size
        cdef int64_t last = first
        cdef int64_t begin, end
        if saved.tensor.numel():
            last += size
            for n, stride in zip(saved.tensor.size(), saved.tensor.stride(), strict=True):
                last += (n - 1) * stride * size
        if record.last == 0:
            record.first = record.last = first
        if last < record.first or first > record.last:
            record.leave()
            record.set_out(False)
            return
        flat = self.torch.empty(0, dtype=self.torch.uint8, device=saved.tensor.device)
        flat.set_(storage)
        for begin, end in ((first, record.first), (record.last, last)):
            if begin < end:
                copied = self._mover.copy_out(record.host, flat, begin, end, stream)
                if record.leaving is None:
                    self.leaving.append(weakref.ref(record))
                    self._planner.leaving += record.nbytes
                    record.set_out(False)
                record.leaving = (flat, copied, stream)
        record.first, record.last = min(first, record.first), max(last, record.last)
        saved.leave()

    # ---- back to the GPU -------------------------------------------------------------------------

    cdef object revive(self, reference):
        return None if reference is None else self.weak(reference.cdata)

    cdef object wait(self, Record record):
        # Returns a record's storage on the GPU; the current stream waits for its bytes.
        storage = self.revive(record.back)
        if storage is None:
            try:
                self.bring(record, True)
            except self.torch.OutOfMemoryError:
                self._relieve(record.nbytes)
                self.bring(record, False)
            storage = record.flat.untyped_storage()
        flat = self.torch.empty(0, dtype=self.torch.uint8, device=self._mover.device).set_(storage)
        before, after = self._mover.wait(flat, *record.copy)
        if not record.is_awaited:
            self._waits.append((self.moves_of(record), record.nbytes, before, after))
            self.tell_waits(MAX_WAITS)
        record.is_awaited = True
        return storage

    cdef void bring(self, Record record, bint at_once):
        record.flat, end, stream = self._mover.bring(
            record.host, record.nbytes, record.first, record.last, at_once=at_once
        )
        record.back = self.reference(record.flat.untyped_storage())
        record.copy, record.is_awaited = (end, stream), False
        record.set_out(False)
        self.moves_of(record).brought += record.nbytes

    cdef void bring_next(self, int64_t live):
        # Starts the copies of the storages that are needed after this one, while there is room.
        cdef Record record
        if self.coming is None:
            self.coming = deque([each for each in self._planner.order() if each in self.moved])
        coming = self.coming
        while coming:
            record = self.moved.get(coming[0])
            if record is not None and record.is_out and self.revive(record.original) is None:
                if not self._planner.has_room(record.number, live):
                    break
                try:
                    self.bring(record, True)
                except self.torch.OutOfMemoryError:
                    break       # it is copied when it is needed
                live += record.nbytes
            coming.popleft()

    cdef object moves_of(self, Record record):
        return self.told.modules.setdefault(record.module, Moves())
