"""What PyTorch asks of its allocator about other devices, asked as it does, on host devices."""

import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
from helpers import child

SOURCE = Path(__file__).parents[1] / "helpers" / "torch_peers.cpp"

START = """
import ctypes, sys
import gpumem, numpy as np
from gpumem._testing import host_device, torch_hooks
from helpers.driver import HostDriver
gpumem.device.set_host_device_count(3)
path = sys.argv[1]
library = ctypes.CDLL(path)
said = ctypes.create_string_buffer(1024)
arenas = [gpumem.Arena(f"host:{i}") for i in range(3)]
for number, arena in enumerate(arenas):
    torch_hooks.serve(number, arena)
library.peers_begin(0)

def enable(device, owner):
    done = library.peers_enable(device, owner, said, ctypes.c_size_t(1024))
    return said.value.decode() if done else None

def peers():
    return [[each.index for each in arena.peers] for arena in arenas]
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("peers") / "torch_peers.so"
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", path, SOURCE], check=True
    )
    return path


@pytest.fixture
def run(library):
    def run(script):
        whole = START + textwrap.dedent(script)
        child.run_quietly(whole, str(library))

    return run


def test_device_that_pytorch_enables_has_access_to_the_other_arena_alone(run):
    run("""
        assert torch_hooks.adopt_allocator(path, path)
        assert enable(0, 1) is None
        assert (peers(), library.peers_enabled()) == ([[], [0], []], 1)
        assert enable(0, 1) is None and enable(2, 0) is None
        assert (peers(), library.peers_enabled()) == ([[2], [0], []], 3)
    """)


def test_other_virtual_functions_stay_what_they_were(run):
    run("""
        before = library.peers_others()
        assert torch_hooks.adopt_allocator(path, path)
        assert library.peers_others() == before == 13
        assert not torch_hooks.adopt_allocator(path, path)      # once is enough
    """)


def test_copies_without_access_are_the_drivers_between_two_contexts(run):
    run("""
        assert torch_hooks.adopt_allocator(path, path)
        src = gpumem.full(1 << 20, 7, "u1", resource=arenas[0])
        dst = gpumem.zeros(1 << 20, "u1", resource=arenas[1])
        stream, driver = gpumem.Stream("host:0"), HostDriver("host:0")
        table = (ctypes.c_void_p(dst.ptr), 1, ctypes.c_void_p(src.ptr), 0, ctypes.c_size_t(1 << 20),
                 ctypes.c_void_p(stream.ptr))
        with driver.current():
            assert library.peers_copy(*table, 0) == 0
        stream.synchronize()
        assert (dst.numpy() == 7).all()
        assert host_device.call_count("cuMemcpyPeerAsync") == 1
        with driver.current():
            assert library.peers_copy(*table, 1) == 999         # PyTorch's own: there is access
        assert peers() == [[], [], []]
    """)


def test_arena_that_gives_no_access_is_an_error_with_its_setting(run):
    run("""
        assert torch_hooks.adopt_allocator(path, path)
        torch_hooks.serve(1, gpumem.Arena("host:1", {"peers": "none"}, name="weights"))
        text = enable(0, 1)
        assert "host:0 may not access the memory of host:1" in text, text
        assert "arena 'weights' has peers = 'none'" in text, text
        torch_hooks.serve(1, gpumem.Arena("host:1", {"peers": ["host:0"]}))
        assert enable(0, 1) is None
        host_device.separate(0, 2, True)
        assert "host:0 cannot access the memory of host:2" in enable(0, 2)
    """)


def test_what_is_not_the_known_class_is_left_alone(run):
    run("""
        library.peers_begin(1)
        assert not torch_hooks.adopt_allocator(path, path)
        assert enable(0, 1) is None and peers() == [[], [], []]
        for wrong in ("/nowhere.so", "libc.so.6"):
            assert not torch_hooks.adopt_allocator(path, wrong)
            assert not torch_hooks.adopt_allocator(wrong, path)
    """)


def test_arenas_that_hear_nothing_are_introduced_to_each_other(run):
    run("""
        closed_off = gpumem.Arena("host:2", {"peers": "none"})
        torch_hooks.introduce([arenas[0], arenas[1], closed_off])
        assert peers() == [[1, 2], [0, 2], []] and closed_off.peers == ()
    """)
