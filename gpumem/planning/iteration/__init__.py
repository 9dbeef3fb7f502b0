"""The same for a recorded iteration: a resource that follows the plan."""
