"""Resources of memory that others own: imported from a process, a library, or a virtual tensor."""

from __future__ import annotations

import numpy as np
import pytest

import gpumem
from gpumem import interop
from gpumem.errors import ConfigError


def imported():
    arena = gpumem.Arena("host")
    tensor = arena.allocate(4096, shareable=True).tensor((64,), "u1")
    return interop.attach(interop.export(tensor))


def of_a_library():
    return gpumem.from_dlpack(np.zeros(8, np.uint8))


def of_a_virtual_tensor():
    return gpumem.Arena("host").virtual((4, 4), "f4", committed=2).tensor()


BORROWED = {
    "imported": imported,
    "of a library": of_a_library,
    "of a virtual tensor": of_a_virtual_tensor,
}


@pytest.fixture(params=BORROWED)
def tensor(request):
    return BORROWED[request.param]()


def test_resource_of_borrowed_memory_is_open(tensor):
    resource = tensor.buffer.resource
    assert not resource.closed
    assert "closed" not in repr(resource)


def test_resource_of_borrowed_memory_survives_a_close(tensor):
    resource = tensor.buffer.resource
    resource.close()
    assert not resource.closed
    assert tensor.numpy().nbytes == tensor.nbytes


def test_resource_of_borrowed_memory_says_that_it_counts_nothing(tensor):
    with pytest.raises(ConfigError, match="others own its memory"):
        tensor.buffer.resource.stats()


@pytest.mark.parametrize("kind", ["imported", "of a library"])
def test_resource_of_borrowed_memory_says_that_it_allocates_nothing(kind):
    resource = BORROWED[kind]().buffer.resource
    with pytest.raises(ConfigError, match="neither allocates nor counts"):
        resource.allocate(10)


def test_resource_of_a_virtual_tensor_is_closed_with_it():
    virtual = gpumem.Arena("host").virtual((4, 4), "f4", committed=2)
    tensor = virtual.tensor()
    resource = tensor.buffer.resource
    del tensor
    virtual.close()
    assert resource.closed
    assert repr(resource).endswith(", closed>")


def test_class_of_users_without_its_base_is_closed():
    class Forgets(gpumem.MemoryResource):
        def __init__(self):
            pass

        def allocate_raw(self, nbytes, stream):
            return 0

        def deallocate_raw(self, ptr, nbytes, stream):
            pass

    resource = Forgets()
    assert resource.closed
    with pytest.raises(TypeError, match="never initialised"):
        resource.stats()
