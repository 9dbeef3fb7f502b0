"""The driver table: the names and versions of its functions, and how the CUDA driver is opened."""

from gpumem._native.driver.cuda import load as load_cuda_driver
from gpumem._native.driver.table import driver_entry_names

__all__ = ["driver_entry_names", "load_cuda_driver"]
