"""Copies of live memory that a thread makes beside the program: values, files, refusals."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest
from helpers import child
from helpers.interrupting import interrupted

import gpumem
from gpumem._tensor import copy_out
from gpumem.errors import ConfigError, CopyOutError, InUseError

MIB = 1 << 20


def read(path):
    """Read a file by the description of the format."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert sorted(one["data_offsets"] for one in header.values())[-1][1] == len(data) - begin
    found = {}
    for name, one in header.items():
        first, last = one["data_offsets"]
        found[name] = one["dtype"], one["shape"], data[begin + first : begin + last]
    return found


def numbers(arena, shape, dtype="float32"):
    tensor = gpumem.empty(shape, dtype, resource=arena)
    gpumem.copy(tensor, np.arange(tensor.size).reshape(shape).astype(dtype))
    return tensor


@pytest.fixture
def held(monkeypatch):
    """Hold copies at their first piece, until the test or `CopyOut.cancel` opens the gate."""
    gate = threading.Event()
    copy, cancel = copy_out._copy_to, gpumem.CopyOut.cancel

    def wait(*arguments):
        assert gate.wait(60)
        return copy(*arguments)

    def open_and_cancel(copying):
        copying._cancelled = True
        gate.set()
        cancel(copying)

    monkeypatch.setattr(copy_out, "_copy_to", wait)
    monkeypatch.setattr(gpumem.CopyOut, "cancel", open_and_cancel)
    yield gate
    gate.set()


def test_used_blocks_of_tags_are_copied_in_the_order_of_their_addresses(arena):
    with arena.tag("kept"):
        blocks = [gpumem.full(1000 + i, i, "uint8", resource=arena) for i in range(4)]
    other = gpumem.full(10, 9, "uint8", resource=arena)
    del blocks[1]
    arrays = arena.copy_out("kept").wait()
    expected = sorted(blocks, key=lambda block: block.ptr)
    assert list(arrays) == ["kept.0", "kept.1", "kept.2"]
    for array, block in zip(arrays.values(), expected, strict=True):
        np.testing.assert_array_equal(array, block.numpy())
    assert set(arena.copy_out().wait()) == {*arrays, "default.0"}
    assert arena.copy_out("default").wait()["default.0"].tolist() == other.tolist()


def test_file_has_names_dtypes_shapes_and_bytes_of_tensors_of_any_layout(arena, tmp_path):
    wide = numbers(arena, (700, 1100))
    module = {
        "wide": wide,
        "turned": {"T": wide.T, 0: wide[::2, 5:], "column": wide[:, 3], "back": wide[0, ::-1]},
        "scalar": np.array(5, "int64"),
        "bools": np.array([True, False]),
        "none": None,
        "empty": gpumem.empty((0, 3), "float16", resource=arena),
        "half": numbers(arena, (3, 4), "bfloat16"),
    }
    path = tmp_path / "model.safetensors"
    copying = arena.copy_out(module, path, limit="1MiB")
    assert copying.wait() == path
    assert copying.done
    assert copying.done_bytes == copying.total_bytes
    turned = np.ascontiguousarray(wide.numpy().T)
    assert read(path) == {
        "wide": ("F32", [700, 1100], wide.numpy().tobytes()),
        "turned.T": ("F32", [1100, 700], turned.tobytes()),
        "turned.0": ("F32", [350, 1095], wide.numpy()[::2, 5:].tobytes()),
        "turned.column": ("F32", [700], wide.numpy()[:, 3].tobytes()),
        "turned.back": ("F32", [1100], wide.numpy()[0, ::-1].tobytes()),
        "scalar": ("I64", [], (5).to_bytes(8, "little")),
        "bools": ("BOOL", [2], b"\1\0"),
        "empty": ("F16", [0, 3], b""),
        "half": ("BF16", [3, 4], module["half"].numpy().tobytes()),
    }
    assert os.listdir(tmp_path) == [path.name]
    arrays = arena.copy_out(module).wait()
    np.testing.assert_array_equal(arrays["turned.T"], turned)


