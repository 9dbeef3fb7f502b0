"""The garbage collection before PyTorch's error, over the null CUDA: tensors in cycles."""

from prediction.null_cuda import over_null_cuda, require_cuda_build

require_cuda_build()

SCRIPT = """
import gc
import gpumem
from gpumem.integrations import torch as integration
arena = gpumem.Arena("cuda:0", {{"max_mem": 64 * MIB, "oom_collect_ms": {}}})
integration.enable(arena, mode="full")
import torch
collections = []
gc.callbacks.append(lambda phase, facts: collections.append(phase))
def tensor(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
class Trainer:
    pass
def request(mib):
    gc.collect()
    trainer = Trainer()
    trainer.this, trainer.loss = trainer, tensor(40)
    del trainer
    gc.disable()
    collections.clear()
    try:
        tensor(mib)
        print("served", len(collections))
    except torch.OutOfMemoryError as error:
        print("refused", len(collections), str(error))
    gc.enable()
keeper = tensor(16)
"""


def test_tensors_in_cycles_are_freed_once_for_a_request_and_the_error_names_the_cycles():
    said = over_null_cuda(SCRIPT.format(10_000) + "request(48)\nrequest(60)\n")
    (served, of_served), (refused, of_refused) = (
        line.split(" ", 2)[:2] for line in said.splitlines()[:2]
    )
    assert (served, refused) == ("served", "refused")
    assert of_refused == of_served != "0"
    assert "freed 40.0 MiB, which reference cycles held: Trainer.this -> Trainer (40.0 MiB)" in said


def test_tensors_in_cycles_stay_with_the_setting_at_0():
    said = over_null_cuda(SCRIPT.format(0) + "request(48)\n")
    assert said.startswith("refused 0 ")
    assert "collection" not in said
