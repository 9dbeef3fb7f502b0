"""Amounts: added without overflow, compared strictly."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem.accounting import ResourceCount
from gpumem.accounting.counts import MAX_BYTES

AMOUNTS = st.integers(0, MAX_BYTES)


@given(AMOUNTS, AMOUNTS)
def test_resource_count_sum_is_exact_or_overflows(a, b):
    x, y = ResourceCount.from_bytes(a), ResourceCount.from_bytes(b)
    if a + b > MAX_BYTES:
        with pytest.raises(OverflowError, match=str(a + b)):
            x + y
    else:
        assert x + y == ResourceCount.from_bytes(a + b)


def test_largest_count_fits_and_one_more_overflows():
    most = ResourceCount.from_bytes(MAX_BYTES)
    assert most + ResourceCount.from_bytes(0) == most
    with pytest.raises(OverflowError):
        most + ResourceCount.from_bytes(1)
    with pytest.raises(OverflowError):
        ResourceCount.from_bytes(MAX_BYTES + 1)


@given(AMOUNTS, AMOUNTS)
def test_count_exceeds_only_when_greater(a, b):
    assert ResourceCount.from_bytes(a).exceeds(ResourceCount.from_bytes(b)) == (a > b)
    assert ResourceCount.from_bytes(a).exceeds(b) == (a > b)


@given(AMOUNTS)
def test_unset_fields_add_as_zero_and_are_not_compared(a):
    none, amount = ResourceCount.none(), ResourceCount.from_bytes(a)
    assert none + amount == amount + none == amount
    assert (none + none).is_none
    assert not amount.exceeds(none)
    assert not none.exceeds(amount)


@given(AMOUNTS)
def test_resource_count_text_is_decimal(a):
    assert str(ResourceCount.from_bytes(a)) == str(a)
    assert eval(repr(ResourceCount.from_bytes(a)), {"ResourceCount": ResourceCount}) == a


@pytest.mark.parametrize(
    ("bad", "error"), [(-1, ValueError), (1.0, TypeError), ("1", TypeError), (True, TypeError)]
)
def test_resource_count_rejects_invalid_byte_counts(bad, error):
    with pytest.raises(error):
        ResourceCount.from_bytes(bad)


def test_resource_count_is_a_value():
    a = ResourceCount.from_bytes(5)
    assert {a: 1}[ResourceCount.from_bytes(5)] == 1
    assert pickle.loads(pickle.dumps(a)) == a
    assert pickle.loads(pickle.dumps(ResourceCount.none())).is_none
    assert a != ResourceCount.none()
    with pytest.raises(AttributeError):
        a._bytes = 6
    with pytest.raises(TypeError):
        ResourceCount()


def test_count_is_made_of_a_size_with_a_unit():
    assert ResourceCount.from_bytes("1.5KiB") == 1536
    with pytest.raises(TypeError, match="a size such as"):
        ResourceCount.from_bytes("much")
