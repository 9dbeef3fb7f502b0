"""Plans of a recorded iteration, and a resource that follows such a plan."""
