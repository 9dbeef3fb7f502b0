"""`gpumem.Arena`: its class, and functions by subject that its methods call."""
