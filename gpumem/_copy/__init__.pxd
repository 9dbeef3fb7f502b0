"""Copies between any memories."""

from gpumem._copy.copy cimport copy_elements, Side
from gpumem._copy.driver cimport fill_elements
