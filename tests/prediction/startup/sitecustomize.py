"""Loads the null CUDA as Python starts, in processes that have this folder in PYTHONPATH."""

import json
import os
from importlib.machinery import SourceFileLoader
from types import ModuleType

_order = json.loads(os.environ["GPUMEM_TEST_NULL_CUDA"])
# By its path, because gpumem itself is not imported.
_null = ModuleType("_gpumem_null")
SourceFileLoader(_null.__name__, _order["module"]).exec_module(_null)
_null.load(_order["library"], _order["device"])
