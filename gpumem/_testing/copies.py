"""Thresholds and sizes of staged copies, which tests and measurements set."""

from gpumem._copy.copy import set_staged_from
from gpumem._copy.staged import SLOT_BYTES, SLOTS_IN_FLIGHT, set_pipeline, set_threads

__all__ = ["SLOTS_IN_FLIGHT", "SLOT_BYTES", "set_pipeline", "set_staged_from", "set_threads"]
