"""PyTorch's memory snapshots as files, and their parts as dicts."""

import pickle


def snapshot_file(path, *device_traces, segments=(), protocol=None, **more):
    """Write a snapshot of these histories; return its path."""
    plain = {"segments": [*segments], "device_traces": [*device_traces], **more}
    path.write_bytes(pickle.dumps(plain, protocol=protocol))
    return path


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
