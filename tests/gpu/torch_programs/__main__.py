"""Run one program: ``python -m gpu.torch_programs native graphs.shared_pool``, tests/ on the path.

Its last line is what the program returned, as JSON.
"""

import json
import sys
from importlib import import_module

import torch
from gpu.torch_programs.allocator import choose


def main():
    allocator, program = sys.argv[1:]
    choose(allocator)
    torch.use_deterministic_algorithms(True, warn_only=True)
    module, _, name = program.partition(".")
    returned = getattr(import_module(f"gpu.torch_programs.{module}"), name)()
    print(json.dumps(returned), flush=True)


if __name__ == "__main__":
    main()
