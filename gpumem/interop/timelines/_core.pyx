"""Waits and signals of timelines, their uses by streams, their links to devices, and their ends."""

from libc.errno cimport errno
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from gpumem._native.driver cimport (
    context_enter, context_is_dead, context_leave, CU_EVENT_DISABLE_TIMING,
    CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD, CU_MEMHOSTREGISTER_DEVICEMAP,
    CU_MEMHOSTREGISTER_PORTABLE, CU_STREAM_CAPTURE_STATUS_NONE, CU_STREAM_NON_BLOCKING,
    CU_STREAM_WAIT_VALUE_GEQ, CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_NOT_READY,
    CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC, CUDA_EXTERNAL_SEMAPHORE_PARAMS, CUDA_SUCCESS, CUresult,
    CUstream, CUstreamCaptureStatus, DeviceContext,
)
from gpumem._support.atomics cimport (
    count64_add, load64, publish_pointer, published_pointer, store64,
)
from gpumem._support.lock cimport Lock, lock_acquire, lock_init, lock_release, lock_try
from gpumem._support.memory cimport MAP_FAILED, MAP_SHARED, mmap, munmap, PROT_READ, PROT_WRITE
from gpumem._support.process cimport on_fork, process, process_is_exiting
from gpumem._support.retired cimport retire, Retired, take_retired
from gpumem._support.streams cimport PER_THREAD_STREAM


cdef extern from "<fcntl.h>" nogil:
    enum:
        F_DUPFD_CLOEXEC
    int fcntl(int fd, int command, ...)

cdef extern from "<unistd.h>" nogil:
    int c_close "close"(int fd)
    int usleep(unsigned int microseconds)

cdef extern from "<pthread.h>" nogil:
    ctypedef unsigned long pthread_t
    pthread_t pthread_self()


cdef enum:
    FIRST_PAUSE_US = 10         # between two queries of a device
    MAX_PAUSE_US = 500

cdef bint memory_operations_everywhere = False

# Cores that were used by a stream, and those of them that have no user any more. The lists' lock is
# taken after a core's own; in the other order a core's lock is only tried. A thread that does not
# hold it may only test whether a list is empty: the heads are atomics.
cdef Lock lists_lock
cdef TimelineCore* active = NULL
cdef TimelineCore* retired = NULL
cdef Retired* arriving = NULL       # retired on any thread, and still in `active`

# Every core with a page, for forks. Its lock is a leaf, held for a few instructions.
cdef Lock peers_lock
cdef TimelineCore* peers = NULL
cdef uint64_t process_mark = timeline_process_mark()
cdef uint64_t attached = 0          # how often this process took an entry

lock_init(&lists_lock)
lock_init(&peers_lock)


# ---- Waits and signals of streams ----------------------------------------------------------------

cdef int core_enqueue_wait(TimelineCore* core, DeviceContext* context, CUstream stream,
                           uint64_t value, Outcome* out) noexcept nogil:
    cdef int status = CORE_LATE
    cdef Link* link = NULL
    cdef Use* used = NULL
    # The page may have the value already: then the stream needs no wait.
    if core.page != NULL:
        status = timeline_look(core.page, value)
    if status != CORE_LATE:
        return status
    lock_acquire(&core.lock)
    status = begin_stream_call(core, context, stream, &link, &used, out)
    if status == CORE_OK:
        # In any case: the use then covers all that was queued so far.
        status = queue_wait(link, stream, value, out)
        use_record(used)
        context_leave(context)
    lock_release(&core.lock)
    return status


cdef int core_enqueue_signal(TimelineCore* core, DeviceContext* context, CUstream stream,
                             uint64_t value, Outcome* out) noexcept nogil:
    cdef int status
    cdef Link* link = NULL
    cdef Use* used = NULL
    lock_acquire(&core.lock)
    status = begin_stream_call(core, context, stream, &link, &used, out)
    if status == CORE_OK:
        # The value is claimed first, so that no other signal can claim it or a lower one.
        status = raise_pending(core, value, out)
        if status == CORE_OK:
            status = queue_signal(core, link, used, value, out)
            if status != CORE_OK:
                restore_pending(core, value, out)
        context_leave(context)
    lock_release(&core.lock)
    return status


