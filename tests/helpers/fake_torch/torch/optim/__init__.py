"""Optimizers: there are none."""
