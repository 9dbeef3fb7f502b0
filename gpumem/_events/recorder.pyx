"""Recorders as Python objects, and the texts that numbers in events stand for."""

import json
from threading import Lock

cimport cython
from cpython.exc cimport PyErr_Occurred
from cpython.object cimport PyObject
from libc.errno cimport EBUSY, ENODATA, ENOMEM
from libc.stdint cimport uint16_t, uint32_t, uint64_t, uint8_t, uintptr_t
from libc.string cimport strerror
from posix.unistd cimport close

from gpumem._arena cimport Arena, GraphPool
from gpumem._buffer cimport HOOK_OF_RUN, MemoryResource, set_resource_hook
from gpumem._support.atomics cimport load32, load64
from gpumem._support.columns cimport column_of
from gpumem._support.contexts cimport innermost_label
from gpumem._support.events cimport (
    EventSource, REC_CATEGORY, REC_FRAMEWORKS, REC_PHASE_BEGIN, REC_PHASE_END, REC_REFUSALS,
    REC_STACKS, REC_TAGS, Recorder, recorder_begin, recorder_define, recorder_end, recorder_file,
    recorder_finish_file, recorder_free, recorder_mark, recorder_read_ring, recorder_ring,
    recorder_set_stacks, recorder_thread_id, thread_set_framework,
)
from gpumem._support.process cimport interrupt_again, process, process_is_exiting
from gpumem.adaptors._adaptor cimport Adaptor
from gpumem._events.sources cimport source_of

from gpumem._support.closing import close_after_body
from gpumem._support.events import FRAMEWORKS, label_texts
from gpumem.errors import InUseError


cdef extern from "<sys/file.h>" nogil:
    enum:
        LOCK_UN
    int flock(int file, int operation)

cdef extern from "Python.h":
    ctypedef struct PyThreadState:
        pass
    PyThreadState* PyGILState_GetThisThreadState() noexcept nogil

cdef extern from "stacks.h":
    ctypedef struct Call:
        uint64_t at
    ctypedef struct Stack:
        uint32_t count
        Call* calls
        PyObject** codes
    ctypedef struct KnownStack:
        uint16_t number
        uint64_t begun
    ctypedef struct StackTable:
        pass
    int stack_init()
    void stack_add_native(Stack* stack, void* address)
    int stack_add_frames(Stack* stack) except -1
    int stack_line(const Stack* stack, uint32_t call)
    const KnownStack* stack_find(const StackTable* table, const Stack* stack)
    void stack_keep(StackTable* table, const Stack* stack, uint16_t number, uint64_t begun)

cdef extern from "<execinfo.h>" nogil:
    int backtrace(void** addresses, int size)

cdef extern from "<dlfcn.h>" nogil:
    ctypedef struct Dl_info:
        const char* dli_fname
        void* dli_fbase
        const char* dli_sname
        void* dli_saddr
    int dladdr(void* address, Dl_info* info)

cdef enum:
    MAX_NUMBERS = 65535
    WORDS = 6                   # of one event in a ring
    MAX_NATIVE = 32             # native frames of one stack, gpumem's included
    OWN_FRAMES = 4              # native frames between an allocator and backtrace()

# Running recorders, without references. A new name is written into each of them, under the lock.
cdef object lock = Lock()
cdef PyObject* first_active = NULL


@cython.final
cdef class NameTable:
    """Numbers for texts, for the life of the process."""

    cdef uint32_t what
    cdef dict numbers
    cdef list texts

    def __init__(self, what, texts):
        self.what = what
        self.numbers = {}
        self.texts = texts

    cdef uint16_t number(self, str text) except? 0:
        """Return the number of a text and define it in every recorder; 0 if no number is left."""
        with lock:
            found = self.numbers.get(text)
            if found is None and len(self.texts) <= MAX_NUMBERS:
                found = len(self.texts)
                self.texts.append(text)
                self.numbers[text] = found
            for each in active_recorders() if found is not None else ():
                (<RecorderHandle>each).define(self.what, found, self.texts[found])
        return 0 if found is None else found


FURTHER_TAGS = "further tags"
cdef NameTable labels = NameTable(REC_TAGS, label_texts)
cdef NameTable stacks = NameTable(REC_STACKS, [""])
cdef NameTable refusals = NameTable(REC_REFUSALS, [""])
# Numbers of stacks by their calls, so that a text is made only for a stack that is new, or new to a
# recording. Guarded by the interpreter lock.
cdef StackTable known_stacks    # empty
cdef uint64_t begun = 0         # recordings so far

if stack_init() != 0:
    raise MemoryError("the interpreter has no index for data of code objects left")


