"""The garbage collection before a refusal, and the names of objects that hold blocks."""

import gc
import threading
import weakref

import pytest

import gpumem
from gpumem import observe
from gpumem.errors import BudgetExceededError, ClosedError
from gpumem.stats import OutOfMemoryReport, collection_text

MIB = 1 << 20
ARENA_CONFIG = {"max_mem": 8 * MIB, "backing": "virtual", "oom_wait_ms": 0}


@pytest.fixture(autouse=True)
def no_collections_but_those_of_gpumem():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Trainer:
    pass


class Loss:
    pass


def cycle_with(held):
    trainer = Trainer()
    trainer.loss = Loss()
    trainer.loss.trainer = trainer
    trainer.loss.held = held
    return trainer


CYCLE = "Loss.trainer -> Trainer.loss -> Loss"


def refusal(resource, nbytes=8 * MIB):
    with pytest.raises(gpumem.OutOfMemoryError) as caught:
        resource.allocate(nbytes)
    return caught.value


@pytest.mark.parametrize("form", ["buffer", "tensor", "in a dict", "in a tuple", "array"])
def test_request_is_served_from_blocks_of_cycles(make_arena, form):
    arena = make_arena()
    held = {
        "buffer": lambda: arena.allocate(6 * MIB),
        "tensor": lambda: gpumem.empty(6 * MIB, "uint8", resource=arena),
        "in a dict": lambda: {"weights": arena.allocate(6 * MIB)},
        "in a tuple": lambda: (arena.allocate(6 * MIB), ()),
        "array": lambda: gpumem.empty(6 * MIB, "uint8", resource=arena).numpy(),
    }[form]()
    cycle_with(held)
    del held
    with arena.allocate(6 * MIB):
        assert arena.stats().in_use == 6 * MIB


def test_refusal_names_freed_bytes_and_the_cycles_that_held_them(make_arena):
    arena = make_arena()
    for _ in range(2):
        cycle_with(arena.allocate(MIB))
    cycle_with({"deep": (gpumem.empty(3 * MIB, "uint8", resource=arena),)})
    keeper = arena.allocate(MIB)
    error = refusal(arena)
    assert error.report.collected == 5 * MIB
    assert error.report.cycles == ((CYCLE, 5 * MIB),)
    assert (
        "a garbage collection before this error freed 5.0 MiB, which reference cycles held: "
        f"{CYCLE} (5.0 MiB)" in str(error)
    )
    keeper.close()


def test_cycles_of_different_shapes_are_named_one_by_one(make_arena):
    arena = make_arena()
    loop = [arena.allocate(3 * MIB)]
    loop.append(loop)
    cycle_with(arena.allocate(MIB))
    keeper = arena.allocate(MIB)
    del loop
    assert refusal(arena).report.cycles == (("list[1] -> list", 3 * MIB), (CYCLE, MIB))
    keeper.close()


def test_block_that_others_hold_too_is_not_named(make_arena):
    arena = make_arena()
    kept = arena.allocate(2 * MIB)
    cycle_with([kept, arena.allocate(MIB)])
    report = refusal(arena).report
    assert (report.collected, report.cycles) == (MIB, ((CYCLE, MIB),))
    assert not kept.closed
    kept.close()


def test_no_garbage_is_collected_with_the_setting_at_0(make_arena):
    arena = make_arena({"oom_collect_ms": 0})
    alive = weakref.ref(cycle_with(arena.allocate(6 * MIB)))
    report = refusal(arena).report
    assert (report.collected, report.cycles) == (None, ())
    assert alive() is not None
    gc.collect()


def test_no_garbage_is_collected_for_a_block_that_is_larger_than_the_limit(make_arena):
    arena = make_arena()
    alive = weakref.ref(cycle_with(arena.allocate(MIB)))
    assert refusal(arena, 9 * MIB).report.collected is None
    assert alive() is not None
    gc.collect()


def test_collections_that_free_nothing_are_not_repeated_at_each_refusal(make_arena):
    arena = make_arena()
    keeper = arena.allocate(MIB)
    reports = [refusal(arena).report for _ in range(50)]
    collected = [report.collected for report in reports]
    assert collected[0] == 0
    assert None in collected
    assert not any("garbage" in report.text() for report in reports)
    keeper.close()


def test_refusal_of_a_budget_collects_garbage_of_other_arenas(make_arena):
    budget = gpumem.Budget(8 * MIB)
    config = {"max_mem": 0, "backing": "regions", "extend_strategy": "same_as_requested"}
    arena, other = (make_arena(config, budget=budget) for _ in range(2))
    cycle_with(other.allocate(6 * MIB))
    with arena.allocate(6 * MIB):
        assert other.stats().reserved == 0


