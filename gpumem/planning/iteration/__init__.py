"""Plans of a recorded iteration, and the resource that follows one."""
