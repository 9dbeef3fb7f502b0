"""Graphs of a model, where its nodes run, and where its tensors lie.

>>> from gpumem.planning import GraphBuilder
>>> builder = GraphBuilder()
>>> x = builder.input("x", "float32", (8, 16))
>>> node = builder.node("Relu", [x], [builder.value("y", "float32", (8, 16))])
>>> builder.build(outputs=["y"]).values["y"].nbytes
512
"""

from __future__ import annotations

from gpumem.planning._planned import IterationReport, PlannedResource
from gpumem.planning.copies import CopyPlan, PlannedCopy, plan_copies
from gpumem.planning.graph import GraphBuilder, ModelGraph, Node
from gpumem.planning.memory_plan import MemoryPlan, plan_memory
from gpumem.planning.partitioning import partition
from gpumem.planning.placement import Assignment, Placement, Refusal, Step
from gpumem.planning.places import MemoryBlock, Place
from gpumem.planning.recorded import IterationPlan, plan
from gpumem.planning.recording import IterationRecording
from gpumem.planning.targets import Target
from gpumem.planning.values import Value

__all__ = [
    "Assignment",
    "CopyPlan",
    "GraphBuilder",
    "IterationPlan",
    "IterationRecording",
    "IterationReport",
    "MemoryBlock",
    "MemoryPlan",
    "ModelGraph",
    "Node",
    "Place",
    "Placement",
    "PlannedCopy",
    "PlannedResource",
    "Refusal",
    "Step",
    "Target",
    "Value",
    "partition",
    "plan",
    "plan_copies",
    "plan_memory",
]
