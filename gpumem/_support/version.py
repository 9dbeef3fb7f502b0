"""The version of gpumem."""

VERSION = "0.1.0"
