"""A short run of the stress finds nothing, and it does find what is wrong."""

import subprocess
from pathlib import Path

import pytest
from helpers.child import python

ROOT = Path(__file__).resolve().parents[2]


def run_stress(rng, *arguments: str) -> subprocess.CompletedProcess:
    seed = str(rng.randrange(1 << 32))
    return python("-m", "tests.stress", "--seed", seed, *arguments, cwd=ROOT, status=None)


def test_stress_finds_no_wrong_byte_and_no_unordered_access(rng):
    done = run_stress(rng, "--seconds", "6", "--find-misuse")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("0 wrong bytes, 0 leaks\n")


@pytest.mark.parametrize("policy", ["completed", "wait", "never"])
def test_stress_finds_memory_reused_before_its_work_is_done(rng, policy):
    done = run_stress(rng, "--seconds", "20", "--each", "2", "--policy", policy, "--lie")
    # Or its region went back to the driver before, which the device notices.
    found = [each in done.stdout for each in ("WrongBytes", "CUDA_ERROR_ILLEGAL_ADDRESS")]
    assert done.returncode, done.stdout + done.stderr
    assert any(found), done.stdout + done.stderr


def test_pairs_of_calls_find_no_wrong_byte_and_no_wrong_error(rng):
    done = run_stress(rng, "--pairs", "--rounds", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("121 pairs, 0 wrong bytes, 0 wrong errors\n")


def test_killed_makers_of_sealed_sets_leave_nothing(rng):
    done = run_stress(rng, "--sealed", "--rounds", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("left: none\n")


def test_killed_stopped_and_forking_processes_of_a_node_exceed_no_limit_and_lose_no_byte(rng):
    done = run_stress(rng, "--nodes", "8", "--seconds", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("0 sums above a limit, 0 bytes lost\n")
