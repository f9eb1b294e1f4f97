"""Lists of columns as Spark writes them (DDL), read without Spark: ``name TYPE [NOT NULL] [COMMENT 'text'], ...``.

Types: the simple ones of ``SIMPLE``, ``DECIMAL(p, s)``, ``CHAR(n)``, ``VARCHAR(n)``, ``ARRAY<type>``,
``MAP<type, type>`` and ``STRUCT<name: type, ...>``, to any depth up to ``DEEPEST``. Names that are no identifiers
stand between backticks. What this refuses Spark refuses too; collations, intervals and geography are the exceptions.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["SIMPLE", "Column", "columns"]

SIMPLE = {
    **dict.fromkeys(("BOOLEAN", "TINYINT", "BYTE", "SMALLINT", "SHORT", "INT", "INTEGER", "BIGINT", "LONG"), "exact"),
    **dict.fromkeys(("FLOAT", "REAL", "DOUBLE"), "float"),
    **dict.fromkeys(("STRING", "BINARY", "DATE", "TIMESTAMP", "TIMESTAMP_NTZ", "TIMESTAMP_LTZ", "VARIANT"), "other"),
}
"""Names of types that stand alone."""
_WITH_LENGTH = {"DECIMAL": 2, "DEC": 2, "NUMERIC": 2, "CHAR": 1, "CHARACTER": 1, "VARCHAR": 1}
"""Types with numbers in parentheses, and how many at most."""
_LISTED = "STRING, BIGINT, DOUBLE, TIMESTAMP, DECIMAL(p, s), ARRAY<...>, STRUCT<...>, ..."
_MOST_DIGITS = 38
DEEPEST = 100

_TOKEN = re.compile(
    r"(?P<space>(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)+)|(?P<quoted>`(?:[^`]|``)*`)|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<word>[A-Za-z_0-9]+)|(?P<mark>[<>(),:])|(?P<other>.)",
    re.DOTALL,
)
_ALL_TYPES = (*SIMPLE, *_WITH_LENGTH, "ARRAY", "MAP", "STRUCT")


class Column(NamedTuple):
    """One column: its name, its type as it was written (upper case), and whether it may be null."""

    name: str
    type: str
    nullable: bool


class _Token(NamedTuple):
    kind: str
    text: str
    place: int


def columns(text: str) -> list[Column]:
    """The columns in ``text``.

    Raises:
        ValueError: it is no list of columns; says at which character (the first is 1), what stands there, and what
            was expected.
    """
    reader = _Reader(text)
    found = reader.fields("", 0)
    reader.end()
    return found


def _tokens(text: str) -> Iterator[_Token]:
    for match in _TOKEN.finditer(text):
        assert match.lastgroup is not None
        if match.lastgroup != "space":
            yield _Token(match.lastgroup, match[0], match.start())
    yield _Token("end", "", len(text))


class _Reader:
    """Reads one text from left to right."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._next = 0

    def fields(self, closing: str, depth: int) -> list[Column]:
        """Columns up to ``closing``, which is left standing; inside a STRUCT a colon may follow the name."""
        found: list[Column] = []
        seen: dict[str, str] = {}
        while True:
            name_at = self._peek()
            name = self._name()
            # Spark compares names without case.
            if name.lower() in seen:
                raise self._wrong(name_at, f"a name that is not taken: {seen[name.lower()]!r} stands before it")
            seen[name.lower()] = name
            if closing and self._peek().text == ":":
                self._take()
            kind = self._type(depth)
            nullable = True
            if self._word("NOT"):
                self._expect_word("NULL")
                nullable = False
            if self._word("COMMENT"):
                if self._peek().kind != "text":
                    raise self._wrong(self._peek(), "a comment between quotes")
                self._take()
            found.append(Column(name, kind, nullable))
            if self._peek().text != ",":
                return found
            self._take()

    def end(self) -> None:
        if self._peek().kind != "end":
            raise self._wrong(self._peek(), "a comma, NOT NULL, or the end")

    def _type(self, depth: int) -> str:
        token = self._take()
        kind = token.text.upper()
        if depth > DEEPEST:
            raise self._wrong(token, f"types that are nested no deeper than {DEEPEST}")
        if token.kind != "word" or kind not in _ALL_TYPES:
            close = difflib.get_close_matches(kind, _ALL_TYPES, n=1) if token.kind == "word" else []
            raise self._wrong(token, "a type" + (f" (did you mean {close[0]}?)" if close else f": {_LISTED}"))
        if kind in SIMPLE:
            return kind
        if kind in _WITH_LENGTH:
            return kind + self._lengths(token, _WITH_LENGTH[kind])
        self._expect("<")
        if kind == "STRUCT":
            inside = [] if self._peek().text == ">" else self.fields(">", depth + 1)
            made = ", ".join(f"{column.name}: {column.type}" for column in inside)
        else:
            made = self._type(depth + 1)
            if kind == "MAP":
                self._expect(",")
                made += ", " + self._type(depth + 1)
        self._expect(">")
        return f"{kind}<{made}>"

    def _lengths(self, token: _Token, most: int) -> str:
        if self._peek().text != "(":
            if most == 1:
                raise self._wrong(self._peek(), f"the length of {token.text}, as in {token.text}(20)")
            return ""
        self._take()
        numbers: list[int] = []
        while True:
            number = self._take()
            if not number.text.isdecimal():
                raise self._wrong(number, "a number")
            numbers.append(int(number.text))
            if self._peek().text != "," or len(numbers) == most:
                break
            self._take()
        self._expect(")")
        if most == 2 and (not 1 <= numbers[0] <= _MOST_DIGITS or numbers[-1] > numbers[0]):
            raise self._wrong(token, f"1 to {_MOST_DIGITS} digits, and no more of them behind the point than there are")
        if most == 1 and numbers[0] == 0:
            raise self._wrong(token, "a length above 0")
        return f"({', '.join(map(str, numbers))})"

    def _name(self) -> str:
        token = self._take()
        if token.kind == "quoted" and len(token.text) > 2:
            return token.text[1:-1].replace("``", "`")
        if token.kind == "word":
            return token.text
        raise self._wrong(token, "the name of a column (between backticks where it is no identifier)")

    def _word(self, word: str) -> bool:
        if self._peek().kind == "word" and self._peek().text.upper() == word:
            self._take()
            return True
        return False

    def _expect_word(self, word: str) -> None:
        if not self._word(word):
            raise self._wrong(self._peek(), word)

    def _expect(self, mark: str) -> None:
        token = self._take()
        if token.text != mark:
            raise self._wrong(token, f"{mark!r}")

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._tokens[self._next]
        self._next = min(self._next + 1, len(self._tokens) - 1)
        return token

    def _wrong(self, token: _Token, expected: str) -> ValueError:
        found = f"{token.text!r}" if token.kind != "end" else "the end"
        return ValueError(f"expected {expected}, found {found} at character {token.place + 1} of the schema")
