"""Categories of real training steps, over the null CUDA: PyTorch's allocations, without a GPU."""

import json

import pytest
from prediction.null_cuda import over_null_cuda, require_cuda_build

require_cuda_build()


@pytest.mark.parametrize("workload", ["gpt2_train", "unet_train", "gpt2_checkpoint_train"])
def test_categories_are_what_the_program_counts(workload):
    printed = over_null_cuda(f"""
        from bench.torch_categories import measure
        print(json.dumps(measure({workload!r}, "tiny", steps=3, seed=7, rounds=2)))
        """)
    found = json.loads(printed.splitlines()[-1])
    for category, ratios in found["ratios"].items():
        near = 0.03 if category == "activations" else 0.01
        assert ratios == pytest.approx([1] * len(ratios), abs=near), category
    assert found["other"] <= 0.02
    assert found["phase"] in ("forward", "backward", "optimizer")
