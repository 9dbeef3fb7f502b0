"""Small models of the shapes that matter: residual convolutions, an encoder, a decoder.

They lie in data/ as files, which `python tests/planning/models.py` writes anew.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

F32 = TensorProto.FLOAT


class Writer:
    """Writes a model node after node; weights come from a seeded generator."""

    def __init__(self, seed=0):
        self._random = np.random.default_rng(seed)
        self._nodes, self._weights, self._count = [], [], 0

    def weight(self, *shape):
        return self.constant(self._random.normal(0, 0.2, shape).astype(np.float32))

    def constant(self, array):
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def op(self, kind, *inputs, outputs=1, **attributes):
        names = [f"v{self._count + i}" for i in range(outputs)]
        self._count += outputs
        name = f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), names, name, **attributes))
        return names[0] if outputs == 1 else names

    def model(self, inputs, outputs):
        def infos(values):
            return [helper.make_tensor_value_info(*value) for value in values]

        graph = helper.make_graph(
            self._nodes, "model", infos(inputs), infos(outputs), self._weights
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def resnet(blocks=3, channels=8, size=16):
    w = Writer()

    def convolution(x, before, after):
        kernel = w.weight(after, before, 3, 3)
        return w.op("Conv", x, kernel, pads=[1] * 4, kernel_shape=[3, 3])

    x = w.op("Relu", convolution("image", 3, channels))
    for _ in range(blocks):
        y = w.op("Relu", convolution(x, channels, channels))
        x = w.op("Relu", w.op("Add", convolution(y, channels, channels), x))
    x = w.op("Flatten", w.op("GlobalAveragePool", x))
    y = w.op("Gemm", x, w.weight(channels, 10), w.weight(10))
    return w.model([("image", F32, [2, 3, size, size])], [(y, F32, [2, 10])])


def attention(w, x, batch, length, width, heads, mask=None):
    def split(y):
        shape = w.constant(np.array([batch, length, heads, width // heads]))
        return w.op("Transpose", w.op("Reshape", y, shape), perm=[0, 2, 1, 3])

    q, k, v = (split(w.op("MatMul", x, w.weight(width, width))) for _ in range(3))
    scores = w.op("MatMul", q, w.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = w.op("Mul", scores, w.constant(np.float32(0.3)))
    if mask is not None:
        scores = w.op("Add", scores, mask)
    mixed = w.op("MatMul", w.op("Softmax", scores, axis=-1), v)
    mixed = w.op("Transpose", mixed, perm=[0, 2, 1, 3])
    mixed = w.op("Reshape", mixed, w.constant(np.array([batch, length, width])))
    return w.op("MatMul", mixed, w.weight(width, width))


def feed_forward(w, x, width):
    y = w.op("MatMul", x, w.weight(width, 4 * width))
    half = w.op("Mul", y, w.constant(np.float32(0.5)))
    erf = w.op("Erf", w.op("Mul", y, w.constant(np.float32(0.7))))
    y = w.op("Mul", half, w.op("Add", erf, w.constant(np.float32(1))))
    return w.op("MatMul", y, w.weight(4 * width, width))


def norm(w, x, width):
    return w.op("LayerNormalization", x, w.weight(width), w.weight(width))


def bert(layers=2, batch=2, length=8, width=16, heads=2):
    w = Writer(1)
    x = norm(w, w.op("Gather", w.weight(30, width), "ids"), width)
    for _ in range(layers):
        x = norm(w, w.op("Add", attention(w, x, batch, length, width, heads), x), width)
        x = norm(w, w.op("Add", feed_forward(w, x, width), x), width)
    y = w.op("Tanh", w.op("MatMul", x, w.weight(width, width)))
    return w.model(
        [("ids", TensorProto.INT64, [batch, length])], [(y, F32, [batch, length, width])]
    )


def gpt(layers=2, batch=1, length=12, width=16, heads=4):
    w = Writer(2)
    mask = w.constant(np.triu(np.full((length, length), -1e9, np.float32), 1))
    x = w.op("Add", w.op("Gather", w.weight(40, width), "ids"), w.weight(length, width))
    for _ in range(layers):
        inner = attention(w, norm(w, x, width), batch, length, width, heads, mask)
        x = w.op("Add", x, inner)
        x = w.op("Add", x, feed_forward(w, norm(w, x, width), width))
    y = w.op("MatMul", norm(w, x, width), w.weight(width, 40))
    return w.model([("ids", TensorProto.INT64, [batch, length])], [(y, F32, [batch, length, 40])])


MODELS = {"resnet": resnet, "bert": bert, "gpt": gpt}
DATA = Path(__file__).parent / "data"


def shipped(name):
    """Read one of MODELS from its file."""
    return onnx.load(DATA / f"{name}.onnx")


def inputs_of(model, seed=3):
    """Make what a model is given."""
    random = np.random.default_rng(seed)
    given = {}
    for info in model.graph.input:
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        if info.type.tensor_type.elem_type == TensorProto.INT64:
            given[info.name] = random.integers(0, 30, shape)
        else:
            given[info.name] = random.normal(0, 1, shape).astype(np.float32)
    return given


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    for name, make in MODELS.items():
        onnx.save(make(), DATA / f"{name}.onnx")
