"""ONNX models, and files of statistics with the setting that names them."""

from __future__ import annotations

from gpumem.accounting import Accountants, AdHocAccountant, accountants_from_setting, read_stats
from gpumem.errors import ConfigError, ModelGraphError
from gpumem.planning import ModelGraph, partition, plan_memory
from gpumem.planning import Target as Device

from .. import changes
from . import Target
from .files import folder, written


def _onnx_model(data: bytes) -> object:
    """Read a model, place it on two devices under a budget, and plan its memory."""
    graph = ModelGraph.from_onnx(written(data, "model.onnx"))
    devices = [Device.of("cuda:0"), Device.of("host")]
    accountants = Accountants({"cuda:0": AdHocAccountant(1 << 20), "host": AdHocAccountant()})
    placement = partition(graph, devices, accountants)
    plan = plan_memory(placement, weights=True)
    plan.verify()
    plan.as_dict()
    return len(graph.nodes), len(placement.gains), plan.peak_bytes.bit_length(), len(plan.unplanned)


def _statistics(data: bytes) -> object:
    """Read a setting, and the file of statistics that follows its line."""
    setting, _, content = data.partition(b"\n")
    path = written(content, "stats.csv")
    try:
        accountants_from_setting(setting.decode("utf-8", "surrogateescape"), folder=folder())
    except ConfigError as error:
        if not str(error).isprintable():
            raise AssertionError(repr(error)) from error
    return len(read_stats(path))


TARGETS = (
    Target(
        "onnx_model",
        _onnx_model,
        (ModelGraphError,),
        one_line=False,
        structured=(changes.in_onnx,),
    ),
    Target(
        "statistics",
        _statistics,
        (ConfigError,),
        tokens=(b",", b"\n", b"#", b"stats.csv", b"18446744073709551615"),
    ),
)
