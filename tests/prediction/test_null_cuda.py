"""The functions of the null CUDA, called as a program does: neither PyTorch nor a GPU is needed."""

import ast

import pytest
from prediction.null_cuda import over_null_cuda


def test_allocation_is_refused_beyond_the_memory_of_the_gpu():
    over_null_cuda("""
        pointer = c_void_p()
        free, total = c_size_t(), c_size_t()
        assert cuda.cudaMemGetInfo(byref(free), byref(total)) == 0
        assert total.value == 4 << 30 and 0 < free.value < total.value
        assert cuda.cudaMalloc(byref(pointer), c_size_t(free.value + 1)) == 2
        assert pointer.value is None and used() == (0, 0)
        assert cuda.cudaMalloc(byref(pointer), free) == 0
        assert used()[0] == free.value
        assert cuda.cudaFree(pointer) == 0
        assert used() == (0, free.value)
        assert cuda.cudaFree(pointer) == 1      # it is freed
        """)


def test_addresses_rise_and_freed_ones_are_used_again_at_the_end():
    over_null_cuda(
        """
        def allocate(size):
            pointer = c_void_p()
            assert cuda.cudaMalloc(byref(pointer), c_size_t(size)) == 0
            return pointer
        first, second = allocate(MIB), allocate(MIB)
        assert second.value > first.value
        third = allocate(9 << 40)
        cuda.cudaFree(third)
        assert allocate(8 << 40).value == first.value + 4 * MIB
        """,
        memory=10 << 40,
    )


def test_mapped_memory_is_used_until_its_handle_and_its_mapping_are_gone():
    over_null_cuda("""
        prop = (c_int * 8)(1, 0, 1, 0)      # pinned memory, of device 0
        handle, address = c_uint64(), c_uint64()
        size = c_size_t(4 * MIB)
        assert cuda.cuMemCreate(byref(handle), c_size_t(MIB), prop, c_uint64()) == 1
        assert cuda.cuMemCreate(byref(handle), size, prop, c_uint64()) == 0
        assert cuda.cuMemAddressReserve(byref(address), c_size_t(8 * MIB), size, None, None) == 0
        assert address.value % (4 * MIB) == 0
        assert cuda.cuMemMap(address, size, size, handle, c_uint64()) == 1       # an offset
        assert cuda.cuMemMap(address, size, c_size_t(), handle, c_uint64()) == 0
        assert cuda.cuMemMap(address, size, c_size_t(), handle, c_uint64()) == 1
        assert cuda.cuMemRelease(handle) == 0
        assert used() == (4 * MIB, 4 * MIB)
        assert cuda.cuMemAddressFree(address, c_size_t(8 * MIB)) == 1
        assert cuda.cuMemUnmap(address, c_size_t(2 * MIB)) == 1
        assert cuda.cuMemUnmap(address, size) == 0
        assert used() == (0, 4 * MIB)
        assert cuda.cuMemAddressFree(address, c_size_t(8 * MIB)) == 0
        """)


@pytest.mark.parametrize("size", [3, 5 << 20])
def test_copy_to_the_host_reads_zeros_and_is_reported(size):
    over_null_cuda(f"""
        size = {size}
        pointer = c_void_p()
        host = (c_char * (size + 2))(*b"x" * (size + 2))
        assert cuda.cudaMalloc(byref(pointer), c_size_t(size)) == 0
        assert cuda.cudaMemcpy(pointer, host, c_size_t(size), 1) == 0
        assert not heard
        assert cuda.cudaMemcpyAsync(byref(host, 1), pointer, c_size_t(size), 2, None) == 0
        assert host.raw == b"x" + bytes(size) + b"x"
        assert heard == [(null.READ, "", size)]
        other = (c_char * size)()
        assert cuda.cudaMemcpy(other, b"y" * size, c_size_t(size), 0) == 0
        assert other.raw == b"y" * size and len(heard) == 1
        """)


