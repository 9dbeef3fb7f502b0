"""Stacks and reports of a debug heap, and their delivery."""

import atexit
import gc
import sys
import warnings
from weakref import ref

cimport cython
from cpython.exc cimport PyErr_Fetch, PyErr_Restore
from cpython.object cimport PyObject
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free

from gpumem._native.arena.api cimport (
    arena_context, arena_debug, arena_free, ArenaCore, Block, heap_bad_free, heap_check, heap_copy,
    heap_create, HEAP_DOUBLE_FREE, heap_drop, heap_findings, heap_has_findings, HEAP_INVALID_FREE,
    heap_is_gone, HEAP_LATE_WRITE, HEAP_LIVE, heap_narrow, HEAP_NO_STACK, heap_note_stack,
    HEAP_OVERRUN, heap_pump, heap_settings, HEAP_STRAY_WRITE, HEAP_STREAM_GONE, HEAP_UNDERRUN,
    heap_wants_stack, HeapBlock, HeapFinding, HeapHooks, HeapSettings, HeapSite,
)
from gpumem._native.driver cimport (
    check as check_code, context_enter, context_leave, context_relax, context_restore, CUDA_SUCCESS,
    CUresult, CUstreamCaptureMode,
)
from gpumem._support.interpreter cimport PyGILState_Check
from gpumem._support.memory cimport require_memory
from gpumem._support.process cimport call_soon, process, report_unraisable

from gpumem._support.sizes import format_size
from gpumem._support.texts import counted
from gpumem.device import MemoryKind
from gpumem.errors import ConfigWarning, HeapCorruptionError, HeapWarning, InvalidFreeError


cdef extern from "Python.h":
    ctypedef struct PyCodeObject:
        pass
    int PyCode_Addr2Line(PyCodeObject* code, int offset)

cdef extern from *:
    """
    #include <dlfcn.h>
    #include <stdio.h>
    /* A return address as library and symbol, or as library and offset. */
    static void gm_name_caller(void *address, char *text, size_t room) {
        Dl_info info;
        if (!dladdr(address, &info) || !info.dli_fname)
            snprintf(text, room, "%p", address);
        else if (info.dli_sname)
            snprintf(text, room, "%s(%s+0x%zx)", info.dli_fname, info.dli_sname,
                     (size_t)((char *)address - (char *)info.dli_saddr));
        else
            snprintf(text, room, "%s(+0x%zx)", info.dli_fname,
                     (size_t)((char *)address - (char *)info.dli_fbase));
    }
    """
    void gm_name_caller(void* address, char* text, size_t room)

cdef enum:
    MAX_LISTED = 10         # reports or blocks in one message

KINDS = {
    <int>HEAP_OVERRUN: "overrun",
    <int>HEAP_UNDERRUN: "underrun",
    <int>HEAP_LATE_WRITE: "use_after_free",
    <int>HEAP_STRAY_WRITE: "wrong_stream",
    <int>HEAP_DOUBLE_FREE: "double_free",
    <int>HEAP_INVALID_FREE: "invalid_free",
    <int>HEAP_STREAM_GONE: "stream_gone",
}
BAD_FREES = ("double_free", "invalid_free")

# Heaps of live arenas, and heaps that have findings.
cdef list heaps = []
# Every stack that was kept, as (code object, offset) of each call; its number is its index. The
# same calls have the same number, so this does not grow when a program repeats itself.
cdef list stacks = [None]
# Numbers by identities and offsets: equal code objects may be of different files.
cdef dict numbers = {}
# gpumem.debugging: imported with the first arena; `import gpumem` would take longer with it.
cdef object debugging = None


# ---- making --------------------------------------------------------------------------------------

