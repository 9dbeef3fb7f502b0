"""Limits in a tree, charged and refunded by atomic operations alone."""
