"""Tensors that autograd saves, moved to the host: values on the CPU, peaks over the null CUDA.

On the CPU a stand-in for the mover copies at once, so that values are compared bit by bit.
"""

import gc
import math
import sys
import threading
import time
import weakref

import pytest
from helpers.child import program as run_program
from prediction.null_cuda import environment, over_null_cuda

from gpumem.integrations.torch import _build

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from helpers.saved_programs import PROGRAMS, MovesAll, chunks  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from gpumem.integrations.torch import _offload  # noqa: E402
from gpumem.integrations.torch._offload import Offload  # noqa: E402
from gpumem.integrations.torch._offload.host import HostMemory  # noqa: E402


class CpuMover:
    """Moves CPU tensors; a program that reads one before it is awaited reads zeros."""

    device = torch.device("cpu")
    sees_peaks = False

    def __init__(self):
        self.room = 1 << 40
        self.host = HostMemory(self.slab)
        self.ends = self.releases = 0
        self.released = []  # ends of copies
        self.stream, self.uses = "main", []
        self.copies = 0  # the number of each is its end

    def live(self):
        return 1000, 1000, 0

    def slab(self, nbytes):
        if nbytes > self.room:
            return None
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def require_no_capture(self):
        pass

    def current_stream(self):
        return self.stream

    def note_use(self, tensor, stream):
        self.uses.append((tensor.nbytes, stream))

    def copy_out(self, pieces, flat, first, last, stream):
        for begin, end, view in self.host.views(pieces, first, last):
            view.copy_(flat[begin:end])
        self.copies += 1
        return self.copies

    def release(self, flat, end, stream):
        self.releases += 1
        self.released.append(end)

    def bring(self, pieces, nbytes, first, last, *, at_once):
        flat = torch.zeros(nbytes, dtype=torch.uint8)

        def end():
            for begin, end, view in self.host.views(pieces, first, last):
                flat[begin:end].copy_(view)

        return flat, end, None

    def wait(self, flat, end, stream):
        end()
        self.ends += 1
        return Now(), Now()

    def drop(self, end, stream):
        self.ends += 1


class Now:
    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 0.0


@pytest.fixture
def offload():
    """A context that moves all it can: the limit is below what is live."""
    made = Offload(torch, CpuMover(), 1, 1)
    yield made
    gc.collect()
    assert not made._records
    assert made._planner.out == 0


