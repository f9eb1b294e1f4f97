"""A generated ``SPARK_HOME`` whose Python processes load the installed pyspark instead of Spark's archive of it.

Spark puts ``$SPARK_HOME/python/lib/pyspark.zip`` first on the path of every Python process that it starts. The archive
has sources only: each worker, planner and stream reader process compiles them again, which takes a second of CPU time.
pip installs the same files with compiled bytecode next to it. The generated home, in the user's cache directory, links
to the installed files; its ``pyspark.zip`` is a directory with the packages.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from penstock.errors import ConfigError
from penstock.spark.environment.java import cache_directory

__all__ = ["check_launcher", "spark_home"]

_PARTS = ("RELEASE", "bin", "conf", "jars", "kubernetes", "sbin")
"""Entries of ``SPARK_HOME`` that Spark uses; pip installs some of them, users may add others."""
_PACKAGES = ("pyspark", "py4j")

_log = logging.getLogger(__name__)


def check_launcher(environ: Mapping[str, str]) -> None:
    """Check that Spark's launcher, a bash script in ``SPARK_HOME``, can start.

    Raises:
        ConfigError: ``SPARK_HOME`` has no launcher, or bash is not on ``PATH``.
    """
    home = environ.get("SPARK_HOME")
    if home is not None and not (Path(home) / "bin" / "spark-submit").is_file():
        raise ConfigError(
            f"SPARK_HOME={home!r} is not a Spark installation",
            option="SPARK_HOME",
            why="bin/spark-submit does not exist there",
            hint="unset SPARK_HOME to use the installed pyspark, or set it to the directory of a Spark installation",
        )
    if shutil.which("bash", path=environ.get("PATH", os.defpath)) is None:
        raise ConfigError(
            "Spark cannot start: bash is not on PATH",
            option="PATH",
            why="Spark's launcher (bin/spark-submit) is a bash script",
            hint="install bash, or add its directory to PATH",
        )


def spark_home(environ: Mapping[str, str] | None = None, *, create: bool = True) -> Path | None:
    """Return the generated ``SPARK_HOME``, and create it if needed; None: use Spark's default.

    ``create``: False: only its path, at which nothing may exist.

    None if ``SPARK_HOME`` is set, if pyspark was not installed by pip, or if the cache directory is not writable.
    """
    environ = os.environ if environ is None else environ
    packages = {name: found for name in _PACKAGES if (found := _package(name)) is not None}
    installed = packages.get("pyspark")
    if "SPARK_HOME" in environ or installed is None or len(packages) < len(_PACKAGES):
        return None
    if not (installed / "bin" / "spark-submit").is_file() or (installed / "spark-distribution").exists():
        return None
    links = {name: installed / name for name in _PARTS}
    links |= {f"python/lib/pyspark.zip/{name}": package for name, package in packages.items()}
    # The name is a hash of the links: each installation has its own home, and an existing one is current.
    key = hashlib.sha256("\n".join(f"{name} {target}" for name, target in links.items()).encode()).hexdigest()[:16]
    home = cache_directory("spark", environ) / key
    try:
        if create and not home.is_dir():
            _make(home, links)
    except OSError as error:
        _log.warning("Spark's Python processes will start slowly: cannot write %s: %s", home.parent, error.strerror)
        return None
    return home


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).absolute().parent if spec is not None and spec.origin is not None else None


def _make(home: Path, links: Mapping[str, Path]) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".home-", dir=home.parent))
    try:
        temporary.chmod(0o755)
        for name, target in links.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).symlink_to(target)
        # Renamed, so that a concurrent process never sees an incomplete home.
        temporary.rename(home)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not home.is_dir():  # otherwise a concurrent process created it
            raise
