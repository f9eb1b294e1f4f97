"""An archive of the classes that a session of Spark loads, with which Java starts faster (class data sharing).

Java maps the archive instead of reading, checking and linking ten thousand classes of Spark's jars. ``make_archive``
(``penstock pipeline warm-up``) makes it in the user's cache directory, about 190 MB; ``penstock.spark.session`` uses it
if it exists. Its name has a digest of everything that it depends on: Java, Spark's jars and penstock's. Java itself
ignores an archive that was made for another class path.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

from penstock.errors import ConfigError, StorageError, UnavailableError
from penstock.spark.environment.compiled_pyspark import spark_home
from penstock.spark.environment.java import cache_directory, find_java

__all__ = ["archive_path", "installation", "java_options", "make_archive"]

_MAKE_S = 600.0
_SCRATCH = ".making-"
_PACKAGE = Path(__file__).resolve().parents[1]
_QUIET = "-Xlog:disable -Xlog:all=error:stderr"
"""Without warnings, which Java would print on standard output, as of an archive that does not fit a class path."""


def installation(*, create: bool = True) -> Path | None:
    """Return the generated ``SPARK_HOME``, also if a session of this process or of its parent has set it.

    ``create``: False: if it does not exist, only its path.
    """
    given = os.environ.get("SPARK_HOME")
    if given is not None and Path(given).parent == cache_directory("spark"):
        return Path(given)
    return spark_home(create=create)


def archive_path(home: Path, java: Path) -> Path:
    """Return the path of the archive for the Spark installation ``home`` and the runtime ``java``; it may not exist."""
    jars = [*sorted((home / "jars").glob("*.jar")), _PACKAGE / "jvm" / "penstock.jar"]
    files = [java / "bin" / "java", *jars]
    made_for = "\n".join(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
    digest = hashlib.sha256(made_for.encode()).hexdigest()[:16]
    return cache_directory("classes") / f"{_prefix()}-{digest}.jsa"


def java_options(java: Path, home: Path | None, given: str = "") -> str:
    """Return the options with which a session of ``home`` uses its archive; empty if there is none.

    ``given``: options of the user, which follow; they, or those of the environment, may name another archive.
    """
    before = " ".join(os.environ.get(name, "") for name in _OPTIONS)
    if home is None or any(option in f"{before} {given}" for option in _OF_ARCHIVES) or "-Xlog" in before:
        return ""
    try:
        path = archive_path(home, java)
        usable = path.is_file() and not _is_split(path)
    except OSError:
        return ""
    return f"-XX:SharedArchiveFile={path} {_QUIET}" if usable else ""


_OPTIONS = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")
"""Variables with options of Java, which it reads before those of a session: `-Xlog:disable` would end their logging."""
_OF_ARCHIVES = ("-XX:SharedArchiveFile", "-XX:ArchiveClassesAtExit", "-Xshare")


def _is_split(path: Path) -> bool:
    """Return True if Spark would split an option with the path, or remove its quotes."""
    return bool(set(str(path)) & set(" \t\"'"))


def make_archive(options: str = "") -> tuple[Path, bool]:
    """Make the archive if it does not exist; return its path, and True if it was made.

    ``options``: further ones of Java. It starts a session of Spark in another process, for half a minute to three.

    Raises:
        ConfigError: Java or Spark is missing, Spark was not installed by pip, or the cache directory cannot be used.
        UnavailableError: Java cannot make it.
        StorageError: the cache directory is not writable.
    """
    home = installation()
    if home is None:
        raise ConfigError(
            "there is no class archive for this Spark",
            option="SPARK_HOME",
            why="SPARK_HOME is set, or Spark was not installed by pip: its files may change without notice",
            hint="unset SPARK_HOME, or start without an archive",
        )
    try:
        path = archive_path(home, find_java().runtime)
        if path.exists():
            return path, False
        if _is_split(path):
            raise ConfigError(
                f"the class archive cannot be in {str(path.parent)!r}",
                option="XDG_CACHE_HOME",
                why="options of Java in Spark's configuration cannot contain spaces and quotes",
                hint="set XDG_CACHE_HOME to a directory without them",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=_SCRATCH) as scratch:
            made = Path(scratch) / path.name
            _run_session(Path(scratch), f"{options} -XX:ArchiveClassesAtExit={made} {_QUIET}".strip())
            # Java does not check its content, which a loss of power could leave incomplete.
            with made.open("rb") as file:
                os.fsync(file.fileno())
            # Renamed, so that no process ever sees a part of it.
            made.rename(path)
        for other in path.parent.glob(f"{_prefix()}-*.jsa"):
            if other != path:
                other.unlink(missing_ok=True)
        for abandoned in path.parent.glob(f"{_SCRATCH}*"):  # by a process that was killed
            if abandoned.stat().st_mtime < time.time() - 2 * _MAKE_S:
                shutil.rmtree(abandoned, ignore_errors=True)
    except OSError as error:
        raise StorageError(
            f"the class archive cannot be written: {error.strerror or error}",
            path=str(cache_directory("classes")),
            hint="set XDG_CACHE_HOME to a writable directory with 500 MB of free space",
        ) from error
    return path, True


def _prefix() -> str:
    """Return a name for this installation of penstock, which keeps one archive."""
    return f"{zlib.crc32(str(_PACKAGE).encode()):08x}"


def _run_session(scratch: Path, options: str) -> None:
    """Run ``class_archive_session`` with ``options`` of Java, and wait for its Java process.

    Java writes the archive as it ends, after its Python process. It holds the standard output, whose end is awaited.

    Raises:
        UnavailableError: the session failed, or made no archive.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OF_SPARK}
    environment |= {"SPARK_SUBMIT_OPTS": options, "TMPDIR": str(scratch)}
    command = [sys.executable, "-m", "penstock.spark.environment.class_archive_session", str(scratch)]
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MAKE_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"the class archive was not made within {_MAKE_S:g} s", hint="try again") from None
    if done.returncode or not list(scratch.glob("*.jsa")):
        raise UnavailableError(
            "Java cannot make the class archive",
            why=(done.stderr or done.stdout).strip()[-2_000:] or f"its process ended with {done.returncode}",
            hint="set JAVA_HOME to a complete Java runtime of version 17 or 21; without an archive Spark starts slower",
        )


_OF_SPARK = ("SPARK_CONF_DIR", "SPARK_REMOTE", "PYSPARK_SUBMIT_ARGS")
"""Variables with which the session would be another one than those that use the archive."""