def gradients(program, context=None):
    torch.manual_seed(0)
    x = torch.randn(6, 8, requires_grad=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    if context is None:
        loss = program(x, model)
    else:
        with context:
            loss = program(x, model)
    loss.backward()
    return [x.grad, *(each.grad for each in model.parameters())]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
def test_gradients_have_the_same_bits(program, offload):
    expected = gradients(program)
    for _ in range(3):
        found = gradients(program, offload)
        assert all(
            (a is None and b is None) or torch.equal(a, b)
            for a, b in zip(expected, found, strict=True)
        )
    assert offload.report().moved > 0


def test_parameters_buffers_and_their_views_stay(offload):
    weight = torch.nn.Parameter(torch.ones(8, 8), requires_grad=False)
    norm = torch.nn.BatchNorm1d(8).eval()
    with offload:
        x = torch.ones(4, 8, requires_grad=True)
        y = x @ weight.t()
        norm(y)
    assert offload.report().moved == y.nbytes


def test_parameters_of_a_replica_of_data_parallel_stay(offload):
    layer = torch.nn.Linear(8, 8)
    replica = layer._replicate_for_data_parallel()
    replica._former_parameters = {name: each * 1 for name, each in layer.named_parameters()}
    for name, each in replica._former_parameters.items():
        setattr(replica, name, each)
    with offload:
        x = torch.ones(4, 8, requires_grad=True) * 2
        y = replica(x)
    assert offload.report().moved == x.nbytes
    y.sum().backward()


def test_several_views_of_one_storage_move_once(offload):
    with offload:
        y = torch.ones(4, 8, requires_grad=True) * 2
        held = [y[1:3] * y[1:3], y.t() * y.t(), y[2:] * y[2:]]
    assert offload.report().moved == y.nbytes
    del held


def test_change_in_place_is_an_error_as_without():
    # PyTorch keeps what a graph has saved if unpacking raises, so that nothing is freed here.
    with Offload(torch, CpuMover(), 1, 1):
        y = torch.ones(4, requires_grad=True) * 2
        loss = y.exp().square().sum() + (y * y).sum()
    with torch.no_grad():
        y.view(2, 2).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_graph_can_be_used_again_and_differentiated_twice(offload):
    x = torch.linspace(0, 1, 8, requires_grad=True)
    with offload:
        y = (x.exp() * x.sin()).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(y, x)
    z = (x.exp() * x.sin()).sum()
    (f,) = torch.autograd.grad(z, x, create_graph=True)
    (s,) = torch.autograd.grad(f.square().sum(), x)
    assert torch.equal(first, f)
    assert torch.equal(second, s)
    assert torch.equal(again, f)


def test_exception_between_the_passes_frees_all(offload):
    def fail():
        with offload:
            y = (torch.ones(4, 8, requires_grad=True) * 2).exp()
            assert y.grad_fn is not None
            assert offload._records
            raise KeyError

    with pytest.raises(KeyError):
        fail()


def test_brought_ahead_and_never_needed_is_awaited_by_its_memory(offload):
    with offload:
        x = torch.ones(4, 8, requires_grad=True)
        y = x
        for _ in range(6):
            y = (y * 1.5).sin()
        torch.autograd.grad(y.sum(), x)
        del y
    gc.collect()
    assert offload.report().brought == offload._mover.ends * x.nbytes


def test_storages_that_need_not_leave_are_not_brought_back():
    made = Offload(torch, CpuMover(), 1 << 40, 1)
    made._planner = MovesAll(1 << 40)
    assert all(map(torch.equal, gradients(chunks), gradients(chunks, made)))
    report = made.report()
    assert report.moved > report.brought == 0
    gc.collect()
    assert made._mover.releases > 0
    assert (made._planner.leaving, made._planner.out) == (0, 0)


def test_stream_that_saves_a_storage_of_another_one_is_done_before_its_memory_is_reused(offload):
    x = torch.ones(4, 8, requires_grad=True)
    with offload:
        y = x.exp()  # saves its result
        offload._mover.stream = "side"
        z = y * y
        z.sin()
    assert offload._mover.uses == [(y.nbytes, "side")] * 2


def test_storages_that_stay_leave_before_a_request_is_refused():
    made = Offload(torch, CpuMover(), 1 << 40, 1)
    x = torch.linspace(0, 1, 64, requires_grad=True)
    (expected,) = torch.autograd.grad((x * 2).sin().exp().sum(), x)
    with made:
        held = x * 2  # by the program, too: its memory cannot be freed
        y = held.sin().exp().sum()
    assert made.report().moved == 0
    assert made._relieve(1) == held.nbytes
    assert made._relieve(1 << 40) == 0
    assert made._planner.out == made.report().moved == 2 * held.nbytes
    assert torch.equal(torch.autograd.grad(y, x)[0], expected)
    assert made.report().brought == held.nbytes


def test_storages_that_came_back_early_leave_again_before_a_request_is_refused():
    x = torch.linspace(0, 1, 64, requires_grad=True)

    def run(nbytes):
        made = Offload(torch, CpuMover(), 1 << 40, 1)
        made._planner = MovesAll(1 << 40)
        made._planner.frees = True
        y, released = x, []
        with made:
            for i in range(8):
                y = (y * 1.5).sin()
                if i == 4:
                    y.register_hook(lambda gradient: released.append(made._relieve(nbytes)))
            y = y.sum()
        (gradient,) = torch.autograd.grad(y, x)
        del y
        gc.collect()
        assert made._planner.out == 0
        return gradient, released[0], made.report().brought

    gradient, nothing, brought = run(0)
    again, released, more = run(1 << 40)
    assert torch.equal(gradient, again)
    assert nothing == 0 < released == more - brought


def moving_all(limit=1 << 40):
    """Return a context that moves all, and has followed a step of three storages."""
    made = Offload(torch, CpuMover(), limit, 1)
    made._planner = MovesAll(limit)
    with made:
        losses = [(torch.ones(64, requires_grad=True) * 2).sin() for _ in range(3)]
    sum(losses).sum().backward()
    return made


def test_storages_that_move_stay_where_they_are_while_their_memory_is_not_needed():
    made = moving_all()
    copies, released = made._mover.copies, list(made._mover.released)
    with made:
        loss = sum((torch.ones(64, requires_grad=True) * 2).sin() for _ in range(3)).sum()
    assert made._mover.copies == copies + 3
    assert made._mover.released == released
    brought = made.report().brought
    loss.backward()
    assert made.report().brought == brought


def test_forward_passes_without_a_backward_pass_are_no_part_of_the_next_step(offload):
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])

    def forward():
        with offload:
            return model(torch.ones(4, 8)).sin().sum()

    forward().backward()
    items = len(offload._planner.step.items)
    for _ in range(5):
        loss = forward()  # the one before it ends here, as a batch that was skipped does
    del loss
    forward().backward()
    assert offload._planner.plan is not None
    assert len(offload._planner.step.items) == items > 1


