"""What `penstock.cli.parameters` needs of typer and does not get from its documented interface."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command

from penstock.cli.parameters import UsageError

_ADVICE = "this version of typer has no {}: change penstock.cli.parameters, or commands import pydantic again"


def _command(
    topic: Annotated[str, typer.Argument()],
    count: Annotated[int, typer.Option(min=1)] = 1,
    labels: Annotated[list[str] | None, typer.Option("--label")] = None,
    file: Path | None = None,
) -> None:
    """Take one parameter of each kind."""


def _parameters() -> list[Any]:
    app = typer.Typer(add_completion=False)
    app.command()(_command)
    command: Any = get_command(app)
    return [param for param in command.params if param.name != "help"]


@pytest.mark.parametrize(
    "name", ["type_descriptor", "process_value", "value_is_missing", "required", "multiple", "nargs", "callback"]
)
def test_parameters_have_the_attributes(name: str) -> None:
    for param in _parameters():
        assert hasattr(param, name), _ADVICE.format(f"{type(param).__name__}.{name}")


@pytest.mark.parametrize("name", ["annotation", "parameter_info"])
def test_descriptors_have_the_attributes(name: str) -> None:
    for param in _parameters():
        assert hasattr(param.type_descriptor, name), _ADVICE.format(f"type_descriptor.{name}")


def test_descriptors_have_the_types_and_limits() -> None:
    found = {param.name: param.type_descriptor for param in _parameters()}
    assert found["topic"].annotation is str, _ADVICE.format("annotation str for a required text")
    assert found["count"].annotation is int, _ADVICE.format("annotation int for a number")
    info = found["count"].parameter_info
    assert (info.parser, info.min, info.max, info.clamp) == (None, 1, None, False), _ADVICE.format("limits of numbers")
    info = found["file"].parameter_info
    checks = {name: getattr(info, name) for name in ("exists", "writable", "resolve_path", "allow_dash", "path_type")}
    assert (found["file"].annotation, any(checks.values())) == (Path, False), _ADVICE.format("checks of paths")
    assert (info.file_okay, info.dir_okay, info.readable) == (True, True, True), _ADVICE.format("kinds of files")


@pytest.mark.parametrize("name", ["ctx", "format_message", "show"])
def test_errors_of_usage_have_the_attributes(name: str) -> None:
    error = UsageError("wrong")
    assert hasattr(error, name), _ADVICE.format(f"UsageError.{name}")
    assert not issubclass(UsageError, typer.BadParameter), _ADVICE.format("base class of BadParameter")
