"""Dataclasses that are completed when the first object of them is made."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import threading

import pytest

import gpumem
from gpumem._support import values


def made():
    @values.dataclass(frozen=True)
    class Point(values.LazyDataclass):
        x: int
        y: int = 0
        name: str | None = values.field(default=None, kw_only=True)

    return Point


def test_first_object_makes_the_dataclass():
    point = made()
    assert repr(point(1, name="a")).endswith("Point(x=1, y=0, name='a')")
    assert point(1, 2) == point(1, 2) != point(1, 3)
    assert len({point(1, 2), point(1, 2)}) == 1
    assert values.replace(point(1, 2), x=5) == point(5, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        point(1).x = 2
    with pytest.raises(TypeError, match="positional"):
        point(1, 2, "a")


def test_functions_of_dataclasses_see_the_fields_before_the_first_object():
    assert dataclasses.is_dataclass(made())
    assert [field.name for field in dataclasses.fields(made())] == ["x", "y", "name"]


def test_subclass_with_its_own_init_reaches_the_generated_one():
    class Diagonal(made()):
        def __init__(self, x):
            super().__init__(x, x)

    assert (Diagonal(3).x, Diagonal(3).y) == (3, 3)


def test_threads_complete_a_class_once():
    for _ in range(50):
        point, found = made(), []
        start = threading.Barrier(4)

        def work(point=point, found=found, start=start):
            start.wait()
            found.append(point(1, 2))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [point(1, 2)] * 4


def test_pickle_is_read_where_no_object_was_made_before():
    data = pickle.dumps(gpumem.ArenaConfig(max_mem=5))
    program = f"import pickle; print(pickle.loads({data!r}).max_mem, pickle.loads({data!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("5 ArenaConfig(")


def test_settings_do_not_depend_on_which_class_was_used_first():
    for first, then in (("ArenaConfig", "PoolConfig"), ("PoolConfig", "ArenaConfig")):
        program = f"import gpumem; gpumem.{first}(); print(gpumem.{then}())"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.stdout.startswith(f"{then}("), done.stderr


def test_import_loads_no_dataclasses():
    program = "import sys, gpumem; print({'dataclasses', 'inspect', 'ast'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
