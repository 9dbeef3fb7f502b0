"""External memory and timelines: what a descriptor brings in, and who owns it."""

HEAD = """
import ctypes, mmap, os
api = driver.api

def file(size):
    descriptor = os.memfd_create("outside")
    os.ftruncate(descriptor, size)
    return descriptor

def is_open(descriptor):
    return os.path.exists(f"/proc/self/fd/{descriptor}")

def memory_of(descriptor, size, kind=1):
    desc = api.CUDA_EXTERNAL_MEMORY_HANDLE_DESC()
    desc.type = api.CUexternalMemoryHandleType(kind)
    desc.handle.fd = descriptor
    desc.size = size
    return desc

def part(offset, size):
    desc = api.CUDA_EXTERNAL_MEMORY_BUFFER_DESC()
    desc.offset, desc.size = offset, size
    return desc

def utf16(name):
    return ctypes.create_string_buffer(name.encode("utf-16-le") + bytes(2))

def windows_memory(kind, size, *, handle=0, name=None, dedicated=False):
    desc = memory_of(0, size, kind)
    desc.handle.win32.handle = handle
    desc.handle.win32.name = ctypes.addressof(name) if name else 0
    desc.flags = int(dedicated)
    return desc

def windows_semaphore(kind, *, handle=0, name=None):
    desc = semaphore_of(0, kind)
    desc.handle.win32.handle = handle
    desc.handle.win32.name = ctypes.addressof(name) if name else 0
    return desc

def semaphore_of(descriptor, kind=9):
    desc = api.CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC()
    desc.type = api.CUexternalSemaphoreHandleType(kind)
    desc.handle.fd = descriptor
    return desc

def value(number, kind):
    params = getattr(api, f"CUDA_EXTERNAL_SEMAPHORE_{kind}_PARAMS")()
    params.params.fence.value = number
    return params

def signal(semaphore, number, stream):
    driver.cuSignalExternalSemaphoresAsync([semaphore], [value(number, "SIGNAL")], 1, stream)

def wait(semaphore, number, stream):
    driver.cuWaitExternalSemaphoresAsync([semaphore], [value(number, "WAIT")], 1, stream)
"""


def test_imported_file_is_shared_device_memory(child):
    child(
        HEAD
        + """
descriptor = file(65536)
view = mmap.mmap(descriptor, 65536)
memory = driver.cuImportExternalMemory(memory_of(descriptor, 65536))
pointer = int(driver.cuExternalMemoryGetMappedBuffer(memory, part(100, 5000)))
view[100:105] = b"hello"
assert driver.read(pointer, 5) == b"hello"
driver.write(pointer + 4990, b"there")
assert view[5090:5095] == b"there"
base, size = driver.cuMemGetAddressRange(pointer)
assert (int(base), size) == (pointer, 5000)
driver.cuDestroyExternalMemory(memory)
driver.write(pointer, b"still")
assert view[100:105] == b"still"
driver.cuMemFree(pointer)
assert host.alive().allocations == 0 and host.alive().imports == 0
"""
    )


def test_import_takes_the_descriptor_on_success_only(child):
    child(
        HEAD
        + """
descriptor = file(4096)
assert driver.error("cuImportExternalMemory", memory_of(descriptor, 8192)) == "INVALID_VALUE"
assert driver.error("cuImportExternalMemory", memory_of(descriptor, 4096, 9)) == "NOT_SUPPORTED"
assert is_open(descriptor)
memory = driver.cuImportExternalMemory(memory_of(descriptor, 4096))
assert is_open(descriptor)
driver.cuDestroyExternalMemory(memory)
assert not is_open(descriptor)
small = file(8)
assert driver.error("cuImportExternalSemaphore", semaphore_of(small)) == "INVALID_VALUE"
assert is_open(small)
"""
    )


def test_mapped_buffer_must_lie_inside_the_memory(child):
    child(
        HEAD
        + """
memory = driver.cuImportExternalMemory(memory_of(file(8192), 8192))
assert driver.error("cuExternalMemoryGetMappedBuffer", memory, part(4096, 4097)) == "INVALID_VALUE"
assert driver.error("cuExternalMemoryGetMappedBuffer", memory, part(0, 0)) == "INVALID_VALUE"
driver.cuDestroyExternalMemory(memory)
assert driver.error("cuExternalMemoryGetMappedBuffer", memory, part(0, 16)) == "INVALID_HANDLE"
"""
    )


def test_stream_waits_until_the_timeline_reaches_the_value(child):
    child(
        HEAD
        + """
descriptor = file(4096)
page = mmap.mmap(descriptor, 4096)
semaphore = driver.cuImportExternalSemaphore(semaphore_of(descriptor))
waiter, signaller = driver.stream(), driver.stream()
wait(semaphore, 5, waiter)
assert driver.error("cuStreamQuery", waiter) == "NOT_READY"
signal(semaphore, 4, signaller)
driver.cuStreamSynchronize(signaller)
assert int.from_bytes(page[:8], "little") == 4
assert driver.error("cuStreamQuery", waiter) == "NOT_READY"
signal(semaphore, 7, signaller)
driver.cuStreamSynchronize(waiter)
assert int.from_bytes(page[64:68], "little") == 2
"""
    )


