"""Marks of tests that need what a machine may lack."""

import ctypes
import os
import shutil

import pytest

NEEDS_CXX = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler here"
)
NEEDS_OWN_MALLOC = pytest.mark.skipif(
    shutil.which("gcc") is None
    or not hasattr(ctypes.CDLL(None), "__libc_malloc")
    or "LD_PRELOAD" in os.environ,
    reason="the C library's malloc cannot be replaced: no gcc, not glibc, or replaced already",
)