# ---- the first resource --------------------------------------------------------------------------

cdef object first_resource_callback = None


def call_with_first_resource(callback):
    """Call a function once, when this process makes its next resource."""
    global first_resource_callback
    first_resource_callback = callback
    set_resource_hook(HOOK_OF_RUN, end_waiting_for_resource)


cdef int end_waiting_for_resource() except -1:
    set_resource_hook(HOOK_OF_RUN, NULL)
    first_resource_callback()
    return 0


# ---- labels, and the framework of the calling thread ---------------------------------------------

def number_of_label(text):
    """Return the number of a label; the last number is shared by all further ones."""
    cdef uint16_t number = 0
    if len(labels.texts) < MAX_NUMBERS or text in labels.numbers:
        number = labels.number(str(text))
    return number or labels.number(FURTHER_TAGS)


@cython.final
cdef class framework_events:
    """A context in which the calling thread's events name a framework."""

    cdef uint8_t number
    cdef uint8_t before

    def __init__(self, framework):
        self.number = FRAMEWORKS.index(framework)

    def __enter__(self):
        self.before = thread_set_framework(self.number)

    def __exit__(self, *exception):
        thread_set_framework(self.before)


# ---- stacks --------------------------------------------------------------------------------------

cdef void enable_stacks() noexcept:
    # Stacks are sampled only while a recording has them enabled.
    cdef PyObject* each = first_active
    while each != NULL and not (<RecorderHandle>each).recorder.sampling:
        each = (<RecorderHandle>each).next_active
    if each != NULL:
        recorder_set_stacks(number_stack)
    else:
        recorder_set_stacks(NULL)


cdef uint16_t number_stack(int native) noexcept nogil:
    # Called by an allocating thread that holds no lock of gpumem's, with the interpreter lock or
    # without it. A thread that Python does not know has no frames to show.
    if process_is_exiting() or PyGILState_GetThisThreadState() == NULL:
        return 0
    with gil:
        return number_frames(native)


cdef uint16_t number_frames(int native) noexcept:
    cdef Stack stack
    cdef const KnownStack* known
    cdef uint64_t seen = begun
    cdef uint16_t number
    if PyErr_Occurred() != NULL:
        return 0                # an exception is being propagated
    try:
        stack.count = 0
        if native:
            add_native_frames(&stack)
        if stack_add_frames(&stack) == 0:
            return 0
        known = stack_find(&known_stacks, &stack)
        if known != NULL and known.begun == seen:
            return known.number
        # Python code and other threads may run here, and may number this stack, too.
        number = stacks.number(text_of(&stack))
        stack_keep(&known_stacks, &stack, number, seen)
        return number
    except BaseException as error:
        interrupt_again(error)
        return 0                # no host memory for a stack: the event has none


cdef inline void add_native_frames(Stack* stack) noexcept:
    cdef void* addresses[MAX_NATIVE]
    cdef int count = backtrace(addresses, MAX_NATIVE)
    cdef int i
    for i in range(OWN_FRAMES, count):
        stack_add_native(stack, addresses[i])


cdef str text_of(const Stack* stack):
    """Write a stack as JSON: [file, line, name] for each call; native ones have line 0."""
    cdef uint32_t i
    calls = []
    for i in range(stack.count):
        if stack.codes[i] == NULL:
            calls.append(native_frame(stack.calls[i].at))
        else:
            code = <object>stack.codes[i]
            calls.append([code.co_filename, stack_line(stack, i), code.co_qualname])
    return json.dumps(calls)


cdef list native_frame(uint64_t address):
    cdef Dl_info info
    if dladdr(<void*>address, &info) == 0 or info.dli_fname == NULL:
        return ["", 0, f"{address:#x}"]
    name = (<bytes>info.dli_sname).decode("utf-8", "replace") if info.dli_sname != NULL else ""
    base = <uintptr_t>(info.dli_saddr if info.dli_sname != NULL else info.dli_fbase)
    return [(<bytes>info.dli_fname).decode("utf-8", "replace"), 0, f"{name}+{address - base:#x}"]


# ---- phases and categories -----------------------------------------------------------------------

cdef uint64_t phases_begun = 0      # so far


cdef void mark(uint32_t kind, uint64_t address, uint16_t label, uint16_t module=0) noexcept:
    # With the interpreter lock no recorder in the list ends.
    cdef PyObject* each = first_active
    while each != NULL:
        recorder_mark((<RecorderHandle>each).recorder, kind, address, label, module)
        each = (<RecorderHandle>each).next_active


def current_recording():
    """Return the number of the recording that began last; 0 while none runs."""
    return begun if first_active != NULL else 0


