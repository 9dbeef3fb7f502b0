"""Three small programs, predicted and compared with their runs on a GPU."""

import json
import sys
from pathlib import Path

import pytest
from helpers.child import program
from prediction.null_cuda import environment

from gpumem.errors import GpumemError
from gpumem.prediction import predict_script
from gpumem.prediction.pytorch import require

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests/prediction/programs"


@pytest.fixture(autouse=True)
def _needs_pytorch():
    try:
        require()
    except GpumemError as error:
        pytest.skip(str(error))


def test_bench_of_scripts_counts_what_a_prediction_counts(tmp_path):
    script = str(PROGRAMS / "text_generator.py")
    command = ("-m", "bench.script_peaks", "--allocators", "default", "--", script)
    env = environment(tmp_path, cuda=require().cuda)
    done = program(sys.executable, *command, cwd=ROOT, env=env)
    row = json.loads(done.stdout)
    run = predict_script([script], gpu="h200", allocators=["default"]).runs["default"]
    assert (row["end"], row["live"], row["reserved"]) == ("script", run.live, run.reserved)
