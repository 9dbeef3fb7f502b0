"""The start of a child: its modules are a package that no module of the script can hide."""

from __future__ import annotations

import importlib
import json
import os
import sys
import types


def main() -> None:
    """Import this folder under another name, and carry out the order."""
    package = sys.modules["_gpumem_child"] = types.ModuleType("_gpumem_child")
    package.__path__ = [os.path.dirname(__file__)]
    importlib.import_module("_gpumem_child.forks").main(json.loads(sys.argv[1]))


if __name__ == "__main__":
    main()
