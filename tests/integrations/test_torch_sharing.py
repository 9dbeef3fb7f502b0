"""PyTorch's blocks in other processes, over arenas of the host device."""

import os
import textwrap

import pytest
from helpers import child, torch_library

# Each script is a process of its own, because pages stay exportable to its end.
BEFORE = """
    import ctypes, operator, os, tempfile
    from pathlib import Path
    import gpumem
    from gpumem._resource.handle import OpenedPages, export_page, make_exportable, pages_of
    from gpumem._testing import host_device, torch_hooks
    from gpumem.integrations.torch import _sharing
    from helpers.descriptors import open_descriptors
    from helpers.shared_block import bytes_at, found_elsewhere, refusal
    from helpers.torch_caller import Caller
    from helpers.waiting import wait_until

    MIB = 1 << 20
    torch = Caller()
"""
ARENA = """
    make_exportable()
    arena = gpumem.Arena("host", {"backing": "virtual"})
    torch_hooks.serve(0, arena)
"""


def run(script, arena=ARENA):
    """Run lines after those; what they printed."""
    whole = "".join(map(textwrap.dedent, (BEFORE, arena, script)))
    done = child.run(whole)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_shared_block_is_the_same_memory_in_another_process():
    said = run("""
        for nbytes in (1000, 70 * MIB):
            torch.alloc(300)
            address = torch.alloc(nbytes)
            ctypes.memset(address, 7, nbytes)
            print(found_elsewhere(*_sharing.share_block(address), nbytes, 9))
            print(*set(bytes(bytes_at(address, nbytes))))
    """)
    assert said == ["7", "9", "7", "9"]


def test_shared_block_stays_in_place_while_pages_move_around_it():
    said = run("""
        import random
        random.seed(1)
        kept = torch.alloc(9 * MIB)
        ctypes.memset(kept, 5, 9 * MIB)
        text, offset = _sharing.share_block(kept)
        opened = _sharing.open_block(text)
        live = []
        for _ in range(300):
            if live and random.random() < 0.5:
                torch.free(live.pop(random.randrange(len(live))))
            else:
                live.append(torch.alloc(random.randrange(1, 12 * MIB)))
                ctypes.memset(live[-1], 1, 1)
        bytes_at(kept, 8)[3] = 6
        there = bytes(bytes_at(opened.address + offset, 9 * MIB))
        print(there[:4] == bytes([5, 5, 5, 6]), set(there[4:]) == {5})
    """)
    assert said == ["True", "True"]


def test_shared_block_of_a_graph_pool_is_the_same_memory_in_another_process():
    said = run("""
        stream = gpumem.Stream("host")
        pool = torch.open_pool(7)
        torch.alloc(300, stream=stream.ptr, pool=pool)
        address = torch.alloc(5 * MIB, stream=stream.ptr, pool=pool)
        ctypes.memset(address, 7, 5 * MIB)
        print(found_elsewhere(*_sharing.share_block(address), 5 * MIB, 9))
        print(*set(bytes(bytes_at(address, 5 * MIB))))
        torch.drop_pool(pool)
    """)
    assert said == ["7", "9"]


def test_arena_does_not_sleep_until_shared_blocks_are_freed():
    said = run("""
        stream = gpumem.Stream("host")
        plain = torch.alloc(5000)
        pool = torch.open_pool(7)
        pooled = torch.alloc(5000, stream=stream.ptr, pool=pool)
        for address in (plain, plain, pooled):
            _sharing.share_block(address)
        for address, shared in ((plain, 2), (pooled, 1)):
            text = f"{shared} of its blocks were sent to other processes"
            assert text in refusal(arena.sleep), refusal(arena.sleep)
            assert arena.asleep == ()
            torch.free(address)
        arena.sleep()
        print(*arena.asleep)
        arena.wake()
    """)
    assert said == ["default"]


def test_tag_with_a_shared_block_stays_awake_if_sleep_is_told_so():
    said = run("""
        with arena.tag("weights"):
            address = torch.alloc(3 * MIB)
        other = torch.alloc(3 * MIB)
        text, offset = _sharing.share_block(address)
        opened = _sharing.open_block(text)
        arena.sleep(registered="stay")
        print(*arena.asleep)
        bytes_at(address, 8)[5] = 6
        print(bytes_at(opened.address + offset, 8)[5])
        assert "awake" in refusal(_sharing.share_block, other)
        arena.wake()
    """)
    assert said == ["default", "6"]


