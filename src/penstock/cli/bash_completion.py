"""Adapts completion in Bash: words that Bash splits at ``:`` and ``=``, and names with characters that it interprets.

Bash breaks ``--broker mqtt://edge:1884`` into seven words, and replaces only the last of them by what is offered. It
does not quote what it inserts: a key ``$cash`` would be a variable when the command runs.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout

__all__ = ["complete", "join_words", "shown"]

_BREAKS = ":="
_SPECIAL = re.compile(r"[^\w@%+=:,./-]")
_IN_DOUBLE_QUOTES = re.compile(r'["$`\\]')


def complete(run: Callable[[], object]) -> object:
    """Call ``run``, which prints the names for ``COMP_WORDS`` and ``COMP_CWORD``, and print them as Bash needs them."""
    text = os.environ.get("COMP_WORDS", "")
    words, at = join_words(text.split("\n" if "\n" in text else " "), int(os.environ.get("COMP_CWORD", "0")))
    os.environ |= {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(at)}
    word = words[at] if at < len(words) else ""
    found = io.StringIO()
    try:
        with redirect_stdout(found):
            return run()
    finally:  # it ends the process
        sys.stdout.write("".join(f"{shown(name, word)}\n" for name in found.getvalue().splitlines() if name))


def join_words(words: Sequence[str], at: int) -> tuple[list[str], int]:
    """Join the words that Bash has split, and return the index of the word that contains the word ``at``."""
    joined: list[str] = []
    index = at
    glue = False
    for number, word in enumerate(words):
        breaks = bool(word) and set(word) <= set(_BREAKS)
        if joined and (breaks or (glue and word)):  # directly after a break, the break itself is the current word
            joined[-1] += word
        else:
            joined.append(word)
        if number == at:
            index = len(joined) - 1
        glue = breaks
    return joined, index if at < len(words) else len(joined)


def shown(name: str, word: str) -> str:
    """Return the part of ``name`` that Bash inserts in place of the last part of ``word``, quoted as ``word`` is."""
    if word.startswith("'"):
        return name.replace("'", "'\\''")
    if word.startswith('"'):
        return _IN_DOUBLE_QUOTES.sub(r"\\\g<0>", name)
    value = word.partition("=")[2] if word.startswith("--") and "=" in word else word
    end = max(value.rfind(each) for each in _BREAKS) + 1
    return _SPECIAL.sub(r"\\\g<0>", name.removeprefix(value[:end].replace("\\", "")))
