"""A block that another process shares, opened here.

As a program, ``python -m helpers.shared_block TEXT OFFSET NBYTES VALUE``, it prints which bytes it
found in the block and fills the block with a value.
"""

import ctypes
import subprocess
import sys

from gpumem.errors import GpumemError
from gpumem.integrations.torch import _sharing


def bytes_at(address, nbytes):
    return (ctypes.c_ubyte * nbytes).from_address(address)


def refusal(function, *arguments):
    """Return the text of the error that a call raises."""
    try:
        function(*arguments)
    except GpumemError as error:
        return str(error)
    return "not refused"


def found_elsewhere(text, offset, nbytes, value):
    """Run the program; return what it prints."""
    command = [sys.executable, "-m", __name__, text, str(offset), str(nbytes), str(value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def main():
    text, offset, nbytes, value = sys.argv[1], *map(int, sys.argv[2:])
    opened = _sharing.open_block(text)
    block = bytes_at(opened.address + offset, nbytes)
    print(*sorted(set(bytes(block))))
    ctypes.memset(block, value, nbytes)


if __name__ == "__main__":
    main()