def test_another_process_signals_and_is_signalled(child):
    child(
        HEAD
        + """
descriptor = file(4096)
page = mmap.mmap(descriptor, 4096)
pid = os.fork()
if pid == 0:
    word = ctypes.c_uint64.from_buffer(page)
    word.value = 1
    while word.value < 2:
        pass
    os._exit(0)
semaphore = driver.cuImportExternalSemaphore(semaphore_of(descriptor))
stream = driver.stream()
wait(semaphore, 1, stream)
signal(semaphore, 2, stream)
driver.cuStreamSynchronize(stream)
assert os.waitpid(pid, 0)[1] == 0
"""
    )


def test_binary_semaphore_gives_each_signal_to_one_wait(child):
    child(
        HEAD
        + """
semaphore = driver.cuImportExternalSemaphore(semaphore_of(file(4096), 1))
first, second, signaller = driver.stream(), driver.stream(), driver.stream()
signal(semaphore, 0, signaller)
wait(semaphore, 0, first)
driver.cuStreamSynchronize(first)
wait(semaphore, 0, second)
assert driver.error("cuStreamQuery", second) == "NOT_READY"
signal(semaphore, 0, signaller)
driver.cuStreamSynchronize(second)
"""
    )


def test_shutdown_ends_a_wait_for_a_timeline(child):
    child(
        HEAD
        + """
semaphore = driver.cuImportExternalSemaphore(semaphore_of(file(4096)))
wait(semaphore, 1, driver.stream())
host.shutdown()
assert host.alive().workers == 0
"""
    )


def test_destroying_a_semaphore_leaves_queued_work_whole(child):
    child(
        HEAD
        + """
descriptor = file(4096)
page = mmap.mmap(descriptor, 4096)
semaphore = driver.cuImportExternalSemaphore(semaphore_of(descriptor))
stream = driver.stream()
gate = driver.gate(stream)
signal(semaphore, 3, stream)
driver.cuDestroyExternalSemaphore(semaphore)
gate.open()
driver.cuStreamSynchronize(stream)
assert int.from_bytes(page[:8], "little") == 3
assert host.alive().imports == 0
"""
    )


def test_windows_types_are_refused_unless_simulated(child):
    child(
        HEAD
        + """
descriptor = file(4096)
memory, fence = windows_memory(2, 4096, handle=descriptor), windows_semaphore(4, handle=descriptor)
assert driver.error("cuImportExternalMemory", memory) == "NOT_SUPPORTED"
assert driver.error("cuImportExternalSemaphore", fence) == "NOT_SUPPORTED"
host.rehearse_windows(1)
driver.cuImportExternalMemory(memory)
driver.cuImportExternalSemaphore(fence)
"""
    )


def test_nt_handle_stays_open(child):
    child(
        HEAD
        + """
host.rehearse_windows(1)
descriptor = file(4096)
view = mmap.mmap(descriptor, 4096)
memory = driver.cuImportExternalMemory(windows_memory(2, 4096, handle=descriptor))
assert is_open(descriptor)
os.close(descriptor)
pointer = int(driver.cuExternalMemoryGetMappedBuffer(memory, part(0, 4096)))
driver.write(pointer, b"kept")
assert view[:4] == b"kept"
driver.cuMemFree(pointer)
driver.cuDestroyExternalMemory(memory)
assert driver.error("cuImportExternalMemory", windows_memory(2, 4096, handle=descriptor)) \\
    == "INVALID_HANDLE"
assert host.alive().imports == 0
"""
    )


def test_d3d12_resource_is_dedicated_and_a_heap_is_not(child):
    child(
        HEAD
        + """
host.rehearse_windows(1)
descriptor = file(4096)
before = len(os.listdir("/proc/self/fd"))
for kind, dedicated in ((5, False), (4, True)):
    desc = windows_memory(kind, 4096, handle=descriptor, dedicated=dedicated)
    assert driver.error("cuImportExternalMemory", desc) == "INVALID_VALUE"
for kind, dedicated in ((5, True), (4, False), (2, True), (2, False)):
    desc = windows_memory(kind, 4096, handle=descriptor, dedicated=dedicated)
    driver.cuDestroyExternalMemory(driver.cuImportExternalMemory(desc))
too_large = windows_memory(4, 8192, handle=descriptor)
assert driver.error("cuImportExternalMemory", too_large) == "INVALID_VALUE"
assert len(os.listdir("/proc/self/fd")) == before
"""
    )


def test_name_in_utf16_names_shared_memory(child):
    child(
        HEAD
        + """
host.rehearse_windows(1)
path = f"/dev/shm/gpumem-\u00e9\u4e2d\U0001f600-{os.getpid()}"
descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
os.ftruncate(descriptor, 4096)
shared = mmap.mmap(descriptor, 4096)
name = utf16(os.path.basename(path))
memory = driver.cuImportExternalMemory(windows_memory(5, 4096, name=name, dedicated=True))
pointer = int(driver.cuExternalMemoryGetMappedBuffer(memory, part(8, 8)))
driver.write(pointer, b"by name!")
assert shared[8:16] == b"by name!"
fence = driver.cuImportExternalSemaphore(windows_semaphore(10, name=name))
stream = driver.stream()
signal(fence, 1 << 40, stream)
driver.cuStreamSynchronize(stream)
assert int.from_bytes(shared[:8], "little") == 1 << 40
both = windows_semaphore(4, handle=1, name=name)
assert driver.error("cuImportExternalSemaphore", both) == "INVALID_VALUE"
assert driver.error("cuImportExternalSemaphore", windows_semaphore(4)) == "INVALID_VALUE"
nobody = utf16("gpumem-nobody")
assert driver.error("cuImportExternalSemaphore", windows_semaphore(4, name=nobody)) \\
    == "INVALID_HANDLE"
os.unlink(path)
"""
    )
