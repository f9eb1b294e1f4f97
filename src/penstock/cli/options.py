"""Building blocks of commands: groups of commands, options that several commands share, input and ``--watch``."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import Field, fields
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, get_type_hints

import typer
from typer.core import TyperGroup

from penstock.cli.output import print_error, unless_standard
from penstock.errors import ConfigError, PenstockError

__all__ = ["SHARED_OPTIONS", "Group", "Watch", "command_group", "given_bytes", "grouped", "watched"]

SHARED_OPTIONS: ContextVar[Mapping[str, Any]] = ContextVar("shared options", default=MappingProxyType({}))
"""Grouped options of the command that runs, by name."""


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Command = Callable[..., None]


def grouped(kind: type[_Dataclass], argument: str | None) -> Callable[[Command], Command]:
    """Give a command an option for each field of ``kind``; it takes them together as its argument ``argument``.

    ``argument`` None: the command does not take them. What it calls finds all of them in :data:`SHARED_OPTIONS`.
    """

    def decorate(command: Command) -> Command:
        names = [field.name for field in fields(kind)]

        def with_options(**given: Any) -> None:
            own = {name: value for name, value in given.items() if name not in names}
            shared = {name: given[name] for name in names}
            if argument is not None:
                own[argument] = kind(**shared)
            before = SHARED_OPTIONS.set({**SHARED_OPTIONS.get(), **shared})
            try:
                command(**own)
            finally:
                SHARED_OPTIONS.reset(before)

        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(command).parameters.values()
            if parameter.name != argument
        ]
        types = get_type_hints(kind, include_extras=True)
        shared = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=types[field.name],
            )
            for field in fields(kind)
        ]
        with_options.__name__ = command.__name__
        with_options.__doc__ = command.__doc__
        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *shared)}
        with_options.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined] # read by inspect
        return with_options

    return decorate


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


def given_bytes(command: str, name: str, text: str | None, file: Path | None) -> bytes:
    """The argument ``name`` of ``command``: ``text``, or what is in ``file``, or on standard input (also for ``-``).

    Raises:
        ConfigError: both are given, the file cannot be read, or nothing is given and a person would have to type it.
    """
    if text is not None and file is not None:
        raise ConfigError(
            f"{command}: a {name} and --file exclude each other", option="--file", do="give one of the two"
        )
    if text is not None:
        return text.encode("utf-8", "surrogateescape")
    if (path := unless_standard(file)) is not None:
        try:
            return path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{command}: --file {path}: {error.strerror}", option="--file") from error
    if file is None and sys.stdin.isatty():
        raise ConfigError(
            f"{command}: no {name.lower()}",
            do=f"give a {name} ('' for an empty one), or --file PATH, or pipe it in",
        )
    return sys.stdin.buffer.read()


T = TypeVar("T")

Watch = Annotated[
    float | None, typer.Option(help="Again every so many seconds, until Ctrl-C.", min=0.1, metavar="SECONDS")
]


def watched(look: Callable[[], T], show: Callable[[T], None], every_s: float | None, *, as_json: bool) -> None:
    """Show what ``look`` finds: once, or with ``every_s`` until Ctrl-C; then for people under the time of day.

    While watching, what fails is said on standard error, and asked again.

    Raises:
        ConfigError: the command cannot work at any time.
        PenstockError: it failed, and nobody watches.
    """
    if every_s is None:
        show(look())
        return
    between = ""
    try:
        while True:
            try:
                found = look()
            except ConfigError:
                raise
            except PenstockError as error:
                print_error(error)
            else:
                if not as_json:
                    sys.stdout.write(f"{between}{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}\n")
                    sys.stdout.flush()
                    between = "\n"
                show(found)
            time.sleep(every_s)
    except KeyboardInterrupt:
        return
