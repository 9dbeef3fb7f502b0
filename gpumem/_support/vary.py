"""The one number of a program that `gpumem predict --vary` tries values of."""

from __future__ import annotations

import os

from gpumem.errors import ConfigError


def vary(name: str, default: int) -> int:
    """Return a number for which ``gpumem predict --vary`` searches the largest that fits.

    That command, and ``gpumem.prediction.largest``, run the program with other values of the name.
    Else it is the default, unless the environment variable ``GPUMEM_VARY`` has a value for the
    name, such as ``batch=64``.

    Raises
    ------
    ConfigError
        The value in the variable is not a number.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.vary("batch", 8)
    8
    """
    varied, _, value = os.environ.get("GPUMEM_VARY", "").partition("=")
    if varied != name:
        return default
    try:
        return int(value)
    except ValueError:
        raise ConfigError(
            f"invalid GPUMEM_VARY = {os.environ['GPUMEM_VARY']!r}: expected a name and a whole "
            f"number, such as {name}={default}"
        ) from None
