"""Contexts: named addresses and credentials of nodes, in a file of the user.

The file is ``penstock/contexts.json`` in ``XDG_CONFIG_HOME`` (default ``~/.config``), readable by its owner only. It
has no secrets: credentials are names of users and of files. A value of a context is used for an option that neither the
command line nor the environment sets. The credentials of a context are sent to its own addresses only: if an address or
a credential of a command is set elsewhere, none of the context's credentials is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.errors import ConfigError, StorageError

__all__ = [
    "ADDRESSES",
    "FIELDS",
    "NO_CONTEXT",
    "Contexts",
    "complete_context",
    "contexts_path",
    "defaults",
    "read_contexts",
    "write_contexts",
]

ADDRESSES: Final[Mapping[str, str]] = {
    "broker": "PENSTOCK_BROKER",
    "http": "PENSTOCK_HTTP",
    "tube_master": "PENSTOCK_TUBE_MASTER",
    "tube_broker_http": "PENSTOCK_TUBE_BROKER_HTTP",
}
FIELDS: Final[Mapping[str, str]] = {
    **ADDRESSES,
    "username": "PENSTOCK_USERNAME",
    "password_file": "PENSTOCK_PASSWORD_FILE",
    "admin_token_file": "PENSTOCK_ADMIN_TOKEN_FILE",
    "ca_file": "PENSTOCK_CA_FILE",
    "cert_file": "PENSTOCK_CERT_FILE",
    "key_file": "PENSTOCK_KEY_FILE",
    "tls": "PENSTOCK_TUBE_TLS",
}
"""Fields of a context with the environment variables of the options that they replace."""
_ALSO_CREDENTIALS: Final = ("PENSTOCK_ADMIN_TOKEN",)
NO_CONTEXT: Final = "none"
"""Name that selects no context."""

Context = Mapping[str, str | bool]


@dataclass(frozen=True, slots=True)
class Contexts:
    """Contexts by name; ``current``: the one that is used without ``--context``."""

    current: str | None = None
    contexts: Mapping[str, Context] = field(default_factory=dict)

    def selected(self, name: str | None) -> Context:
        """Return the context ``name``, by default the current one; empty for none.

        Raises:
            ConfigError: it does not exist.
        """
        chosen = name or self.current
        if chosen is None or chosen == NO_CONTEXT:
            return {}
        if chosen not in self.contexts:
            known = ", ".join(self.contexts) or "there are none"
            raise ConfigError(
                f"there is no context {chosen!r}",
                option="--context",
                why=f"contexts in {contexts_path()}: {known}",
                hint="create it: penstock context add NAME --broker URL; or use --context none",
            )
        return self.contexts[chosen]


def contexts_path() -> Path:
    """Return the path of the file."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    # Path.expanduser() raises an error for a user without a home directory.
    return Path(base or os.path.expanduser("~/.config")) / "penstock" / "contexts.json"  # noqa: PTH111


def read_contexts() -> Contexts:
    """Read the file; without it there are no contexts.

    Raises:
        ConfigError: it cannot be read, is not valid, or other users may change it.
    """
    path = contexts_path()
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
    except FileNotFoundError:
        return Contexts()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read", why=str(error), hint="correct or delete the file") from error
    if mode & 0o022:
        raise ConfigError(
            f"other users may change {path}",
            why=f"its mode is {mode & 0o777:03o}: they could send commands and passwords to another address",
            hint=f"check its contents, then: chmod 600 {path}",
        )
    import json

    try:
        found: Any = json.loads(text)
        current, contexts = found["current"], found["contexts"]
        valid = isinstance(current, str | None) and all(
            name in FIELDS and isinstance(value, bool if name == "tls" else str)
            for context in contexts.values()
            for name, value in context.items()
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        valid = False
    if not valid:
        raise ConfigError(
            f"{path} is not a file of contexts",
            why="expected an object with current and contexts, as `penstock context add` writes it",
            hint="correct it, or delete it and create the contexts again",
        )
    return Contexts(current, contexts)


def complete_context(incomplete: str) -> list[str]:
    """Shell completion: the contexts whose names begin with ``incomplete``."""
    try:
        names = read_contexts().contexts
    except ConfigError:  # reported by the command
        return []
    return sorted(name for name in names if name.startswith(incomplete))


def write_contexts(contexts: Contexts) -> None:
    """Replace the file, which only its owner may read (mode 0600).

    Raises:
        StorageError: it cannot be written.
    """
    import json

    from penstock.runtime.io.files import replace_file

    path = contexts_path()
    text = json.dumps({"current": contexts.current, "contexts": contexts.contexts}, indent=2) + "\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, text.encode(), mode=0o600)
    except OSError as error:
        hint = "set XDG_CONFIG_HOME or HOME to a directory that this user may write"
        raise StorageError(f"{path} cannot be written", path=str(path), why=error.strerror, hint=hint) from error


def defaults(context: Context, variables: Mapping[str, str], given: Mapping[str, bool]) -> dict[str, str | bool]:
    """Return values for the options of a command, by the names of its parameters.

    ``variables``: the environment variable of each parameter; ``given``: parameters that the command line or the
    environment sets.
    """
    fields = {variable: name for name, variable in FIELDS.items()}
    addresses = [name for name, variable in variables.items() if fields.get(variable) in ADDRESSES]
    if not any(fields[variables[name]] in context for name in addresses):
        return {}
    set_elsewhere = any(
        given[name]
        for name, variable in variables.items()
        if fields.get(variable, "tls") != "tls" or variable in _ALSO_CREDENTIALS
    )
    return {
        name: context[field_name]
        for name, variable in variables.items()
        if (field_name := fields.get(variable, "")) in context
        and not given[name]
        and (field_name in ADDRESSES or not set_elsewhere)
    }