def test_each_share_has_its_own_text():
    said = run("""
        address = torch.alloc(5000)
        texts = {_sharing.share_block(address)[0] for _ in range(3)}
        print(len(texts), max(map(len, texts)) < 100)
    """)
    assert said == ["3", "True"]


def test_opened_block_leaves_no_descriptor_and_no_address_behind():
    said = run("""
        def held():
            # Threads come and go, with mappings of their own: only those of pages count.
            pages = Path("/proc/self/maps").read_text().count("/memfd:gpumem")
            ranges = count("cuMemAddressReserve") - count("cuMemAddressFree")
            return [len(os.listdir("/proc/self/fd")), pages, ranges]

        def sockets():
            return [link for link in open_descriptors(()).values() if link.startswith("socket:")]

        def answering():
            # The listening socket, and each end that it accepted: these have its name.
            name, own = f"@gpumem-{os.getpid()}-", "".join(sockets())
            lines = Path("/proc/net/unix").read_text().splitlines()
            return [line for line in lines if name in line and f"[{line.split()[6]}]" in own]

        count = host_device.call_count
        host_device.reset_counts()
        address = torch.alloc(70 * MIB)
        at_first = len(sockets())
        text, _ = _sharing.share_block(address)
        _sharing.open_block(text).close()
        _sharing.drop_idle()
        # The thread that answers closes its end a moment later. The listening socket stays, and
        # where there is a GPU what its driver has opened meanwhile.
        wait_until(lambda: len(answering()) == 1)
        assert len(sockets()) == at_first + 1 or gpumem.driver_status()
        least = held()
        for _ in range(5):
            opened = _sharing.open_block(text)
            assert all(now > before for now, before in zip(held()[1:], least[1:], strict=True))
            opened.close()
            _sharing.drop_idle()
            wait_until(lambda: all(map(operator.le, held(), least)))
    """)
    assert said == []


def test_block_that_is_sent_again_is_mapped_once():
    said = run("""
        address, other = torch.alloc(70 * MIB), torch.alloc(5000)
        beside = torch.alloc(5000)
        def opened(address):
            block = _sharing.open_block(_sharing.share_block(address)[0])
            mapped = block.address
            block.close()
            return mapped
        first = opened(address)
        print(opened(address) == first, opened(other) == first, opened(beside) == opened(other))
        one = _sharing.open_block(_sharing.share_block(address)[0])
        two = _sharing.open_block(_sharing.share_block(address)[0])
        one.close()
        one.close()
        _sharing.drop_idle()
        print(two.address == first, bytes_at(two.address, 1)[0] == bytes_at(address, 1)[0])
    """)
    assert said == ["True", "False", "True", "True", "True"]


def test_mapping_is_made_anew_after_pages_were_given_back():
    said = run("""
        address = torch.alloc(70 * MIB)
        ctypes.memset(address, 3, 70 * MIB)
        text, offset = _sharing.share_block(address)
        opened = _sharing.open_block(text)
        print(*set(bytes(bytes_at(opened.address + offset, 70 * MIB))))
        opened.close()
        torch.free(address)
        arena.shrink()
        again = torch.alloc(70 * MIB)
        ctypes.memset(again, 4, 70 * MIB)
        text, offset = _sharing.share_block(again)
        opened = _sharing.open_block(text)
        print(again == address, *set(bytes(bytes_at(opened.address + offset, 70 * MIB))))
    """)
    assert said == ["3", "True", "4"]


def test_mapping_without_a_use_is_unmapped_after_a_moment():
    run("""
        def mapped():
            return Path("/proc/self/maps").read_text().count("\\n")

        text, _ = _sharing.share_block(torch.alloc(70 * MIB))
        _sharing.open_block(text).close()
        least = mapped()
        _sharing.drop_idle()
        wait_until(lambda: mapped() < least)
        for _ in range(2):  # the thread ends and begins again
            _sharing.open_block(text).close()
            wait_until(lambda: mapped() < least)
            assert not _sharing._mappings._idle
    """)


def test_threads_that_open_one_block_share_a_mapping():
    said = run("""
        from concurrent.futures import ThreadPoolExecutor
        text, _ = _sharing.share_block(torch.alloc(9 * MIB))
        with ThreadPoolExecutor(4) as threads:
            opened = list(threads.map(_sharing.open_block, [text] * 16))
            print(len({each.address for each in opened}))
            list(threads.map(lambda each: each.close(), opened))
        print(len(_sharing._mappings._used), len(_sharing._mappings._idle))
    """)
    assert said == ["1", "0", "1"]


