"""Copies between any memories."""

from gpumem._copy.copy cimport (
    copy_elements, fill_captured, fill_elements, refuse_captured, Side,
)
