"""Categories of blocks, by recorded purposes, lives and phases."""

from __future__ import annotations

import pytest

from gpumem._events.refusals import RefusedRequest
from gpumem.traces import Trace, TraceBuilder
from gpumem.traces.groups import groups_of

NN = (("/lib/torch/nn/modules/linear.py", 9, "forward"), ("/job/train.py", 3, "main"))
LOOP = ("/job/train.py", 3, "main")
DDP = (("/lib/torch/nn/parallel/distributed.py", 9, "_rebuild_buckets"), *NN[1:])


def run_of(program: str, nbytes: int = 100, *, of_torch: bool = True) -> Trace:
    """Make a trace of words: ``+a`` allocates a block a, ``-a`` frees it, ``(x`` begins phase x.

    ``)x`` ends it, ``a=c`` tells the category of a, ``!a`` allocates it by a line of DDP, ``?``
    is a refused request.
    """
    builder = TraceBuilder(of_torch=of_torch)
    address = {}
    for word in program.split():
        first, name = word[0], word[1:].replace("_", " ")
        if first in "+!":
            address[name] = 4096 * (len(builder) + 1)
            frames = DDP if first == "!" else NN
            builder.alloc(word, address[name], nbytes, 0, 0, "", frames)
        elif first == "-":
            builder.free_completed(word, address[name], 0, 0, 0)
        elif first == "?":
            builder.refuse(RefusedRequest(nbytes))
        elif first == "(":
            builder.phase_begin(name, name)
        elif first == ")":
            builder.phase_end(name, name)
        else:
            block, _, category = word.replace("_", " ").partition("=")
            builder.categorize(address[block], category)
    return builder.trace("program", {})


def told(program: str, nbytes: int = 100) -> str:
    """Return the categories of a program's blocks, in the order of their allocations."""
    details = run_of(program, nbytes).details
    assert details is not None
    assert details.category is not None
    return ", ".join(details.categories[number] for number in details.category)


def test_a_training_step_has_all_purposes_of_blocks() -> None:
    step = "+x (forward +a +t -t +out )forward +loss (backward +g +t -t -a )backward"
    found = told(f"+w w=parameters {step} (optimizer +s +t -t )optimizer -x -out -loss")
    assert found == (
        "parameters, inputs, activations, temporaries, outputs, outputs, gradients, temporaries, "
        "optimizer state, temporaries"
    )


def test_recorded_purposes_precede_lives() -> None:
    found = told("+x x=inputs (forward +w w=parameters w=inputs )forward (backward -w )backward")
    assert found == "inputs, parameters"


def test_blocks_of_a_forward_pass_are_not_inputs_of_the_next() -> None:
    assert told("(forward +a )forward (forward a=inputs )forward (backward -a )backward") == (
        "activations"
    )


def test_a_part_that_is_computed_again_makes_activations() -> None:
    assert told("(forward )forward (backward (forward +a +t -t )forward -a )backward") == (
        "activations, temporaries"
    )


def test_outputs_of_inference_outlive_their_forward_pass() -> None:
    assert told("(forward +t -t +cache )forward (forward -cache +new )forward") == (
        "temporaries, outputs, outputs"
    )


def test_blocks_before_the_passes_that_stay_are_other() -> None:
    assert told("+static (forward )forward (backward )backward +late") == "other, other"


def test_passes_of_pytorchs_own_names_count() -> None:
    step = "(##_forward_## +a )##_forward_## (##_backward_## -a )##_backward_##"
    zero = "(Optimizer.zero_grad#SGD.zero_grad +t )Optimizer.zero_grad#SGD.zero_grad"
    found = told(f"{step} (Optimizer.step#SGD.step +s )Optimizer.step#SGD.step {zero}")
    assert found == "activations, optimizer state, other"


def test_without_passes_only_recorded_purposes_are_known() -> None:
    assert told("+a a=inputs (load +b -b )load") == "inputs, other"
    details = run_of("+a (load +b -b )load").details
    assert details is not None
    assert details.category is None


def test_the_first_block_of_cublas_size_that_stays_is_its_workspace() -> None:
    step = "(forward +c +d )forward (backward +e +f )backward"
    assert told(step, 8_519_680) == "workspaces, outputs, workspaces, gradients"


def test_the_first_block_of_cublaslt_size_that_a_forward_pass_keeps_is_its_workspace() -> None:
    step = "(forward +c +d )forward (backward +g (forward +e +f )forward +h )backward"
    expected = "workspaces, outputs, gradients, workspaces, gradients, gradients"
    assert told(step, 1 << 20) == expected


def test_lines_of_pytorch_for_several_processes_allocate_for_communication() -> None:
    assert told("(forward !buckets +a )forward") == "communication, outputs"


def test_traces_without_phases_and_purposes_have_no_categories() -> None:
    details = run_of("+a -a").details
    assert details is not None
    assert details.category is None


def test_modules_are_told_or_known_by_the_functions_forward_of_a_stack() -> None:
    builder = TraceBuilder()
    module = ("nn.py", 1, "Linear.forward"), ("a.py", 2, "make.<locals>.Net.forward")
    stack = (*module, ("wrap.py", 3, "in_float32.<locals>.forward"), LOOP)
    for number, frames in enumerate((stack, (LOOP,), ()), start=1):
        builder.alloc("", 4096 * number, 100, 0, 0, "", frames)
    builder.categorize(4096 * 3, "gradients", "Net / Norm")
    builder.categorize(4096 * 3, "inputs", "Other")
    groups = groups_of(builder.trace("modules", {}), "module")
    assert groups is not None
    assert [groups.names[number] for number in groups.of] == [
        "Net / Linear",
        "no module",
        "Net / Norm",
    ]


def test_steps_begin_where_an_optimizer_has_ended_and_a_forward_pass_follows() -> None:
    step = "(forward +a )forward (backward -a )backward (optimizer +s )optimizer +x -x "
    assert run_of(f"+w {step * 3}").step_start.tolist() == [1, 4, 9]
    assert run_of("(forward +a )forward (forward +b )forward").step_start.size == 0


def test_names_of_phases_tell_no_purposes_where_neither_pytorch_nor_the_program_tells_one() -> None:
    step = "(forward +a )forward (backward -a )backward"
    details = run_of(step, of_torch=False).details
    assert details is not None
    assert details.category is None
    told_one = run_of(f"+w w=parameters {step}", of_torch=False).details
    assert told_one is not None
    assert told_one.category is not None
    assert [told_one.categories[n] for n in told_one.category] == ["parameters", "activations"]


STEP = "(forward +a )forward (backward -a )backward"


@pytest.mark.parametrize(
    ("program", "last"),
    [
        ("(forward +b )forward (backward ? )backward -b", "activations"),
        ("(forward +b )forward (backward +t -t ? )backward -b", "activations, temporaries"),
        (f"{STEP} (forward +b ? )forward -b", "activations, activations"),
        (f"{STEP} (forward +b )forward ? -b", "activations, activations"),
        (f"{STEP} (forward +b )forward ? -b {STEP}", "activations, activations, activations"),
        ("(forward +b )forward ? -b", "activations"),
        ("(forward +t -t +b ? )forward -b", "temporaries, activations"),
        ("(forward +cache )forward (forward +b ? )forward", "outputs, activations"),
        (f"(forward +b )forward {STEP} -b ?", "outputs, activations"),
    ],
)
def test_a_refused_request_that_interrupts_a_step_leaves_its_activations(
    program: str, last: str
) -> None:
    assert told(program) == last
