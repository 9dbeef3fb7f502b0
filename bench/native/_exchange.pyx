"""A consumer of DLPack's C exchange API that is C: it exports, and calls the deleter."""

from cpython.pycapsule cimport PyCapsule_GetPointer

from gpumem._buffer.dlpack cimport DLManagedTensorVersioned, DLPackExchangeAPI


cdef class Exporter:
    """A tensor of any library with the table in its type."""

    cdef object tensor
    cdef object table_owner
    cdef const DLPackExchangeAPI* table
    cdef int calls

    def __init__(self, tensor, int calls):
        self.tensor = tensor
        self.table_owner = type(tensor).__dlpack_c_exchange_api__
        self.table = <const DLPackExchangeAPI*>PyCapsule_GetPointer(self.table_owner,
                                                                    "dlpack_exchange_api")
        self.calls = calls

    def run(self):
        """Export and delete, `calls` times."""
        cdef DLManagedTensorVersioned* managed
        cdef int i
        for i in range(self.calls):
            self.table.managed_tensor_from_py_object_no_sync(<void*>self.tensor, &managed)
            managed.deleter(managed)
