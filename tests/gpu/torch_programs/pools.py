"""torch.cuda.MemPool."""

import ctypes
import gc

import torch
from gpu.torch_programs.allocator import MIB, filled, in_a_thread


def released(reserved):
    """Wait for the device and give back what is idle; True if no more than so much is left."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() <= reserved


def own_pool():
    """Blocks of a pool lie in it, those outside do not; another thread's lie outside."""
    before = torch.cuda.memory_reserved()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = filled(8, 1)
        elsewhere = in_a_thread(lambda: filled(8, 2))
    outside = filled(8, 3)
    ranges = [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in pool.snapshot()
    ]
    found = [
        any(begin <= each.data_ptr() < end for begin, end in ranges)
        for each in (inside, elsewhere, outside)
    ]
    ids = {tuple(segment["segment_pool_id"]) for segment in pool.snapshot()}
    assert ids == {tuple(pool.id)}
    uses = pool.use_count()
    del pool
    gc.collect()
    sums = [float(each.sum()) for each in (inside, elsewhere, outside)]  # they outlive the pool
    del inside, elsewhere, outside
    return [found, uses, sums, released(before)]


def pool_keeps_its_memory_to_itself():
    """What is idle in a pool serves the pool again, and no block outside of it."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        first = filled(16)
        address = first.data_ptr()
        del first
        again = filled(16)
        same = again.data_ptr() == address
        del again
    outside = filled(16)
    return [same, outside.data_ptr() == address]


def nested_pools():
    outer, inner = torch.cuda.MemPool(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(outer):
        one = filled(4, 1)
        with torch.cuda.use_mem_pool(inner):
            two = filled(4, 2)
        three = filled(4, 3)

    def holds(pool, tensor):
        return any(
            segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]
            for segment in pool.snapshot()
        )

    return [[holds(pool, each) for each in (one, two, three)] for pool in (outer, inner)]


def pool_of_a_capture():
    pool = torch.cuda.MemPool()
    data = filled(4, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        out = data * 4
    graph.replay()
    begin, nbytes = out.data_ptr(), out.numel() * 4
    within = any(
        segment["address"] <= begin and begin + nbytes <= segment["address"] + segment["total_size"]
        for segment in pool.snapshot()
    )
    return [within, float(out.sum())]


def pool_used_when_memory_is_out():
    """A pool that may be used then gives what it has idle to a block outside of it."""
    pool = torch.cuda.MemPool(use_on_oom=True)
    with torch.cuda.use_mem_pool(pool):
        kept = filled(64)
        del kept
    torch.cuda.synchronize()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 4 * MIB) / total)
    served = filled(48, 5)
    try:
        filled(96)
    except torch.OutOfMemoryError:
        return [float(served.sum()), True]
    return [float(served.sum()), False]


def pool_without_splits():
    """Each block of such a pool has a segment of its own."""
    pool = torch.cuda.MemPool(no_split=True)
    with torch.cuda.use_mem_pool(pool):
        kept = [filled(4, each) for each in range(3)]
    live = [
        sum(block["state"] == "active_allocated" for block in segment["blocks"])
        for segment in pool.snapshot()
    ]
    return [max(live), sum(live), [float(each[0]) for each in kept]]


class Foreign:
    """Somebody else's allocator: two C functions over cuMemAlloc, which count."""

    def __init__(self):
        from cuda.bindings import driver

        self.allocated = self.freed = 0
        self._driver = driver
        takes = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        gives = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        )
        self._functions = takes(self._allocate), gives(self._free)
        addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in self._functions]
        self.allocator = torch._C._cuda_customAllocator(*addresses)

    def _allocate(self, nbytes, device, stream):
        status, address = self._driver.cuMemAlloc(nbytes)
        if int(status) != 0:
            return None
        self.allocated += 1
        return int(address)

    def _free(self, address, nbytes, device, stream):
        (status,) = self._driver.cuMemFree(address)
        self.freed += int(status) == 0


def pool_over_another_allocator():
    """Blocks of the pool come from that allocator, which has everything back in the end."""
    foreign = Foreign()
    pool = torch.cuda.MemPool(foreign.allocator)
    with torch.cuda.use_mem_pool(pool):
        inside = [filled(size, size) for size in (2, 24, 3)]
    taken = foreign.allocated
    outside = filled(32)
    assert foreign.allocated == taken
    sums = [float(each.sum()) for each in inside]
    del inside, pool
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return [taken > 0, sums, foreign.allocated == foreign.freed, outside.numel()]
