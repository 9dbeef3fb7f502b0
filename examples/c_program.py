"""A C library allocates from an arena that Python made, by gpumem.h; nothing is linked.

Compiles c_program.c with the system's C compiler (CC, else cc), loads it, and lets it pass frames
from one stream to another. Needs Python's headers.

    python examples/c_program.py --device host
"""

import argparse
import importlib.util
import os
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import gpumem
import gpumem.integrations.c


def compiled(folder):
    """Compile c_program.c into a folder; return the module."""
    library = Path(folder, "c_program" + sysconfig.get_config_var("EXT_SUFFIX"))
    includes = [f"-I{gpumem.get_include()}", f"-I{sysconfig.get_path('include')}"]
    source = str(Path(__file__).with_suffix(".c"))
    compiler = shlex.split(os.environ.get("CC", "cc"))
    options = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*compiler, *options, *includes, source, "-o", str(library)], check=True)
    spec = importlib.util.spec_from_file_location("c_program", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    """Run it and print what it saw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="host")
    device = parser.parse_args().device
    arena = gpumem.Arena(device, max_mem="64MiB")
    producer, consumer = gpumem.Stream(device), gpumem.Stream(device)
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(folder)
        capsule = gpumem.integrations.c.allocator(arena)
        seen = program.run(capsule, producer.ptr, consumer.ptr)
        print(f"{seen['allocations']} frames passed, {seen['in_use']} bytes in use")
        try:
            program.fail(capsule)
        except RuntimeError as error:
            print(error)


if __name__ == "__main__":
    main()
