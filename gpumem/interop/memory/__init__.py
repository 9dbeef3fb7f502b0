"""Memory of other APIs and processes as tensors.

``kinds`` has a row for each type of handle. ``_external_memory`` has `ExternalMemory`: it maps a
handle, counts the driver's objects of an import, and makes tensors in it. ``placement`` checks the
bounds of these.
"""
