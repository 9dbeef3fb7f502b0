"""Counters of this process's resources for Prometheus, in text format 0.0.4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gpumem import _live
from gpumem.observe.live import LiveBudget, LiveResource, decode_copy


class _Metric(NamedTuple):
    name: str  # after "gpumem_"; ends in _total if it is a counter, which never falls
    source: str  # a counter of LiveResource, or a field of LiveBudget
    help: str


_RESOURCES = (
    _Metric("in_use_bytes", "in_use", "Bytes in use, padding included."),
    _Metric("requested_bytes", "requested_in_use", "Bytes in use, as requested."),
    _Metric("reserved_bytes", "reserved", "Bytes reserved from the device."),
    _Metric("limit_bytes", "limit", "Limit of reserved bytes; absent if unlimited."),
    _Metric("in_use_peak_bytes", "max_in_use", "Peak of the bytes in use."),
    _Metric("reserved_peak_bytes", "max_reserved", "Peak of the bytes reserved."),
    _Metric("largest_block_bytes", "max_alloc_size", "Largest block allocated so far."),
    _Metric("asleep_bytes", "asleep_bytes", "Bytes of arenas that sleep, kept on the host."),
    _Metric("allocations_total", "num_allocs", "Blocks allocated."),
    _Metric("frees_total", "num_frees", "Blocks freed."),
    _Metric("persistent_allocations_total", "num_reserves", "Persistent blocks allocated."),
    _Metric("extensions_total", "num_extensions", "Regions or pages taken from the device."),
    _Metric("shrinkages_total", "num_shrinkages", "Regions or pages released to the device."),
    _Metric("pages_moved_total", "pages_moved", "Pages moved to another address."),
    _Metric("driver_calls_total", "driver_calls", "Driver calls made."),
)
_BUDGETS = (
    _Metric("budget_used_bytes", "used", "Bytes charged, including levels below."),
    _Metric("budget_limit_bytes", "limit", "Hard limit in bytes; absent if unlimited."),
    _Metric("budget_soft_limit_bytes", "soft", "Soft limit in bytes; absent if none."),
    _Metric("budget_peak_bytes", "peak", "Peak of the bytes charged."),
)


def prometheus_text() -> str:
    """Write the counters of this process's resources and budgets for Prometheus.

    A web server returns it for ``GET /metrics``, with the content type
    ``text/plain; version=0.0.4; charset=utf-8``. It needs no Prometheus library and takes no lock
    of an allocator, so scraping blocks nothing. Closed resources are absent. `LivePage.of_all`
    has the same numbers of other processes.

    Returns
    -------
    str
        Text format 0.0.4. Gauges ``gpumem_in_use_bytes``, ``gpumem_reserved_bytes`` and their like,
        counters ``gpumem_allocations_total`` and theirs, with labels ``id``, ``name``, ``memory``
        and ``kind``; ``gpumem_budget_used_bytes`` and its like with ``id``, ``name`` and
        ``parent``, the id of the level above. Ids are of this process alone. The samples of an
        arena with memory of another resource have a label ``source``, the id of that, where the
        memory is in use: ``sum(gpumem_reserved_bytes{source=""})`` counts it once.

    Examples
    --------
    >>> import gpumem, gpumem.observe
    >>> arena = gpumem.Arena("host", name="kv cache")
    >>> buffer = arena.allocate(4096)
    >>> text = gpumem.observe.prometheus_text()
    >>> [line for line in text.splitlines() if "in_use_bytes{" in line and "kv cache" in line]
    ['gpumem_in_use_bytes{id="...",name="kv cache",memory="host:0",kind="arena"} 4096']
    """
    page = decode_copy(_live.copy_now(), process=0, alive=True, period=0)
    lines: list[str] = []
    for metric in _RESOURCES:
        lines += _family(metric, _resource_samples(metric, page.resources))
    for metric in _BUDGETS:
        lines += _family(metric, _budget_samples(metric, page.budgets))
    return "".join(f"{line}\n" for line in lines)


def _family(metric: _Metric, samples: Iterator[str]) -> list[str]:
    """Write a metric with its samples; nothing if it has none."""
    found = list(samples)
    if not found:
        return []
    name = f"gpumem_{metric.name}"
    kind = "counter" if name.endswith("_total") else "gauge"
    head = [f"# HELP {name} {metric.help}", f"# TYPE {name} {kind}"]
    return head + [f"{name}{sample}" for sample in found]


def _resource_samples(metric: _Metric, resources: tuple[LiveResource, ...]) -> Iterator[str]:
    for one in resources:
        value = one.counters[metric.source]
        if value or metric.source != "limit":
            labels = {"id": one.id, "name": one.name, "memory": one.memory, "kind": one.kind}
            if one.source is not None:
                labels["source"] = one.source
            yield f"{_labels(labels)} {value}"


def _budget_samples(metric: _Metric, budgets: tuple[LiveBudget, ...]) -> Iterator[str]:
    for one in budgets:
        value = getattr(one, metric.source)
        if value is not None:
            parent = "" if one.parent is None else one.parent
            yield f"{_labels({'id': one.id, 'name': one.name, 'parent': parent})} {value}"


def _labels(labels: dict[str, object]) -> str:
    return "{" + ",".join(f'{key}="{_escaped(str(value))}"' for key, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
