"""The two forms of the core: extension modules that mypyc builds, and the Python that they are built from.

The core is the request path of the broker and of the state store, and the path of a TubeMQ send up to the log. A wheel
for a platform holds its extension modules next to the sources. In a checkout ``make setup`` builds them into the user's
cache folder, with a manifest of the sources that they were built from; they are used only while these sources are
unchanged, so an edited file never runs as stale compiled code. Without a build the same modules run interpreted: with
the same results, in about five times the time.

The environment variable ``PENSTOCK_CORE`` chooses: ``compiled`` makes a missing build an error, ``interpreted`` leaves
a build unused. This module is also read by the tools that build, and imports the standard library only.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

__all__ = ["MANIFEST", "build_folder", "cached_build", "core_modules", "digest", "form", "install", "why_interpreted"]

_PATTERNS: Final = (
    "mqtt/codec/*.py",
    "mqtt/engine/*.py",
    "mqtt/engine/*/*.py",
    "mqtt/persistence.py",
    "mqtt/server.py",
    "mqtt/service.py",
    "mqtt/transport/connection_limits.py",
    "mqtt/transport/link.py",
    "mqtt/transport/listener.py",
    "mqtt/transport/listener_state.py",
    "mqtt/transport/tls_transport.py",
    "mqtt/transport/websocket.py",
    "runtime/durations.py",
    "runtime/io/clock.py",
    "runtime/io/commit_log.py",
    "runtime/io/commit_queue.py",
    "runtime/io/files.py",
    "runtime/io/wal.py",
    "runtime/io/wal_frames.py",
    "runtime/io/wal_segments.py",
    "runtime/turns.py",
    "statestore/binding.py",
    "statestore/codec/*.py",
    "statestore/engine/*.py",
    "statestore/hlc.py",
    "statestore/service/interfaces.py",
    "statestore/service/deduplication.py",
    "statestore/service/service.py",
    "statestore/service/delivery.py",
    "statestore/service/rows.py",
    "statestore/service/storage.py",
    "statestore/service/writer.py",
    "tube/codec/framing.py",
    "tube/codec/range_columns.py",
    "tube/codec/varint.py",
    "tube/engine/interfaces.py",
    "tube/engine/sessions.py",
    "tube/engine/broker/produce_handler.py",
    "tube/engine/broker/request_checks.py",
    "tube/engine/broker/send_decoder.py",
    "tube/engine/broker/topics.py",
    "tube/storage/reads.py",
    "tube/storage/record.py",
    "tube/storage/segment.py",
    "tube/storage/store.py",
)
"""The modules of the core, inside the package."""

_INTERPRETED: Final = (
    "mqtt/engine/model/limits.py",  # the reference pages and the help take the texts of options from its source
    "mqtt/engine/client/events.py",  # named tuples are not native
)

MANIFEST: Final = "manifest.json"
"""File of a build folder: the sources that the build was made from."""

_PROBE: Final = "mqtt/codec/decoder"
"""A module of the core: if its extension module exists next to the sources, they are compiled."""


_why_interpreted = "no form was chosen yet"


def core_modules(package: Path) -> list[str]:
    """The files of the core below ``package``, by their relative paths."""
    found = {name for pattern in _PATTERNS for name in _matching(str(package), pattern)}
    return sorted(name for name in found.difference(_INTERPRETED) if not name.endswith("__init__.py"))


def _matching(package: str, pattern: str) -> list[str]:
    """Relative paths of the files that match one of the patterns: in a tenth of the time of :meth:`Path.glob`, because
    each process calls it."""
    folder, _, name = pattern.rpartition("/")
    if name != "*.py":
        return [pattern] if os.path.exists(f"{package}/{pattern}") else []  # noqa: PTH110 - see above
    parent = folder.removesuffix("/*")
    with os.scandir(f"{package}/{parent}") as entries:
        if parent == folder:
            return [f"{folder}/{each.name}" for each in entries if each.name.endswith(".py")]
        folders = [f"{parent}/{each.name}" for each in entries if each.is_dir()]
    return [file for each in folders for file in _matching(package, f"{each}/*.py")]


def build_folder(package: Path) -> Path:
    """Folder of the build of the checkout with ``package``, for this version of Python."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"{package.parent.parent.name}-{crc32(str(package).encode()):08x}"
    return cache / "penstock" / "core" / f"{name}-{sys.implementation.cache_tag}-{os.uname().machine}"


