"""A pipeline as an archive for ``spark-submit --archives``: its files, Python's packages and jars.

Spark unpacks the archive as ``environment`` in the working directory of the driver in a cluster and of each executor:

* ``bin/python`` runs Python of the machine with the packages of the archive. A virtual environment refers to its
  interpreter by absolute path; a list of packages does not, so Python may be in another directory on each machine.
* ``packages``: the installed distributions that penstock requires, file by file as they are in this environment.
  Spark's own (pyspark, py4j) are left out: each machine has those of its Spark.
* ``pipeline``: the pipeline file and the files that it names; ``main.py``: the program for spark-submit; ``jars``.
* ``package.json``: the versions.

The same environment and files make the same bytes: entries are sorted, without times and owners.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from io import BytesIO
from pathlib import Path, PurePath
from typing import NamedTuple

import penstock
from penstock.errors import ConfigError, StorageError
from penstock.pipelines.export.script import raw_document
from penstock.pipelines.spec.pipeline import Pipeline, named_files
from penstock.runtime.config.yaml_document import Document, Value

__all__ = [
    "PLATFORM",
    "PYTHON",
    "ArchiveFile",
    "distributions",
    "package_files",
    "pipeline_files",
    "program_files",
    "write_archive",
]

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
"""Name of the interpreter: compiled packages need this version."""
PLATFORM = sysconfig.get_platform()
OF_SPARK = frozenset({"pyspark", "py4j"})
_UNUSED = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"})
"""Records of an installation, with paths of this machine."""
_REQUIREMENT = re.compile(r"\s*(?P<name>[A-Za-z0-9._-]+)\s*(?:\[(?P<extras>[^\]]*)\])?")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
_URL_PASSWORD = re.compile(r"//[^/@\s:]*:[^/@\s]+@")
_NAMED = frozenset({"options", "headers", "properties"})
"""Parts of the file with names that the user gives."""
_SECRET_NAME = re.compile(
    r"(?i)(password|passwd|secret|token|credentials?|authorization|(access|account|api|private|secret)[._-]?key)$"
)
_VARIABLE = re.compile(r"\$\{(?:[A-Za-z_][A-Za-z0-9_]*(?::-(?P<default>[^}]*))?|file:[^}]+)\}")
_COLUMN = re.compile(r"\{[^{}]*\}")
_SECRET_FILE = re.compile(r"\$\{file:([^}]+)\}")
_LAUNCHER = f"""\
#!/bin/sh
# Runs Python of this machine with the packages of the archive.
python=${{PENSTOCK_PYTHON:-{PYTHON}}}
if ! command -v "$python" >/dev/null; then
  echo "penstock: $python is not on PATH of $(hostname)" >&2
  echo "  why: the packages of the archive are compiled for {PYTHON}, which each machine must have" >&2
  echo "  hint: install it, or add --env PENSTOCK_PYTHON=PATH when you package the pipeline" >&2
  exit 127
fi
home=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd) || exit 1
PYTHONPATH="$home/packages${{PYTHONPATH:+:$PYTHONPATH}}"
export PYTHONPATH
exec "$python" "$@"
"""


class ArchiveFile(NamedTuple):
    """A file of the archive: its name there, and its bytes or their path."""

    name: str
    content: bytes | Path
    is_executable: bool = False


def program_files(pipeline: str, main: Path, packages: Mapping[str, Distribution]) -> list[ArchiveFile]:
    """Return the launcher, the program ``main`` for spark-submit, and the versions of ``packages``."""
    versions = {
        "pipeline": pipeline,
        "penstock": penstock.__version__,
        "python": PYTHON.removeprefix("python"),
        "platform": PLATFORM,
        "packages": {name: found.version for name, found in sorted(packages.items())},
    }
    return [
        ArchiveFile("bin/python", _LAUNCHER.encode(), is_executable=True),
        ArchiveFile("main.py", main),
        ArchiveFile("package.json", (json.dumps(versions, indent=2) + "\n").encode()),
    ]


def pipeline_files(file: Path, pipeline: Pipeline) -> list[ArchiveFile]:
    """Return the pipeline ``file`` and the schema, descriptor and Python files that it names.

    Raises:
        ConfigError: a file is not below the directory of the pipeline file, or the file contains a password.
    """
    document = raw_document(file)
    for place, value in _scalars(document):
        _refuse_secret(document, place, value)
    names = {file.name: file}
    for part, option, path in named_files(pipeline):
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ConfigError(
                f"{part}: {path!r} would not be part of the package",
                option=option,
                why="only files below the directory of the pipeline file are packaged",
                hint=f"put the file next to {str(file)!r}, and write its name as a relative path",
            )
        names[PurePath(path).as_posix()] = file.parent / path
    return [ArchiveFile(f"pipeline/{name}", path) for name, path in names.items()]


def _scalars(document: Document) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the scalar values of the document, as texts, with their places."""
    todo: list[tuple[tuple[str | int, ...], Value]] = [((), document.data)]
    while todo:
        place, value = todo.pop()
        if isinstance(value, dict):
            todo += [((*place, key), each) for key, each in value.items()]
        elif isinstance(value, list):
            todo += [((*place, number), each) for number, each in enumerate(value)]
        elif value is not None and not isinstance(value, bool):
            yield place, str(value)


