"""Readers end with an error of theirs on inputs that are nested deeply, and name the depth."""

import pytest
from traces.test_trace_formats import GOOD, npz_file

from gpumem._snapshots.snapshot import Snapshot
from gpumem.errors import SnapshotError, TraceError
from gpumem.report.page import facts_of
from gpumem.traces import load_trace

DEEP = "[" * 100_000 + "]" * 100_000


def written(path, content):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("key", ["format", "segments"])
def test_deep_json_is_refused_by_its_depth(tmp_path, key):
    # Brackets and quotes in a string are no depth.
    path = written(tmp_path / "deep.json", f'{{"s": "[[{{\\"[", "{key}": {DEEP}}}')
    with pytest.raises(TraceError, match=r"nested 100001 deep.* limit is [0-9]"):
        load_trace(path)
    with pytest.raises(SnapshotError, match=r"nested 100001 deep.* limit is [0-9]"):
        Snapshot.load(path)


def test_deep_json_in_an_archive_or_on_a_page_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"meta.* nested 100000 deep"):
        load_trace(npz_file(tmp_path / "deep.npz", **GOOD, meta=DEEP))
    script = f'<script id="facts" type="application/json">{DEEP}</script>'
    assert facts_of(written(tmp_path / "deep.html", script)) == {}


@pytest.mark.parametrize("depth", [257, 1_000_000])
def test_deep_pickle_is_refused_by_its_depth(tmp_path, depth):
    path = written(tmp_path / "deep.pickle", b"\x80\x04" + b"(" * depth + b"t" * depth + b".")
    with pytest.raises(TraceError, match="nested 257 deep, expected at most 256"):
        load_trace(path)


def test_tuple_is_no_key_of_a_pickle(tmp_path):
    deep = b")" + b"\x85" * 1_000_000  # its hash would overflow the stack
    # Each tuple holds the one before twice: a hash would take two to the power of 60 steps.
    doubled = b")\x94" + b"".join(b"0h%ch%c\x86\x94" % (n, n) for n in range(60))
    for key in (deep, doubled, b"(Nt"):
        path = written(tmp_path / "keys.pickle", b"\x80\x04}" + key + b"Ns.")
        with pytest.raises(TraceError, match="unhashable"):
            load_trace(path)
