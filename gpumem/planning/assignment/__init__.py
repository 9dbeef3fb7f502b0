"""The device of each node, and the copies between memories."""
