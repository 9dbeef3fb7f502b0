"""The ring of pageable copies: bounded, given back, right from several threads at once."""

import numpy as np
import pytest
from helpers import child
from helpers.threads import in_threads

import gpumem

N = 3_000_000


def test_staging_memory_is_idle_between_copies_and_released_by_shrink(stream, staged):
    arena = gpumem.Arena.staging("host")
    gpumem.copy(gpumem.empty(N, "uint8", memory="host"), np.zeros(N, np.uint8), stream)
    assert arena.stats().max_in_use > 0
    assert arena.stats().in_use == 0
    arena.shrink()
    assert arena.stats().reserved == 0
    assert gpumem.Arena.staging("host:0") is arena


def test_closed_staging_arena_is_recreated(stream, staged):
    arena = gpumem.Arena.staging("host")
    arena.close()
    target = gpumem.empty(N, "uint8", memory="host")
    gpumem.copy(target, np.full(N, 3, np.uint8), stream)
    assert (target.numpy() == 3).all()
    assert gpumem.Arena.staging("host") is not arena


def test_staging_arena_has_a_limit():
    assert gpumem.Arena.staging("host").stats().limit == 256 << 20


@pytest.mark.parametrize("device", ["moon", "host:99"])
def test_staging_arena_of_an_unknown_device_is_refused(device):
    with pytest.raises(ValueError, match="unknown device"):
        gpumem.Arena.staging(device)


def test_concurrent_staged_copies_in_both_directions(staged):
    failed = []

    def work(number):
        stream = gpumem.Stream("host")
        rng = np.random.default_rng(number)
        tensor = gpumem.empty((300, N // 300), "uint8", memory="host")
        for _ in range(6):
            data = rng.integers(0, 256, tensor.shape, np.uint8)
            gpumem.copy(tensor[::-1, 5:-7], data[:, 5:-7], stream)
            back = np.zeros_like(data)
            gpumem.copy(back[:, 5:-7], tensor[::-1, 5:-7], stream)
            if not (back[:, 5:-7] == data[:, 5:-7]).all() or back[:, :5].any():
                failed.append(number)

    in_threads(work, range(4))
    assert not failed


@pytest.mark.parametrize("first", [0, 1, 63])
def test_large_copy_from_a_device_writes_its_bytes_and_no_others(stream, first):
    data = np.random.default_rng(first).integers(0, 256, (40 << 20) + 5, np.uint8)
    tensor = gpumem.empty(data.shape, "uint8", memory="host")
    gpumem.copy(tensor, data, stream)
    back = np.full(first + data.size + 70, 9, np.uint8)
    end = first + data.size
    gpumem.copy(back[first:end], tensor, stream)
    assert (back[first:end] == data).all()
    assert (back[:first] == 9).all()
    assert (back[end:] == 9).all()


def test_forked_child_copies_with_its_own_worker_threads():
    child.run_quietly("""
        import os, warnings, numpy as np, gpumem
        from gpumem._testing.copies import set_staged_from
        warnings.simplefilter("ignore", DeprecationWarning)     # a fork with threads
        set_staged_from(0)
        def round_trip():
            data = np.arange(3_000_000, dtype=np.uint8)
            tensor = gpumem.empty(data.shape, "uint8", memory="host")
            stream = gpumem.Stream("host")
            gpumem.copy(tensor, data, stream)
            back = np.zeros_like(data)
            gpumem.copy(back, tensor, stream)
            large = np.zeros(20_000_000, np.uint8)
            gpumem.copy(large, np.ones_like(large))
            return (back == data).all() and large.all()
        assert round_trip()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if round_trip() else 3)
        assert os.waitpid(pid, 0)[1] == 0
        assert round_trip()
    """)


def test_interpreter_exit_with_queued_copies():
    child.run_quietly("""
        import numpy as np, gpumem
        from gpumem._testing import host_device
        stream = gpumem.Stream("host")
        source = gpumem.full(1000, 1, "uint8", memory="host")
        host_device.set_lag(10**12)
        gpumem.copy(gpumem.empty(1000, "uint8", memory="host"), source.numpy(), stream)
        del source
    """)
