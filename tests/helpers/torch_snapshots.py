"""Parts of PyTorch's memory snapshots, as dicts."""


def entry(action, addr, size, stream=0, time_us=1_700_000_000_000_000, **more):
    """Make an entry of a history."""
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "stream": stream,
        "time_us": time_us,
        "frames": [{"filename": "train.py", "name": "step", "line": 3}],
        **more,
    }


def segment(address, *blocks, device=0, **more):
    """Make a segment of blocks that follow each other."""
    return {
        "device": device,
        "address": address,
        "total_size": sum(block["size"] for block in blocks),
        "stream": 7,
        "blocks": list(blocks),
        **more,
    }


def block_of(size, state="active_allocated", **more):
    """Make a block of a segment."""
    return {"size": size, "state": state, **more}
