"""Versions of a pipeline's file, and which of them is in operation: ``penstock pipeline apply``.

<state>/applied/<number>.json   a version: the pipeline file and the files that it names, never changed
<state>/applied/current.json    the version in operation, the one before, and the files that were replaced

A run registers the file with which it was started. ``apply`` stores another version and asks the run to use it. The run
finishes the batches of the version in operation, writes ``current.json``, and only then begins batches of the new
version. This is one atomic write: a crash at any point leaves a version that has begun all unfinished batches, so the
next run repeats each batch with the version that began it.

The new version is on trial until each of its queries has finished a batch or waits for records. If it fails permanently
before that, the run writes ``current.json`` again, with the version before. A run that starts during a trial continues
the trial.

The file that the command of a run names may still be the one before. Its digest is then among those that were replaced,
and a restart continues with the version in operation. A file that was never replaced is a new version, which the start
of a run puts into operation, as without ``apply``.

``current.json`` has the fencing token of the run that wrote it: a run that has lost its lease cannot change it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from penstock.errors import ConfigError, PenstockError, RefusedError, StorageError
from penstock.pipelines.spec.loader import parse
from penstock.pipelines.spec.pipeline import Pipeline, named_files
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.layout import create_json, is_newer, listed, read_json, update_json
from penstock.spark.files.object_storage import StoragePath

__all__ = [
    "CurrentVersion",
    "PipelineFile",
    "current_version",
    "end_trial",
    "file_of",
    "put_into_operation",
    "register",
    "replaced_by",
    "store_version",
    "stored_version",
]

_NUMBERED = re.compile(r"([0-9]+)\.json")
MOST_REPLACED = 100
"""Maximum number of replaced files that are remembered."""


class PipelineFile(NamedTuple):
    """The contents of a pipeline file ``name`` in ``directory``, and of the files that it names, by relative path."""

    name: str
    directory: str
    text: str
    files: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """Identify the contents; the name and place of the pipeline file are not a part of them."""
        parts = {path: hashlib.sha256(data).hexdigest() for path, data in self.files.items()}
        return hashlib.sha256(json.dumps([self.text, parts], sort_keys=True).encode()).hexdigest()

    def load(self, environment: Mapping[str, str] | None = None) -> Pipeline:
        """Return the pipeline; secrets are read from the directory of the file.

        Raises:
            ConfigError: it is not valid with this ``environment``; default: that of the process.
        """
        above = max((PurePath(path).parts.count("..") for path in self.files), default=0)
        with tempfile.TemporaryDirectory(prefix="penstock-version-") as directory:
            home = Path(directory, *["home"] * above)
            home.mkdir(parents=True, exist_ok=True)
            for path, data in self.files.items():
                target = home / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
            return parse(
                self.text, name=self.name, environment=environment, directory=home, secrets=Path(self.directory)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentVersion:
    """The version in operation, ``over`` the one before it (None: it is the first), ``earlier`` the one before that.

    ``trial``: it has not proved that it works, see the module. ``replaced``: digests of files that were replaced.
    ``token`` and ``run``: the run that wrote this; None: ``apply`` without a run.
    """

    version: int
    over: int | None = None
    earlier: int | None = None
    trial: bool = False
    replaced: tuple[str, ...] = ()
    token: str | None = None
    run: str | None = None


def file_of(path: Path, pipeline: Pipeline) -> PipelineFile:
    """Return the file at ``path``, from which ``pipeline`` was loaded.

    A file with an absolute path is read where it is, like tables.

    Raises:
        ConfigError: it, or a file that it names, cannot be read.
    """
    files: dict[str, bytes] = {}
    try:
        text = path.read_bytes().decode("utf-8-sig")
        for named in sorted({each.path for each in named_files(pipeline)}):
            if not Path(named).is_absolute():
                files[PurePath(os.path.normpath(named)).as_posix()] = (path.parent / named).read_bytes()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", where=str(path), hint="check the file") from error
    return PipelineFile(path.name, str(path.parent.absolute()), text, files)


def current_version(state: StoragePath) -> CurrentVersion | None:
    """Return the version in operation; None if no run has registered its file.

    Raises:
        StorageError: it cannot be read.
    """
    path = _pointer(state)
    try:
        found = read_json(path)
        return CurrentVersion(**{**found, "replaced": tuple(found["replaced"])})
    except FileNotFoundError:
        return None
    except (KeyError, TypeError) as error:
        raise StorageError(f"{path} does not name a version of a pipeline: {error}", path=str(path)) from error


def stored_version(state: StoragePath, number: int) -> PipelineFile:
    """Return the file of the version ``number``.

    Raises:
        StorageError: there is none, or it cannot be read.
    """
    path = layout.applied(state) / f"{number}.json"
    try:
        found = read_json(path)
        files = {name: base64.b64decode(data) for name, data in found["files"].items()}
        return PipelineFile(found["name"], found["directory"], found["text"], files)
    except FileNotFoundError:
        raise StorageError(f"version {number} of the pipeline does not exist", path=str(path)) from None
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise StorageError(f"{path} is not a version of a pipeline: {error}", path=str(path)) from error


def store_version(state: StoragePath, file: PipelineFile) -> int:
    """Store ``file`` durably as a new version, which is not in operation yet; return its number.

    Raises:
        StorageError: it cannot be written.
    """
    directory = layout.applied(state)
    stored: dict[str, Any] = {
        "name": file.name,
        "directory": file.directory,
        "text": file.text,
        "files": {path: base64.b64encode(data).decode() for path, data in sorted(file.files.items())},
        "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        # In a bucket two concurrent commands would otherwise both have created the same object.
        "by": f"{platform.node()}/{os.getpid()}",
    }
    while True:
        number = max((int(match[1]) for match in listed(directory, _NUMBERED)), default=0) + 1
        if create_json(directory / f"{number}.json", stored):
            return number


def replaced_by(state: StoragePath, file: PipelineFile) -> int | None:
    """Return the version in operation if it has replaced ``file``; None: ``file`` is in operation, or new.

    Raises:
        StorageError: the versions cannot be read.
    """
    current = current_version(state)
    return current.version if current is not None and file.digest in current.replaced else None


def register(state: StoragePath, file: PipelineFile, token: str, run: str) -> CurrentVersion:
    """Return the version ``file`` with which a run starts, and put it into operation if it is new.

    ``token``: fencing token of the run ``run``.

    Raises:
        PenstockError: another version was put into operation since the run has read its file, or by a later run.
    """
    current = current_version(state)
    if current is not None and file.digest in current.replaced:
        raise PenstockError(
            f"version {current.version} of the pipeline was applied while this run started",
            hint="start it again: it then runs that version",
        )
    if current is not None and stored_version(state, current.version).digest == file.digest:
        return _write(state, replace(current, token=token, run=run))
    over = None if current is None else current.version
    return _write(state, CurrentVersion(version=store_version(state, file), over=over, token=token, run=run))


def put_into_operation(
    state: StoragePath, number: int, *, token: str, run: str | None, trial: bool = False
) -> CurrentVersion:
    """Store durably and in one step that the version ``number`` is in operation, and has replaced the one before.

    ``token``: fencing token of the run ``run``, or of ``apply`` without one.

    Raises:
        RefusedError: a later run has changed it.
        StorageError: it cannot be written.
    """
    new = CurrentVersion(version=number, trial=trial, token=token, run=run)
    if (current := current_version(state)) is not None:
        replaced = _replaced(state, current, number)
        new = replace(new, over=current.version, earlier=current.over, replaced=replaced)
    return _write(state, new)


def end_trial(state: StoragePath, *, token: str, run: str, works: bool) -> CurrentVersion:
    """Store durably that the version on trial ``works``; otherwise that the one before is in operation again.

    Raises:
        RefusedError, StorageError: see :func:`put_into_operation`.
    """
    current = current_version(state)
    assert current is not None
    new = replace(current, trial=False, token=token, run=run)
    if not works:
        assert current.over is not None
        replaced = _replaced(state, current, current.over)
        new = replace(new, version=current.over, over=current.earlier, earlier=None, replaced=replaced)
    return _write(state, new)


def _replaced(state: StoragePath, current: CurrentVersion, number: int) -> tuple[str, ...]:
    """Return the digests of replaced files once the version ``number`` has replaced ``current``."""
    digest, before = stored_version(state, number).digest, stored_version(state, current.version).digest
    return tuple(dict.fromkeys(each for each in (*current.replaced, before) if each != digest))[-MOST_REPLACED:]


def _write(state: StoragePath, new: CurrentVersion) -> CurrentVersion:
    def change(before: dict[str, Any] | None) -> dict[str, Any]:
        last = None if before is None else before["token"]
        if last is not None and new.token is not None and is_newer(last, new.token):
            raise RefusedError(
                f"version {new.version} was not put into operation: a later run has the lease",
                hint="check which run holds the lease (penstock pipeline status)",
            )
        return asdict(new)

    update_json(_pointer(state), change)
    return new


def _pointer(state: StoragePath) -> StoragePath:
    return layout.applied(state) / "current.json"
