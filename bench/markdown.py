"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Make one line for each row, without padding."""
    rows = [[_cell(text) for text in row] for row in body]
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    """Leave out characters that would end a cell or a line."""
    return " ".join(text.replace("|", "/").split())
