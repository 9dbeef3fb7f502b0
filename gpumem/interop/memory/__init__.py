"""Memory of other APIs and processes as tensors.

``kinds`` has a row for each type of handle, ``_memory`` is `ExternalMemory`: it maps a handle and
makes tensors in it, ``placement`` checks their bounds, ``_mapping`` counts what drivers hold for an
import.
"""
