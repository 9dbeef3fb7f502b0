"""Tokens and statements of Cython's language, as far as mutants need them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

TOKEN = re.compile(
    r"""
    (?P<space>[ \t]+|\\\n)
    |(?P<comment>\#[^\n]*)
    |(?P<string>[rbfuRBFU]{0,2}(?:\"{3}[\s\S]*?\"{3}|'{3}[\s\S]*?'{3}
        |"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))
    |(?P<newline>\n)
    |(?P<number>0[xX][0-9a-fA-F]+|\d[\d_]*(?:\.\d+)?(?:[eE][-+]?\d+)?)
    |(?P<name>\w+)
    |(?P<op><<=|>>=|//=|\*\*|//|<=|>=|==|!=|->|<<|>>|[-+*/%&|^]=|[^\w\s])
    """,
    re.VERBOSE,
)
KEYWORDS = frozenset(
    re.findall(
        r"\w+",
        """and assert break continue del elif else except finally for if import in is not or pass
        raise return while with yield""",
    )
)


class Token(NamedTuple):
    """A piece of source that is neither space nor comment."""

    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    @property
    def ends_operand(self) -> bool:
        """Whether an operator after it has an operand on its left."""
        if self.kind == "name":
            return self.text not in KEYWORDS
        return self.kind in ("number", "string") or self.text in (")", "]", "}")


class Statement(NamedTuple):
    """One logical line, and the headers of the blocks that it lies in, the outermost first."""

    tokens: list[Token]
    blocks: tuple[list[Token], ...]

    @property
    def words(self) -> list[str]:
        return [token.text for token in self.tokens]

    @property
    def is_header(self) -> bool:
        return self.tokens[-1].text == ":"


def statements(text: str) -> Iterator[Statement]:
    """Go through a file's statements, from the top."""
    blocks: list[tuple[int, list[Token]]] = []
    for tokens in _logical_lines(text):
        column = tokens[0].start - (text.rfind("\n", 0, tokens[0].start) + 1)
        while blocks and blocks[-1][0] >= column:
            blocks.pop()
        statement = Statement(tokens, tuple(header for _, header in blocks))
        if statement.is_header:
            blocks.append((column, tokens))
        yield statement


def _logical_lines(text: str) -> Iterator[list[Token]]:
    line: list[Token] = []
    depth = 0
    for match in TOKEN.finditer(text):
        kind = str(match.lastgroup)
        if kind == "newline" and depth == 0 and line:
            yield line
            line = []
        if kind not in ("space", "comment", "newline"):
            line.append(Token(kind, match.group(), match.start()))
            depth += (match.group() in "([{") - (match.group() in ")]}") if kind == "op" else 0
    if line:
        yield line


def without_types(tokens: list[Token]) -> set[int]:
    """Return the numbers of the tokens that compute: not those of casts and of `sizeof`."""
    left = set(range(len(tokens)))
    i = 0
    while i < len(tokens):
        opens = tokens[i].text
        end = None
        if opens == "<" and not (i and tokens[i - 1].ends_operand):
            end = next((j for j in range(i, len(tokens)) if tokens[j].text == ">"), None)
        elif opens == "sizeof":
            end = next(j for j in range(i, len(tokens)) if tokens[j].text == ")")
        if end is not None:
            left -= set(range(i, end + 1))
            i = end
        i += 1
    return left
