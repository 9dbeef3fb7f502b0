"""The budget of a node: limits that processes of one machine share."""

from gpumem._node.node import NodeView, hand_over_leased, node_files

__all__ = ["NodeView", "hand_over_leased", "node_files"]