def begin_phase(uint16_t label):
    """Write the beginning of a phase with the name of a label; return its number."""
    global phases_begun
    phases_begun += 1
    mark(REC_PHASE_BEGIN, phases_begun, label)
    return phases_begun


def end_phase(uint16_t label, uint64_t number):
    """Write the end of a phase."""
    mark(REC_PHASE_END, number, label)


def set_category(uint16_t label, addresses, uint16_t module=0):
    """Write the category of the live blocks at addresses, and the label of their module or 0."""
    for address in addresses:
        mark(REC_CATEGORY, address, label, module)


def note_refusal(facts):
    """Write the facts of a refused request, a text in JSON, into all recordings."""
    refusals.number(facts)


def label_here():
    """Return the innermost label of this context; "" if there is none."""
    return labels.texts[innermost_label(True)]


def frames_here():
    """Return the frames of the caller, the innermost first: file, line and name."""
    cdef uint16_t stack = number_frames(False)
    return json.loads(stacks.texts[stack]) if stack else []


# ---- recorders -----------------------------------------------------------------------------------

@cython.final
cdef class RecorderHandle:
    """Owns a recorder from its beginning to its end.

    Parameters
    ----------
    slots : int
        Of a ring, a power of two; 0 for a file.
    file : int
        An empty file, open to read and write, and locked; this object closes it. -1: none.
    sampling : int
        Number of allocations with a stack, of 2**32 - 1.
    native : bool
        Whether its stacks have native frames.

    Raises
    ------
    MemoryError, OSError
        There is no room.
    """

    cdef Recorder* recorder
    cdef readonly bint running
    cdef uint64_t slots         # of a ring; 0: a file
    cdef set defined            # in the file: (what, number)
    cdef readonly object keys   # of the recorded resources, as in a snapshot; None: all
    cdef PyObject* next_active
    cdef readonly int file      # its descriptor; -1: closed, or a ring

    def __cinit__(self, uint64_t slots, int file, uint32_t sampling, bint native=False):
        cdef int code = 0
        self.slots = slots
        self.file = -1
        self.defined = set()
        with nogil:
            if slots:
                self.recorder = recorder_ring(slots, sampling)
            else:
                self.recorder = recorder_file(file, sampling, &code)
        if self.recorder == NULL and slots:
            raise MemoryError(f"out of host memory for a ring of {slots} events")
        if self.recorder == NULL:
            raise OSError(code, (<bytes>strerror(code)).decode())
        self.recorder.native = native
        self.file = file

    def __dealloc__(self):
        # In a fork's child the recorder is the parent's: its memory is left alone.
        if self.recorder != NULL:
            self.end()
            self.complete_file()
            if self.recorder.generation == process.generation:
                recorder_free(self.recorder)

    def begin(self, resources):
        """Attach to resources, None to all; raise InUseError if one has another recorder."""
        global begun, first_active
        cdef EventSource* source
        cdef int code = 0
        self.keys = None if resources is None else set()
        with lock:
            # Threads may have any label already; a stack is written at its first use.
            for number, text in enumerate(labels.texts[1:], start=1):
                self.define(REC_TAGS, number, text)
            for number, text in enumerate(FRAMEWORKS[1:], start=1):
                self.define(REC_FRAMEWORKS, number, text)
            self.next_active, first_active = first_active, <PyObject*>self
            self.running = True
            begun += 1
            enable_stacks()
        try:
            for resource in (None,) if resources is None else resources:
                source = NULL if resource is None else source_of(resource)
                if source != NULL:
                    self.keys.add(<uintptr_t>source.owner)
                with nogil:
                    code = recorder_begin(self.recorder, source)
                if code != 0:
                    raise_refusal(code, resource)
        except BaseException:
            self.end()
            raise

    def end(self):
        """Detach. After the return no event is written. Idempotent.

        It runs no Python code and allocates nothing, so that neither Ctrl-C nor a lack of memory
        prevents it.
        """
        cdef PyObject** link = &first_active
        if not self.running:
            return
        self.running = False
        while link[0] != <PyObject*>self:
            link = &(<RecorderHandle>link[0]).next_active
        link[0] = self.next_active
        enable_stacks()
        if self.recorder.generation == process.generation:
            with nogil:
                recorder_end(self.recorder)

    def finish_file(self):
        """Complete the file and close it. A fork's child leaves its parent's file alone.

        Returns whether another process has shortened it.
        """
        cdef int code = self.complete_file()
        if code not in (0, ENODATA):
            raise OSError(code, (<bytes>strerror(code)).decode())
        return code == ENODATA

    cdef int complete_file(self) noexcept:
        # An errno. The mapping keeps the file open, so the lock ends here.
        cdef int code = 0
        cdef int file = self.file
        self.file = -1
        if file >= 0:
            with nogil:
                if self.recorder.generation == process.generation:
                    code = recorder_finish_file(self.recorder)
                    flock(file, LOCK_UN)
                close(file)
        return code

    def define(self, what, number, text):
        """Write the text of a number into the file, once. A fork's child leaves it alone."""
        if self.recorder.generation == process.generation and (what, number) not in self.defined:
            encoded = text.encode("utf-8", "replace")
            self.defined.add((what, number))
            recorder_define(self.recorder, what, number, encoded, len(encoded))

    def read_ring(self, rows):
        """Copy the events that a ring holds, the oldest first; return their number.

        `rows` has six words for each slot of the ring.
        """
        cdef size_t most = len(rows)
        cdef uint64_t* row = <uint64_t*>column_of(rows, most * WORDS, sizeof(uint64_t), True)
        cdef uint64_t last = load64(&self.recorder.next)
        cdef uint64_t first = max(<uint64_t>0, last - min(last, self.recorder.mask + 1))
        cdef uint64_t number
        cdef size_t count = 0
        with nogil:
            for number in range(first, last):
                if count < most and recorder_read_ring(self.recorder, number, row + count * WORDS):
                    count += 1
        return count

    @property
    def writing(self):
        """Whether events are being written: not ended, not failed, not the parent's of a fork."""
        return (self.running and load32(&self.recorder.failed) == 0
                and self.recorder.generation == process.generation)

    @property
    def written(self):
        """Events so far, of a ring those that were overwritten included."""
        return load64(&self.recorder.next)

    @property
    def lost(self):
        """Events that found no slot, and those that later ones of a ring have overwritten."""
        cdef uint64_t written = load64(&self.recorder.next)
        return load64(&self.recorder.missed) + written - min(written, self.slots or written)

    @property
    def failed(self):
        """The errno of the error that ended it; 0: none."""
        return load32(&self.recorder.failed)

    @property
    def began_at(self):
        """Nanoseconds since 1970."""
        return self.recorder.began_at

    def names(self):
        """Return the texts of the numbers in a ring, as `names_of` returns those of a file."""
        return {
            "resources": {i: (<bytes>self.recorder.names[i]).decode("utf-8", "replace")
                          for i in range(self.recorder.resources)},
            "tags": dict(enumerate(labels.texts[1:], start=1)),
            "stacks": dict(enumerate(stacks.texts[1:], start=1)),
            "frameworks": dict(enumerate(FRAMEWORKS[1:], start=1)),
            "refusals": dict(enumerate(refusals.texts[1:], start=1)),
        }


