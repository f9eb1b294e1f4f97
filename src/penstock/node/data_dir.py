"""The data directory: used by one process at a time, with a format version.

The directory is locked while the process runs (`runtime.io.directory_lock`). ``format.json`` has the version of the
layout, and the LMDB environments that were created: if one is missing later, the start fails instead of creating an
empty one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import StorageError
from penstock.runtime.io.directory_lock import DirectoryLock, is_locked, unusable
from penstock.runtime.io.files import replace_file
from penstock.runtime.io.permissions import permission_hint

__all__ = [
    "ADDRESSES",
    "FORMAT",
    "RESTORING",
    "DataDirectory",
    "announced_broker",
    "check_format",
    "check_restored",
    "is_in_use",
    "running_broker",
    "running_node",
    "why_unused",
    "withdraw",
]

_log = logging.getLogger("penstock.node")

_NAME = "data directory"

ADDRESSES = "addresses.json"
"""File with the addresses of the running node, as in the line of ``penstock up --json``."""
_BROKER = "broker_http"
"""The only address of a broker in its own process. A node has no address of this name, so neither is taken for the
other."""

RESTORING = "restoring"
"""File in a data directory that does not have all of a backup yet."""

FORMAT = 1
"""Layout of the directory: ``statestore/`` (LMDB) and ``tube/`` (segments, index, offsets)."""


class DataDirectory:
    """The directory at ``path``, locked until ``close``. Context manager.

    Record created environments with ``keep``. ``replicated``: names of those that the cluster of the node has as well.
    """

    def __init__(self, path: Path, replicated: Collection[str] = ()) -> None:
        """Create it if it is missing, lock it, and check its format and completeness.

        Raises:
            StorageError: it cannot be created or written, has an unknown format, or an environment is missing.
            UnavailableError: another process uses it; the error has its id.
        """
        self.path = path.absolute()
        self._format = self.path / "format.json"
        self._lock = DirectoryLock(self.path, _NAME)
        withdraw(self.path)
        try:
            self._complete_replacement()
            kept = check_format(self.path, replicated)
            if kept is None:
                self._write_format([])
            self._kept = kept or []
        except BaseException:
            self._lock.close()
            raise

    @property
    def statestore(self) -> Path:
        """Directory of the state store."""
        return self.path / "statestore"

    @property
    def mqtt(self) -> Path:
        """Directory of MQTT sessions and retained messages."""
        return self.path / "mqtt"

    @property
    def tube(self) -> Path:
        """Directory of the TubeMQ log and its offsets."""
        return self.path / "tube"

    @property
    def admin_token(self) -> Path:
        """File of the administration token."""
        return self.tube / "admin-token"

    @property
    def audit(self) -> Path:
        """File of the audit trail."""
        return self.path / "audit"

    @property
    def tube_master(self) -> Path:
        """Directory of the TubeMQ master's topics and settings."""
        return self.tube / "master"

    def keep(self, environments: Iterable[Path]) -> None:
        """Record that these directories have environments: later starts fail if one is missing.

        Raises:
            StorageError: the record cannot be written.
        """
        kept = sorted({*self._kept, *(str(path.relative_to(self.path)) for path in environments)})
        if kept != self._kept:
            self._write_format(kept)
            self._kept = kept

    def announce(self, addresses: Mapping[str, object]) -> None:
        """Write the addresses of the running node, for commands on this machine; they are removed by :meth:`close`."""
        _announce(self.path, addresses)

    def close(self) -> None:
        """Release the lock. Can be called twice."""
        if self._lock.held:
            withdraw(self.path)
            self._lock.close()

    def __enter__(self) -> DataDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _complete_replacement(self) -> None:
        from penstock.node.replacement import complete_replacement  # not needed by commands that only look

        try:
            complete_replacement(self.path)
        except OSError as error:
            raise unusable(self.path, error, _NAME) from error

    def _write_format(self, kept: list[str]) -> None:
        content = {"format": FORMAT} | ({"environments": kept} if kept else {})
        try:
            replace_file(self._format, json.dumps(content).encode(), mode=0o666)
        except OSError as error:
            raise unusable(self.path, error, _NAME) from error


def check_restored(path: Path) -> None:
    """Raise StorageError if a restore of the data directory ``path`` was not completed."""
    if (path / RESTORING).exists():
        raise StorageError(
            f"{path} has only a part of a backup",
            path=str(path / RESTORING),
            why="`penstock restore` failed or was interrupted",
            hint="remove the directory, and restore the backup again",
        )


