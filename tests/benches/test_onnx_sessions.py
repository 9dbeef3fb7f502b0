"""What bench.onnx_sessions computes without a GPU, at a tiny size."""

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

from bench import onnx_sessions


def test_copies_counts_no_byte_and_every_node_of_the_chain():
    report = onnx_sessions.copies(onnx_sessions.chain(3, 16), 4, 16)
    assert (report["copied_bytes"], report["copying_nodes"]) == (0, 0)
    # ONNX Runtime may fuse a product with what follows.
    assert 3 <= report["nodes"] <= 2 * 2 * 3
    assert np.isfinite(report["time"])
