"""Small blocks at rest in their threads' caches: found again, never lost, always counted."""

import pytest
from helpers.threads import in_a_thread

import gpumem

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def other_thread():
    """Run work on one other thread that stays alive between calls."""
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield lambda work: pool.submit(work).result()


@pytest.mark.parametrize("backing", ["regions", "virtual"])
def test_freed_small_block_is_reused_from_the_thread_cache(make_arena, backing):
    arena = make_arena({"backing": backing, "split_rule": "tight"})
    first, pin, second = (arena.allocate(1000) for _ in range(3))
    addresses = [first.ptr, second.ptr]
    first.close()
    second.close()
    again = [arena.allocate(900), arena.allocate(1024)]
    assert [buffer.ptr for buffer in again] == addresses[::-1]
    pin.close()


def test_block_freed_by_another_thread_returns_to_the_owner_cache(arena, other_thread):
    buffer, pin = arena.allocate(5000), arena.allocate(256)
    address = buffer.ptr
    other_thread(buffer.close)
    assert other_thread(lambda: arena.allocate(5000).ptr) != address
    assert arena.allocate(5000).ptr == address
    pin.close()


def test_small_block_freed_by_another_thread_returns_to_its_own_range(make_arena, other_thread):
    arena = make_arena({"backing": "virtual"})
    large = [arena.allocate(32 * MIB) for _ in range(2)]  # from here on small ones have a range
    small = [arena.allocate(5000) for _ in range(3)]
    places = [buffer.ptr for buffer in small]
    other_thread(small[1].close)
    small[1] = arena.allocate(5000)
    assert [buffer.ptr for buffer in small] == places
    arena.check_invariants()
    for buffer in (*small, *large):
        buffer.close()


def test_blocks_freed_by_other_threads_do_not_pile_up(make_arena, other_thread):
    arena = make_arena({"max_mem": MIB, "backing": "regions", "split_rule": "tight"})
    for _ in range(20):
        buffers = [arena.allocate(256) for _ in range(1000)]
        other_thread(lambda: [buffer.close() for buffer in buffers])  # noqa: B023
    assert arena.allocate(MIB).nbytes == MIB


def test_cached_blocks_are_flushed_for_a_large_request(make_arena, other_thread):
    arena = make_arena({"max_mem": MIB, "backing": "regions", "split_rule": "tight"})

    def fill_and_free():
        for buffer in [arena.allocate(64 * KIB) for _ in range(8)]:
            buffer.close()

    other_thread(fill_and_free)
    fill_and_free()
    assert arena.allocate(MIB).nbytes == MIB


def test_miss_that_the_own_cache_serves_leaves_the_caches_of_other_threads(
    make_arena, other_thread
):
    arena = make_arena({"max_mem": MIB, "backing": "regions", "split_rule": "tight"})

    def fill_and_free(count):
        held = [arena.allocate(64 * KIB) for _ in range(count)]
        addresses = [buffer.ptr for buffer in held]
        for buffer in held:
            buffer.close()
        return addresses

    theirs = other_thread(lambda: fill_and_free(2))
    fill_and_free(14)
    with arena.allocate(14 * 64 * KIB):
        # The one freed last; of two that have merged it would be the lower one.
        assert other_thread(lambda: arena.allocate(64 * KIB).ptr) == theirs[1]


def held_in_full(arena, stream=None):
    """Use up 1 MiB: eight blocks of 4 KiB, then blocks of 64 KiB as long as there is room."""
    small = [arena.allocate(4 * KIB, stream) for _ in range(8)]
    pin = arena.allocate(32 * KIB, stream)
    return small, [arena.allocate(64 * KIB, stream) for _ in range(15)], pin


def put_at_rest(blocks):
    """Close blocks; returns their addresses in the order in which a cache hands them out."""
    order = [blocks[number] for number in (4, 0, 6, 2)]  # no two of them side by side
    addresses = [block.ptr for block in order]
    for block in order:
        blocks.remove(block)
        block.close()
    return addresses[::-1]


def test_miss_takes_a_cached_block_that_fits_and_leaves_the_others(make_arena):
    arena = make_arena({"max_mem": MIB, "backing": "regions", "split_rule": "tight"})
    small, large, pin = held_in_full(arena)
    first = large.pop(7)
    address = first.ptr
    first.close()
    at_rest = put_at_rest(small)
    pin_at = pin.ptr
    pin.close()
    half = arena.allocate(20 * KIB)
    assert half.ptr == pin_at, "both stacks have one block: 32 KiB fit better than 64 KiB"
    again = [arena.allocate(4 * KIB) for _ in at_rest]
    assert [block.ptr for block in again] == at_rest
    assert arena.allocate(64 * KIB).ptr == address


