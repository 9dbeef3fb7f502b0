"""Every reader survives its corpus and some mutations; the fuzzer finds each kind of fault."""

import io
import json
import random
import subprocess
import sys
import zipfile
import zlib

import onnx
import pytest

from fuzz import structure, targets
from fuzz.mutation import MOST_BYTES, mutate

ROOT = targets.CORPUS.parents[2]
CORPUS_BYTES = 200 << 10


def run_fuzz(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--folder", str(folder), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def corpus(name):
    return [path.read_bytes() for path in sorted((targets.CORPUS / name).iterdir())]


@pytest.mark.parametrize("name", targets.NAMES)
def test_reader_survives_its_corpus_and_mutations(rng, tmp_path, name):
    seed = str(rng.randrange(1 << 32))
    done = run_fuzz(tmp_path, name, "--seconds", "2", "--seed", seed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\n0 findings\n")


def test_fuzzer_finds_a_planted_fault_of_each_kind(tmp_path):
    done = run_fuzz(tmp_path, targets.PLANTED, "--seconds", "0", "--hang-seconds", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    found = {}
    for path in (tmp_path / targets.PLANTED / "findings").glob("*.txt"):
        found[path.with_suffix("").read_bytes()] = path.name.partition("-")[0]
    assert found == {
        b"crash": "crash",
        b"hang": "hang",
        b"exception": "exception",
        b"message": "message",
        b"memory": "memory",
        b"objects": "leak",
        b"descriptors": "leak",
    }


def test_corpus_is_small_and_has_inputs_for_every_reader():
    assert {path.name for path in targets.CORPUS.iterdir()} == {*targets.NAMES, targets.PLANTED}
    sizes = [path.stat().st_size for path in targets.CORPUS.glob("*/*")]
    assert max(sizes) <= MOST_BYTES
    assert sum(sizes) <= CORPUS_BYTES


def test_one_seed_gives_the_same_mutations():
    one, other = corpus("rmm_log")[0], corpus("statistics")[0]
    first, second = (
        [mutate(rng, one, other, (b"free",)) for _ in range(100)]
        for rng in (random.Random(5), random.Random(5))
    )
    assert first == second
    assert len(set(first)) > 90


def is_archive(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.testzip() is None


def has_a_right_checksum(data):
    copy = data[structure.PAGE_START :]
    length = int.from_bytes(copy[4:8], "little")
    return zlib.crc32(copy[4:length]) == int.from_bytes(copy[:4], "little")


@pytest.mark.parametrize(
    ("name", "change", "is_readable"),
    [
        ("snapshot", structure.in_json, json.loads),
        ("npz", structure.in_zip, is_archive),
        ("onnx_model", structure.in_onnx, onnx.ModelProto.FromString),
        ("page", structure.checksummed, has_a_right_checksum),
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
