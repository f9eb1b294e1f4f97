"""Additional jars for Spark, downloaded once into the user's cache directory.

``python -m penstock.spark.environment.jars`` (or ``make jars``) downloads them with Maven; a run only checks that they
exist. ``spark.jars.packages`` is not used: it downloads at every start, and fails if the local Maven cache has
descriptions without jars.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock.errors import ConfigError, UnavailableError
from penstock.spark.environment.java import cache_directory

__all__ = ["DELTA", "delta_jars", "delta_settings", "folder", "is_set_up", "main", "resolve"]

DELTA = {"4.1": "io.delta:delta-spark_4.1_2.13:4.4.0", "4.2": "io.delta:delta-spark_4.2_2.13:4.4.0"}
"""Delta Lake for each version of Spark."""
_GROUPS = "io.delta,io.unitycatalog"
"""Groups of artefacts that are downloaded; other dependencies are part of Spark."""
_RESOLVE_S = 600.0
_POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>penstock</groupId><artifactId>jars</artifactId><version>1</version>
  <dependencies>
    <dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version></dependency>
  </dependencies>
</project>
"""
_PARTITIONS = "spark.databricks.delta.snapshotPartitions"
_SETTINGS = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # Default: 50 tasks that compute the state of a table in every batch, which takes minutes on two busy cores.
    _PARTITIONS: "2",
}


def folder(artefact: str) -> Path:
    """Return the directory of the jars of ``artefact`` (group:name:version)."""
    return cache_directory("jars") / artefact.replace(":", "_")


def delta_jars(spark: str | None = None) -> list[Path]:
    """Return the jars of Delta Lake for Spark ``spark`` (default: the installed version).

    Raises:
        ConfigError: no Delta Lake exists for this version, or it was not downloaded.
    """
    artefact = _artefact(spark)
    found = sorted(folder(artefact).glob("*.jar"))
    if not found:
        raise ConfigError(
            "Delta Lake is not set up",
            option="format",
            why=f"{str(folder(artefact))!r} has no jars",
            do="run `make jars`, or `python -m penstock.spark.environment.jars`, once; it needs Maven (mvn)",
        )
    return found


def is_set_up() -> bool:
    """Return True if the Delta Lake jars for the installed Spark exist."""
    try:
        return bool(delta_jars())
    except ConfigError:
        return False


def delta_settings(given: dict[str, str] | None = None, spark: str | None = None) -> dict[str, str]:
    """Return the Spark options for ``format("delta")``, merged with the ``given`` ones; raises as ``delta_jars``."""
    before = given or {}
    jars = ",".join(map(str, delta_jars(spark)))
    settings = _SETTINGS | {"spark.jars": jars}
    settings |= {name: value for name, value in before.items() if name == _PARTITIONS}
    for name in ("spark.jars", "spark.sql.extensions"):
        if before.get(name):
            settings[name] = f"{before[name]},{settings[name]}"
    return settings


def resolve(artefact: str) -> Path:
    """Download ``artefact`` with Maven into its directory, which never exists incomplete.

    Raises:
        ConfigError: Maven is not installed.
        UnavailableError: Maven failed; the error contains its output.
    """
    target = folder(artefact)
    if list(target.glob("*.jar")):
        return target
    maven = shutil.which("mvn")
    if maven is None:
        raise ConfigError("Maven (mvn) is not installed", do="install it (make system), then run this again")
    target.parent.mkdir(parents=True, exist_ok=True)
    group, name, number = artefact.split(":")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".draft-") as draft:
        pom = Path(draft) / "pom.xml"
        pom.write_text(_POM.format(group=group, artifact=name, version=number), encoding="utf-8")
        goal = "dependency:copy-dependencies"
        options = [f"-DoutputDirectory={draft}/lib", f"-DincludeGroupIds={_GROUPS}", "-DincludeScope=runtime"]
        try:
            done = subprocess.run(  # noqa: S603 - Maven with constant arguments
                [maven, "-q", "-B", "-f", str(pom), *options, goal],
                capture_output=True,
                text=True,
                timeout=_RESOLVE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(
                f"Maven did not download {artefact} within {_RESOLVE_S:g} s", do="try again"
            ) from error
        if done.returncode:
            raise UnavailableError(
                f"Maven cannot download {artefact}",
                why=(done.stdout or done.stderr).strip()[-2_000:],
                do="check the network and Maven's settings (~/.m2/settings.xml), then run this again",
            )
        (Path(draft) / "lib").rename(target)
    return target


def _artefact(spark: str | None) -> str:
    try:
        installed = spark or version("pyspark")
    except PackageNotFoundError:
        raise ConfigError("Spark is not installed", do='pip install ".[spark]" in a clone of penstock') from None
    line = ".".join(installed.split(".")[:2])
    artefact = DELTA.get(line)
    if artefact is None:
        raise ConfigError(
            f"there is no Delta Lake for Spark {installed}",
            option="format",
            why="a Delta Lake built for another version of Spark does not work",
            do=f"use Spark {' or '.join(DELTA)}, or `format: parquet`",
        )
    return artefact


def main() -> int:
    """Download the jars for the installed Spark; return the exit status."""
    try:
        target = resolve(_artefact(None))
    except (ConfigError, UnavailableError) as error:
        sys.stderr.write(f"jars: {error}\n")
        return 1
    sys.stdout.write(f"jars: Delta Lake is in {target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