@pytest.mark.parametrize(("deep", "shallow"), [(64 * KIB, 32 * KIB), (32 * KIB, 64 * KIB)])
def test_miss_takes_a_cached_block_of_the_deepest_stack(make_arena, deep, shallow):
    room = 2 * deep + shallow + 3 * 256
    arena = make_arena({"max_mem": room, "backing": "regions", "split_rule": "tight"})
    blocks, pins = [], []
    for nbytes in (deep, shallow, deep):
        blocks.append(arena.allocate(nbytes))
        pins.append(arena.allocate(256))
    places = [block.ptr for block in blocks]
    for block in blocks:
        block.close()
    assert arena.allocate(20 * KIB).ptr == places[2], "the one of them that was freed last"
    assert arena.allocate(shallow).ptr == places[1]
    assert arena.allocate(deep).ptr == places[0]


def test_miss_takes_the_largest_cached_blocks_if_none_is_large_enough(make_arena):
    arena = make_arena({"max_mem": MIB, "backing": "regions", "split_rule": "tight"})
    small, large, pin = held_in_full(arena)
    at_rest = put_at_rest(small)
    pair = [large.pop(7), large.pop(7)]
    address = pair[0].ptr
    for block in pair:
        block.close()
    assert arena.allocate(96 * KIB).ptr == address
    again = [arena.allocate(4 * KIB) for _ in at_rest]
    assert [block.ptr for block in again] == at_rest
    pin.close()


def test_miss_that_completed_memory_of_another_stream_serves_leaves_the_cache(
    make_arena, other_thread
):
    arena = make_arena({"max_mem": MIB, "backing": "regions", "split_rule": "tight"})
    mine, theirs = gpumem.Stream("host"), gpumem.Stream("host")
    small, large, pin = held_in_full(arena, mine)
    large.pop().close()
    large.pop().close()
    other = other_thread(lambda: arena.allocate(100 * KIB, theirs))
    address = other.ptr
    at_rest = put_at_rest(small)
    for block in (large.pop(3), large.pop(9)):
        block.close()
    other.close()  # free in the table, because this thread did not allocate it
    assert arena.allocate(50 * KIB, mine).ptr == address
    again = [arena.allocate(4 * KIB, mine) for _ in at_rest]
    assert [block.ptr for block in again] == at_rest
    pin.close()


def test_cached_block_freed_on_another_stream_is_not_reused_on_its_first(make_arena):
    arena = make_arena({"stream_reuse": "never"})
    mine, theirs = gpumem.Stream("host"), gpumem.Stream("host")
    buffer = arena.allocate(1000, mine)
    address = buffer.ptr
    buffer.close(theirs)
    assert arena.allocate(1000, mine).ptr != address
    assert arena.allocate(1000, theirs).ptr == address


def test_large_block_is_reused_as_it_was_if_freed_last(make_arena):
    arena = make_arena({"split_rule": "tight"})
    first, pin = arena.allocate(3 * MIB), arena.allocate(3 * MIB)
    address = first.ptr
    first.close()
    assert arena.allocate(3 * MIB - 1).ptr == address
    pin.close()


def test_last_freed_block_is_merged_before_another_size_is_served(make_arena):
    arena = make_arena({"max_mem": 4 * MIB, "backing": "regions", "split_rule": "tight"})
    for size in (4 * MIB, MIB, 4 * MIB, 3 * MIB, 4 * MIB):
        arena.allocate(size).close()
    assert arena.stats().num_extensions == 1 or arena.stats().reserved <= 4 * MIB


def test_reset_stream_frees_its_cached_blocks(make_arena, stream):
    arena = make_arena({"stream_reuse": "never", "split_rule": "tight"})
    buffer = arena.allocate(1000, stream)
    address = buffer.ptr
    buffer.close()
    assert arena.allocate(1000).ptr != address
    arena.reset_stream(stream)
    assert address in {arena.allocate(1000).ptr, arena.allocate(1000).ptr} | {
        block.address for block in arena.blocks() if not block.used
    }


@pytest.mark.parametrize("backing", ["regions", "virtual"])
@pytest.mark.parametrize("apart", [{"shareable": True}, {"transport": "ipc"}, None])
def test_peak_in_use_with_memory_of_its_own_leaves_cached_blocks_out(make_arena, backing, apart):
    arena = make_arena({"backing": backing})
    for size in (5000, 700):
        arena.allocate(size).close()
    buffer = arena.allocate(64 * KIB, **apart) if apart else arena.allocate_persistent(64 * KIB)
    assert arena.stats().max_in_use == buffer.allocated_nbytes == 64 * KIB


