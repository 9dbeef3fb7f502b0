"""The text that Prometheus scrapes."""

import re

import pytest

import gpumem
from gpumem import observe

MIB = 1 << 20
# The text format's own rules: https://prometheus.io/docs/instrumenting/exposition_formats/
SAMPLE = re.compile(r'[a-zA-Z_:][\w:]*\{(?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\["\\n])*",?)*\} -?\d+')


@pytest.fixture
def arena():
    """An arena with everything that has to be escaped in its name."""
    with gpumem.Arena("host", {"max_mem": 64 * MIB}, name='a "quoted\\\n" é') as made:
        yield made


def samples_of(text, metric, name):
    escaped = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return [
        int(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(f"{metric}{{") and f'name="{escaped}"' in line
    ]


def test_prometheus_lines_follow_the_format(arena):
    budget = gpumem.Budget(64 * MIB, name="tenant")
    text = observe.prometheus_text()
    assert text.endswith("\n")
    seen = set()
    for line in text.splitlines():
        if line.startswith("#"):
            _, word, family, *rest = line.split(" ")
            assert word in ("HELP", "TYPE")
            assert (word, family) not in seen
            assert word == "HELP" or rest in (["gauge"], ["counter"])
            seen.add((word, family))
        else:
            assert SAMPLE.fullmatch(line), line
            assert line.startswith(f"{family}{{")  # the samples of a family stay together
            assert {("HELP", family), ("TYPE", family)} <= seen
    assert samples_of(text, "gpumem_budget_limit_bytes", budget.name) == [64 * MIB]


def test_official_parser_reads_the_same_numbers(arena):
    parser = pytest.importorskip("prometheus_client.parser", reason="no prometheus_client here")
    held = [arena.allocate(5000), arena.allocate(2 * MIB)]
    held.pop().close()
    families = {
        family.name: family
        for family in parser.text_string_to_metric_families(observe.prometheus_text())
    }
    stats = arena.stats()
    expected = {
        "gpumem_in_use_bytes": ("gauge", stats.in_use),
        "gpumem_requested_bytes": ("gauge", stats.requested_in_use),
        "gpumem_reserved_bytes": ("gauge", stats.reserved),
        "gpumem_limit_bytes": ("gauge", 64 * MIB),
        "gpumem_in_use_peak_bytes": ("gauge", stats.max_in_use),
        "gpumem_allocations": ("counter", 2),
        "gpumem_frees": ("counter", 1),
    }
    for name, (kind, value) in expected.items():
        found = [s for s in families[name].samples if s.labels["name"] == arena.name]
        assert [s.value for s in found] == [value], name
        assert families[name].type == kind
        assert (found[0].labels["memory"], found[0].labels["kind"]) == ("host:0", "arena")
    for family in families.values():
        labels = [tuple(sorted(sample.labels.items())) for sample in family.samples]
        assert len(set(labels)) == len(labels)


def test_counters_end_in_total_and_sizes_in_bytes(arena):
    for line in observe.prometheus_text().splitlines():
        if line.startswith("# TYPE"):
            name, kind = line.split()[2:]
            assert (kind == "counter") == name.endswith("_total")
            assert name.endswith(("_total", "_bytes"))


def test_unlimited_resource_has_no_limit_sample():
    arena = gpumem.Arena("host", name="unlimited")
    budget = gpumem.Budget(None, name="open")
    text = observe.prometheus_text()
    assert samples_of(text, "gpumem_reserved_bytes", arena.name) == [0]
    assert samples_of(text, "gpumem_limit_bytes", arena.name) == []
    assert samples_of(text, "gpumem_budget_used_bytes", budget.name) == [0]
    assert samples_of(text, "gpumem_budget_limit_bytes", budget.name) == []


def test_resources_of_equal_names_have_distinct_labels():
    arenas = [gpumem.Arena("host", name="twin") for _ in range(2)]
    buffer = arenas[1].allocate(MIB)
    assert sorted(samples_of(observe.prometheus_text(), "gpumem_in_use_bytes", "twin")) == [0, MIB]
    buffer.close()


def test_every_one_of_many_resources_is_listed():
    arenas = [gpumem.Arena("host", {"backing": "regions"}, name="one of many") for _ in range(300)]
    budgets = [gpumem.Budget(MIB, name="one of many") for _ in range(150)]
    text = observe.prometheus_text()
    assert len(samples_of(text, "gpumem_reserved_bytes", "one of many")) == len(arenas)
    assert len(samples_of(text, "gpumem_budget_used_bytes", "one of many")) == len(budgets)


def test_budget_numbers_are_never_reused():
    ids = set()
    for _ in range(10):
        budget = gpumem.Budget(MIB, name="short-lived")
        line = next(
            line for line in observe.prometheus_text().splitlines() if "short-lived" in line
        )
        ids.add(re.search(r'id="(\d+)"', line)[1])
        del budget
    assert len(ids) == 10


def test_closed_resource_is_absent():
    arena = gpumem.Arena("host", name="closed")
    arena.close()
    assert samples_of(observe.prometheus_text(), "gpumem_in_use_bytes", "closed") == []