def test_error_of_a_budget_names_the_cycles(make_arena):
    arena = make_arena({"max_mem": 0}, budget=gpumem.Budget(8 * MIB, name="job"))
    cycle_with(arena.allocate(4 * MIB))
    with arena.allocate(MIB), pytest.raises(BudgetExceededError, match="'job'") as caught:
        arena.allocate(8 * MIB)
    assert caught.value.report.cycles == ((CYCLE, 4 * MIB),)
    assert f"freed 4.0 MiB, which reference cycles held: {CYCLE}" in str(caught.value)


def test_commit_of_rows_collects_garbage(make_arena):
    arena = make_arena({"max_mem": 16 * MIB})
    rows = arena.virtual((8, 2 * MIB), "uint8")
    cycle_with(arena.allocate(10 * MIB))
    rows.commit(0, 4)
    assert arena.stats().in_use == 8 * MIB
    rows.close()


def test_finalizer_that_allocates_and_is_refused_leaves_the_request_to_be_served(make_arena):
    arena = make_arena()
    errors = []

    class Greedy:
        def __del__(self):
            try:
                arena.allocate(8 * MIB)
            except gpumem.OutOfMemoryError as error:
                errors.append(error.report.collected)

    greedy = Greedy()
    greedy.this, greedy.held = greedy, arena.allocate(6 * MIB)
    del greedy
    with arena.allocate(6 * MIB):
        assert errors == [0]


def test_finalizer_that_closes_the_arena_ends_the_request(make_arena):
    arena = gpumem.Arena("host", ARENA_CONFIG)

    class Closing:
        def __del__(self):
            self.held.close()
            arena.close()

    closing = Closing()
    closing.this, closing.held = closing, arena.allocate(6 * MIB)
    del closing
    with pytest.raises(ClosedError):
        arena.allocate(6 * MIB)


def test_text_of_a_report_counts_cycles_that_it_does_not_name():
    cycles = tuple((f"T{n} -> T{n}", MIB) for n in range(5))
    assert collection_text(5 * MIB, cycles).endswith("T2 -> T2 (1.0 MiB), 2 more")
    assert collection_text(MIB, ()) == "a garbage collection before this error freed 1.0 MiB"
    assert OutOfMemoryReport("host", 1, 1, collected=0).text().count("\n") == 0


# ---- which objects hold a block ------------------------------------------------------------------

kept: list[object] = []


@pytest.fixture
def empty_again():
    yield
    kept.clear()
    gc.collect()


def test_block_is_held_by_a_variable_of_a_module(arena, empty_again):
    kept.append({"weights": arena.allocate(4096)})
    ways = observe.held_by(kept[0]["weights"])
    assert ways == (f"module {__name__}.kept -> list[0] -> dict['weights'] -> Buffer (4.0 KiB)",)


def test_block_is_held_by_a_variable_of_a_running_function(arena):
    block = arena.allocate(4096)

    def training():
        mine = [block.tensor(4096, "uint8")]
        return observe.held_by(block), mine

    ways, _ = training()
    assert "training(): block -> Buffer (4.0 KiB)" in ways
    assert "training(): mine -> list[0] -> Tensor (4.0 KiB)" in ways


def test_block_is_held_by_a_function_of_another_thread(arena):
    block = arena.allocate(4096)
    begun, end = threading.Event(), threading.Event()

    def serving(request):
        begun.set()
        end.wait()

    thread = threading.Thread(target=serving, args=(block.tensor(4096, "uint8"),))
    thread.start()
    begun.wait()
    assert "serving(): request -> Tensor (4.0 KiB)" in observe.held_by(block)
    end.set()
    thread.join()


def test_cycle_of_live_objects_is_marked(arena, empty_again):
    kept.append(cycle_with(arena.allocate(4096)))
    ways = observe.held_by(kept[0].loss.held)
    assert ways == (
        f"module {__name__}.kept -> list[0] -> Trainer.loss -> Loss.held -> Buffer (4.0 KiB); "
        f"in the cycle {CYCLE}",
    )


def test_cycle_without_other_referrers_is_all_that_holds_a_block(arena):
    address = cycle_with(arena.allocate(4096)).loss.held.ptr
    assert observe.held_by(address) == (
        f"in the cycle {CYCLE}, which nothing else refers to: Buffer (4.0 KiB)",
    )
    gc.collect()
    assert observe.held_by(address) == ()


def test_address_without_a_block_is_held_by_nothing(arena):
    block = arena.allocate(4096)
    assert observe.held_by(block.ptr + 1) == ()
    assert observe.held_by(0) == ()


def test_object_without_a_block_is_refused():
    with pytest.raises(TypeError, match=r"invalid block = 'x': expected one of Buffer, Tensor"):
        observe.held_by("x")
