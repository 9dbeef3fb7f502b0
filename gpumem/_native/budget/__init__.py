"""Limits in a tree, charged and given back by atomic operations alone."""
