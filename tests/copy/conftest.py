"""Switches of the copy engine, set back at the end."""

import pytest

from gpumem._testing.copies import (
    SLOT_BYTES,
    SLOTS_IN_FLIGHT,
    set_pipeline,
    set_staged_from,
    set_threads,
)


@pytest.fixture
def staged():
    """Send every copy from and to memory that the driver does not know through small slots."""
    set_staged_from(0)
    set_pipeline(1 << 16, 2)
    set_threads(3)
    yield
    set_staged_from(-1)
    set_pipeline(SLOT_BYTES, SLOTS_IN_FLIGHT)
    set_threads(0)
