"""Resources that allocate block by block: the driver's pools and external allocators.

The base of all resources and the ledger of their blocks are in ``_buffer``, adaptors in
``gpumem.adaptors``, `gpumem.Arena` in ``_arena``.
"""
