"""Building blocks of commands: groups, shared options, durations and sizes, input, confirmation and ``--watch``."""

from __future__ import annotations

import inspect
import math
import sys
import time
from collections.abc import Callable
from dataclasses import Field, fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Protocol, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.cli.output import print_error, unless_standard
from penstock.errors import ConfigError, PenstockError
from penstock.runtime.config.values import duration_ms, size_bytes

__all__ = [
    "DURATION",
    "CommandGroup",
    "Commands",
    "Count",
    "DryRun",
    "Json",
    "Watch",
    "Yes",
    "confirmed",
    "duration_option",
    "input_bytes",
    "repeat",
    "shared_options",
    "size_option",
]


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Command = Callable[..., None]


def shared_options(kind: type[_Dataclass], argument: str) -> Callable[[Command], Command]:
    """Give a command an option for each field of ``kind``; it gets an instance of it as its argument ``argument``."""

    def decorate(command: Command) -> Command:
        names = [field.name for field in fields(kind)]

        def with_options(**given: Any) -> None:
            own = {name: value for name, value in given.items() if name not in names}
            own[argument] = kind(**{name: given[name] for name in names})
            command(**own)

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


class CommandGroup(TyperGroup):
    """Group of commands whose list shows the first paragraph of each help text completely."""

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        """One row per command, in the order in which they were added."""
        rows = [(name, _first_paragraph(command.help or "")) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class CommandWithExamples(TyperCommand):
    """Command whose epilog is a list of examples, one per line."""

    def format_epilog(self, _ctx: Any, formatter: Any) -> None:
        """The examples as a section, without wrapping."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


class Commands(typer.Typer):
    """A group of commands, each with examples."""

    def __init__(self, help_text: str | None = None) -> None:
        """``help_text`` describes the group; None: a module of one command."""
        # Plain help: half the start-up time, and the text that the reference page holds.
        settings: dict[str, Any] = {"rich_markup_mode": None, "add_completion": False}
        if help_text is not None:
            settings |= {"cls": CommandGroup, "no_args_is_help": True, "help": help_text}
        super().__init__(**settings)
        if help_text is not None:
            self.callback()(_no_group_options)  # without it, a group of one command would be that command

    def add(self, *examples: str, name: str | None = None) -> Callable[[Command], Command]:
        """Decorator: add a command, called ``name`` or like the function, with ``examples`` in its help."""
        return self.command(name, cls=CommandWithExamples, epilog="\n".join(examples))


def _no_group_options() -> None:
    pass


def _first_paragraph(text: str) -> str:
    """The first paragraph of a docstring, as one line."""
    return " ".join(text.partition("\n\n")[0].split())


def input_bytes(command: str, name: str, text: str | None, file: Path | None) -> bytes:
    """The argument ``name`` of ``command``: ``text``, or the content of ``file`` or standard input (``-``).

    Raises:
        ConfigError: both are given, the file cannot be read, or nothing is given and standard input is a terminal.
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

DURATION: Final = "DURATION"
"""Metavar of durations: a number with a unit (ms, s, m, h, d); a bare number is seconds."""


def duration_option(*names: str, text: str, at_least_s: float = 0.0, default: str | None = None, **more: Any) -> Any:
    """Option whose value is a duration or ``forever``; the command gets seconds. The help shows ``default``."""

    def seconds(value: str | float) -> float:
        if isinstance(value, int | float):
            return value
        if value == "forever":
            return math.inf
        try:
            found = duration_ms(value, unit="s") / 1000
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if found < at_least_s:
            raise typer.BadParameter(f"{value!r} is less than {at_least_s:g} s")
        return found

    more |= {"parser": seconds, "metavar": DURATION, "show_default": default or False}
    return typer.Option(*names, help=text, **more)


def size_option(*names: str, text: str, default: str | None = None, **more: Any) -> Any:
    """Option whose value is a size with a unit (KiB, MiB, GiB); the command gets bytes."""

    def size(value: str | int) -> int:
        if isinstance(value, int):
            return value
        try:
            return size_bytes(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    more |= {"parser": size, "metavar": "SIZE", "show_default": default or False}
    return typer.Option(*names, help=text, **more)


Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")]
Count = Annotated[int | None, typer.Option("--count", "-c", help="Stop after N.", min=1, metavar="N")]
Watch = Annotated[
    float | None, duration_option(text="Repeat at this interval until interrupted (Ctrl-C).", at_least_s=0.1)
]


def confirmed(question: str) -> bool:
    """Ask ``question`` on the terminal; True if the answer is yes.

    Raises:
        ConfigError: there is no answer.
    """
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:  # also for Ctrl-C, before anything was done
        raise ConfigError("nothing was changed: the question was not answered", do="confirm with --yes") from None


def repeat(look: Callable[[], T], show: Callable[[T], None], every_s: float | None, *, as_json: bool) -> None:
    """Show what ``look`` returns: once, or every ``every_s`` seconds under the current time until Ctrl-C.

    While watching, errors are printed to standard error and the next attempt follows.

    Raises:
        ConfigError: the command is wrong, so repeating it cannot help.
        PenstockError: it failed, without ``every_s``.
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