def test_report_says_what_stayed_since_no_more_memory_could_be_pinned(offload):
    offload._mover.room = 0
    with offload:
        loss = (torch.ones(256, requires_grad=True) * 2).sin().sum()
    assert str(offload.report()).endswith("; 1.0 KiB stayed, as no more memory could be pinned")
    del loss


def test_batch_of_a_data_set_on_the_gpu_stays(offload):
    data = torch.ones(64, 8)
    weight = torch.ones(8, 8, requires_grad=True)
    with offload:
        y = data[8:12] @ weight
    assert offload.report().moved == 0
    with offload:
        z = data[8:40] @ weight  # half of it
    assert offload.report().moved == data.nbytes
    (y.sum() + z.sum()).backward()


class Masked(torch.autograd.Function):
    """Multiplies by a saved mask, after `between` has run with it in the backward pass."""

    @staticmethod
    def forward(ctx, x, mask, between):
        ctx.save_for_backward(mask)
        ctx.between = between
        return x * mask

    @staticmethod
    def backward(ctx, gradient):
        (mask,) = ctx.saved_tensors
        ctx.between(mask)
        return gradient * mask, None, None


def test_tensor_that_a_node_holds_keeps_its_memory_where_a_request_is_refused():
    made = Offload(torch, CpuMover(), 1 << 40, 1)
    x = torch.ones(64, requires_grad=True)
    with made:
        mask = torch.ones(64) * 2
        y = Masked.apply(x, mask, lambda held: made._relieve(1 << 30))
        del mask
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((64,), 2.0))


@pytest.mark.parametrize("limit", [1, 1 << 40], ids=["moves", "stays"])
def test_saved_tensor_that_a_backward_pass_changes_raises_pytorchs_error(limit):
    made = Offload(torch, CpuMover(), limit, 1)
    x = torch.ones(64, requires_grad=True)
    with made:
        y = x * 2
        y = y.sin() + Masked.apply(y, y.detach(), lambda held: held.mul_(100))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_hooks_of_modules_stay_where_a_context_is_entered_again(offload):
    # torch.compile compiles anew where there are others.
    modules = torch.nn.modules.module
    with offload:
        hooks = [*modules._global_forward_pre_hooks], [*modules._global_forward_hooks]
    with offload:
        assert hooks == ([*modules._global_forward_pre_hooks], [*modules._global_forward_hooks])


def test_context_that_begins_with_a_call_is_told_of_it_once(offload, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(_offload, "_enter_in_replicas", lambda *given: None)
    while _offload._handles:  # as a process begins
        _offload._handles.pop().remove()
    _offload.begin_at_first_call(torch, lambda: offload)
    with Offload(torch, CpuMover(), 1, 1):  # of the program itself
        pass
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid())
    model(torch.ones(4, 8)).sum().backward()
    paths = [*offload._inside.paths]
    offload.__exit__()
    assert list(offload.report().modules) == ["0", "1"]
    assert paths == []  # those of modules that are being called


def test_copies_that_were_awaited_do_not_pile_up_without_a_report(offload):
    x = torch.ones(64, requires_grad=True)
    for _ in range(600):
        with offload:
            y = x
            for _ in range(10):
                y = (y * 2).sin()
        y.sum().backward()
    assert 0 < len(offload._waits) < 4200
    assert offload.report().hidden == offload.report().brought > 0


