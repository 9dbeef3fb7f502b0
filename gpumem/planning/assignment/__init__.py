"""Which device runs each node, and what is copied between memories for that."""
