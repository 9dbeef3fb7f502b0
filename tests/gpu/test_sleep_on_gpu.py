"""Sleep on a GPU: the driver has its memory back, a captured graph works on after waking."""

import numpy as np

import gpumem

MIB, GIB = 1 << 20, 1 << 30


def free_bytes(driver):
    return driver.call(driver.cuMemGetInfo)[0]


def byte_at(driver, address):
    seen = np.zeros(1, np.uint8)
    driver.call(driver.cuMemcpyDtoH, seen.ctypes.data, address, 1)
    return int(seen[0])


def test_sleep_releases_memory_and_wake_restores_bytes(driver):
    arena = gpumem.Arena("cuda:0")
    base = free_bytes(driver)
    buffers = [arena.allocate(size) for size in (3 * GIB, 300, 50 * MIB, MIB, 700)]
    buffers.append(arena.allocate_persistent(2 * GIB))
    for number, buffer in enumerate(buffers):
        driver.call(driver.cuMemsetD8, buffer.ptr, number + 1, buffer.nbytes)
    held = base - free_bytes(driver)
    assert held >= 5 * GIB
    arena.sleep()
    # The device maps the pinned copy in pages of 4 KiB, each of which takes 8 bytes of its tables.
    assert base - free_bytes(driver) <= 4 * MIB + held // 512
    other = gpumem.Arena("cuda:0")
    other.allocate(8 * GIB).close()
    other.close()
    arena.wake()
    for number, buffer in enumerate(buffers):
        assert byte_at(driver, buffer.ptr) == number + 1
        assert byte_at(driver, buffer.ptr + buffer.nbytes - 1) == number + 1
    arena.check_invariants()
    del buffer
    buffers.clear()
    arena.close()


def test_captured_graph_uses_its_pointers_after_waking(driver):
    arena = gpumem.Arena("cuda:0")
    source, target = arena.allocate(4 * MIB), arena.allocate_persistent(4 * MIB)
    stream = driver.call(driver.cuStreamCreate, 1)
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    driver.call(driver.cuStreamBeginCapture, stream, mode)
    driver.call(driver.cuMemcpyDtoDAsync, target.ptr, source.ptr, 4 * MIB, stream)
    graph = driver.call(driver.cuStreamEndCapture, stream)
    ready = driver.call(driver.cuGraphInstantiate, graph, 0)
    driver.call(driver.cuMemsetD8, source.ptr, 7, 4 * MIB)
    arena.sleep()
    arena.wake()
    driver.call(driver.cuGraphLaunch, ready, stream)
    driver.call(driver.cuStreamSynchronize, stream)
    assert byte_at(driver, target.ptr) == byte_at(driver, target.ptr + 4 * MIB - 1) == 7
    driver.call(driver.cuGraphExecDestroy, ready)
    driver.call(driver.cuGraphDestroy, graph)
    driver.call(driver.cuStreamDestroy, stream)
    source.close()
    target.close()
    arena.close()
