"""Readers of files refuse devices, which have no end, and pipes, which wait for a writer."""

import os
import stat

import pytest

from gpumem._snapshots.snapshot import Snapshot
from gpumem.accounting import read_stats
from gpumem.errors import GpumemError
from gpumem.observe import read
from gpumem.planning import ModelGraph
from gpumem.report import write_report
from gpumem.report.page import facts_of
from gpumem.traces import load_trace


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "socket"])
@pytest.mark.parametrize("reader", [load_trace, read, Snapshot.load, read_stats, facts_of, "onnx"])
def test_readers_refuse_what_is_not_a_regular_file(reader, kind, tmp_path):
    if reader == "onnx":
        pytest.importorskip("onnx", reason="the reader of models needs the package onnx")
        reader = ModelGraph.from_onnx
    path = "/dev/zero" if kind == "device" else tmp_path / "input"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    with pytest.raises((OSError, GpumemError), match=r"not a regular file|[Ii]s a directory"):
        reader(path)


def test_page_replaces_no_pipe(tmp_path):
    os.mkfifo(tmp_path / "page.html")
    with pytest.raises(OSError, match="not a regular file"):
        write_report("multistream_train", tmp_path / "page.html")
    assert stat.S_ISFIFO(os.stat(tmp_path / "page.html").st_mode)
