"""Plans of a recorded iteration, and a resource that follows such a plan."""

from gpumem.planning.iteration._planned import PlannedResource
from gpumem.planning.iteration.recorded import (
    IterationPlan,
    IterationRecording,
    IterationReport,
    plan,
)

__all__ = ["IterationPlan", "IterationRecording", "IterationReport", "PlannedResource", "plan"]
