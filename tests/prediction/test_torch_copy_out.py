"""Copies of a module's and an optimizer's tensors to safetensors files, over the null CUDA."""

import pytest
from prediction.null_cuda import over_null_cuda, require_cuda_build

require_cuda_build()
pytest.importorskip("safetensors", reason="safetensors is not installed")


def test_module_and_optimizer_are_read_by_safetensors_and_by_distributed_checkpoints():
    said = over_null_cuda(
        """
import os, tempfile, warnings
import gpumem, torch
from gpumem.integrations import torch as integration
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
integration.enable()
model = torch.nn.Sequential(torch.nn.Linear(300, 700), torch.nn.Linear(700, 5).bfloat16()).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
optimizer.step()
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
path = os.path.join(tempfile.mkdtemp(), "state.safetensors")
copying = gpumem.get_default_resource("cuda:0").copy_out(state, path)
copying.wait()
found = load_file(path)
print(len(found), copying.done_bytes == copying.total_bytes)
for name, tensor in state["model"].items():
    print(name, found["model." + name].dtype is tensor.dtype, found["model." + name].shape)
print(found["optimizer.0.step"].item(), found["optimizer.3.exp_avg"].shape)
wanted = {name: torch.full_like(tensor, 7) for name, tensor in found.items()}
warnings.filterwarnings("ignore", "torch.distributed is disabled")
load(wanted, storage_reader=HuggingFaceStorageReader(os.path.dirname(path)), no_dist=True)
print(all(torch.equal(wanted[name], tensor) for name, tensor in found.items()))
"""
    )
    assert said.splitlines() == [
        "16 True",
        "0.weight True torch.Size([700, 300])",
        "0.bias True torch.Size([700])",
        "1.weight True torch.Size([5, 700])",
        "1.bias True torch.Size([5])",
        "1.0 torch.Size([5])",
        "True",
    ]
