"""Functions for tests and measurements in addition to the public API.

No other module of the package imports this. `host_device` counts, fails and delays the host
device's calls and searches for misuse; `arenas`, `copies` and `driver` access internal state;
`torch_hooks` calls PyTorch's hooks without PyTorch; `integrations` has the parts of the
integrations.
"""
