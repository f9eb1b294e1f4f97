"""Options that several commands share: described once as the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import Field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, get_type_hints

__all__ = ["SHARED_OPTIONS", "grouped"]

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
