"""The memory that a PyTorch script would need on a GPU, found without a GPU.

The script runs unmodified in a child process, over a CUDA that computes nothing: PyTorch, its
allocator or gpumem's, and everything above them are real; memory is reserved addresses, and kernels
are dropped. So values on the GPU are unknown. A script that reads one gets zeros, and the
prediction names the line; where the value makes the size of a tensor, the script is stopped.

It needs Linux and PyTorch's CUDA build, and neither a GPU nor a driver.

Examples
--------
>>> from gpumem.prediction import predict_script
>>> prediction = predict_script(["train.py"], gpu="h100")     # doctest: +SKIP
>>> prediction.runs["default"].reserved                       # doctest: +SKIP
19660800000
"""

from gpumem.prediction.functions import predict
from gpumem.prediction.gpus import Gpu
from gpumem.prediction.runs import (
    ALLOCATORS,
    STEPS,
    Constant,
    PredictedRun,
    Prediction,
    predict_script,
)
from gpumem.prediction.search import Search, largest

__all__ = [
    "ALLOCATORS",
    "STEPS",
    "Constant",
    "Gpu",
    "PredictedRun",
    "Prediction",
    "Search",
    "largest",
    "predict",
    "predict_script",
]
__dir__ = __all__.copy