cdef Heap make_heap(ArenaCore* core, object debug, object arena):
    cdef HeapSettings settings
    cdef HeapHooks hooks
    cdef Heap made
    global debugging, traceback
    import traceback
    from gpumem import debugging
    options = debugging.options_of(debug)
    if options is None:
        return None
    for name, why in options._without_effect().items():
        warnings.warn(f"{name} = {getattr(options, name)!r} has no effect on the debug heap of "
                      f"arena {arena.name!r}: {why}", ConfigWarning, stacklevel=1)
    settings.guard = options.guard_bytes
    settings.quarantine = options.quarantine_bytes
    settings.guard_byte = options.guard_byte
    # -1: bytes are left as they are.
    settings.fresh_byte = -1 if options.fresh_byte is None else options.fresh_byte
    settings.freed_byte = -1 if options.freed_byte is None else options.freed_byte
    settings.stack_depth = options.stack_depth
    settings.stack_every = options.stack_every
    settings.by_cpu = arena.memory.kind is MemoryKind.HOST
    hooks.stack = stack_here
    hooks.found = schedule_delivery
    made = Heap.__new__(Heap)
    made.options = options
    made.arena = arena.name
    made.memory = str(arena.memory)
    made.owner = ref(arena)
    made.generation = process.generation
    made.heap = heap_create(&settings, &hooks)
    require_memory(made.heap != NULL, "allocating a debug heap")
    arena_debug(core, made.heap)
    # Heaps of arenas that have ended are dropped, if they have no findings.
    heaps[:] = [heap for heap in heaps
                if not heap_is_gone((<Heap>heap).heap) or heap_has_findings((<Heap>heap).heap)]
    heaps.append(made)
    # The function that is registered last is called first, while the device still works.
    atexit.unregister(report_at_exit)
    atexit.register(report_at_exit)
    return made


@cython.final
cdef class Heap:
    """The debug heap of one arena."""

    def __init__(self):
        raise TypeError("a Heap is made by an Arena with debug_heap=")

    def __dealloc__(self):
        if self.heap != NULL:
            heap_drop(self.heap)

    cdef int before(self, ArenaCore* core) except -1:
        with nogil:
            heap_pump(core)
        self.deliver()
        # A stack costs a microsecond or more, so only every n-th block has one.
        if heap_wants_stack(self.heap):
            heap_note_stack(number_of_stack(heap_settings(self.heap).stack_depth))
        else:
            heap_note_stack(HEAP_NO_STACK)
        return 0

    cdef void after(self) noexcept:
        heap_note_stack(0)      # an allocation that was refused early took none

    cdef int narrow(self, ArenaCore* core, const Block* block, uint64_t nbytes,
                    uint32_t slot) except -1:
        cdef CUresult code
        with nogil:
            code = heap_narrow(core, block.handle, block.address, nbytes)
        if code != CUDA_SUCCESS:
            # The caller gets the exception instead of the block.
            arena_free(core, block.handle, slot)
            check_code(arena_context(core).table, code, "cuMemsetD8Async")
        return 0

    cdef int bad_free(self, uint64_t address) except -1:
        heap_bad_free(address)
        return self.deliver()

    cdef tuple check(self, ArenaCore* core, bint wait):
        cdef CUresult code = CUDA_SUCCESS
        if wait:
            with nogil:
                code = wait_for_device(core)
        check_code(arena_context(core).table, code, "cuCtxSynchronize")
        with nogil:
            code = heap_check(core)
        check_code(arena_context(core).table, code, "cuMemcpyDtoHAsync")
        return deliver_reports(self, take_reports(self))

    cdef int deliver(self) except -1:
        if heap_has_findings(self.heap):
            deliver_reports(self, take_reports(self))
        return 0

    cdef list outstanding(self):
        cdef uint64_t count = 0
        cdef uint64_t i
        cdef HeapBlock* found = heap_copy(self.heap, False, &count)
        require_memory(found != NULL, "listing blocks")
        try:
            return [debugging.OutstandingBlock(found[i].address, found[i].requested,
                                               found[i].number,
                                               site_of(&found[i].taken, found[i].stream))
                    for i in range(count)]
        finally:
            free(found)

    cdef str live_text(self):
        live = self.outstanding()
        lines = [f"\n  {format_size(block.nbytes)} at {block.ptr:#x}, allocated at "
                 f"{block.allocated.where}" for block in live[:MAX_LISTED]]
        if len(live) > MAX_LISTED:
            lines.append(f"\n  and {len(live) - MAX_LISTED} more")
        return "".join(lines)


cdef CUresult wait_for_device(ArenaCore* core) noexcept nogil:
    # The mode is relaxed, so that a capture of another stream by this thread does not forbid it.
    cdef CUstreamCaptureMode mode
    cdef CUresult code = context_enter(arena_context(core))
    if code != CUDA_SUCCESS:
        return code
    mode = context_relax(arena_context(core))
    code = arena_context(core).table.cuCtxSynchronize()
    context_restore(arena_context(core), mode)
    context_leave(arena_context(core))
    return code


