"""Partition: each device in turn gets the nodes that it supports and its budget allows.

>>> from gpumem.accounting import AdHocAccountant
>>> from gpumem.planning import GraphBuilder, partition
>>> builder = GraphBuilder()
>>> last = builder.input("x", "uint8", (100,))
>>> for name in "abc":
...     node = builder.node("Relu", [last], [builder.value(name, "uint8", (100,))])
...     last = name
>>> budget = AdHocAccountant(threshold=200, percent=100)
>>> placement = partition(builder.build(["c"]), ["cuda:0", "host"], {"cuda:0": budget})
>>> print(placement.report())
Node(Relu -> a): cuda:0 accepts it, at 100 B
Node(Relu -> b): cuda:0 accepts it, at 100 B
Node(Relu -> c): host:0 accepts it (cuda:0: needs 100 B, and 0 B of 200 B are left)
>>> budget.consumed
ResourceCount.from_bytes(200)
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpumem._support.arguments import refuse, require
from gpumem._support.sizes import exact_size
from gpumem.accounting import Accountant, Accountants, AdHocAccountant, ResourceCount
from gpumem.accounting.nodes import key_of
from gpumem.accounting.settings import DeviceName
from gpumem.device import Device
from gpumem.errors import ConfigError, ConfigWarning, ModelGraphError
from gpumem.planning.assignment.layers import LayerRules
from gpumem.planning.assignment.passes import STRATEGIES, Outcome, Proposal
from gpumem.planning.assignment.placement import Assignment, Placement, Refusal, Target
from gpumem.planning.graph import ModelGraph, Node
from gpumem.planning.graph.graph import naming_the_largest


def partition(
    graph: ModelGraph,
    devices: Iterable[Target | Device | str],
    accountants: Mapping[DeviceName, Accountant] | None = None,
    strategy: str = "greedy",
    settings: Mapping[str, str] | None = None,
) -> Placement:
    """Choose the device of each node.

    The devices are tried in the given order. Each is offered the remaining nodes that it supports;
    it gets nodes, or groups that it fuses, as long as its accountant allows. A sum of exactly the
    threshold fits. The remaining nodes are offered to the next device.

    Parameters
    ----------
    graph : ModelGraph
    devices : iterable of Target, Device or str
        In order of preference.
    accountants : Mapping, optional
        Accountants by device, under any of its names. A device without one has no limit. Costs
        committed before count against their thresholds; pending costs are dropped.
    strategy : {"greedy", "best"}
        ``"greedy"`` stops at a device's first node that does not fit, which keeps its part of the
        graph in one piece. ``"best"`` searches for the nodes that fill its memory most;
        `Placement.gains` has the gain.
    settings : Mapping, optional
        ONNX Runtime's ``session.layer_assignment_settings`` or
        ``session.name_based_layer_assignment``, such as ``"gpu(layers.0/, layers.1/); cpu(embed)"``
        or ``"cuda:1(=head)"``. The first key compares `Node.layer_ann`: with the beginnings of
        annotations, of which the first in the text decides, then with whole ones after ``=``. The
        second key finds patterns in `Node.name`, of which the longest decides. A node that a rule
        assigns is not offered to devices before that one; if that one does not take it, the
        devices after it may. Nodes in the graphs of a node run where that node runs. With
        ``session.strict_workspace_verification`` = ``"1"``, a node that declares a larger
        `Node.workspace` after a layout change than its cost allowed is an error.

    Returns
    -------
    Placement
        Its nodes' costs are committed.

    Raises
    ------
    TypeError
        `graph` is not a ModelGraph, `devices` is not an iterable of devices, or `accountants` is
        not a Mapping.
    ModelGraphError
        A node that no device accepts; a proposal that is not a group of offered nodes, or cannot
        run as one; with strict verification, a workspace larger than reserved. Nothing is
        committed.
    ModelSizeError
        More than 2**64 - 1 bytes on a device. Nothing is committed.
    ConfigError
        No device, a device named twice, an accountant of none of them or of two, an unknown
        strategy or key, both keys, or a setting that is not of that form.

    Warns
    -----
    ConfigWarning
        A rule in `settings` names none of the devices, or decides for no node; a workspace is
        larger than reserved.

    Examples
    --------
    >>> from gpumem.accounting import AdHocAccountant
    >>> from gpumem.planning import GraphBuilder, partition
    >>> builder = GraphBuilder()
    >>> x = builder.input("x", "uint8", (100,))
    >>> _ = builder.node("Relu", [x], [builder.value("y", "uint8", (100,))])
    >>> tight = AdHocAccountant(threshold=99, percent=100)
    >>> partition(builder.build(["y"]), ["cuda:0", "host"], {"cuda:0": tight})
    <gpumem.planning.Placement of 1 nodes: 0 on cuda:0, 1 on host:0>
    """
    require("graph", graph, ModelGraph, "a ModelGraph")
    targets = _checked_targets(devices)
    known = _checked_accountants(accountants, targets)
    if strategy not in STRATEGIES:
        raise ConfigError(f"invalid strategy {strategy!r}: expected {', '.join(STRATEGIES)}")
    rules = LayerRules(settings or {}, [target.device for target in targets])
    for accountant in known.values():
        accountant.reset_for_new_pass()
    work = _Partition(graph, strategy, rules)
    try:
        with naming_the_largest(graph):
            for target in targets:
                work.offer(target, known.get(target.device) or AdHocAccountant())
            placement = work.placement(targets, known)
        for text in work.overruns:
            if rules.is_strict:
                raise ModelGraphError(text)
            warnings.warn(text, ConfigWarning, stacklevel=2)
        rules.warn()
    except BaseException:
        for accountant in known.values():
            accountant.reset_for_new_pass()
        raise
    for device, accountant in known.items():
        accountant.commit(placement.nodes_on(device))
    return placement


def _checked_targets(devices: Iterable[Target | Device | str]) -> list[Target]:
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        refuse("devices", devices, 'an iterable of devices, such as ["cuda:0", "host"]')
    targets = [Target.of(given) for given in devices]
    names = [target.device for target in targets]
    if not targets or len(set(names)) < len(names):
        raise ConfigError(
            f"invalid devices {list(map(str, names))}: expected one or more, each once"
        )
    return targets


def _checked_accountants(
    accountants: Mapping[DeviceName, Accountant] | None, targets: Sequence[Target]
) -> dict[Device, Accountant]:
    known = accountants if isinstance(accountants, Accountants) else Accountants(accountants)
    devices = {target.device for target in targets}
    found = {device: known[device] for device in devices if device in known}
    if len(found) < len(known):
        others = [str(device) for device in known if device not in devices]
        raise ConfigError(f"accountants of {others}, which are not among the devices")
    if len({id(accountant) for accountant in found.values()}) < len(found):
        raise ConfigError("one accountant is given for two devices: expected one for each")
    return found


@dataclass(frozen=True)
class _Taken:
    device: Device
    cost: ResourceCount
    group: int | None


@dataclass
class _Partition:
    """Nodes that devices have taken and refused so far, by `key_of`."""

    graph: ModelGraph
    strategy: str
    rules: LayerRules
    offered: set[Device] = field(default_factory=set)
    taken: dict[Hashable, _Taken] = field(default_factory=dict)
    refusals: dict[Hashable, list[Refusal]] = field(default_factory=dict)
    gains: dict[Device, str] = field(default_factory=dict)
    groups: int = 0
    overruns: list[str] = field(default_factory=list)

    def offer(self, target: Target, accountant: Accountant) -> None:
        """Place nodes on a device, in one pass, or in two around a layout change."""
        self.offered.add(target.device)
        outcome = STRATEGIES[self.strategy](self._proposals(target, self._open()), accountant)
        if outcome.gain:
            self.gains[target.device] = outcome.gain
        if target.relayout is not None and outcome.accepted:
            outcome = self._second_pass(target, accountant, outcome)
        for proposal in outcome.accepted:
            self._take(target, accountant, proposal)
        for proposal, why in outcome.refused.items():
            for node in proposal:
                self._refuse(node, target.device, why)

    def _open(self) -> list[Node]:
        return [node for node in self.graph if key_of(node) not in self.taken]

    def _proposals(self, target: Target, nodes: Sequence[Node]) -> list[Proposal]:
        supported = []
        for node in nodes:
            assigned = self.rules.device_of(node)
            if assigned is not None and assigned not in self.offered:
                self._refuse(node, target.device, f"a setting assigns it to {assigned}")
            elif target.supports is None or target.supports(node):
                supported.append(node)
            else:
                self._refuse(node, target.device, f"it does not support {node.op_type}")
        return _in_order(supported, _checked_groups(target, supported))

    def _second_pass(self, target: Target, accountant: Accountant, first: Outcome) -> Outcome:
        """Change layouts; price nodes accepted before first, at their old price, then new ones."""
        assert target.relayout is not None
        before = {key_of(node) for node in self.graph}
        tentative = [node for proposal in first.accepted for node in proposal]
        self.graph = _checked_layout(target, self.graph, tentative)
        accountant.reset_for_new_pass()
        now = {key_of(node): node for node in self.graph}
        if gone := self.taken.keys() - now.keys():
            raise ModelGraphError(
                f"the layout change of {target.device} removes nodes of other devices: {gone}"
            )
        survivors = [_still_there(proposal, now) for proposal in first.accepted]
        fresh = [node for key, node in now.items() if key not in before]
        proposals = [proposal for proposal in survivors if proposal]
        proposals += self._proposals(target, fresh)
        outcome = STRATEGIES["greedy"](proposals, accountant)
        for proposal, why in first.refused.items():
            if still := _still_there(proposal, now):
                outcome.refused[still] = why
        return outcome

    def _take(self, target: Target, accountant: Accountant, proposal: Proposal) -> None:
        group = None
        if len(proposal) > 1:
            group, self.groups = self.groups, self.groups + 1
        for node in proposal:
            cost = accountant.cost(node)
            if node.workspace and node.workspace > (reserved := accountant.workspace(node)):
                self.overruns.append(
                    f"{node!r} declares a workspace of {exact_size(node.workspace)} after the "
                    f"layout change of {target.device}: {exact_size(reserved)} are reserved"
                )
            self.taken[key_of(node)] = _Taken(target.device, cost, group)

    def _refuse(self, node: Node, device: Device, why: str) -> None:
        self.refusals.setdefault(key_of(node), []).append(Refusal(device, why))

    def placement(
        self, targets: Sequence[Target], accountants: Mapping[Device, Accountant]
    ) -> Placement:
        assignments = []
        for node in self.graph:
            key = key_of(node)
            refusals = tuple(self.refusals.get(key, ()))
            if key not in self.taken:
                why = "; ".join(f"{one.device}: {one.why}" for one in refusals)
                raise ModelGraphError(f"no device accepts {node!r}: {why}")
            taken = self.taken[key]
            cost = taken.cost if taken.device in accountants else ResourceCount.none()
            assignments.append(Assignment(node, taken.device, cost, taken.group, refusals))
        consumed = {
            device: ResourceCount.from_bytes(
                sum(one.cost.total_bytes for one in assignments if one.device == device)
            )
            for device in accountants
        }
        return Placement(self.graph, targets, assignments, consumed, self.gains)


def _checked_groups(target: Target, supported: Sequence[Node]) -> list[Proposal]:
    if target.fuse is None:
        return []
    proposed = target.fuse(tuple(supported))
    groups = [_checked_group(target, group) for group in _listed(target, "groups", proposed)]
    offered = set(supported)
    for node in (node for group in groups for node in group):
        if node not in offered:
            raise ModelGraphError(
                f"{target.device} proposes {node!r}, which is not offered or is proposed twice"
            )
        offered.remove(node)
    return [group for group in groups if group]


def _checked_group(target: Target, group: object) -> Proposal:
    nodes = _listed(target, "nodes", group)
    for node in nodes:
        if not isinstance(node, Node):
            raise ModelGraphError(f"{target.device} proposes {node!r:.80}, which is not a Node")
    return tuple(nodes)


def _listed(target: Target, what: str, given: object) -> list[Any]:
    if not isinstance(given, Iterable):
        raise ModelGraphError(
            f"{target.device} proposes {given!r:.80}: fuse returns an iterable of {what}"
        )
    return list(given)


def _in_order(nodes: Sequence[Node], groups: Sequence[Proposal]) -> list[Proposal]:
    """Return proposals in the order of their first nodes; a node without a group is one."""
    group_of = {node: group for group in groups for node in group}
    position = {node: number for number, node in enumerate(nodes)}
    found = dict.fromkeys(group_of.get(node, (node,)) for node in nodes)
    return [tuple(sorted(proposal, key=position.__getitem__)) for proposal in found]


def _checked_layout(target: Target, graph: ModelGraph, nodes: Sequence[Node]) -> ModelGraph:
    assert target.relayout is not None
    changed = target.relayout(graph, tuple(nodes))
    if not isinstance(changed, ModelGraph):
        kind = type(changed).__name__
        raise ModelGraphError(
            f"the layout change of {target.device} must return a ModelGraph, not {kind}"
        )
    if (changed.inputs, changed.outputs) != (graph.inputs, graph.outputs):
        raise ModelGraphError(f"the layout change of {target.device} has other inputs or outputs")
    return changed


def _still_there(proposal: Proposal, now: Mapping[Hashable, Node]) -> Proposal:
    return tuple(now[key] for node in proposal if (key := key_of(node)) in now)
