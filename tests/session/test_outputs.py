"""What a run's function asks of its context for an output: shapes and dtypes."""

from __future__ import annotations

import numpy as np
import pytest

import gpumem


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "float32", np.float32, ">i2", [("a", "i4")]])
def test_output_has_any_dtype_that_empty_takes(dtype, graph):
    given = gpumem.zeros(4, dtype, memory="host")
    with gpumem.Session("host", {"enable_cuda_graph": graph}) as session:
        session.bind_output("made")
        session.bind_output("given", given)

        def work(ctx):
            for name in ("made", "given", "made", "given"):
                assert ctx.output(name, (4,), dtype).dtype == given.dtype

        for _ in range(3):
            session.run(work)


@pytest.mark.parametrize(
    ("shape", "dtype", "error"),
    [(3, None, TypeError), (3.0, "f8", TypeError), (True, "f8", TypeError), (-1, "f8", ValueError)],
)
def test_invalid_shape_or_dtype_of_a_bound_output_is_refused(shape, dtype, error):
    with gpumem.Session("host") as session:
        session.bind_output("y", np.zeros(1 if shape is True else 3))
        with pytest.raises(error, match=r"shape|dtype"):
            session.run(lambda ctx: ctx.output("y", shape, dtype))