cdef int begin_stream_call(TimelineCore* core, DeviceContext* context, CUstream stream, Link** link,
                           Use** used, Outcome* out) noexcept nogil:
    # Prepare all that can fail but the operation itself; on CORE_OK the caller leaves the context.
    cdef int status
    # Listed first: a thread that releases memory must see the core before the stream uses it.
    core_list(core)
    status = driver_call(out, b"cuCtxPushCurrent", context_enter(context))
    if status != CORE_OK:
        return status
    status = refuse_capture(context, stream, out)
    if status == CORE_OK:
        status = link_of(core, context, link, out)
    if status == CORE_OK:
        out.call = b"cuEventCreate"
        used[0] = use_for(core, context, stream, &out.code)
        if used[0] == NULL:
            status = CORE_DRIVER
    if status != CORE_OK:
        context_leave(context)
    return status


cdef int refuse_capture(DeviceContext* context, CUstream stream, Outcome* out) noexcept nogil:
    # Each launch of a graph would signal the same value again.
    cdef CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUresult code
    if context.table.cuStreamIsCapturing == NULL:
        return CORE_OK
    code = context.table.cuStreamIsCapturing(stream, &capturing)
    if code == CUDA_SUCCESS and capturing != CU_STREAM_CAPTURE_STATUS_NONE:
        code = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    return driver_call(out, b"cuStreamIsCapturing", code)


cdef int link_of(TimelineCore* core, DeviceContext* context, Link** link,
                 Outcome* out) noexcept nogil:
    # At a device's first use the page is imported by its driver: as a semaphore on the host device,
    # as registered memory on a GPU.
    link[0] = core.links
    while link[0] != NULL and link[0].context != context:
        link[0] = link[0].next
    if link[0] != NULL:
        return CORE_OK
    if context.is_host and not memory_operations_everywhere:
        return link_page(core, context, link, out)
    if context.table.cuStreamWaitValue64 == NULL or context.table.cuStreamWriteValue64 == NULL:
        return driver_call(out, b"cuStreamWaitValue64", CUDA_ERROR_NOT_SUPPORTED)
    return link_memory(core, context, link, out)


cdef int queue_wait(Link* link, CUstream stream, uint64_t value, Outcome* out) noexcept nogil:
    cdef CUDA_EXTERNAL_SEMAPHORE_PARAMS params
    if link.alias != NULL:
        return driver_call(out, b"cuStreamWaitValue64", link.context.table.cuStreamWaitValue64(
            stream, link.address, value, CU_STREAM_WAIT_VALUE_GEQ))
    memset(&params, 0, sizeof(params))
    params.params.fence.value = value
    return driver_call(
        out, b"cuWaitExternalSemaphoresAsync",
        link.context.table.cuWaitExternalSemaphoresAsync(&link.semaphore, &params, 1, stream))


cdef int queue_signal(TimelineCore* core, Link* link, Use* used, uint64_t value,
                      Outcome* out) noexcept nogil:
    # Queue the signal after the previous one, which has the value `out.known`.
    cdef int status = CORE_OK
    # A signal that is still queued on another stream comes first, else it would overwrite this one.
    if comes_behind(core, link, used, out.known):
        status = queue_wait(link, used.stream, out.known, out)
    if status == CORE_OK:
        status = queue_store(core, link, used.stream, value, out)
    use_record(used)
    if status == CORE_OK:
        core.signaller = used
        store64(&core.queued, value)
    return status


cdef bint comes_behind(TimelineCore* core, Link* link, Use* used, uint64_t known) noexcept nogil:
    # Return whether a signal queued on another stream could overwrite this one with a lower value.
    if core.signaller == used or known == 0:
        return False
    # Without a page only the driver can read whether that signal is done.
    if core.page == NULL:
        return core.signaller != NULL
    # The host device's signals only raise the page.
    return link.alias != NULL and timeline_value(core.page) < known


cdef int queue_store(TimelineCore* core, Link* link, CUstream stream, uint64_t value,
                     Outcome* out) noexcept nogil:
    cdef CUDA_EXTERNAL_SEMAPHORE_PARAMS params
    if link.alias != NULL:
        timeline_poll(core.page)        # before the store: waiting CPUs have to poll from now on
        return driver_call(out, b"cuStreamWriteValue64", link.context.table.cuStreamWriteValue64(
            stream, link.address, value, 0))
    memset(&params, 0, sizeof(params))
    params.params.fence.value = value
    return driver_call(
        out, b"cuSignalExternalSemaphoresAsync",
        link.context.table.cuSignalExternalSemaphoresAsync(&link.semaphore, &params, 1, stream))


