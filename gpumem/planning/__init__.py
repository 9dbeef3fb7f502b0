"""Graphs of a model, where its nodes run, and where its tensors lie.

>>> from gpumem.planning import GraphBuilder
>>> builder = GraphBuilder()
>>> x = builder.input("x", "float32", (8, 16))
>>> node = builder.node("Relu", [x], [builder.value("y", "float32", (8, 16))])
>>> builder.build(outputs=["y"]).values["y"].nbytes
512
"""

from __future__ import annotations

from gpumem.planning.graph import Graph, GraphBuilder, Node
from gpumem.planning.values import Value

__all__ = ["Graph", "GraphBuilder", "Node", "Value"]
