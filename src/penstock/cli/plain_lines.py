"""Plain command lines: read without the parser, whose import and construction take a third of the time of a request.

A line is plain if it calls a command of :data:`GROUPS` with known options, each once and by its whole name, and values
that are text, paths or flags, or that the option itself parses. For all others, also for help, completion and errors of
usage, :func:`read` returns None, and typer reads the line. Both readers use the same descriptions
(:mod:`penstock.cli.declarations`); `tests/unit/cli/test_plain_lines.py` compares what they read.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, NamedTuple, get_args

from penstock.cli.declarations import (
    REQUIRED,
    Argument,
    Command,
    Description,
    Option,
    Parameter,
    parameters_of,
    readable_or_missing,
)

__all__ = ["COMPLETION_VARIABLE", "GROUPS", "read"]

GROUPS: Final[Mapping[str, str]] = {"kv": "penstock.cli.kv"}
"""Modules of the groups whose commands send a few requests, and should therefore start fast."""

COMPLETION_VARIABLE: Final = "_PENSTOCK_COMPLETE"
"""Environment variable with which a shell asks for completions."""
_SETTINGS: Final = frozenset({"autocompletion", "envvar", "help", "metavar", "parser", "show_default"})
"""Settings of options that only the help shows, or that are implemented here."""
_KINDS: Final = (bool, float, int, str, Path)
_LIMITS: Final = frozenset({"min", "max"})
"""Settings that matter if the option is used."""


class _NotPlainError(ValueError):
    pass


class _PlainParameter(NamedTuple):
    """``kind``: the type of the value; None if typer has to convert it."""

    name: str
    description: Description
    kind: type | None
    default: Any

    @property
    def options(self) -> tuple[str, ...]:
        return self.description.names or (f"--{self.name.replace('_', '-')}",)

    def value(self, given: str | bool | None) -> Any:
        """Convert a value of the line, of the environment or of a context; None: the default.

        Raises:
            ValueError: typer has to convert it, or to report why it is invalid.
        """
        if given is None:
            if self.default is REQUIRED:
                raise _NotPlainError(self.name)
            return self.default
        if (parser := self.description.settings.get("parser")) is not None:
            return parser(given)
        if self.kind is Path and isinstance(given, str) and readable_or_missing(given):
            return Path(given)
        if self.kind is not type(given):
            raise _NotPlainError(self.name)
        return given


def read(args: Sequence[str], environment: Mapping[str, str]) -> Callable[[], int] | None:
    """Return the call of the command in ``args``, which returns the exit status; None if the line is not plain.

    Raises:
        ConfigError: the selected context does not exist, or the file of the contexts cannot be read.
    """
    if len(args) < 2 or args[0] not in GROUPS or "" in args or environment.get(COMPLETION_VARIABLE):
        return None
    declared = importlib.import_module(GROUPS[args[0]]).app.commands
    command: Command | None = next((each.function for each in declared if each.name == args[1]), None)
    if command is None:
        return None
    try:
        values = _values([_plain_parameter(each) for each in parameters_of(command)], args[2:], environment)
    except ValueError:
        return None
    return partial(_call, command, values)


def _call(command: Command, values: Mapping[str, Any]) -> int:
    from penstock.cli.options import start_collecting

    start_collecting()
    return command(**values) or 0


def _plain_parameter(parameter: Parameter) -> _PlainParameter:
    annotation, *descriptions = get_args(parameter.annotation)
    if len(descriptions) != 1 or not isinstance(descriptions[0], Description):
        raise _NotPlainError(parameter.name)
    [description] = descriptions
    unknown = description.settings.keys() - _SETTINGS
    kinds = set(get_args(annotation)) - {NoneType} if isinstance(annotation, UnionType) else {annotation}
    kind = kinds.pop()
    if kinds or kind not in _KINDS or unknown - _LIMITS:
        raise _NotPlainError(parameter.name)
    return _PlainParameter(parameter.name, description, None if unknown else kind, parameter.default)


def _values(
    parameters: Sequence[_PlainParameter], words: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values of all parameters: of the line, else of the environment, of the context, else the default."""
    found: dict[str, str | bool | None] = _given(parameters, words)
    variables = {
        each.name: variable
        for each in parameters
        if isinstance(variable := each.description.settings.get("envvar"), str)
    }
    for name, variable in variables.items():
        if name not in found and (text := environment.get(variable)):
            found[name] = text
    values = {each.name: each.value(found.get(each.name)) for each in parameters}
    if variables:
        from penstock.cli.options import context_values

        given = {name: name in found for name in variables}
        selected = environment.get("PENSTOCK_CONTEXT") or None
        more = context_values(selected, variables, given, values)
        values |= {each.name: each.value(more[each.name]) for each in parameters if each.name in more}
    return values


def _given(parameters: Sequence[_PlainParameter], words: Sequence[str]) -> dict[str, str | bool | None]:
    """Return what the line has for each parameter: the text of a value, True for a flag.

    Raises:
        ValueError: the line is not plain.
    """
    arguments = [each for each in parameters if isinstance(each.description, Argument)]
    options = {name: each for each in parameters if isinstance(each.description, Option) for name in each.options}
    found: dict[str, str | bool | None] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            if not arguments:
                raise _NotPlainError(word)
            found[arguments.pop(0).name] = word
            continue
        name, equals, value = word.partition("=")
        option = options.get(name)
        if option is None or option.name in found:
            raise _NotPlainError(word)
        if option.kind is bool:
            if equals or not option.description.names:
                raise _NotPlainError(word)
            found[option.name] = True
            continue
        if not (equals and name.startswith("--")):
            if equals:
                raise _NotPlainError(word)
            value = next(rest, "")
        if not value or value.startswith("-"):
            raise _NotPlainError(word)
        found[option.name] = value
    return found
