"""Documentation pages as programs: their console, python and file blocks, in reading order.

A fenced block, which may stand in a list, may have an HTML comment on the line before it:

``<!-- test: file NAME -->``           the block is the file NAME of the reader's folder
``<!-- test: background -->``          a server: runs until the end of the page; the next block waits for its "ready"
``<!-- test: covered by PATH -->``     another test runs this command; the path must exist and name the command
``<!-- test: fails N -->``             the command exits with status N

``<!-- test: nightly -->`` on a line of its own: the page takes long and is followed every night only.

Console blocks are commands (``$ `` in front) and, under each, what it prints; a line ``...`` stands for any lines and
``...`` inside a line for any text; columns of a table may have another width. A command without output lines is only
required to succeed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

__all__ = ["ROOT", "Block", "Command", "blocks", "commands", "matches", "page_paths"]

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(
    r"(?:<!-- test: (?P<directive>[^\n]*?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>[a-z]+)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, text, directive (empty when there is none) and line in the page."""

    language: str
    text: str
    directive: str
    line: int


@dataclass(frozen=True)
class Command:
    """One shell command and the output lines that the page shows for it."""

    text: str
    output: tuple[str, ...]


def page_paths() -> list[Path]:
    """README and every page below docs/, in a fixed order."""
    return [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of ``page``, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(m["language"], dedent(m["text"]), m["directive"] or "", text.count("\n", 0, m.start()) + 1)
        for m in FENCE.finditer(text)
    ]


def commands(block: Block) -> list[Command]:
    """The commands of a console block; a trailing backslash continues a command."""
    found: list[tuple[str, list[str]]] = []
    continued = False
    for line in block.text.splitlines():
        if continued:
            command, output = found[-1]
            found[-1] = (f"{command}\n{line.removeprefix('> ')}", output)
            continued = line.endswith("\\")
        elif line.startswith("$ "):
            found.append((line[2:], []))
            continued = line.endswith("\\")
        elif found:
            found[-1][1].append(line)
    return [Command(command, tuple(output)) for command, output in found]


def _pattern(line: str) -> str:
    return re.sub(r"(?:\\ ){2,}", " {2,}", re.escape(line).replace(r"\.\.\.", ".*"))


def matches(shown: tuple[str, ...], printed: str) -> bool:
    """Whether ``printed`` is what the page shows, with ``...`` standing for anything."""
    if not shown:
        return True
    lines = [r"(?:.*\n)*?" if line.strip() == "..." else f"{_pattern(line.rstrip())}[ \\t]*\n" for line in shown]
    return re.fullmatch("".join(lines), printed.rstrip("\n") + "\n") is not None