def test_copy_that_rank_0_broadcasts_is_true_when_it_is_read_back():
    over_null_cuda("""
        pointer, host = c_void_p(), (c_char * 8)(*b"x" * 8)
        size = c_size_t(8)
        def sent(root):
            assert cuda.cudaMemcpy(pointer, b"contents", size, 1) == 0
            assert cuda.ncclBcast(pointer, size, 0, root, None, None) == 0
            assert cuda.cudaMemcpy(host, pointer, size, 2) == 0
            return host.raw
        assert cuda.cudaMalloc(byref(pointer), size) == 0
        assert sent(0) == b"contents" and not heard
        assert sent(1) == bytes(8) and len(heard) == 1
        assert cuda.cudaMemcpy(host, pointer, size, 2) == 0     # written again, perhaps
        assert host.raw == bytes(8) and len(heard) == 2
        """)


def test_fills_reach_host_memory_alone():
    over_null_cuda("""
        pointer = c_void_p()
        assert cuda.cudaMalloc(byref(pointer), c_size_t(MIB)) == 0
        host = (c_char * 4)(*b"x" * 4)
        assert cuda.cudaMemset(host, 0x161, c_size_t(3)) == 0
        assert cuda.cudaMemset(pointer, 7, c_size_t(MIB)) == 0
        assert host.raw == b"aaax"
        """)


def test_pinned_memory_is_of_the_host_and_other_memory_is_unknown():
    over_null_cuda("""
        class Attributes(ctypes.Structure):
            _fields_ = [("type", c_int), ("device", c_int), ("on_device", c_void_p),
                        ("on_host", c_void_p)]
        def kind_of(address):
            found = Attributes()
            assert cuda.cudaPointerGetAttributes(byref(found), address) == 0
            return found.type
        pinned, device = c_void_p(), c_void_p()
        assert cuda.cudaHostAlloc(byref(pinned), c_size_t(100), 0) == 0
        assert cuda.cudaMalloc(byref(device), c_size_t(100)) == 0
        ordinary = (c_char * 100)()
        assert [kind_of(pinned), kind_of(device), kind_of(ordinary)] == [1, 2, 0]
        assert cuda.cudaHostRegister(ordinary, c_size_t(100), 0) == 0
        assert kind_of(ordinary) == 1
        assert cuda.cudaHostRegister(ordinary, c_size_t(100), 0) == 712
        assert cuda.cudaHostUnregister(ordinary) == 0
        assert cuda.cudaFreeHost(pinned) == 0
        assert [kind_of(pinned), kind_of(ordinary)] == [0, 0]
        """)


def test_functions_without_a_result_are_refused_by_name():
    over_null_cuda("""
        refused = names(True)
        assert "cusolverDnCreate" in refused and "cudnnCTCLoss" in refused
        for name in refused:
            assert cuda[name]() != 0, name
        assert heard == [(null.REFUSED, name, 0) for name in refused]
        """)


def test_harmless_functions_succeed_and_handles_differ():
    over_null_cuda("""
        handles = set()
        harmless = names(False)
        for name in harmless:
            made = c_void_p()
            assert cuda[name](byref(made)) == 0, name
            handles.add(made.value)
        assert "cublasSgemm_v2" in harmless and "cublasCreate_v2" in harmless
        made = sum(name.startswith(("cudnnCreate", "cublasCreate")) for name in harmless)
        assert made > 3 and len(handles - {None}) > made
        assert not heard
        """)


# Offsets of fields in NVIDIA's own headers.
OFFSETS = {
    "12.8": {"totalGlobalMem": 288, "multiProcessorCount": 388, "sharedMemPerBlockOptin": 696,
             "maxBlocksPerMultiProcessor": 712, "clusterLaunch": 772},
    "13.0": {"totalGlobalMem": 288, "multiProcessorCount": 384, "sharedMemPerBlockOptin": 672,
             "maxBlocksPerMultiProcessor": 688, "clusterLaunch": 748},
}  # fmt: skip


