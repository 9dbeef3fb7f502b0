"""Predictions of distributed scripts: rank 0 runs, over process groups without the other ranks."""

import ast
import textwrap

import pytest
from helpers.child import python
from prediction.null_cuda import require_gpumem_beneath_pytorch

from gpumem.errors import ConfigError
from gpumem.prediction import predict_script

pytestmark = pytest.mark.usefixtures("needs_pytorch")
MIB = 1 << 20

BEGIN = """
import os
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["0", "0", "4"]
assert torch.cuda.device_count() == 4
def train(model, size):
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(4):
        model(torch.ones(8, size, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

DATA_PARALLEL = """
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group()
train(DistributedDataParallel(torch.nn.Linear(1024, 1024, device="cuda")), 1024)
"""

SHARDED = """
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
model = torch.nn.Linear(4096, 4096, bias=False, device="cuda")
fully_shard(model)
assert model.weight.to_local().shape == (1024, 4096)
train(model, 4096)
"""

TENSOR_PARALLEL = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))
model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024)).cuda()
plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
model = parallelize_module(model, mesh["tensor"], plan)
assert model[0].weight.to_local().shape == (2048, 1024)
train(model, 1024)
"""


OFFLOADED = """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from gpumem.integrations import torch as gpumem_torch
dist.init_process_group("nccl")
blocks = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(3)]
model = torch.nn.Sequential(*blocks).cuda()
model[1][0].weight.requires_grad_(False)
for each in (*model, model):
    fully_shard(each, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad])
offloaded = gpumem_torch.offload(limit="1MiB", min_bytes=1)
for _ in range(2):
    with offloaded:
        loss = model(torch.ones(64, 512, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print({path: moves.moved for path, moves in offloaded.report().modules.items()})
"""
INPUTS = 2 * 64 * 512 * 2  # bytes in bfloat16 that a layer saves in two steps


@pytest.fixture
def predicted(tmp_path):
    """Predict rank 0 of 4 of a script."""

    def predict(script, allocator="default"):
        path = tmp_path / "train.py"
        path.write_text(BEGIN + textwrap.dedent(script))
        return predict_script([str(path)], allocators=[allocator], ranks=4).runs[allocator]

    return predict


@pytest.mark.parametrize("script", [DATA_PARALLEL, SHARDED, TENSOR_PARALLEL])
def test_rank_0_trains_without_the_others(predicted, script):
    run = predicted(script)
    assert (run.end, run.steps) == ("steps", 3), run.output
    assert run.live > 8 * MIB
    assert "memory of NCCL is not counted" in run.assumed


def test_offload_of_a_sharded_model_moves_activations_and_no_weights(predicted):
    require_gpumem_beneath_pytorch()
    run = predicted(OFFLOADED, "gpumem")
    assert run.end == "script", run.output
    moved = ast.literal_eval(run.output.splitlines()[-1])
    # The second block's input is not saved, since its weight has no gradient.
    layers = ("0.0", "0.1", "1.1", "2.0", "2.1")
    assert moved == dict.fromkeys(layers, INPUTS)


def test_collectives_of_host_tensors_take_other_ranks_as_equal(predicted):
    run = predicted("""
        dist.init_process_group()
        group = dist.new_group(backend="gloo")
        value = torch.tensor([3])
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
        dist.all_gather(found, value, group=group)
        assert [int(each) for each in found] == [3] * 4
        dist.barrier(group)
        dist.barrier()
        objects = [{"seed": 7}]
        dist.broadcast_object_list(objects)
        assert objects == [{"seed": 7}]
        torch.empty(1, device="cuda")
        """)
    assert run.end == "script", run.output
    assert "values of other ranks are taken as those of rank 0" in run.assumed


@pytest.mark.parametrize(
    "call", ["all_gather_object([None] * 4, 1)", "gather_object(1, [None] * 4)"]
)
def test_objects_of_other_ranks_stop_the_script(predicted, call):
    run = predicted(f"dist.init_process_group()\ndist.{call}")
    assert (run.end, run.line.partition(":")[0]) == ("stopped", "train.py"), run.output
    assert call.partition("(")[0] in run.reason


def test_ranks_are_a_number_above_zero(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    with pytest.raises(ConfigError, match="ranks = 0"):
        predict_script([str(path)], ranks=0)
    refused = python("-m", "gpumem", "predict", "--ranks", "0", path, status=2)
    assert "--ranks" in refused.stderr