cdef inline int driver_call(Outcome* out, const char* call, CUresult code) noexcept nogil:
    # Record the result of a driver call, and return its status.
    out.call = call
    out.code = code
    return CORE_OK if code == CUDA_SUCCESS else CORE_DRIVER


cdef inline int system_call(Outcome* out, const char* call) noexcept nogil:
    # The same of a system call that failed.
    out.call = call
    out.system = errno
    return CORE_SYSTEM


# ---- Values --------------------------------------------------------------------------------------

cdef int raise_pending(TimelineCore* core, uint64_t value, Outcome* out) noexcept nogil:
    # Make the value the highest pending one, for all threads and processes. Caller holds `lock`.
    cdef bint mine
    if core.page != NULL:
        mine = timeline_claim(core.page, value, &out.known)
    else:
        out.known = core.pending
        mine = value > core.pending
    # Readers do not take the lock.
    if mine:
        store64(&core.pending, value)
    return CORE_OK if mine else CORE_NOT_ABOVE


cdef void restore_pending(TimelineCore* core, uint64_t value, Outcome* out) noexcept nogil:
    store64(&core.pending, out.known)
    # If another process has queued a higher value since, its streams may wait for this one.
    if core.page != NULL and not timeline_move(core.page, value, out.known):
        timeline_poison(core.page)


cdef uint64_t core_pending(TimelineCore* core) noexcept nogil:
    return load64(&core.pending) if core.page == NULL else timeline_pending(core.page)


# ---- Waits and signals of the CPU ----------------------------------------------------------------

cdef int core_signal(TimelineCore* core, uint64_t value, uint64_t deadline,
                     Outcome* out) noexcept nogil:
    cdef int status
    # Another thread or process may signal at the same time: only the one that moves `pending` from
    # the value that it read stores the new value.
    while True:
        out.known = timeline_pending(core.page)
        if value <= out.known:
            return CORE_NOT_ABOVE
        # A device that has yet to store a lower value would overwrite ours with it.
        if timeline_is_polled(core.page) and timeline_value(core.page) < out.known:
            status = wait_for_store(core, deadline, out)
            if status != CORE_OK:
                return status
        if timeline_move(core.page, out.known, value):
            timeline_signal(core.page, value)
            return CORE_OK


cdef int wait_for_store(TimelineCore* core, uint64_t deadline, Outcome* out) noexcept nogil:
    # Wait until no device will store `out.known`: it has, or it is lost, or its process has died,
    # and the timeline is poisoned.
    cdef int status
    if deadline == 0:
        return CORE_LATE
    status = timeline_wait(core.page, out.known, deadline, 0)
    if status == CORE_LATE:
        status = look_for_loss(core, out)
        if status == CORE_LATE and is_deserted(core, out.known, out):
            status = timeline_look(core.page, out.known)    # it may have stored before it died
            if status == CORE_LATE:
                timeline_poison(core.page)
                status = CORE_DESERTED
        return status
    if status != CORE_POISONED:
        return status
    if out.known <= load64(&core.queued):
        return CORE_OK if uses_done(core, NULL) else CORE_POISONED
    return CORE_OK if is_deserted(core, out.known, out) else CORE_POISONED


cdef bint is_deserted(TimelineCore* core, uint64_t value, Outcome* out) noexcept nogil:
    # If no stream of this process will signal the value, another process has to: none is left.
    if value <= load64(&core.queued):
        return False
    out.process = timeline_deserted(core.page, core.fd, process_mark)
    return out.process != 0


cdef int core_signal_by_stream(TimelineCore* core, DeviceContext* context, uint64_t value,
                               Outcome* out) noexcept nogil:
    cdef CUstream stream
    cdef int status = open_stream(context, &stream, out)
    if status == CORE_OK:
        status = core_enqueue_signal(core, context, stream, value, out)
        core_wait_end(context, stream)
    return status


cdef int core_wait(TimelineCore* core, uint64_t value, uint64_t deadline, uint64_t spin,
                   Outcome* out) noexcept nogil:
    cdef int status = timeline_wait(core.page, value, deadline, spin)
    if status == CORE_LATE:
        status = look_for_loss(core, out)
    if status == CORE_LATE and is_deserted(core, value, out):
        status = timeline_look(core.page, value)    # it may have signalled before it died
        if status == CORE_LATE:
            status = CORE_DESERTED
    return status


