"""Graphs of a model, where its nodes run, and where its tensors lie.

>>> from gpumem.planning import GraphBuilder
>>> builder = GraphBuilder()
>>> x = builder.input("x", "float32", (8, 16))
>>> node = builder.node("Relu", [x], [builder.value("y", "float32", (8, 16))])
>>> builder.build(outputs=["y"]).values["y"].nbytes
512
"""

from __future__ import annotations

from gpumem.planning.assignment.copies import CopyPlan, PlannedCopy, plan_copies
from gpumem.planning.assignment.partitioning import partition
from gpumem.planning.assignment.placement import Assignment, Placement, Refusal, Step
from gpumem.planning.assignment.targets import Target
from gpumem.planning.graph.graph import GraphBuilder, ModelGraph, Node
from gpumem.planning.graph.values import Value
from gpumem.planning.iteration._planned import IterationReport, PlannedResource
from gpumem.planning.iteration.recorded import IterationPlan, plan
from gpumem.planning.iteration.recording import IterationRecording
from gpumem.planning.memory.memory_plan import MemoryPlan, plan_memory
from gpumem.planning.memory.places import MemoryBlock, Place

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
