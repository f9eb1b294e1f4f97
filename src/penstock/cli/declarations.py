"""Commands and their parameters, described without the parser.

A command is a function; the annotations of its parameters describe options and arguments. Modules whose commands should
start fast use :class:`Option` and :class:`Argument` instead of typer's functions of these names, with the same
arguments. :mod:`penstock.cli.parser` builds typer's commands from these descriptions, and
:mod:`penstock.cli.plain_lines` reads plain command lines by them without importing typer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Final, NamedTuple, Protocol, get_type_hints

__all__ = [
    "REQUIRED",
    "Argument",
    "Command",
    "Commands",
    "DeclaredCommand",
    "Description",
    "Option",
    "Parameter",
    "parameters_of",
    "readable_or_missing",
    "shared_options",
]

Command = Callable[..., int | None]
"""Function of a command; returns its exit status, None for 0."""

REQUIRED: Final[Any] = ...
"""Default of a parameter without one."""


class Description:
    """Names and settings of a parameter, as typer accepts them. A ``parser`` raises ValueError with the reason."""

    __slots__ = ("names", "settings")

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names = names
        self.settings = settings


class Option(Description):
    """Description of an option. Its name is by default that of the parameter."""

    __slots__ = ()


class Argument(Description):
    """Description of a positional argument."""

    __slots__ = ()


class Parameter(NamedTuple):
    """Parameter of a command: the type with its description, and the default or :data:`REQUIRED`."""

    name: str
    annotation: Any
    default: Any


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def shared_options(kind: type[_Dataclass], argument: str) -> Callable[[Command], Command]:
    """Return a decorator that gives a command an option for each field of ``kind``; the command gets an instance of
    ``kind`` as ``argument``."""
    return lambda command: _WithOptions(command, kind, argument)


class _WithOptions:
    """A command with shared options; its parameters are determined when they are needed."""

    def __init__(self, command: Command, kind: type[_Dataclass], argument: str) -> None:
        self._command = command
        self._kind = kind
        self._argument = argument
        self.__name__ = command.__name__
        self.__doc__ = command.__doc__
        self.__module__ = command.__module__

    def __call__(self, **given: Any) -> int | None:
        options = {field.name: given.pop(field.name) for field in fields(self._kind)}
        return self._command(**given, **{self._argument: self._kind(**options)})

    @cached_property
    def parameters(self) -> list[Parameter]:
        own = [each for each in parameters_of(self._command) if each.name != self._argument]
        types = get_type_hints(self._kind, include_extras=True)
        return own + [Parameter(field.name, types[field.name], field.default) for field in fields(self._kind)]


def parameters_of(command: Command) -> list[Parameter]:
    """Return the parameters of a command, with its shared options."""
    if isinstance(command, _WithOptions):
        return command.parameters
    from inspect import signature

    types = get_type_hints(command, include_extras=True)
    return [
        Parameter(name, types[name], REQUIRED if each.default is each.empty else each.default)
        for name, each in signature(command).parameters.items()
    ]


class DeclaredCommand(NamedTuple):
    """A command of a group; without ``name`` it is called like the function."""

    function: Command
    name: str | None
    examples: tuple[str, ...]


@dataclass(slots=True)
class Commands:
    """A group of commands, each with examples. Without ``help_text``: a module of one command."""

    help_text: str | None = None
    commands: list[DeclaredCommand] = field(default_factory=list)
    groups: dict[str, Commands] = field(default_factory=dict)

    def add(self, *examples: str, name: str | None = None) -> Callable[[Command], Command]:
        """Decorator: add a command, called ``name`` or like the function, with ``examples`` in its help."""

        def added(function: Command) -> Command:
            self.commands.append(DeclaredCommand(function, name, examples))
            return function

        return added


def readable_or_missing(path: str | os.PathLike[str]) -> bool:
    """Whether a file can be read or does not exist: an existing file of an option must be readable."""
    return os.access(path, os.R_OK) or not os.access(path, os.F_OK)