def test_forked_child_leaves_mappings_to_its_parent():
    said = run("""
        text, _ = _sharing.share_block(torch.alloc(9 * MIB))
        used, idle = _sharing.open_block(text), torch.alloc(70 * MIB)
        _sharing.open_block(_sharing.share_block(idle)[0]).close()
        process = os.fork()
        if process == 0:
            used.close()
            _sharing.drop_idle()
            print("child", flush=True)
            os._exit(0)
        print(os.waitpid(process, 0)[1], flush=True)
        print(bytes_at(used.address, 1)[0], len(_sharing._mappings._idle))
    """)
    assert said == ["child", "0", "0", "1"]


# A receiver's PyTorch, as far as a tensor is made by it. Its function has the steps of PyTorch's.
RECEIVER = """
    import sys, types
    from gpumem.integrations.torch import _rebuild

    class Event:
        @classmethod
        def from_ipc_handle(cls, device, handle):
            print("event", device, handle.decode())
            return cls()
        def wait(self, stream):
            print("wait", stream.device)

    class Stream:
        def __init__(self, device):
            self.device = device
        def synchronize(self):
            print("synchronized", self.device)

    class Storage:
        def __init__(self, memory, device):
            self.memory, self.device = memory, device
        def untyped_storage(self):
            return self
        def data_ptr(self):
            return self.memory.__cuda_array_interface__["data"][0] + moved
        def _new_shared_cuda(*sent):
            print("own", sent[0])
        def _release_ipc_counter(counter, offset, device=None):
            print("released", counter.decode(), offset, device)

    def pytorchs(cls, size, stride, at, storage, dtype, device, handle, *rest):
        nbytes, offset, _, *counted = rest
        return storage._new_shared_cuda(device, handle, nbytes, offset, *counted)

    moved, backend = 0, "native"
    reductions = types.ModuleType("torch.multiprocessing.reductions")
    reductions.rebuild_cuda_tensor = pytorchs
    sys.modules["torch"] = types.SimpleNamespace(
        device=lambda kind, index: f"{kind}:{index}",
        as_tensor=lambda memory, device: Storage(memory, device),
        cuda=types.SimpleNamespace(
            Event=Event, current_stream=Stream, get_allocator_backend=lambda: backend
        ),
    )
    sys.modules["torch.multiprocessing"] = types.SimpleNamespace(reductions=reductions)
    sys.modules["torch.multiprocessing.reductions"] = reductions

    def sent(handle, offset, nbytes, event=True):
        counted = (b"counter", 3, b"its-event", event)
        return (None, 0, 0, 0, Storage, None, 0, handle, nbytes, offset, False, *counted)

    address = torch.alloc(5000)
    ctypes.memset(address, 7, 5000)
    text, offset = _sharing.share_block(address)
    args = sent(text.encode(), offset, 5000)
"""


def receive(script):
    return run(textwrap.dedent(RECEIVER) + textwrap.dedent(script))


def test_process_with_pytorchs_own_allocator_opens_a_block():
    said = receive("""
        made = _rebuild.rebuild_cuda_tensor(*args)
        bytes_there = bytes_at(made.data_ptr(), 5000)
        print(made.device, *set(bytes(bytes_there)), made.data_ptr() != address)
        bytes_there[9] = 1
        print(bytes_at(address, 10)[9], _rebuild.rebuild_cuda_tensor.__module__)
        del made
        _rebuild.rebuild_cuda_tensor(*sent(text.encode(), offset, 5000, event=False))
        print(len(_sharing._mappings._used))
    """)
    assert " ".join(said).split(" ") == [
        *("event", "cuda:0", "its-event", "wait", "0", "cuda:0", "7", "True"),
        *("1", "gpumem.integrations.torch._rebuild"),
        *("synchronized", "0", "released", "counter", "3", "0") * 2,
        "0",
    ]


def test_pytorch_itself_opens_memory_that_is_not_gpumems_and_opens_for_gpumems_allocator():
    said = receive("""
        _rebuild.rebuild_cuda_tensor(*sent(b"\2c" + bytes(64), 0, 5000))
        backend = "gpumem"
        _rebuild.rebuild_cuda_tensor(*args)
    """)
    assert said == ["own", "0", "own", "0"]


def test_sender_names_a_function_that_any_process_can_import():
    said = receive("""
        _rebuild.send_to_any_process()
        _rebuild.send_to_any_process()
        print(reductions.rebuild_cuda_tensor is _rebuild.rebuild_cuda_tensor)
        backend = "gpumem"
        reductions.rebuild_cuda_tensor(*args)
    """)
    assert said == ["True", "own", "0"]


