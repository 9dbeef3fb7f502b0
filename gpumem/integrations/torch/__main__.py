"""``python -m gpumem.integrations.torch build``: compile the allocator for the installed PyTorch.

Prints the path of the library. `gpumem.integrations.torch.enable` then finds it.
"""

from __future__ import annotations

import argparse
import sys

from gpumem.errors import GpumemError
from gpumem.integrations.torch import _build, import_torch
from gpumem.integrations.torch._allocator import require_cuda


def main() -> int:
    """Return the exit code: 0, or 1 if it cannot be compiled."""
    parser = argparse.ArgumentParser(
        prog="python -m gpumem.integrations.torch",
        description="Compile gpumem's allocator for the installed PyTorch.",
    )
    parser.add_argument("command", choices=["build"])
    parser.parse_args()
    try:
        torch = import_torch()
        require_cuda(torch)
        print(_build.build(torch))
    except (GpumemError, OSError, RuntimeError) as error:
        print(f"gpumem: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
