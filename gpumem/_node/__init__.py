"""The budget of a node: limits that processes of one machine share."""

from gpumem._node.node import NodeView, node_files

__all__ = ["NodeView", "node_files"]
