"""Sizes and alignments: what is accepted, what is refused, and that a refusal changes nothing."""

import itertools

import numpy as np
import pytest

import gpumem

MIB = 1 << 20


class Indexable:
    def __index__(self):
        return 1000


def test_name_that_recordings_and_budgets_would_cut_is_refused(arena):
    for make in (
        lambda: gpumem.Arena("host", name="a\0b"),
        lambda: gpumem.DriverPool("host", name="a\0b"),
        lambda: gpumem.adaptors.track(arena, name="a\0b"),
        lambda: arena.tag("a\0b"),
    ):
        with pytest.raises(ValueError, match=r"a\\x00b.*: expected no NUL"):
            make()


@pytest.mark.parametrize("method", ["allocate", "allocate_persistent"])
def test_zero_bytes_give_an_empty_buffer(arena, method):
    buffer = getattr(arena, method)(0)
    assert (buffer.ptr, buffer.nbytes, buffer.allocated_nbytes, len(buffer)) == (0, 0, 0, 0)
    assert bytes(buffer) == b""
    assert not buffer.closed
    buffer.close()
    assert buffer.closed
    assert arena.stats() == gpumem.Arena("host").stats()


@pytest.mark.parametrize("nbytes", [1000, np.int64(1000), np.uint8(100), Indexable()])
def test_any_integer_type_is_a_size(arena, nbytes):
    assert arena.allocate(nbytes).nbytes == nbytes.__index__()


REFUSED = [
    (-1, ValueError),
    (-(1 << 80), ValueError),
    (True, TypeError),
    (1.0, TypeError),
    ("1", TypeError),
    (None, TypeError),
    (int, TypeError),
    (np.array([1, 2]), TypeError),
    ((1 << 48) - 256, gpumem.OutOfMemoryError),
    ((1 << 48) - 255, gpumem.OutOfMemoryError),
    ((1 << 48) - 1, gpumem.OutOfMemoryError),
    (1 << 48, gpumem.OutOfMemoryError),
    ((1 << 63) - 1, gpumem.OutOfMemoryError),
    (1 << 63, gpumem.OutOfMemoryError),
    ((1 << 64) - 1, gpumem.OutOfMemoryError),
    (1 << 80, gpumem.OutOfMemoryError),
]


@pytest.mark.parametrize("method", ["allocate", "allocate_persistent"])
@pytest.mark.parametrize(("nbytes", "error"), REFUSED)
def test_invalid_size_is_refused_without_a_change(arena, method, nbytes, error):
    # With free blocks in the arena, so that a search runs over their bins.
    held = arena.allocate(300)
    arena.allocate(70_000).close()
    before = arena.stats(), arena.blocks()
    with pytest.raises(error):
        getattr(arena, method)(nbytes)
    arena.check_invariants()
    if error is not gpumem.OutOfMemoryError:
        assert (arena.stats(), arena.blocks()) == before
    assert arena.stats().in_use == held.allocated_nbytes


def test_size_beyond_the_address_space_is_named_as_such(arena):
    with pytest.raises(gpumem.OutOfMemoryError, match="exceeds the address space") as caught:
        arena.allocate(1 << 50)
    assert caught.value.advice == "the size exceeds the address space; check for an overflow"


@pytest.mark.parametrize("nbytes", [(1 << 48) - 255, 1 << 62, 1 << 63, 10**30])
@pytest.mark.parametrize("method", ["allocate", "allocate_persistent", "prepare"])
def test_out_of_memory_error_has_the_requested_size(arena, method, nbytes):
    with (
        arena.allocate(5000),
        pytest.raises(gpumem.OutOfMemoryError, match=rf"asked for .*\b{nbytes} bytes") as caught,
    ):
        getattr(arena, method)(nbytes)
    error = caught.value
    assert error.requested_nbytes == nbytes <= error.allocated_nbytes < nbytes + 256
    assert (error.in_use, error.device) == (5120, "host:0")
    assert "exceeds the address space" in error.advice


@pytest.mark.parametrize(
    "wrap",
    [gpumem.DriverPool, lambda memory: gpumem.adaptors.log(gpumem.Arena(memory), print)],
    ids=["pool", "adaptor"],
)
def test_resources_have_the_requested_size_in_their_error(wrap):
    with wrap("host") as resource, pytest.raises(gpumem.OutOfMemoryError) as caught:
        resource.allocate(10**30)
    assert caught.value.requested_nbytes == 10**30


