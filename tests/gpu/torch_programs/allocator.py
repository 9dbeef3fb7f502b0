"""Which allocator a program runs over; its child processes run over the same."""

import os
import threading

CHOSEN = "GPUMEM_TEST_ALLOCATOR"
MIB = 1 << 20


def choose(allocator):
    """Put gpumem in place of PyTorch's allocators if it is "full"; "native" leaves them."""
    os.environ[CHOSEN] = allocator
    if allocator == "full":
        from gpumem.integrations import torch

        torch.enable(mode="full")


def choose_as_the_parent():
    """Do the same in a child process, before it uses a tensor."""
    choose(os.environ[CHOSEN])


def computed(value):
    """Return a value as it is read from the GPU; the null CUDA computes none and reads zeros."""
    return type(value)(0) if "GPUMEM_TEST_NULL_CUDA" in os.environ else value


def filled(mib, value=0.0):
    """Return a tensor of so many MiB."""
    import torch

    return torch.full((int(mib * MIB) // 4,), value, dtype=torch.float32, device="cuda")


def digest(*tensors):
    """Return a text that differs if one bit of the tensors does."""
    import hashlib

    import torch

    found = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def in_a_thread(function):
    """Call a function in another thread and return what it returned."""
    said = []
    thread = threading.Thread(target=lambda: said.append(function()))
    thread.start()
    thread.join()
    return said[0]