cdef list active_recorders():
    cdef PyObject* each
    found = []
    each = first_active
    while each != NULL:
        found.append(<object>each)
        each = (<RecorderHandle>each).next_active
    return found


cdef class RecordedBlock:
    """The `with` block of a recording: whatever ends `stop` early, nothing is recorded after it."""

    cdef public RecorderHandle _handle      # None: it has not begun

    def __exit__(self, kind, error, trace):
        try:
            close_after_body(self.stop, error)
        finally:
            if self._handle is not None:
                self._handle.end()


def labels_and_stacks():
    """Return the texts of all labels and of all stacks, by their numbers."""
    return labels.texts, stacks.texts


def thread_id(number):
    """Return the system's id of a thread by its number in events."""
    return recorder_thread_id(number)


def resources_below(resource):
    """Return the resources that allocate a resource's blocks: itself, or those below adaptors.

    The arenas of an arena's tags are listed with it.

    Raises
    ------
    TypeError
        It is not a resource of gpumem's, or its blocks cannot be recorded.
    """
    if isinstance(resource, GraphPool):
        source_of(resource)
        return [resource]
    if not isinstance(resource, MemoryResource):
        raise TypeError(f"{resource!r} is not a MemoryResource")
    if isinstance(resource, Adaptor):
        below = [found for upstream in resource.upstreams for found in resources_below(upstream)]
        return list({id(found): found for found in below}.values())
    source_of(resource)
    return [resource, *resource._tag_arenas()] if isinstance(resource, Arena) else [resource]


cdef int raise_refusal(int code, object resource) except -1:
    if code == EBUSY:
        which = "a resource" if resource is None else repr(resource)
        raise InUseError(f"{which} is being recorded already, by another recording or by `gpumem "
                         "run --report`: end that one first")
    if code == ENOMEM:
        raise MemoryError("out of host memory while attaching a recording")
    raise OSError(code, (<bytes>strerror(code)).decode())
