"""A ``SPARK_HOME`` whose Python processes load the installed, compiled pyspark instead of Spark's archive of it.

Spark puts ``$SPARK_HOME/python/lib/pyspark.zip`` first on the path of every Python process that it starts. The archive
has sources only: each process compiles them anew, which is a second of processor time for each worker, for each planner
and for the reader of each streaming query. pip installs the same files, compiled, next to it. The generated home, in
the user's cache directory, links to what pip installed, and ``pyspark.zip`` in it is a directory with the packages.
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
"""Parts of a Spark distribution's home that Spark looks for; pip installs some of them, users may add others."""
_PACKAGES = ("pyspark", "py4j")

_log = logging.getLogger(__name__)


def check_launcher(environ: Mapping[str, str]) -> None:
    """Check that Spark's launcher can start: it is a bash script in ``SPARK_HOME``.

    Raises:
        ConfigError: ``SPARK_HOME`` has no launcher, or there is no bash on ``PATH``.
    """
    home = environ.get("SPARK_HOME")
    if home is not None and not (Path(home) / "bin" / "spark-submit").is_file():
        raise ConfigError(
            f"SPARK_HOME={home!r} is not a Spark installation",
            option="SPARK_HOME",
            why="bin/spark-submit does not exist there",
            do="unset SPARK_HOME to use the installed pyspark, or set it to the directory of a Spark installation",
        )
    if shutil.which("bash", path=environ.get("PATH", os.defpath)) is None:
        raise ConfigError(
            "Spark cannot start: bash is not on PATH",
            option="PATH",
            why="Spark's launcher (bin/spark-submit) is a bash script",
            do="install bash, or add its directory to PATH",
        )


def spark_home(environ: Mapping[str, str] | None = None) -> Path | None:
    """The home to start Spark with on this machine; None: the one that Spark finds by itself.

    That is so where ``SPARK_HOME`` is set, where pyspark is not a plain installation by pip, and where the cache cannot
    be written.
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
    # Named by where it leads: several installations have one each, and what exists is what would be made.
    key = hashlib.sha256("\n".join(f"{name} {target}" for name, target in links.items()).encode()).hexdigest()[:16]
    home = cache_directory("spark", environ) / key
    try:
        if not home.is_dir():
            _make(home, links)
    except OSError as error:
        _log.warning("Python processes of Spark start slowly: cannot write %s: %s", home.parent, error.strerror)
        return None
    return home


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).absolute().parent if spec is not None and spec.origin is not None else None


def _make(home: Path, links: Mapping[str, Path]) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".home-", dir=home.parent))
    try:
        made.chmod(0o755)
        for name, target in links.items():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (made / name).symlink_to(target)
        # Renamed into place: a second process that starts now sees no home or a whole one.
        made.rename(home)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not home.is_dir():  # else another process was first
            raise
