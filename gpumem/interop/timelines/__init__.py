"""Timeline semaphores: gpumem's own on the host, and those of other APIs."""