def test_huge_size_of_a_closed_arena_is_a_closed_error(arena):
    arena.close()
    with pytest.raises(gpumem.errors.ClosedError):
        arena.allocate(10**30)


# ---- alignment -----------------------------------------------------------------------------------


@pytest.mark.parametrize("power", range(22))
def test_block_has_the_requested_alignment(arena, power, rng):
    held = [arena.allocate(rng.randrange(1, 3000)) for _ in range(5)]
    alignment = 1 << power
    for _ in range(5):
        buffer = arena.allocate(rng.randrange(1, 5000), alignment=alignment)
        assert buffer.ptr % max(alignment, 256) == 0
        memoryview(buffer)[:] = bytes([7]) * buffer.nbytes
        held.append(buffer)
    spans = sorted((buffer.ptr, buffer.ptr + buffer.nbytes) for buffer in held)
    assert all(low[1] <= high[0] for low, high in itertools.pairwise(spans))
    blocks = {block.address: block for block in arena.blocks()}
    for block in blocks.values():
        inside = [
            span
            for span in spans
            if block.address <= span[0] < block.address + block.allocated_nbytes
        ]
        assert all(end <= block.address + block.allocated_nbytes for _, end in inside)
        assert len(inside) == block.used


@pytest.mark.parametrize("nbytes", [0, 1000])
def test_shareable_and_transport_are_checked_for_every_size(arena, nbytes):
    for given in ("x", 1, None):
        with pytest.raises(TypeError, match="invalid shareable"):
            arena.allocate(nbytes, shareable=given)
    with pytest.raises(ValueError, match="invalid transport"):
        arena.allocate(nbytes, transport="foo")
    assert arena.stats().num_allocs == 0


def test_array_of_several_elements_is_not_a_number(arena):
    several = np.array([1, 2])
    with pytest.raises(TypeError, match="nbytes must be an integer"):
        arena.allocate(several)
    with pytest.raises(gpumem.errors.ConfigError, match="invalid max_mem"):
        gpumem.ArenaConfig(max_mem=several)
    with pytest.raises(TypeError, match="which is not an integer"):
        gpumem.empty((several, 1), "uint8", resource=arena)


def test_offset_of_a_tensor_may_be_any_integer_type(arena):
    buffer = arena.allocate(1000)
    assert buffer.tensor((2,), "float32", offset=np.int64(4)).ptr == buffer.ptr + 4
    for offset in (True, 2, -4, 1004, "4", np.array([4, 4])):
        with pytest.raises(ValueError, match="expected a multiple of 4 from 0 to 1000"):
            buffer.tensor((2,), "float32", offset=offset)


def test_any_integer_type_is_an_alignment(arena):
    assert arena.allocate(100, alignment=np.int64(4096)).ptr % 4096 == 0


@pytest.mark.parametrize(
    "alignment",
    [0, -1, 3, 255, 257, 1 << 22, 256.0, "256", True, np.int64(-4), np.array([256, 256])],
)
def test_alignment_must_be_a_power_of_two_up_to_2_mib(arena, alignment):
    with pytest.raises(ValueError, match="is not a power of two from 1 to 2097152"):
        arena.allocate(100, alignment=alignment)
    assert arena.stats().num_allocs == 0


def test_every_block_is_256_byte_aligned(arena, rng):
    held = [arena.allocate(rng.randrange(1, 10_000)) for _ in range(200)]
    assert all(buffer.ptr % 256 == 0 for buffer in held)


# ---- a Buffer that nobody handed out -------------------------------------------------------------


def test_buffer_made_by_new_alone_refuses_every_call():
    buffer = gpumem.Buffer.__new__(gpumem.Buffer)
    uses = [
        lambda: buffer.memory,
        lambda: buffer.stream,
        lambda: buffer.close(1),
        lambda: memoryview(buffer),
        lambda: repr(buffer),
        lambda: buffer.__cuda_array_interface__,
        buffer.__dlpack_device__,
        buffer.__dlpack__,
    ]
    for use in uses:
        with pytest.raises(TypeError, match="made by an allocator"):
            use()
    assert (buffer.ptr, buffer.nbytes, buffer.closed) == (0, 0, False)
    buffer.close()


