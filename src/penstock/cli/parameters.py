"""Parameters of commands whose values are read without pydantic.

Typer converts every value with pydantic, whose import takes a third of the time of most commands. Values that need no
more than their text are converted here; others, and all invalid ones, by typer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Final

import typer

__all__ = ["PlainParameters", "UsageError", "completes", "source_of"]

UsageError: Any = typer.BadParameter.__base__  # typer exports only this subclass
"""Error of the parser for wrong usage."""

_PATH_CHECKS: Final = ("exists", "writable", "resolve_path", "allow_dash", "path_type")
"""Settings of an option for a path that only typer checks."""


def source_of(ctx: Any, name: str) -> str:
    """Return the source of the value of a parameter: ``COMMANDLINE``, ``ENVIRONMENT``, ``DEFAULT_MAP`` (a context) or
    ``DEFAULT``, also if the line was not parsed up to it."""
    source = ctx.get_parameter_source(name)
    return "DEFAULT" if source is None else str(source.name)


def completes(words: Iterable[str]) -> Callable[[str], list[str]]:
    """Return the shell completion of a parameter that accepts these words."""
    known = list(words)

    def complete(incomplete: str) -> list[str]:
        return [word for word in known if word.startswith(incomplete)]

    return complete


_NO_BREAK: Final = "\u2011"
"""A hyphen at which no line is broken, until the help is complete."""
_FORMATTER: Any = typer.Context.formatter_class


class _Formatter(_FORMATTER):  # type: ignore[misc] # typer exports no type of it
    """Formatter that breaks no line at a hyphen: names of commands and options have some."""

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", _NO_BREAK))

    def write_dl(self, rows: Iterable[tuple[str, str]], *args: Any, **given: Any) -> None:
        super().write_dl([(name, text.replace("-", _NO_BREAK)) for name, text in rows], *args, **given)

    def getvalue(self) -> str:
        return str(super().getvalue()).replace(_NO_BREAK, "-")


class _Context(typer.Context):
    formatter_class = _Formatter


class PlainParameters:
    """Base of typer's commands and groups, before typer's own class."""

    context_class: Any = _Context

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with ``--help``, which the parser adds."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc] # of typer's class
        for param in params:
            # Older versions of typer have no descriptor, and do not use pydantic.
            if hasattr(param, "type_descriptor") and "process_value" not in vars(param):
                param.process_value = partial(_process_value, param, param.process_value)
        return params


def _process_value(param: Any, process: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    """Process the value of a parameter; ``process`` does so with pydantic, and reports what is wrong with a value."""
    several = param.multiple or param.nargs == -1
    if param.required and param.value_is_missing(value):
        return process(ctx, value)
    if value is None:
        value = () if several else None
    elif several or param.nargs != 1:
        if param.type_descriptor.annotation != list[str] or param.type_descriptor.parameter_info.parser is not None:
            return process(ctx, value)
        value = list(value)
    else:
        try:
            value = _converted(param.type_descriptor, value)
        except (ValueError, UsageError):
            return process(ctx, value)
    return value if param.callback is None else param.callback(ctx, param, value)


def _converted(descriptor: Any, value: Any) -> Any:
    """Convert one value of the command line, or a default.

    Raises:
        ValueError: it is invalid, or its type needs pydantic.
    """
    info, kind = descriptor.parameter_info, descriptor.annotation
    if info.parser is not None:
        return info.parser(value)
    if kind in (bool, float, int, str) and type(value) is kind:
        return value
    if kind is Path and not any(getattr(info, name) for name in _PATH_CHECKS) and info.file_okay and info.dir_okay:
        if os.access(value, os.R_OK) or not os.access(value, os.F_OK):  # an existing file must be readable
            return Path(value)
    elif isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if kind is int and isinstance(value, str) and value.isascii() and value.isdecimal() and not info.clamp:
        number = int(value)
        if (info.min is None or number >= info.min) and (info.max is None or number <= info.max):
            return number
    raise ValueError