def _refuse_secret(document: Document, place: tuple[str | int, ...], value: str) -> None:
    """Refuse a password that is written in the file, and one that would be read from a file of the package.

    Raises:
        ConfigError: the value is one. The error does not contain it.
    """
    where = document.where(place)
    for path in _SECRET_FILE.findall(value):
        if not Path(path).is_absolute():
            raise ConfigError(
                f"{where}: ${{file:{path}}} would not exist where the pipeline runs",
                where=where,
                why="a package contains no secrets",
                hint="write an absolute path, at which each machine has the file",
            )
    # As it is written: variables have their defaults, those without one are empty.
    written = _VARIABLE.sub(lambda variable: variable["default"] or "", value)
    is_secret = _NAMED.intersection(map(str, place[:-1])) and _SECRET_NAME.search(str(place[-1]))
    if _URL_PASSWORD.search(written) or (is_secret and _COLUMN.sub("", written)):
        raise ConfigError(
            f"{where}: the file contains a password",
            where=where,
            why="anyone who can read the package could read it",
            hint="write ${file:/PATH} with the path of a file on each machine, or ${NAME} and set the variable there",
        )


def distributions(extras: Collection[str]) -> dict[str, Distribution]:
    """Return the installed distributions that penstock with ``extras`` requires, by normalized name.

    Raises:
        ConfigError: one is not installed.
    """
    found: dict[str, Distribution] = {}
    done: set[tuple[str, str]] = set()
    todo: list[tuple[str, str, str]] = [("penstock", extra, "") for extra in ("", *extras)]
    while todo:
        name, extra, marker = todo.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in OF_SPARK or (key, extra) in done:
            continue
        done.add((key, extra))
        try:
            found.setdefault(key, distribution(name))
        except PackageNotFoundError:
            if marker:
                continue  # for another platform or version of Python
            raise ConfigError(
                f"the package {name!r} is not installed",
                why="a package of a pipeline contains all that penstock requires",
                hint=f'pip install ".[{",".join(sorted(extras))}]" in a clone of penstock',
            ) from None
        for text in found[key].requires or ():
            requirement, _, condition = text.partition(";")
            wanted = _EXTRA.search(condition)
            if (wanted[1] if wanted else "") != extra:
                continue
            match = _REQUIREMENT.match(requirement)
            assert match is not None, text
            condition = "" if wanted and condition.strip() == wanted[0] else condition
            inner = [part.strip() for part in (match["extras"] or "").split(",") if part.strip()]
            todo += [(match["name"], part, condition) for part in ("", *inner)]
    return found


def package_files(packages: Iterable[Distribution]) -> Iterator[ArchiveFile]:
    """Yield the files of ``packages``, without programs and bytecode."""
    for package in packages:
        names = [str(path) for path in package.files or ()]
        if package.name == "penstock" and "penstock/__init__.py" not in names:
            # Installed from a clone: the files are those of the clone.
            home = Path(penstock.__file__).parent
            paths = [*home.rglob("*"), *home.parent.glob("pyspark_*.py")]
            files = {path.relative_to(home.parent).as_posix(): path for path in paths if path.is_file()}
            names = [name for name in names if ".dist-info/" in name]
        else:
            files = {}
        files |= {name: Path(str(package.locate_file(name))) for name in names}
        for name, path in files.items():
            parts = PurePath(name).parts
            unused = {"..", "__pycache__"} & set(parts) or parts[-1] in _UNUSED or path.suffix in (".pyc", ".pth")
            if not unused and path.is_file():
                yield ArchiveFile(f"packages/{name}", path)


def write_archive(target: Path, files: Iterable[ArchiveFile]) -> int:
    """Write ``files`` to ``target``, a tar.gz, which never exists incomplete; return its size in bytes.

    Raises:
        ConfigError: the target exists.
        StorageError: a file cannot be read or written.
    """
    if target.exists():
        raise ConfigError(
            f"{target} exists already", option="archive", hint="remove it, or name another with --archive"
        )
    entries = {file.name: file for file in files}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
        try:
            with (
                os.fdopen(handle, "wb") as out,
                # Without the time and the name of the file, which gzip would store.
                gzip.GzipFile(filename="", mode="wb", fileobj=out, mtime=0, compresslevel=_LEVEL) as packed,
                tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive,
            ):
                for name in sorted(entries):
                    _add(archive, entries[name])
            # The rights of a temporary file are those of its owner only.
            Path(draft).chmod(0o644)
            return Path(draft).rename(target).stat().st_size
        finally:
            Path(draft).unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"{error.filename or target} cannot be packaged: {error.strerror}", path=str(target)
        ) from error


_LEVEL = 3
"""Of the compression: 6 takes three times the processor time for a file that is 7 % smaller."""


def _add(archive: tarfile.TarFile, file: ArchiveFile) -> None:
    content = file.content if isinstance(file.content, bytes) else file.content.read_bytes()
    entry = tarfile.TarInfo(file.name)  # of owner 0, at time 0
    entry.size = len(content)
    entry.mode = 0o755 if file.is_executable else 0o644
    archive.addfile(entry, BytesIO(content))
