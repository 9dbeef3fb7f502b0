"""`with` statements over resources: what their end raises."""

from __future__ import annotations

import pytest
from helpers.resources import Plain

import gpumem


def fail_in_the_body(kind, used):
    with kind("host") as resource:
        used[:] = resource, resource.allocate(100)
        raise KeyError("body")


@pytest.mark.parametrize("kind", [gpumem.Arena, Plain, gpumem.DriverPool])
def test_exception_of_the_body_comes_before_a_failure_to_close(kind):
    used = []
    with pytest.raises(KeyError, match="body") as raised:
        fail_in_the_body(kind, used)
    assert any("cannot be closed" in note for note in raised.value.__notes__)
    resource, held = used
    assert not resource.closed
    held.close()
    resource.close()


def test_failure_to_close_is_raised_after_a_body_that_succeeded():
    with pytest.raises(gpumem.errors.InUseError), gpumem.Arena("host") as resource:
        held = resource.allocate(100)
    held.close()
    resource.close()


def test_exception_of_a_body_that_keeps_nothing_has_no_note():
    with pytest.raises(ZeroDivisionError) as raised, gpumem.Arena("host") as resource:
        resource.allocate(1).nbytes // 0
    assert not hasattr(raised.value, "__notes__")
    assert resource.closed
