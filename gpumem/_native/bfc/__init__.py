"""The chunk table: best fit with coalescing over regions of addresses. Needs only libc."""