cdef int look_for_loss(TimelineCore* core, Outcome* out) noexcept nogil:
    # A lost device signals nothing more. Poisoned, the timeline says so to every process at once.
    cdef Use* used
    cdef CUresult code = CUDA_SUCCESS
    if not lock_try(&core.lock):
        return CORE_LATE            # a thread is queueing an operation on it now
    used = core.uses
    while used != NULL and code == CUDA_SUCCESS:
        code = loss_of(used)
        out.context = used.context
        used = used.next
    lock_release(&core.lock)
    if code == CUDA_SUCCESS:
        return CORE_LATE
    out.code = code
    timeline_poison(core.page)
    return CORE_LOST


cdef CUresult loss_of(Use* used) noexcept nogil:
    cdef CUresult code
    # Without a recorded event the state is unknown: a query of the stream might end its capture.
    if not used.recorded or context_is_dead(used.context):
        return CUDA_SUCCESS
    code = context_enter(used.context)
    if code == CUDA_SUCCESS:
        code = used.context.table.cuEventQuery(used.event)
        context_leave(used.context)
    # At the end of the process the driver is gone, and the device is not lost to others.
    if code == CUDA_ERROR_NOT_READY or code == CUDA_ERROR_DEINITIALIZED:
        return CUDA_SUCCESS
    return code


cdef int core_wait_begin(TimelineCore* core, DeviceContext* context, CUstream* stream,
                         uint64_t value, Outcome* out) noexcept nogil:
    cdef int status = open_stream(context, stream, out)
    if status == CORE_OK:
        status = core_enqueue_wait(core, context, stream[0], value, out)
        if status != CORE_OK:
            core_wait_end(context, stream[0])
    return status


cdef int core_wait_go_on(DeviceContext* context, CUstream stream, uint64_t deadline,
                         Outcome* out) noexcept nogil:
    cdef uint32_t pause = FIRST_PAUSE_US
    cdef CUresult code
    while True:
        code = context_enter(context)
        if code == CUDA_SUCCESS:
            code = context.table.cuStreamQuery(stream)
            context_leave(context)
        if code != CUDA_ERROR_NOT_READY:
            return driver_call(out, b"cuStreamQuery", code)
        if not pause_until(&pause, deadline):
            return CORE_LATE


cdef int core_wait_idle(TimelineCore* core, uint64_t deadline) noexcept nogil:
    cdef uint32_t pause = FIRST_PAUSE_US
    cdef bint done
    while True:
        # uses_done would report busy while another thread checks the uses.
        lock_acquire(&core.lock)
        done = all_done(core, NULL)
        lock_release(&core.lock)
        if done:
            return CORE_OK
        if not pause_until(&pause, deadline):
            return CORE_LATE


cdef bint pause_until(uint32_t* pause, uint64_t deadline) noexcept nogil:
    # Sleep, longer each time; False: the deadline has passed.
    if timeline_now() >= deadline:
        return False
    usleep(pause[0])
    pause[0] = min(2 * pause[0], MAX_PAUSE_US)
    return True


cdef int open_stream(DeviceContext* context, CUstream* stream, Outcome* out) noexcept nogil:
    cdef CUresult code = context_enter(context)
    if code == CUDA_SUCCESS:
        code = context.table.cuStreamCreate(stream, CU_STREAM_NON_BLOCKING)
        context_leave(context)
    return driver_call(out, b"cuStreamCreate", code)


cdef void core_wait_end(DeviceContext* context, CUstream stream) noexcept nogil:
    # The stream's remaining work still runs; only its handle ends now.
    if context_enter(context) == CUDA_SUCCESS:
        context.table.cuStreamDestroy(stream)
        context_leave(context)


# ---- Uses: which streams still have something to do with a timeline ------------------------------

cdef Use* use_for(TimelineCore* core, DeviceContext* context, CUstream stream,
                  CUresult* code) noexcept nogil:
    cdef uint64_t thread = 0
    cdef Use* used = core.uses
    code[0] = CUDA_SUCCESS
    # One handle stands for a stream of each thread.
    if stream == <CUstream><uintptr_t>PER_THREAD_STREAM:
        thread = pthread_self()
    # A stream that used the timeline before has its use and event already; else reuse one that is
    # done, so that uses do not pile up with streams that are gone.
    while used != NULL:
        if used.context == context and used.stream == stream and used.thread == thread:
            return used
        used = used.next
    used = take_done(core, context)
    if used == NULL:
        used = make_use(core, context, code)
    if used != NULL:
        used.stream = stream
        used.thread = thread
    return used


