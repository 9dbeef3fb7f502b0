"""Tensors for other processes, and from them."""

import gc
import os

import torch
import torch.multiprocessing as multiprocessing
from gpu.torch_programs.allocator import (
    CHOSEN,
    MIB,
    choose,
    choose_as_the_parent,
    digest,
    filled,
)
from torch.utils.data import DataLoader, Dataset

TIMEOUT = 90  # seconds


def use(given, answers, chosen):
    """In a child: read each tensor, write its number into it, and let go of all."""
    choose(chosen)
    number = 0
    while (tensor := given.get(timeout=TIMEOUT)) is not None:
        number += 1
        answers.put((digest(tensor), list(tensor.stride()), tensor.untyped_storage().nbytes()))
        tensor.fill_(number)
        torch.cuda.synchronize()
        answers.put("written")
        del tensor
        gc.collect()
    torch.cuda.ipc_collect()


class Child:
    """A process that runs `use`, over the parent's allocator if none is chosen."""

    def __init__(self, method="spawn", chosen=None):
        context = multiprocessing.get_context(method)
        self.given, self.answers = context.Queue(), context.Queue()
        self.process = context.Process(
            target=use, args=(self.given, self.answers, chosen or os.environ[CHOSEN])
        )
        self.process.start()

    def read(self, tensor):
        self.given.put(tensor)
        said = self.answers.get(timeout=TIMEOUT)
        assert self.answers.get(timeout=TIMEOUT) == "written"
        return said

    def end(self):
        self.given.put(None)
        self.process.join(TIMEOUT)
        return self.process.exitcode


def tensors_for_the_other_allocator():
    """A child over gpumem opens the tensors of PyTorch's own allocator, and the reverse."""
    other = "native" if os.environ[CHOSEN] == "full" else "full"
    return [exchanged(Child(method, other)) for method in ("spawn", "forkserver")]


def shared_tensors():
    """The child reads what the parent wrote, and writes what the parent reads."""
    return exchanged(Child())


def exchanged(child):
    small = torch.arange(1000, dtype=torch.float32, device="cuda")
    large = torch.arange(70 * MIB // 4, dtype=torch.float32, device="cuda")
    said = []
    for number, tensor in enumerate((small, large, large[5::7], small.reshape(10, 100).t()), 1):
        here = digest(tensor)
        there, strides, _ = child.read(tensor)
        assert there == here
        said.append([here, strides, bool((tensor == number).all())])
    untouched = float(large[1])  # no part of the view that the child wrote last
    return [said, untouched, child.end()]


def shared_memory_is_freed():
    """Once the child has let go of a tensor, its memory is the parent's again."""
    child = Child()
    sizes = []
    for _ in range(3):
        tensor = filled(16, 1)
        child.read(tensor)
        del tensor
        gc.collect()
        torch.cuda.ipc_collect()
        sizes.append(torch.cuda.memory_allocated())
    code = child.end()
    torch.cuda.ipc_collect()
    return [code, torch.cuda.memory_allocated(), len(sizes)]


def kept_by_the_child(given, answers):
    choose_as_the_parent()
    tensor = given.get(timeout=TIMEOUT)
    answers.put("here")
    given.get(timeout=TIMEOUT)  # the parent has dropped the tensor, and allocated since
    answers.put(bool((tensor == 4).all()))


def shared_tensor_outlives_the_parents():
    context = multiprocessing.get_context("spawn")
    given, answers = context.Queue(), context.Queue()
    process = context.Process(target=kept_by_the_child, args=(given, answers))
    process.start()
    tensor = filled(16, 4)
    given.put(tensor)
    assert answers.get(timeout=TIMEOUT) == "here"
    del tensor
    gc.collect()
    noise = [filled(16, -1) for _ in range(4)]
    torch.cuda.synchronize()
    given.put("go on")
    said = answers.get(timeout=TIMEOUT)
    process.join(TIMEOUT)
    return [said, process.exitcode, len(noise)]


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((256,), float(index))


def data_loader_workers():
    """Workers make batches in processes of their own; they arrive pinned, and on the GPU right."""
    warm = filled(1)  # CUDA is in use before the workers are forked
    loader = DataLoader(Rows(), batch_size=8, num_workers=2, pin_memory=True)
    said = []
    for batch in loader:
        assert batch.is_pinned()
        said.append(float(batch.to("cuda", non_blocking=True).sum()))
    return [said, warm.numel()]


def pinned_tensors():
    host = torch.arange(3 * MIB // 4, dtype=torch.float32).pin_memory()
    assert host.is_pinned()
    there = host.to("cuda", non_blocking=True) * 2
    back = torch.empty(host.shape, pin_memory=True)
    back.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    return digest(back)


def pinned_tensors_freed_behind_copies():
    """Each is freed behind a queued copy, and the next ones are filled before the copy has run."""
    stream = torch.cuda.Stream()
    busy = torch.randn(4096, 4096, device="cuda")
    there = []
    for number in range(60):
        with torch.cuda.stream(stream):
            busy = (busy @ busy).clamp(-1, 1)
            host = torch.empty(1 << (10 + number % 10), pin_memory=True).fill_(number)
            there.append(host.to("cuda", non_blocking=True))
        del host
    stream.synchronize()
    return [[float(each.min()), float(each.max())] for each in there]


def pinned_tensors_of_a_graph():
    """What a graph copies through stays the graph's, though its tensor ends in the capture."""
    given, out = filled(1, 1.0), filled(1, 0.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        staged = torch.empty(given.shape, pin_memory=True)
        staged.copy_(given, non_blocking=True)
        out.copy_(staged, non_blocking=True)
        del staged
    others = [torch.zeros(given.shape, pin_memory=True) for _ in range(4)]
    said = []
    for number in range(3):
        given.fill_(number)
        graph.replay()
        torch.cuda.synchronize()
        said.append([float(out.min()), float(out.max())])
    assert all(float(other.max()) == 0 for other in others)
    del graph, others
    torch._C._host_emptyCache()
    return said


def pinned_statistics():
    """Counts of blocks are PyTorch's; sizes are the arena's own."""
    torch.cuda.init()
    before = torch.cuda.host_memory_stats()
    kept = [torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True) for _ in range(3)]
    now = torch.cuda.host_memory_stats()
    counts = ("active_requests.current", "active_requests.allocated")
    return [len(kept), *(now[count] - before[count] for count in counts)]
