"""Phases and categories of PyTorch's memory snapshots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.torch_snapshots import entry, snapshot_file

from gpumem.errors import TraceError
from gpumem.traces import Trace, load_trace

Load = Callable[..., Trace]

MODULE = "/lib/torch/nn/modules/module.py"
CALL = [{"filename": MODULE, "name": "_call_impl", "line": 9}]
ENGINE = [{"filename": "??", "name": "torch::autograd::Engine::thread_main()", "line": 0}]
MAKE_GRADS = [{"filename": "/lib/torch/autograd/__init__.py", "name": "_make_grads", "line": 9}]
TO = [{"filename": MODULE, "name": "_apply", "line": 9}]
STEP = [{"filename": "/lib/torch/optim/adamw.py", "name": "_init_group", "line": 9}]
WORKSPACE = [{"filename": "??", "name": "at::cuda::getNewWorkspace()", "line": 0}]


@pytest.fixture
def load(tmp_path: Any) -> Load:
    """Load a snapshot of allocations and frees, at times that count from 1, with ranges.

    An allocation is its address and frames, a free the address alone; a range is a stage, a name
    and a time.
    """

    def load(entries: list[Any], *ranges: tuple[str, str, int]) -> Trace:
        listed = []
        for time_us, (address, *frames) in enumerate(entries, start=1):
            action = "alloc" if frames else "free_completed"
            more = {"frames": frames[0]} if frames else {}
            listed.append(entry(action, 4096 * address, 100, time_us=time_us, **more))
        told = [
            {"stage": stage, "name": name, "time_us": time_us, "device": 0}
            for stage, name, time_us in ranges
        ]
        return load_trace(snapshot_file(tmp_path / "snapshot", listed, external_annotations=told))

    return load


def phases_of(trace: Trace) -> list[tuple[str, int, int, int]]:
    assert trace.details is not None
    return [(each.name, each.begin, each.end, each.depth) for each in trace.details.phases]


def categories_of(trace: Trace) -> list[str]:
    assert trace.details is not None
    assert trace.details.category is not None
    return [trace.details.categories[number] for number in trace.details.category]


def test_ranges_are_phases(load: Load) -> None:
    trace = load(
        [(1, TO), (2, TO), (3, TO), (2,)],
        ("START", "epoch", 1),
        ("START", "load#7", 2),
        ("END", "load#7", 3),
        ("END", "epoch", 4),
    )
    assert phases_of(trace) == [("epoch", 0, 4, 0), ("load", 1, 3, 1)]


def test_ranges_without_a_begin_or_an_end_reach_the_ends_of_the_entries(load: Load) -> None:
    trace = load([(1, TO), (2, TO)], ("END", "early", 1), ("START", "## late ##", 2))
    assert phases_of(trace) == [("early", 0, 1, 0), ("## late ##", 1, 2, 0)]


@pytest.mark.parametrize("of_autograd", [ENGINE, []])
def test_passes_without_ranges_are_found_by_stacks(load: Load, of_autograd: list[Any]) -> None:
    trace = load(
        [
            (1, TO),
            (2, CALL),
            (3, CALL),
            (3,),
            (4, MAKE_GRADS),
            (5, of_autograd),
            (2,),
            (4,),
            (6, STEP),
            (7, WORKSPACE),
        ],
        ("START", "Optimizer.step#AdamW.step", 9),
        ("END", "Optimizer.step#AdamW.step", 10),
    )
    assert phases_of(trace) == [
        ("forward", 1, 4, 0),
        ("backward", 4, 8, 0),
        ("Optimizer.step", 8, 10, 0),
    ]
    assert categories_of(trace) == [
        "parameters",
        "activations",
        "temporaries",
        "temporaries",
        "gradients",
        "optimizer state",
        "workspaces",
    ]


def test_ranges_of_passes_precede_stacks(load: Load) -> None:
    trace = load(
        [(1, CALL), (2, ENGINE), (1,)], ("START", "## backward ##", 2), ("END", "## backward ##", 3)
    )
    assert phases_of(trace) == [("forward", 0, 1, 0), ("## backward ##", 1, 3, 0)]


def test_of_blocks_from_before_the_entries_only_activations_are_known(load: Load) -> None:
    trace = load([(1, CALL), (8,), (1,), (9,)], ("END", "backward", 3))
    assert categories_of(trace) == ["activations", "other", "temporaries"]


def test_snapshots_without_frees_have_phases_and_no_categories(load: Load) -> None:
    trace = load([(1, CALL), (2, ENGINE)])
    assert [name for name, *_ in phases_of(trace)] == ["forward", "backward"]
    assert trace.details is not None
    assert trace.details.category is None


def test_snapshots_of_other_programs_have_neither(load: Load) -> None:
    trace = load([(1, []), (1,)])
    assert trace.details is not None
    assert trace.details.phases == ()
    assert trace.details.category is None


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        (7, "external_annotations are 7, expected a list"),
        ([7], "annotation 0 is 7, expected a dict with a name"),
        ([{"name": "a", "stage": "START", "time_us": -1}], "time_us is -1, expected 0"),
    ],
)
def test_damaged_ranges_are_refused(tmp_path: Any, annotations: object, message: str) -> None:
    history = [entry("alloc", 4096, 100)]
    path = snapshot_file(tmp_path / "snapshot", history, external_annotations=annotations)
    with pytest.raises(TraceError, match=message):
        load_trace(path)