def digest(path: Path) -> str:
    """Digest of a source file, by which the manifest recognises it."""
    from hashlib import sha256

    return sha256(path.read_bytes()).hexdigest()


def form() -> str:
    """``compiled`` or ``interpreted``: the form of the core in this process."""
    return "interpreted" if _why_interpreted else "compiled"


def why_interpreted() -> str:
    """The reason why the core is not compiled, and the action to take; empty if it is compiled."""
    return _why_interpreted


def install() -> None:
    """Choose the form of the core. Call once, before its first module is imported.

    Raises:
        ImportError: ``PENSTOCK_CORE`` has an unknown value, or is ``compiled`` without a build.
    """
    global _why_interpreted  # noqa: PLW0603 - one choice for the process
    wanted = os.environ.get("PENSTOCK_CORE", "")
    if wanted not in ("", "compiled", "interpreted"):
        raise ImportError(f"penstock: PENSTOCK_CORE is {wanted!r}: it must be 'compiled' or 'interpreted', or not set")
    package = Path(__file__).resolve().parent
    files: dict[str, Path] = {}
    if _has_extension(package / _PROBE):
        _why_interpreted = ""
        if wanted == "interpreted":
            files = {_module_name(name): package / name for name in core_modules(package)}
            _why_interpreted = "PENSTOCK_CORE is 'interpreted'"
    elif wanted == "interpreted":
        _why_interpreted = "PENSTOCK_CORE is 'interpreted'"
    else:
        files, _why_interpreted = cached_build(package)
    if wanted == "compiled" and _why_interpreted:
        raise ImportError(f"penstock: PENSTOCK_CORE is 'compiled', but the core is not: {_why_interpreted}")
    if files:
        sys.meta_path.insert(0, _Finder(files))


class _Finder:
    """Import finder for the modules of the core in the chosen form."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The file of ``fullname``; None for a module that is not of the core [MetaPathFinder]."""
        file = self._files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)


def _module_name(file: str) -> str:
    return "penstock." + file.removesuffix(".py").replace("/", ".")


def _has_extension(stem: Path) -> bool:
    return any(stem.with_name(stem.name + suffix).exists() for suffix in EXTENSION_SUFFIXES)


def cached_build(package: Path) -> tuple[dict[str, Path], str]:
    """Extension modules of this checkout by module name, and the reason if there are none."""
    if not (package.parent.name == "src" and (package.parent.parent / "tools" / "core.py").exists()):
        return {}, "this installation has no extension modules: install the wheel of your platform"
    import json

    folder = build_folder(package)
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}, "it was not built: run `make setup` with a C compiler and Python's headers installed"
    changed = _changed(package, manifest["sources"])
    if changed:
        return {}, f"{changed} was changed since the build: run `python tools/core.py`"
    if sorted(manifest["modules"]) != core_modules(package):
        return {}, "modules were added or removed since the build: run `python tools/core.py`"
    return {name: folder / file for name, file in manifest["files"].items()}, ""


def _changed(package: Path, sources: dict[str, list[object]]) -> str:
    """The first source file that differs from the manifest; empty if none does."""
    for name, (size, mtime_ns, known) in sources.items():
        try:
            found = os.stat(f"{package}/{name}")  # noqa: PTH116 - each process does so for each module
        except OSError:
            return name
        if (found.st_size, found.st_mtime_ns) != (size, mtime_ns) and digest(package / name) != known:
            return name
    return ""