def check_format(path: Path, replicated: Collection[str] = ()) -> list[str] | None:
    """Check the format of the data directory ``path`` and that it is complete; nothing is changed.

    Returns the recorded environments; None for a new directory. ``replicated``: names of environments that the cluster
    of the node has as well.

    Raises:
        StorageError: it cannot be read, has an unknown format, unknown files or only a part of a backup, or an
            environment is missing.
    """
    file = path / "format.json"
    try:
        check_restored(path)
        text = file.read_bytes()
    except FileNotFoundError:
        _refuse_strangers(path)
        return None
    except OSError as error:
        raise unusable(path, error, _NAME) from error
    try:
        content: dict[str, Any] = json.loads(text)
        found = content["format"]
        kept = [str(name) for name in content.get("environments", [])]  # earlier versions recorded none
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(
            f"{file} has no format version",
            path=str(file),
            why="it is damaged, or the directory belongs to another program",
            hint=f'if penstock wrote the directory, put {{"format": {FORMAT}}} there',
        ) from error
    if found != FORMAT:
        newer = isinstance(found, int) and found > FORMAT
        raise StorageError(
            f"data directory {path} has format {found!r}, this version knows {FORMAT}",
            path=str(file),
            why=f"{'a newer' if newer else 'another'} version of penstock wrote it",
            hint="use that version; or restore a backup that this version made into a new directory: "
            "penstock restore BACKUP DIR",
        )
    for name in kept:
        environment = path / name / "data.mdb"
        if not environment.is_file():
            raise StorageError(
                f"data directory {path} has lost {name}/data.mdb",
                path=str(environment),
                why="an earlier start created it; without it the node would start empty",
                hint=f"remove {name!r} from the list in {file}: the node then loads its content from the cluster"
                if name in replicated
                else f"restore the whole directory from one backup; or, to start without its content, remove "
                f"{name!r} from the list in {file}",
            )
    return kept


def _refuse_strangers(path: Path) -> None:
    # Refuse a directory with unknown files.
    strangers = sorted(p.name for p in path.iterdir() if p.name not in {"lock", "format.json.new"})
    if strangers:
        raise StorageError(
            f"{path} is not a data directory of penstock: it contains {strangers[0]!r} and no format.json",
            path=str(path),
            hint="choose an empty or a new directory: --data-dir PATH",
        )


def why_unused(path: Path) -> str:
    """Return the reason that no node is found in ``path``: it does not exist, is a file, is denied, or not in use."""
    if path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            return f"this user may not read the directory: {permission_hint(path)}"
        return "the directory is not in use by a node"
    return "it is a file" if path.exists() else "it does not exist"


def running_node(path: Path) -> dict[str, Any] | None:
    """Return the addresses of the node that uses the data directory ``path``; None if no node runs, or it is
    starting."""
    found = _running(path)
    return None if found is None or _BROKER in found else found


def running_broker(path: Path) -> str | None:
    """Return the address of the HTTP administration of the broker in its own process that uses ``path``; otherwise
    None."""
    found = _running(path)
    return None if found is None or _BROKER not in found else str(found[_BROKER])


def is_in_use(path: Path) -> bool:
    """True if a node, or a broker in its own process, runs with the data directory ``path`` and has started."""
    return _running(path) is not None


@contextlib.contextmanager
def announced_broker(path: Path, http: str) -> Iterator[None]:
    """Write the address of a broker's HTTP administration for commands on this machine, and remove it at the end."""
    _announce(path, {_BROKER: http})
    try:
        yield
    finally:
        withdraw(path)


def _running(path: Path) -> dict[str, Any] | None:
    try:
        if not is_locked(path):
            return None
        found: Any = json.loads((path / ADDRESSES).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _announce(path: Path, addresses: Mapping[str, object]) -> None:
    """Write the addresses. A failure is only logged: the process works without them."""
    try:
        new = path / f"{ADDRESSES}.new"
        new.write_text(json.dumps(addresses), encoding="utf-8")
        new.replace(path / ADDRESSES)
    except OSError as error:
        _log.warning("commands on this machine cannot find the node", extra={"fields": {"error": str(error)}})


def withdraw(path: Path) -> None:
    """Remove the addresses; only with the lock of the directory.

    Those of a killed process may belong to another program now, to which commands would send credentials until the next
    process has written its own.
    """
    with contextlib.suppress(OSError):
        (path / ADDRESSES).unlink(missing_ok=True)
