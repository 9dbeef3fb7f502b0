"""An offset in one block for every value of a graph, proven by a replay."""
