"""Memory that an arena has from another resource of the process counts once, and tells whence."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
from dataclasses import replace

import pytest
import rich.console

import gpumem
from gpumem import adaptors, observe
from gpumem.cli import main, top_view
from gpumem.cli.top_sums import sums_of
from gpumem.observe import LivePage, Snapshot, prometheus_text
from gpumem.report import write_report

MIB = 1 << 20
numbers = itertools.count()  # resources of other tests may be alive: each has its own name


def arena(**more) -> gpumem.Arena:
    return gpumem.Arena("host", name=f"nested {next(numbers)}", **more)


UPSTREAMS = {
    "arena": arena,
    "paged arena": lambda: arena(backing="virtual"),
    "pool": lambda: gpumem.DriverPool("host", name=f"nested {next(numbers)}"),
}


@pytest.fixture(params=UPSTREAMS)
def below(request):
    return UPSTREAMS[request.param]()


@pytest.fixture
def above(below):
    return arena(source=below)


def page_of(*resources) -> LivePage:
    """The page of this process, of some of its resources."""
    with observe.publish():
        page = LivePage.of_process(os.getpid())
    return replace(page, resources=chosen(page.resources, resources))


def snapshot_of(*resources) -> Snapshot:
    """A snapshot of the process, of some of its resources."""
    found = observe.snapshot()
    return replace(found, resources=chosen(found.resources, resources))


def chosen(found, resources) -> tuple:
    names = {each.name for each in resources}
    return tuple(each for each in found if each.name in names)


def test_page_counts_memory_of_a_nested_arena_once(below, above):
    own, nested = below.allocate(3 * MIB), above.allocate(1000)
    page = page_of(below, above)
    (held,) = [one.counters["reserved"] for one in page.resources if one.name == below.name]
    assert page.total("reserved") == held
    assert page.total("in_use") == own.allocated_nbytes + nested.allocated_nbytes
    assert page.total("requested_in_use") == 3 * MIB + 1000
    assert page.total("num_allocs") == 3
    (found,) = sums_of([page])
    assert (found.in_use, found.reserved) == (page.total("in_use"), held)


def test_page_names_the_source_of_a_nested_arena(below, above):
    by_name = {one.name: one for one in page_of(below, above).resources}
    assert by_name[above.name].source == by_name[below.name].id
    assert by_name[below.name].source is None


def test_page_counts_an_arena_whose_source_it_does_not_have(above):
    above.allocate(1000).close()
    assert page_of(above).total("reserved") == above.stats().reserved > 0


def test_source_below_adaptors_is_named():
    below = arena()
    limited = adaptors.limit(adaptors.limit(below, 1 << 30), 1 << 30)
    above = arena(source=limited)
    by_name = {one.name: one for one in page_of(below, above).resources}
    assert by_name[above.name].source == by_name[below.name].id
    found = snapshot_of(below, above)
    assert found.resource(above.name).source == found.resource(below.name).key


def test_source_of_callables_has_no_name():
    class Nothing:
        def allocate(self, nbytes):
            return None

        def free(self, address, nbytes):
            pass

    above = arena(source=Nothing())
    assert snapshot_of(above).resource(above.name).source is None


def test_top_shows_the_source_by_its_name(below, above):
    console = rich.console.Console(width=150, file=io.StringIO())
    console.print(top_view.view(page_of(below, above), None, 150))
    assert re.search(f"{above.name} .* {below.name} ", console.file.getvalue())


def test_top_writes_the_source_into_its_facts(below, above, capsys):
    with observe.publish():
        assert main(["top", str(os.getpid()), "--json"]) == 0
    by_name = {one["name"]: one for one in json.loads(capsys.readouterr().out)["resources"]}
    assert by_name[above.name]["source"] == by_name[below.name]["id"]


def test_prometheus_labels_tell_the_source(below, above):
    lines = [line for line in prometheus_text().splitlines() if "_reserved_bytes{" in line]
    (of_below,) = [line for line in lines if f'name="{below.name}"' in line]
    (of_above,) = [line for line in lines if f'name="{above.name}"' in line]
    number = re.search(r'id="(\d+)"', of_below)[1]
    assert f'source="{number}"' in of_above
    assert "source=" not in of_below


def test_owners_of_a_snapshot_add_up_to_what_users_have(below, above):
    own, nested = below.allocate(3 * MIB), above.allocate(1000)
    found = snapshot_of(below, above)
    assert sum(found.by_owner().values()) == own.allocated_nbytes + nested.allocated_nbytes
    assert found.resource(above.name).source == found.resource(below.name).key
    again = Snapshot.from_dict(json.loads(found.to_json()))
    assert again.by_owner() == found.by_owner()
    assert again.resource(above.name).source == found.resource(above.name).source


def test_three_levels_count_the_innermost_blocks():
    below = arena()
    middle = arena(source=below)
    above = arena(source=middle)
    blocks = [each.allocate(1000) for each in (below, middle, above)]
    in_use = sum(block.allocated_nbytes for block in blocks)
    assert sum(snapshot_of(below, middle, above).by_owner().values()) == in_use
    page = page_of(below, middle, above)
    assert page.total("in_use") == in_use
    assert page.total("reserved") == below.stats().reserved


def test_segments_for_pytorchs_tools_count_memory_once(below, above):
    own, nested = below.allocate(3 * MIB), above.allocate(1000)
    segments = snapshot_of(below, above).to_torch()["segments"]
    allocated = sum(each["allocated_size"] for each in segments)
    assert allocated == own.allocated_nbytes + nested.allocated_nbytes
    (held,) = chosen(page_of(below).resources, [below])
    assert sum(each["total_size"] for each in segments) == held.counters["reserved"]


def test_report_of_a_snapshot_counts_memory_once(below, above, tmp_path):
    blocks = below.allocate(3 * MIB), above.allocate(1000)
    path = tmp_path / "nested.json"
    snapshot_of(below, above).save(path)
    report = write_report(path, tmp_path / "nested.html")
    assert report.peak_live_bytes == sum(block.nbytes for block in blocks)
    (recorded,) = [each for each in report.policies if each["how"] == "recorded"]
    (held,) = page_of(below).resources
    assert recorded["peak_reserved_bytes"] == held.counters["reserved"]


def test_out_of_memory_report_counts_a_nested_arena_once(host, below, above):
    def held() -> int:
        with pytest.raises(gpumem.OutOfMemoryError) as caught:
            below.allocate(1 << 46)
        return caught.value.report.held_here

    def reserved() -> int:
        (found,) = page_of(below).resources
        return found.counters["reserved"]

    before = held() - reserved()
    block = above.allocate(5 * MIB)
    assert held() - reserved() == before
    block.close()
