"""Gradients with saved tensors on the host, bit by bit those of the same program without `offload`.

The GPU is held back at the start of each step, so that the host has queued all of it before a copy
begins: a copy that waits for too little reads or writes bytes of something else.
"""

import gc
import os
import tempfile
import threading
import traceback
from contextlib import nullcontext

import pytest
import torch
from gpu.torch_programs.allocator import computed
from helpers import saved_programs
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from gpumem.errors import IntegrationError
from gpumem.integrations import torch as gpumem_torch

WIDTH = 1536
HELD_BACK = 20_000_000  # cycles of the GPU, about 10 ms


def inputs():
    torch.manual_seed(0)
    x = torch.randn(WIDTH, WIDTH, device="cuda", requires_grad=True)
    layers = nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
    return x, nn.Sequential(*layers).cuda()


def gradients_of(program):
    """Return a case of a program that returns a loss."""

    def case(context):
        x, model = inputs()
        with context:
            loss = program(x, model)
        loss.backward()
        return [x.grad, *(each.grad for each in model.parameters())]

    return case


def on_side_streams(x, model):
    main = torch.cuda.current_stream()
    total = x.new_zeros(())
    for _ in range(3):
        side = torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = model(x).exp()
            z = torch.tanh(y * 0.5) * y
        main.wait_stream(side)
        for each in (y, z):
            each.record_stream(main)
        total = total + (y * z).sum()
    return total


def on_a_side_stream_alone(context):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = gradients_of(saved_programs.address_used_again)(context)
    torch.cuda.current_stream().wait_stream(side)
    return found


def differentiated_twice(context):
    x, model = inputs()
    with context:
        y = model(x).sin().square().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(y, x)
    return [first, second, again]


def failed_between_the_passes(context):
    x, model = inputs()
    for fails in (True, False):
        try:
            with context:
                loss = model(x).exp().sum()
                if fails:
                    raise KeyError
        except KeyError:
            del loss
    loss.backward()
    return [x.grad]


def accumulated(context):
    x, model = inputs()
    for i in range(4):
        with context:
            loss = model(x * i).exp().mean()
            model(x + i).tanh()  # a branch without a backward pass
        loss.backward()
    return [x.grad, *(each.grad for each in model.parameters())]


def by_threads(context):
    x, model = inputs()
    with context:
        losses = [(model(x * i).exp() * x).sum() for i in range(6)]
    torch.cuda.synchronize()
    found = [None] * len(losses)

    def run(i):
        (found[i],) = torch.autograd.grad(losses[i], x)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(losses))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    torch.cuda.synchronize()
    return found


def on_the_cpu_too(x, model):
    y = model(x)
    return (y.cpu().exp().square().sum().to(x.device) + y.sin().square()).sum()


class Tagged(torch.Tensor):
    pass


def of_a_subclass(x, model):
    y = model(x).as_subclass(Tagged)
    return (y.exp() * y.sin()).as_subclass(torch.Tensor).sum()


def attention(x, model):
    q = model(x).bfloat16().view(4, WIDTH // 4, 12, -1).transpose(1, 2)
    return scaled_dot_product_attention(q, q * 2, q + 1, is_causal=True).float().square().sum()


def convolutions(context):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3), nn.GroupNorm(4, 32), nn.SiLU(), nn.Upsample(scale_factor=2),
        nn.Dropout(0.1), nn.Conv2d(32, 8, 1),
    ).cuda()  # fmt: skip
    x = torch.randn(8, 3, 200, 200, device="cuda")
    with context:
        loss = model(x).square().mean()
    loss.backward()
    return [each.grad for each in model.parameters()]


def compiled(context):
    x, model = inputs()
    both = torch.compile(nn.Sequential(model, nn.Tanh()))
    with context:
        loss = both(x).square().sum() + model(x).sin().sum()
    loss.backward()
    return [x.grad, *(each.grad for each in model.parameters())]


