"""The peaks that a program prints when it ends."""

import json

import torch

STATISTICS = {"live": "requested_bytes.all.peak", "reserved": "reserved_bytes.all.peak"}


def print_peaks() -> None:
    """Print the peaks of requested and of reserved bytes, as a JSON object."""
    found = torch.cuda.memory_stats()
    print(json.dumps({name: found[key] for name, key in STATISTICS.items()}))
