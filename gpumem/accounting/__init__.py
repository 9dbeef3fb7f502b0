"""Costs of a graph's nodes on a device, and limits of their sum.

An accountant prices nodes, keeps the sum and compares it with a limit; `gpumem.planning.partition`
places the nodes by it. Of a graph it uses only the attributes of `CostedNode`.

>>> from gpumem.accounting import AdHocAccountant, ResourceCount
>>> accountant = AdHocAccountant(threshold=ResourceCount.from_bytes(1 << 20))
>>> accountant.consumed, accountant.stop_requested
(ResourceCount.from_bytes(0), False)
"""

from __future__ import annotations

from gpumem.accounting.accountant import Accountant, AdHocAccountant
from gpumem.accounting.counts import ResourceCount
from gpumem.accounting.settings import Accountants, accountants_from_setting
from gpumem.accounting.statistics import (
    NodeStats,
    StatsAccountant,
    StatsRecorder,
    read_stats,
    unique_node_name,
)

__all__ = [
    "Accountant",
    "Accountants",
    "AdHocAccountant",
    "NodeStats",
    "ResourceCount",
    "StatsAccountant",
    "StatsRecorder",
    "accountants_from_setting",
    "read_stats",
    "unique_node_name",
]
__dir__ = __all__.copy