cdef Use* take_done(TimelineCore* core, DeviceContext* context) noexcept nogil:
    # Find a use to pass to another stream: its own stream has finished its work with the timeline.
    cdef Use* used = core.uses
    while used != NULL and not (used.context == context and use_done(used)):
        used = used.next
    # A signal that is done cannot overwrite later ones.
    if used != NULL and used == core.signaller:
        core.signaller = NULL
    return used


cdef Use* make_use(TimelineCore* core, DeviceContext* context, CUresult* code) noexcept nogil:
    cdef Use* used = <Use*>calloc(1, sizeof(Use))
    if used == NULL:
        code[0] = CUDA_ERROR_OUT_OF_MEMORY
        return NULL
    code[0] = context.table.cuEventCreate(&used.event, CU_EVENT_DISABLE_TIMING)
    if code[0] != CUDA_SUCCESS:
        free(used)
        return NULL
    used.context = context
    used.recorded = True        # an event that was never recorded counts as complete
    used.next = core.uses
    core.uses = used
    return used


cdef void use_record(Use* used) noexcept nogil:
    used.recorded = used.context.table.cuEventRecord(used.event, used.stream) == CUDA_SUCCESS


cdef bint use_done(Use* used) noexcept nogil:
    # After an error the device runs nothing more.
    if used.recorded:
        return used.context.table.cuEventQuery(used.event) != CUDA_ERROR_NOT_READY
    return used.context.table.cuStreamQuery(used.stream) != CUDA_ERROR_NOT_READY


cdef bint uses_done(TimelineCore* core, DeviceContext* context) noexcept nogil:
    # Return whether the streams of a context (NULL: of all) are done with it. Does not wait.
    cdef bint done
    if not lock_try(&core.lock):
        return False            # a thread is queueing an operation on it now, or checks it, too
    done = all_done(core, context)
    lock_release(&core.lock)
    return done


cdef bint all_done(TimelineCore* core, DeviceContext* context) noexcept nogil:
    # The same. Caller holds `lock`.
    cdef bint done = True
    cdef Use* used = core.uses
    while used != NULL and done:
        # A context that cannot be entered has lost its device, and runs nothing.
        if ((context == NULL or context == used.context)
                and context_enter(used.context) == CUDA_SUCCESS):
            done = use_done(used)
            context_leave(used.context)
        used = used.next
    return done


# ---- Links: the access of a device to a timeline -------------------------------------------------

cdef Link* core_make_link(TimelineCore* core, DeviceContext* context) noexcept nogil:
    cdef Link* link = <Link*>calloc(1, sizeof(Link))
    if link != NULL:
        link.context = context
        link.next = core.links
        core.links = link
    return link


cdef void drop_link(TimelineCore* core) noexcept nogil:
    # Remove the newest link.
    cdef Link* link = core.links
    core.links = link.next
    free(link)


cdef int link_page(TimelineCore* core, DeviceContext* context, Link** link,
                   Outcome* out) noexcept nogil:
    # Import the page as a semaphore, on which the host device's streams sleep and wake others.
    cdef CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC desc
    cdef int status
    cdef int fd = fcntl(core.fd, F_DUPFD_CLOEXEC, 3)
    if fd < 0:
        return system_call(out, b"fcntl")
    # The link is made before the import, so that an import never has to be undone.
    link[0] = core_make_link(core, context)
    if link[0] == NULL:
        c_close(fd)
        return CORE_NO_MEMORY
    memset(&desc, 0, sizeof(desc))
    desc.type = CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD
    desc.handle.fd = fd
    status = driver_call(out, b"cuImportExternalSemaphore",
                         context.table.cuImportExternalSemaphore(&link[0].semaphore, &desc))
    if status != CORE_OK:       # else the driver owns the descriptor
        c_close(fd)
        drop_link(core)
    return status