def zero():
    return (torch.ones(64, requires_grad=True) * torch._efficientzerotensor((64,))).sum()


def nested():
    made = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
    return torch.nn.Linear(8, 8)(made).relu().to_padded_tensor(0).sum()


def vmapped():
    models = [torch.nn.Linear(8, 8) for _ in range(2)]
    parameters, _ = torch.func.stack_module_state(models)
    call = lambda each: torch.func.functional_call(models[0], each, (torch.ones(4, 8),))  # noqa: E731
    return torch.func.vmap(call)(parameters).sum()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("program", [zero, nested, vmapped], ids=lambda each: each.__name__)
def test_tensors_that_cannot_move_stay(program, offload):
    torch.manual_seed(0)
    expected = program()
    torch.manual_seed(0)
    with offload:
        found = program()
    found.backward()
    assert torch.equal(expected, found)


def test_keyword_tensor_that_a_checkpointed_layer_changes_stays_its_own(offload):
    counts = torch.zeros(1)

    def layer(x, *, counts):
        counts.add_(1)
        return x.sin()

    x = torch.ones(64, requires_grad=True)
    with offload:
        y = checkpoint(layer, x * 2, use_reentrant=False, counts=counts)
    y.sum().backward()
    assert (float(counts), float(x.grad[0])) == (2, pytest.approx(2 * math.cos(2)))


def made_for(limit):
    CpuMover.device = torch.device("cuda", 0)
    try:
        return _offload.context(torch, CpuMover(), limit, 1000, 1)
    finally:
        CpuMover.device = torch.device("cpu")


def test_context_that_is_entered_is_found_beside_a_second_one(monkeypatch):
    monkeypatch.setattr(_offload, "_offloads", {})
    first = made_for(500)
    with first:
        second = made_for(500)
        assert second is not first
        assert [*_offload._offloads.values()] == [first, second]
        assert made_for(500) is second
    assert made_for(500) is first


def test_few_contexts_are_kept_of_limits_that_vary(monkeypatch):
    monkeypatch.setattr(_offload, "_offloads", {})
    last = [made_for(limit) for limit in range(1, 21)][-1]
    assert len(_offload._offloads) <= 5
    assert made_for(20) is last


def test_contexts_end_with_the_process_while_pytorch_is_still_there(monkeypatch):
    contexts = {0: Offload(torch, CpuMover(), 1000, 1)}
    monkeypatch.setattr(_offload, "_offloads", contexts)
    context = weakref.ref(contexts[0])
    _offload._end_backward()
    gc.collect()
    assert context() is None


def test_bytes_that_the_program_holds_do_not_count_as_freed_for_a_refused_request():
    mover = CpuMover()
    mover.sees_peaks = True
    mover.live = lambda: (900, 900, 0)
    mover.allocated = lambda: 900
    made = Offload(torch, mover, 1000, 1)
    made._planner = MovesAll(1000, sees_peaks=True)
    with made:
        held = torch.ones(20, requires_grad=True) * 2
        loss = held.sin()
    before = made._planner.margin
    assert made._relieve(90) == held.nbytes
    assert made._planner.margin == before + 10 - before // 2
    del loss


def test_request_that_one_context_meets_is_none_of_the_next_one(monkeypatch):
    made = [Offload(torch, CpuMover(), 1000, 1) for _ in range(2)]
    asked = []
    for each in made:
        each._mover.device = torch.device("cuda", 0)
        each._relieve = lambda nbytes: asked.append(nbytes) or 50
    monkeypatch.setattr(_offload, "_offloads", dict(enumerate(made)))
    assert _offload._relieve(0, 40) == 50
    assert asked == [40]
    assert _offload._relieve(0, 100) == 100
    assert asked == [40, 100, 50]


def test_storage_that_is_saved_while_its_record_ends_has_a_new_one(offload):
    tensor = torch.randn(64)
    last = [offload._pack(tensor)]
    with offload._lock:
        ending = threading.Thread(target=last.clear)
        ending.start()
        time.sleep(0.2)  # the end of the record waits for the lock
        saved = offload._pack(tensor)
    ending.join()
    expected = tensor.clone()
    del tensor
    gc.collect()
    other = offload._pack(torch.full((64,), 7.0))  # takes any pieces that are free
    assert torch.equal(offload._unpack(saved), expected)
    del saved, other


