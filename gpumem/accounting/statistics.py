"""Measured costs: the csv file in which ONNX Runtime keeps them, read and written.

One line per node, under a name that is unique in its model, because it ends in a hash of the names
that the node reads and makes: ``name,input,initializers,dynamic,temporary``, in bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from gpumem._support.arguments import is_integer, require
from gpumem._support.files import FilePath, open_regular
from gpumem.accounting.accountant import Accountant
from gpumem.accounting.counts import MAX_BYTES, ResourceCount, fitting
from gpumem.accounting.murmur import murmur3_x86_128
from gpumem.accounting.nodes import CostedNode, CostedValue, declared_workspace, nodes_of
from gpumem.errors import ConfigError

HEADER = "#name,input_sizes,initializers_sizes,total_dynamic_sizes,total_temp_allocations"
FIELDS = HEADER.removeprefix("#").split(",")


@dataclass(frozen=True)
class NodeStats:
    """Measured memory of one node, in bytes.

    Attributes
    ----------
    input_bytes : int
        Inputs, without weights, that no earlier node of the run read or made.
    initializer_bytes : int
        Weights that no earlier node of the run read.
    dynamic_bytes : int
        Outputs.
    temporary_bytes : int
        Other memory that it allocated while it ran.

    Examples
    --------
    >>> from gpumem.accounting import NodeStats
    >>> first, second = NodeStats(8, 0, 8, 100), NodeStats(16, 0, 4)
    >>> first.largest(second)
    NodeStats(input_bytes=16, initializer_bytes=0, dynamic_bytes=8, temporary_bytes=100)
    >>> first.total_bytes
    116
    """

    input_bytes: int = 0
    initializer_bytes: int = 0
    dynamic_bytes: int = 0
    temporary_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of the four."""
        return sum(self.as_tuple())

    def as_tuple(self) -> tuple[int, int, int, int]:
        """Return the four in the order of the file."""
        return astuple(self)

    def largest(self, other: NodeStats) -> NodeStats:
        """Return the larger of each of the four."""
        return NodeStats(*map(max, self.as_tuple(), other.as_tuple()))


def unique_node_name(node: CostedNode) -> str:
    """Return the name of a node in a statistics file.

    It consists of the node's name, or its operator if it has none; ``_``; and, in decimal, the low
    64 bits of a MurmurHash3 (x86, 128 bits) over the names of its inputs and outputs in order. Each
    name is hashed with the low 32 bits of the hash before it as seed. An input or output that is
    left out has an empty name.

    Examples
    --------
    >>> from gpumem.accounting import unique_node_name
    >>> from gpumem.planning import GraphBuilder
    >>> builder = GraphBuilder()
    >>> x = builder.input("x", "float32", (2,))
    >>> names = [unique_node_name(builder.node("Relu", [x], [y], name="relu")) for y in ("a", "b")]
    >>> names[0].startswith("relu_"), names[0] == names[1]       # their outputs differ
    (True, False)
    """
    (node,) = nodes_of(node)
    digest = bytes(16)
    for value in (*node.inputs, *node.outputs):
        name = "" if value is None else value.name
        digest = murmur3_x86_128(name.encode(), int.from_bytes(digest[:4], "little"))
    return f"{node.name or node.op_type}_{int.from_bytes(digest[:8], 'little')}"


# ---- the file ------------------------------------------------------------------------------------


def read_stats(path: FilePath) -> dict[str, NodeStats]:
    r"""Read a statistics file.

    Returns
    -------
    dict
        Statistics by unique node name. Of several lines of one name the last one counts; lines that
        are blank, that begin with ``#`` or have no name are skipped.

    Raises
    ------
    ConfigError
        The file cannot be read, or a line is not a name and four numbers from 0 to 2**64 - 1.

    Examples
    --------
    >>> import os, tempfile
    >>> from gpumem.accounting import read_stats
    >>> path = os.path.join(tempfile.mkdtemp(), "stats.csv")
    >>> with open(path, "w") as file:
    ...     _ = file.write("#name,input,initializers,dynamic,temporary\nrelu_7,8,0,8,100\n")
    >>> read_stats(path)["relu_7"].total_bytes
    116
    """
    try:
        with open_regular(path) as file:
            lines = file.read().decode().splitlines()
    except (OSError, ValueError) as error:  # a NUL in the name, not UTF-8
        raise ConfigError(f"statistics file {os.fspath(path)!r} cannot be read: {error}") from error
    stats: dict[str, NodeStats] = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            name, row = _read_line(line, f"{os.fspath(path)}, line {number}")
            if name:
                stats[name] = row
    return stats


def _read_line(line: str, where: str) -> tuple[str, NodeStats]:
    name, *numbers = line.strip().split(",")
    if len(numbers) != len(FIELDS) - 1:
        raise ConfigError(f"{where}: invalid {line!r:.80}: expected {','.join(FIELDS)}")
    values = [_read_bytes(*field, where) for field in zip(FIELDS[1:], numbers, strict=True)]
    return name.strip(), NodeStats(*values)


def _read_bytes(field: str, text: str, where: str) -> int:
    digits = text.strip()
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= 20
    if not is_number or int(digits) > MAX_BYTES:
        raise ConfigError(f"{where}: invalid {field} = {text!r:.40}: expected 0 to 2**64 - 1")
    return int(digits)


# ---- using and making the file -------------------------------------------------------------------


