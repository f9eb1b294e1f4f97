"""`penstock config`: check, show and import the configuration of a node, without starting it."""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Annotated, Any, NamedTuple

import typer

from penstock.cli.options import Commands, DryRun, Json
from penstock.cli.output import escape, note, print_json, print_table
from penstock.errors import ConfigError
from penstock.runtime.config.loader import has_secret_name, validate
from penstock.runtime.config.yaml_document import Document, Location, path_text

__all__ = ["File", "app", "effective_yaml"]

_DEFAULT = "default"
_HIDDEN = "***"
"""Shown in place of a secret."""

app = Commands("Check, show and import the configuration of a node.")

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

    The checks are those of `penstock up` before it opens the data directory: options, values, installed extras, users,
    policies, and certificates with their keys. Addresses in use and the data directory are not checked. Environment
    variables (PENSTOCK_MQTT, ...) override the file, as for `penstock up`.
    """
    from penstock.node.config.node import load_config
    from penstock.node.extras import check_extras
    from penstock.node.pipeline_commands import missing_files
    from penstock.node.security import NodeSecurity

    config = load_config(file, {}, os.environ)
    check_extras(config)
    for warning in missing_files(config.pipelines):
        note(f"warning: {warning.line()}")
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


@app.add(
    "penstock config import /etc/mosquitto/mosquitto.conf --output /etc/penstock",
    "penstock config import mosquitto.conf --dry-run",
    name="import",
)
def import_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="mosquitto.conf.")],
    output: Annotated[
        Path, typer.Option(help="Directory for penstock.yaml, policies.yaml and secrets of bridges.", metavar="DIR")
    ] = Path(),
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Convert the configuration of Mosquitto: listeners, TLS, limits, access rules, users and bridges.

    Every line that is not carried over, or has another effect, is printed with its number and the reason. Password
    hashes cannot be converted: the users are listed with the command that sets a new password. Existing files are not
    overwritten.
    """
    from penstock.node.config.mosquitto import NOT_NEEDED, POLICIES, convert
    from penstock.node.config.node import NodeConfig
    from penstock.runtime.config.loader import parse
    from penstock.security.policy_file import parse_policy

    found = convert(file)
    files = {"penstock.yaml": _dump(found.config), **found.secrets}
    if found.policy is not None:
        files[POLICIES] = _dump(found.policy)
        parse_policy(files[POLICIES], POLICIES)
    if as_json:
        for row in found.left_out:
            print_json(row._asdict())
    else:
        for row in found.left_out:
            sys.stdout.write(f"{escape(f'{row.file}:{row.line}: {row.text}: {row.reason}')}\n")
    try:
        parse(files["penstock.yaml"], NodeConfig, name="penstock.yaml", environment={})
    except ConfigError as error:
        raise ConfigError(
            f"the configuration that {file} would become is not valid",
            why=error.what if error.why is None else f"{error.what}; {error.why}",
            hint="correct these settings in mosquitto.conf, or write penstock.yaml by hand",
        ) from error
    if dry_run:
        for name, text in files.items():
            note(f"{output / name}:\n{'(a password)' if name in found.secrets else text}".rstrip())
        return
    _write_new(output, {name: (text, 0o600 if name in found.secrets else 0o644) for name, text in files.items()})
    needless = sum(row.reason.startswith(NOT_NEEDED) for row in found.left_out)
    note(
        f"wrote {', '.join(str(output / name) for name in files)}; lines that need attention: "
        f"{len(found.left_out) - needless}, that are not needed: {needless}"
    )
    for user in found.users:
        note(f"set the password of this user: penstock user create {output / 'passwords'} {shlex.quote(escape(user))}")
    note(f"then check the result: penstock config check {output / 'penstock.yaml'}")


def _write_new(directory: Path, files: Mapping[str, tuple[str, int]]) -> None:
    """Write files with these contents and modes into ``directory``. Raises ConfigError if one exists or cannot be
    written."""
    existing = [name for name in files if (directory / name).exists()]
    if existing:
        raise ConfigError(
            f"{directory / existing[0]} exists", option="--output", hint="select another directory, or move the file"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, (text, mode) in files.items():
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            with os.fdopen(descriptor, "w", encoding="utf-8") as target:
                target.write(text)
    except OSError as error:
        raise ConfigError(f"{error.filename or directory} cannot be written", why=error.strerror) from error


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
            yield Setting(location, _as_configured(value, location, document), _origin(document, location, value))

    return settings(config.model_dump(), ())


def _as_configured(value: object, location: Location, document: Document) -> object:
    """A value as in a configuration file; secrets are hidden, but not the names of files that contain them."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, set | frozenset | tuple | list):
        return [_as_configured(each, location, document) for each in value]
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
    return _dump(root) if root else ""


def _dump(root: Mapping[str, Any]) -> str:
    """Return ``root`` as YAML."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.width = 10_000
    yaml.representer.ignore_aliases = lambda *_: True  # each rule is complete for its reader
    text = io.StringIO()
    yaml.dump(root, text)
    return text.getvalue()