@pytest.mark.parametrize("streams", [1, 3])
def test_peak_in_use_counts_cached_allocations_exactly(make_arena, rng, streams):
    arena = make_arena({"backing": "regions", "split_rule": "tight"})
    queues = [gpumem.Stream("host") for _ in range(streams)]
    live, in_use, requested, peak, taken = [], 0, 0, 0, 0
    for _ in range(5000):
        if live and (rng.random() < 0.5 or len(live) > 40):
            buffer = live.pop(rng.randrange(len(live)))
            in_use -= buffer.allocated_nbytes
            requested -= buffer.nbytes
            buffer.close()
        else:
            size = rng.choice([200, 4000, 60 * KIB, 64 * KIB, 65 * KIB, 300 * KIB])
            live.append(arena.allocate(size, rng.choice(queues)))
            in_use += live[-1].allocated_nbytes
            requested += size
            peak = max(peak, in_use)
            taken += 1
    stats = arena.stats()
    assert (stats.in_use, stats.requested_in_use) == (in_use, requested)
    assert (stats.max_in_use, stats.num_allocs) == (peak, taken)
    assert stats.num_frees == taken - len(live)


def test_new_thread_takes_over_the_cache_of_an_ended_one(arena):
    pin = arena.allocate(256)
    address = in_a_thread(lambda: arena.allocate(2000).ptr)
    for _ in range(50):
        assert in_a_thread(lambda: arena.allocate(2000).ptr) == address
    pin.close()


def test_arenas_beyond_the_threads_cache_slots_keep_their_own_blocks(make_arena):
    arenas = [make_arena() for _ in range(50)]
    pins = [arena.allocate(256) for arena in arenas]
    first = [arena.allocate(3000).ptr for arena in arenas]
    assert [arena.allocate(3000).ptr for arena in arenas] == first
    assert all(arena.stats().num_allocs == 3 for arena in arenas)
    for pin in pins:
        pin.close()


@pytest.mark.parametrize("backing", ["regions", "virtual"])
def test_dropped_arena_frees_its_cached_blocks(backing, other_thread):
    device = gpumem.Device("host")
    before = device.free_bytes
    held = [gpumem.Arena("host", {"backing": backing})]
    for use in (lambda work: work(), other_thread):
        use(lambda: [held[0].allocate(size).close() for size in (1000, 60 * KIB, 3 * MIB)])
    held.clear()
    assert device.free_bytes == before


def test_new_arena_never_reuses_cached_blocks_of_a_dropped_one():
    for _ in range(100):
        arena = gpumem.Arena("host")
        arena.allocate(1000).close()
        assert arena.stats().num_allocs == 1
        arena.close()
        with pytest.raises(gpumem.errors.ClosedError):
            arena.allocate(1000)


# ---- how much is cached --------------------------------------------------------------------------

DEPTH, REMOTE_DEPTH = 32, 64  # blocks: of one size and stream; freed by others, not yet collected


def addresses_of(arena, count, nbytes):
    """Allocate on the calling thread; free again once all are there."""
    held = [arena.allocate(nbytes) for _ in range(count)]
    return [buffer.ptr for buffer in held]


@pytest.fixture
def cut(make_arena):
    """Make an arena, and blocks of it in a row between two that stay."""

    def make(count, nbytes, **config):
        arena = make_arena({"backing": "regions", "split_rule": "tight"} | config)
        held = [arena.allocate(nbytes) for _ in range(count + 1)]
        pins.append(held.pop())
        return arena, held, [buffer.ptr for buffer in held]

    pins = []
    yield make
    pins.clear()


@pytest.mark.parametrize("before", ["fresh", "used up", "flushed"])
def test_stack_of_one_size_takes_so_many_blocks_and_the_next_go_to_the_table(
    cut, other_thread, before
):
    arena, held, addresses = cut(DEPTH + 3, 1000)
    if before == "used up":
        for _ in range(2 * DEPTH):
            arena.allocate(1000).close()
    if before == "flushed":
        addresses_of(arena, 3, 1000)
        arena.stats()
    taken = arena.allocate(1000)  # the stack is empty
    for buffer in held:
        buffer.close()
    # Beside the stack is the block freed last; the two that it replaced are one free chunk.
    assert other_thread(lambda: addresses_of(arena, 2, 1000)) == addresses[DEPTH : DEPTH + 2]
    again = [arena.allocate(1000) for _ in range(DEPTH + 1)]
    assert [buffer.ptr for buffer in again] == [*addresses[:DEPTH][::-1], addresses[-1]]
    taken.close()


