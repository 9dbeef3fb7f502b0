"""Memory of other APIs and processes as tensors: which handles, how mapped, where placed."""