# ---- stacks --------------------------------------------------------------------------------------

cdef uint32_t stack_here(uint32_t depth) noexcept nogil:
    # A thread without the interpreter lock does not wait for it: its caller may hold a lock that a
    # thread with the interpreter lock waits for.
    if process.exiting or not PyGILState_Check():
        return 0
    return stack_with_lock(depth)


cdef uint32_t stack_with_lock(uint32_t depth) noexcept with gil:
    # In a finalizer an exception may be set already.
    cdef PyObject* kind = NULL
    cdef PyObject* value = NULL
    cdef PyObject* trace = NULL
    cdef uint32_t number = 0
    PyErr_Fetch(&kind, &value, &trace)
    try:
        number = number_of_stack(depth)
    except BaseException:
        number = 0              # out of host memory: the block has no stack
    PyErr_Restore(kind, value, trace)
    return number


cdef uint32_t number_of_stack(uint32_t depth) except? 0:
    try:
        frame = sys._getframe()
    except ValueError:
        return 0                # no Python function runs on this thread
    calls = []
    while frame is not None and len(calls) < depth:
        calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    # The key has identities, because comparing code objects compares their bytecode.
    key = tuple([(id(code), offset) for code, offset in calls])
    number = numbers.get(key)
    if number is None:
        number = len(stacks)
        stacks.append(tuple(calls))     # keeps the code objects, and so their identities
        numbers[key] = number
    return number


cdef object summary_of(uint32_t number):
    """Return a kept stack as a traceback.StackSummary, the innermost call last."""
    if number == 0:
        return None
    frames = [traceback.FrameSummary(code.co_filename, line_of(code, offset),
                                     code.co_name, lookup_line=False)
              for code, offset in stacks[number]]
    return traceback.StackSummary.from_list(frames[::-1])


cdef int line_of(object code, int offset):
    return PyCode_Addr2Line(<PyCodeObject*>code, offset)


cdef object site_of(const HeapSite* site, uint64_t stream):
    cdef char text[512]
    cdef uint32_t i
    native = []
    for i in range(site.depth):
        gm_name_caller(site.frames[i], text, sizeof(text))
        # Names of symbols are bytes of any encoding.
        native.append((<bytes>text).decode("utf-8", "replace"))
    return debugging.Site(site.thread, stream, summary_of(site.stack), tuple(native))


# ---- reports -------------------------------------------------------------------------------------

cdef list take_reports(Heap heap):
    """Return the findings since the last time as `HeapReport`."""
    # They are taken all at once: making a report runs Python code, and `deliver_all` may run
    # between two instructions.
    cdef uint64_t lost = 0
    cdef HeapFinding* oldest = heap_findings(heap.heap, &lost)
    cdef HeapFinding* finding = oldest
    reports = []
    try:
        while finding != NULL:
            reports.append(report_of(heap, finding))
            finding = finding.next
    finally:
        while oldest != NULL:
            finding = oldest
            oldest = oldest.next
            free(finding)
    heap.lost += lost
    return reports


cdef object report_of(Heap heap, const HeapFinding* finding):
    cdef const HeapBlock* block = &finding.block
    cdef bint is_write = finding.wrong != 0
    kind = KINDS[<int>finding.fault]
    seen = bytes([finding.seen[i] for i in range(finding.seen_count)])
    return debugging.HeapReport(
        kind=kind, arena=heap.arena, memory=heap.memory, ptr=block.address, nbytes=block.requested,
        number=block.number, allocated=site_of(&block.taken, block.stream),
        freed=None if block.state == HEAP_LIVE else site_of(&block.freed, block.freed_stream),
        again=site_of(&finding.again, 0) if kind in BAD_FREES else None,
        address=block.address + finding.offset if is_write else finding.address,
        offset=finding.offset, expected=finding.expected if is_write else None, found=seen,
        wrong_bytes=finding.wrong)


cdef tuple deliver_reports(Heap heap, list reports):
    how = heap.options.on_error
    # The heap does not have the reports any more: they are lost if they are not delivered now.
    if how == "raise" and reports:
        raise error_of(heap, reports)
    if how == "warn":
        call_for_each(heap, reports, warn)
    elif how != "raise":
        call_for_each(heap, reports, how)
    return tuple(reports)


