"""The host device's answers to what documentation leaves open, beside those of an H200."""

import json
import os
from pathlib import Path

import pytest
from conftest import child_environment
from helpers.child import python

HERE = Path(__file__).resolve().parent
H200 = json.loads((HERE / "answers_h200.json").read_text())

# Where the two differ on purpose; ARCHITECTURE.md, "The host device and a GPU", says why.
DIFFERENCES = {
    ("mapping", "past the end of a large reservation"): "INVALID_VALUE",
    ("reserving", "a hint at 16 TiB is honoured"): True,
    ("access", "set over a gap"): "INVALID_VALUE",
    ("what_a_pool_counts_as_used", "used after a plain free"): 0,
    ("what_a_pool_counts_as_used", "and after synchronizing"): 0,
    ("what_a_pool_counts_as_used", "used before an allocation's turn"): 2 << 20,
    ("what_a_pool_counts_as_used", "used before a free's turn"): 0,
    ("what_a_pool_counts_as_used", "used after it"): 0,
    ("dma_buf", "supported"): 0,
    ("dma_buf", "cuMemAlloc"): "NOT_SUPPORTED",
    ("dma_buf", "mapped"): "NOT_SUPPORTED",
    ("captured_calls", "7 cuMemAllocAsync"): "STREAM_CAPTURE_UNSUPPORTED, status 1, 0 nodes",
    ("captured_calls", "8 cuMemFreeAsync"): "STREAM_CAPTURE_UNSUPPORTED, status 1, 0 nodes",
}
# Host functions may not call a driver: here no call passes. A forked child starts afresh.
DIFFERENCES |= {
    ("a_driver_call_in_a_host_function", call): "NOT_PERMITTED"
    for call, answer in H200["a_driver_call_in_a_host_function"].items()
    if answer != "NOT_PERMITTED"
}
DIFFERENCES |= {
    ("a_forked_child", call): answer
    for call, answer in {
        "cuMemAlloc": "INVALID_CONTEXT",
        "cuStreamQuery": "INVALID_HANDLE",
        "cuCtxGetCurrent": "SUCCESS",
        "cuMemFree": "INVALID_VALUE",
        "cuEventQuery": "INVALID_HANDLE",
        "cuInit": "SUCCESS",
        "cuDeviceGetCount": "SUCCESS",
        "cuDevicePrimaryCtxRetain": "SUCCESS",
    }.items()
}


@pytest.fixture(scope="session")
def answers(library):
    return json.loads(python(HERE / "answers.py", env=child_environment(library)).stdout)


@pytest.mark.parametrize("question", sorted(H200))
def test_answers_equal_an_h200s_but_for_listed_differences(question, answers):
    expected = dict(H200[question])
    expected |= {name: value for (asked, name), value in DIFFERENCES.items() if asked == question}
    assert answers[question] == expected


def test_every_listed_difference_exists():
    same = [key for key, value in DIFFERENCES.items() if H200[key[0]][key[1]] == value]
    assert not same
    assert all(name in H200[question] for question, name in DIFFERENCES)


def test_questions_equal_those_put_to_the_h200(answers):
    assert sorted(answers) == sorted(H200)
    assert os.environ.get("GPUMEM_TEST_DRIVER") is None
