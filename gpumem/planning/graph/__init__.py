"""A model's graph: values and nodes, checked, built by hand or read from ONNX files."""

from gpumem.planning.graph.graph import GraphBuilder, ModelGraph, Node, Value

__all__ = ["GraphBuilder", "ModelGraph", "Node", "Value"]
__dir__ = __all__.copy
