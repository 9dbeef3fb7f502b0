"""Real allocation traces that come with the package; README.md beside them tells their origin."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

__all__ = ["samples"]


def samples() -> dict[str, Path]:
    """List the bundled traces.

    Returns
    -------
    dict of str to Path
        Each sample's name and its file, sorted by name.

    Examples
    --------
    >>> sorted(samples())
    ['gpt2_varlen_train', 'multistream_train']
    """
    folder = Path(str(files(__name__)))
    return {path.stem: path for path in sorted(folder.glob("*.npz"))}