cdef int link_memory(TimelineCore* core, DeviceContext* context, Link** link,
                     Outcome* out) noexcept nogil:
    # Registered in a mapping of its own: drivers may withhold registered pages from forked
    # children, and a child continues to use the timeline.
    cdef int status
    cdef void* alias = mmap(NULL, TIMELINE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED,
                            core.fd, 0)
    if alias == MAP_FAILED:
        return system_call(out, b"mmap")
    link[0] = core_make_link(core, context)
    if link[0] == NULL:
        munmap(alias, TIMELINE_PAGE_BYTES)
        return CORE_NO_MEMORY
    link[0].alias = alias
    status = register_alias(link[0], out)
    if status != CORE_OK:
        munmap(alias, TIMELINE_PAGE_BYTES)
        drop_link(core)
    return status


cdef int register_alias(Link* link, Outcome* out) noexcept nogil:
    cdef DeviceContext* context = link.context
    cdef int status = driver_call(out, b"cuMemHostRegister", context.table.cuMemHostRegister(
        link.alias, TIMELINE_PAGE_BYTES,
        CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP))
    if status == CORE_OK:
        status = driver_call(
            out, b"cuMemHostGetDevicePointer",
            context.table.cuMemHostGetDevicePointer(&link.address, link.alias, 0))
        if status != CORE_OK:
            context.table.cuMemHostUnregister(link.alias)
    return status


cdef bint link_end(Link* link) noexcept nogil:
    # Return whether the driver released it.
    cdef DeviceContext* context = link.context
    cdef CUresult code = CUDA_SUCCESS
    if context_is_dead(context):
        return True
    if context_enter(context) != CUDA_SUCCESS:
        return False
    if link.semaphore != NULL:
        code = context.table.cuDestroyExternalSemaphore(link.semaphore)
    elif link.alias != NULL:
        code = context.table.cuMemHostUnregister(link.alias)
        if code == CUDA_SUCCESS:        # else the device may still access it
            munmap(link.alias, TIMELINE_PAGE_BYTES)
    context_leave(context)
    return code == CUDA_SUCCESS


# ---- Life ----------------------------------------------------------------------------------------

cdef TimelineCore* core_new(TimelinePage* page, int fd) noexcept nogil:
    cdef TimelineCore* core = <TimelineCore*>calloc(1, sizeof(TimelineCore))
    if core == NULL:
        return NULL
    lock_init(&core.lock)
    core.page = page
    core.fd = fd
    core.peer = PEER_NONE
    join_process(core)
    if page != NULL:
        peers_put(core)
    return core


cdef void join_process(TimelineCore* core) noexcept nogil:
    core.generation = process.generation
    if core.page != NULL and timeline_page_is_ours(core.page):
        core.peer = timeline_attach(core.page, core.fd, process_mark,
                                    <uint32_t>count64_add(&attached, 2))
        core.attached = True


cdef void core_after_fork(TimelineCore* core) noexcept nogil:
    # The objects of the parent's drivers and the parent's entry in the page are left alone.
    lock_init(&core.lock)
    core.links = NULL
    core.uses = NULL
    core.signaller = NULL
    core.queued = 0
    core.attached = False
    core.listed = False
    join_process(core)


cdef void core_retire(TimelineCore* core) noexcept nogil:
    # A core that no stream used, or that came with a fork, has nothing to wait for.
    if not core.listed or core.generation != process.generation:
        core_end(core)
        return
    if process_is_exiting() and core.fd >= 0:       # the list is not worked off any more
        c_close(core.fd)
        core.fd = -1
    retire(&arriving, &core.end, core)


cdef void core_list(TimelineCore* core) noexcept nogil:
    if not core.listed:
        lock_acquire(&lists_lock)
        list_put(&active, core)
        core.listed = True
        lock_release(&lists_lock)


cdef void release_retired_cores() noexcept nogil:
    cdef TimelineCore* core
    cdef TimelineCore* after
    cdef TimelineCore* done = NULL
    if (published_pointer(&retired) == NULL and published_pointer(&arriving) == NULL
            or process_is_exiting()):
        return
    if not lock_try(&lists_lock):
        return
    # Cores are ended without the lists' lock, because the driver's calls may take long.
    collect_retired()
    core = retired
    while core != NULL:
        after = core.next
        if can_end(core):
            list_take(&retired, core)
            core.next = done
            done = core
        core = after
    lock_release(&lists_lock)
    while done != NULL:
        after = done.next
        core_end(done)
        done = after


cdef void collect_retired() noexcept nogil:
    cdef Retired* link = take_retired(&arriving)
    while link != NULL:
        list_take(&active, <TimelineCore*>link.thing)
        list_put(&retired, <TimelineCore*>link.thing)
        link = link.next


