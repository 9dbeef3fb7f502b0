"""Which device runs each node, and what is copied between memories for that."""

from gpumem.planning.assignment.copies import CopyPlan, PlannedCopy, plan_copies
from gpumem.planning.assignment.partitioning import partition
from gpumem.planning.assignment.passes import STRATEGIES
from gpumem.planning.assignment.placement import Assignment, Placement, Refusal, Step, Target

__all__ = [
    "STRATEGIES",
    "Assignment",
    "CopyPlan",
    "Placement",
    "PlannedCopy",
    "Refusal",
    "Step",
    "Target",
    "partition",
    "plan_copies",
]
