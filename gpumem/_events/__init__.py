"""Events of resources: recorders, the file that holds events, and the labels of allocations.

``recorder`` has recorders as Python objects, ``sources.pxd`` finds the event source of a resource,
``events`` reads what a recorder wrote, ``labels`` labels the allocations of a thread. Users import
these names from `gpumem.observe`.
"""