def test_safetensors_reads_the_file(arena, tmp_path):
    library = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    tensors = {name: numbers(arena, (31, 7), name) for name in ("float32", "int8", "uint16")}
    path = arena.copy_out(tensors, tmp_path / "model").wait()
    found = library.load_file(path)
    assert found.keys() == tensors.keys()
    for name, array in found.items():
        assert array.dtype == name
        np.testing.assert_array_equal(array, tensors[name].numpy())


def test_memory_of_an_earlier_copy_is_used_again_if_it_is_alike(arena):
    tensors = {"a": numbers(arena, (5, 5))}
    arrays = arena.copy_out(tensors).wait()
    tensors["a"].fill(3)
    assert arena.copy_out(tensors, to=arrays).wait()["a"] is arrays["a"]
    assert (arrays["a"] == 3).all()
    with pytest.raises(ValueError, match="differ in name, shape or dtype"):
        arena.copy_out({"b": tensors["a"]}, to=arrays)
    with pytest.raises(ValueError, match="arrays of NumPy, writable"):
        arena.copy_out(tensors, to={"a": np.empty((5, 5), "float32").T})


def test_copy_comes_after_work_that_is_queued_on_another_stream(driver, stream, arena):
    tensor = gpumem.full(4 * MIB, 1, "uint8", resource=arena)
    block = arena.allocate(MIB)
    with driver.block(stream) as gate:
        tensor.fill(2, stream)
        named, tagged = arena.copy_out({"t": tensor}), arena.copy_out()
        assert not named.done
        assert not tagged.done
        gate.open()
        assert (named.wait()["t"] == 2).all()
        assert any((array == 2).all() for array in tagged.wait().values())
    del block


def test_pinned_memory_stays_below_the_limit(arena):
    staging = gpumem.Arena.staging("host")
    staging.shrink()
    staging.reset_peaks()
    tensor = gpumem.full(64 * MIB, 7, "uint8", resource=arena)
    assert (arena.copy_out({"t": tensor}, limit="16MiB").wait()["t"] == 7).all()
    assert 0 < staging.stats().max_in_use <= 16 * MIB
    with pytest.raises(ConfigError, match="at least 1048576"):
        arena.copy_out(limit=1000)


def test_sleep_is_refused_while_a_copy_runs_and_a_sleeping_tag_is_not_copied(arena, held):
    with arena.tag("kept"):
        block = arena.allocate(MIB)
    copying = arena.copy_out("kept")
    with pytest.raises(InUseError, match="copy or fill"):
        arena.sleep("kept")
    held.set()
    copying.wait()
    arena.sleep("kept")
    with pytest.raises(gpumem.errors.AsleepError):
        arena.copy_out("kept")
    arena.wake()
    del block


def test_tag_of_another_librarys_tensor_stays_awake_while_it_is_copied(arena, held):
    with arena.tag("kept"):
        block = arena.allocate(MIB)
    kept = np.frombuffer((ctypes.c_char * MIB).from_address(block.ptr), "u1")[5:]
    copying = arena.copy_out({"kept": kept, "other": np.ones(5)})
    with pytest.raises(InUseError, match="copy or fill"):
        arena.sleep("kept")
    arena.sleep("default")
    arena.wake()
    held.set()
    copying.wait()
    arena.sleep("kept")
    with pytest.raises(gpumem.errors.AsleepError):
        arena.copy_out({"kept": kept})
    arena.wake()


def test_cancelled_copy_leaves_the_earlier_file_and_nothing_else(arena, tmp_path, held):
    path = tmp_path / "model"
    path.write_bytes(b"earlier")
    copying = arena.copy_out({"t": numbers(arena, (100,))}, path)
    assert len(os.listdir(tmp_path)) == 2
    copying.cancel()
    with pytest.raises(CancelledError):
        copying.wait()
    assert (os.listdir(tmp_path), path.read_bytes()) == (["model"], b"earlier")