cdef bint can_end(TimelineCore* core) noexcept nogil:
    # Return whether core_end would not block. Caller holds `lists_lock`.
    cdef Link* link = core.links
    if not uses_done(core, NULL):
        return False
    while link != NULL:
        # Unregistering memory waits for all queued work of the device, and that may wait for a
        # value which the program signals only after this call.
        if link.alias != NULL and streams_wait(link.context):
            return False
        link = link.next
    return True


cdef bint timelines_in_use(DeviceContext* context) noexcept nogil:
    cdef bint held
    if (published_pointer(&active) == NULL and published_pointer(&retired) == NULL
            or context_is_dead(context)):
        return False
    # Another thread has the lists: assume the worst instead of waiting for it.
    if not lock_try(&lists_lock):
        return True
    held = streams_wait(context)
    lock_release(&lists_lock)
    return held


cdef bint streams_wait(DeviceContext* context) noexcept nogil:
    return any_uses(active, context) or any_uses(retired, context)


cdef bint any_uses(TimelineCore* core, DeviceContext* context) noexcept nogil:
    while core != NULL and uses_done(core, context):
        core = core.next
    return core != NULL


cdef void core_end(TimelineCore* core) noexcept nogil:
    # Release everything; there is no other reference. Failures of the driver are ignored.
    cdef bint here = core.generation == process.generation
    cdef Use* used
    cdef Link* link
    # Events end first, then the devices' links to the page, the page itself, and its file.
    while core.uses != NULL:
        used = core.uses
        core.uses = used.next
        if (here and not context_is_dead(used.context)
                and context_enter(used.context) == CUDA_SUCCESS):
            used.context.table.cuEventDestroy(used.event)
            context_leave(used.context)
        free(used)
    while core.links != NULL:
        link = core.links
        core.links = link.next
        if here and not link_end(link):
            link_end(link)      # repeats the step that the driver refused
        free(link)
    if core.attached and here:
        timeline_detach(core.page, core.fd, core.peer)
    if core.page != NULL:
        peers_take(core)
        munmap(core.page, TIMELINE_PAGE_BYTES)
    if core.fd >= 0:
        c_close(core.fd)
    free(core)


# ---- The lists of cores --------------------------------------------------------------------------

cdef void hold_peers() noexcept nogil:
    lock_acquire(&peers_lock)


cdef void let_peers_go() noexcept nogil:
    lock_release(&peers_lock)


cdef void forget_after_fork() noexcept nogil:
    # The parent's cores stay the parent's, and so do the locks by which its end is seen: a child
    # that kept its open file descriptions would hold them.
    global active, retired, arriving, process_mark
    cdef TimelineCore* core = peers
    active = NULL
    retired = NULL
    arriving = NULL
    lock_init(&lists_lock)
    lock_init(&peers_lock)
    process_mark = timeline_process_mark()
    while core != NULL:
        if core.fd >= 0:
            timeline_own_file(core.fd)
        core = core.next_peer


on_fork(hold_peers, let_peers_go, forget_after_fork)


cdef void peers_put(TimelineCore* core) noexcept nogil:
    global peers
    lock_acquire(&peers_lock)
    core.next_peer = peers
    if peers != NULL:
        peers.previous_peer = core
    peers = core
    lock_release(&peers_lock)


cdef void peers_take(TimelineCore* core) noexcept nogil:
    global peers
    lock_acquire(&peers_lock)
    if core.next_peer != NULL:
        core.next_peer.previous_peer = core.previous_peer
    if core.previous_peer != NULL:
        core.previous_peer.next_peer = core.next_peer
    else:
        peers = core.next_peer
    lock_release(&peers_lock)


cdef void list_put(TimelineCore** head, TimelineCore* core) noexcept nogil:
    core.previous = NULL
    core.next = head[0]
    if core.next != NULL:
        core.next.previous = core
    publish_pointer(<void**>head, core)


cdef void list_take(TimelineCore** head, TimelineCore* core) noexcept nogil:
    if core.next != NULL:
        core.next.previous = core.previous
    if core.previous != NULL:
        core.previous.next = core.next
    else:
        publish_pointer(<void**>head, core.next)


cdef void rehearse_memory_operations(bint on) noexcept nogil:
    global memory_operations_everywhere
    memory_operations_everywhere = on
