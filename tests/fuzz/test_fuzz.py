"""Every reader survives its corpus and some changed inputs; the judge finds each kind of fault."""

import io
import json
import re
import zipfile
import zlib

import onnx
import pytest
from helpers.child import python

from fuzz import changes, targets

ROOT = targets.CORPUS.parents[2]
CORPUS_BYTES = 200 << 10


def run_fuzz(folder, *arguments):
    command = ("-m", "tests.fuzz", "--folder", folder, "--seconds=0", *arguments)
    return python(*command, cwd=ROOT, status=None)


def corpus(name):
    return [path.read_bytes() for path in sorted((targets.CORPUS / name).iterdir())]


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """Try all readers, each in a fork of one process."""
    return run_fuzz(tmp_path_factory.mktemp("fuzz"), "--examples=50")


@pytest.mark.parametrize("name", targets.NAMES)
def test_reader_survives_its_corpus_and_changed_inputs(searched, name):
    found = re.search(rf"^{name}: (\d+) inputs in .* (\d+) findings$", searched.stdout, re.M)
    assert found, searched.stdout + searched.stderr
    assert int(found[1]) > 50
    assert int(found[2]) == 0, searched.stdout


def test_fuzzer_finds_a_planted_fault_of_each_kind(tmp_path):
    done = run_fuzz(tmp_path, targets.PLANTED, "--hang-seconds=1")
    assert done.returncode == 1, done.stdout + done.stderr
    signs = {
        b"crash": "signal SIGSEGV",
        b"hang": "Timeout",
        b"exception": "KeyError",
        b"message": "Wrong: message:",
        b"memory": "Wrong: memory:",
        b"objects": "Wrong: leak: bytes",
        b"descriptors": "Wrong: leak: descriptors",
    }
    found = {
        path.with_suffix("").read_bytes(): path.read_text()
        for path in (tmp_path / targets.PLANTED).glob("*.txt")
    }
    assert found.keys() == signs.keys()
    for data, sign in signs.items():
        assert sign in found[data]


def test_corpus_is_small_and_has_inputs_for_every_reader():
    assert {path.name for path in targets.CORPUS.iterdir()} == {*targets.NAMES, targets.PLANTED}
    sizes = [path.stat().st_size for path in targets.CORPUS.glob("*/*")]
    assert max(sizes) <= changes.MAX_BYTES
    assert sum(sizes) <= CORPUS_BYTES


def is_archive(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.testzip() is None


def has_a_right_checksum(data):
    copy = data[changes.PAGE_START :]
    length = int.from_bytes(copy[4:8], "little")
    return zlib.crc32(copy[4:length]) == int.from_bytes(copy[:4], "little")


@pytest.mark.parametrize(
    ("name", "change", "is_readable"),
    [
        ("snapshot", changes.in_json, json.loads),
        ("npz", changes.in_zip, is_archive),
        ("onnx_model", changes.in_onnx, onnx.ModelProto.FromString),
        ("page", changes.checksummed, has_a_right_checksum),
    ],
)
def test_structured_changes_leave_inputs_readable(rng, name, change, is_readable):
    inputs = corpus(name)
    changed = [change(rng, rng.choice(inputs), rng.choice(inputs)) for _ in range(100)]
    assert len(set(changed)) > 50
    readable = 0
    for data in changed:
        try:
            readable += bool(is_readable(data))
        except Exception:  # of the format's own reader
            continue
    assert readable > 20  # some inputs that once failed are readable to nobody
