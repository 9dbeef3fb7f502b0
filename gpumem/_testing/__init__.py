"""What tests and measurements may ask of gpumem beyond its public API.

Nothing else in the package imports this. `host_device` counts, fails and delays the host device's
calls and searches for misuse; `arenas`, `copies` and `driver` reach what the public API keeps to
itself; `torch_hooks` calls PyTorch's hooks without PyTorch; `integrations` offers the parts that
integrations are made of.
"""
