"""Offsets of a graph's values in one block per memory: found, proven by a replay, and used."""
