"""The budget of a node: a page of this machine that processes of one user lease memory from."""

from libc.stdint cimport uint64_t

from gpumem._native.budget cimport BudgetCore
from gpumem._node.page cimport NodeCore

# A name of a node.
cdef class NodeAccess:
    cdef NodeCore* core
    # Sets the limit of the name; unless it may differ, only where no process uses the name.
    cdef int change_limit(self, uint64_t limit, bint may_differ) except -1

# This process's part of a name. There is one for each name; it lives as long as the process.
cdef class NodeMember(NodeAccess):
    cdef readonly str name
    cdef readonly object budgets        # below `level`; weak references
    # Frees memory of this process; called with the bytes that another process lacks.
    cdef object relieve
    cdef set relieving                  # threads that are inside it
    cdef BudgetCore* level(self) noexcept
    # Asks the other processes to release memory, and leases it; False: they did not, in time.
    cdef bint ask(self, uint64_t nbytes) except -1

# The one that a level leases from; the level has a node.
cdef NodeMember node_of_level(const BudgetCore* level)

# The Device that a name begins with, such as "cuda:0/tenant-a", or its UUID; None: with none.
cdef object device_of(str name)

# Reads bytes, or a share of a device's; None means no limit, unless bytes are needed.
cdef uint64_t bytes_of(str what, object value, bint needed, object device) except? <uint64_t>-1

# Joins a name; `limit` is that of the name, or BUDGET_UNLIMITED to keep the one that it has.
cdef NodeMember node_join(str name, uint64_t limit, object priority, object deadline,
                          object relieve)
