"""The mutants of a Cython file: one small error each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .cython_source import Statement, Token, statements, without_types

SWAPS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "+": "-",
    "-": "+",
    "*": "//",
    "//": "*",
    "and": "or",
    "or": "and",
    "True": "False",
    "False": "True",
    "min": "max",
    "max": "min",
    "break": "continue",
    "continue": "break",
}
BINARY = frozenset(["<", "<=", ">", ">=", "+", "-", "*", "//"])
AUGMENTED = frozenset(["+=", "-=", "*=", "//=", "|=", "&=", "^=", ">>=", "<<=", "/="])

# Statements without behaviour of their own.
SKIPPED = frozenset(["import", "from", "cimport", "include", "global", "ctypedef", "@", "class"])
TYPES = frozenset(["enum", "struct", "union", "extern"])
# Checks of invariants, and what only debug builds run.
CHECKS = re.compile(r"_check$|^check_|invariant|^require_sound$|^gm_panic$")
DEBUG_ONLY = "GM_DEBUG"


@dataclass(frozen=True)
class Mutant:
    """A change of one piece of a file."""

    file: str  # from the root of the checkout
    function: str  # the innermost; "": the module itself
    line: int
    operator: str
    start: int
    end: int
    new: str
    before: str  # whole lines, without indentation, joined by a space
    after: str

    def apply(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function or 'the module'}"


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """Make every mutant of a file, in order of place; none twice."""
    text = (root / file).read_text()
    made: dict[tuple[int, int, str], Mutant] = {}
    for statement in statements(text):
        function = _function_of(statement)
        if _is_left_out(statement, function):
            continue
        for operator, start, end, new in _changes(statement, function, text):
            first = text.rfind("\n", 0, start) + 1
            last = text.find("\n", end)
            before, after = text[first:last], text[first:start] + new + text[end:last]
            if _shown(before) != _shown(after):
                made.setdefault(
                    (start, end, new),
                    Mutant(
                        file=file,
                        function=_name(function),
                        line=text.count("\n", 0, start) + 1,
                        operator=operator,
                        start=start,
                        end=end,
                        new=new,
                        before=_shown(before),
                        after=_shown(after),
                    ),
                )
    return sorted(made.values(), key=lambda mutant: (mutant.start, mutant.end, mutant.new))


def _shown(lines: str) -> str:
    return " ".join(re.sub(r"\s#.*", "", line).strip() for line in lines.splitlines())


# ---- where ---------------------------------------------------------------------------------------


def _function_of(statement: Statement) -> list[Token]:
    """Return the header of the innermost function; []: none."""
    for header in reversed(statement.blocks):
        words = [token.text for token in header]
        if words[0] in ("def", "cdef", "cpdef") and "(" in words and not TYPES & set(words[:2]):
            return header
    return []


def _name(header: list[Token]) -> str:
    words = [token.text for token in header]
    return words[words.index("(") - 1] if words else ""


def _is_left_out(statement: Statement, function: list[Token]) -> bool:
    headers = [[token.text for token in header] for header in statement.blocks]
    words = statement.words
    if words[0] in SKIPPED or DEBUG_ONLY in words:
        return True
    if statement.is_header and words[0] in ("def", "cdef", "cpdef"):
        return True
    if any(TYPES & set(header[:2]) or DEBUG_ONLY in header for header in headers):
        return True
    return bool(CHECKS.search(_name(function)))


# ---- what ----------------------------------------------------------------------------------------

Change = tuple[str, int, int, str]


def _changes(statement: Statement, function: list[Token], text: str) -> Iterator[Change]:
    tokens = statement.tokens
    words = statement.words
    start, end = tokens[0].start, tokens[-1].end
    if words[0] in ("cdef", "cpdef"):
        if "=" not in words:
            return
        tokens = tokens[words.index("=") + 1 :]
    elif words[0] == "return" and len(words) > 1:
        yield from _returns(tokens[1:], function, text)
    elif _is_call(tokens):
        yield "call deleted", start, end, "pass"
    elif AUGMENTED & set(words):
        yield "update deleted", start, end, "pass"
    if words[0] in ("if", "elif", "while") and statement.is_header:
        yield from _forced(tokens[1:-1], only_false=words[0] == "while")
    yield from _of_tokens(tokens)


def _is_call(tokens: list[Token]) -> bool:
    """Whether the statement is one call: a dotted name, then brackets up to its end."""
    if tokens[0].kind != "name" or not tokens[0].ends_operand or tokens[-1].text != ")":
        return False
    depth = 0
    for i, token in enumerate(tokens):
        depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
        if depth == 0 and token.text not in (".", ")", "]") and token.kind != "name":
            return False
        if depth == 0 and token.text == ")" and i + 1 < len(tokens) and tokens[i + 1].text != ".":
            return False
    return True


def _returns(value: list[Token], function: list[Token], text: str) -> Iterator[Change]:
    start, end = value[0].start, value[-1].end
    shown = text[start:end]
    words = [token.text for token in function]
    kind = set(words[: words.index("(")]) if words else set()
    if shown in ("True", "False"):
        return
    if "def" in kind or kind & {"object", "str", "tuple", "dict", "list"}:
        new = "None"
    elif "*" in kind:
        new = "NULL"
    elif "bint" in kind:
        new = f"not ({shown})"
    else:
        new = "1" if shown == "0" or re.fullmatch(r"\w+_(OK|SUCCESS)", shown) else "0"
    yield "return value", start, end, new


def _forced(condition: list[Token], only_false: bool = False) -> Iterator[Change]:
    start, end = condition[0].start, condition[-1].end
    if len(condition) == 1 and condition[0].text in SWAPS:
        return
    yield "condition", start, end, "False"
    if not only_false:  # a loop without an end says nothing of the tests
        yield "condition", start, end, "True"


def _of_tokens(tokens: list[Token]) -> Iterator[Change]:
    computing = without_types(tokens)
    for i, token in enumerate(tokens):
        before = tokens[i - 1] if i else None
        if i not in computing or token.kind == "string":
            continue
        if token.kind == "number":
            # `[0]` is what a pointer points to.
            if [near.text for near in tokens[i - 1 : i + 2]] != ["[", "0", "]"]:
                yield from _constants(token)
        elif token.text == "not":
            after = tokens[i + 1]
            yield "not", token.start, after.start, ""
        elif token.text == "is" and tokens[i + 1].text != "not":
            yield "comparison", token.end, token.end, " not"
        elif token.text == "in" and _is_membership(tokens, i):
            yield "comparison", token.start, token.start, "not "
        elif token.text == "if" and before is not None:
            yield from _chosen(tokens, i)
        elif token.text in ("min", "max"):
            if tokens[i + 1].text == "(" and not (before and before.text == "."):
                yield "min, max", token.start, token.end, SWAPS[token.text]
        elif token.text in SWAPS:
            # Not a sign, a pointer's star, or unpacked arguments.
            after = tokens[i + 1] if i + 1 < len(tokens) else None
            is_binary = before and before.ends_operand and after and after.text not in (")", ",")
            if is_binary or token.text not in BINARY:
                yield _named(token.text), token.start, token.end, SWAPS[token.text]


def _is_membership(tokens: list[Token], i: int) -> bool:
    words = [token.text for token in tokens[:i]]
    return "for" not in words and words[-1] != "not"


def _named(word: str) -> str:
    if word in ("<", "<=", ">", ">=", "==", "!="):
        return "comparison"
    if word in ("and", "or"):
        return "and, or"
    if word in ("True", "False"):
        return "True, False"
    return "break, continue" if word in ("break", "continue") else "arithmetic"


def _constants(token: Token) -> Iterator[Change]:
    if not re.fullmatch(r"0[xX]\w+|\d+", token.text):
        return
    value = int(token.text, 0)
    shape = hex if token.text[:2].lower() == "0x" else str
    yield "constant", token.start, token.end, shape(value + 1)
    if value:
        yield "constant", token.start, token.end, shape(value - 1)


def _chosen(tokens: list[Token], i: int) -> Iterator[Change]:
    """Force the condition of `a if condition else b`."""
    depth = 0
    for j in range(i + 1, len(tokens)):
        depth += (tokens[j].text in ("(", "[", "{")) - (tokens[j].text in (")", "]", "}"))
        if depth < 0:
            return
        if depth == 0 and tokens[j].text == "else":
            yield from _forced(tokens[i + 1 : j])
            return