@pytest.mark.parametrize("nbytes", [65 * KIB, 3 * MIB])
def test_block_freed_last_is_taken_before_a_lower_one(cut, nbytes):
    arena, held, addresses = cut(4, nbytes, initial_chunk_size_bytes=64 * MIB)
    held[0].close()
    held[2].close()
    assert arena.allocate(nbytes).ptr == addresses[2]
    with arena.allocate(nbytes + 256):  # of another size: to the table with it
        assert arena.allocate(nbytes).ptr == addresses[0]
    held.clear()


@pytest.mark.parametrize(("nbytes", "stacked"), [(64 * KIB, True), (64 * KIB + 1, False)])
def test_blocks_of_up_to_64_kib_are_stacked_and_of_larger_ones_the_last_is_kept(
    cut, other_thread, nbytes, stacked
):
    arena, held, addresses = cut(2, nbytes, initial_chunk_size_bytes=8 * MIB)
    for buffer in held:
        buffer.close()
    found = other_thread(lambda: arena.allocate(nbytes).ptr)
    assert (found == addresses[0]) is not stacked
    assert found != addresses[1]
    again = [arena.allocate(nbytes), arena.allocate(nbytes)]
    assert again[0].ptr == addresses[1], "what was freed last"
    assert (again[1].ptr == addresses[0]) is stacked


def test_each_stream_and_size_has_its_own_stack(cut, stream):
    arena, held, addresses = cut(3, 1000)
    other = [arena.allocate(nbytes, stream) for nbytes in (1000, 2000)]
    theirs = [buffer.ptr for buffer in other]
    for buffer in (*other, *held):
        buffer.close()
    assert [arena.allocate(nbytes, stream).ptr for nbytes in (1000, 2000)] == theirs
    assert arena.allocate(1000).ptr == addresses[-1]


@pytest.mark.parametrize("count", [REMOTE_DEPTH, REMOTE_DEPTH + 2])
def test_so_many_blocks_freed_by_another_thread_are_kept_for_the_owner(cut, other_thread, count):
    arena, held, addresses = cut(count, 1000, initial_chunk_size_bytes=8 * MIB)
    other_thread(lambda: [buffer.close() for buffer in held])
    found = other_thread(lambda: addresses_of(arena, 2, 1000))
    assert (found == addresses[REMOTE_DEPTH:][:2]) is (count > REMOTE_DEPTH)
    assert not set(found) & set(addresses[:REMOTE_DEPTH])


def test_owner_collects_what_others_freed_and_the_overflow_becomes_free(cut, other_thread):
    arena, held, addresses = cut(DEPTH + 8, 1000, initial_chunk_size_bytes=8 * MIB)
    other_thread(lambda: [buffer.close() for buffer in held])
    large = arena.allocate(100 * KIB)  # nothing that others free to this cache serves it
    beside = other_thread(lambda: arena.allocate(1000).ptr)
    assert beside not in addresses
    # The list begins with the block freed last, and each goes on top of the stack.
    first = arena.allocate(1000)
    assert first.ptr == addresses[8]
    assert other_thread(lambda: addresses_of(arena, 9, 1000)) == [beside, *addresses[:8]]
    large.close()
    stats = arena.stats()
    assert (stats.in_use, stats.num_allocs - stats.num_frees) == (2 * 1024, 2)
    first.close()


@pytest.mark.parametrize(("nbytes", "kept"), [(64 * KIB, True), (64 * KIB + 1, False)])
def test_larger_block_freed_by_another_thread_is_free_for_all_threads(
    cut, other_thread, nbytes, kept
):
    arena, held, addresses = cut(1, nbytes, initial_chunk_size_bytes=8 * MIB)
    other_thread(held[0].close)
    found = other_thread(lambda: arena.allocate(nbytes).ptr)
    assert (found == addresses[0]) is not kept
    assert (arena.allocate(nbytes).ptr == addresses[0]) is kept


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("nbytes", [MIB, MIB + 1])
def test_packed_arena_places_blocks_above_1_mib_low_while_one_stream_has_its_memory(
    make_arena, nbytes, streams
):
    arena = make_arena({"backing": "virtual"})
    arena.allocate(32 * MIB).close()
    held = [arena.allocate(size) for size in (nbytes, 256 * KIB, nbytes, 256 * KIB)]
    addresses = [buffer.ptr for buffer in held]
    side = gpumem.Stream("host")
    if streams == 2:
        others = [arena.allocate(size, side) for size in (300 * KIB, 256 * KIB)]
        others[0].close()
        arena.stats()  # into the table
    held[0].close()
    held[2].close()
    low = streams == 1 and nbytes > MIB
    assert arena.allocate(nbytes).ptr == addresses[0 if low else 2]
