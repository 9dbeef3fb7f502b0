"""Limits, errors where memory is out, and memory that goes back."""

import gc
import re

import torch
from gpu.torch_programs.allocator import MIB, digest, filled


def tried(mib):
    """Return the type and the text of the error, the numbers of this machine left out."""
    try:
        filled(mib)
    except RuntimeError as error:
        first = str(error).partition(" is free")[0]
        return [type(error).__name__, re.sub(r"[\d.]+ (?:[GMK]iB|bytes)", "N", first)]
    return None


def memory_fraction():
    """Below the fraction memory can be had, above it not, and then again."""
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(256 * MIB / total)
    share = round(torch.cuda.get_per_process_memory_fraction() * total / MIB)
    below, above = tried(128), tried(512)
    torch.cuda.set_per_process_memory_fraction(1.0)
    return [share, below, above, tried(512)]


def out_of_memory():
    """PyTorch's type, its words, and the count; what lives is unharmed."""
    kept = filled(2, 3)
    said = tried(40 << 20)  # 40 TiB
    assert issubclass(torch.OutOfMemoryError, RuntimeError)
    assert torch.cuda.OutOfMemoryError is torch.OutOfMemoryError
    text = ""
    try:
        filled(40 << 20)
    except torch.OutOfMemoryError as error:
        text = str(error)
    assert "Tried to allocate 40960.00 GiB" in text, text
    return [said, torch.cuda.memory_stats()["num_ooms"], digest(kept)]


def observers_of_exhaustion():
    """Each is called once for each error, before it is raised."""
    calls = []
    for _ in range(2):
        torch._C._cuda_attach_out_of_memory_observer(lambda *given: calls.append(given))
    torch.cuda.memory._record_memory_history(max_entries=100)
    said = tried(40 << 20)
    traced = [
        entry["size"]
        for entry in torch.cuda.memory._snapshot()["device_traces"][0]
        if entry["action"] == "oom"
    ]
    found = [[device, nbytes, total > free >= 0] for device, nbytes, total, free in calls]
    return [said[0], found, traced]


def empty_cache():
    """Idle memory goes back to the device, and what lives stays where it is."""
    kept = filled(4, 2)
    filled(64)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    after = torch.cuda.memory_reserved()
    address = kept.data_ptr()
    assert after < before
    assert after >= torch.cuda.memory_allocated() == 4 * MIB
    total = float(kept.sum())
    del kept
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return [address != 0, total, torch.cuda.memory_reserved()]


def raw_allocations():
    """Memory that a program takes by itself, on a stream, and gives back by its address."""
    stream = torch.cuda.Stream()
    address = torch.cuda.caching_allocator_alloc(3 * MIB, stream=stream)
    live = torch.cuda.memory_allocated()
    torch.cuda.caching_allocator_delete(address)
    return [address % 256, live, torch.cuda.memory_allocated()]


def recorded_streams():
    """A block that another stream uses is not handed out before that stream is done."""
    side = torch.cuda.Stream()
    wrong = 0
    for round in range(20):
        data = filled(4, round)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(3_000_000)
            copy = data.clone()
            data.record_stream(side)
        del data
        noise = [filled(4, -1) for _ in range(4)]
        torch.cuda.current_stream().wait_stream(side)
        wrong += int((copy != round).sum())
        copy.record_stream(torch.cuda.current_stream())
        del noise
    return wrong


def smaller_batches_until_one_fits():
    """Accelerate looks for PyTorch's error and halves the batch."""
    from accelerate.utils import find_executable_batch_size

    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(1536 * MIB / total)
    tries = []

    @find_executable_batch_size(starting_batch_size=64)
    def fit(size):
        tries.append(size)
        return filled(64 * size).numel()

    return [fit(), tries]