def test_ctrl_c_in_a_wait_cancels_the_copy(arena, tmp_path, held):
    copying = arena.copy_out({"t": numbers(arena, (100,))}, tmp_path / "model")
    main = threading.main_thread().ident

    def waits():
        frame = sys._current_frames()[main]
        if "threading" not in frame.f_code.co_filename:
            return False
        while frame is not None and frame.f_code is not gpumem.CopyOut.wait.__code__:
            frame = frame.f_back
        return frame is not None

    with interrupted(waits):
        copying.wait()
    assert copying.done
    assert not os.listdir(tmp_path)


def test_end_of_the_program_cancels_a_copy(tmp_path):
    child.run_quietly(
        """
        import sys, time, gpumem
        from gpumem._tensor import copy_out
        copy = copy_out._copy_to
        def slow(*arguments):
            while not copying._cancelled:
                time.sleep(0.001)
            return copy(*arguments)
        copy_out._copy_to = slow
        arena = gpumem.Arena("host")
        block = arena.allocate(1 << 20)
        copying = arena.copy_out(to=sys.argv[1])
        """,
        str(tmp_path / "model"),
    )
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("late", [False, True])
def test_full_disk_is_a_typed_error_and_leaves_the_earlier_file(tmp_path, late):
    path = tmp_path / "model"
    path.write_bytes(b"earlier")
    child.run_quietly(
        """
        import errno, os, resource, sys, gpumem
        from gpumem.errors import CopyOutError
        if sys.argv[2] == "True":   # a file system that cannot reserve
            os.posix_fallocate = lambda *arguments: None
        arena = gpumem.Arena("host")
        block = arena.allocate(4 << 20)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        try:
            arena.copy_out(to=sys.argv[1], limit="1MiB").wait()
        except CopyOutError as error:
            assert error.errno == errno.EFBIG and error.filename == sys.argv[1], error
        else:
            raise AssertionError
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        arena.sleep()       # nothing refuses it any more
        """,
        str(path),
        str(late),
    )
    assert (os.listdir(tmp_path), path.read_bytes()) == (["model"], b"earlier")


def test_file_in_a_missing_folder_is_refused(arena, tmp_path):
    with pytest.raises(CopyOutError, match="no folder"):
        arena.copy_out(to=tmp_path / "missing" / "model")


@pytest.mark.parametrize(
    ("tensors", "error", "text"),
    [
        ({"a": 5}, TypeError, "invalid a of type int"),
        ({"a": {"b": [1.0]}}, TypeError, "invalid a.b of type list"),
        ({"a.b": np.ones(1), "a": {"b": np.ones(1)}}, ValueError, "two .* named 'a.b'"),
        ({"__metadata__": np.ones(1)}, ValueError, "the format's own"),
        ({"a": np.ones(1, "complex128")}, TypeError, "a has dtype complex128"),
        ({"a": np.ones(1, ">f4")}, TypeError, "a has dtype >f4"),
        ("unknown", ValueError, "has no tag 'unknown'"),
        (5, TypeError, "tags must be"),
    ],
)
def test_what_cannot_be_copied_is_refused_by_its_name(arena, tensors, error, text):
    with pytest.raises(error, match=text):
        arena.copy_out(tensors)


def test_tensor_that_pytorch_cannot_export_is_refused_by_its_name(arena):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with pytest.raises(TypeError, match=r"a\.b cannot be exported: .*torch\.strided"):
        arena.copy_out({"a": {"b": torch.eye(3).to_sparse()}})


def test_conjugated_and_negated_tensors_have_their_values(arena):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    number = torch.tensor([1 + 2j, 3 + 4j], requires_grad=True).conj()
    arrays = arena.copy_out({"whole": number, "part": number.imag}).wait()
    assert arrays["whole"].tolist() == [1 - 2j, 3 - 4j]
    assert arrays["part"].tolist() == [-2, -4]


def test_name_that_is_no_unicode_is_refused_before_a_file_is_made(arena, tmp_path):
    with pytest.raises(ValueError, match="surrogates"):
        arena.copy_out({"\ud800": np.ones(1)}, tmp_path / "model")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("to", ["model", 5, "cuda:0"])
def test_destination_that_is_no_path_is_refused(arena, to):
    with pytest.raises(ValueError, match="invalid to"):
        arena.copy_out(to=to)
