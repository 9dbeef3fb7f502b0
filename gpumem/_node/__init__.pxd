"""The budget of a node."""

from gpumem._node.node cimport bytes_of, device_of, node_join, node_of_level, NodeMember
