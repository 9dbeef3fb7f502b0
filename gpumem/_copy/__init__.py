"""Copies between any two memories: planned in C, made by the CPU or by the driver."""