cdef object error_of(Heap heap, list reports):
    kind = InvalidFreeError if reports[0].kind in BAD_FREES else HeapCorruptionError
    text = "\n".join(str(report) for report in reports[:MAX_LISTED])
    if len(reports) > MAX_LISTED:
        text += f"\nand {len(reports) - MAX_LISTED} more: see `reports`"
    if heap.lost:
        text += f"\nand {heap.lost} that were not kept"
    heap.lost = 0
    return kind(text, reports)


cdef int call_for_each(Heap heap, list reports, object how) except -1:
    """Call `how` with every report, then raise the first exception that it raised."""
    failure = None
    for report in reports:
        try:
            how(report)
        except BaseException as error:
            failure = failure or error
    # Lost reports are mentioned once, after the others.
    lost, heap.lost = heap.lost, 0
    if failure is not None:
        raise failure
    if lost:
        warnings.warn(f"{lost} more reports of arena {heap.arena!r} were not kept", HeapWarning,
                      stacklevel=2)
    return 0


def warn(report):
    """Deliver a report as a warning."""
    warnings.warn(str(report), HeapWarning, stacklevel=3)


# ---- delivery without a call of the arena --------------------------------------------------------

cdef void schedule_delivery() noexcept nogil:
    call_soon(deliver_all)


cdef void deliver_all() noexcept:
    # Findings that are to be raised wait for a call that may raise, unless the arena has ended.
    for heap in list(heaps):
        if not heap_has_findings((<Heap>heap).heap):
            continue
        # Read before the delivery, which runs user code that may drop the arena.
        gone = heap_is_gone((<Heap>heap).heap)
        try:
            if (<Heap>heap).options.on_error != "raise":
                deliver_reports(heap, take_reports(heap))
            elif gone:
                call_for_each(heap, take_reports(heap), warn)
        except BaseException as error:
            report_unraisable(error, heap)


def report_at_exit():
    """Check every arena once more; deliver the findings and report blocks that are in use."""
    if not heaps:
        return
    # Buffers in reference cycles are not leaks.
    gc.collect()
    for heap in list(heaps):
        if (<Heap>heap).generation != process.generation:
            continue            # the parent's, in a fork's child
        try:
            report_last(heap)
        except BaseException as error:
            report_unraisable(error, heap)


cdef int report_last(Heap heap) except -1:
    arena = heap.owner()
    how = heap.options.on_error
    if not callable(how):
        how = print_report
    if arena is not None:
        arena._check_last()
    call_for_each(heap, take_reports(heap), how)
    # An arena that is gone has no live blocks.
    if heap_is_gone(heap.heap) or not heap.options.leaks:
        return 0
    leaks = [debugging.HeapReport(kind="leak", arena=heap.arena, memory=heap.memory, ptr=block.ptr,
                                  nbytes=block.nbytes, number=block.number,
                                  allocated=block.allocated)
             for block in heap.outstanding()]
    if how is not print_report:
        call_for_each(heap, leaks, how)
    elif leaks:
        print_leaks(heap, leaks)
    return 0


def print_report(report):
    """Print a report on stderr."""
    print(f"gpumem: {report}", file=sys.stderr, end="")


cdef str leaked_text(list leaks):
    return f"{counted(len(leaks), 'block')}, {format_size(sum([leak.nbytes for leak in leaks]))}"


cdef int print_leaks(Heap heap, list leaks) except -1:
    """Print blocks in use on stderr, those of one stack together, the largest sum first."""
    # There is one line for each place of allocation, not for each block.
    groups = {}
    for leak in leaks:
        groups.setdefault((str(leak.allocated.stack and leak.allocated.stack.format()),
                           leak.allocated.native), []).append(leak)
    print(f"gpumem: {leaked_text(leaks)} of arena {heap.arena!r} on {heap.memory} in use at the "
          "end", file=sys.stderr)
    largest = sorted(groups.values(), key=lambda group: -sum(leak.nbytes for leak in group))
    for group in largest[:MAX_LISTED]:
        print(f"leak: {leaked_text(group)}, allocated {group[0].allocated}", file=sys.stderr,
              end="")
    if len(groups) > MAX_LISTED:
        print(f"and from {len(groups) - MAX_LISTED} more places", file=sys.stderr)
    return 0
