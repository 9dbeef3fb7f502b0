"""Phases, categories and other groups of a trace's allocations."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.runs import MIB, told_run, with_details

from gpumem.errors import ConfigError
from gpumem.traces import Phase, Trace
from gpumem.traces.frames import own_frames, owner_named
from gpumem.traces.groups import (
    GROUPINGS,
    bytes_at,
    groups_of,
    peak_event,
    phase_at,
    phase_table,
)


def phased(*phases: Phase) -> Trace:
    return with_details(told_run(), phases=phases)


def test_lives_span_allocation_and_completed_free() -> None:
    begin, end = told_run().lives()
    assert begin.tolist() == [0, 1, 2]
    assert end.tolist() == [5, 3, 4]  # the weights are never freed


def test_lives_tell_blocks_apart_that_share_a_number() -> None:
    run = Trace(
        action=[0, 1, 2, 0, 0, 2],
        block=[0, 0, 0, 0, 1, 0],
        size=[8, 8, 8, 16, 4, 16],
        stream=[0] * 6,
        time_us=range(6),
    )
    begin, end = run.lives()
    assert begin.tolist() == [0, 3, 4]
    assert end.tolist() == [2, 5, 6]


def test_bytes_at_lists_the_live_groups_from_the_largest() -> None:
    run = told_run()
    owners = groups_of(run)
    assert owners is not None
    assert peak_event(run) == 2
    assert bytes_at(run, 2, owners) == [
        ("weights", 4 * MIB, 1),
        ("activations", 2 * MIB, 1),
        ("workspace", MIB, 1),
    ]
    assert bytes_at(run, 4, owners) == [("weights", 4 * MIB, 1)]


_FILE = "/job/train.py"
_MAIN = f"< main ({_FILE}:40)"


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("stack", [f"load ({_FILE}:3) {_MAIN}", f"forward (/job/model.py:7) {_MAIN}", "no stack"]),
        ("function", ["load", "forward", "no stack"]),
        ("file", ["/job/train.py", "/job/model.py", "no stack"]),
    ],
)
def test_stacks_group_by_lines_outside_of_libraries(by: str, names: list[str]) -> None:
    run = told_run()
    groups = groups_of(run, by)
    assert groups is not None
    assert [name for name, _, _ in bytes_at(run, 2, groups)] == names


def test_the_first_rule_that_is_found_names_a_block() -> None:
    run = told_run()
    rules = [("model", r"model\.py"), ("the loop", "main$"), ("rest", "^work")]
    groups = groups_of(run, "rule", rules)
    assert groups is not None
    found = [(name, nbytes) for name, nbytes, _ in bytes_at(run, 2, groups)]
    assert found == [("the loop", 4 * MIB), ("model", 2 * MIB), ("rest", MIB)]
    assert groups_of(run, "rule", [("none", "nothing")]) is not None


def test_phases_group_blocks_by_the_innermost_at_their_allocation() -> None:
    run = phased(Phase("step", 0, 5), Phase("forward", 1, 2, 1), Phase("late", 2, 4, 1))
    groups = groups_of(run, "phase")
    assert groups is not None
    assert [groups.names[n] for n in groups.of] == ["step", "step / forward", "step / late"]
    assert [phase_at(run, event) for event in (1, 4)] == ["step / forward", "step"]
    assert phase_at(told_run(), 4) == ""


def test_the_table_of_phases_has_peaks_and_growths() -> None:
    run = phased(Phase("first", 0, 2), Phase("second", 2, 4), Phase("first", 4, 5))
    rows = [(row.name, row.times, row.peak, row.at, row.growth) for row in phase_table(run)]
    assert rows == [("first", 2, 6 * MIB, 1, 6 * MIB), ("second", 1, 7 * MIB, 2, -MIB)]


def test_phases_without_events_hold_the_bytes_that_are_live_then() -> None:
    empty = phase_table(phased(Phase("begin", 0, 0), Phase("end", 5, 5)))
    assert [(row.peak, row.growth) for row in empty] == [(0, 0), (4 * MIB, 0)]


def test_overlapping_phases_stand_beside_each_other() -> None:
    run = phased(Phase("one", 0, 3), Phase("other", 2, 5, 1))
    assert [row.name for row in phase_table(run)] == ["one", "other"]


def test_categories_group_blocks() -> None:
    assert groups_of(told_run(), "category") is None
    names = "parameters", "other"
    run = with_details(told_run(), category=np.array([0, 1, 1], np.int32), categories=names)
    groups = groups_of(run, "category")
    assert groups is not None
    assert bytes_at(run, 2, groups) == [("parameters", 4 * MIB, 1), ("other", 3 * MIB, 2)]


def test_groupings_that_a_trace_lacks_are_none() -> None:
    bare = Trace(action=[0], block=[0], size=[8], stream=[0], time_us=[0])
    assert [groups_of(bare, by) for by in GROUPINGS] == [None] * len(GROUPINGS)


def test_unknown_groupings_and_rules_are_refused() -> None:
    with pytest.raises(ConfigError, match="invalid grouping = 'colour': expected owner"):
        groups_of(told_run(), "colour")
    with pytest.raises(ConfigError, match=r"invalid rule 'bad': .* is not a regular expression"):
        groups_of(told_run(), "rule", [("bad", "(")])


def test_stacks_of_native_frames_alone_are_named_by_operators() -> None:
    names = (
        "torch::unwind::unwind()",
        "c10::cuda::CUDACachingAllocator::allocate(unsigned long)",
        "at::_ops::nll_loss_backward::redispatch(c10::DispatchKeySet, at::Tensor const&)",
        "at::_ops::nll_loss_backward::call(at::Tensor const&)",
        "torch::autograd::generated::NllLossBackward0::apply(std::vector<at::Tensor>&&)",
    )
    frames = tuple(("??", 0, name) for name in names)
    assert own_frames(frames) == (("", 0, "nll_loss_backward"), ("", 0, "NllLossBackward0"))
    assert own_frames(frames[:2]) == frames[:2]
    line = ("/job/train.py", 3, "main")
    assert own_frames((*frames, line)) == (line,)


def test_frames_of_a_prediction_do_not_own_what_a_backward_pass_allocates():
    frames = (
        ("/env/site-packages/torch/_ops.py", 916, "OpOverload.__call__"),
        ("/env/site-packages/gpumem/prediction/child/_values.py", 187, "Values.dispatch"),
        ("/env/site-packages/torch/_dynamo/eval_frame.py", 1548, "_fn"),
    )
    line = ("train.py", 7, "step")
    assert owner_named(None, frames, "PyTorch") == "torch"
    assert own_frames((*frames, line)) == (line,)
    of_a_library = ("/job/gpumem/train.py", 7, "step")
    assert own_frames((*frames, of_a_library)) == (*frames, of_a_library)


def test_owner_is_the_line_of_the_program_that_calls_a_library():
    library = ("/lib/site-packages/transformers/trainer.py", 9, "step")
    for file in ("/job/train.py", "<stdin>"):
        assert owner_named("", (library, (file, 3, "main")), "PyTorch") == f"main ({file}:3)"
    assert owner_named("", (library,), "PyTorch") == f"step ({library[0]}:9)"
    assert owner_named("", (("/lib/libtorch.so", 0, "f"),), "", "PyTorch") == "PyTorch"
    assert owner_named("weights", (library,)) == "weights"
