"""The version of gpumem."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
