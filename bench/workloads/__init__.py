"""Steps of real training and inference, in plain PyTorch, to measure allocators with.

Weights are random; each step draws its shapes (batch sizes, lengths, resolutions) and its data from
seeded generators. So two runs of one seed do the same work and, because everything that PyTorch can
be told is deterministic, return the same bits: the allocator must not change them.

`WORKLOADS` names them without importing PyTorch; `make` does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from bench.workloads.workload import Workload

# name -> module and class
WORKLOADS = {
    "gpt2_train": ("gpt2", "Training"),
    "gpt2_generate": ("gpt2", "Generation"),
    "resnet50_train": ("resnet", "Training"),
    "mixtral_train": ("mixtral", "Training"),
    "llama_train": ("llama", "Training"),
    "llama_serve": ("llama", "Serving"),
    "gpt2_checkpoint_train": ("gpt2", "CheckpointTraining"),
    "llama_generate": ("llama", "Generation"),
    "generate_then_train": ("llama", "GenerateThenTrain"),
    "bert_train": ("encoders", "BertTraining"),
    "t5_train": ("encoders", "T5Training"),
    "unet_train": ("vision", "UNetTraining"),
    "detection_train": ("vision", "DetectionTraining"),
    "swin_averaged_train": ("vision", "SwinTraining"),
    "gat_train": ("graphs", "GatTraining"),
    "sampled_gnn_train": ("graphs", "SampledTraining"),
}
# Captured once, replayed by each step: fixed shapes. The first needs a CUDA device; the second
# computes without graphs on others, and needs what `torch.compile` needs.
GRAPHS = {
    "llama_graph_train": ("llama", "GraphTraining"),
    "llama_compiled_train": ("llama", "CompiledTraining"),
}

# By several processes, each with a device; see `bench.torch_ranks`.
PARALLEL = {
    "fsdp2_train": ("parallel", "FullyShardedTraining"),
    "tensor_parallel_train": ("parallel", "TensorParallelTraining"),
    "pipeline_train": ("parallel", "PipelineTraining"),
}

# Allocator beneath PyTorch -> environment of its process.
CONFIGURATIONS: dict[str, dict[str, str]] = {
    "native": {},
    "expandable": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    "full": {},  # gpumem in place of PyTorch's allocator
    "pool": {},  # gpumem beneath it
}


def make(
    name: str, size: str, device: torch.device, seed: int, scale: int | None = None
) -> Workload:
    """Make the workload `name`, in size "tiny" or "full"; `scale` instead of that size's own."""
    module, class_name = (WORKLOADS | GRAPHS | PARALLEL)[name]
    kind = getattr(importlib.import_module(f"bench.workloads.{module}"), class_name)
    workload: Workload = kind(size, device, seed, scale)
    return workload
