"""Resources that hand out buffers: the driver's pools, external allocators, their ledger."""
