"""Sealed sets in a GPU's memory: bytes of a killed maker, PyTorch's tensors in the same memory."""

from __future__ import annotations

import pytest
from helpers.child import python

from gpumem import interop

torch = pytest.importorskip("torch", reason="needs torch as the other side")

MAKER = """
import os, signal
import torch
from gpumem import interop
weights = torch.nn.Linear(512, 512, device="cuda:0", dtype=torch.bfloat16).requires_grad_(False)
weights.weight.fill_(2)
weights.bias.fill_(3)
interop.seal("weights", weights.state_dict(), digest=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_pytorch_uses_the_tensors_of_a_killed_maker_in_place():
    python("-c", MAKER, status=-9)
    try:
        with interop.open("weights", copy=["bias"], verify=True) as kept:
            assert str(kept["weight"].device) == "cuda:0"
            with pytest.raises(BufferError, match="read-only"):
                kept["weight"].fill(0)
            layer = torch.nn.Linear(512, 512, device="meta", dtype=torch.bfloat16)
            layer.load_state_dict(kept.state_dict(), assign=True)
            assert layer.weight.data_ptr() == kept["weight"].ptr
            found = layer(torch.ones(1, 512, device="cuda:0", dtype=torch.bfloat16))
            assert found.tolist() == [[1024.0] * 512]  # 1027 to 8 bits
            layer.bias.data.fill_(0)
        assert interop.open("weights")["bias"].to("host").tolist() == [3.0] * 512
    finally:
        interop.drop("weights", force=True)


def test_set_has_one_part_in_each_memory():
    arrays = {"gpu": torch.arange(5, device="cuda:0"), "host": torch.arange(7)}
    try:
        with interop.seal("mixed", arrays, digest=True), interop.open("mixed", verify=True) as kept:
            assert interop.sealed_sets()[0]["parts"] == 2
            assert [str(each.device) for each in kept.values()] == ["cuda:0", "host:0"]
            assert [each.tolist() for each in kept.state_dict().values()] == [
                list(range(5)),
                list(range(7)),
            ]
    finally:
        interop.drop("mixed", force=True)