@pytest.mark.parametrize("backing", ["regions", "virtual"])
@pytest.mark.parametrize("alignment", [1, 256, 512, 4096, 1 << 21])
def test_blocks_have_the_alignment_of_their_memory(backing, alignment):
    memory = gpumem.MemoryInfo("host", alignment=alignment)
    with gpumem.Arena(memory, {"backing": backing}) as arena:
        stream = gpumem.Stream("host")
        blocks = [arena.allocate(256) for _ in range(3)]
        blocks += [arena.allocate(1000, stream), arena.allocate(1000, alignment=64)]
        blocks += [arena.allocate(300), arena.allocate_persistent(100), arena.allocate(1 << 20)]
        blocks += [arena.allocate_persistent(3 << 20), arena.allocate(100, shareable=True)]
        tensors = [gpumem.empty((10,), "float32", resource=arena) for _ in range(2)]
        with arena.capture(stream) as pool:
            blocks.append(arena.allocate(256, stream))
        assert [each.ptr % alignment for each in (*blocks, *tensors)] == [0] * (len(blocks) + 2)
        assert arena.allocate(100, alignment=1 << 21).ptr % (1 << 21) == 0
        arena.check_invariants()
        del blocks, tensors, pool


def test_blocks_of_a_debug_heap_have_the_alignment_of_their_memory():
    memory = gpumem.MemoryInfo("host", alignment=4096)
    with gpumem.Arena(memory, debug_heap=True) as arena:
        blocks = [arena.allocate(1000), arena.allocate_persistent(1000)]
        assert [each.ptr % 4096 for each in blocks] == [0, 0]
        assert arena.check_heap() == ()
        del blocks


def test_other_resources_have_the_alignment_of_their_memory():
    memory = gpumem.MemoryInfo("host", alignment=8192)
    with gpumem.DriverPool(memory) as pool, gpumem.Arena(memory) as arena:
        logged = gpumem.adaptors.log(arena, [].append)
        for resource in (pool, logged):
            blocks = [resource.allocate(100), resource.allocate(100), resource.allocate(9000)]
            blocks.append(resource.allocate_persistent(100))
            assert [each.ptr % 8192 for each in blocks] == [0] * 4
            del blocks
        logged.close()


@pytest.mark.parametrize("make", [gpumem.Arena, gpumem.DriverPool])
def test_memory_with_an_alignment_beyond_two_mebibytes_is_refused(make):
    with pytest.raises(gpumem.ConfigError, match="invalid alignment = 4194304 of host:0"):
        make(gpumem.MemoryInfo("host", alignment=1 << 22))


def test_limit_of_an_arena_is_read_and_set(make_arena):
    arena = make_arena({"max_mem": "64MiB"})
    assert arena.limit == 64 << 20
    arena.limit = "32MiB"
    assert arena.limit == arena.stats().limit == 32 << 20
    with pytest.raises(ValueError, match="invalid limit = -1"):
        arena.limit = -1
    assert arena.limit == 32 << 20
    arena.limit = None
    assert arena.limit is None


def test_sizes_may_be_texts_with_a_unit(make_arena):
    arena = make_arena({"max_mem": "64MiB"})
    for _ in range(2):  # the second is not parsed again
        assert arena.allocate("1.5 KiB").nbytes == 1536
        with pytest.raises(TypeError, match="G is ambiguous"):
            arena.allocate("2G")
    assert arena.allocate_persistent("1kB").nbytes == 1000
    arena.prepare("8MiB")
    arena.set_limit("32MiB")
    assert arena.stats().limit == 32 << 20
    for value in ("1.5B", "5", "MiB", ""):
        with pytest.raises((gpumem.ConfigError, TypeError), match="512MiB"):
            arena.allocate(value)


def test_arena_has_its_bytes_in_use(make_arena):
    arena = make_arena()
    with arena.allocate(1000):
        assert arena.in_use == arena.stats().in_use > 0
    assert arena.in_use == 0


def test_soft_limit_is_answered_with_the_budgets_parameter():
    with pytest.raises(TypeError, match=r"did you mean 'budget=Budget\(..., soft=...\)'"):
        gpumem.Arena("host", soft_limit="1GiB")
    with pytest.raises(TypeError, match="did you mean 'soft'"):
        gpumem.Budget("2GiB", soft_limit="1GiB")
