"""Graphs of a model, devices of its nodes, and offsets of its tensors.

`graph` has the graphs, `assignment` chooses the devices of nodes and plans copies, `memory` assigns
an offset to every value.

>>> from gpumem.planning import GraphBuilder
>>> builder = GraphBuilder()
>>> x = builder.input("x", "float32", (8, 16))
>>> node = builder.node("Relu", [x], [builder.value("y", "float32", (8, 16))])
>>> builder.build(outputs=["y"]).values["y"].nbytes
512
"""

from __future__ import annotations

from gpumem.planning.assignment.copies import CopyPlan, plan_copies
from gpumem.planning.assignment.partitioning import partition
from gpumem.planning.assignment.placement import Assignment, Placement, Target
from gpumem.planning.graph import GraphBuilder, ModelGraph, Node, Value
from gpumem.planning.memory.memory_plan import MemoryPlan, plan_memory

__all__ = [
    "Assignment",
    "CopyPlan",
    "GraphBuilder",
    "MemoryPlan",
    "ModelGraph",
    "Node",
    "Placement",
    "Target",
    "Value",
    "partition",
    "plan_copies",
    "plan_memory",
]
__dir__ = __all__.copy
