"""``python -m gpumem`` is the ``gpumem`` command."""

import sys

from gpumem.cli import main

if __name__ == "__main__":
    sys.exit(main())
