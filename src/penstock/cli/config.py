"""`penstock config`: check and show the configuration of a node, without starting it."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Annotated, Any, NamedTuple

import typer

from penstock.cli.options import Commands, Json
from penstock.cli.output import note, print_json, print_table
from penstock.runtime.config.loader import has_secret_name, validate
from penstock.runtime.config.yaml_document import Document, Location, path_text

__all__ = ["File", "app", "effective_yaml"]

_DEFAULT = "default"
_HIDDEN = "***"
"""Shown in place of a secret."""

app = Commands("Check and show the configuration of a node.")

File = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FILE]",
        help="Configuration file.",
        envvar="PENSTOCK_CONFIG",
        show_default="penstock.yaml, if it exists",
    ),
]


class Setting(NamedTuple):
    """An effective setting. ``origin``: FILE:LINE:COLUMN, the name of an environment variable, or ``default``."""

    location: Location
    value: object
    origin: str


@app.add("penstock config check", "penstock config check penstock.yaml")
def check(file: File = None) -> None:
    """Check a configuration and the files that it names, and exit with status 2 if the node would refuse them.

    The checks are those of `penstock up` before it opens the data directory: options, values, users, policies, and
    certificates with their keys. Addresses in use and the data directory are not checked. Environment variables
    (PENSTOCK_MQTT, ...) override the file, as for `penstock up`.
    """
    from penstock.node.config.node import load_config
    from penstock.node.security import NodeSecurity

    config = load_config(file, {}, os.environ)
    if config.creates_files:
        note(
            "the configuration is valid; users, policies and certificates were not checked: `penstock up` creates the"
            " files of the profile aio at its first start"
        )
        return
    NodeSecurity(config).check_certificates()
    note("the configuration is valid")


@app.add("penstock config show", "penstock config show --changed --origin", "penstock config show penstock.yaml --json")
def show(
    file: File = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only settings that are set, not defaults.")] = False,
    origin: Annotated[
        bool, typer.Option("--origin", help="A table with the file and line, or the variable, of each setting.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the effective configuration of a node: file, environment variables and defaults.

    The output is a configuration file. Values that may be secrets are shown as ***. --json prints a line with name,
    value and origin for each setting.
    """
    settings = [setting for setting in _effective(file, {}) if not changed or setting.origin != _DEFAULT]
    if as_json:
        for setting in settings:
            print_json({"name": path_text(setting.location), "value": setting.value, "origin": setting.origin})
    elif origin:
        rows = [
            {"setting": path_text(setting.location), "value": _cell(setting.value), "origin": setting.origin}
            for setting in settings
        ]
        print_table(rows, ["setting", "value", "origin"], as_json=False)
    else:
        sys.stdout.write(_yaml(settings))
    if not settings:
        note("every setting has its default value")


@app.add("penstock config schema > penstock.schema.json")
def schema() -> None:
    """Print the JSON Schema of the configuration file, for completion in an editor."""
    from penstock.node.config.node import NodeConfig

    sys.stdout.write(json.dumps(NodeConfig.model_json_schema(), indent=2) + "\n")


def _settings(document: Document, config: Any) -> Iterator[Setting]:
    """The settings of ``config``, in the order of the reference page, with the source that ``document`` knows."""

    def settings(value: object, location: Location) -> Iterator[Setting]:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                yield from settings(inner, (*location, name))
        elif isinstance(value, list | tuple) and any(isinstance(each, dict) for each in value):
            for index, inner in enumerate(value):
                yield from settings(inner, (*location, index))
        else:
            yield Setting(location, _plain(value, location, document), _origin(document, location, value))

    return settings(config.model_dump(), ())


def _plain(value: object, location: Location, document: Document) -> object:
    """A value as in a configuration file; secrets are hidden, but not the names of files that contain them."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, set | frozenset | tuple | list):
        return [_plain(each, location, document) for each in value]
    if isinstance(value, str):
        return _HIDDEN if value and has_secret_name(location) else document.without_secrets(value)
    return value


def _origin(document: Document, location: Location, value: object) -> str:
    """Return the source of ``value`` at ``location``: its place in the file, a variable, or ``default``."""
    found: Any = document.data
    for depth, part in enumerate(location):
        if isinstance(found, str):  # the short form of a section, as in `mqtt: HOST:PORT`
            return document.where(location[:depth]) if found == value else _DEFAULT
        try:
            found = found[part]
        except (KeyError, IndexError, TypeError):
            return _DEFAULT
    return document.where(location)


def _cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def effective_yaml(file: Path | None, flags: Mapping[str, str | None]) -> str:
    """Return all settings as a configuration file, without secrets. Raises ConfigError."""
    return _yaml(_effective(file, flags))


def _effective(file: Path | None, flags: Mapping[str, str | None]) -> list[Setting]:
    from penstock.node.config.node import NodeConfig, read_settings

    document = read_settings(file, flags, os.environ)
    return list(_settings(document, validate(document, NodeConfig)))


def _yaml(settings: Sequence[Setting]) -> str:
    from ruamel.yaml import YAML

    root: dict[Any, Any] = {}
    for setting in settings:
        if setting.value is None:  # no default: the option is not set
            continue
        node: Any = root
        for part, following in zip(setting.location, setting.location[1:], strict=False):
            empty: Any = [] if isinstance(following, int) else {}
            if isinstance(part, int):
                node.extend(type(empty)() for _ in range(len(node), part + 1))
                node = node[part]
            else:
                node = node.setdefault(part, empty)
        node[setting.location[-1]] = setting.value
    if not root:
        return ""
    yaml = YAML()
    yaml.width = 10_000
    text = io.StringIO()
    yaml.dump(root, text)
    return text.getvalue()