class StatsAccountant(Accountant):
    """Prices a node by its measured memory.

    The cost is the sum of the node's four numbers; 0 for a node that is not in the file.

    Parameters
    ----------
    stats : str, path or Mapping
        A statistics file, of ONNX Runtime or `StatsRecorder`; or the result of `read_stats`.
    threshold : ResourceCount or int, optional
        The limit in bytes. None, or a count of none: costs are kept and nothing is refused.

    Raises
    ------
    ConfigError
        As `read_stats`.

    Examples
    --------
    >>> from gpumem.accounting import NodeStats, StatsAccountant, unique_node_name
    >>> from gpumem.planning import GraphBuilder
    >>> builder = GraphBuilder()
    >>> x = builder.input("x", "float32", (2,))
    >>> relu = builder.node("Relu", [x], ["y"], name="relu")
    >>> accountant = StatsAccountant({unique_node_name(relu): NodeStats(8, 0, 8, 100)})
    >>> accountant.cost(relu)
    ResourceCount.from_bytes(116)
    """

    def __init__(
        self,
        stats: FilePath | Mapping[str, NodeStats],
        threshold: ResourceCount | int | None = None,
    ) -> None:
        super().__init__(threshold)
        self._stats = dict(stats) if isinstance(stats, Mapping) else read_stats(stats)

    def _own_bytes(self, node: CostedNode) -> int:
        stats = self._stats_of(node)
        return stats.total_bytes - stats.temporary_bytes

    def _workspace_of(self, node: CostedNode, own: int) -> int:
        return max(self._stats_of(node).temporary_bytes, declared_workspace(node) or 0)

    def _stats_of(self, node: CostedNode) -> NodeStats:
        return self._stats.get(unique_node_name(node), NodeStats())


class StatsRecorder:
    """Collects the memory of nodes over several runs, for a `StatsAccountant`.

    For each node the largest of all runs is kept. Each value counts once in a run: for the first
    node that reads or makes it.

    Examples
    --------
    >>> from gpumem.accounting import StatsRecorder
    >>> from gpumem.planning import GraphBuilder
    >>> builder = GraphBuilder()
    >>> x = builder.input("x", "float32", ("n",))
    >>> relu = builder.node("Relu", [x], ["y"], name="relu")
    >>> recorder = StatsRecorder()
    >>> for n in (4, 16, 8):
    ...     recorder.start_run()
    ...     recorder.record(relu, {"x": 4 * n, "y": 4 * n})
    >>> list(recorder.stats.values())[0]
    NodeStats(input_bytes=64, initializer_bytes=0, dynamic_bytes=64, temporary_bytes=0)
    """

    def __init__(self) -> None:
        self._stats: dict[str, NodeStats] = {}
        self._seen: set[CostedValue] = set()

    @property
    def stats(self) -> dict[str, NodeStats]:
        """A copy of the collected statistics, by unique node name."""
        return dict(self._stats)

    def start_run(self) -> None:
        """Begin a run: every value may count again."""
        self._seen.clear()

    def record(
        self,
        node: CostedNode,
        sizes: Mapping[str, int] | None = None,
        *,
        temporary_bytes: int = 0,
    ) -> None:
        """Record the memory of a node in this run.

        Parameters
        ----------
        node : Node
            The node that ran.
        sizes : Mapping, optional
            Bytes of its inputs and outputs by name; those of other values are ignored, so that one
            mapping serves all nodes of a run. If left out, the graph's sizes are used.
        temporary_bytes : int
            Other memory that it allocated.

        Raises
        ------
        ConfigError
            A size is out of range, or missing and unknown in the graph. Nothing is recorded.
        """
        (node,) = nodes_of(node)
        require("sizes", sizes, (Mapping, type(None)), "a Mapping or None")
        sizes = sizes or {}
        inputs = self._unseen(node.inputs, sizes)
        outputs = self._unseen(node.outputs, sizes)
        row = NodeStats(
            sum(size for value, size in inputs.items() if not value.is_initializer),
            sum(size for value, size in inputs.items() if value.is_initializer),
            sum(outputs.values()),
            _checked_size("temporary_bytes", temporary_bytes),
        )
        fitting(row.total_bytes)
        name = unique_node_name(node)
        self._stats[name] = row.largest(self._stats.get(name, NodeStats()))
        self._seen.update(inputs, outputs)

    def _unseen(
        self, values: Iterable[CostedValue | None], sizes: Mapping[str, int]
    ) -> dict[CostedValue, int]:
        return {
            value: _checked_size(value.name, sizes.get(value.name, value.nbytes))
            for value in values
            if value is not None and value not in self._seen
        }

    def save(self, path: FilePath) -> None:
        """Write the collected statistics to a file.

        Raises
        ------
        ConfigError
            A node's name would be read as another one, or as a comment: it has a comma or a line
            break, begins with ``#``, or begins or ends with a blank. Nothing is written.
        OSError
            The file cannot be written.
        """
        for name in self._stats:
            if "," in name or name.startswith("#") or name.strip().splitlines() != [name]:
                raise ConfigError(
                    f"invalid node name {name!r}: expected no comma, no line break, no blank at an "
                    "end and no # at the beginning"
                )
        rows = (",".join((name, *map(str, row.as_tuple()))) for name, row in self._stats.items())
        Path(path).write_text("\n".join((HEADER, *rows, "")), encoding="utf-8")


def _checked_size(what: str, size: object) -> int:
    if not is_integer(size, 0, MAX_BYTES):
        raise ConfigError(f"invalid size of {what!r} = {size!r}: expected 0 to 2**64 - 1 bytes")
    return size
