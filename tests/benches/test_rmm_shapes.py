"""The programs that RMM's resources and arenas run."""

import pytest

import gpumem
from bench import rmm_shapes


class Rmm:
    """A resource with RMM's calls that checks how it is used."""

    def __init__(self):
        self.live = {}
        self.most = 0

    def allocate(self, nbytes):
        pointer = len(self.live) + 1
        while pointer in self.live:
            pointer += 1
        self.live[pointer] = nbytes
        self.most = max(self.most, sum(self.live.values()))
        return pointer

    def deallocate(self, pointer, nbytes):
        assert self.live.pop(pointer) == nbytes


@pytest.mark.parametrize(("allocations", "mib"), [(300, 4096), (1000, 1)])
def test_program_allocates_the_given_count_and_frees_all(allocations, mib):
    steps = rmm_shapes.program(allocations, mib)
    sizes = [size for size, _ in steps if size]
    assert len(sizes) == allocations
    assert len(steps) == 2 * allocations
    assert max(sizes) <= mib << 20
    resource = Rmm()
    rmm_shapes.over_rmm(resource, steps)
    assert not resource.live
    assert resource.most < rmm_shapes.MAX_HELD + (mib << 20)


def test_arena_runs_the_same_program_and_ends_empty():
    steps = rmm_shapes.program(200, 1)
    with gpumem.Arena("host") as arena:
        rmm_shapes.over_gpumem(arena, steps)
        assert arena.stats().num_allocs == 200
        assert arena.stats().in_use == 0
    rmm_shapes.over_nothing(steps)


def test_same_seed_draws_the_same_program():
    assert rmm_shapes.program(100, 4) == rmm_shapes.program(100, 4)
    assert rmm_shapes.program(100, 4) != rmm_shapes.program(100, 4, seed=2)


def test_both_libraries_take_the_same_stream():
    """What multi_stream does with an arena, on the host."""
    with gpumem.Arena("host") as arena:
        subject = rmm_shapes.ours(arena)
        stream = gpumem.Stream("host")
        block = subject.allocate(8, stream)
        assert block.stream.ptr == stream.ptr
        subject.free(block, 8, stream)
        assert arena.stats().in_use == 0
    assert rmm_shapes.Handle(stream.ptr).__cuda_stream__() == stream.__cuda_stream__()


def test_every_resource_is_timed_against_the_first(monkeypatch):
    """As random_allocations does it, with arenas of the host in the place of a GPU's and RMM's."""
    made = {}

    def subjects(nbytes):
        made.update({rmm_shapes.REFERENCE: gpumem.Arena("host"), "other": gpumem.Arena("host")})
        return {name: rmm_shapes.ours(arena) for name, arena in made.items()}

    monkeypatch.setattr(rmm_shapes, "subjects", subjects)
    monkeypatch.setattr(rmm_shapes, "pool_bytes", lambda: 0)
    timing = rmm_shapes.random_allocations(100, 1)
    assert timing.ratios[rmm_shapes.REFERENCE] == 1.0
    assert timing.rounds == rmm_shapes.ROUNDS
    for arena in made.values():
        assert arena.stats().num_allocs == 100 * (rmm_shapes.ROUNDS + 1)  # one warms up
        assert arena.stats().in_use == 0


def test_passes_over_one_arena_are_printed_with_what_it_holds(capsys):
    arguments = ["--device", "host", "--passes", "2", "--allocations", "50", "--largest-mib", "1"]
    assert rmm_shapes.main([*arguments, "--set", "page_move_budget=0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["pass 0", "pass 1"]
    assert all(", 0 pages moved" in line for line in lines)
