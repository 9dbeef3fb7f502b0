"""The table of driver functions, and what fills it: a CUDA driver or the host device."""
