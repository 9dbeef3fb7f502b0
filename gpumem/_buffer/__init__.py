"""Buffers, the base of every memory resource, streams, and the order of work on them."""