@pytest.mark.parametrize(
    ("version", "function"),
    [("12.8", "cudaGetDeviceProperties_v2"), ("13.0", "cudaGetDeviceProperties")],
)
def test_properties_lie_where_the_version_of_cuda_has_them(version, function):
    printed = over_null_cuda(
        f"""
        properties = (c_char * 2048)(*b"!" * 2048)
        assert cuda.{function}(properties, 0) == 0
        assert cuda.{function}(properties, 1) == 101
        total = c_uint64.from_buffer(properties, {OFFSETS[version]["totalGlobalMem"]}).value
        offsets = {list(OFFSETS[version].values())[1:]}
        print(properties.value.decode(), total,
              *(c_int.from_buffer(properties, offset).value for offset in offsets), sep="|")
        """,
        cuda=version,
    )
    assert printed.strip() == f"NVIDIA H100 80GB HBM3|{4 << 30}|132|232448|32|1"


def test_functions_of_the_driver_are_found_by_name_and_unknown_ones_are_not():
    printed = over_null_cuda("""
        def find(name):
            function, status = c_void_p(), c_int(7)
            code = cuda.cuGetProcAddress_v2(name, byref(function), 12040, c_uint64(), byref(status))
            return code, bool(function.value), status.value
        print([find(b"cuMemCreate"), find(b"cuImportExternalMemory"), find(b"cuNoSuchFunction"),
               find(b"malloc")])
        """)
    found, missing = (0, True, 0), (500, False, 1)
    assert ast.literal_eval(printed) == [found, found, missing, missing]


def test_stream_that_captures_says_so_and_runs_no_host_function():
    over_null_cuda("""
        stream, graph, id = c_void_p(), c_void_p(), c_uint64()
        status = c_int()
        assert cuda.cudaStreamCreateWithPriority(byref(stream), 1, -3) == 0
        assert cuda.cudaStreamGetPriority(stream, byref(status)) == 0 and status.value == -3
        called = []
        function = ctypes.CFUNCTYPE(None, c_void_p)(lambda data: called.append(data))
        assert cuda.cudaStreamEndCapture(stream, byref(graph)) == 401
        assert cuda.cudaStreamBeginCapture(stream, 0) == 0
        assert cuda.cudaLaunchHostFunc(stream, function, None) == 0 and not called
        assert cuda.cudaStreamGetCaptureInfo(stream, byref(status), byref(id), None, None, None,
                                             None) == 0
        assert status.value == 1 and id.value == 1
        assert cuda.cudaStreamEndCapture(stream, byref(graph)) == 0 and graph.value
        assert cuda.cudaStreamIsCapturing(stream, byref(status)) == 0 and status.value == 0
        assert cuda.cudaLaunchHostFunc(stream, function, None) == 0 and called == [None]
        """)


def test_memory_is_counted_for_each_device():
    over_null_cuda(
        """
        pointer, device = c_void_p(), c_int()
        assert cuda.cudaSetDevice(1) == 0 and cuda.cudaSetDevice(2) == 101
        assert cuda.cudaGetDevice(byref(device)) == 0 and device.value == 1
        assert cuda.cudaMalloc(byref(pointer), c_size_t(2 * MIB)) == 0
        assert [null.memory_of(cuda, i)[0] for i in range(2)] == [0, 2 * MIB]
        assert cuda.cudaSetDevice(0) == 0
        assert cuda.cudaFree(pointer) == 0
        assert null.memory_of(cuda, 1) == (0, 2 * MIB)
        """,
        count=2,
    )


def test_gpumem_allocates_over_the_null_cuda():
    pytest.importorskip("cuda.bindings", reason="cuda-python is not installed")
    over_null_cuda("""
        import gpumem
        status = gpumem.driver_status()
        assert status.available and status.version == 13000, status
        arena = gpumem.Arena("cuda:0")
        buffer = arena.allocate(100 * MIB)
        assert used()[0] >= 100 * MIB
        assert arena.stats().in_use >= 100 * MIB
        del buffer
        arena.close()
        assert used()[0] == 0
        assert not heard, heard
        """)
