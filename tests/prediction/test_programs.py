"""Small programs, predicted and compared with their runs on a GPU."""

import json
import sys
from pathlib import Path

import pytest
from helpers.child import program
from prediction.null_cuda import environment

from gpumem.prediction import predict_script

pytestmark = pytest.mark.usefixtures("needs_pytorch")
ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests/prediction/programs"
SCRIPTS = ROOT / "bench/scripts"
PEAKS = json.loads((ROOT / "bench/scripts/h200.json").read_text())["peaks"]
LIMITS = {"live": 0.002, "default": 0.01, "expandable": 0.005, "gpumem": 0.02}
"""How far a predicted peak may be from that of a GPU, as a part of it."""
OF_CONVOLUTIONS = {"live": 0.015, "default": 0.21, "expandable": 0.015, "gpumem": 0.02}
"""On the GPU cuDNN takes larger workspaces than it states without one."""


@pytest.mark.parametrize(
    ("path", "limits"),
    [
        (PROGRAMS / "image_classifier.py", OF_CONVOLUTIONS),
        (PROGRAMS / "language_model.py", LIMITS),
        (PROGRAMS / "text_generator.py", LIMITS),
        (SCRIPTS / "others/recurrent.py", LIMITS),
    ],
    ids=lambda value: getattr(value, "stem", ""),
)
def test_program_has_the_peaks_of_an_h200(path, limits):
    runs = predict_script([str(path)], gpu="h200").runs
    for allocator, real in PEAKS[path.stem].items():
        run = runs[allocator]
        assert run.is_complete, run.output
        assert run.live == pytest.approx(real["live"], rel=limits["live"]), allocator
        assert run.reserved == pytest.approx(real["reserved"], rel=limits[allocator]), allocator


def test_bench_of_scripts_counts_what_a_prediction_counts(tmp_path):
    script = str(PROGRAMS / "text_generator.py")
    command = ("-m", "bench.script_peaks", "--allocators", "default", "--", script)
    env = environment(tmp_path)
    done = program(sys.executable, *command, cwd=ROOT, env=env)
    row = json.loads(done.stdout)
    run = predict_script([script], gpu="h200", allocators=["default"]).runs["default"]
    assert (row["end"], row["live"], row["reserved"]) == ("script", run.live, run.reserved)
