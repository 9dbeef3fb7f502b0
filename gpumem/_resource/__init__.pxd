"""Resources: pools, external allocators, budgets."""

from gpumem._resource.handle cimport Handle, handle_of