def test_highest_bytes_after_a_point_are_those_after_the_blocks_that_it_frees():
    mover, asked = CpuMover(), []
    mover.sees_peaks = True
    made = Offload(torch, mover, 100, 1)
    made._mover.live = lambda: asked.append(made._planner.out) or (1000, 1000, 0)
    with made:
        y = torch.ones(4, 8, requires_grad=True).exp()
        y = y.exp()  # frees the first block at its own point
        assert asked[-2:] == [0, made._planner.out]
        assert made._planner.out_before == made._planner.out > 0
        y.sum().backward()


def test_refused_host_memory_leaves_the_tensor_where_it_is(offload):
    offload._mover.room = 0
    assert all(map(torch.equal, gradients(chunks), gradients(chunks, offload)))
    report = offload.report()
    assert report.moved == 0
    assert report.refused > 0


def test_storage_that_cannot_come_back_early_comes_when_it_is_needed(offload):
    bring, refused = offload._mover.bring, []

    def refuse_at_once(pieces, nbytes, first, last, *, at_once):
        if at_once:
            refused.append(nbytes)
            raise torch.OutOfMemoryError
        return bring(pieces, nbytes, first, last, at_once=False)

    offload._mover.bring = refuse_at_once
    expected = gradients(chunks)
    for _ in range(2):  # the first one has no plan that brings anything early
        assert all(map(torch.equal, expected, gradients(chunks, offload)))
    assert sum(refused) > offload.report().brought > 0


def test_backward_passes_of_several_threads(offload):
    x = torch.randn(16, 16, requires_grad=True)

    def loss():
        return (x.sin() * x.exp()).square().sum()

    with offload:
        losses = [loss() for _ in range(8)]
    found = [None] * 8

    def run(i):
        (found[i],) = torch.autograd.grad(losses[i], x)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    (expected,) = torch.autograd.grad(loss(), x)
    assert all(torch.equal(each, expected) for each in found)
    losses.clear()


def test_report_names_modules_and_skipped_tensors(offload):
    class Tagged(torch.Tensor):
        pass

    with offload:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid())
        (model(torch.ones(4, 8) * 2) * torch.ones(4, 8).as_subclass(Tagged)).sum()
    report = offload.report()
    assert {"0", "1"} <= set(report.modules)
    assert report.skipped == {"subclass": 1}
    assert "moved" in str(report)


# ---- over the null CUDA --------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(
    not torch.version.cuda or bool(_build.why_not_compiled(torch)),
    reason="PyTorch was built without CUDA, or gpumem's allocator cannot be compiled",
)

SCRIPT = """
import gc, torch
from gpumem import errors
from gpumem.integrations import torch as integration
model = torch.nn.Sequential(*[
    torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Tanh()) for _ in range(16)
]).cuda()
def step(rows=4096, context=None):
    torch.cuda.reset_peak_memory_stats()
    x = torch.ones(rows, 1024, device="cuda")
    if context is None:
        loss = model(x).sum()
    else:
        with context:
            loss = model(x).sum()
    del x
    loss.backward()
    model.zero_grad(set_to_none=False)
    return torch.cuda.max_memory_allocated() / MIB
for _ in range(2):
    native = step()
base = torch.cuda.memory_allocated() / MIB
limit = int(base + 0.6 * (native - base))
"""


@needs_cuda
def test_steps_stay_below_the_limit_and_move_only_what_they_must():
    said = over_null_cuda(
        SCRIPT
        + """
moving = integration.offload(limit=f"{limit}MiB")
peaks, moved = [], []
for _ in range(5):
    before = moving.report().moved
    peaks.append(step(context=moving))
    moved.append((moving.report().moved - before) / MIB)
print(all(peak <= limit for peak in peaks), moved[0] > 0)
print(abs(moved[-1] - moved[-2]) <= 16, moved[-1] <= 1.5 * (native - limit))
gc.collect()
print(torch.cuda.memory_allocated() / MIB == base, moving._planner.out)
# Host memory is that of the storages that were there at once.
host = moving._mover.host
host.begin_step()
pinned = integration.status().pinned.stats()
print(host.used, host.held <= pinned.max_reserved <= 1.02 * max(moved) * MIB)
"""
    )
    assert said.splitlines() == ["True True", "True True", "True 0", "0 True"], said


