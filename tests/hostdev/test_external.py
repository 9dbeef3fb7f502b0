"""External memory and timelines: what a descriptor brings in, and who owns it."""

import pytest

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


@pytest.fixture
def run(child):
    """Run code after `HEAD`."""
    return lambda code: child(HEAD + code)


def test_imported_file_is_shared_device_memory(run):
    run("""
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
    """)


def test_import_takes_the_descriptor_on_success_only(run):
    run("""
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
    """)


def test_mapped_buffer_must_lie_inside_the_memory(run):
    run("""
memory = driver.cuImportExternalMemory(memory_of(file(8192), 8192))
assert driver.error("cuExternalMemoryGetMappedBuffer", memory, part(4096, 4097)) == "INVALID_VALUE"
assert driver.error("cuExternalMemoryGetMappedBuffer", memory, part(0, 0)) == "INVALID_VALUE"
driver.cuDestroyExternalMemory(memory)
assert driver.error("cuExternalMemoryGetMappedBuffer", memory, part(0, 16)) == "INVALID_HANDLE"
    """)


def test_stream_waits_until_the_timeline_reaches_the_value(run):
    run("""
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
    """)


def test_another_process_signals_and_is_signalled(run):
    run("""
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
    """)


def test_binary_semaphore_gives_each_signal_to_one_wait(run):
    run("""
semaphore = driver.cuImportExternalSemaphore(semaphore_of(file(4096), 1))
first, second, signaller = driver.stream(), driver.stream(), driver.stream()
signal(semaphore, 0, signaller)
wait(semaphore, 0, first)
driver.cuStreamSynchronize(first)
wait(semaphore, 0, second)
assert driver.error("cuStreamQuery", second) == "NOT_READY"
signal(semaphore, 0, signaller)
driver.cuStreamSynchronize(second)
    """)


def test_shutdown_ends_a_wait_for_a_timeline(run):
    run("""
semaphore = driver.cuImportExternalSemaphore(semaphore_of(file(4096)))
wait(semaphore, 1, driver.stream())
host.shutdown()
assert host.alive().workers == 0
    """)


def test_destroying_a_semaphore_leaves_queued_work_whole(run):
    run("""
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
    """)


@pytest.mark.parametrize("kind", [2, 4, 5])
def test_windows_memory_is_refused(run, kind):
    run(f"""
desc = memory_of(file(4096), 4096, {kind})
assert driver.error("cuImportExternalMemory", desc) == "NOT_SUPPORTED"
assert host.alive().imports == 0
    """)


@pytest.mark.parametrize("kind", [4, 10])
def test_windows_semaphore_is_refused(run, kind):
    run(f"""
desc = semaphore_of(file(4096), {kind})
assert driver.error("cuImportExternalSemaphore", desc) == "NOT_SUPPORTED"
assert host.alive().imports == 0
    """)
