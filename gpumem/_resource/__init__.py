"""Resources that hand out buffers: the driver's pools and external allocators.

``arena`` is what `gpumem.Arena` is made of above C. The base of all resources and the ledger of
their blocks are in ``_buffer``, adaptors in ``gpumem.adaptors``.
"""
