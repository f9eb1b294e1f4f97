"""Groups of commands: how every one of them is made, and how its list of commands reads."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

__all__ = ["Group", "command_group"]


class Group(TyperGroup):
    """Lists each command with the whole first paragraph of its help, where the parser would cut it at the margin."""

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        """One row a command, in the order in which they were added."""
        rows = [(name, _first_paragraph(command.help or "")) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def command_group(help_text: str, *, alone: bool = True) -> typer.Typer:
    """A group of commands described by ``help_text``; ``alone``: called without a command it shows its help."""
    # Plain help: half the start-up time, and the text that the reference page holds.
    return typer.Typer(cls=Group, rich_markup_mode=None, add_completion=False, no_args_is_help=alone, help=help_text)


def _first_paragraph(text: str) -> str:
    """Of a docstring, as one line."""
    return " ".join(text.partition("\n\n")[0].split())