@needs_cuda
def test_peaks_that_pytorch_tells_are_those_of_all_time():
    said = over_null_cuda(
        """
import torch
from gpumem.integrations import torch as integration
integration.enable(mode="full")
moving = integration.offload("1GiB")
held = torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
for _ in range(2):  # the mover is told those since the last time
    live = [nbytes >> 20 for nbytes in moving._mover.live()]
    print(live, torch.cuda.max_memory_allocated() >> 20)
torch.cuda.reset_peak_memory_stats()
print(torch.cuda.max_memory_allocated() >> 20)
"""
    )
    assert said.splitlines() == ["[4, 36, 0] 36", "[4, 4, 0] 36", "4"], said


@needs_cuda
def test_copy_that_need_not_come_back_yet_is_refused_without_a_garbage_collection():
    said = over_null_cuda(
        """
import gc, torch
from gpumem import Arena
from gpumem.integrations import torch as integration
integration.enable(Arena("cuda:0", max_mem="64MiB"), mode="full")
mover = integration.offload("32MiB")._mover
held = torch.empty(60 << 20, dtype=torch.uint8, device="cuda")
pieces = mover.host.allocate(16 << 20)
collected = []
gc.callbacks.append(lambda phase, info: collected.append(info["generation"]))
for at_once in (True, False):
    collected.clear()
    try:
        mover.bring(pieces, 16 << 20, 0, 16 << 20, at_once=at_once)
    except torch.OutOfMemoryError:
        print(2 in collected)
"""
    )
    assert said.splitlines() == ["False", "True"]


@needs_cuda
def test_request_that_no_step_had_moves_what_stays_instead_of_a_refusal():
    said = over_null_cuda(
        """
import torch
from gpumem import Arena
from gpumem.integrations import torch as integration
integration.enable(Arena("cuda:0", max_mem="128MiB"), mode="full")
moving = integration.offload("1GiB")
x = torch.ones(1 << 22, device="cuda", requires_grad=True)
with moving:
    y = (x * 2).sin().exp()
    print(moving.report().moved)
    more = torch.empty(21 << 20, device="cuda")
print(moving.report().moved >> 20, moving._planner.out >> 20)
del more
y.sum().backward()
print(moving.report().brought >> 20, moving._planner.out, x.grad.shape)
"""
    )
    # The program holds the result, which needs not come back.
    assert said.splitlines() == ["0", "32 32", "16 0 torch.Size([4194304])"], said


@needs_cuda
def test_many_steps_keep_no_more_memory_and_no_more_objects():
    said = over_null_cuda(
        SCRIPT
        + """
moving = integration.offload(limit=f"{limit}MiB")
counts = []
for steps in (20, 980):
    for _ in range(steps):
        step(context=moving)
    moving.report()
    gc.collect()
    host, pinned = moving._mover.host, integration.status().pinned.stats()
    counts.append((torch.cuda.memory_allocated(), host.held, pinned.reserved, len(host._free),
                   len(moving._records), len(moving._waits), len(moving._planner._steps)))
    objects = len(gc.get_objects())
    counts[-1] += (objects - (objects if steps == 20 else before),)
    before = objects
print(moving.report().moved > 1000 * MIB, *map(int.__sub__, counts[1], counts[0]))
"""
    )
    moved, *growth, objects = said.split()
    assert moved == "True"
    assert growth == ["0"] * 7
    assert int(objects) < 100  # of 980 steps


@needs_cuda
def test_peak_of_the_host_is_owned_by_offload():
    said = over_null_cuda(
        SCRIPT
        + """
from gpumem import observe
integration.enable_pinned()
with observe.record() as recording:
    moving = integration.offload(limit=f"{limit}MiB")
    step(context=moving)
trace = recording.trace()
peak = observe.peak(trace)
print([(each.name, each.nbytes == moving._mover.host.held) for each in peak.groups["owner"]])
"""
    )
    assert said == "[('offload', True)]\n"


