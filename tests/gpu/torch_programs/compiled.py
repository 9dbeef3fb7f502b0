"""torch.compile in each mode, and what cuDNN chooses by measuring."""

import torch
import torch._dynamo
import torch._inductor.config as inductor
from gpu.torch_programs.allocator import digest
from torch import nn
from torch._dynamo.utils import counters


def model():
    torch.manual_seed(1)
    layers = (nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256))
    return nn.Sequential(*layers).cuda()


def batch(rows, seed):
    return torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed)).cuda()


def train(compiled, parameters, steps=8):
    optimizer = torch.optim.AdamW(parameters)
    losses = []
    for step in range(steps):
        torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        data = batch(64, step)
        loss = (compiled(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


def require_graphs():
    """Raise if something kept PyTorch from capturing graphs."""
    assert counters["inductor"]["cudagraph_skips"] == 0, dict(counters["inductor"])
    trees = torch._inductor.cudagraph_trees
    manager = trees.get_container(torch.cuda.current_device()).tree_manager
    assert manager is not None
    assert manager.new_graph_id().id > 0


def check_every_replay():
    """Let PyTorch compare the pool's live blocks with those that it knows, at each step."""
    inductor.triton.fast_path_cudagraph_asserts = True
    inductor.triton.slow_path_cudagraph_asserts = True


def default_mode():
    own = model()
    return train(torch.compile(own), own.parameters())


def reduce_overhead_inference():
    check_every_replay()
    own = model()
    compiled = torch.compile(own, mode="reduce-overhead")
    said = []
    with torch.no_grad():
        for step in range(9):
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(batch((32, 96)[step % 2], step))
            said.append(digest(out))
    require_graphs()
    return said


def reduce_overhead_training():
    check_every_replay()
    own = model()
    losses = train(torch.compile(own, mode="reduce-overhead"), own.parameters())
    require_graphs()
    return losses


def reduce_overhead_branches():
    """What follows a graph differs from step to step: its pool's state is restored for each."""
    check_every_replay()
    first, second, third = model(), model(), model()
    begin, left, right = (
        torch.compile(each, mode="reduce-overhead") for each in (first, second, third)
    )
    said = []
    with torch.no_grad():
        for step in range(12):
            torch.compiler.cudagraph_mark_step_begin()
            middle = begin(batch(48, step))
            kept = middle * 2  # of this step, outside of the graphs
            out = (left, right)[step // 3 % 2](middle)
            said.append(digest(out, kept))
            if step % 4 == 0:
                del middle
                said.append(digest(right(kept)))
    require_graphs()
    return said


def reduce_overhead_kept_output():
    """An output that outlives its step is refused or kept, but never overwritten in silence."""
    own = model()
    compiled = torch.compile(own, mode="reduce-overhead")
    with torch.no_grad():
        for step in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(batch(32, step))
        torch.compiler.cudagraph_mark_step_begin()
        kept = compiled(batch(32, 7))
        copy = kept.clone()
        torch.compiler.cudagraph_mark_step_begin()
        compiled(batch(32, 8))
        try:
            digest(kept)
        except RuntimeError as error:
            return [digest(copy), "overwritten" in str(error)]
    return [digest(copy), False]


def max_autotune_without_graphs():
    """What is chosen depends on times, so its result is compared with eager's, not bit for bit."""
    inductor.max_autotune_gemm_backends = "ATEN,TRITON"
    torch.manual_seed(1)
    own = nn.Linear(64, 64, dtype=torch.bfloat16).cuda()
    data = torch.randn(64, 64, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        compiled = torch.compile(own, mode="max-autotune-no-cudagraphs")
        torch.testing.assert_close(compiled(data), own(data), rtol=2e-2, atol=2e-2)
    return list(compiled(data).shape)


def cudnn_benchmark():
    """cuDNN measures its algorithms, with as much workspace as the allocator says it can get."""
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(1)
    own = nn.Sequential(nn.Conv2d(8, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 5)).cuda()
    exact = nn.Sequential(nn.Conv2d(8, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 5)).double()
    exact.load_state_dict(own.state_dict())
    for size in (32, 48, 32):
        data = torch.randn(4, 8, size, size)
        out = own(data.cuda())
        torch.testing.assert_close(out.cpu().double(), exact(data.double()), rtol=1e-3, atol=1e-4)
        out.sum().backward()
    return [list(parameter.grad.shape) for parameter in own.parameters()]
