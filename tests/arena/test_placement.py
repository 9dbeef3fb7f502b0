"""Which of the free chunks that fit a request gets: the documented choice, at its exact limits."""

import pytest

import gpumem

KIB, MIB = 1 << 10, 1 << 20
SCAN_LIMIT = 8  # chunks looked at in one bin
PACK_LIMIT = 10  # bins that fit among whose heads a packed arena takes the lowest
PACK_BYTES = 64 * KIB  # up to so many any place does


@pytest.fixture
def holes(make_arena):
    """Make an arena with free chunks of given sizes at rising addresses, freed in a given order.

    Returns it and their addresses. Nothing else is free but one large chunk, unless `full`.
    """
    walls = []

    def make(sizes, order=None, streams=None, full=False, **config):
        config = {"backing": "regions", "split_rule": "tight"} | config
        wall = 256 * KIB  # large enough for the pages of larger blocks
        room = sum(-(-size // 256) * 256 + wall for size in sizes) + (0 if full else 64 * MIB)
        if config["backing"] == "regions":
            arena = make_arena({"initial_chunk_size_bytes": room} | config)
        else:
            arena = make_arena(config)
            arena.allocate(room).close()
        held = []
        for i, size in enumerate(sizes):
            held.append(arena.allocate(size, streams[i] if streams else None))
            walls.append(arena.allocate(wall))
        addresses = [buffer.ptr for buffer in held]
        assert addresses == sorted(addresses)
        for i in order or range(len(sizes)):
            held[i].close()
        held.clear()
        arena.stats()  # what is cached becomes free
        return arena, addresses

    yield make
    walls.clear()


def place(arena, addresses, nbytes, stream=None):
    """Return the number of the chunk from which a request is served; -1: another one."""
    with arena.allocate(nbytes, stream) as buffer:
        return addresses.index(buffer.ptr) if buffer.ptr in addresses else -1


# ---- the best fit --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_smallest_chunk_that_fits_is_taken(holes, order):
    arena, addresses = holes([3 * MIB, 1 * MIB, 2 * MIB], order)
    assert place(arena, addresses, 1 * MIB) == 1
    assert place(arena, addresses, 1 * MIB + 1) == 2
    assert place(arena, addresses, 2 * MIB) == 2
    assert place(arena, addresses, 2 * MIB + 256) == 0
    assert place(arena, addresses, 3 * MIB + 1) == -1


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_lowest_of_equal_chunks_is_taken(holes, order):
    arena, addresses = holes([300 * KIB] * 3, order)
    assert place(arena, addresses, 300 * KIB) == 0
    assert place(arena, addresses, 299 * KIB) == 0


@pytest.mark.parametrize(("quanta", "step"), [(33, 1), (63, 1), (64, 2), (127, 2), (128, 4)])
def test_bins_of_a_power_of_two_hold_a_thirty_second_each(holes, quanta, step):
    # Chunks of one bin, the smaller ones freed last: from the next bin on any chunk fits, in the
    # request's own bin only what is large enough.
    base = 2048 * quanta // step * step
    sizes = [base * 256, (base + 1) * 256, (base + 2) * 256]
    arena, addresses = holes(sizes)
    for i, size in enumerate(sizes):
        assert place(arena, addresses, size) == i
        assert place(arena, addresses, size - 255) == i


def test_chunk_too_small_in_the_request_bin_is_passed_over(holes):
    size = 4096 * 256  # the first size of its bin, which spans 128 quanta
    arena, addresses = holes([size, size + 126 * 256, size + 127 * 256, size + 128 * 256])
    assert place(arena, addresses, size + 1) == 1
    assert place(arena, addresses, size + 127 * 256) == 2
    assert place(arena, addresses, size + 127 * 256 + 1) == 3


@pytest.mark.parametrize(("smaller", "found"), [(SCAN_LIMIT - 1, True), (SCAN_LIMIT, False)])
def test_so_many_chunks_of_the_request_bin_are_looked_at(holes, smaller, found):
    size = 4096 * 256
    sizes = [size + 256] + [size] * smaller + [size + 128 * 256]
    arena, addresses = holes(sizes)  # the chunk that fits was freed first, so it comes last
    assert place(arena, addresses, size + 256) == (0 if found else len(sizes) - 1)


def test_best_of_a_later_bin_is_taken_among_as_many(holes):
    size = 4096 * 256
    lower = [size + 129 * 256] + [size + 130 * 256] * SCAN_LIMIT
    arena, addresses = holes(lower)
    assert place(arena, addresses, size) == 1, "the first one freed is not looked at"
    arena, addresses = holes(lower[:-1])
    assert place(arena, addresses, size) == 0


# ---- the own stream's memory, and what every stream may have -------------------------------------


@pytest.mark.parametrize(
    ("own", "released", "nbytes", "taken"),
    [
        (2 * MIB, 1 * MIB, 1 * MIB, "released"),
        (2 * MIB, 1 * MIB, 900 * KIB, "released"),
        (1 * MIB, 2 * MIB, 900 * KIB, "own"),
        (1 * MIB, 1 * MIB, 1 * MIB, "own"),
        (1 * MIB, 1 * MIB, 1 * MIB - 256, "own"),
        (1 * MIB, 2 * MIB, 1 * MIB + 1, "released"),
        (2 * MIB, 1 * MIB, 1 * MIB + 1, "own"),
    ],
)
@pytest.mark.parametrize("own_first", [False, True])
def test_better_fit_of_own_and_released_memory_is_taken_the_own_if_equal(
    holes, own, released, nbytes, taken, own_first
):
    mine, drained = gpumem.Stream("host"), gpumem.Stream("host")
    sizes = {"own": own, "released": released}
    names = ["own", "released"] if own_first else ["released", "own"]
    streams = [mine if name == "own" else drained for name in names]
    arena, addresses = holes([sizes[name] for name in names], streams=streams, full=True)
    arena.reset_stream(drained)
    assert names[place(arena, addresses, nbytes, mine)] == taken


# ---- where pages are packed ----------------------------------------------------------------------


def distinct(count):
    """Sizes in bins of their own, the largest first, so that the lowest place is the worst fit."""
    return [MIB + i * 64 * KIB for i in reversed(range(count))]


@pytest.mark.parametrize("count", [PACK_LIMIT, PACK_LIMIT + 4])
def test_packed_arena_takes_the_lowest_of_the_smallest_that_fit(holes, count):
    arena, addresses = holes(distinct(count), backing="virtual")
    assert place(arena, addresses, MIB) == count - PACK_LIMIT


def test_packed_arena_counts_bins_not_chunks(holes):
    size = 4096 * 256
    sizes = [*distinct(PACK_LIMIT)[:-1], size, size, size, size + 256]
    arena, addresses = holes(sizes, backing="virtual")
    assert place(arena, addresses, size + 256) == 0


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_packed_arena_takes_the_lowest_chunk_of_a_bin(holes, order):
    arena, addresses = holes([MIB] * 4, order, backing="virtual")
    assert place(arena, addresses, MIB - 256) == 0
    arena.check_invariants()


@pytest.mark.parametrize(
    ("sizes", "taken"), [((MIB + 256, MIB), 0), ((MIB, MIB + 256), -1), ((MIB, 2 * MIB), 1)]
)
def test_packed_arena_looks_at_the_lowest_chunk_of_the_request_bin(holes, sizes, taken):
    arena, addresses = holes(sizes, backing="virtual")
    assert place(arena, addresses, MIB + 256) == taken


@pytest.mark.parametrize(("nbytes", "taken"), [(PACK_BYTES, 1), (PACK_BYTES + 1, 0)])
def test_packed_arena_takes_the_best_fit_for_small_blocks(make_arena, nbytes, taken):
    arena = make_arena({"backing": "virtual"})
    held = [arena.allocate(size) for size in (200 * KIB, KIB, 100 * KIB, KIB)]
    addresses = [buffer.ptr for buffer in held]
    held[0].close()
    held[2].close()
    arena.stats()
    assert place(arena, addresses[::2], nbytes) == taken


def test_packed_arena_takes_the_best_fit_while_other_streams_hold_memory(holes):
    mine, other = gpumem.Stream("host"), gpumem.Stream("host")
    arena, addresses = holes(
        [3 * MIB, 2 * MIB, 4 * MIB], streams=[mine, mine, other], backing="virtual"
    )
    assert place(arena, addresses, 2 * MIB, mine) == 1
    arena.reset_stream(other)
    arena.reset_stream(None)
    assert place(arena, addresses, 2 * MIB, mine) == 0


def test_packed_arena_takes_the_lower_of_own_and_released_memory(holes):
    for first in range(2):
        mine, drained = gpumem.Stream("host"), gpumem.Stream("host")
        streams = [drained, drained]
        streams[first] = mine
        arena, addresses = holes([2 * MIB, 2 * MIB], streams=streams, backing="virtual")
        arena.reset_stream(drained)
        arena.reset_stream(None)
        assert place(arena, addresses, MIB, mine) == 0


# ---- what is said of it --------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_largest_free_chunk_is_found_in_every_stream_and_bin(holes, order):
    size = 4096 * 256
    streams = [gpumem.Stream("host") for _ in range(4)]
    sizes = [size + 100 * 256, size + 127 * 256, size, 300 * KIB]
    arena, _ = holes(sizes, order, streams, full=True)
    assert arena.stats().largest_free == size + 127 * 256
    arena, _ = holes(sizes, order, [streams[0]] * 4, full=True)
    assert arena.stats().largest_free == size + 127 * 256


def test_number_of_a_region_that_is_gone_is_given_to_the_next(make_arena):
    arena = make_arena({"backing": "regions"})
    held = [arena.allocate_persistent(MIB) for _ in range(20)]

    def numbers():
        found = {block.address: block.region for block in arena.blocks()}
        return [found[buffer.ptr] for buffer in held]

    assert numbers() == list(range(20))
    for i in (3, 11):
        held[i].close()
    arena.shrink()
    held[3], held[11] = arena.allocate_persistent(KIB), arena.allocate_persistent(KIB)
    assert numbers() == list(range(20))
    assert arena.stats().num_regions == 20
    held.clear()
    arena.shrink()
    assert arena.stats().num_regions == 0