@needs_cuda
def test_nothing_moves_if_it_fits():
    said = over_null_cuda(
        SCRIPT
        + """
for _ in range(3):
    moving = integration.offload()
    step(context=moving)
print(moving.report().moved, moving is integration.offload())
"""
    )
    assert said == "0 True\n"


@needs_cuda
def test_shapes_that_change_stay_below_the_limit():
    said = over_null_cuda(
        SCRIPT
        + """
moving = integration.offload(limit=f"{limit}MiB")
print(all(step(rows, moving) <= limit for rows in (4096, 4096, 2048, 4096, 3584, 1024, 4096)))
"""
    )
    assert said == "True\n"


@needs_cuda
def test_host_limit_is_kept_and_capture_is_refused():
    said = over_null_cuda(
        SCRIPT
        + """
integration.enable_pinned(limit="64MiB")
moving = integration.offload(limit=f"{int(base + 0.5 * (native - base))}MiB")
step(context=moving)
report = moving.report()
print(report.moved <= 64 * MIB, report.refused > 0)
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    try:
        integration.offload()
    except errors.IntegrationError as error:
        print(error)
"""
    )
    counts, capture = said.splitlines()
    assert counts == "True True"
    assert "CUDA graph is captured" in capture


@needs_cuda
@pytest.mark.parametrize(
    ("options", "reentrant"),
    [
        (["--offload"], False),
        (["--max-mem", "400MiB", "--offload"], False),
        (["--max-mem", "400MiB", "--offload"], True),
    ],
)
def test_run_of_a_script_moves_inputs_of_recomputed_layers(tmp_path, options, reentrant):
    """The script needs more than 400 MiB. Nothing moves without a limit of the arena."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from torch.utils.checkpoint import checkpoint\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        layers = [torch.nn.Linear(1024, 1024) for _ in range(16)]\n"
        "        self.layers = torch.nn.ModuleList(layers)\n"
        "    def forward(self, x):\n"
        "        for each in self.layers:\n"
        f"            x = checkpoint(each, x, use_reentrant={reentrant})\n"
        "        return x\n"
        "net = Net().cuda()\n"
        "for _ in range(4):\n"
        "    x = torch.ones(4096, 1024, device='cuda', requires_grad=True)\n"
        "    net(x * 2).sum().backward()\n"
        "print(torch.cuda.max_memory_allocated() >> 20, flush=True)\n"
        # As `null_cuda.END` does, but with the report.
        "import atexit, os\n"
        "atexit._run_exitfuncs()\n"
        "os._exit(0)\n"
    )
    command = ("-m", "gpumem", "run", *options, script)
    done = run_program(sys.executable, *command, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    if len(options) > 1:  # the arena refuses what is above
        assert "offload: 0 B moved" not in done.stderr
    else:
        assert int(done.stdout) > 400
        assert "gpumem: offload: 0 B moved" in done.stderr


@needs_cuda
def test_run_of_a_script_moves_what_the_threads_of_data_parallel_save(tmp_path):
    """The script needs more than 600 MiB of each GPU. It has no NCCL."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from torch.nn.parallel import comm\n"
        "torch.cuda.nccl.is_available = lambda tensors: False\n"
        "def broadcast(tensors, devices, buffer_size=0):\n"
        "    return [[each.to(device) * 1 for each in tensors] for device in devices]\n"
        "comm.broadcast_coalesced = broadcast\n"
        "layers = [torch.nn.Linear(1024, 1024) for _ in range(16)]\n"
        "net = torch.nn.DataParallel(torch.nn.Sequential(*layers).cuda())\n"
        "for _ in range(4):\n"
        "    net(torch.ones(16384, 1024, device='cuda')).square().sum().backward()\n"
        "    net.zero_grad()\n"
        "import atexit, os\n"
        "atexit._run_exitfuncs()\n"
        "os._exit(0)\n"
    )
    command = ("-m", "gpumem", "run", "--max-mem", "600MiB", "--offload", script)
    done = run_program(sys.executable, *command, env=environment(tmp_path, 2))
    said = [each for each in done.stderr.splitlines() if "offload" in each]
    begins = [f"gpumem: offload on cuda:{i}: " for i in range(2)]
    # One line for each GPU, of the threads of all steps.
    assert len(said) == 2
    assert all(each.startswith(begin) for each, begin in zip(sorted(said), begins, strict=True))