def sharded(context):
    """One rank of FSDP2: the shards are parameters, the gathered weights are not."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            x, model = inputs()
            for each in (model[0], model[2], model):
                fully_shard(each)
            for _ in range(2):
                with context:
                    loss = model(x * 2).exp().mean()
                loss.backward()
            return [x.grad, *(each.grad.to_local() for each in model.parameters())]
        finally:
            dist.destroy_process_group()


CASES = {each.__name__: gradients_of(each) for each in saved_programs.PROGRAMS}
CASES |= {
    each.__name__: gradients_of(each)
    for each in (on_side_streams, on_the_cpu_too, of_a_subclass, attention)
}
CASES |= {
    each.__name__: each
    for each in (
        on_a_side_stream_alone, differentiated_twice, failed_between_the_passes, accumulated,
        by_threads, convolutions, compiled, sharded,
    )
}  # fmt: skip


def moving_everything(limit):
    """Return a context in which each storage leaves, brought back ahead if the limit allows it."""
    made = gpumem_torch.offload(limit, min_bytes=4096)
    if not isinstance(made._planner, saved_programs.MovesAll):
        made._planner = saved_programs.MovesAll(
            made._planner.limit, sees_peaks=made._mover.sees_peaks
        )
        made._planner.frees = True
    return made


def same_bits(case):
    """Compare a case with itself, then three steps with offload; return what was moved."""
    expected = case(nullcontext())
    again = case(nullcontext())
    assert all(map(equal, expected, again)), "two runs without offload differ"
    for limit in ("1MiB", "100GiB"):
        context = moving_everything(limit)
        moved = context.report().moved
        for step in range(3):
            torch.cuda._sleep(HELD_BACK)
            found = case(context)
            assert all(map(equal, expected, found)), f"limit {limit}, step {step}"
        assert context.report().moved > moved
        del found
        gc.collect()
        assert not context._records
        assert context._planner.out == 0


def equal(a, b):
    if a is None or b is None:
        return a is b
    same = torch.equal(*(each.contiguous().view(torch.uint8) for each in (a, b)))
    return computed(same) == computed(True)


def changed_in_place():
    with moving_everything("1MiB"):
        y = torch.ones(1 << 20, device="cuda", requires_grad=True) * 2
        loss = y.exp().square().sum() + (y * y).sum()
    with torch.no_grad():
        y.view(2, -1).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def refused_host_memory():
    case = gradients_of(saved_programs.chunks)
    expected = case(nullcontext())
    context = moving_everything("1MiB")
    refused = context.report().refused
    context._mover.host.allocate = lambda nbytes: None
    try:
        assert all(map(equal, expected, case(context)))
    finally:
        del context._mover.host.allocate
    assert context.report().refused > refused


def counted():
    """Skipped tensors are counted, and weights do not move."""
    x, model = inputs()
    context = moving_everything("100GiB")
    before = context.report()
    moved, skipped = before.moved, dict(before.skipped)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with context:
        y = model[0](x)
        z = y.as_subclass(Tagged).sin().as_subclass(torch.Tensor).exp()
        w = y.cpu() * y.cpu()
    del w, y
    assert context.report().moved - moved <= z.nbytes
    counts = context.report().skipped
    assert counts["on cpu"] > skipped.get("on cpu", 0)
    assert counts["subclass"] > skipped.get("subclass", 0)


def captured():
    """A tensor that would move during a capture is refused; a graph made before replays."""
    x, model = inputs()
    context = moving_everything("1MiB")
    model(x)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(IntegrationError, match="captured"), torch.cuda.graph(graph), context:
        model(x).exp()
    with pytest.raises(IntegrationError, match="captured"):  # noqa: SIM117
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            gpumem_torch.offload("2MiB")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = model(x)
    with context, torch.no_grad():
        graph.replay()
        assert equal(y, model(x))


def report_adds_up():
    context = moving_everything("100GiB")
    gradients_of(saved_programs.address_used_again)(context)
    torch.cuda.synchronize()
    report = context.report()
    assert report.hidden + report.waited == report.brought > 0


OTHERS = (changed_in_place, refused_host_memory, counted, captured, report_adds_up)


def all_cases():
    """Return by case how it failed, or an empty text."""
    chosen = os.environ.get("GPUMEM_TEST_CASES", "")
    torch.zeros(1, device="cuda")
    said = {}
    for name, case in CASES.items() | {each.__name__: each for each in OTHERS}.items():
        if chosen and name not in chosen.split(","):
            continue
        try:
            case() if case in OTHERS else same_bits(case)
            torch.cuda.synchronize()
        except BaseException:
            said[name] = traceback.format_exc()[-1500:]
        else:
            said[name] = ""
        torch.cuda.empty_cache()
    return said