def test_block_of_a_device_with_another_number_is_refused_and_released():
    said = receive("""
        moved = 1
        print("CUDA_VISIBLE_DEVICES" in refusal(_rebuild.rebuild_cuda_tensor, *args))
        print(len(_sharing._mappings._used))
    """)
    assert said[-8:] == ["synchronized", "0", "released", "counter", "3", "0", "True", "0"]


def test_freed_block_and_damaged_texts_are_refused_with_the_reason():
    run("""
        address = torch.alloc(5000)
        text, _ = _sharing.share_block(address)
        assert "not the text of a shared block" in refusal(_sharing.open_block, "something")
        assert "not the text of a shared block" in refusal(_sharing.open_block, "a b c d")
        mark, name, _, *rest = text.split()
        rest = " ".join(rest)
        assert "did not send" in refusal(_sharing.open_block, f"{mark} nobody 100000 {rest}")
        assert "invalid literal" in refusal(_sharing.open_block, f"{mark} {name} xyz {rest}")
        assert "refused: no block" in refusal(_sharing.open_block, f"{mark} {name} 100000 {rest}")
        torch.free(address)
        assert "refused: no block" in refusal(_sharing.open_block, text)
        assert "no block" in refusal(_sharing.share_block, address)
        assert "no block" in refusal(_sharing.share_block, 0)
        assert arena.stats().in_use == 0
    """)


def test_block_outside_of_pages_is_refused():
    run(
        """
        assert "cannot be exported" in refusal(_sharing.share_block, torch.alloc(5000))
        """,
        """
        torch_hooks.serve(0, gpumem.Arena("host", {"backing": "regions"}))
        """,
    )


def test_page_that_was_made_before_pages_were_exportable_is_refused():
    run(
        """
        text, _ = _sharing.share_block(torch.alloc(5000))
        assert "cuMemExportToShareableHandle" in refusal(_sharing.open_block, text)
        """,
        ARENA.replace("make_exportable()", "pass"),
    )


def test_device_that_can_export_makes_its_pages_exportable():
    run(
        """
        _sharing.prepare(arena.memory.device)
        text, _ = _sharing.share_block(torch.alloc(5000))
        assert _sharing.open_block(text).address
        """,
        ARENA.replace("make_exportable()", "pass"),
    )


def test_pages_past_the_declared_count_are_refused():
    run("""
        address = torch.alloc(5000)
        _, _, _, pages = pages_of(address)
        with export_page(address, pages[0][0]) as page:
            opened = OpenedPages(arena.memory.device, pages[0][1])
            assert "of pages do not fit" in refusal(opened.map, page.fileno(), pages[0][1] + 1)
            opened.map(page.fileno(), pages[0][1])
            assert "of pages do not fit" in refusal(opened.map, page.fileno(), pages[0][1])
    """)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_process_of_another_user_is_not_answered():
    said = run("""
        text, _ = _sharing.share_block(torch.alloc(5000))
        process = os.fork()
        if process == 0:
            os.setuid(65534)
            print(refusal(_sharing.open_block, text), flush=True)
            os._exit(0)
        os.waitpid(process, 0)
    """)
    assert " ".join(said) == (
        "[Errno 9] the other process refused: descriptors are for processes of the same user"
    )


@pytest.mark.skipif(
    torch_library.unpacked() is None,
    reason=f"{torch_library.VARIABLE} names no folder of an unpacked PyTorch",
)
def test_compiled_allocator_shares_and_opens_blocks():
    said = run("""
        from helpers import torch_library
        folder = tempfile.mkdtemp()
        driver = torch_library.load(torch_library.unpacked(), Path(folder))
        driver.start(1)
        address = driver.alloc(5 * MIB)
        ctypes.memset(address, 3, 5 * MIB)
        shared = driver.share(address)
        print(found_elsewhere(shared["text"], shared["offset"], 5 * MIB, 4))
        opened = driver.open(shared["text"])
        print(*set(bytes(bytes_at(opened + shared["offset"], 5 * MIB))))
        driver.close()
        # PyTorch's own allocator opens a handle of another process that has it.
        print(driver.open("\\x02c" + "x" * 64) == ord("x"))
        driver.close()
        driver.free(address)
        driver.empty_cache()
        for function, given in ((driver.share, address), (driver.open, shared["text"])):
            try:
                function(given)
            except torch_library.Refused as error:
                print("no block" in str(error))
    """)
    assert said == ["3", "4", "True", "True", "True"]
