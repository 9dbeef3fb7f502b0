"""What the other process of a hand-over between GPU streams runs."""

from __future__ import annotations

from multiprocessing.connection import Connection

from gpumem import interop


def echo(inbox: Connection, rounds: int) -> None:
    """Check what each turn brings and write an answer, on a stream; wait once, at the end."""
    import torch

    handle, theirs, mine = inbox.recv()
    attached = interop.attach(handle)
    tensor = torch.from_dlpack(attached.__dlpack__(dl_device=(2, 0), max_version=(1, 0)))
    handle.close()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for turn in range(1, rounds + 1):
            theirs.enqueue_wait(stream, turn)
            wrong += (tensor != 2 * turn - 1).sum()
            tensor.fill_(2 * turn)
            mine.enqueue_signal(stream, turn)
    stream.synchronize()
    inbox.send(int(wrong))
    inbox.recv()
