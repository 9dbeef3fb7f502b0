"""Every exception: its bases, its numbers, and that it survives a pickle."""

import pickle

import pytest

from gpumem import errors

BASES = {
    "OutOfMemoryError": MemoryError,
    "ConfigError": ValueError,
    "InvalidFreeError": ValueError,
    "InUseError": BufferError,
    "ClosedError": ValueError,
    "DriverError": RuntimeError,
    "PeerAccessError": RuntimeError,
}


@pytest.mark.parametrize(("name", "base"), BASES.items())
def test_errors_derive_from_gpumem_error_and_a_builtin(name, base):
    error = getattr(errors, name)
    assert issubclass(error, errors.GpumemError)
    assert issubclass(error, base)


def test_every_error_is_exported_and_derives_from_gpumem_error():
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and name[0] != "_"
    }
    assert set(errors.__all__) == classes
    assert set(BASES) <= classes


def test_driver_error_names_call_code_and_name_after_pickle():
    error = errors.DriverError("cuMemAlloc", 1, "CUDA_ERROR_INVALID_VALUE", "invalid argument")
    for seen in (error, pickle.loads(pickle.dumps(error))):
        assert (seen.call, seen.code, seen.name) == ("cuMemAlloc", 1, "CUDA_ERROR_INVALID_VALUE")
        assert str(seen) == (
            "cuMemAlloc failed with CUDA_ERROR_INVALID_VALUE (1): invalid argument"
        )


@pytest.mark.parametrize("name", [name for name in BASES if name != "DriverError"])
def test_error_message_survives_pickle(name):
    error = getattr(errors, name)("what happened")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), "what happened")


@pytest.mark.parametrize("name", errors.__all__)
def test_an_instance_is_made_by_its_own_new(name):
    """As the unpickling of Dask's workers makes it."""
    kind = getattr(errors, name)
    assert type(kind.__new__(kind)) is kind
